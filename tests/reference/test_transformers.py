"""Our models with the numerics of transformers give its logits."""

from dataclasses import replace

import pytest
import torch
from weights import TOLERANCE, difference, random_model, to_peer

from vitrail import NUMERICS

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.reference, pytest.mark.slow]


def load(ours):
    """The model of transformers that `ours` describes, with the weights of `ours`."""
    config = transformers.ViTConfig(
        hidden_size=ours.config.width,
        num_hidden_layers=ours.config.depth,
        num_attention_heads=ours.config.heads,
        intermediate_size=ours.config.mlp_width,
        qkv_bias=ours.config.qkv_bias,
        num_labels=ours.config.num_classes,
    )
    model, report = transformers.ViTForImageClassification.from_pretrained(
        None, config=config, state_dict=to_peer(ours, "huggingface"), output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def logits(model, images):
    return model(images, interpolate_pos_encoding=True).logits


def test_logits_match(dtype):
    ours = random_model("ViT-Ti/16", numerics="transformers")
    assert difference(ours, load(ours), call=logits, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("size", [(384, 384), (112, 448), (96, 320)], ids=str)
def test_logits_match_at_another_image_size(size, dtype):
    ours = random_model("ViT-Ti/16", depth=2, numerics="transformers")
    assert difference(ours, load(ours), call=logits, size=size, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("choice", ["gelu", "norm_eps", "position_resize"])
def test_each_numeric_of_transformers_matters(choice):
    google = getattr(NUMERICS["google"], choice)
    numerics = replace(NUMERICS["transformers"], **{choice: google})
    ours = random_model("ViT-Ti/16", depth=1, numerics=numerics)
    error = difference(ours, load(ours), call=logits, size=(96, 320), dtype=torch.float64)
    assert error > TOLERANCE[torch.float64]
