"""A data set written as .tar shards in WebDataset layout.

    train-000000.tar: 000000000.jpg 000000000.cls 000000001.jpg …
    classes.json: ["daisy", "rose"]

Pictures are copied as they are; arrays become PNG. The same samples give the same bytes.
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.files import whole_or_absent
from vitrail.data.headers import format_of
from vitrail.data.samples import Sample, Source, is_picture
from vitrail.data.sources import open_source, splits_of
from vitrail.data.splits import canonical
from vitrail.data.thumbnails import to_png
from vitrail.errors import ConfigError, DataError
from vitrail.words import MIB

MAX_BYTES = 256 * MIB  # of a shard: large enough to stream, small enough to copy
BLOCK = 512
EMPTY_HEADER = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
ENDINGS = {
    "JPEG": "jpg",
    "PNG": "png",
    "WebP": "webp",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tif",
    "AVIF": "avif",
}


class Shard(NamedTuple):
    """A shard that is written."""

    path: Path
    split: str
    samples: int
    bytes: int


def pack(
    reference: str, folder: Path, *, split: str | None = None, max_bytes: int = MAX_BYTES
) -> Iterator[Shard]:
    """Write one split of a data set or all of them, telling of each shard when it is whole.

    A set that states no splits is divided as it always is, so that what a model has learned from
    it will not be in the shards it is judged by.
    """
    if max_bytes < 1:
        raise ConfigError(f"max_bytes={max_bytes} leaves no room for a picture")
    names = list(splits_of(reference)) if split is None else [canonical(split)]
    for name in names:
        if old := sorted(folder.glob(f"{name}-*.tar")):
            raise DataError(f"{folder} already holds {old[0].name}; choose another folder")
    for name in names:
        source = open_source(reference, name)
        yield from write_shards(source, folder, name, max_bytes)
        write_classes(source, folder)


def write_shards(source: Source, folder: Path, name: str, max_bytes: int) -> Iterator[Shard]:
    """Write the samples as `name-000000.tar`, `name-000001.tar`, …"""
    number = start = 0
    while start < len(source):
        path = folder / f"{name}-{number:06}.tar"
        with whole_or_absent(path) as temporary, temporary.open("wb") as file:
            end = write_shard(file, source, start, max_bytes)
        yield Shard(path, name, end - start, path.stat().st_size)
        number, start = number + 1, end


def write_shard(file: BinaryIO, source: Source, start: int, max_bytes: int) -> int:
    """Write samples from `start` on until the shard is full; the first that is not in it."""
    written, end = 0, start
    while end < len(source):
        entry = b"".join(member(name, data) for name, data in to_members(source[end], end))
        if end > start and written + len(entry) > max_bytes:
            break
        file.write(entry)
        written, end = written + len(entry), end + 1
    file.write(bytes(2 * BLOCK))  # the mark of the end
    return end


def member(name: str, data: bytes) -> bytes:
    """A file in a tar: a header, which always has the same time, owner and rights, and the data."""
    header = bytearray(EMPTY_HEADER)
    header[: len(name)] = name.encode()
    header[124:135] = b"%011o" % len(data)
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    return bytes(header) + data + bytes(-len(data) % BLOCK)


def write_classes(source: Source, folder: Path) -> None:
    """The names of the classes, in classes.json beside the shards."""
    with whole_or_absent(folder / "classes.json") as temporary:
        text = json.dumps(list(source.classes), ensure_ascii=False, indent=0)
        temporary.write_text(text + "\n", encoding="utf-8")


def to_members(sample: Sample, index: int) -> list[tuple[str, bytes]]:
    """The files that stand for a sample: its picture, and its label or labels."""
    data = sample.data
    if isinstance(data, np.ndarray):
        ending, data = "png", to_png(as_image(data))
    else:
        ending = kind(sample)
    if isinstance(sample.label, tuple):
        label = ("json", json.dumps({"labels": list(sample.label)}).encode())
    else:
        label = ("cls", str(sample.label).encode())
    return [(f"{index:09}.{ending}", data), (f"{index:09}.{label[0]}", label[1])]


def kind(sample: Sample) -> str:
    """The ending that fits the bytes, else the one in the name."""
    assert isinstance(sample.data, bytes)
    if (found := format_of(sample.data)) is not None:
        return ENDINGS[found]
    return sample.name.rpartition(".")[2].lower() if is_picture(sample.name) else "jpg"


def as_image(pixels: np.ndarray) -> Image.Image:
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3):
        raise DataError(
            f"pictures of {pixels.shape[2]} channels cannot be packed: picture files are gray or "
            "in color; leave them as arrays"
        )
    flat = pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    return Image.fromarray(np.ascontiguousarray(flat))
