"""Small pictures for pages: made to fit a square, and written into the page itself."""

import base64
import io

import numpy as np
from PIL import Image

from vitrail.data.decoding import open_picture
from vitrail.data.samples import Source
from vitrail.errors import DataError

THUMBNAIL = 96  # pixels a side
JPEG_QUALITY = 85


def thumbnail(
    part: Source, row: int, side: int = THUMBNAIL, *, enlarge: bool = True
) -> Image.Image | None:
    """The whole picture, made to fit a square; None if it cannot be read."""
    try:
        data = part[row].data
        if isinstance(data, bytes):
            data = open_picture(data).pixels(at_least=(side, side))
    except DataError:
        return None
    image = Image.fromarray(in_color(data))
    scale = side / max(image.size)
    if scale > 1 and not enlarge:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC
    return image.resize(size, how)


def in_color(pixels: np.ndarray) -> np.ndarray:
    """What people see of pixels (H, W) or (H, W, C): gray, or the first three channels as RGB."""
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


def inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def inline_smallest(image: Image.Image) -> str:
    """The picture as an address that holds it: PNG or JPEG, whichever is shorter."""
    png, jpeg = to_png(image), to_jpeg(image)
    if len(png) <= len(jpeg):
        return inline(png)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode('ascii')}"


def picture_at(part: Source, row: int, side: int = THUMBNAIL) -> str | None:
    """A sample's picture, no larger than a square, for the `src` of an image."""
    small = thumbnail(part, row, side, enlarge=False)
    return None if small is None else inline_smallest(small)
