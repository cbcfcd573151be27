"""A data set written as .tar shards in WebDataset layout.

    train-000000.tar: 000000000.jpg 000000000.cls 000000001.jpg …
    classes.json: ["daisy", "rose"]

Pictures are copied as they are; arrays become PNG. Files that do not begin like an image are left
out and named. The same samples give the same bytes.
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.files import whole_or_absent
from vitrail.data.headers import READABLE, format_of
from vitrail.data.samples import Sample, Source
from vitrail.data.sources import open_source, splits_of
from vitrail.data.splits import canonical
from vitrail.data.thumbnails import to_png
from vitrail.errors import ConfigError, DataError
from vitrail.formatting import MIB

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
    left_out: tuple[str, ...] = ()  # files that are no images, up to the end of this shard


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
    left_out: list[str] = []
    entries = entries_of(source, left_out)
    entry, number = next(entries, None), 0
    if entry is None:
        raise DataError(
            f"nothing to pack in split {name!r}: none of its {len(left_out):,} files is an image, "
            f"such as {left_out[0]}; give {READABLE} files"
        )
    while entry is not None:
        path = folder / f"{name}-{number:06}.tar"
        samples = written = 0
        with whole_or_absent(path) as temporary, temporary.open("wb") as file:
            while entry is not None and (not samples or written + len(entry) <= max_bytes):
                file.write(entry)
                samples, written = samples + 1, written + len(entry)
                entry = next(entries, None)
            file.write(bytes(2 * BLOCK))  # the mark of the end
        yield Shard(path, name, samples, path.stat().st_size, tuple(left_out))
        left_out.clear()
        number += 1


def entries_of(source: Source, left_out: list[str]) -> Iterator[bytes]:
    """Each sample as the bytes of its tar members; the names of others are added to `left_out`."""
    for index in range(len(source)):
        sample = source[index]
        if isinstance(sample.data, bytes) and format_of(sample.data) is None:
            left_out.append(sample.name)
        else:
            yield b"".join(member(name, data) for name, data in to_members(sample, index))


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
        format = format_of(data)
        assert format is not None, "entries_of leaves others out"
        ending = ENDINGS[format]
    if isinstance(sample.label, tuple):
        label = ("json", json.dumps({"labels": list(sample.label)}).encode())
    else:
        label = ("cls", str(sample.label).encode())
    return [(f"{index:09}.{ending}", data), (f"{index:09}.{label[0]}", label[1])]


def as_image(pixels: np.ndarray) -> Image.Image:
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3):
        raise DataError(
            f"pictures of {pixels.shape[2]} channels cannot be packed: picture files are gray or "
            "in color; leave them as arrays"
        )
    flat = pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    return Image.fromarray(np.ascontiguousarray(flat))
