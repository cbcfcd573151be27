"""Our models with timm's numerics give timm's logits."""

from dataclasses import replace

import pytest
import torch
from weights import TOLERANCE, difference, random_model, to_peer

from vitrail import NUMERICS

timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

TINY = "vit_tiny_patch16_224"
CASES = {  # ours, theirs, image size; test_timm_files.py has all variants, at small sizes
    "ViT": ("ViT-Ti/16", TINY, (224, 224)),
    "hybrid": ("R26+ViT-S/32", "vit_small_r26_s32_224", (224, 224)),
    "BiT": ("BiT-R50x1", "resnetv2_50x1_bit", (161, 192)),
    "Mixer": ("Mixer-S/32", "mixer_s32_224", (224, 224)),
}


def load(name, weights, **options):
    """timm's model of that name, with our weights."""
    model = timm.create_model(name, **options)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_match(case, dtype):
    name, their_name, size = CASES[case]
    short = {"depth": 2} if case == "hybrid" else {}
    ours = random_model(name, **short, numerics="timm")
    theirs = load(their_name, to_peer(ours, "timm"), **short)
    assert difference(ours, theirs, size=size, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("size", [(384, 384), (112, 448), (96, 320)], ids=str)
def test_logits_match_at_another_image_size(size):
    ours = random_model("ViT-Ti/16", depth=2, numerics="timm")
    theirs = load(TINY, to_peer(ours, "timm"), depth=2, dynamic_img_size=True)
    assert difference(ours, theirs, size=size) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("choice", ["gelu", "group_norm_eps", "conv_eps", "conv_eps_inside_root"])
def test_each_numeric_of_timm_matters(choice):
    google = getattr(NUMERICS["google"], choice)
    numerics = replace(NUMERICS["timm"], **{choice: google})
    ours = random_model("R26+ViT-S/32", depth=1, image_size=64, numerics=numerics)
    theirs = load("vit_small_r26_s32_224", to_peer(ours, "timm"), depth=1, img_size=64)
    error = difference(ours, theirs, size=(64, 64), dtype=torch.float64)
    assert error > TOLERANCE[torch.float64]
