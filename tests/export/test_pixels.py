"""Preprocessing inside the graph equals `EvalTransform`, to the rounding of a level."""

import numpy as np
import pytest
import torch
from exportable import BASE, run, session_of
from torch.export import Dim

from tiny_models import awake
from vitrail import ConfigError, Metadata, Preprocessing
from vitrail.data.preprocessing import preset
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.export.onnx import Preprocess, to_onnx

pytestmark = pytest.mark.slow

SIDE = (32, 32)
CASES = {  # and the largest difference in levels
    "google": (preset("google", SIDE), 0),
    "transformers": (preset("transformers", SIDE), 1),
    "big_vision": (preset("big_vision", SIDE), 1),
    "timm": (preset("timm", (32, 24)), 2),
    "torchvision": (preset("torchvision", SIDE), 1),
    "fewshot": (preset("fewshot", SIDE), 1),
    "nearest": (Preprocessing(size=SIDE, interpolation="nearest"), 0),
    "lanczos": (Preprocessing(size=SIDE, interpolation="lanczos"), 2),
    "plain bicubic": (Preprocessing(size=SIDE, interpolation="bicubic", antialias=False), 1),
    "black border": (Preprocessing(size=SIDE, resize="short-side", resize_to=(21, 21)), 1),
    "black on two sides": (Preprocessing(size=(32, 31), resize_to=(25, 35)), 1),
    "gray": (preset("transformers", SIDE, 1), 1),
}
SIZES = [(32, 32), (1, 1), (5, 9), (100, 67), (67, 100), (31, 33), (32, 100), (250, 301)]


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_preprocessed_as_in_the_library(case):
    preprocessing, levels = CASES[case]
    channels = len(preprocessing.mean)
    session = session_of(
        Preprocess(preprocessing),
        torch.zeros(2, 35, 37, channels, dtype=torch.uint8),
        {0: Dim("batch"), 1: Dim.DYNAMIC, 2: Dim.DYNAMIC},
    )
    transform = EvalTransform(preprocessing=preprocessing, channels=channels)
    rng = np.random.default_rng(0)
    std = torch.tensor(preprocessing.std)[:, None, None]
    off, total = 0, 0
    for height, width in SIZES:
        pixels = rng.integers(0, 256, (2, height, width, channels), dtype=np.uint8)
        (found,) = run(session, torch.from_numpy(pixels))
        expected = normalize(torch.stack([transform(each) for each in pixels]), preprocessing)
        difference = (found - expected).abs() * 255 * std
        assert difference.max() < levels + 0.01, (height, width)
        off, total = off + int((difference > 0.5).sum()), total + difference.numel()
    assert off / total < 0.02


def test_lanczos_without_antialiasing_is_rejected():
    model = awake(BASE)
    model.metadata = Metadata(
        preprocessing=Preprocessing(size=(8, 8), interpolation="lanczos", antialias=False)
    )
    with pytest.raises(ConfigError, match="lanczos is not available without antialiasing"):
        to_onnx(model, preprocessing=True)
