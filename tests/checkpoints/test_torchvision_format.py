"""torchvision's names in both directions, without torchvision."""

import pytest
import torch
from small_models import VIT, as_checkpoint, load_tensors, random_model, same_weights

from vitrail import CheckpointError
from vitrail.checkpoints import torchvision
from vitrail.checkpoints.rules import write

THEIRS = VIT.change(numerics="torchvision")


def tensors_of(config):
    return write(random_model(config), torchvision.VIT.rules(config))


def with_old_names(tensors):
    """The names before torchvision 0.13."""
    for late, early in {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}.items():
        tensors = {name.replace(late, early): tensor for name, tensor in tensors.items()}
    return tensors


def load(tensors, **settings):
    return load_tensors("torchvision", tensors, settings)[0]


def test_default_heads_override_headless_and_old_files():
    usual = THEIRS.change(width=192, heads=3)
    assert load(tensors_of(usual)).config == usual
    assert load(tensors_of(usual), heads=6).config.heads == 6
    config = THEIRS.change(num_classes=0)  # after `model.heads = nn.Identity()`
    assert same_weights(load(tensors_of(config), heads=2), random_model(config))
    assert torchvision.VIT.unsupported(config) == ["a model without a head"]
    old = load(with_old_names(tensors_of(usual)))
    assert old.config == usual
    assert same_weights(old, random_model(usual))


def test_unsupported_files_raise():
    wide = tensors_of(THEIRS.change(width=64))
    stem = {name.replace("conv_proj.", "conv_proj.conv_last."): t for name, t in wide.items()}
    for tensors, message in (
        (tensors_of(THEIRS), "does not state the number of heads"),
        (wide | with_old_names(wide), "duplicate tensors"),
        (stem, "convolutional stem"),
        (tensors_of(THEIRS.change(width=64, image_size=(8, 12))), "not a square grid"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(tensors)
    weights = as_checkpoint({"cls_token": torch.empty(1, 1, 8)})
    assert torchvision.normalize(weights) is weights
    assert not torchvision.VIT.matches(weights.tensors)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"numerics": "google"}, "gelu='tanh' (it uses 'exact')"),
        ({"numerics": "transformers"}, "norm_eps=1e-12 (it uses 1e-06)"),
        ({"channels": 1}, "channels=1 (it uses 3)"),
        ({"image_size": (8, 12)}, "non-square 8 x 12 images"),
        ({"image_size": 8, "patch_size": (4, 8)}, "non-square 4 x 8 patches"),
        ({"qkv_bias": False}, "qkv_bias=False"),
        ({"pool": "mean"}, "pool='mean'"),
    ],
    ids=str,
)
def test_unsupported_features(changes, feature):
    assert torchvision.VIT.unsupported(THEIRS.change(**changes)) == [feature]
