import pytest

from vitrail import BitConfig, ConfigError
from vitrail.models.registry import configuration
from vitrail.models.vit import build


def num_parameters(config):
    return sum(p.numel() for p in build(config).parameters())


# Published by the authors, or computed from their code by a closed formula.
# name: (1000 classes, no head, 21843 classes and a representation layer, 21843 classes, at 384)
VIT = {
    "ViT-Ti/16": (5_717_416, 5_524_416, 9_777_171, 9_740_115, 5_790_376),
    "ViT-S/32": (22_878_952, 22_493_952, 31_051_347, 30_903_507, 22_915_432),
    "ViT-S/16": (22_050_664, 21_665_664, 30_223_059, 30_075_219, 22_196_584),
    "ViT-B/32": (88_224_232, 87_455_232, 104_843_091, 104_252_499, 88_297_192),
    "ViT-B/16": (86_567_656, 85_798_656, 103_186_515, 102_595_923, 86_859_496),
    "ViT-B/8": (86_576_872, 85_807_872, 103_195_731, 102_605_139, 87_744_232),
    "ViT-L/32": (306_535_400, 305_510_400, 328_949_075, 327_899_475, 306_632_680),
    "ViT-L/16": (304_326_632, 303_301_632, 326_740_307, 325_690_707, 304_715_752),
    "ViT-H/14": (632_045_800, 630_764_800, 660_385_363, 658_745_683, None),
    "ViT-g/14": (1_012_611_432, 1_011_202_432, None, None, None),
    "ViT-G/14": (1_844_440_680, None, None, None, None),
}
PUBLISHED = {
    "R+ViT-Ti/16": 6_337_704,
    "R26+ViT-S/32": 36_431_912,
    "R26+ViT-B/32": 101_383_976,
    "R50+ViT-B/16": 98_659_112,
    "R50+ViT-L/32": 328_994_856,
    "R50+ViT-B/32": 110_945_832,
    "R50+ViT-L/16": 316_483_624,
    "BiT-R50x1": 25_549_352,
    "BiT-R50x3": 217_319_080,
    "BiT-R101x1": 44_541_480,
    "BiT-R152x2": 236_335_208,
    "BiT-R152x4": 936_533_224,
    "BiT-R200x3": 568_633_000,
    "Mixer-S/16": 18_528_264,
    "Mixer-B/32": 60_293_428,
    "Mixer-B/16": 59_880_472,
    "Mixer-L/16": 208_196_168,
    "Mixer-H/14": 432_350_952,
}
MILLIONS = {"Mixer-S/32": 19.10, "Mixer-L/32": 206.94}  # published rounded
BIT_21K = {
    "BiT-R50x1": 68_256_659,
    "BiT-R50x3": 345_399_315,
    "BiT-R101x1": 87_248_787,
    "BiT-R152x2": 321_728_979,
    "BiT-R152x4": 1_107_299_923,
}


@pytest.mark.parametrize("name", VIT)
def test_vit_parameter_counts(name):
    config = configuration(name)
    changes = (
        {},
        {"num_classes": 0},
        {"num_classes": 21843, "representation": config.width},
        {"num_classes": 21843},
        {"image_size": 384},
    )
    for change, published in zip(changes, VIT[name], strict=True):
        if published is not None:
            assert num_parameters(config.change(**change)) == published, change


@pytest.mark.parametrize("name", [*PUBLISHED, *MILLIONS])
def test_hybrid_bit_and_mixer_parameter_counts(name):
    config = configuration(name)
    if name in MILLIONS:
        assert round(num_parameters(config) / 1e6, 2) == MILLIONS[name]
    else:
        assert num_parameters(config) == PUBLISHED[name]
    if name in BIT_21K:
        assert num_parameters(config.change(num_classes=21843)) == BIT_21K[name]


def test_parameter_counts_of_variants():
    assert num_parameters(configuration("ViT-B/16").change(pool="mean")) == 86_566_120
    assert num_parameters(configuration("ViT-H/14").change(image_size=518)) == 633_470_440


def test_names_and_sizes():
    assert configuration("vit-b/16") == configuration("ViT-B/16")
    assert configuration("r50+VIT-b/16") == configuration("R50+ViT-B/16")
    assert isinstance(configuration("bit-r50X1"), BitConfig)
    assert configuration("vit-g/14").depth == 40
    assert configuration("VIT-G/14").depth == 48
    assert configuration("R+ViT-Ti/16").stride == (32, 32)
    small = configuration("ViT-Nano/4")
    assert (small.image_size, small.num_tokens) == (32, 65)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BiT-R50x7", r"unknown model 'BiT-R50x7'; did you mean 'BiT-R50x\d'"),
        ("ViT-B/61", "unknown model 'ViT-B/61'; available: ViT-B/8, .*16"),
        ("B/16", "available: ViT-B/8, ViT-B/14, ViT-B/16"),
        ("ViT-B", "available: ViT-B/8, ViT-B/14, ViT-B/16"),
        (None, "must be a string such as 'ViT-B/16', not None"),
        ("zebra", "`vitrail models` lists"),
    ],
)
def test_unknown_name_suggests_the_nearest(name, message):
    with pytest.raises(ConfigError, match=message):
        configuration(name)
