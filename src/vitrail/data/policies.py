"""How strong each operation is at a given magnitude: the tables of RandAugment and its relatives.

A policy maps the name of an operation to a function (level, sign, size) → amount. Level 0 is the
weakest and 1 the strongest that the table was made for; the sign is +1 or -1, drawn by a coin; the
size is the picture's (width, height). `augmentation.py` draws, `operations.py` does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from PIL.Image import Resampling

from vitrail.data.operations import Fill

Strength = Callable[[float, int, tuple[int, int]], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which operations there are, how far each goes, and how they are drawn."""

    strengths: dict[str, Strength]
    full: float = 30  # the magnitude that is level 1
    most: float = 30  # the largest magnitude there is
    chance: float = 1.0  # that an operation, once drawn, is done
    fill: Fill = 0
    resample: Resampling = Resampling.NEAREST


def fixed(_level: float, _sign: int, _size: tuple[int, int]) -> float:
    """For an operation that has no strength."""
    return 0.0


def either_way(most: float) -> Strength:
    return lambda level, sign, size: sign * most * level


def around_one(most: float, least: float = 0.0) -> Strength:
    return lambda level, sign, size: max(least, 1 + sign * most * level)


def from_to(first: float, last: float) -> Strength:
    return lambda level, sign, size: first + (last - first) * level


def across(share: float) -> Strength:
    return lambda level, sign, size: sign * share * size[0] * level


def down(share: float) -> Strength:
    return lambda level, sign, size: sign * share * size[1] * level


def whole(strength: Strength) -> Strength:
    """Cut off toward zero: 3.9 is 3, and -3.9 is -3."""
    return lambda level, sign, size: int(strength(level, sign, size))


def enhance(strength: Strength) -> dict[str, Strength]:
    return dict.fromkeys(("brightness", "color", "contrast", "sharpness"), strength)


def bits(most: int, fewer: int) -> Strength:
    return lambda level, sign, size: most - round(fewer * level)


# Cubuk et al. 2020 (arXiv:1909.13719) with the ranges of torchvision, which has no inversion.
TORCHVISION: dict[str, Strength] = {
    "identity": fixed,
    "shear_x": either_way(0.3),
    "shear_y": either_way(0.3),
    "translate_x": whole(across(150 / 331)),
    "translate_y": whole(down(150 / 331)),
    "rotate": either_way(30),
    **enhance(around_one(0.9)),
    "posterize": bits(8, 4),
    "solarize": from_to(255, 0),
    "autocontrast": fixed,
    "equalize": fixed,
}
# TensorFlow's first table, where several operations grow weaker as the level rises.
TENSORFLOW: dict[str, Strength] = {
    "autocontrast": fixed,
    "equalize": fixed,
    "invert": fixed,
    "rotate": either_way(30),
    "posterize": whole(from_to(0, 4)),
    "solarize": whole(from_to(0, 256)),
    "solarize_add": whole(from_to(0, 110)),
    **enhance(from_to(0.1, 1.9)),
    "shear_x": either_way(0.3),
    "shear_y": either_way(0.3),
}
TIMM = TENSORFLOW | {"translate_x": across(0.45), "translate_y": down(0.45)}
TIMM_INCREASING = TIMM | {
    "posterize": lambda level, sign, size: 4 - int(4 * level),
    "solarize": lambda level, sign, size: 256 - int(256 * level),
    **enhance(around_one(0.9, least=0.1)),
}
# AugReg (Steiner et al. 2022) and the later ViTs of Google: translations in pixels, for 224.
BIG_VISION = {name: how for name, how in TENSORFLOW.items() if name != "contrast"} | {
    "contrast_by_size": from_to(0.1, 1.9),
    "posterize": lambda level, sign, size: max(1, int(4 * level)),  # a shift by 8 bits is one by 7
    "translate_x": either_way(100),
    "translate_y": either_way(100),
    "cutout": whole(from_to(0, 40)),
}

RAND_AUGMENT = {
    "torchvision": Policy(strengths=TORCHVISION),
    "timm": Policy(
        strengths=TIMM, full=10, most=10, chance=0.5, fill=128, resample=Resampling.BILINEAR
    ),
    "timm-increasing": Policy(
        strengths=TIMM_INCREASING,
        full=10,
        most=10,
        chance=0.5,
        fill=128,
        resample=Resampling.BILINEAR,
    ),
    "big_vision": Policy(strengths=BIG_VISION, full=10, fill=128),
}

# Müller and Hutter 2021 (arXiv:2103.10158), table "wide".
TRIVIAL = Policy(
    strengths=TORCHVISION
    | {
        "shear_x": either_way(0.99),
        "shear_y": either_way(0.99),
        "translate_x": whole(either_way(32)),
        "translate_y": whole(either_way(32)),
        "rotate": either_way(135),
        **enhance(around_one(0.99)),
        "posterize": bits(8, 6),
    }
)

# Hendrycks et al. 2020 (arXiv:1912.02781), with the color operations that torchvision adds.
AUGMIX = Policy(
    strengths={name: how for name, how in TORCHVISION.items() if name != "identity"}
    | {
        "translate_x": whole(across(1 / 3)),
        "translate_y": whole(down(1 / 3)),
        "posterize": bits(4, 4),
    },
    full=9,
    most=9,
    resample=Resampling.BILINEAR,
)
