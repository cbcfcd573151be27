"""What can be given as a picture, and where pictures are found."""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from os import PathLike, fsdecode, fspath
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from vitrail.data.decoding import from_pillow
from vitrail.data.files import MOST_BYTES, Disk
from vitrail.data.folders import pictures
from vitrail.data.headers import SIGNATURES
from vitrail.errors import DataError

STANDARD_INPUT = "standard input"
PEEK = 64  # bytes by which a picture is known


class PillowImage(Protocol):
    """A Pillow image, known by what it can do: this file does not need Pillow."""

    mode: str

    def convert(self, mode: str, /) -> Any: ...


class Named(NamedTuple):
    """The bytes of a picture, and what to call it."""

    name: str
    data: bytes


Picture = Named | str | PathLike[str] | bytes | PillowImage | np.ndarray | Tensor


def name_of(picture: Picture, number: int) -> str:
    """What to call a picture: its path, or its place among those given."""
    if isinstance(picture, Named):
        return picture.name
    return fspath(picture) if isinstance(picture, str | PathLike) else f"picture {number + 1}"


def read(picture: Picture) -> bytes | np.ndarray:
    """The bytes of a picture file, or pixels uint8 (H, W) or (H, W, C)."""
    match picture:
        case Named():
            return picture.data
        case str() | PathLike():
            return Disk().read_all(fspath(picture))
        case bytes() | bytearray() | memoryview():
            return bytes(picture)
        case Tensor():
            return checked(picture.detach().cpu().numpy(), "(C, H, W)", 0).transpose(1, 2, 0)
        case np.ndarray():
            return checked(picture, "(H, W) or (H, W, C)", -1)
    if hasattr(picture, "convert") and hasattr(picture, "mode"):
        return from_pillow(picture)  # pyright: ignore[reportArgumentType]
    raise DataError(
        f"a {type(picture).__name__} is no picture; give a path, bytes, a Pillow image or pixels"
    )


def checked(pixels: np.ndarray, shapes: str, channels: int) -> np.ndarray:
    """Pixels, or why they are none."""
    flat = pixels.ndim == 2 and channels == -1
    if pixels.dtype != np.uint8 or not (flat or pixels.ndim == 3) or 0 in pixels.shape:
        raise DataError(
            f"{pixels.dtype} values of shape {pixels.shape} are no pixels; "
            f"give uint8, 0 to 255, of shape {shapes}"
        )
    if not flat and pixels.shape[channels] not in (1, 3):
        raise DataError(
            f"pixels of shape {pixels.shape} have {pixels.shape[channels]} channels; "
            f"give 1 or 3, as {shapes}"
        )
    return pixels if pixels.flags.writeable else pixels.copy()  # torch warns of what is not


def find(places: Iterable[str], standard_input: Callable[[], BufferedReader]) -> Iterator[Picture]:
    """Every picture of files, folders, patterns, and of what comes in (`-`), one after the other.

    A file that is named comes as it is, there or not: reading it will tell.
    """
    for place in places:
        path = os.path.expanduser(place)  # Path's own would not take `~backup.png`
        if place == "-":
            yield from incoming(standard_input())
        elif os.path.isdir(path):
            yield from inside(Path(path))
        elif glob.has_magic(place) and not os.path.exists(path):
            yield from matching(path)
        else:
            yield Path(path)


def inside(folder: Path) -> Iterator[Path]:
    """The pictures of a folder and of the folders in it."""
    empty = True
    for name in pictures(folder, "", Counter()):
        empty = False
        yield folder / name
    if empty:
        raise DataError(f"{folder}: there is no picture in it")


def matching(pattern: str) -> Iterator[Path]:
    found = sorted(glob.iglob(pattern, recursive=True))
    if not found:
        raise DataError(f"{pattern}: no file is called like that")
    for name in found:
        path = Path(name)
        if path.is_dir():
            yield from inside(path)
        else:
            yield path


def incoming(stream: BufferedReader) -> Iterator[Picture]:
    """One picture, or a list: a path on each line, or between zero bytes as `find -print0` does."""
    start = stream.peek(PEEK)[:PEEK]
    if any(re.match(signature, start, re.DOTALL) for signature in SIGNATURES.values()):
        data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise DataError(f"standard input has more than the {MOST_BYTES:,} bytes of a picture")
        yield Named(STANDARD_INPUT, data)
        return
    for line in stream:
        for part in line.rstrip(b"\r\n").split(b"\0"):
            if part.strip():
                yield Path(fsdecode(part))
