"""Images stored as rows: arrays in .npz and .npy files, MNIST and CIFAR as published, Hugging Face
datasets.

digits.npz: x_train (N, H, W) or (N, H, W, C) uint8, y_train (N,), x_test, y_test, class_names
a folder:   images.npy, labels.npy

There may be any number of channels; five or more must be fewer than rows and columns. Arrays are
read when they are needed. Uncompressed ones are memory-mapped. Pickled objects are rejected.

MNIST, Fashion-MNIST, KMNIST: `train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, …, also with .gz.
CIFAR-10, CIFAR-100: the binary version, and the Python version, which is a pickle. A pickle can run
code when it is loaded; this unpickler stores every call instead of executing it.

`hf:owner/name`, or a folder of parquet or Arrow files: the library `datasets` is imported on first
use; it is in the extra `data`. Images are returned as the stored bytes, not decoded.
"""

import gzip
import math
import os
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.datasets import (
    SPLITS,
    DatasetIndex,
    ImageStore,
    LabelSets,
    PackedStrings,
    SampleEncoder,
    canonical_split,
    sort_classes,
    split_order,
)
from vitrail.data.folders import (
    LABEL_COLUMNS,
    number_classes,
    parse_classes,
    parse_labels,
    read_classes,
)
from vitrail.data.pickles import PickledCall, Unpickler
from vitrail.data.storage import ALLOW_OUTSIDE, is_inside, outside_error, read_error, read_file
from vitrail.errors import DataError
from vitrail.extras import require

MAX_EXPANSION = 20  # uncompressed size as a multiple of the file's size; more is an attack
MIN_ROWS = 2**20  # images that any file may expand to
MAX_ARRAYS = 50_000  # of a file; reading each header takes a tenth of a millisecond
MAX_CLASSES = 1_000_000  # limit of classes without names
# raised by zipfile, zlib and NumPy on malformed files
READ_ERRORS = (OSError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError)
READ_ERRORS += (AttributeError, BufferError, RuntimeError, SyntaxError, tokenize.TokenError)
READ_ERRORS += (struct.error, zipfile.BadZipFile, zlib.error)
IMAGE_NAMES = ("x", "images", "image", "imgs", "data", "pixels")
LABEL_NAMES = ("y", "labels", "label", "targets")
CLASS_NAMES = ("class_names", "classes", "label_names")
COMMON_CHANNELS = (1, 3, 4)  # recognized as channels wherever they are in a shape
UINT8 = np.dtype(np.uint8)
IDX_FILE = re.compile(r"(train|t10k|test|val)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
CIFAR_BYTES = 3 * 32 * 32  # of an image: red, green and blue planes
MAX_TEXT = 100  # letters of a name in a pickle, which may repeat a long one any number of times
HF_PREFIX = "hf:"
SAVED_MARKERS = ("dataset_dict.json", "state.json")  # written by `save_to_disk`
TABLE_FILES = (*SAVED_MARKERS, "*.parquet", "*.arrow", "*/*.parquet", "*/*.arrow")


@dataclass(eq=False)
class LazyArray:
    """Array in a file, read or memory-mapped on first use in each process."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int = 0  # where in the file the values begin, unless they are a zip member
    fortran: bool = False
    member: str = ""  # of a zip file
    stored_shape: tuple[int, ...] = ()  # (N, C, H, W), if that is not `shape`
    cached: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cached": None}

    @property
    def values(self) -> np.ndarray:
        if self.cached is not None:
            return self.cached
        if self.dtype.hasobject:
            name = self.member.removesuffix(".npy") or self.path.stem
            raise DataError(
                f"{self.path}: {name} contains pickled Python objects, which could run code"
            )
        shape, count = self.stored_shape or self.shape, math.prod(self.shape)
        try:
            if self.member:
                with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
                    values = np.lib.format.read_array(stream, allow_pickle=False)
            elif self.path.suffix == ".gz":
                with gzip.open(self.path) as file:
                    file.read(self.start)
                    data = file.read(count)
                    file.read(1)  # to the end, where the checksum is verified
                if len(data) < count:
                    raise EOFError("truncated")
                values = np.frombuffer(data, np.uint8).reshape(shape)
            elif not count:
                values = np.zeros(shape, self.dtype)
            else:
                order = "F" if self.fortran else "C"
                values = np.memmap(self.path, self.dtype, "r", self.start, shape, order)
            values = values if self.shape == shape else values.transpose(0, 2, 3, 1)
        except READ_ERRORS as error:
            raise read_error(self.path, error) from None
        self.cached = values  # two threads may both read it, with the same result
        return values


class LabeledArray(NamedTuple):
    """Images of one split or file, with their labels."""

    split: str  # empty if none is stated
    images: LazyArray | np.ndarray  # (N, H, W) or (N, H, W, C) uint8
    labels: np.ndarray  # (N,), or (N, C) of 0 and 1
    name: str = ""  # prefix of the row names; the split if empty


class RowStore(ImageStore):
    """Images stored as rows of several arrays or tables."""

    def __init__(self, parts: Sequence[Any], lengths: Iterable[int]) -> None:
        self.parts = tuple(parts)
        self.starts = np.cumsum([0, *lengths])

    def locate(self, row: int) -> tuple[Any, int]:
        """Return the part and the row in it."""
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.parts[part], int(row - self.starts[part])


class ArrayStore(RowStore):
    in_memory = True

    def read(self, row: int) -> np.ndarray:
        array, index = self.locate(row)
        values = array.values if isinstance(array, LazyArray) else array
        return np.array(values[index])  # a copy: the caller may write to it


def row_names(parts: Iterable[tuple[str, int]]) -> PackedStrings:
    """Return names of rows: `train/0`, `train/1`, …, `test/0`, …"""
    return PackedStrings(f"{name}/{row}" for name, count in parts for row in range(count))


def index_arrays(
    parts: list[LabeledArray], classes: tuple[str, ...] | None, path: Path
) -> DatasetIndex:
    """Index labeled arrays; classes without names are named by their numbers."""
    parts = sorted(parts, key=lambda part: split_order(part.split))
    lengths = [part.images.shape[0] for part in parts]
    if not sum(lengths):
        raise DataError(f"{path} contains no images")
    files = {part.images.path for part in parts if isinstance(part.images, LazyArray)}
    if files:
        check_rows(path, sum(lengths), sum(file.stat().st_size for file in files))
    labels, classes = encode_labels([part.labels for part in parts], classes, path)
    split_names = tuple(dict.fromkeys(part.split for part in parts if part.split))
    split_ids = [split_names.index(part.split) if part.split else 0 for part in parts]
    prefixes = [part.name or part.split or "row" for part in parts]
    return DatasetIndex(
        names=row_names(zip(prefixes, lengths, strict=True)),
        labels=labels,
        classes=classes,
        store=ArrayStore([part.images for part in parts], lengths),
        split_names=split_names,
        split_ids=np.repeat(np.array(split_ids, np.uint8), lengths) if split_names else None,
    )


def check_rows(path: Path, rows: int, size: int) -> None:
    if rows > MIN_ROWS + MAX_EXPANSION * size:
        raise DataError(
            f"{path} has {rows:,} rows, too many for its size; unpack it if you trust it"
        )


def encode_labels(
    parts: list[np.ndarray], classes: tuple[str, ...] | None, path: Path
) -> tuple[np.ndarray | LabelSets, tuple[str, ...]]:
    """Return the labels of all parts as class ids, and the classes.

    Labels are numbers or strings (N,), a column of them, one-hot, or 0 and 1 (N, C) if multi-label.
    """
    arrays = []
    for labels in map(np.asarray, parts):
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.dtype.kind == "f" and np.array_equal(labels, np.rint(labels)):
            labels = labels.astype(np.int64)
        binary = labels.ndim == 2 and labels.dtype.kind in "iub" and np.isin(labels, (0, 1)).all()
        if not binary and (labels.ndim != 1 or labels.dtype.kind not in "iuU"):
            raise DataError(
                f"{path} has labels of shape {labels.shape} and dtype {labels.dtype}; expected "
                "integers or strings (N,), or 0 and 1 (N, C)"
            )
        arrays.append(labels)
    if len({labels.shape[1:] for labels in arrays}) > 1:
        shapes = " and ".join(str(labels.shape) for labels in arrays)
        raise DataError(f"{path} has labels of shapes {shapes} in its splits; they must agree")
    labels = np.concatenate(arrays)
    if labels.dtype.kind == "U":
        classes = classes or sort_classes(labels.tolist())
        encoder = SampleEncoder()
        for name in labels.tolist():
            encoder.add((name,))
        ids = {name: number for number, name in enumerate(classes)}
        return encoder.labels(ids, classes, str(path)), classes
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=0)) + 1
    if labels.ndim == 2 and (labels.sum(axis=1) == 1).all():
        labels = labels.argmax(axis=1)  # one-hot in all splits
    classes = classes or tuple(str(number) for number in range(min(count, MAX_CLASSES)))
    if count > len(classes) or (labels.ndim == 1 and labels.min(initial=0) < 0):
        raise DataError(f"{path} has labels outside its {len(classes)} classes")
    if labels.ndim == 1:
        return labels.astype(np.int32), classes
    applying = np.nonzero(labels)[1].astype(np.int32)
    return LabelSets(applying, np.cumsum(labels.astype(bool).sum(axis=1))), classes


# .npz and .npy files.


def index_array_files(path: Path) -> DatasetIndex:
    """Index an .npz file, the .npy files of a folder, or the pair that an .npy file belongs to.

    Images are paired with labels by name: x_train with y_train, images with labels.
    """
    folder = path if path.is_dir() else path.parent
    try:
        if path.suffix.lower() == ".npz" and path.is_file():
            arrays = read_npz(path)
        else:
            arrays = {}
            for file in filter(Path.is_file, sorted(folder.glob("*.npy"))):
                with file.open("rb") as stream:
                    shape, fortran, dtype = read_npy_header(stream)
                    start = stream.tell()
                size = math.prod(shape) * dtype.itemsize + start
                if not dtype.hasobject and size > file.stat().st_size:
                    raise ValueError(f"{file.name} is truncated")
                arrays[file.stem] = LazyArray(file, shape, dtype, start=start, fortran=fortran)
    except READ_ERRORS as error:
        raise read_error(path, error) from None
    if path.suffix.lower() == ".npy" and path.is_file():
        split = array_role(path.stem)[1]
        arrays = {name: array for name, array in arrays.items() if array_role(name)[1] == split}
    roles = {array_role(name): array for name, array in arrays.items()}
    parts = []
    for (role, split), array in roles.items():
        if role != "images":
            continue
        if ("labels", split) not in roles:
            raise DataError(f"{path} has images but no labels{f' for {split}' if split else ''}")
        images, labels = channels_last(array), roles["labels", split].values
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
    return index_arrays(parts, read_classes(str(folder)), path)


def array_role(name: str) -> tuple[str, str]:
    """Return role and split of an array: ("images", "train") for x_train or train_images."""
    words = [word for word in re.split(r"[-_]", name.lower()) if word]
    split = next((canonical_split(word) for word in words if canonical_split(word) in SPLITS), "")
    rest = [word for word in words if canonical_split(word) != split or not split]
    if len(rest) == 1 and rest[0] in IMAGE_NAMES:
        return "images", split
    return ("labels", split) if len(rest) == 1 and rest[0] in LABEL_NAMES else (name, "other")


def channels_last(array: LazyArray) -> LazyArray:
    """Reject arrays that cannot be images; transpose (N, C, H, W) when read."""
    shape, path = array.shape, array.path
    if array.dtype != np.uint8:
        raise DataError(f"{path} has images of {array.dtype}; expected uint8, 0 to 255")
    if len(shape) not in (3, 4) or 0 in shape[1:]:
        raise DataError(f"{path} has images of shape {shape}; expected (N, H, W) or (N, H, W, C)")
    if len(shape) == 3 or shape[3] <= max(COMMON_CHANNELS):
        return array
    count, first, middle, last = shape
    if first in COMMON_CHANNELS or first < min(middle, last):
        return replace(array, shape=(count, middle, last, first), stored_shape=shape)
    if last >= min(first, middle):
        raise DataError(
            f"{path} has images of shape {shape}, with either {first} or {last} channels; "
            "expected (N, H, W, C) with fewer channels than rows and columns"
        )
    return array


def read_npz(path: Path) -> dict[str, LazyArray]:
    """Return the arrays of an .npz file by name; uncompressed ones will be memory-mapped."""
    arrays = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info, start, shape, fortran, dtype in npz_members(path, archive):
            array = LazyArray(path, shape, dtype, fortran=fortran, member=info.filename)
            arrays[info.filename.removesuffix(".npy")] = array
            if info.compress_type == zipfile.ZIP_STORED and not dtype.hasobject:
                file.seek(info.header_offset + 26)  # lengths of the name and of the extra field
                lengths = np.frombuffer(file.read(4), "<u2")
                array.start = start + info.header_offset + 30 + int(lengths.sum())
                array.member = ""
    return arrays


def npz_members(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[Any, ...]]:
    """Yield entry, length of the .npy header, shape, Fortran order and dtype of each array."""
    members = archive.infolist()
    check_npz_size(path, members)
    for info in members:
        with archive.open(info) as stream:
            shape, fortran, dtype = read_npy_header(stream)
            start = stream.tell()
        if not dtype.hasobject and math.prod(shape) * dtype.itemsize + start != info.file_size:
            raise ValueError(f"the size of {info.filename} does not match its header")
        yield info, start, shape, fortran, dtype


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
            header = readers[version](stream)
        except tokenize.TokenError as error:  # not a SyntaxError since Python 3.12
            raise ValueError("corrupt .npy header") from error
    if not header[2].itemsize:
        raise ValueError("items of no bytes, of which a small file may have any number")
    return header


# MNIST and CIFAR.


class Cifar(NamedTuple):
    folder: str  # in the archive
    files: dict[str, str]  # file: split
    class_file: str
    label_bytes: int  # before each image in the binary version; 0 for the Python version


BATCHES = dict.fromkeys((f"data_batch_{number}" for number in range(1, 6)), "train")
BATCHES |= {"test_batch": "test"}
HALVES = {"train": "train", "test": "test"}
CIFAR = (
    Cifar("cifar-10-batches-py", BATCHES, "batches.meta", 0),
    Cifar("cifar-100-python", HALVES, "meta", 0),
    Cifar(
        "cifar-10-batches-bin", {f"{k}.bin": v for k, v in BATCHES.items()}, "batches.meta.txt", 1
    ),
    Cifar(
        "cifar-100-binary", {f"{k}.bin": v for k, v in HALVES.items()}, "fine_label_names.txt", 2
    ),
)


def find_published(folder: Path) -> Callable[[], DatasetIndex] | None:
    """Return the function that indexes MNIST or CIFAR in a folder or torchvision's subfolder of
    it."""
    for path in (folder, folder / "raw", folder / "MNIST" / "raw"):
        if path.is_dir() and any(IDX_FILE.fullmatch(file.name) for file in path.iterdir()):
            return partial(index_idx, path)
    for version in CIFAR:
        for path in (folder, folder / version.folder):
            # `train` and `test` are also the names of other files
            is_python_100 = version.folder == "cifar-100-python"
            needed = [version.class_file] if is_python_100 else version.files
            if any((path / name).is_file() for name in needed):
                return partial(index_cifar, path, version)
    return None


def index_idx(folder: Path) -> DatasetIndex:
    """Index MNIST, or a dataset in its format."""
    files = {}
    for file in sorted(folder.iterdir(), reverse=True):  # prefers the unpacked file
        if file.is_file() and (match := IDX_FILE.fullmatch(file.name)):
            files[match[1], match[2]] = file
    parts = []
    for (split, role), file in files.items():
        if role == "images":
            if (split, "labels") not in files:
                raise DataError(f"{folder} has {file.name} but not its labels")
            images, labels = read_idx(file), read_idx(files[split, "labels"])
            if len(images.shape) != 3 or labels.shape != images.shape[:1]:
                raise DataError(f"{file} has shape {images.shape}, its labels {labels.shape}")
            parts.append(LabeledArray("test" if split == "t10k" else split, images, labels.values))
    if not parts:
        raise DataError(f"{folder} has MNIST labels but not their images")
    return index_arrays(parts, None, folder)


def read_idx(path: Path) -> LazyArray:
    """Read two zeros, type 8 (bytes), the number of dimensions, the shape, then the values."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            magic = file.read(4)
            shape = tuple(np.frombuffer(file.read(4 * magic[3]), ">u4").tolist())
            if magic[:3] != b"\0\0\x08" or len(shape) != magic[3]:
                raise ValueError("not an MNIST (IDX) file")
    except READ_ERRORS as error:
        raise read_error(path, error) from None
    size, start, file_size = math.prod(shape), 4 + 4 * len(shape), path.stat().st_size
    if path.suffix == ".gz" and size > MAX_EXPANSION * file_size + 2**26:
        raise DataError(
            f"{path} declares {size:,} bytes of pixels, more than {MAX_EXPANSION} times its "
            "size; unpack it yourself if you trust it"
        )
    if path.suffix != ".gz" and file_size < start + size:
        raise DataError(f"{path} is truncated: it declares {size:,} bytes of pixels")
    return LazyArray(path, shape, UINT8, start=start)


def index_cifar(folder: Path, version: Cifar) -> DatasetIndex:
    """Index the files of CIFAR-10 or CIFAR-100 that are present."""
    parts, classes, path = [], None, folder
    try:
        for name, split in version.files.items():
            if (path := folder / name).is_file():
                images, labels = read_cifar(path, version.label_bytes)
                parts.append(LabeledArray(split, images, labels, name.removesuffix(".bin")))
        path = folder / version.class_file
        if path.is_file() and version.label_bytes:
            classes = parse_classes(path.read_text("utf-8", "replace"), str(path))
        elif path.is_file():
            content = read_pickle(path)
            names = content.get("fine_label_names", content.get("label_names"))
            if not isinstance(names, list):
                raise DataError(f"{path} has no class names")
            classes = tuple(as_text(name) for name in names)
    except READ_ERRORS as error:
        raise read_error(path, error) from None
    return index_arrays(parts, classes, folder)


def read_cifar(path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read images (N, 32, 32, 3) and labels; of CIFAR-100's two labels the second is the class."""
    if label_bytes:
        count, rest = divmod(path.stat().st_size, label_bytes + CIFAR_BYTES)
        if rest or not count:
            raise ValueError(f"size is not a multiple of {label_bytes + CIFAR_BYTES}-byte records")
        records = np.fromfile(path, np.uint8).reshape(count, label_bytes + CIFAR_BYTES)
        rows, labels = records[:, label_bytes:], records[:, label_bytes - 1]
    else:
        content = read_pickle(path)
        labels, data = content.get("fine_labels", content.get("labels")), content.get("data")
        match getattr(data, "state", None):  # of a pickled array
            case (_, (int(), int()) as shape, PickledCall(args=("u1" | b"u1", *_)), order, values):
                values = values.args[0] if isinstance(values, PickledCall) else values
                values = values.encode("latin1") if isinstance(values, str) else values
                rows = np.frombuffer(values, np.uint8).reshape(shape, order="F" if order else "C")
            case _:
                raise ValueError("it has no two-dimensional uint8 array of pixels")
        if not isinstance(labels, list) or {*map(type, labels)} - {int} or len(labels) != len(rows):
            raise ValueError("it does not have one label per image")
        labels = np.array(labels, np.int64)
    return rows.reshape(len(rows), 3, 32, 32).transpose(0, 2, 3, 1), labels


PICKLED_NAMES = {  # all that CIFAR's pickles refer to
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 pickles bytes with old protocols
}


class CifarUnpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLED_NAMES:
            raise DataError(f"it refers to {module}.{name}, and loading it could run code")
        return PickledCall


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a dictionary with string keys."""
    try:
        with path.open("rb") as file:
            content = CifarUnpickler(file).load()
    except DataError as error:
        raise DataError(f"{path} is not a CIFAR file: {error}") from None
    except (OSError, MemoryError) as error:
        raise read_error(path, error) from None
    except Exception as error:  # a corrupt pickle can raise anything
        raise DataError(f"{path} is not a CIFAR file, or corrupt: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a CIFAR file")
    return {as_text(key): value for key, value in content.items()}


def as_text(value: Any) -> str:
    value = value.args[0] if isinstance(value, PickledCall) else value
    if not isinstance(value, str | bytes):
        raise ValueError(f"it has a {type(value).__name__} in place of text")
    value = value[:MAX_TEXT]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


# Hugging Face datasets.


class TableStore(RowStore):
    """Images stored in memory-mapped Arrow tables, or in files that these name below `roots`."""

    def __init__(
        self, tables: Sequence[Any], column: str, names: PackedStrings, roots: Sequence[str]
    ) -> None:
        super().__init__(tables, map(len, tables))
        self.column, self.names, self.roots = column, names, tuple(roots)

    def read(self, row: int) -> bytes:
        table, index = self.locate(row)
        name = self.names[row]
        try:
            cell = table[index][self.column]
        except Exception as error:  # pyarrow raises various exceptions
            raise table_error(f"row {name}", error) from None
        if isinstance(cell, dict) and cell.get("bytes"):
            return cell["bytes"]
        if isinstance(cell, dict) and cell.get("path"):
            if not any(is_inside(cell["path"], root) for root in self.roots):
                raise outside_error(name, cell["path"], self.roots[0])
            return read_file(cell["path"])
        raise DataError(f"{name} contains no image")


def index_hf(reference: str) -> DatasetIndex:
    """Index all splits of a dataset of the hub, a folder or a file."""
    library = require("datasets", extra="data", feature=reference)
    path, is_hub = Path(reference), reference.startswith(HF_PREFIX)
    try:
        for file in () if is_hub else [path] if not path.is_dir() else path.rglob("*"):
            if file.suffix.lower() in (".arrow", ".parquet") and not file.is_dir():
                check_table(file)
        if is_hub:
            repository, _, config = reference.removeprefix(HF_PREFIX).partition("@")
            loaded = library.load_dataset(repository, config or None)
        elif any((path / marker).is_file() for marker in SAVED_MARKERS):
            loaded = library.load_from_disk(reference)
            for table in loaded.values() if isinstance(loaded, dict) else [loaded]:
                table.data.validate(full=True)  # of any files: they are named in state.json
        elif path.is_file():
            kind = path.suffix.removeprefix(".").lower()
            loaded = library.load_dataset(kind, data_files=reference)
        else:
            loaded = library.load_dataset(reference)
    except Exception as error:  # the hub, the network and pyarrow raise various exceptions
        raise table_error(reference, error) from None
    loaded = loaded if isinstance(loaded, dict) else {"": loaded}
    tables = {canonical_split(str(name)): table for name, table in loaded.items()}
    splits = sorted(tables, key=split_order)
    features = tables[splits[0]].features
    image, label, names, multi_label = find_columns(library, features, reference)
    encoder, notes = SampleEncoder(multi_label=multi_label), []
    for split in list(splits):
        labels = [
            (tuple(map(str, () if value is None else value)), True)
            if multi_label
            else parse_labels(value)
            for value in tables[split].select_columns([label])[label][:]
        ]
        missing = [not values and not several for values, several in labels]
        hidden = [values == ("-1",) for values, _ in labels]  # unlabeled on the hub
        if labels and (all(missing) or all(hidden)):
            notes.append(f"split {split} has no labels and was skipped")
            splits.remove(split)
            continue
        if any(missing):
            row = f"row {missing.index(True)}" + (f" of split {split}" if split else "")
            raise DataError(f"{reference}: {row} has no label; label it or remove the row")
        for values, several in labels:
            encoder.add(values, split, multi_label=several)
    if not len(encoder.ends):
        raise DataError(f"{reference} contains no labeled images")
    classes, ids = number_classes(encoder, names)
    if names:  # labels are ids of these
        ids = {str(number): number for number in range(len(classes))}
    # the folders of files that a table may name
    roots = [os.path.realpath(path.parent if path.is_file() else path)]
    if ALLOW_OUTSIDE.get():
        roots = ["/"]
    elif is_hub:
        hub = require("huggingface_hub.constants", extra="data", feature=reference)
        caches = library.config.HF_DATASETS_CACHE, library.config.DOWNLOADED_DATASETS_PATH
        roots = [os.path.realpath(root) for root in (hub.HF_HUB_CACHE, *caches)]
    undecoded = library.Image(decode=False)
    images = [tables[split].cast_column(image, undecoded) for split in splits]
    lengths = [len(tables[split]) for split in splits]
    rows = row_names((split or "row", n) for split, n in zip(splits, lengths, strict=True))
    store = TableStore(images, image, rows, roots)
    return encoder.index(reference, rows, store, classes, ids, splits=splits, notes=notes)


def check_table(path: Path) -> None:
    """Reject a pipe, rows that the file's size cannot account for, and offsets outside of their
    buffers, which pyarrow follows."""
    arrow = require("pyarrow", "pyarrow.ipc", "pyarrow.parquet", extra="data", feature=str(path))
    if not path.is_file():
        raise DataError(f"{path} is not a regular file")
    if path.suffix.lower() == ".parquet":
        rows = arrow.parquet.read_metadata(path).num_rows
    else:
        rows = 0
        with arrow.memory_map(str(path)) as source:
            try:
                batches: Iterable[Any] = arrow.ipc.open_stream(source)
            except arrow.ArrowInvalid:
                file = arrow.ipc.open_file(source)
                batches = map(file.get_batch, range(file.num_record_batches))
            for batch in batches:
                batch.validate(full=True)
                rows += batch.num_rows
    check_rows(path, rows, path.stat().st_size)


def find_columns(
    library: Any, features: Any, reference: str
) -> tuple[str, str, tuple[str, ...] | None, bool]:
    """Return image and label column, class names, and whether there are several labels.

    The image column is found by type, the label column by type or name.
    """
    images = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    typed = [
        (name, tuple(inner.names), inner is not kind)
        for name, kind in features.items()
        if isinstance(inner := getattr(kind, "feature", kind), library.ClassLabel)
    ]
    named = [
        (name, None, hasattr(features[name], "feature"))
        for name in LABEL_COLUMNS
        if name in features
    ]
    if not images or not (typed or named):
        missing = "label" if images else "image"
        columns = ", ".join(features) or "none"
        raise DataError(f"{reference} has no {missing} column; its columns: {columns}")
    if typed:
        return images[0], *min(typed, key=lambda column: column[0] not in LABEL_COLUMNS)
    return images[0], *named[0]


def table_error(what: str, error: Exception) -> DataError:
    message = " ".join(str(error).split())[:300] or type(error).__name__
    return DataError(f"Hugging Face datasets cannot open {what}: {message}")
