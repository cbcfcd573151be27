"""Preprocessing here and there: equal pixels, or the difference that `vitrail convert` reports."""

import json
import re

import pytest
import torch
from PIL import Image
from weights import randomize

from vitrail import Preprocessing, create, load, save
from vitrail.checkpoints.save import ROUNDING, convert, zone_plate
from vitrail.data.preprocessing import PRESETS, preset

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

SIZE = (36, 36)  # crops of which have even margins: transformers rounds odd ones down
IMAGE = Image.fromarray(zone_plate(3 * SIZE[0], 4 * SIZE[1], 3))
OTHERS = {
    "squash and crop": Preprocessing(size=SIZE, resize_to=(40, 44), interpolation="bicubic"),
    "lanczos": Preprocessing(size=SIZE, interpolation="lanczos", std=(0.1, 0.2, 0.3)),
}


def their_pixels(folder, library):
    """The image as the library prepares it for the model in a folder."""
    if library == "huggingface":
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        return processor(IMAGE, return_tensors="pt").pixel_values
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return transform(IMAGE)[None]


def levels(ours, theirs):
    """The largest difference of pixels, of 255."""
    std = torch.tensor(ours.metadata.preprocessing.std)[:, None, None]
    difference = (ours.metadata.prepare(IMAGE) - theirs) * std
    return float(255 * difference.abs().max())


@pytest.mark.parametrize("library", ["huggingface", "timm"])
@pytest.mark.parametrize("name", [*PRESETS, *OTHERS])
def test_reported_difference_is_the_real_one(name, library, tmp_path):
    how = OTHERS.get(name) or preset(name, SIZE)
    model = create("ViT-Mu/4", image_size=SIZE, num_classes=3, numerics="timm")
    save(model, tmp_path / "bundle", preprocessing=how)
    done = convert(tmp_path / "bundle", tmp_path / "out", library)
    measured = levels(load(tmp_path / "bundle"), their_pixels(tmp_path / "out", library))
    if not done.warnings:
        assert measured <= ROUNDING
    for line in done.warnings:
        reported = int(re.search(r"pixels differ by up to (\d+) of 255$", line)[1])
        assert measured == pytest.approx(reported, abs=2)
        assert reported > 10


HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SQUARE = {"height": 36, "width": 36}
PROCESSORS = {
    "ViTImageProcessor": {"size": SQUARE, "resample": 3},
    "DeiTImageProcessor": {"size": {"height": 40, "width": 40}, "crop_size": SQUARE},
    "CLIPImageProcessor": {"size": {"shortest_edge": 40}, "crop_size": SQUARE},
    "BitImageProcessor": {"size": {"shortest_edge": 40}, "crop_size": SQUARE, "resample": 2},
    "SiglipImageProcessor": {"size": SQUARE, "rescale_factor": 1 / 127.5, **HALF},
    "DINOv3ViTImageProcessor": {"size": SQUARE},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_of_their_processors(name, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=16, image_size=36, patch_size=12)
    randomize(transformers.ViTForImageClassification(config)).save_pretrained(tmp_path)
    getattr(transformers, name)(**PROCESSORS[name]).save_pretrained(tmp_path)
    assert levels(load(tmp_path), their_pixels(tmp_path, "huggingface")) <= ROUNDING


@pytest.mark.parametrize(
    "stated",
    [
        {"crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3},
        {"crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "squash"},
        {},
    ],
    ids=str,
)
def test_pixels_of_their_transforms(stated, tmp_path):
    arguments = {"img_size": 36, "patch_size": 12, "embed_dim": 16, "depth": 1, "num_heads": 2}
    theirs = timm.create_model("vit_tiny_patch16_224", **arguments, num_classes=2)
    stated = {"input_size": [3, 36, 36], **stated}
    timm.models.save_for_hf(theirs, tmp_path, {"pretrained_cfg": stated}, safe_serialization=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["model_args"] = arguments
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert levels(load(tmp_path), their_pixels(tmp_path, "timm")) <= ROUNDING
