"""Our attention maps, made beside a fused forward pass, are those that transformers can output."""

import pytest
import torch
from test_transformers import load
from weights import random_model

from vitrail.inspection.attention import iter_layers
from vitrail.inspection.relevance import rollout

pytest.importorskip("transformers")
pytestmark = [pytest.mark.reference, pytest.mark.slow]
TOLERANCE = 1e-6  # of attention, which is 0 to 1

SIZES = [(224, 224), (112, 448), (96, 160)]


@torch.no_grad()
def both(size, dtype=torch.float32):
    """Our model, images, and what the model of transformers attends to with the same weights."""
    ours = random_model("ViT-Ti/16", depth=3, numerics="transformers").to(dtype)
    theirs = load(ours).to(dtype).eval()
    theirs.set_attn_implementation("eager")  # its fused attention outputs no maps
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = theirs(images, output_attentions=True, interpolate_pos_encoding=True).attentions
    assert len(expected) == 3
    return ours, images, expected


@pytest.mark.parametrize("size", SIZES, ids=str)
@torch.no_grad()
def test_attention_maps_match(size, dtype):
    ours, images, expected = both(size, dtype)
    for map_, their in zip(ours.attention_maps(images), expected, strict=True):
        assert map_.shape == their.shape
        assert their.max() > 0.05
        assert (map_ - their).abs().max() <= TOLERANCE
    for layer, their in zip(iter_layers(ours, images), expected, strict=True):
        for some, rows in layer.slices():
            map_ = layer.scores(some, rows).softmax(dim=-1)
            assert (map_ - their[some, :, rows]).abs().max() <= TOLERANCE


@torch.no_grad()
def test_rollout_matches():
    ours, images, expected = both((96, 160))
    product = torch.eye(61, dtype=torch.float64)
    for attention in expected:
        layer = attention.double().mean(dim=1) + torch.eye(61)
        product = layer / layer.sum(dim=-1, keepdim=True) @ product
    row = product[:, 0, 1:].unflatten(1, (6, 10))
    error = rollout(ours, images) - row / row.amax(dim=(1, 2), keepdim=True)
    assert error.abs().max() <= TOLERANCE
