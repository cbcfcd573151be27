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


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown model 'BiT-R50x7'; did you mean 'BiT-R50x\d'"):
        configuration("BiT-R50x7")
    with pytest.raises(ConfigError, match=r"unknown model 'ViT-B/61'; available: ViT-B/8, .*16"):
        configuration("ViT-B/61")
    for almost in ("B/16", "ViT-B"):
        with pytest.raises(ConfigError, match="available: ViT-B/8, ViT-B/14, ViT-B/16"):
            configuration(almost)
    with pytest.raises(ConfigError, match="must be a string such as 'ViT-B/16', not None"):
        configuration(None)
    with pytest.raises(ConfigError, match="`vitrail models` lists"):
        configuration("zebra")


SMALL, BASE, LARGE = ("ViT-S/16", "ViT-B/16", "ViT-L/16")
DINOV2 = {"layer_scale": 1e-5, "patch_size": 14, "image_size": 518}
GIANT = {**DINOV2, "width": 1536, "depth": 40, "heads": 24, "mlp_width": 4096, "mlp": "swiglu"}
DINOV3 = {"position": "rotary", "registers": 4, "key_bias": False, "layer_scale": 1e-5}
PLUS = {**DINOV3, "mlp": "swiglu"}
HUGE_PLUS = {**PLUS, "width": 1280, "depth": 32, "heads": 20, "mlp_width": 5120}
CLIP, SIGLIP = {"pre_norm": True}, {"pool": "map"}
BACKBONES = {  # published image towers: named size, changes, parameters without a head
    "DINOv2 S/14": (SMALL, DINOV2, 22_056_192),
    "DINOv2 B/14": (BASE, DINOV2, 86_579_712),
    "DINOv2 L/14": (LARGE, DINOV2, 304_367_616),
    "DINOv2 g/14": (LARGE, GIANT, 1_136_479_232),
    "DINOv3 S/16": (SMALL, DINOV3, 21_596_160),
    "DINOv3 S+/16": (SMALL, PLUS, 28_692_480),
    "DINOv3 B/16": (BASE, DINOV3, 85_659_648),
    "DINOv3 L/16": (LARGE, DINOV3, 303_128_576),
    "DINOv3 H+/16": (LARGE, HUGE_PLUS, 840_591_360),
    "SigLIP 2 B/16": (BASE, SIGLIP, 92_884_224),
    "SigLIP 2 L/16": (LARGE, {**SIGLIP, "image_size": 256}, 315_956_224),
    "SigLIP 2 So400m/14": ("ViT-So400m/14", SIGLIP, 427_680_704),
    "CLIP B/32": ("ViT-B/32", CLIP, 87_456_000),
    "CLIP B/16": (BASE, CLIP, 85_799_424),
    "CLIP L/14": ("ViT-L/14", CLIP, 303_179_776),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_parameters_of_published_backbones(name):
    size, changes, expected = BACKBONES[name]
    assert num_parameters(configuration(size).change(num_classes=0, **changes)) == expected
