"""Decode images: the right RGB or gray pixels for every format, or a one-line error.

    decode(data)                                      (height, width, 3), uint8
    image = open_image(data)                          header only: size, format
    image.pixels(channels=1, min_size=(224, 224))     a JPEG may be scaled by 1/2, 1/4 or 1/8

EXIF rotation is applied, alpha is composited on white, color profiles are ignored as in all
published training. Plain JPEGs are decoded by simplejpeg if it is installed, everything else by
Pillow. On intact files the two agree in every pixel, at every scale (largest difference measured:
0); what simplejpeg rejects goes to Pillow, so that the result does not depend on what is installed.
Only training's `fast` decoding differs slightly.

No state, no torch: safe in threads and processes.
"""

import ctypes
import io
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from vitrail.data.image_headers import Header, corrupt, read_header, read_orientation, truncated
from vitrail.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    from vitrail.data.datasets import Dataset

Decoder = Literal["auto", "fast", "pillow"]
MAX_PIXELS = 64 * 2**20  # 8192 x 8192; more is a mistake or an attack
MAX_SIDE = 65_535  # the limit of JPEG and GIF; bounds a row, and the work of Python decoders
MIN_CODED = 2**20  # pixels of a tile or frame that are always allowed
MAX_PADDING = 4  # maximum ratio of the pixels of a tile or frame to those of the image
MAX_PASSES = 16  # over `max_pixels` pixels: scans of a JPEG, frames of an AVIF
CPU_SECONDS = 5.0, 1.0  # per image and per megapixel: 72 s for a PNG of 64 MP that took 1.9 s
MIN_SCALED_SIDE = 16  # below it, libraries round scales differently
ROW_STEP = 8  # rows that remain whole at every scale
CUT_SHORT = r"extraneous bytes before marker 0xd[0-79]"  # libjpeg's warning about unread rows
PLUGINS: dict[str, type[ImageFile.ImageFile]] = {  # listed one by one, or EPS would run Ghostscript
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}
OPTIONAL = {"WebP": WebPImagePlugin.SUPPORTED, "AVIF": AvifImagePlugin.SUPPORTED}


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedImage:
    """An image whose header is read. Height and width are those after EXIF rotation."""

    format: str
    mode: str  # of Pillow: "RGB", "L", "P", "I;16", ...
    height: int
    width: int
    header: Header = field(repr=False)

    def pixels(
        self,
        *,
        channels: int = 3,
        min_size: tuple[int, int] | None = None,
        max_rows: int | None = None,
        backend: Decoder = "auto",
    ) -> np.ndarray:
        """Decode to (height, width, channels), uint8, contiguous and writable; gray is ITU-R 601.

        With `min_size` (height, width), a JPEG is scaled by 1/2, 1/4 or 1/8 while it stays at least
        that large; sides round up, as in libjpeg. The fast backend uses libjpeg's fast DCT and
        upsampling, invisible in training but not bit-exact, and where possible stops after
        `max_rows` (counted before scaling), so that fewer rows are returned.
        """
        if channels not in (1, 3):
            raise ConfigError(
                f"channels={channels}: image files are gray (1) or RGB (3); use arrays instead"
            )
        if backend not in get_args(Decoder):
            raise unknown("backend", backend, get_args(Decoder))
        scale = self.scale(min_size)
        pixels = None
        if backend != "pillow" and self.header.components in (1, 3):
            fast = backend == "fast"
            pixels = self.top_rows(max_rows, channels, scale) if fast and max_rows else None
            if pixels is None:
                pixels = decode_simplejpeg(self.header, channels, scale, fast=fast)
        if pixels is None:
            with open_pillow(self.header) as image:
                if scale > 1:
                    image.draft(image.mode, (image.width // scale, image.height // scale))
                image.load()
                pixels = np.array(to_8bit(image).convert("L" if channels == 1 else "RGB"))
            pixels = pixels.reshape(*pixels.shape[:2], channels)
        orientation = self.header.orientation
        if orientation >= 5:
            pixels = pixels.swapaxes(0, 1)
        if orientation in (2, 3, 6, 7):
            pixels = pixels[:, ::-1]
        if orientation in (3, 4, 7, 8):
            pixels = pixels[::-1]
        return np.ascontiguousarray(pixels)

    def top_rows(self, rows: int, channels: int, scale: int) -> np.ndarray | None:
        """Decode the first rows, if that is less work and the image is stored top down."""
        header, height = self.header, -(-rows // ROW_STEP) * ROW_STEP
        if scale > 1:
            height += ROW_STEP  # sides that do not divide are rounded up
        if header.height_offset is None or header.orientation > 2 or height >= self.height:
            return None
        data = bytearray(header.data)  # the same file with a smaller height in its header
        data[header.height_offset : header.height_offset + 2] = height.to_bytes(2)
        shorter = header._replace(data=bytes(data), size=(height, self.width), height_offset=None)
        return decode_simplejpeg(shorter, channels, scale, fast=True, cut_short=True)

    def scale(self, min_size: tuple[int, int] | None) -> int:
        """Return the divisor, 1, 2, 4 or 8, at which a JPEG is decoded."""
        if not min_size or self.format != "JPEG" or min(self.height, self.width) < MIN_SCALED_SIDE:
            return 1
        for scale in (8, 4, 2):
            height, width = -(-self.height // scale), -(-self.width // scale)
            if height >= min_size[0] and width >= min_size[1]:
                return scale
        return 1


def open_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> EncodedImage:
    """Read the header of an image file; raise a one-line `DataError` if that fails."""
    header = read_header(data)
    mode = {1: "L", 3: "RGB", 4: "CMYK"}.get(header.components or 0, "")
    check_size(header.format, header.size, max_pixels)
    limit = max(max_pixels, MIN_CODED)
    largest = min(limit, max(MIN_CODED, MAX_PADDING * math.prod(header.size or (0, 0))))
    if header.coded_pixels > largest:
        raise DataError(
            f"{header.format} with a tile or frame of {header.coded_pixels:,} pixels, above the "
            f"limit of {largest:,} for its size; save it as PNG or JPEG"
        )
    if header.total_pixels > MAX_PASSES * limit:
        raise DataError(
            f"{header.format} of {header.total_pixels:,} pixels in all scans, tiles or frames, "
            f"above the limit of {MAX_PASSES * limit:,}; save it as PNG or baseline JPEG"
        )
    size, orientation = header.size, header.orientation
    if not mode:
        with open_pillow(header) as image:
            mode, size = image.mode, (image.height, image.width)
            if header.format == "AVIF":
                orientation = read_orientation(image.info.get("exif", b""))
        check_size(header.format, size, max_pixels)
    assert size is not None
    if orientation != header.orientation:
        header = header._replace(orientation=orientation)
    height, width = size if orientation < 5 else size[::-1]
    return EncodedImage(format=header.format, mode=mode, height=height, width=width, header=header)


def decode(
    data: bytes,
    *,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
    min_size: tuple[int, int] | None = None,
    backend: Decoder = "auto",
) -> np.ndarray:
    """Decode an image file: `open_image` and `EncodedImage.pixels` together."""
    image = open_image(data, max_pixels=max_pixels)
    return image.pixels(channels=channels, min_size=min_size, backend=backend)


def check_size(format: str, size: tuple[int, int] | None, max_pixels: int) -> None:
    """Reject an image that is too large, before memory is allocated."""
    if size is None:
        return
    if min(size) < 1:
        raise corrupt(format, "no size in its header")
    if format in ("TIFF", "WebP"):  # Pillow enforces its own limit
        max_pixels = min(max_pixels, Image.MAX_IMAGE_PIXELS or max_pixels)
    if math.prod(size) > max_pixels or max(size) > MAX_SIDE:
        raise DataError(
            f"{format} of {size[1]} x {size[0]} pixels, above the limit of {max_pixels:,} pixels "
            f"and {MAX_SIDE:,} per side; make it smaller"
        )


class LimitedFile(io.BytesIO):
    """File in memory that limits the CPU seconds of this thread between reads.

    This ends loops in Python that ask for more bytes: Pillow's over blocks of 64 kB for JPEG, PNG,
    GIF, BMP and plain TIFF, and over run lengths. It cannot interrupt one call into C, and WebP,
    AVIF, compressed TIFF and simplejpeg decode a whole image in one call. Those are limited by
    `open_image` only, and headers by the number of their segments.
    """

    def limit(self, seconds: float) -> None:
        self.seconds, self.deadline, self.reads = seconds, 0.0, 0
        self.read = self.read_in_time

    def read_in_time(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        is_small = size is not None and 0 <= size < 256
        if self.reads > 1 and not (is_small and self.reads % 256):  # the clock costs as much
            now = time.thread_time()
            self.deadline = self.deadline or now + self.seconds
            if now > self.deadline:
                raise DataError(
                    f"decoding took more than {self.seconds:.0f} CPU seconds; save the image again "
                    "as PNG or JPEG"
                )
        return super().read(size)


@contextmanager
def open_pillow(header: Header) -> Iterator[ImageFile.ImageFile]:
    """Open an image in Pillow; whatever its decoders raise becomes a `DataError`."""
    if header.format == "TIFF":
        silence_libtiff()
    if not OPTIONAL.get(header.format, True):
        raise DataError(f"{header.format} is not supported by this build of Pillow; save it as PNG")
    file = LimitedFile(header.data)
    try:
        image = PLUGINS[header.format](file)
    except Exception as error:
        raise DataError(
            f"{header.format} with a corrupt or unsupported header; save it as PNG or JPEG"
        ) from error
    base, per_megapixel = CPU_SECONDS
    file.limit(base + per_megapixel * image.width * image.height / 1e6)
    try:
        with image:
            yield image
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"out of memory while decoding {header.format}; make it smaller") from error
    except Exception as error:
        if "truncated" in str(error):
            raise truncated(header.format) from error
        raise corrupt(header.format, "damaged pixels") from error
    finally:
        del file.read  # a reference cycle, which would keep the file until garbage collection


def decode_simplejpeg(
    header: Header, channels: int, scale: int, *, fast: bool = False, cut_short: bool = False
) -> np.ndarray | None:
    """Decode a plain JPEG faster; None if simplejpeg is missing or reports a problem.

    libjpeg reports the first problem only. If that is unread rows, which an image that was
    `cut_short` must have, the rows above them are correct, and the file is complete.
    """
    simplejpeg = load_simplejpeg()
    if simplejpeg is None or header.size is None:
        return None
    height, width = least = [-(-side // scale) for side in header.size]
    if scale == 1:
        least = 0, 0  # an eighth of a tiny image has the same size
    pixels = np.empty((height, width, 1 if header.components == 1 else 3), np.uint8)
    try:
        decoded = simplejpeg.decode_jpeg(
            header.data,
            "GRAY" if header.components == 1 else "RGB",
            fastdct=fast,
            fastupsample=fast,
            min_height=least[0],
            min_width=least[1],
            buffer=pixels,
        )
        if decoded.shape != pixels.shape:
            return None
    except Exception as error:
        if not (cut_short and re.search(CUT_SHORT, str(error))):
            return None
    if header.components == 1 and channels == 3:
        return pixels.repeat(3, axis=2)
    if header.components == 3 and channels == 1:
        return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
    return pixels


@cache
def load_simplejpeg() -> ModuleType | None:
    """Return simplejpeg if it is installed and fits the installed NumPy."""
    try:
        import simplejpeg
    except Exception:
        return None
    return simplejpeg


@cache
def silence_libtiff() -> None:
    """Stop libtiff from writing to stderr from C; the `DataError` is sufficient."""
    try:
        ctypes.CDLL(str(Image.core.__file__)).TIFFSetErrorHandler(None)
    except (AttributeError, OSError):
        return  # linked statically into Pillow


def to_8bit(image: Image.Image) -> Image.Image:
    """Convert any mode to 8-bit gray or color, with transparency composited on white."""
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        if image.mode.startswith("I;16"):
            gray = (values >> 8).astype(np.uint8)  # the high byte, as in Pillow for 16-bit RGB
            gray[values == image.info.get("transparency", -1)] = 255
        else:
            low, high = float(values.min()), float(values.max())
            ranges = (1, 255, 65_535, 2**32 - 1) if image.mode == "F" else (255, 65_535, 2**31 - 1)
            # some overshoot is usual
            full = next((white for white in ranges if high <= 1.25 * white), math.nan)
            if not (low >= -0.25 * full):  # comparisons with NaN are false
                raise DataError(
                    f"{image.format} with values from {low:g} to {high:g}; scale them to 0 to 255"
                )
            gray = np.rint(values.clip(0, full) * (255 / full)).astype(np.uint8)
        if isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(262) == 0:
            gray = 255 - gray  # white is zero, which Pillow handles in 8 bits only
        return Image.fromarray(gray)
    if image.has_transparency_data:
        solid = image.convert("LA") if image.mode == "La" else image
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, solid.convert("RGBA"))
    return image if image.mode in ("1", "L", "RGB") else image.convert("RGB")


def to_rgb(pixels: np.ndarray) -> np.ndarray:
    """Return pixels (H, W) or (H, W, C) for display: gray, or the first three channels as RGB."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    return pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, :1].repeat(3, axis=2)


def thumbnail(
    dataset: "Dataset", index: int, side: int = 96, *, enlarge: bool = True
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


def to_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def to_jpeg(image: Image.Image, quality: int = 85) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
