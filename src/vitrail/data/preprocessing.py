"""Configuration of preprocessing and augmentation. No torch, no NumPy.

`Preprocessing` is saved with the weights: wrong preprocessing is the most common reason for a good
checkpoint to predict badly. `Augmentation` and `Mixing` configure training: their docstrings are
the help of options, and what is None is chosen automatically.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from vitrail.errors import ConfigError, unknown

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "area"]
Resize = Literal["direct", "short-side"]
Preset = Literal[
    "google", "big_vision", "fewshot", "timm", "torchvision", "transformers", "deit", "dino", "clip"
]
Policy = Literal["none", "randaugment", "trivial", "augmix"]
Crop = Literal["inception", "padded", "whole"]
Flavor = Literal["torchvision", "timm", "timm-increasing", "big_vision"]
MixStyle = Literal["timm", "big_vision"]
Numbers = tuple[float, ...]
MAX_PIXELS = 2**24  # of the input and before its crop: 4096 x 4096; a bundle may state any size

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
# Resize mode, resize target as a fraction of the center crop (None: no crop), filter, antialiasing,
# mean and std.
PRESETS: dict[str, tuple[Resize, tuple[int, int] | None, Interpolation, bool, Any]] = {
    "google": ("direct", None, "bilinear", False, HALF),  # the paper: no aspect ratio, [-1, 1]
    "big_vision": ("short-side", (8, 7), "area", True, HALF),
    "fewshot": ("direct", (8, 7), "bilinear", False, HALF),  # the few-shot protocol
    "timm": ("short-side", (10, 9), "bicubic", True, HALF),  # AugReg
    "torchvision": ("short-side", (8, 7), "bilinear", True, IMAGENET),
    "transformers": ("direct", None, "bilinear", True, HALF),
    "deit": ("short-side", (10, 9), "bicubic", True, IMAGENET),  # DeiT, DeiT III
    "dino": ("short-side", (8, 7), "bicubic", True, IMAGENET),  # DINO, DINOv2, MAE
    "clip": ("short-side", (1, 1), "bicubic", True, CLIP),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Resize, center crop, and normalize: (pixel / 255 - mean) / std."""

    size: tuple[int, int]  # height and width of the model's input
    resize: Resize = "direct"  # both sides, or to cover both with the aspect ratio preserved
    resize_to: tuple[int, int] | None = None  # size before the center crop; None: no crop
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    mean: Numbers = (0.5, 0.5, 0.5)
    std: Numbers = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        for name in ("size", "resize_to", "mean", "std"):
            value = getattr(self, name)
            if name in ("size", "resize_to") and isinstance(value, int):
                value = (value, value)
            object.__setattr__(self, name, None if value is None else tuple(value))
        for name, kind in (("interpolation", Interpolation), ("resize", Resize)):
            if getattr(self, name) not in get_args(kind):
                raise unknown(name, getattr(self, name), get_args(kind))
        for name, size in (("size", self.size), ("resize_to", self.resize_to or self.size)):
            if len(size) != 2 or min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
                raise ConfigError(
                    f"{name}={size} must be (height, width), at most {MAX_PIXELS:,} pixels"
                )
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            raise ConfigError(
                f"mean={self.mean} and std={self.std} must have one number per channel, std > 0"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def from_dict(values: Mapping[str, Any]) -> Preprocessing:
    """Read the output of `to_dict`; unknown keys and values are rejected."""
    names = [f.name for f in fields(Preprocessing)]
    for name in values:
        if name not in names:
            raise unknown("preprocessing setting", name, names)
    try:
        return Preprocessing(**values)
    except TypeError as error:
        raise ConfigError(f"invalid preprocessing: {error}") from None


def preset(name: str, size: tuple[int, int], channels: int = 3) -> Preprocessing:
    """Return a preprocessing of `PRESETS` for a model of this input size.

    Its statistics are for RGB; mean and std of any other number of channels are 0.5.
    """
    if name not in PRESETS:
        raise unknown("preprocessing", name, PRESETS)
    resize, ratio, interpolation, antialias, (mean, std) = PRESETS[name]
    return Preprocessing(
        size=size,
        resize=resize,
        resize_to=ratio and (size[0] * ratio[0] // ratio[1], size[1] * ratio[0] // ratio[1]),
        interpolation=interpolation,
        antialias=antialias,
        mean=mean if channels == 3 else (0.5,) * channels,
        std=std if channels == 3 else (0.5,) * channels,
    )


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Augmentation of training images; some defaults depend on the size of the dataset."""

    crop: Crop | None = None
    """Random resized crop (inception), padded random crop, or the whole image."""
    crop_area: tuple[float, float] | None = None
    """Smallest and largest area fraction of an inception crop."""
    padding: int | None = None
    """Padding in pixels of the padded crop."""
    flip: bool | None = None
    """Random horizontal flip (default: enabled)."""
    policy: Policy = "none"
    """Augmentation policy."""
    count: int = 2
    """RandAugment: number of operations."""
    magnitude: float = 10.0
    """RandAugment: magnitude, up to 30, or 10 in timm's flavors."""
    flavor: Flavor = "torchvision"
    """RandAugment: implementation to match."""
    spread: float = 0.0
    """RandAugment: standard deviation of the magnitude."""
    color_jitter: float = 0.0
    """Strength of brightness, contrast and saturation jitter."""
    erasing: float = 0.0
    """Probability of random erasing."""
    views: int = 0
    """Number of fixed augmented views per image, reused across epochs; 0: a new one each time."""

    def __post_init__(self) -> None:
        low, high = self.crop_area or (1, 1)
        if not 0 < low <= high <= 1:
            raise ConfigError(f"crop_area={self.crop_area} must satisfy 0 < low <= high <= 1")
        if self.views < 0:
            raise ConfigError(f"views={self.views} must be 0 or more")

    def resolve(self, **defaults: Any) -> "Augmentation":
        """Return the augmentation without None: from `defaults`, or the usual values."""
        defaults = {"crop": "inception", "crop_area": (0.05, 1.0), "padding": 4, **defaults}
        defaults["flip"] = True
        return replace(self, **{k: v for k, v in defaults.items() if getattr(self, k) is None})


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mixup and CutMix."""

    mixup: float | None = None
    """Mixup alpha; 0 disables it."""
    cutmix: float | None = None
    """CutMix alpha; 0 disables it."""
    chance: float | None = None
    """Probability that a batch is mixed."""
    style: MixStyle = "timm"
    """Mixup as in timm, or as in big_vision, where an image keeps the larger share."""
    after: float | None = None
    """Epochs before mixing starts."""

    def __post_init__(self) -> None:
        numbers = [value or 0.0 for value in (self.mixup, self.cutmix, self.after)]
        if min(numbers) < 0 or not 0 <= (self.chance or 0.0) <= 1:
            raise ConfigError(
                f"mixup={self.mixup}, cutmix={self.cutmix} and after={self.after} must not be "
                f"negative, and chance={self.chance} must be a probability"
            )
        if self.style == "big_vision" and self.cutmix:
            raise ConfigError("style='big_vision' has no CutMix; set cutmix=0 or style='timm'")

    def resolve(self, **defaults: float) -> "Mixing":
        """Return the mixing without None: from `defaults`, or disabled."""
        defaults = {"mixup": 0.0, "cutmix": 0.0, "chance": 1.0, "after": 0.0, **defaults}
        missing = {k: v for k, v in defaults.items() if getattr(self, k) is None}
        return replace(self, **missing)  # pyright: ignore[reportArgumentType]
