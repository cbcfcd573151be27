"""Our models with timm's numerics give timm's logits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from weights import TOLERANCE, difference, random_model, relative, to_peer

from vitrail import NUMERICS
from vitrail.models.pos_embed import resize_grid

timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

TINY = "vit_tiny_patch16_224"
# name: ours, changes, theirs, options, image size
CASES = {
    "ViT": ("ViT-Ti/16", {}, TINY, {}, (224, 224)),
    "distilled": (
        "ViT-Ti/16",
        {"depth": 2, "distillation": True},
        "deit_tiny_distilled_patch16_224",
        {"depth": 2},
        (224, 224),
    ),
    "no qkv bias": (
        "ViT-Ti/16",
        {"depth": 2, "qkv_bias": False},
        TINY,
        {"depth": 2, "qkv_bias": False},
        (224, 224),
    ),
    "attention pooling": (
        "ViT-Ti/16",
        {"depth": 2, "pool": "map"},
        TINY,
        {"depth": 2, "global_pool": "map", "class_token": False},
        (224, 224),
    ),
    "mean of the patches": (
        "ViT-Ti/16",
        {"depth": 2, "pool": "mean"},
        TINY,
        {"depth": 2, "global_pool": "avg", "class_token": False, "fc_norm": False},
        (224, 224),
    ),
    "oblong": (
        "ViT-Ti/16",
        {"depth": 2, "image_size": (96, 160)},
        TINY,
        {"depth": 2, "img_size": (96, 160)},
        (96, 160),
    ),
    "hybrid": ("R26+ViT-S/32", {"depth": 2}, "vit_small_r26_s32_224", {"depth": 2}, (224, 224)),
    "hybrid root": ("R+ViT-Ti/16", {"depth": 2}, "vit_tiny_r_s16_p8_224", {"depth": 2}, (224, 224)),
    "BiT": ("BiT-R50x1", {}, "resnetv2_50x1_bit", {}, (161, 192)),
    "Mixer": ("Mixer-S/32", {}, "mixer_s32_224", {}, (224, 224)),
}


def load(name, weights, **options):
    """timm's model of that name, with our weights."""
    model = timm.create_model(name, **options)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_match(case, dtype):
    name, changes, their_name, options, size = CASES[case]
    ours = random_model(name, **changes, numerics="timm")
    theirs = load(their_name, to_peer(ours, "timm"), **options)
    assert difference(ours, theirs, size=size, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("size", [(384, 384), (112, 448), (96, 320)], ids=str)
def test_logits_match_at_another_image_size(size):
    ours = random_model("ViT-Ti/16", depth=2, numerics="timm")
    theirs = load(TINY, to_peer(ours, "timm"), depth=2, dynamic_img_size=True)
    assert difference(ours, theirs, size=size) <= TOLERANCE[torch.float32]


def test_registers_layer_scale_and_swiglu_match(dtype):
    changes = {"registers": 4, "layer_scale": 1e-5, "mlp": "swiglu", "mlp_width": 384}
    ours = random_model("ViT-Ti/16", depth=2, numerics="timm", **changes)
    torch.nn.init.zeros_(ours.position.table[0])  # timm's class token has no position here
    weights = to_peer(ours, "timm")
    weights["pos_embed"] = weights["pos_embed"][:, ours.config.num_prefix :]
    theirs = load(
        TINY,
        weights,
        depth=2,
        reg_tokens=4,
        no_embed_class=True,
        init_values=1e-5,
        mlp_layer=timm.layers.SwiGLUPacked,  # its ratio counts both halves of the hidden channels
        act_layer="silu",  # or the gate would be a GELU in spite of the name
    )
    assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("grid", [(24, 24), (7, 28), (6, 20)], ids=str)
@pytest.mark.parametrize(
    ("method", "options"),
    [("timm", {}), ("bilinear", {"interpolation": "bilinear", "antialias": False})],
)
def test_position_resize_matches(grid, method, options):
    table = torch.randn(14, 14, 192, generator=torch.Generator().manual_seed(0))
    resample = partial(timm.layers.resample_abs_pos_embed, num_prefix_tokens=0, **options)
    theirs = resample(table.flatten(0, 1)[None], grid, (14, 14))[0].unflatten(0, grid)
    assert relative(resize_grid(table, grid, method), theirs) <= TOLERANCE[torch.float32]


def test_google_numerics_do_not_match():
    ours = random_model("ViT-Ti/16", numerics="google")
    theirs = load(TINY, to_peer(ours, "timm"))
    assert difference(ours, theirs) > TOLERANCE[torch.float32]


@pytest.mark.parametrize("choice", ["gelu", "group_norm_eps", "conv_eps", "conv_eps_inside_root"])
def test_each_numeric_of_timm_matters(choice):
    google = getattr(NUMERICS["google"], choice)
    numerics = replace(NUMERICS["timm"], **{choice: google})
    ours = random_model("R26+ViT-S/32", depth=1, image_size=64, numerics=numerics)
    theirs = load("vit_small_r26_s32_224", to_peer(ours, "timm"), depth=1, img_size=64)
    error = difference(ours, theirs, size=(64, 64), dtype=torch.float64)
    assert error > TOLERANCE[torch.float64]
