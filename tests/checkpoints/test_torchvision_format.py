"""torchvision's names in both directions, without torchvision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VIT, as_checkpoint, random_model, same_weights

from vitrail import NUMERICS, CheckpointError, VitConfig
from vitrail.checkpoints import torchvision
from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.load import read_foreign
from vitrail.checkpoints.rules import write

THEIRS = VIT.change(numerics="torchvision")


def weights_of(model, **stated):
    return as_checkpoint(write(model, torchvision.VIT.rules(model.config)), stated)


def load(weights):
    return read_foreign(weights, "torchvision")[0]


@st.composite
def configs(draw):
    """Any ViT that torchvision can express."""
    sizes = st.integers(1, 3)
    heads, patch = draw(sizes), draw(sizes)
    return VitConfig(
        depth=draw(sizes),
        width=heads * draw(sizes),
        mlp_width=draw(st.integers(1, 7)),
        heads=heads,
        patch_size=patch,
        image_size=patch * draw(sizes),
        num_classes=draw(st.sampled_from([1, 2, 5])),
        representation=draw(st.sampled_from([0, 3])),
        numerics=NUMERICS["torchvision"],
    )


@given(config=configs(), early=st.booleans())
@settings(max_examples=40, deadline=None)
def test_round_trip_of_random_configs(config, early):
    model = random_model(config)
    weights = weights_of(model, heads=config.heads)
    if early:
        weights = with_old_names(weights)
    again = load(weights)
    assert again.config == config
    assert same_weights(again, model)
    assert torchvision.VIT.unsupported(config) == []


def with_old_names(weights):
    """The names before torchvision 0.13."""
    names = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}
    entries = {}
    for name, entry in weights.tensors.items():
        for late, early in names.items():
            name = name.replace(late, early)
        entries[name] = entry
    assert entries.keys() != weights.tensors.keys()
    return Checkpoint(entries, weights.settings)


def test_duplicate_tensor_raises():
    weights = weights_of(random_model(THEIRS), heads=2)
    weights.tensors.update(with_old_names(weights).tensors)
    with pytest.raises(CheckpointError, match="duplicate tensors"):
        load(weights)


def test_default_heads_and_override():
    usual = random_model(THEIRS.change(width=192, heads=3))
    assert load(weights_of(usual)).config == usual.config
    assert load(weights_of(usual, heads=6)).config.heads == 6
    with pytest.raises(CheckpointError, match="heads"):
        load(weights_of(random_model(THEIRS)))


def test_headless_file():
    model = random_model(THEIRS.change(num_classes=0))  # after `model.heads = nn.Identity()`
    again = load(weights_of(model, heads=2))
    assert again.config == model.config
    assert same_weights(again, model)
    assert torchvision.VIT.unsupported(model.config) == ["a model without a head"]


def test_conv_stem_raises():
    weights = weights_of(random_model(THEIRS), heads=2)
    for kind in ("weight", "bias"):
        weights.tensors[f"conv_proj.conv_last.{kind}"] = weights.tensors.pop(f"conv_proj.{kind}")
    with pytest.raises(CheckpointError, match="convolutional stem"):
        load(weights)


def test_non_square_grid_raises():
    weights = weights_of(random_model(THEIRS.change(image_size=(8, 12))), heads=2)
    with pytest.raises(CheckpointError, match="square"):
        load(weights)


def test_normalize_ignores_other_formats():
    weights = Checkpoint({"cls_token": LazyTensor((1, 1, 8), torch.empty)})
    assert torchvision.normalize(weights) is weights
    assert not torchvision.VIT.matches(weights.tensors)


@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({"numerics": "google"}, ["gelu='tanh' (it uses 'exact')"]),
        ({"numerics": "transformers"}, ["norm_eps=1e-12 (it uses 1e-06)"]),
        ({"channels": 1}, ["channels=1 (it uses 3)"]),
        ({"image_size": (8, 12)}, ["non-square 8 x 12 images"]),
        (
            {"image_size": 8, "patch_size": (4, 8)},
            ["non-square 4 x 8 patches"],
        ),
        ({"qkv_bias": False}, ["qkv_bias=False"]),
        ({"pool": "mean"}, ["pool='mean'"]),
    ],
    ids=str,
)
def test_unsupported_features(changes, features):
    assert torchvision.VIT.unsupported(THEIRS.change(**changes)) == features
