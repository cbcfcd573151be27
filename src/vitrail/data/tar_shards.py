"""Images in .tar files: WebDataset shards, and tars with a list or class folders.

    000000000.jpg 000000000.cls …        WebDataset: the label is in .cls, or in .json as "label"
    labels.csv train/daisy/1.jpg …       a list inside, with columns file, class and split
    train/daisy/1.jpg …                  class folders

Class names are in classes.json or classes.txt, beside the shards or in them; otherwise classes are
named by their numbers. The split of a shard is in its name or in that of its folder:
`train-000000.tar`, `val/000.tar`.

The index of `NAME.tar` is built by reading headers only, and cached beside it as
`.NAME.tar.index.npz`; it is valid as long as size and modification time of the tar are the same.
ustar, GNU and pax headers are supported.

`pack` writes any dataset as shards. Encoded images are copied, arrays become PNG, files that are
not images are skipped. The same samples give the same bytes.
"""

import glob
import json
import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.arrays import READ_ERRORS, read_npz
from vitrail.data.datasets import (
    SPLITS,
    Dataset,
    DatasetIndex,
    ImageStore,
    PackedStrings,
    SampleEncoder,
    canonical_split,
    case_collisions,
    is_image_name,
    open_dataset,
    open_splits,
    sort_classes,
)
from vitrail.data.folders import (
    CLASS_FILES,
    LABEL_COLUMNS,
    LIST_EXTENSIONS,
    ListRow,
    list_rows,
    number_classes,
    parse_classes,
    parse_labels,
    read_classes,
)
from vitrail.data.image_headers import READABLE_FORMATS, detect_format
from vitrail.data.storage import (
    MAX_IMAGE_BYTES,
    FileReader,
    atomic_path,
    file_size,
    glob_files,
    is_remote,
    write_atomic,
)
from vitrail.errors import ConfigError, DataError
from vitrail.formatting import MIB

MAX_CLASSES = 1_000_000  # without names; a larger label is an id, not a class
SPARSE_CLASSES = 100_000  # the same if fewer than a tenth of the classes have an image
MAX_SHARDS = 1_000_000  # that one pattern may match
MAX_BRACES = 20  # of a pattern, each a level of recursion
MAX_PATTERNS = 10_000  # with wildcards that one pattern may expand to, if they match no files
MAX_TEXT_BYTES = 2**28  # of a text in a tar; a list of a million images has 2**26
MAX_LABEL_BYTES = 2**24  # of a label file, and of the values of a header
MAX_NAME_BYTES = 2**16  # of a member's name; systems commonly allow 4096
MAX_SHARD_BYTES = 256 * MIB  # large enough to stream, small enough to copy
INDEX_VERSION = 2  # of the cached index; other versions are rebuilt
BLOCK = 512
REGULAR = (b"0", b"\0", b"7")
WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
LISTS = tuple(f"labels{extension}" for extension in LIST_EXTENSIONS)
TEXT_FILES = {*CLASS_FILES, *LISTS}
PAX_LENGTH = re.compile(rb"([0-9]{1,9}) ")
LABEL_SEPARATOR = "\x1f"  # precedes each of several labels in `TarIndex.labels`
EXTENSIONS = {"JPEG": "jpg", "TIFF": "tif"}  # other formats: the name in lower case


@dataclass(eq=False)
class ShardStore(ImageStore):
    """Images that are members of tars, read at their offset."""

    paths: tuple[str, ...]
    shard: np.ndarray  # (n,) position in `paths`
    offset: np.ndarray  # (n,)
    size: np.ndarray  # (n,)
    reader: FileReader = field(default_factory=FileReader, init=False)

    def read(self, row: int) -> bytes:
        path, size = self.paths[self.shard[row]], int(self.size[row])
        if size > MAX_IMAGE_BYTES:
            raise DataError(
                f"{path}: an image of {size:,} bytes, above the limit of {MAX_IMAGE_BYTES:,}"
            )
        return self.reader.read(path, int(self.offset[row]), size)

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        return self.size[rows]


class TarIndex:
    """Images of one tar, and its labels."""

    def __init__(self) -> None:
        self.names = PackedStrings()
        self.offsets, self.sizes = array("q"), array("q")
        self.labels = PackedStrings()  # of .cls or .json; may be empty
        self.first = bytearray()  # 1: the first image of its key
        self.texts: dict[str, str] = {}  # labels.csv, classes.txt, classes.json
        self.damage = ""  # description of a truncated or corrupt file

    def columns(self) -> dict[str, bytearray | array]:
        """Return the arrays of the cached index by name."""
        return {
            "names": self.names.bytes,
            "name_ends": self.names.ends,
            "offsets": self.offsets,
            "sizes": self.sizes,
            "labels": self.labels.bytes,
            "label_ends": self.labels.ends,
            "first": self.first,
        }


def index_shards(
    paths: Sequence[str],
    split: str | None = None,
    *,
    use_cache: bool = True,
    allow_truncated: bool = False,
) -> DatasetIndex:
    """Index tars; of one split only, if the names of the tars state it."""
    numbered = [re.fullmatch(r"(.*?)(\d+)\.tar", path) for path in paths]
    notes = [
        f"{os.path.basename(a)}{n + 1:0{width}}.tar is missing"
        for (a, n, width), (b, m, _) in pairwise(
            sorted((match[1], int(match[2]), len(match[2])) for match in numbered if match)
        )
        if a == b and m > n + 1
    ]
    has_folders = len({os.path.dirname(path) for path in paths}) > 1
    shard_names = {path: os.path.basename(path) for path in paths}
    if len(set(shard_names.values())) < len(paths):  # equal names in several folders
        common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
        shard_names = {path: os.path.relpath(path, common) for path in paths}
    stated = {
        path: split_in_name(os.path.basename(path))
        or (split_in_name(os.path.basename(os.path.dirname(path))) if has_folders else "")
        for path in paths
    }
    folder = os.path.dirname(paths[0])
    known = read_classes(folder)
    if known is None and split_in_name(os.path.basename(folder)):
        known = read_classes(os.path.dirname(folder))
    split_names = {name for name in stated.values() if name}
    if split_names:
        notes += [
            f"{os.path.basename(path)} states no split and was skipped"
            for path in paths
            if not stated[path]
        ]
        # without a list of classes, one split may not contain all of them
        chosen = {split} if known and split in split_names else split_names
        paths = [path for path in paths if stated[path] in chosen]
    tars = {path: read_tar_index(path, use_cache=use_cache) for path in paths}
    damages = [tar.damage for tar in tars.values() if tar.damage]
    if damages and not allow_truncated:
        raise DataError(damages[0])
    notes += damages
    source = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"
    names, encoder = PackedStrings(), SampleEncoder()
    shard, offset, size = [], [], []
    for number, (path, tar) in enumerate(tars.items()):
        positions, prefix = [], f"{shard_names[path]}/" if len(paths) > 1 else ""
        for position, row in labeled_images(tar, path, alone=len(paths) == 1):
            names.append(prefix + tar.names[position])
            encoder.add(row.labels, row.split or stated[path], multi_label=row.multi_label)
            positions.append(position)
        total = sum(tar.first) if tar.labels.bytes else len(tar.names)
        if total > len(positions):
            notes.append(f"{path}: {total - len(positions):,} images without a label were skipped")
        shard.append(np.full(len(positions), number, np.uint32))
        offset.append(np.frombuffer(tar.offsets, np.int64)[positions])
        size.append(np.frombuffer(tar.sizes, np.int64)[positions])
    if not names:
        unlabeled = any(len(tar.names) for tar in tars.values())
        raise DataError(f"{source} contains no {'labels' if unlabeled else 'images'}")
    classes, ids = shard_classes(encoder, tars, known)
    store = ShardStore(tuple(paths), *map(np.concatenate, (shard, offset, size)))
    notes += case_collisions(classes)
    splits = filter(None, stated.values())
    return encoder.index(source, names, store, classes, ids, splits=splits, notes=notes)


def labeled_images(tar: TarIndex, path: str, *, alone: bool) -> Iterator[tuple[int, ListRow]]:
    """Yield the position of each image with a known class, in the tar's order or in its list's."""
    for name in LISTS:
        if name in tar.texts:
            source = f"{path}/{name}"
            positions = {name: position for position, name in enumerate(tar.names)}
            for row in list_rows(tar.texts[name], source):
                position = positions.get(row.file.removeprefix("./"))
                if position is None:
                    raise DataError(f"{source} lists {row.file}, which is not in the tar")
                yield position, row
            return
    if tar.labels.bytes:  # WebDataset; of several images with one key, the first
        for position, label in enumerate(tar.labels):
            if label and tar.first[position]:
                multi = label.startswith(LABEL_SEPARATOR)
                labels = tuple(filter(None, label.split(LABEL_SEPARATOR))) if multi else (label,)
                yield position, ListRow(tar.names[position], labels, multi_label=multi)
        return
    # class folders, with or without splits, and with or without one folder around all
    tops = {name.partition("/")[0] for name in tar.names}
    is_nested = all(name.count("/") >= 2 for name in tar.names)
    skip = (
        alone and is_nested and len(tops) == 1 and canonical_split(next(iter(tops))) not in SPLITS
    )
    for position, name in enumerate(tar.names):
        folders = name.split("/")[skip:-1]
        if len(folders) >= 2 and canonical_split(folders[0]) in SPLITS:
            yield position, ListRow(name, (folders[1],), folders[0])
        elif folders:
            yield position, ListRow(name, (folders[0],))


def shard_classes(
    encoder: SampleEncoder, tars: dict[str, TarIndex], known: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the classes, and the id of each label; a number in .cls is a class id."""
    for path, tar in tars.items():
        for name in CLASS_FILES if known is None else ():
            if name in tar.texts:
                known = parse_classes(tar.texts[name], f"{path}/{name}")
    if not any(tar.labels.bytes for tar in tars.values()):
        return number_classes(encoder, known)
    if known is None and all(label.isascii() and label.isdigit() for label in encoder.codes):
        largest = (sort_classes(encoder.codes) or ("0",))[-1].lstrip("0") or "0"
        limit = min(MAX_CLASSES, max(SPARSE_CLASSES, 10 * len(encoder.codes)))
        if len(largest) > len(str(limit)) or int(largest) >= limit:
            raise DataError(
                f"label {largest:.30} is not a class id; list the classes in classes.txt"
            )
        known = tuple(str(number) for number in range(int(largest) + 1))
    classes, ids = number_classes(encoder, known)
    return classes, ids | {str(number): number for number in range(len(classes))}


def split_in_name(name: str) -> str:
    """Return `val` for `imagenet-validation-000017.tar`; empty if no split is stated."""
    words = (canonical_split(word) for word in re.split(r"[-_.\d]+", name))
    return next((word for word in words if word in SPLITS), "")


def find_shards(reference: str) -> list[str]:
    """Return the tars of a path, a folder, or a pattern with `*`, `?` or braces."""
    if os.path.isfile(reference):
        return [reference]
    if reference.count("{") > MAX_BRACES:
        raise DataError(f"{reference:.60} has more than {MAX_BRACES} braces")
    exists, paths = os.path.exists(reference), []  # whatever is in its name
    patterns = [glob.escape(reference)] if exists else expand_braces(reference)
    for number, pattern in enumerate(patterns):
        if not exists and any(sign in pattern for sign in "*?["):
            paths += glob_files(pattern)
        elif not exists and pattern.endswith(".tar"):
            paths.append(pattern)
        else:
            folder = pattern.rstrip("/")
            paths += glob_files(f"{folder}/*.tar") or glob_files(f"{folder}/*/*.tar")
        if len(paths) > MAX_SHARDS or number > max(MAX_PATTERNS, len(paths)):
            raise DataError(f"{reference} stands for too many files")
    if not paths:
        raise DataError(f"no .tar file matches {reference}")
    return paths


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand `a-{000..002}.tar` and `{a,b}.tar` like a shell."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if not braces:
        yield pattern
        return
    span = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    if span:
        first, last, width = int(span[1]), int(span[2]), len(span[1])
        words = (f"{number:0{width}}" for number in range(first, last + 1))
    else:
        words = iter(braces[1].split(","))
    for word in words:
        yield from expand_braces(pattern[: braces.start()] + word + pattern[braces.end() :])


# Index of one tar.


class ReadAhead:
    """Window of a file: neighboring headers are read together."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.reader = FileReader()
        self.size = file_size(path)
        self.near, self.far = (2**22, 2**16) if is_remote(path) else (2**16, 2**11)
        self.start, self.data = 0, b""

    def read(self, position: int, size: int) -> bytes:
        """Return bytes of the file; fewer at its end."""
        inside = position - self.start
        if inside < 0 or inside + size > len(self.data):
            jump = inside - len(self.data)  # over a large image: the next one is large too
            ahead = self.near if -self.near <= jump < self.near // 4 else self.far
            length = max(0, min(max(size, ahead), self.size - position))
            self.data = self.reader.read(self.path, position, length)
            self.start, inside = position, 0
        return self.data[inside : inside + size]

    def text(self, name: str, start: int, size: int, limit: int) -> str:
        if size > limit:
            raise DataError(
                f"{self.path}: {name} has {size:,} bytes, above the limit of {limit:,}; it is "
                "corrupt or not a dataset"
            )
        return self.read(start, size).decode("utf-8", "surrogateescape")


def read_tar_index(path: str, *, use_cache: bool = True) -> TarIndex:
    """Return the cached index of a tar, or build and cache it."""
    if not use_cache or is_remote(path) or not os.path.exists(path):
        return build_index(path)
    cache, info = Path(path).with_name(f".{Path(path).name}.index.npz"), os.stat(path)
    stamp = [INDEX_VERSION, info.st_size, info.st_mtime_ns]
    if (index := load_cached_index(cache, stamp)) is not None:
        return index
    index = build_index(path)
    about = json.dumps({"texts": index.texts, "damage": index.damage}).encode()
    columns = index.columns() | {"stamp": array("q", stamp), "about": about}
    arrays: dict[str, Any] = {
        name: np.frombuffer(column, np.int64 if isinstance(column, array) else np.uint8)
        for name, column in columns.items()
    }
    # root could also write into read-only folders
    if cache.parent.stat().st_mode & 0o222 and os.access(cache.parent, os.W_OK):
        # for example a full disk: build it again next time
        with suppress(DataError), atomic_path(cache) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
    return index


def build_index(path: str) -> TarIndex:
    """Read the headers of a tar, but no image."""
    file, index = ReadAhead(path), TarIndex()
    last, key, label, images = "", None, "", 0  # key, label and images of the current sample

    def end_sample() -> None:
        for position in range(images):  # only the first image of a key is used
            index.labels.append(label if position == 0 else "")
            index.first.append(position == 0)

    try:
        for name, start, size in tar_members(file):
            last = name
            if "/." in f"/{name}" or name.startswith("__MACOSX/"):
                continue  # hidden
            base = name.rpartition("/")[2]
            stem, _, extension = base.partition(".")  # a key ends at the first dot
            member_key = name[: len(name) - len(base)] + stem
            if member_key != key:
                end_sample()
                key, label, images = member_key, "", 0
            if is_image_name(base):
                index.names.append(name)
                index.offsets.append(start)
                index.sizes.append(size)
                images += 1
            elif base in TEXT_FILES:
                text = file.text(name, start, size, MAX_TEXT_BYTES).removeprefix("\ufeff")
                index.texts.setdefault(base, text)
            elif extension.lower() == "cls":
                label = file.text(name, start, size, MAX_LABEL_BYTES).strip()
            elif extension.lower() == "json":
                label = label or label_in_json(file.text(name, start, size, MAX_LABEL_BYTES))
    except EOFError as error:
        intact = (
            f"intact up to {last}, {len(index.names):,} images" if last else "nothing is intact"
        )
        index.damage = f"{path} {error}: {intact}; copy or download it again"
    end_sample()
    return index


def label_in_json(text: str) -> str:
    """Return the label or labels in a JSON object or value as one string."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(value, dict):
        value = next((value[key] for key in ("cls", *LABEL_COLUMNS) if key in value), None)
    labels, multi = parse_labels(value) if isinstance(value, (str, int, list)) else ((), False)
    if not multi:
        return "".join(labels)
    return "".join(LABEL_SEPARATOR + label for label in labels) or LABEL_SEPARATOR


def tar_members(file: ReadAhead) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of every complete regular file.

    Raise EOFError where the tar is truncated or corrupt.
    """
    position, long_name, pax = 0, "", {}
    while True:
        block = file.read(position, BLOCK)
        if not file.size:
            raise DataError(f"{file.path} is empty")
        if len(block) < BLOCK:
            raise EOFError("is truncated: it has no end-of-archive marker")
        if block == bytes(BLOCK):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            if position == 0:
                raise DataError(
                    f"{file.path} is not a .tar file, or is compressed: unpack it first"
                ) from None
            raise EOFError("is corrupt") from None
        kind, size = block[156:157], int(pax.get("size", header.size))
        header_name = block[:100].split(b"\0", 1)[0]
        if block[257:263] == b"ustar\0" and block[345]:
            header_name = block[345:500].split(b"\0", 1)[0] + b"/" + header_name
        name = pax.get("path") or long_name or header_name.decode("utf-8", "surrogateescape")
        start = position + BLOCK
        size = 0 if kind in WITHOUT_DATA else size
        if size < 0 or start + size > file.size:
            raise EOFError(f"is truncated within {name}")
        position = start + (size + BLOCK - 1) // BLOCK * BLOCK
        if kind == b"L":
            long_name = file.text("a long name", start, size, MAX_NAME_BYTES).rstrip("\0")
        elif kind == b"x":
            pax = parse_pax(file.text("a pax header", start, size, MAX_LABEL_BYTES))
        else:
            if kind in REGULAR and not name.endswith("/"):
                yield name.removeprefix("./"), start, size
            if kind not in (b"K", b"g"):
                long_name, pax = "", {}


def parse_pax(text: str) -> dict[str, str]:
    """Return path and size of lines `30 path=some/long/name`, which begin with their length."""
    values, data, position = {}, text.encode("utf-8", "surrogateescape"), 0
    while length := PAX_LENGTH.match(data, position):
        end = position + int(length[1])
        if end < length.end():
            break
        key, _, value = data[length.end() : end - 1].partition(b"=")
        if key in (b"path", b"size"):
            values[key.decode()] = value.decode("utf-8", "surrogateescape")
        position = end
    if not re.fullmatch("[0-9]{1,19}", values.get("size", "0")):
        del values["size"]
    return values


def load_cached_index(path: Path, stamp: list[int]) -> TarIndex | None:
    """Load the cached index of this file; None if it is missing or invalid.

    It is untrusted: it may have been distributed with the tar.
    """
    index, size = TarIndex(), stamp[1]
    try:
        if not path.is_file():
            return None
        arrays = {name: array.values for name, array in read_npz(path).items()}
        if arrays["stamp"].tolist() != stamp:
            return None
        for name, column in index.columns().items():
            data = arrays[name].tobytes()
            column.frombytes(data) if isinstance(column, array) else column.extend(data)
        about = json.loads(arrays["about"].tobytes())
        index.texts = {str(name): str(text) for name, text in about["texts"].items()}
        index.damage = str(about["damage"])
    except (*READ_ERRORS, DataError):
        return None
    offsets, sizes = np.frombuffer(index.offsets, np.int64), np.frombuffer(index.sizes, np.int64)
    columns = (index.sizes, index.first, index.names, index.labels)
    if any(len(column) != len(offsets) for column in columns):
        return None
    for strings in (index.names, index.labels):
        ends = np.frombuffer(strings.ends, np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        if (ends < starts).any() or (ends > len(strings.bytes)).any():
            return None
    return index if ((offsets >= 0) & (sizes >= 0) & (sizes <= size - offsets)).all() else None


# Packing.


class Shard(NamedTuple):
    path: Path
    split: str
    samples: int
    bytes: int
    skipped: tuple[str, ...] = ()  # files that are not images, up to the end of this shard


def pack(
    reference: str, folder: Path, *, split: str | None = None, max_bytes: int = MAX_SHARD_BYTES
) -> Iterator[Shard]:
    """Write one split of a dataset or all of them as shards; yield each when it is complete.

    A dataset without splits is split as usual, so that the shards of test contain no image that a
    model was trained on.
    """
    if max_bytes < 1:
        raise ConfigError(f"max_bytes={max_bytes} must be positive")
    if split is None:
        datasets = open_splits(reference)
    else:
        datasets = {canonical_split(split): open_dataset(reference, split)}
    known = read_classes(str(folder))
    for name, dataset in datasets.items():
        if existing := sorted(folder.glob(f"{name}-*.tar")):
            raise DataError(f"{folder} already contains {existing[0].name}; choose another folder")
        if known is not None and known != dataset.classes:
            raise DataError(
                f"{folder} already lists other classes than {reference}; choose another folder"
            )
    yield from write_splits(datasets, folder, max_bytes)


def write_splits(
    datasets: Mapping[str, Dataset], folder: Path, max_bytes: int = MAX_SHARD_BYTES
) -> Iterator[Shard]:
    """Write the shards of all splits; an error removes those already written."""
    classes = folder / "classes.json"
    written = [] if classes.exists() else [classes]
    try:
        for name, dataset in datasets.items():
            for shard in write_shards(dataset, folder, name, max_bytes):
                written.append(shard.path)
                yield shard
    except Exception:
        for path in written:
            with suppress(OSError):
                path.unlink()
        raise


def write_shards(dataset: Dataset, folder: Path, name: str, max_bytes: int) -> Iterator[Shard]:
    """Write the samples as `name-000000.tar`, `name-000001.tar`, …, and classes.json."""
    skipped: list[str] = []
    entries = encode_samples(dataset, skipped)
    entry, number = next(entries, None), 0
    if entry is None:
        raise DataError(
            f"nothing to pack in split {name!r}: none of its {len(skipped):,} files is an image, "
            f"such as {skipped[0]}; supported: {READABLE_FORMATS}"
        )
    while entry is not None:
        path = folder / f"{name}-{number:06}.tar"
        samples = written = 0
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            while entry is not None and (not samples or written + len(entry) <= max_bytes):
                file.write(entry)
                samples, written = samples + 1, written + len(entry)
                entry = next(entries, None)
            file.write(bytes(2 * BLOCK))  # end mark
        yield Shard(path, name, samples, path.stat().st_size, tuple(skipped))
        skipped.clear()
        number += 1
    classes = json.dumps(list(dataset.classes), ensure_ascii=False, indent=0)
    write_atomic(folder / "classes.json", classes + "\n")


def encode_samples(dataset: Dataset, skipped: list[str]) -> Iterator[bytes]:
    """Yield the tar members of each sample; append the names of others to `skipped`."""
    from PIL import Image  # not needed to read shards

    from vitrail.data.decode import to_png

    for index in range(len(dataset)):
        data, label, name = dataset[index]
        format = detect_format(data) if isinstance(data, bytes) else "PNG"
        if format is None:
            skipped.append(name)
            continue
        if isinstance(data, np.ndarray):
            if data.ndim == 3 and data.shape[2] not in (1, 3):
                raise DataError(
                    f"images of {data.shape[2]} channels cannot be packed: image files are gray or "
                    "RGB; keep them as arrays"
                )
            gray = data.ndim == 3 and data.shape[2] == 1
            pixels = np.ascontiguousarray(data[:, :, 0] if gray else data)
            data = to_png(Image.fromarray(pixels))
        if isinstance(label, tuple):
            kind, text = "json", json.dumps({"labels": list(label)})
        else:
            kind, text = "cls", str(label)
        image = tar_member(f"{index:09}.{EXTENSIONS.get(format, format.lower())}", data)
        yield image + tar_member(f"{index:09}.{kind}", text.encode())


def tar_member(name: str, data: bytes) -> bytes:
    """Return a file in a tar: a header with constant time, owner and mode, and the data."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)
