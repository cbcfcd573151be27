"""Images → uint8 tensors of a model's input size, for training, evaluation and prediction.

Pixels are cropped, then resized as bytes by torch's kernel: two to three times as fast as an image
library on the same core. Normalization is done for the whole batch, on the device (`normalize`).
With `backend="pillow"`, images are decoded and resized by Pillow, for results that must agree with
published ones to the last digit. Where a preprocessing has no antialiasing, as Google's, images are
decoded at full size and resized by torch: Pillow always antialiases, and so would scaled decoding.

Shapes: H x W pixels, C channels; arrays are (H, W, C), tensors (C, H, W).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from vitrail.data import augment
from vitrail.data.augment import Box
from vitrail.data.decode import Decoder, EncodedImage, open_image, to_8bit
from vitrail.data.preprocessing import Augmentation, Interpolation, Preprocessing
from vitrail.data.storage import read_file
from vitrail.errors import ConfigError, DataError

Backend = Literal["torch", "pillow"]
MAX_ASPECT = 100  # factor between the aspect ratios of an image and of a size that it covers

PILLOW_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "area": Image.Resampling.BOX,
}


class NamedImage(NamedTuple):
    name: str
    data: bytes  # encoded


ImageInput = NamedImage | str | PathLike[str] | bytes | Image.Image | np.ndarray | Tensor


def as_sequence(images: ImageInput | Sequence[ImageInput]) -> tuple[Sequence[ImageInput], bool]:
    """Return images as a sequence, and whether they were one already."""
    if isinstance(images, list | tuple) and not isinstance(images, NamedImage):
        return images, True
    return [cast(ImageInput, images)], False


def input_name(image: ImageInput, index: int) -> str:
    """Return the path of an image, or its position in the input."""
    if isinstance(image, NamedImage):
        return image.name
    return fspath(image) if isinstance(image, str | PathLike) else f"image {index + 1}"


def read_image(image: ImageInput, channels: int = 3) -> bytes | np.ndarray:
    """Return the bytes of an image file, or pixels uint8 (H, W) or (H, W, C)."""
    match image:
        case NamedImage():
            return image.data
        case str() | PathLike():
            return read_file(fspath(image))
        case bytes() | bytearray() | memoryview():
            return bytes(image)
        case Tensor():
            pixels = image.detach().cpu().numpy()
            return check_pixels(pixels, "(C, H, W)", 0, channels).transpose(1, 2, 0)
        case np.ndarray():
            return check_pixels(image, "(H, W) or (H, W, C)", -1, channels)
        case Image.Image():
            try:
                return np.array(to_8bit(ImageOps.exif_transpose(image)).convert("RGB"))
            except DataError:
                raise
            except Exception as error:  # it may not be decoded yet, which can raise anything
                raise DataError(f"cannot decode the Pillow image: {error}") from error
    raise DataError(
        f"{type(image).__name__} is not an image; expected a path, bytes, a Pillow image or pixels"
    )


def check_pixels(pixels: np.ndarray, shapes: str, axis: int, channels: int) -> np.ndarray:
    """Reject pixels that cannot be converted to this number of channels."""
    is_gray = pixels.ndim == 2 and axis == -1
    if pixels.dtype != np.uint8 or not (is_gray or pixels.ndim == 3) or 0 in pixels.shape:
        raise DataError(
            f"{pixels.dtype} array of shape {pixels.shape} is not an image; expected uint8, "
            f"0 to 255, of shape {shapes}"
        )
    other = 3 if channels == 1 else channels
    if not is_gray and pixels.shape[axis] not in (1, other):
        raise DataError(
            f"pixels of shape {pixels.shape} have {pixels.shape[axis]} channels; expected 1 or "
            f"{other}, as {shapes}"
        )
    return pixels if pixels.flags.writeable else pixels.copy()  # torch warns about read-only arrays


@dataclass(frozen=True, kw_only=True)
class TrainTransform:
    """Random augmentation, a function of the image and the generator."""

    preprocessing: Preprocessing
    augmentation: Augmentation
    channels: int = 3
    backend: Backend = "torch"

    def __post_init__(self) -> None:
        config = self.augmentation.resolve()
        object.__setattr__(self, "augmentation", config)
        if self.channels not in (1, 3) and (config.policy != "none" or config.color_jitter):
            raise ConfigError(
                f"policy={config.policy!r} and color_jitter={config.color_jitter:g} need gray or "
                f"RGB images, not {self.channels} channels; leave them out"
            )

    def __call__(self, data: bytes | np.ndarray, rng: np.random.Generator) -> Tensor:
        config, preprocessing = self.augmentation, self.preprocessing
        size = preprocessing.size
        decoder = "fast" if self.backend == "torch" else "pillow"
        image = LazyImage(data, self.channels, decoder, full_size=not preprocessing.antialias)
        box = Box(0, 0, image.height, image.width)
        if config.crop == "inception" and config.crop_area is not None:
            box = augment.inception_crop(image.height, image.width, rng, area=config.crop_area)
        tensor = resize(
            image.crop(box, size),
            size,
            preprocessing.interpolation,
            antialias=preprocessing.antialias,
            backend=self.backend,
        )
        if config.crop == "padded" and config.padding is not None:
            pixels = tensor.numpy()
            for axis, side in enumerate(size, start=1):
                start = int(rng.integers(2 * config.padding + 1)) - config.padding
                indices = np.abs(np.arange(start, start + side))  # reflected at both borders
                pixels = pixels.take(np.minimum(indices, 2 * (side - 1) - indices), axis)
            tensor = torch.from_numpy(pixels)
        flip = config.flip and rng.random() < 0.5
        if config.policy != "none" or config.color_jitter:
            colored = to_pillow(tensor.permute(1, 2, 0).contiguous().numpy())
            if flip:
                colored = colored.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            if config.color_jitter:
                colored = augment.color_jitter(colored, rng, config.color_jitter)
            if config.policy == "randaugment":
                strength = {"count": config.count, "magnitude": config.magnitude}
                kind = {"flavor": config.flavor, "spread": config.spread}
                colored = augment.rand_augment(colored, rng, **strength, **kind)
            elif config.policy == "trivial":
                magnitude = int(rng.integers(31))
                colored = augment.random_operation(colored, rng, augment.TRIVIAL_AUGMENT, magnitude)
            elif config.policy == "augmix":
                colored = augment.aug_mix(colored, rng)
            tensor = from_pillow(colored)
        elif flip:
            tensor = tensor.contiguous().flip(-1)  # much faster in planes
        if config.erasing and rng.random() < config.erasing:
            tensor = augment.random_erasing(tensor, rng)
        return tensor.contiguous()


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """Deterministic resize and center crop."""

    preprocessing: Preprocessing
    channels: int = 3
    backend: Backend = "torch"

    def __call__(self, data: bytes | np.ndarray, rng: np.random.Generator | None = None) -> Tensor:
        config = self.preprocessing
        decoder = "auto" if self.backend == "torch" else "pillow"
        image = LazyImage(data, self.channels, decoder, full_size=not config.antialias)
        size = config.resize_to or config.size
        if config.resize == "short-side":
            target, size = size, cover_size(image.height, image.width, size)
            if math.prod(size) > MAX_ASPECT * math.prod(target):
                raise DataError(
                    f"aspect ratio of {image.width} x {image.height} pixels is more than a factor "
                    f"of {MAX_ASPECT} from that of the model's input, {target[1]} x {target[0]}; "
                    "crop the image"
                )
        pixels = image.crop(Box(0, 0, image.height, image.width), size)
        tensor = resize(
            pixels, size, config.interpolation, antialias=config.antialias, backend=self.backend
        )
        height, width = config.size
        # an image that is too small is padded with black
        down, across = max(0, height - tensor.shape[1]), max(0, width - tensor.shape[2])
        if down or across:
            top, left = down // 2, across // 2
            tensor = F.pad(tensor, (left, across - left, top, down - top))
        top, left = round((tensor.shape[1] - height) / 2), round((tensor.shape[2] - width) / 2)
        return tensor[:, top : top + height, left : left + width].contiguous()


class LazyImage:
    """Image whose crops are decoded no larger than needed, or at `full_size`."""

    def __init__(
        self, data: bytes | np.ndarray, channels: int, decoder: Decoder, *, full_size: bool
    ) -> None:
        self.channels = channels
        self.decoder: Decoder = decoder
        self.full_size = full_size or decoder == "pillow"
        self.encoded: EncodedImage | None = None
        self.array = np.empty(0, np.uint8)
        if not isinstance(data, np.ndarray):
            self.encoded = open_image(data)
            self.height, self.width = self.encoded.height, self.encoded.width
            return
        array = data[:, :, None] if data.ndim == 2 else data
        self.height, self.width, actual = array.shape
        if actual == 1 < channels:
            array = np.repeat(array, channels, axis=2)
        elif actual == 3 and channels == 1:
            array = np.array(Image.fromarray(array).convert("L"))[:, :, None]  # torch may write
        elif actual != channels:
            raise ConfigError(
                f"images of {actual} channels do not fit a model of {channels}; load it with "
                f"channels={actual}, or fine-tune it with --model.channels {actual}"
            )
        self.array = array

    def crop(self, box: Box, size: tuple[int, int]) -> np.ndarray:
        """Return a crop that will be resized to `size`."""
        array, down, across = self.array, 1.0, 1.0  # pixels, and their scale
        if self.encoded is not None:
            min_size = (
                -(-self.height * size[0] // box.height),
                -(-self.width * size[1] // box.width),
            )
            min_size = None if self.full_size else min_size
            array = self.encoded.pixels(
                channels=self.channels,
                min_size=min_size,
                max_rows=box.top + box.height,
                backend=self.decoder,
            )
            rows = -(-self.height // self.encoded.scale(min_size))  # including those not decoded
            down, across = rows / self.height, array.shape[1] / self.width
        top, left = int(box.top * down), int(box.left * across)
        bottom = max(top + 1, round((box.top + box.height) * down))
        right = max(left + 1, round((box.left + box.width) * across))
        return array[top:bottom, left:right]


def resize(
    pixels: np.ndarray,
    size: tuple[int, int],
    interpolation: Interpolation,
    *,
    antialias: bool = True,
    backend: Backend = "torch",
) -> Tensor:
    """uint8 (H, W, C) → uint8 (C, h, w), possibly in channels-last memory format."""
    if pixels.shape[:2] == size:
        return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    if backend == "pillow" and (antialias or interpolation in ("nearest", "area")):
        if pixels.shape[2] not in (1, 3):  # Pillow has no mode for them
            planes = np.dsplit(pixels, pixels.shape[2])
            return torch.cat([resize(one, size, interpolation, backend=backend) for one in planes])
        image = to_pillow(pixels)
        return from_pillow(image.resize((size[1], size[0]), PILLOW_FILTERS[interpolation]))
    tensor = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # channels last: the fast kernel
    if interpolation in ("bilinear", "bicubic", "lanczos") and antialias:
        return F.interpolate(tensor, size, mode=interpolation, antialias=True)[0]
    if interpolation == "lanczos":
        raise ConfigError("lanczos is not available without antialiasing; use bicubic")
    mode = "nearest-exact" if interpolation == "nearest" else interpolation
    corners = {"align_corners": False} if mode in ("bilinear", "bicubic") else {}
    exact = F.interpolate(tensor.float(), size, mode=mode, **corners)[0]
    return exact.round_().clamp_(0, 255).to(torch.uint8)


def normalize(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 (B, C, H, W) → normalized float, on the device of the batch."""
    mean = torch.tensor(preprocessing.mean, device=images.device)[:, None, None]
    std = torch.tensor(preprocessing.std, device=images.device)[:, None, None]
    scale, shift = 1 / (255 * std), mean / std
    if not images.is_cpu:
        return images.float().mul_(scale).sub_(shift)
    out = torch.empty(images.shape)
    for normalized, pixels in zip(out, images, strict=True):  # one at a time stays in the cache
        normalized.copy_(pixels).mul_(scale).sub_(shift)
    return out


def cover_size(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest size with the image's aspect ratio that covers `size`."""
    return max(size[0], height * size[1] // width), max(size[1], width * size[0] // height)


def to_pillow(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])


def from_pillow(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[:, :, None] if array.ndim == 2 else array).permute(2, 0, 1)
