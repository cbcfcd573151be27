"""Our models with the numerics of transformers give its logits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from weights import TOLERANCE, difference, random_model, relative, to_peer

from vitrail import NUMERICS
from vitrail.models.pos_embed import resize_grid

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.reference, pytest.mark.slow]


def load(ours, kind="ViTForImageClassification"):
    """The model of transformers that `ours` describes, with the weights of `ours`."""
    config = transformers.ViTConfig(
        hidden_size=ours.config.width,
        num_hidden_layers=ours.config.depth,
        num_attention_heads=ours.config.heads,
        intermediate_size=ours.config.mlp_width,
        qkv_bias=ours.config.qkv_bias,
        num_labels=ours.config.num_classes,
        pooler_output_size=ours.config.representation or None,
    )
    model, report = getattr(transformers, kind).from_pretrained(
        None, config=config, state_dict=to_peer(ours, "huggingface"), output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def logits(model, images):
    return model(images, interpolate_pos_encoding=True).logits


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_logits_match(qkv_bias, dtype):
    ours = random_model("ViT-Ti/16", qkv_bias=qkv_bias, numerics="transformers")
    assert difference(ours, load(ours), call=logits, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("size", [(384, 384), (112, 448), (96, 320)], ids=str)
def test_logits_match_at_another_image_size(size, dtype):
    ours = random_model("ViT-Ti/16", depth=2, numerics="transformers")
    assert difference(ours, load(ours), call=logits, size=size, dtype=dtype) <= TOLERANCE[dtype]


def test_representation_layer_is_the_pooler(dtype):
    ours = random_model(
        "ViT-Ti/16", depth=2, representation=64, num_classes=0, numerics="transformers"
    )
    theirs = load(ours, "ViTModel")
    error = difference(ours, theirs, call=lambda m, x: m(x).pooler_output, dtype=dtype)
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("grid", [(24, 24), (7, 28), (6, 20)], ids=str)
def test_position_resize_matches(grid, dtype):
    table = torch.randn(14, 14, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    theirs = F.interpolate(table.permute(2, 0, 1)[None], grid, mode="bicubic", align_corners=False)
    ours = resize_grid(table, grid, "transformers")
    assert relative(ours, theirs[0].permute(1, 2, 0)) <= TOLERANCE[dtype]


def test_google_numerics_do_not_match():
    ours = random_model("ViT-Ti/16", numerics="google")
    assert difference(ours, load(ours), call=logits) > TOLERANCE[torch.float32]


@pytest.mark.parametrize("choice", ["gelu", "norm_eps", "position_resize"])
def test_each_numeric_of_transformers_matters(choice):
    google = getattr(NUMERICS["google"], choice)
    numerics = replace(NUMERICS["transformers"], **{choice: google})
    ours = random_model("ViT-Ti/16", depth=1, numerics=numerics)
    error = difference(ours, load(ours), call=logits, size=(96, 320), dtype=torch.float64)
    assert error > TOLERANCE[torch.float64]
