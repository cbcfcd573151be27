"""From a name or a description to a model."""

from typing import Any

import torch

from vitrail.models.bit import BiT
from vitrail.models.config import BitConfig, Config, MixerConfig, Scheme, VitConfig
from vitrail.models.initialization import initialize
from vitrail.models.mixer import MlpMixer
from vitrail.models.names import configuration
from vitrail.models.vit import VisionTransformer

Model = VisionTransformer | BiT | MlpMixer


def create(
    name: str,
    *,
    init: Scheme = "google",
    head_bias: float = 0.0,
    generator: torch.Generator | None = None,
    **changes: Any,
) -> Model:
    """A model with fresh weights, by the name the papers use, with some fields changed.

    >>> model = create("ViT-B/16", num_classes=10, image_size=384)
    """
    config = configuration(name)
    model = build(
        config.change(**changes) if changes else config, device=torch.get_default_device()
    )
    initialize(model, init, head_bias=head_bias, generator=generator)
    return model


def build(config: Config, *, device: torch.device | str = "meta") -> Model:
    """The modules of a description; their weights are shapes alone, or whatever memory held."""
    with torch.device("meta"):
        match config:
            case VitConfig():
                model = VisionTransformer(config)
            case BitConfig():
                model = BiT(config)
            case MixerConfig():
                model = MlpMixer(config)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)
