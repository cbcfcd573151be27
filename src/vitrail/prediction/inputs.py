"""Where pictures are found: files, folders, patterns, and what comes in."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from os import fsdecode
from pathlib import Path

from vitrail.data.folders import walk_images
from vitrail.data.image_headers import detect_format
from vitrail.data.storage import MAX_IMAGE_BYTES
from vitrail.data.transforms import ImageInput, NamedImage
from vitrail.errors import DataError

STANDARD_INPUT = "standard input"
PEEK = 64  # bytes by which a picture is known


def find(
    places: Iterable[str], standard_input: Callable[[], BufferedReader]
) -> Iterator[ImageInput]:
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
    for name in walk_images(folder, "", Counter()):
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


def incoming(stream: BufferedReader) -> Iterator[ImageInput]:
    """One picture, or a list: a path on each line, or between zero bytes as `find -print0` does."""
    start = stream.peek(PEEK)[:PEEK]
    if detect_format(start):
        data = stream.read(MAX_IMAGE_BYTES + 1)
        if len(data) > MAX_IMAGE_BYTES:
            raise DataError(
                f"standard input has more than the {MAX_IMAGE_BYTES:,} bytes of a picture"
            )
        yield NamedImage(STANDARD_INPUT, data)
        return
    for line in stream:
        for part in line.rstrip(b"\r\n").split(b"\0"):
            if part.strip():
                yield Path(fsdecode(part))
