"""A model as one ONNX file, which says everything about itself."""

import torch

from vitrail.checkpoints.metadata import get_metadata
from vitrail.errors import ConfigError
from vitrail.export.description import about, as_texts
from vitrail.export.graph import Graph
from vitrail.export.networks import network
from vitrail.export.pixels import prepared
from vitrail.models.config import MixerConfig, pair
from vitrail.models.registry import name_of
from vitrail.models.resnet import BiT
from vitrail.models.vit import Model


@torch.no_grad()
def to_onnx(model: Model, *, int8: bool = False, preprocessing: bool = False) -> bytes:
    """The file: `images` or, with preprocessing, `pixels` → `logits` and `features`.

    images   float32 (batch, C, height, width), normalized
    pixels   uint8 (batch, height, width, C), as they come from a picture file
    """
    if int8 and isinstance(model, BiT):
        raise ConfigError(
            f"int8 is for matrix products, and {name_of(model.config)} is made of convolutions; "
            "export it as it is"
        )
    graph = Graph(int8=int8)
    config = model.config
    if preprocessing:
        shape = ("batch", "height", "width", config.channels)
        pixels = graph.reads("pixels", torch.uint8, shape)
        images = prepared(graph, pixels, get_metadata(model).preprocessing)
    else:
        fixed = isinstance(config, MixerConfig)
        sides = pair(config.image_size) if fixed else ("height", "width")
        images = graph.reads("images", torch.float32, ("batch", config.channels, *sides))
    logits, features = network(graph, model, images)
    if logits is not None:
        graph.gives("logits", logits, ("batch", config.num_classes))
    graph.gives("features", features, ("batch", config.num_features))
    return graph.written(as_texts(about(model, int8=int8)))
