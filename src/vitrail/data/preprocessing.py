"""How a picture becomes a model's input, as a value that travels with the weights.

Wrong preprocessing is the most common reason for a good checkpoint to give bad answers; nobody
should have to look it up. This file does not import torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from vitrail.errors import ConfigError, unknown

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "area"]
Resize = Literal["direct", "short-side"]
Preset = Literal[
    "google",
    "big_vision",
    "fewshot",
    "timm",
    "torchvision",
    "transformers",
    "deit",
    "dino",
    "clip",
]
Numbers = tuple[float, ...]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
# Resize, its target as a share of the crop (None: no crop), filter, antialiasing, mean and std.
PRESETS: dict[str, tuple[Resize, tuple[int, int] | None, Interpolation, bool, Any]] = {
    "google": ("direct", None, "bilinear", False, HALF),
    "big_vision": ("short-side", (8, 7), "area", True, HALF),
    "fewshot": ("direct", (8, 7), "bilinear", False, HALF),
    "timm": ("short-side", (10, 9), "bicubic", True, HALF),
    "torchvision": ("short-side", (8, 7), "bilinear", True, IMAGENET),
    "transformers": ("direct", None, "bilinear", True, HALF),
    "deit": ("short-side", (10, 9), "bicubic", True, IMAGENET),
    "dino": ("short-side", (8, 7), "bicubic", True, IMAGENET),
    "clip": ("short-side", (1, 1), "bicubic", True, CLIP),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Resize, cut the middle out, and normalize: (pixel / 255 - mean) / std."""

    size: tuple[int, int]  # height and width of what the model gets
    resize: Resize = "direct"  # both sides, or the short one and the other in proportion
    resize_to: tuple[int, int] | None = None  # pixels before cutting; None: no cutting
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
        if len(self.size) != 2 or min(self.size) < 1:
            raise ConfigError(f"size={self.size} must be (height, width) in pixels")
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            raise ConfigError(
                f"mean={self.mean} and std={self.std} must be one number for each channel, "
                "std above zero"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)


def from_dict(values: Mapping[str, Any]) -> Preprocessing:
    """What `to_dict` wrote; an unknown key or value is refused."""
    known = [f.name for f in fields(Preprocessing)]
    for name in values:
        if name not in known:
            raise unknown("preprocessing setting", name, known)
    try:
        return Preprocessing(**values)
    except TypeError as error:
        raise ConfigError(f"not a preprocessing: {error}") from None


def preset(name: str, size: tuple[int, int], channels: int = 3) -> Preprocessing:
    """What the named library does to an image for a model of this size.

    google          straight to the size, aspect not kept, [-1, 1]: the paper's evaluation
    big_vision      short side to 8/7 of the size, center crop, [-1, 1]
    fewshot         straight to 8/7 of the size, center crop, [-1, 1]: the few-shot protocol
    timm            short side to 10/9 of the size, center crop, [-1, 1]: AugReg
    torchvision     short side to 8/7 of the size, center crop, ImageNet statistics
    transformers    straight to the size, [-1, 1]
    deit            as timm, ImageNet statistics: DeiT, DeiT III
    dino            short side to 8/7 of the size, bicubic, ImageNet statistics: DINO, DINOv2, MAE
    clip            short side to the size, center crop, CLIP's statistics

    The statistics are those of RGB; any other number of channels gets 0.5.
    """
    if name not in PRESETS:
        raise unknown("preprocessing", name, PRESETS)
    resize, share, interpolation, antialias, (mean, std) = PRESETS[name]
    return Preprocessing(
        size=size,
        resize=resize,
        resize_to=share and (size[0] * share[0] // share[1], size[1] * share[0] // share[1]),
        interpolation=interpolation,
        antialias=antialias,
        mean=mean if channels == 3 else (0.5,) * channels,
        std=std if channels == 3 else (0.5,) * channels,
    )
