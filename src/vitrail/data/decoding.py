"""Picture files → pixels: the right RGB or gray for every format, and one line for what is none.

    decode(data)                                    (height, width, 3), uint8
    picture = open_picture(data)                    the header only: sides, format
    picture.pixels(channels=1, at_least=(224, 224)) a JPEG may come at 1/2, 1/4 or 1/8

Rotation by EXIF is applied, alpha lies on white, color profiles are ignored as in all published
training. Plain JPEGs are decoded by simplejpeg if it is installed, everything else by Pillow. On
undamaged files the two agree in every pixel, at every scale (largest difference measured: 0); what
simplejpeg refuses goes to Pillow, so that the outcome never depends on what is installed.

No state, no torch: threads and processes may decode as they like.
"""

import ctypes
import io
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Literal, get_args

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from vitrail.data.headers import Header, a, damaged, orientation, read_header, too_short
from vitrail.errors import ConfigError, DataError, unknown

Decoder = Literal["auto", "quick", "pillow"]
MAX_PIXELS = 64 * 2**20  # 8192 x 8192; more is a mistake or an attack
MAX_SIDE = 65_535  # JPEG's and GIF's own limit; keeps a row, and decoders in Python, small
MIN_CODED = 2**20  # pixels that may always be computed on the way: one large tile
MAX_PADDING = 4  # times the pixels of an image that one tile or frame may have
MAX_PASSES = 16  # over `max_pixels` pixels: scans of a JPEG, frames of an AVIF
CPU_SECONDS = 5.0, 1.0  # per image and per megapixel: 72 s for a PNG of 64 MP that took 1.9 s
SMALLEST_SCALED = 16  # pixels on the short side, below which libraries round scales differently
STEP = 8  # rows that become a whole number of rows at every scale
CUT_SHORT = r"extraneous bytes before marker 0xd[0-79]"  # what libjpeg says of rows it was not told
PLUGINS: dict[str, type[ImageFile.ImageFile]] = {  # named one by one, or EPS would run Ghostscript
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
class Picture:
    """A picture that is not decoded yet. Sides are those of the upright picture."""

    format: str
    mode: str  # as Pillow calls it: "RGB", "L", "P", "I;16", ...
    height: int
    width: int
    header: Header = field(repr=False)

    def pixels(
        self,
        *,
        channels: int = 3,
        at_least: tuple[int, int] | None = None,
        rows: int | None = None,
        backend: Decoder = "auto",
    ) -> np.ndarray:
        """(height, width, channels), uint8, contiguous and writable; gray is ITU-R 601.

        `at_least` lets a JPEG come smaller, by 2, 4 or 8, if both sides stay at least that. Sides
        that do not divide round up, as in libjpeg. The quick backend takes libjpeg's shortcuts,
        which nobody sees in training but a comparison of numbers would, and where it can it stops
        after so many `rows` (counted before scaling), so that fewer come back.
        """
        if channels not in (1, 3):
            raise ConfigError(
                f"channels={channels}: picture files are gray (1) or RGB (3); give arrays instead"
            )
        if backend not in get_args(Decoder):
            raise unknown("backend", backend, get_args(Decoder))
        shrink = self.shrink(at_least)
        stored = None
        if backend != "pillow" and self.header.layers in (1, 3):
            quick = backend == "quick"
            stored = self.upper(rows, channels, shrink) if quick and rows else None
            if stored is None:
                stored = by_simplejpeg(self.header, channels, shrink, quick=quick)
        if stored is None:
            stored = by_pillow(self.header, channels, shrink)
        return upright(stored, self.header.orientation)

    def upper(self, rows: int, channels: int, shrink: int) -> np.ndarray | None:
        """The first rows, if that is less work and the picture is stored from its top down."""
        header, fewer = self.header, -(-rows // STEP) * STEP
        if shrink > 1:
            fewer += STEP  # sides that do not divide are rounded up
        if header.height_at is None or header.orientation > 2 or fewer >= self.height:
            return None
        data = bytearray(header.data)  # the same file, whose header knows of no more rows
        data[header.height_at : header.height_at + 2] = fewer.to_bytes(2)
        shorter = replace(header, data=bytes(data), size=(fewer, self.width), height_at=None)
        return by_simplejpeg(shorter, channels, shrink, quick=True, cut_short=True)

    def shrink(self, at_least: tuple[int, int] | None) -> int:
        """By how much a JPEG may be scaled down while it is decoded."""
        if not at_least or self.format != "JPEG" or min(self.height, self.width) < SMALLEST_SCALED:
            return 1
        for scale in (8, 4, 2):
            height, width = -(-self.height // scale), -(-self.width // scale)
            if height >= at_least[0] and width >= at_least[1]:
                return scale
        return 1


def open_picture(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Picture:
    """The header of a picture file; a `DataError` of one line if it cannot be read."""
    header = read_header(data)
    mode = {1: "L", 3: "RGB", 4: "CMYK"}.get(header.layers or 0, "")
    check_size(header.format, header.size, max_pixels)
    check_work(header, max(max_pixels, MIN_CODED))
    size, turn = header.size, header.orientation
    if not mode:
        with opened(header) as image:
            mode, size = image.mode, (image.height, image.width)
            if header.format == "AVIF":
                turn = orientation(image.info.get("exif", b""))
        check_size(header.format, size, max_pixels)
    assert size is not None
    if turn != header.orientation:
        header = replace(header, orientation=turn)
    height, width = size if turn < 5 else size[::-1]
    return Picture(format=header.format, mode=mode, height=height, width=width, header=header)


def decode(
    data: bytes,
    *,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
    at_least: tuple[int, int] | None = None,
    backend: Decoder = "auto",
) -> np.ndarray:
    """The pixels of a picture file: `open_picture` and `Picture.pixels` together."""
    picture = open_picture(data, max_pixels=max_pixels)
    return picture.pixels(channels=channels, at_least=at_least, backend=backend)


def check_size(format: str, size: tuple[int, int] | None, max_pixels: int) -> None:
    """Refuse a picture that is too large, before there is memory for it."""
    if size is None:
        return
    if min(size) < 1:
        raise damaged(format, "no size in its header")
    if format in ("TIFF", "WebP"):  # where Pillow insists on a limit of its own
        max_pixels = min(max_pixels, Image.MAX_IMAGE_PIXELS or max_pixels)
    if math.prod(size) > max_pixels or max(size) > MAX_SIDE:
        raise DataError(
            f"{a(format)} of {size[1]} x {size[0]} pixels, above the limit of {max_pixels:,} "
            f"pixels and {MAX_SIDE:,} a side; make it smaller"
        )


def check_work(header: Header, max_pixels: int) -> None:
    """Refuse an image that takes far more memory or time than its sides tell."""
    largest = max(MIN_CODED, MAX_PADDING * math.prod(header.size or (0, 0)))
    if header.coded > (largest := min(largest, max_pixels)):
        raise DataError(
            f"{a(header.format)} with a tile or frame of {header.coded:,} pixels, above the limit "
            f"of {largest:,} for its size; save it as PNG or JPEG"
        )
    if header.work > MAX_PASSES * max_pixels:
        raise DataError(
            f"{a(header.format)} of {header.work:,} pixels in all scans, tiles or frames, above "
            f"the limit of {MAX_PASSES * max_pixels:,}; save it as PNG or baseline JPEG"
        )


class LimitedFile(io.BytesIO):
    """A file in memory that after `limit` can be read for so many CPU seconds of this thread.

    This ends loops in Python that ask for more bytes: Pillow's over blocks of 64 kB for JPEG, PNG,
    GIF, BMP and plain TIFF, and over run lengths. It cannot interrupt one call into C, and WebP,
    AVIF, compressed TIFF and simplejpeg decode a whole image in one call. Those are limited by
    `check_size` and `check_work` only, and headers by how many segments they may have.
    """

    def limit(self, seconds: float) -> None:
        self.seconds, self.deadline, self.reads = seconds, 0.0, 0
        self.read = self.read_in_time

    def read_in_time(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        is_small = size is not None and 0 <= size < 256
        if self.reads > 1 and not (is_small and self.reads % 256):  # looking costs as much as that
            now = time.thread_time()
            self.deadline = self.deadline or now + self.seconds
            if now > self.deadline:
                raise DataError(
                    f"an image that took more than {self.seconds:.0f} CPU seconds to decode; "
                    "save it again as PNG or JPEG"
                )
        return super().read(size)


@contextmanager
def opened(header: Header) -> Iterator[ImageFile.ImageFile]:
    """The picture in Pillow. Its decoders raise anything, RuntimeError too: all are caught here."""
    if header.format == "TIFF":
        silence_libtiff()
    if not OPTIONAL.get(header.format, True):
        raise DataError(f"{a(header.format)}, which this Pillow was built without; save it as PNG")
    file = LimitedFile(header.data)
    try:
        image = PLUGINS[header.format](file)
    except Exception as error:
        raise DataError(
            f"{a(header.format)} whose header is damaged or of a rare kind; save it as PNG or JPEG"
        ) from error
    base, per_megapixel = CPU_SECONDS
    file.limit(base + per_megapixel * image.width * image.height / 1e6)
    try:
        with image:
            yield image
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(
            f"{a(header.format)} that needs more memory than there is; make it smaller"
        ) from error
    except Exception as error:
        if "truncated" in str(error):
            raise too_short(header.format) from error
        raise damaged(header.format, "damaged pixels") from error
    finally:
        del file.read  # which refers to the file, and would keep it until the next collection


def by_pillow(header: Header, channels: int, shrink: int) -> np.ndarray:
    """The picture as stored, (height, width, channels)."""
    with opened(header) as image:
        if shrink > 1:
            image.draft(image.mode, (image.width // shrink, image.height // shrink))
        image.load()
        flat = flattened(image).convert("L" if channels == 1 else "RGB")
        pixels = np.array(flat)
    return pixels.reshape(*pixels.shape[:2], channels)


def by_simplejpeg(
    header: Header, channels: int, shrink: int, *, quick: bool = False, cut_short: bool = False
) -> np.ndarray | None:
    """The same for a plain JPEG, faster; None where it is missing or finds a fault.

    libjpeg tells of the first fault only. So if it complains of nothing but rows left over, which a
    picture that was `cut_short` must have, those above them are right, and the file has its end.
    """
    simplejpeg = fast_jpeg()
    if simplejpeg is None or header.size is None:
        return None
    height, width = least = [-(-side // shrink) for side in header.size]
    if shrink == 1:
        least = 0, 0  # of a tiny picture, an eighth has the same sides
    pixels = np.empty((height, width, 1 if header.layers == 1 else 3), np.uint8)
    try:
        found = simplejpeg.decode_jpeg(
            header.data,
            "GRAY" if header.layers == 1 else "RGB",
            fastdct=quick,
            fastupsample=quick,
            min_height=least[0],
            min_width=least[1],
            buffer=pixels,
        )
        if found.shape != pixels.shape:
            return None
    except Exception as error:
        if not (cut_short and re.search(CUT_SHORT, str(error))):
            return None
    if header.layers == 1 and channels == 3:
        return pixels.repeat(3, axis=2)
    if header.layers == 3 and channels == 1:
        return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
    return pixels


@cache
def fast_jpeg() -> ModuleType | None:
    """simplejpeg, if it is installed and fits the installed numpy."""
    try:
        import simplejpeg
    except Exception:
        return None
    return simplejpeg


@cache
def silence_libtiff() -> None:
    """libtiff writes to stderr from C, where no log can catch it; the `DataError` says enough."""
    try:
        ctypes.CDLL(str(Image.core.__file__)).TIFFSetErrorHandler(None)
    except (AttributeError, OSError):
        return  # linked into Pillow itself: out of reach


def from_pillow(image: Image.Image) -> np.ndarray:
    """The pixels (H, W, 3) of an image that is open already, as `decode` gives those of a file."""
    try:
        upright = ImageOps.exif_transpose(image)
        return np.array(flattened(upright).convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # it may not be decoded yet, and then anything can happen
        raise DataError(f"a Pillow image that cannot be decoded: {error}") from error


def flattened(image: Image.Image) -> Image.Image:
    """Any mode as 8-bit gray or color, with what is transparent laid on white."""
    if image.mode == "F" or image.mode.startswith("I"):
        gray = gray_of_numbers(image)
        if isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(262) == 0:
            gray = 255 - gray  # white is zero, which Pillow heeds in 8 bits only
        return Image.fromarray(gray)
    if image.has_transparency_data:
        solid = image.convert("LA") if image.mode == "La" else image
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, solid.convert("RGBA"))
    return image if image.mode in ("1", "L", "RGB") else image.convert("RGB")


def gray_of_numbers(image: Image.Image) -> np.ndarray:
    """16-bit, 32-bit and float pixels as 8-bit gray."""
    values = np.asarray(image)
    if image.mode.startswith("I;16"):
        gray = (values >> 8).astype(np.uint8)  # the high byte, as Pillow does for 16-bit RGB
        return np.where(values == image.info.get("transparency", -1), np.uint8(255), gray)
    low, high = float(values.min()), float(values.max())
    scales = (1, 255, 65_535, 2**32 - 1) if image.mode == "F" else (255, 65_535, 2**31 - 1)
    full = next((scale for scale in scales if high <= 1.25 * scale), math.nan)  # some overshoot
    if not (low >= -0.25 * full):  # not a number compares as false
        raise DataError(
            f"a {image.format} of numbers from {low:g} to {high:g}; scale them to 0 to 255"
        )
    return np.rint(values.clip(0, full) * (255 / full)).astype(np.uint8)


def upright(pixels: np.ndarray, turn: int) -> np.ndarray:
    """The picture rotated and mirrored as EXIF says; the inverse of how it was stored."""
    if turn >= 5:
        pixels = pixels.swapaxes(0, 1)
    if turn in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if turn in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
