"""One picture as a row of a table: its sides, and what it can be recognized by."""

from hashlib import sha1
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.decoding import open_picture
from vitrail.data.duplicates import SIDE, print_of
from vitrail.data.thumbnails import in_color

ENOUGH = (128, 128)  # pixels to tell pictures apart; a JPEG is decoded no larger than needed
GRAY_LEVELS = 8  # between the channels of a pixel, up to which it counts as gray
MODES = {(): "L", (1,): "L", (3,): "RGB"}  # of arrays, by what comes after rows and columns
LOOK = np.dtype(
    [
        ("whole", "?"),
        ("height", "i4"),
        ("width", "i4"),
        ("gray", "?"),
        ("digest", "u8", (2,)),  # of the file, or of the pixels where there is no file
        ("hash", "u8"),
        ("thumbnail", "u1", (SIDE, SIDE)),
    ]
)


def look(data: bytes | np.ndarray) -> tuple[tuple[Any, ...], str]:
    """A row of `LOOK`, and format and mode; a `DataError` if not every pixel can be decoded."""
    if isinstance(data, np.ndarray):
        digest = sha1(data.tobytes())
        digest.update(f"{data.shape}".encode())
        (height, width), pixels = data.shape[:2], data
        kind = f"array {MODES.get(data.shape[2:], f'of {data.shape[-1]} channels')}"
    else:
        digest = sha1(data)
        picture = open_picture(data)
        height, width, kind = picture.height, picture.width, f"{picture.format} {picture.mode}"
        pixels = picture.pixels(at_least=ENOUGH)
    image = Image.fromarray(in_color(pixels))
    colors = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    gray = bool((np.ptp(colors, axis=2) <= GRAY_LEVELS).all())
    found = print_of(image.convert("L"))
    halves = np.frombuffer(digest.digest()[:16], np.uint64)
    return (True, height, width, gray, halves, found.hash, found.thumbnail), kind
