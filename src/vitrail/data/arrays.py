"""Images as arrays: .npz files, and pairs of .npy files.

digits.npz: x_train (N, H, W) or (N, H, W, C) uint8, y_train (N,), x_test, y_test, class_names
a folder:   images.npy, labels.npy

There may be any number of channels; five or more must be fewer than rows and columns. Arrays are
read when they are needed. Uncompressed ones are memory-mapped. Pickled objects are rejected.
"""

import math
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.datasets import (
    SPLITS,
    DatasetIndex,
    ImageStore,
    LabelSets,
    RowNames,
    canonical_split,
    sort_classes,
    split_order,
    unknown_label,
)
from vitrail.data.folders import read_classes
from vitrail.data.storage import LocalStorage, read_error
from vitrail.errors import DataError

MAX_EXPANSION = 20  # uncompressed size as a multiple of the file's size; more is an attack
MAX_ARRAYS = 50_000  # of a file; reading each header takes a tenth of a millisecond
MAX_CLASSES = 1_000_000  # that are numbered without names
# raised by zipfile, zlib and NumPy on malformed files
READ_ERRORS = (OSError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError)
READ_ERRORS += (AttributeError, BufferError, RuntimeError, SyntaxError, tokenize.TokenError)
READ_ERRORS += (struct.error, zipfile.BadZipFile, zlib.error)
IMAGE_NAMES = ("x", "images", "image", "imgs", "data", "pixels")
LABEL_NAMES = ("y", "labels", "label", "targets")
CLASS_NAMES = ("class_names", "classes", "label_names")
COMMON_CHANNELS = (1, 3, 4)  # recognized as channels wherever they are in a shape


class LazyArray:
    """Array that is read on first use, in each process again."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[..., np.ndarray], *args: Any
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.read = read
        self.args = args  # the file first
        self.cached: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cached": None}

    @property
    def values(self) -> np.ndarray:
        values = self.cached  # two threads may both read it, with the same result
        if values is None:
            try:
                values = self.cached = self.read(*self.args)
            except READ_ERRORS as error:
                raise read_error(self.args[0], error) from None
        return values


def read_npz(path: Path) -> dict[str, LazyArray]:
    """Return the arrays of an .npz file by name; uncompressed ones will be memory-mapped."""
    arrays = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        check_npz_size(path, archive.infolist())
        for info in archive.infolist():
            with archive.open(info) as stream:
                shape, fortran, dtype = read_npy_header(stream)
                start = stream.tell()
            name = info.filename.removesuffix(".npy")
            if dtype.hasobject:
                arrays[name] = LazyArray(shape, dtype, reject_objects, path, name)
                continue
            if math.prod(shape) * dtype.itemsize + start != info.file_size:
                raise ValueError(f"the size of {info.filename} does not match its header")
            if info.compress_type == zipfile.ZIP_STORED:
                file.seek(info.header_offset + 26)  # lengths of the name and of the extra field
                lengths = np.frombuffer(file.read(4), "<u2")
                start += info.header_offset + 30 + int(lengths.sum())
                arrays[name] = LazyArray(
                    shape, dtype, map_array, path, dtype, start, shape, fortran
                )
            else:
                arrays[name] = LazyArray(shape, dtype, read_member, path, info.filename)
    return arrays


def check_npz_size(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Reject a zip bomb."""
    total = sum(info.file_size for info in members)
    if len(members) > MAX_ARRAYS:
        raise ValueError(f"{len(members):,} arrays, above the limit of {MAX_ARRAYS:,}")
    if total > MAX_EXPANSION * path.stat().st_size + 2**28:
        raise ValueError(
            f"uncompressed size of {total:,} bytes is more than {MAX_EXPANSION} times the file "
            "size; if you trust it, save it uncompressed with np.savez"
        )


def read_npy(path: Path) -> LazyArray:
    """Return the array of an .npy file, memory-mapped on first use."""
    with path.open("rb") as file:
        shape, fortran, dtype = read_npy_header(file)
        start = file.tell()
    if dtype.hasobject:
        return LazyArray(shape, dtype, reject_objects, path, path.stem)
    if math.prod(shape) * dtype.itemsize + start > path.stat().st_size:
        raise ValueError(f"{path.name} is truncated")
    return LazyArray(shape, dtype, map_array, path, dtype, start, shape, fortran)


def map_array(
    path: Path, dtype: np.dtype, start: int, shape: tuple[int, ...], fortran: bool
) -> np.ndarray:
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def read_member(path: Path, member: str) -> np.ndarray:
    with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def reject_objects(path: Path, name: str) -> np.ndarray:
    raise DataError(f"{path}: {name} contains pickled Python objects, which could run code")


def read_npy_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, Fortran order and dtype."""
    version = np.lib.format.read_magic(stream)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"unknown version {version} of the .npy format")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers written by Python 2
        try:
            return readers[version](stream)
        except tokenize.TokenError as error:  # not a SyntaxError since Python 3.12
            raise ValueError("corrupt .npy header") from error


class LabeledArray(NamedTuple):
    """Images of one split or file, with their labels."""

    split: str  # empty if none is stated
    images: LazyArray  # (N, H, W) or (N, H, W, C) uint8
    labels: np.ndarray  # (N,), or (N, C) of 0 and 1
    name: str = ""  # prefix of the row names; the split if empty


class ArrayStore(ImageStore):
    """Images that are rows of arrays."""

    in_memory = True

    def __init__(self, arrays: Sequence[LazyArray], rows: RowNames) -> None:
        self.arrays = tuple(arrays)
        self.rows = rows

    def read(self, row: int) -> np.ndarray:
        part, index = self.rows.locate(row)
        return np.array(self.arrays[part].values[index])  # a copy: the caller may write to it


def index_npz(path: Path) -> DatasetIndex:
    try:
        arrays = read_npz(path)
    except READ_ERRORS as error:
        raise read_error(path, error) from None
    return index_named_arrays(arrays, path, path.parent)


def index_npy(path: Path) -> DatasetIndex:
    """Index the .npy files of a folder, or the pair that a file belongs to."""
    folder = path if path.is_dir() else path.parent
    try:
        arrays = {file.stem: read_npy(file) for file in sorted(folder.glob("*.npy"))}
    except READ_ERRORS as error:
        raise read_error(path, error) from None
    if path.is_file():
        split = array_role(path.stem)[1]
        arrays = {name: array for name, array in arrays.items() if array_role(name)[1] == split}
    return index_named_arrays(arrays, path, folder)


def index_named_arrays(arrays: dict[str, LazyArray], path: Path, folder: Path) -> DatasetIndex:
    """Pair images with labels by name: x_train with y_train, images with labels."""
    roles = {array_role(name): array for name, array in arrays.items()}
    parts = []
    for (role, split), array in roles.items():
        if role != "images":
            continue
        if ("labels", split) not in roles:
            raise DataError(f"{path} has images but no labels{f' for {split}' if split else ''}")
        images = channels_last(array, path)
        labels = roles["labels", split].values
        if len(labels) != images.shape[0]:
            raise DataError(f"{path} has {images.shape[0]:,} images but {len(labels):,} labels")
        parts.append(LabeledArray(split, images, labels))
    if not parts:
        names = ", ".join(arrays)[:200] or "none"
        raise DataError(
            f"{path}: expected arrays x_train and y_train, or images and labels; found {names}"
        )
    class_names = next((arrays[name] for name in CLASS_NAMES if name in arrays), None)
    if class_names is not None:
        return index_arrays(parts, tuple(map(str, class_names.values.tolist())), path)
    return index_arrays(parts, read_classes(str(folder), LocalStorage()), path)


def index_arrays(
    parts: list[LabeledArray], classes: tuple[str, ...] | None, path: Path
) -> DatasetIndex:
    """Index labeled arrays; classes without names are named by their numbers."""
    parts = sorted(parts, key=lambda part: split_order(part.split))
    lengths = [part.images.shape[0] for part in parts]
    rows = RowNames([(p.name or p.split or "row", n) for p, n in zip(parts, lengths, strict=True)])
    if not len(rows):
        raise DataError(f"{path} contains no images")
    labels, classes = encode_labels(parts, classes, path)
    split_names = tuple(dict.fromkeys(part.split for part in parts if part.split))
    split_ids = [split_names.index(part.split) if part.split else 0 for part in parts]
    return DatasetIndex(
        names=rows,
        labels=labels,
        classes=classes,
        store=ArrayStore([part.images for part in parts], rows),
        split_names=split_names,
        split_ids=np.repeat(np.array(split_ids, np.uint8), lengths) if split_names else None,
    )


def array_role(name: str) -> tuple[str, str]:
    """Return role and split of an array: ("images", "train") for x_train or train_images."""
    words = [word for word in re.split(r"[-_]", name.lower()) if word]
    split = next((canonical_split(word) for word in words if canonical_split(word) in SPLITS), "")
    rest = [word for word in words if canonical_split(word) != split or not split]
    if len(rest) == 1 and rest[0] in IMAGE_NAMES:
        return "images", split
    return ("labels", split) if len(rest) == 1 and rest[0] in LABEL_NAMES else (name, "other")


def normalize_labels(labels: np.ndarray, path: Path) -> np.ndarray:
    """Return labels as (N,) numbers or strings, or (N, C) of 0 and 1 if multi-label."""
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "f" and np.array_equal(labels, np.rint(labels)):
        labels = labels.astype(np.int64)
    multi_hot = labels.ndim == 2 and labels.dtype.kind in "iub" and np.isin(labels, (0, 1)).all()
    if multi_hot and (labels.sum(axis=1) == 1).all():
        return labels.argmax(axis=1)  # one-hot
    if not multi_hot and (labels.ndim != 1 or labels.dtype.kind not in "iuU"):
        raise DataError(
            f"{path} has labels of shape {labels.shape} and dtype {labels.dtype}; expected "
            "integers or strings (N,), or 0 and 1 (N, C)"
        )
    return labels


def encode_labels(
    parts: list[LabeledArray], classes: tuple[str, ...] | None, path: Path
) -> tuple[np.ndarray | LabelSets, tuple[str, ...]]:
    """Return the labels of all parts as class ids, and the classes."""
    arrays = [normalize_labels(part.labels, path) for part in parts]
    if len({labels.ndim for labels in arrays}) > 1:
        raise DataError(f"{path} is single-label in one split and multi-label in another")
    labels = np.concatenate(arrays)
    if labels.dtype.kind == "U":
        classes = classes or sort_classes(labels.tolist())
        ids = {name: number for number, name in enumerate(classes)}
        if (
            missing := next((name for name in labels.tolist() if name not in ids), None)
        ) is not None:
            raise unknown_label(str(path), missing, classes)
        return np.array([ids[name] for name in labels.tolist()], np.int32), classes
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=0)) + 1
    classes = classes or tuple(str(number) for number in range(min(count, MAX_CLASSES)))
    if count > len(classes) or (labels.ndim == 1 and labels.min(initial=0) < 0):
        raise DataError(f"{path} has labels outside its {len(classes)} classes")
    if labels.ndim == 1:
        return labels.astype(np.int32), classes
    applying = np.nonzero(labels)[1].astype(np.int32)
    return LabelSets(applying, np.cumsum(labels.astype(bool).sum(axis=1))), classes


def channels_last(array: LazyArray, path: Path) -> LazyArray:
    """Reject arrays that cannot be images; transpose (N, C, H, W) when read."""
    shape = array.shape
    if array.dtype != np.uint8:
        raise DataError(f"{path} has images of {array.dtype}; expected uint8, 0 to 255")
    if len(shape) not in (3, 4) or 0 in shape[1:]:
        raise DataError(f"{path} has images of shape {shape}; expected (N, H, W) or (N, H, W, C)")
    if len(shape) == 3 or shape[3] <= max(COMMON_CHANNELS):
        return array
    count, first, middle, last = shape
    if first in COMMON_CHANNELS or first < min(middle, last):
        transposed = (count, middle, last, first)
        return LazyArray(transposed, array.dtype, read_transposed, *array.args, array.read)
    if last >= min(first, middle):
        raise DataError(
            f"{path} has images of shape {shape}, with either {first} or {last} channels; "
            "expected (N, H, W, C) with fewer channels than rows and columns"
        )
    return array


def read_transposed(*args: Any) -> np.ndarray:
    *rest, read = args
    return read(*rest).transpose(0, 2, 3, 1)
