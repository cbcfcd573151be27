"""Preprocessing here and there: equal pixels, or the difference that `vitrail convert` reports."""

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
    "oblong": Preprocessing(size=(24, 36), resize_to=(32, 44), std=(0.1, 0.2, 0.3)),
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
    model = create("ViT-Mu/4", image_size=how.size, num_classes=3, numerics="timm")
    save(model, tmp_path / "bundle", preprocessing=how)
    done = convert(tmp_path / "bundle", tmp_path / "out", library)
    measured = levels(load(tmp_path / "bundle"), their_pixels(tmp_path / "out", library))
    if not done.warnings:
        assert measured <= ROUNDING
    for line in done.warnings:
        reported = int(re.search(r"pixels differ by up to (\d+) of 255$", line)[1])
        assert measured == pytest.approx(reported, abs=2)
        assert reported > 10


def test_center_crops_that_are_not_square_equal_timms(tmp_path):
    how = Preprocessing(size=(24, 36), resize="short-side", resize_to=(26, 40))
    model = create("ViT-Mu/4", image_size=how.size, num_classes=3, numerics="timm")
    save(model, tmp_path / "bundle", preprocessing=how)
    assert convert(tmp_path / "bundle", tmp_path / "out", "timm").warnings == []
    assert levels(load(tmp_path / "bundle"), their_pixels(tmp_path / "out", "timm")) <= ROUNDING


HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TIMM_HALF = {"mean": [0.5] * 3, "std": [0.5] * 3}
SQUARE, LARGER = ({"height": side, "width": side} for side in (36, 40))
CROP = {"size": {"shortest_edge": 40}, "crop_size": SQUARE}
SCALED = {"rescale_factor": 1 / 127.5, **HALF}
PROCESSORS = {  # model type: class of the processor, its arguments
    "vit": ("ViTImageProcessor", {"size": SQUARE, "resample": 3}),
    "deit": ("DeiTImageProcessor", {"size": LARGER, "crop_size": SQUARE}),
    "vit_msn": ("ViTImageProcessor", {"size": SQUARE}),
    "vit_mae": ("ViTImageProcessor", {"size": SQUARE}),
    "ijepa": ("ViTImageProcessor", {"size": SQUARE}),
    "dinov2": ("BitImageProcessor", CROP | {"resample": 2}),
    "dinov3_vit": ("DINOv3ViTImageProcessor", {"size": SQUARE}),
    "clip_vision_model": ("CLIPImageProcessor", CROP),
    "siglip_vision_model": ("SiglipImageProcessor", {"size": SQUARE} | SCALED),
}


@pytest.mark.parametrize("model_type", PROCESSORS)
def test_pixels_of_their_processors(model_type, tmp_path):
    name, arguments = PROCESSORS[model_type]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"image_size": 36, "patch_size": 12}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    randomize(transformers.AutoModel.from_config(config)).save_pretrained(tmp_path)
    getattr(transformers, name)(**arguments).save_pretrained(tmp_path)
    ours = load(tmp_path, log=lambda line: None)
    assert not ours.metadata.assumes_preprocessing
    assert levels(ours, their_pixels(tmp_path, "huggingface")) <= ROUNDING


STATED = ("mean", "std", "crop_pct", "interpolation", "crop_mode")
SQUASHED = {"crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "squash"}


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("vit_tiny_patch16_224", {"crop_pct": 0.9, "interpolation": "bicubic", **TIMM_HALF}),
        ("vit_tiny_patch16_224", SQUASHED),
        ("vit_tiny_patch16_224", {}),
        ("vit_base_patch16_clip_224.openai", None),
        ("vit_base_patch16_siglip_224.v2_webli", None),
        ("vit_small_patch16_dinov3.lvd1689m", None),
        ("vit_small_patch14_dinov2.lvd142m", None),
    ],
)
def test_pixels_of_their_transforms(name, stated, tmp_path):
    arguments = {"img_size": 36, "patch_size": 12, "embed_dim": 32, "depth": 1, "num_heads": 4}
    theirs = timm.create_model(name, **arguments)
    if stated is None:  # what the published model states
        stated = {key: theirs.pretrained_cfg[key] for key in STATED}
    config = {"pretrained_cfg": {"input_size": [3, 36, 36], **stated}}
    timm.models.save_for_hf(theirs, tmp_path, config, arguments, safe_serialization=True)
    assert levels(load(tmp_path), their_pixels(tmp_path, "timm")) <= ROUNDING
