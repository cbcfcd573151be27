"""Preprocessing inside the graph is that of `EvalTransform`, to the rounding of a level."""

import numpy as np
import pytest
import torch
from exportable import BASE

from tiny_models import awake
from vitrail import ConfigError, Metadata, Preprocessing
from vitrail.data.preprocessing import preset
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.export.graph import Graph
from vitrail.export.onnx_file import to_onnx
from vitrail.export.pixels import prepared
from vitrail.export.sessions import open_session

SIDE = (32, 32)
WAYS = {
    "google": (preset("google", SIDE), 0),
    "transformers": (preset("transformers", SIDE), 1),
    "big_vision": (preset("big_vision", SIDE), 1),
    "timm": (preset("timm", (32, 24)), 2),
    "torchvision": (preset("torchvision", SIDE), 1),
    "fewshot": (preset("fewshot", SIDE), 1),
    "nearest": (Preprocessing(size=SIDE, interpolation="nearest"), 0),
    "lanczos": (Preprocessing(size=SIDE, interpolation="lanczos"), 2),
    "plain bicubic": (Preprocessing(size=SIDE, interpolation="bicubic", antialias=False), 1),
    "black around": (Preprocessing(size=SIDE, resize="short-side", resize_to=(21, 21)), 1),
    "black on two sides": (Preprocessing(size=(32, 31), resize_to=(25, 35)), 1),
    "gray": (preset("transformers", SIDE, 1), 1),
}
PICTURES = [(32, 32), (1, 1), (5, 9), (100, 67), (67, 100), (31, 33), (32, 100), (250, 301)]


@pytest.mark.parametrize("way", WAYS)
def test_the_graph_prepares_pictures_as_the_library_does(way):
    how, levels = WAYS[way]
    channels = len(how.mean)
    graph = Graph()
    pixels = graph.reads("pixels", torch.uint8, ("batch", "height", "width", channels))
    graph.gives("images", prepared(graph, pixels, how), ("batch", channels, *how.size))
    session = open_session(graph.written({}), 1)
    transform = EvalTransform(preprocessing=how, channels=channels)
    generator = np.random.default_rng(0)
    off, total = 0, 0
    for height, width in PICTURES:
        batch = generator.integers(0, 256, (2, height, width, channels), dtype=np.uint8)
        (found,) = session.run(None, {"pixels": batch})
        expected = normalize(torch.stack([transform(each) for each in batch]), how).numpy()
        apart = np.abs(found - expected) * 255 * np.array(how.std)[:, None, None]
        assert apart.max() < levels + 0.01, (height, width)
        off, total = off + (apart > 0.5).sum(), total + apart.size
    assert off / total < 0.02


def test_a_file_with_preprocessing_takes_the_pixels_of_a_picture():
    model = awake(BASE)
    session = open_session(to_onnx(model, preprocessing=True), 1)
    (given,) = session.get_inputs()
    assert (given.name, given.type) == ("pixels", "tensor(uint8)")
    assert given.shape == ["batch", "height", "width", 3]
    logits = session.run(["logits"], {"pixels": np.zeros((2, 19, 30, 3), np.uint8)})[0]
    with torch.no_grad():
        expected = model(torch.full((2, 3, 8, 8), -1.0)).numpy()
    assert np.allclose(logits, expected, atol=1e-5)


def test_what_no_library_has_is_refused_here_too():
    model = awake(BASE)
    model.metadata = Metadata(
        preprocessing=Preprocessing(size=(8, 8), interpolation="lanczos", antialias=False)
    )
    with pytest.raises(ConfigError, match="lanczos without antialiasing does not exist"):
        to_onnx(model, preprocessing=True)
