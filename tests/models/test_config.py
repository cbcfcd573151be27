import json
from dataclasses import FrozenInstanceError
from typing import get_args

import numpy as np
import pytest

from vitrail import NUMERICS, BitConfig, ConfigError, MixerConfig
from vitrail.models.config import Library, from_dict, to_dict
from vitrail.models.registry import CONFIGURATIONS

AXIAL, ROWS = {"attention": "axial", "pool": "mean"}, "attention='axial' needs whole rows and col"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_json_round_trip(name):
    config = CONFIGURATIONS[name]
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_equivalent_values_are_normalized(tiny):
    assert tiny.change(image_size=(8, 8)) == tiny.change(image_size=[8, 8]) == tiny
    assert tiny.change(image_size=(8, 12)).grid == (2, 3)
    assert tiny.change(patch_size=(2, 4)).grid == (4, 2)
    numbers = {"image_size": np.int64(8), "depth": np.int32(2), "dropout": np.float32(0.5)}
    vit = tiny.change(**numbers, layer_scale=1)
    assert vit == tiny.change(dropout=0.5, layer_scale=1.0)
    bit = BitConfig(blocks=(np.int64(1), np.int32(2)))
    assert bit.blocks == (1, 2)
    assert json.loads(json.dumps([to_dict(bit), to_dict(vit)]))
    assert tiny.change(numerics="timm").numerics == NUMERICS["timm"]
    assert list(NUMERICS) == list(get_args(Library))
    shared = tiny.change(position_place="shared")  # a new kind resets its placement
    assert shared.change(position="relative").position_place == "every-layer"
    assert shared.change(depth=3).position_place == "shared"
    with pytest.raises(FrozenInstanceError):
        tiny.depth = 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1}, "unknown setting 'lr'; known: depth"),
        ({"num_heads": 2}, r"unknown setting 'num_heads'; did you mean 'heads'\?"),
        ({"embed_dim": 2}, r"unknown setting 'embed_dim'; did you mean 'width'\?"),
        ({"positon": "none"}, r"unknown setting 'positon'; did you mean 'position'\?"),
        ({"pool": "clss"}, r"unknown pool 'clss'; did you mean 'cls'\?"),
        ({"position": "spiral"}, "unknown position 'spiral'"),
        ({"attention": "talking"}, "unknown attention 'talking'; register it first, or use global"),
        ({"numerics": "tim"}, r"unknown numerics 'tim'; did you mean 'timm'\?"),
        ({"width": 9}, "width=9 does not split into heads=2"),
        ({"depth": 0}, "depth=0 must be an integer >= 1"),
        ({"depth": "two"}, "depth='two' must be an integer"),
        ({"num_classes": -1}, "num_classes=-1 must be an integer >= 0"),
        ({"image_size": 9}, "image_size=9 is not a whole number of 4-pixel patches; .*=8"),
        ({"image_size": (8, 9)}, r"image_size=\(8, 9\) .* try image_size=8"),
        ({"image_size": 0}, "image_size=0 must be a positive integer"),
        ({"image_size": (8, 8, 8)}, "must be a positive integer or"),
        ({"dropout": 1.0}, "dropout=1.0 must be a probability"),
        ({"position": "none", "position_place": "shared"}, "no placement 'shared'; use 'stem'"),
        ({"position": "relative", "position_place": "stem"}, "use 'every-layer' or 'shared'"),
        ({"position": "sincos-2d", "width": 10}, "width=10 must be a multiple of 4"),
        ({"registers": 2, "position_place": "shared"}, "registers have no position"),
        ({"distillation": True, "pool": "mean"}, "a distillation token needs pool='cls'"),
        ({"stem": "conv", "patch_size": 6, "image_size": 12}, "must be a power of two"),
        ({"resnet_blocks": (1,)}, "requires stem='resnet'"),
        ({"resnet_blocks": "a"}, "must be positive integers"),
        ({"dropout": "0.1"}, "dropout='0.1' must be a probability"),
        ({"layer_scale": "x"}, "layer_scale='x' must be a number"),
        ({"numerics": None}, "numerics=None must be a name or a Numerics"),
        ({"position": ["learned"]}, "unknown position"),
        ({"distillation": 2}, "distillation=2 must be True or False"),
        ({"depth": True}, "depth=True must be an integer"),
        ({"stem": "resnet", "resnet_blocks": (0,), "image_size": 16}, "must be positive"),
        ({"patch_dropout": 1.0}, "patch_dropout=1.0 must be a probability"),
        ({"patch_dropout": "half"}, "patch_dropout='half' must be a probability"),
        ({"patch_dropout": 0.5, "position": "relative"}, "'relative' .* use position='learned'"),
        (
            {"patch_dropout": 0.5, "position_place": "every-layer"},
            "position='learned' in .*='stem'",
        ),
        ({"patch_dropout": 0.5, "position_place": "shared"}, "position_place='stem'"),
        (AXIAL | {"pool": "cls"}, ROWS),
        (AXIAL | {"registers": 2}, ROWS),
        (AXIAL | {"class_token": True}, ROWS),
        (AXIAL | {"patch_dropout": 0.5}, ROWS),
        (AXIAL | {"position": "relative"}, ROWS),
        (AXIAL | {"position": "rotary"}, ROWS),
    ],
)
def test_invalid_values_raise_helpful_errors(tiny, changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny.change(**changes)


def test_other_families_and_dictionaries_are_validated(tiny):
    with pytest.raises(ConfigError, match="must be positive integers"):
        BitConfig(blocks=(3, 0))
    with pytest.raises(ConfigError, match="image_size=30"):
        MixerConfig(depth=1, width=4, tokens_mlp=4, channels_mlp=4, patch_size=8, image_size=30)
    with pytest.raises(ConfigError, match="16-pixel patches"):
        tiny.change(stem="resnet", resnet_blocks=(1, 1, 1), patch_size=1, image_size=40)
    with pytest.raises(ConfigError, match="unknown model family 'gpt'"):
        from_dict({"family": "gpt"})
    with pytest.raises(ConfigError, match="invalid vit config"):
        from_dict({"family": "vit"})
    with pytest.raises(ConfigError, match="unknown setting 'eps'"):
        from_dict({"family": "bit", "numerics": {"eps": 1}})
