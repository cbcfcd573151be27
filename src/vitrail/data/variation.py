"""How training pictures are varied, as values: picture by picture, and within a batch.

`transforms.py` and `mixing.py` do it. This file does not import torch.
"""

from dataclasses import dataclass
from typing import Literal

from vitrail.errors import ConfigError

Policy = Literal["none", "randaugment", "trivial", "augmix"]
Crop = Literal["inception", "padded", "whole"]
Flavor = Literal["torchvision", "timm", "timm-increasing", "big_vision"]
MixStyle = Literal["timm", "big_vision"]


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What is done to a training picture, beside resizing it."""

    crop: Crop = "inception"  # a random part, the picture shifted within a border, or all of it
    crop_area: tuple[float, float] = (0.05, 1.0)  # least and largest share an inception crop takes
    padding: int = 4  # pixels of border for the padded crop
    flip: bool = True  # mirror half of the pictures, left to right
    policy: Policy = "none"  # which random changes of color and shape
    count: int = 2  # RandAugment: how many of them
    magnitude: float = 10  # RandAugment: how strong; up to 30, or 10 in timm's flavors
    flavor: Flavor = "torchvision"  # RandAugment: whose
    spread: float = 0.0  # RandAugment: standard deviation of the magnitude
    color_jitter: float = 0.0  # how much brightness, contrast and saturation may vary
    erasing: float = 0.0  # chance that a random rectangle is blotted out

    def __post_init__(self) -> None:
        low, high = self.crop_area
        if not 0 < low <= high <= 1:
            raise ConfigError(
                f"crop_area={self.crop_area} must be two shares, 0 < low <= high <= 1"
            )


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """What is done to a training batch: pictures and labels mixed with each other."""

    mixup: float = 0.0  # the alpha of mixup, which blends two pictures; 0 leaves it out
    cutmix: float = 0.0  # the alpha of cutmix, which pastes a part of another; 0 leaves it out
    chance: float = 1.0  # share of the batches that are mixed
    style: MixStyle = "timm"  # in big_vision's a picture always keeps the larger share
    after: float = 0.0  # epochs before it begins: pictures that are new need no variation

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix, self.after) < 0 or not 0 <= self.chance <= 1:
            raise ConfigError(
                f"mixup={self.mixup}, cutmix={self.cutmix} and after={self.after} must not be "
                f"negative, and chance={self.chance} a share"
            )
        if self.style == "big_vision" and self.cutmix:
            raise ConfigError("big_vision mixes by mixup alone; leave cutmix out, or style='timm'")
