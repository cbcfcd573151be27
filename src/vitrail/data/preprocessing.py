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
Numbers = tuple[float, ...]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


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
    """What the named library does to a picture for a model of this size.

    google          straight to the size, aspect not kept, [-1, 1]: the paper's evaluation
    big_vision      short side to 8/7 of the size, middle cut out, [-1, 1]
    fewshot         straight to 8/7 of the size, middle cut out, [-1, 1]: the few-shot protocol
    timm            short side to 10/9 of the size, middle cut out, [-1, 1]
    torchvision     short side to 8/7 of the size, middle cut out, ImageNet statistics
    transformers    straight to the size, [-1, 1]
    """
    half = (0.5,) * channels
    imagenet = channels == 3 and name == "torchvision"
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if imagenet else (half, half)

    def larger(up: int, down: int) -> tuple[int, int]:
        return size[0] * up // down, size[1] * up // down

    match name:
        case "google":
            return Preprocessing(size=size, antialias=False, mean=mean, std=std)
        case "transformers":
            return Preprocessing(size=size, mean=mean, std=std)
        case "fewshot":
            return Preprocessing(
                size=size, resize_to=larger(8, 7), antialias=False, mean=mean, std=std
            )
        case "big_vision" | "timm" | "torchvision":
            kinds: dict[str, Interpolation] = {"big_vision": "area", "timm": "bicubic"}
            return Preprocessing(
                size=size,
                resize="short-side",
                resize_to=larger(10, 9) if name == "timm" else larger(8, 7),
                interpolation=kinds.get(name, "bilinear"),
                mean=mean,
                std=std,
            )
    raise unknown(
        "preprocessing",
        name,
        ["google", "big_vision", "fewshot", "timm", "torchvision", "transformers"],
    )
