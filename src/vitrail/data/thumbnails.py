"""Thumbnails for HTML pages, and images as data URLs."""

import base64
import io

import numpy as np
from PIL import Image

from vitrail.data.datasets import Dataset
from vitrail.data.decode import open_image
from vitrail.errors import DataError

THUMBNAIL = 96  # pixels per side
JPEG_QUALITY = 85


def thumbnail(
    dataset: Dataset, index: int, side: int = THUMBNAIL, *, enlarge: bool = True
) -> Image.Image | None:
    """Resize an image to fit a square; None if it cannot be read."""
    try:
        data = dataset[index].data
        if isinstance(data, bytes):
            data = open_image(data).pixels(min_size=(side, side))
    except DataError:
        return None
    image = Image.fromarray(to_rgb(data))
    scale = side / max(image.size)
    if scale > 1 and not enlarge:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC)


def to_rgb(pixels: np.ndarray) -> np.ndarray:
    """Return pixels (H, W) or (H, W, C) for display: gray, or the first three channels as RGB."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    return pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, :1].repeat(3, axis=2)


def to_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def to_jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def data_url(data: bytes, format: str = "png") -> str:
    return f"data:image/{format};base64,{base64.b64encode(data).decode('ascii')}"


def smallest_data_url(image: Image.Image) -> str:
    """Encode as PNG or JPEG, whichever is smaller."""
    png, jpeg = to_png(image), to_jpeg(image)
    return data_url(png) if len(png) <= len(jpeg) else data_url(jpeg, "jpeg")


def thumbnail_url(dataset: Dataset, index: int, side: int = THUMBNAIL) -> str | None:
    """Return a thumbnail, not enlarged, for the `src` of an <img>; None if it cannot be read."""
    image = thumbnail(dataset, index, side, enlarge=False)
    return None if image is None else smallest_data_url(image)
