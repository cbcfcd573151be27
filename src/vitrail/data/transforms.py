"""Encoded pictures → uint8 tensors of a model's size, for training and for evaluation.

Pixels are cut out first and resized after, as unsigned bytes, by torch's own kernel: two to three
times what a picture library does on the same core. Normalization is for the whole batch, on the
device (`normalize`). With `backend="pillow"` pictures are decoded and smoothed by Pillow, for
numbers that must agree with published ones to the last digit. Where a preprocessing asks for no
antialiasing, as Google's does, pictures are decoded whole and torch resizes: Pillow always smooths,
and so would decoding at a half.

Shapes: H x W pixels, C channels; arrays are (H, W, C), tensors (C, H, W).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.data import augmentation, decoding
from vitrail.data.augmentation import Box
from vitrail.data.decoding import Picture, open_picture
from vitrail.data.preprocessing import Interpolation, Preprocessing
from vitrail.data.variation import Augmentation
from vitrail.errors import ConfigError, DataError

Backend = Literal["torch", "pillow"]
MOST_OBLONG = 100  # times that one side may be the other, where the short one is resized

PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "area": Image.Resampling.BOX,
}


@dataclass(frozen=True, kw_only=True)
class TrainTransform:
    """A random version of a picture, decided by the generator alone."""

    preprocessing: Preprocessing
    augmentation: Augmentation
    channels: int = 3
    backend: Backend = "torch"

    def __post_init__(self) -> None:
        what = self.augmentation
        if self.channels not in (1, 3) and (what.policy != "none" or what.color_jitter):
            raise ConfigError(
                f"policy={what.policy!r} and color_jitter={what.color_jitter:g} change gray and "
                f"colors, which {self.channels} channels are not; leave them out"
            )

    def __call__(self, data: bytes | np.ndarray, rng: np.random.Generator) -> Tensor:
        what = self.augmentation
        size = self.preprocessing.size
        backend = "quick" if self.backend == "torch" else "pillow"
        picture = Undecoded(data, self.channels, backend, whole=not self.preprocessing.antialias)
        if what.crop == "padded":
            tensor = self.padded(picture, rng)
        else:
            box = Box(0, 0, picture.height, picture.width)
            if what.crop == "inception":
                box = augmentation.inception_crop(
                    picture.height, picture.width, rng, area=what.crop_area
                )
            tensor = self.resized(picture.cut(box, size), size)
        if what.flip and rng.random() < 0.5:
            tensor = tensor.contiguous().flip(-1)  # much faster in planes
        if what.policy != "none" or what.color_jitter:
            tensor = from_image(self.changed(to_image(tensor), rng))
        if what.erasing and rng.random() < what.erasing:
            tensor = augmentation.random_erasing(tensor, rng)
        return tensor.contiguous()

    def padded(self, picture: "Undecoded", rng: np.random.Generator) -> Tensor:
        """The whole picture at the size, with a border, and of that a part of the size again."""
        size = self.preprocessing.size
        whole = picture.cut(Box(0, 0, picture.height, picture.width), size)
        tensor = self.resized(whole, size)
        box = augmentation.padded_crop(*size, rng, padding=self.augmentation.padding)
        rows = mirrored(box.top, box.height, size[0])
        columns = mirrored(box.left, box.width, size[1])
        return torch.from_numpy(tensor.numpy().take(rows, axis=1).take(columns, axis=2))

    def resized(self, pixels: np.ndarray, size: tuple[int, int]) -> Tensor:
        how = self.preprocessing
        return resize(
            pixels, size, how.interpolation, antialias=how.antialias, backend=self.backend
        )

    def changed(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        what = self.augmentation
        if what.color_jitter:
            share = what.color_jitter
            image = augmentation.color_jitter(
                image, rng, brightness=share, contrast=share, saturation=share, hue=0.0
            )
        match what.policy:
            case "randaugment":
                return augmentation.rand_augment(
                    image,
                    rng,
                    count=what.count,
                    magnitude=what.magnitude,
                    flavor=what.flavor,
                    spread=what.spread,
                )
            case "trivial":
                return augmentation.trivial_augment(image, rng)
            case "augmix":
                return augmentation.aug_mix(image, rng)
        return image


@dataclass(frozen=True, kw_only=True)
class EvaluationTransform:
    """The picture as the preprocessing says; nothing is random."""

    preprocessing: Preprocessing
    channels: int = 3
    backend: Backend = "torch"

    def __call__(self, data: bytes | np.ndarray, rng: np.random.Generator | None = None) -> Tensor:
        how = self.preprocessing
        backend = "auto" if self.backend == "torch" else "pillow"
        picture = Undecoded(data, self.channels, backend, whole=not how.antialias)
        size = how.resize_to or how.size
        if how.resize == "short-side":
            check_oblong(picture.height, picture.width)
            size = in_proportion(picture.height, picture.width, min(size))
        whole = picture.cut(Box(0, 0, picture.height, picture.width), size)
        tensor = resize(
            whole, size, how.interpolation, antialias=how.antialias, backend=self.backend
        )
        return cut_middle(tensor, how.size)


class Undecoded:
    """A picture of which parts can be cut out, decoded no larger than needed, or `whole`."""

    def __init__(
        self,
        data: bytes | np.ndarray,
        channels: int,
        backend: decoding.Decoder,
        *,
        whole: bool = False,
    ) -> None:
        self.channels = channels
        self.backend: decoding.Decoder = backend
        self.whole = whole or backend == "pillow"
        self.picture: Picture | None = None
        if isinstance(data, np.ndarray):
            self.array = with_channels(data, channels)
            self.height, self.width = self.array.shape[:2]
        else:
            self.picture = open_picture(data)
            self.height, self.width = self.picture.height, self.picture.width

    def cut(self, box: Box, size: tuple[int, int]) -> np.ndarray:
        """A part of the picture that will be resized to `size`: decoded no larger than needed."""
        array, down, across = self.decoded(box, size)
        top, left = int(box.top * down), int(box.left * across)
        bottom = max(top + 1, round((box.top + box.height) * down))
        right = max(left + 1, round((box.left + box.width) * across))
        return array[top:bottom, left:right]

    def decoded(self, box: Box, size: tuple[int, int]) -> tuple[np.ndarray, float, float]:
        """Pixels down to the box's end, and by how much they are fewer, down and across."""
        if self.picture is None:
            return self.array, 1.0, 1.0
        least = None
        if not self.whole:
            least = (
                -(-self.height * size[0] // box.height),
                -(-self.width * size[1] // box.width),
            )
        array = self.picture.pixels(
            channels=self.channels,
            at_least=least,
            rows=box.top + box.height,
            backend=self.backend,
        )
        rows = -(-self.height // self.picture.shrink(least))  # of which those below may be missing
        return array, rows / self.height, array.shape[1] / self.width


def resize(
    pixels: np.ndarray,
    size: tuple[int, int],
    interpolation: Interpolation,
    *,
    antialias: bool = True,
    backend: Backend = "torch",
) -> Tensor:
    """uint8 (H, W, C) → uint8 (C, h, w), which may lie in memory with channels last."""
    if pixels.shape[:2] == size:
        return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    if backend == "pillow" and (antialias or interpolation in ("nearest", "area")):
        if pixels.shape[2] not in (1, 3):  # Pillow has no mode for them
            layers = np.dsplit(pixels, pixels.shape[2])
            return torch.cat([resize(one, size, interpolation, backend=backend) for one in layers])
        return from_image(as_image(pixels).resize((size[1], size[0]), PILLOW[interpolation]))
    tensor = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # channels last: the fast kernel
    if interpolation in ("bilinear", "bicubic", "lanczos") and antialias:
        return F.interpolate(tensor, size, mode=interpolation, antialias=True)[0]
    if interpolation == "lanczos":
        raise ConfigError("lanczos without antialiasing does not exist; use bicubic")
    mode = "nearest-exact" if interpolation == "nearest" else interpolation
    corners = {"align_corners": False} if mode in ("bilinear", "bicubic") else {}
    exact = F.interpolate(tensor.float(), size, mode=mode, **corners)[0]
    return exact.round_().clamp_(0, 255).to(torch.uint8)


def normalize(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 (B, C, H, W) → what the model takes, on the device where the batch is."""
    mean = torch.tensor(preprocessing.mean, device=images.device)[:, None, None]
    std = torch.tensor(preprocessing.std, device=images.device)[:, None, None]
    scale, shift = 1 / (255 * std), mean / std
    if not images.is_cpu:
        return images.float().mul_(scale).sub_(shift)
    out = torch.empty(images.shape)
    for picture, pixels in zip(out, images, strict=True):  # one at a time stays in the cache
        picture.copy_(pixels).mul_(scale).sub_(shift)
    return out


def mirrored(start: int, count: int, size: int) -> np.ndarray:
    """Places start to start + count on a line of `size`; those outside are mirrored at its ends."""
    places = np.abs(np.arange(start, start + count))
    return np.minimum(places, 2 * (size - 1) - places)


def cut_middle(tensor: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle of a picture; a picture that is too small is padded with black."""
    height, width = tensor.shape[-2:]
    short = (max(0, size[0] - height), max(0, size[1] - width))
    if any(short):
        up, left = short[0] // 2, short[1] // 2
        tensor = F.pad(tensor, (left, short[1] - left, up, short[0] - up))
        height, width = tensor.shape[-2:]
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return tensor[..., top : top + size[0], left : left + size[1]].contiguous()


def check_oblong(height: int, width: int) -> None:
    """Refuse a picture so thin that its short side, made large, would make the other endless."""
    if max(height, width) > MOST_OBLONG * min(height, width):
        raise DataError(
            f"a picture of {width} x {height} pixels is too thin to be resized by its short side; "
            f"its sides may differ {MOST_OBLONG} times"
        )


def in_proportion(height: int, width: int, short: int) -> tuple[int, int]:
    """The size with this short side and the picture's shape."""
    if height <= width:
        return short, max(short, int(short * width / height))
    return max(short, int(short * height / width)), short


def with_channels(array: np.ndarray, channels: int) -> np.ndarray:
    """Pixels (H, W) or (H, W, any) as (H, W, channels): gray repeated, color weighed."""
    if array.ndim == 2:
        array = array[:, :, None]
    if array.shape[2] == channels:
        return array
    if array.shape[2] == 1:
        return np.repeat(array, channels, axis=2)
    if array.shape[2] == 3 and channels == 1:
        return np.array(Image.fromarray(array).convert("L"))[:, :, None]  # a copy: torch may write
    given = array.shape[2]
    raise ConfigError(
        f"pictures of {given} channels do not fit a model of {channels}; load it with "
        f"channels={given}, or fine-tune it with --model.channels {given}"
    )


def to_image(tensor: Tensor) -> Image.Image:
    return as_image(tensor.permute(1, 2, 0).contiguous().numpy())


def as_image(pixels: np.ndarray) -> Image.Image:
    """Pixels (H, W, 1 or 3) in Pillow."""
    return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])


def from_image(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[:, :, None] if array.ndim == 2 else array).permute(2, 0, 1)
