"""Our models with timm's numerics give timm's logits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from weights import (
    TOLERANCE,
    difference,
    random_model,
    relative,
    to_timm,
    to_timm_bit,
    to_timm_mixer,
)

from vitrail import NUMERICS
from vitrail.models.pos_embed import resize_grid

timm = pytest.importorskip("timm")
pytestmark = pytest.mark.reference

TINY = "vit_tiny_patch16_224"


def load(name, weights, **options):
    """timm's model of that name, with our weights."""
    model = timm.create_model(name, **options)
    model.load_state_dict(weights)
    return model


def test_vit_gives_the_logits_of_timm(dtype):
    ours = random_model("ViT-Ti/16", numerics="timm")
    theirs = load(TINY, to_timm(ours))
    assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("size", [(384, 384), (112, 448), (96, 320)], ids=str)
def test_another_image_size_gives_the_logits_of_timm(size):
    ours = random_model("ViT-Ti/16", depth=2, numerics="timm")
    theirs = load(TINY, to_timm(ours), depth=2, dynamic_img_size=True)
    assert difference(ours, theirs, size=size) <= TOLERANCE[torch.float32]


def test_a_distilled_vit_gives_the_logits_of_timm(dtype):
    ours = random_model("ViT-Ti/16", depth=2, distillation=True, numerics="timm")
    theirs = load("deit_tiny_distilled_patch16_224", to_timm(ours), depth=2)
    assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]


def test_registers_layer_scale_and_swiglu_give_the_logits_of_timm(dtype):
    changes = {"registers": 4, "layer_scale": 1e-5, "mlp": "swiglu", "mlp_width": 384}
    ours = random_model("ViT-Ti/16", depth=2, numerics="timm", **changes)
    torch.nn.init.zeros_(ours.position.table[0])  # timm's class token has no position here
    weights = to_timm(ours)
    weights["pos_embed"] = weights["pos_embed"][:, 1:]
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


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"qkv_bias": False}, {"qkv_bias": False}),
        ({"pool": "map"}, {"global_pool": "map", "class_token": False}),
        ({"pool": "mean"}, {"global_pool": "avg", "class_token": False, "fc_norm": False}),
        ({"image_size": (96, 160)}, {"img_size": (96, 160)}),
    ],
    ids=["no qkv bias", "attention pooling", "mean of the patches", "oblong"],
)
def test_a_variant_gives_the_logits_of_timm(changes, options, dtype):
    ours = random_model("ViT-Ti/16", depth=2, numerics="timm", **changes)
    theirs = load(TINY, to_timm(ours), depth=2, **options)
    size = changes.get("image_size", (224, 224))
    assert difference(ours, theirs, size=size, dtype=dtype) <= TOLERANCE[dtype]


def test_a_hybrid_gives_the_logits_of_timm(dtype):
    ours = random_model("R26+ViT-S/32", depth=2, numerics="timm")
    theirs = load("vit_small_r26_s32_224", to_timm(ours), depth=2)
    assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]


def test_a_hybrid_of_the_root_alone_gives_the_logits_of_timm(dtype):
    ours = random_model("R+ViT-Ti/16", depth=2, numerics="timm")
    weights = {name.replace("backbone.stem", "backbone"): x for name, x in to_timm(ours).items()}
    theirs = load("vit_tiny_r_s16_p8_224", weights, depth=2)
    assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]


def test_bit_gives_the_logits_of_timm(dtype):
    ours = random_model("BiT-R50x1", numerics="timm")
    theirs = load("resnetv2_50x1_bit", to_timm_bit(ours))
    assert difference(ours, theirs, size=(161, 192), dtype=dtype) <= TOLERANCE[dtype]


def test_mixer_gives_the_logits_of_timm(dtype):
    ours = random_model("Mixer-S/32", numerics="timm")
    theirs = load("mixer_s32_224", to_timm_mixer(ours))
    assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("grid", [(24, 24), (7, 28), (6, 20)], ids=str)
@pytest.mark.parametrize(
    ("method", "options"),
    [("timm", {}), ("bilinear", {"interpolation": "bilinear", "antialias": False})],
)
def test_positions_are_resized_as_timm_does(grid, method, options):
    table = torch.randn(14, 14, 192, generator=torch.Generator().manual_seed(0))
    resample = partial(timm.layers.resample_abs_pos_embed, num_prefix_tokens=0, **options)
    theirs = resample(table.flatten(0, 1)[None], grid, (14, 14))[0].unflatten(0, grid)
    assert relative(resize_grid(table, grid, method), theirs) <= TOLERANCE[torch.float32]


def test_google_numerics_do_not_give_the_logits_of_timm():
    ours = random_model("ViT-Ti/16", numerics="google")
    theirs = load(TINY, to_timm(ours))
    assert difference(ours, theirs) > TOLERANCE[torch.float32]


@pytest.mark.parametrize("choice", ["gelu", "group_norm_eps", "conv_eps", "conv_eps_inside_root"])
def test_no_choice_of_google_may_replace_one_of_timm(choice):
    google = getattr(NUMERICS["google"], choice)
    numerics = replace(NUMERICS["timm"], **{choice: google})
    ours = random_model("R26+ViT-S/32", depth=1, image_size=64, numerics=numerics)
    theirs = load("vit_small_r26_s32_224", to_timm(ours), depth=1, img_size=64)
    error = difference(ours, theirs, size=(64, 64), dtype=torch.float64)
    assert error > TOLERANCE[torch.float64]
