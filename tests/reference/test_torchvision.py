"""Our models with torchvision's numerics give torchvision's logits."""

import pytest
from weights import TOLERANCE, difference, random_model, relative, to_peer

from vitrail.models.pos_embed import resize_grid

peer = pytest.importorskip("torchvision.models.vision_transformer")
pytestmark = pytest.mark.reference


def load(ours, weights, image_size=224):
    """The model of torchvision that `ours` describes, with `weights`."""
    model = peer.VisionTransformer(
        image_size=image_size,
        patch_size=16,
        num_layers=ours.config.depth,
        num_heads=ours.config.heads,
        hidden_dim=ours.config.width,
        mlp_dim=ours.config.mlp_width,
        num_classes=ours.config.num_classes,
        representation_size=ours.config.representation or None,
    ).to(ours.head.weight.dtype)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("changes", [{}, {"depth": 2, "representation": 64}], ids=str)
def test_logits_match(changes, dtype):
    ours = random_model("ViT-Ti/16", **changes, numerics="torchvision")
    theirs = load(ours, to_peer(ours, "torchvision"))
    assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("side", [96, 384])
def test_logits_match_at_another_image_size(side, dtype):
    ours = random_model("ViT-Ti/16", depth=2, numerics="torchvision").to(dtype)
    weights = peer.interpolate_embeddings(side, 16, to_peer(ours, "torchvision"))
    theirs = load(ours, weights, image_size=side)
    assert difference(ours, theirs, size=(side, side), dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("side", [6, 24])
def test_position_resize_matches(side, dtype):
    ours = random_model("ViT-Ti/16", depth=1, numerics="torchvision").to(dtype)
    table = ours.position.table[1:].unflatten(0, (14, 14))
    weights = peer.interpolate_embeddings(16 * side, 16, to_peer(ours, "torchvision"))
    theirs = weights["encoder.pos_embedding"][0, 1:].unflatten(0, (side, side))
    assert relative(resize_grid(table, (side, side), "torchvision"), theirs) <= TOLERANCE[dtype]


def test_google_numerics_do_not_match():
    ours = random_model("ViT-Ti/16", numerics="google")
    theirs = load(ours, to_peer(ours, "torchvision"))
    assert difference(ours, theirs) > TOLERANCE[ours.head.weight.dtype]
