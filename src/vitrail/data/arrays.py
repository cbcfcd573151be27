"""Images as arrays: .npz files, pairs of .npy files, and MNIST and CIFAR as published.

digits.npz: x_train (N, H, W) or (N, H, W, C) uint8, y_train (N,), x_test, y_test, class_names
a folder:   images.npy, labels.npy

There may be any number of channels; five or more must be fewer than rows and columns. Arrays are
read when they are needed. Uncompressed ones are memory-mapped. Pickled objects are rejected.

MNIST, Fashion-MNIST, KMNIST: `train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, …, also with .gz.
CIFAR-10, CIFAR-100: the binary version, and the Python version, which is a pickle. A pickle can run
code when it is loaded; this unpickler builds only numbers, strings, lists, dictionaries and arrays.
"""

import gzip
import math
import pickle
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
    LabelEncoder,
    LabelSets,
    RowNames,
    canonical_split,
    sort_classes,
    split_order,
)
from vitrail.data.folders import parse_classes, read_classes
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
UINT8 = np.dtype(np.uint8)
IDX_FILE = re.compile(r"(train|t10k|test|val)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
CIFAR_BYTES = 3 * 32 * 32  # of an image: red, green and blue planes


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


def index_arrays(
    parts: list[LabeledArray], classes: tuple[str, ...] | None, path: Path
) -> DatasetIndex:
    """Index labeled arrays; classes without names are named by their numbers."""
    parts = sorted(parts, key=lambda part: split_order(part.split))
    lengths = [part.images.shape[0] for part in parts]
    rows = RowNames([(p.name or p.split or "row", n) for p, n in zip(parts, lengths, strict=True)])
    if not len(rows):
        raise DataError(f"{path} contains no images")
    labels, classes = encode_labels([part.labels for part in parts], classes, path)
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
        is_binary = labels.ndim == 2 and labels.dtype.kind in "iub"
        if is_binary and np.isin(labels, (0, 1)).all():
            one_hot = (labels.sum(axis=1) == 1).all()
            labels = labels.argmax(axis=1) if one_hot else labels
        elif labels.ndim != 1 or labels.dtype.kind not in "iuU":
            raise DataError(
                f"{path} has labels of shape {labels.shape} and dtype {labels.dtype}; expected "
                "integers or strings (N,), or 0 and 1 (N, C)"
            )
        arrays.append(labels)
    if len({labels.ndim for labels in arrays}) > 1:
        raise DataError(f"{path} is single-label in one split and multi-label in another")
    labels = np.concatenate(arrays)
    if labels.dtype.kind == "U":
        classes = classes or sort_classes(labels.tolist())
        encoder = LabelEncoder()
        for name in labels.tolist():
            encoder.add((name,))
        ids = {name: number for number, name in enumerate(classes)}
        return encoder.encode(ids, classes, str(path)), classes
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=0)) + 1
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
            arrays = {file.stem: read_npy(file) for file in sorted(folder.glob("*.npy"))}
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


def array_role(name: str) -> tuple[str, str]:
    """Return role and split of an array: ("images", "train") for x_train or train_images."""
    words = [word for word in re.split(r"[-_]", name.lower()) if word]
    split = next((canonical_split(word) for word in words if canonical_split(word) in SPLITS), "")
    rest = [word for word in words if canonical_split(word) != split or not split]
    if len(rest) == 1 and rest[0] in IMAGE_NAMES:
        return "images", split
    return ("labels", split) if len(rest) == 1 and rest[0] in LABEL_NAMES else (name, "other")


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
        return LazyArray(transposed, array.dtype, read_transposed, path, array)
    if last >= min(first, middle):
        raise DataError(
            f"{path} has images of shape {shape}, with either {first} or {last} channels; "
            "expected (N, H, W, C) with fewer channels than rows and columns"
        )
    return array


def read_transposed(_path: Path, array: LazyArray) -> np.ndarray:
    return array.values.transpose(0, 2, 3, 1)


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


# MNIST and CIFAR.


class Cifar(NamedTuple):
    """One of the four versions of CIFAR."""

    folder: str  # in the archive
    files: dict[str, str]  # file: split
    class_file: str
    label_bytes: int  # before each image in the binary version; 0 for the Python version


BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
CIFAR = (
    Cifar(
        "cifar-10-batches-py",
        dict.fromkeys(BATCHES, "train") | {"test_batch": "test"},
        "batches.meta",
        0,
    ),
    Cifar("cifar-100-python", {"train": "train", "test": "test"}, "meta", 0),
    Cifar(
        "cifar-10-batches-bin",
        {f"{name}.bin": "train" for name in BATCHES} | {"test_batch.bin": "test"},
        "batches.meta.txt",
        1,
    ),
    Cifar(
        "cifar-100-binary", {"train.bin": "train", "test.bin": "test"}, "fine_label_names.txt", 2
    ),
)


def find_idx(folder: Path) -> Path | None:
    """Return the folder of the MNIST files: this one, or `raw` as torchvision writes it."""
    for path in (folder, folder / "raw", folder / "MNIST" / "raw"):
        if path.is_dir() and any(IDX_FILE.fullmatch(file.name) for file in path.iterdir()):
            return path
    return None


def find_cifar(folder: Path) -> tuple[Path, Cifar] | None:
    """Return the folder of the CIFAR files, and their version."""
    for version in CIFAR:
        for path in (folder, folder / version.folder):
            # `train` and `test` are also the names of other files
            is_python_100 = version.folder == "cifar-100-python"
            needed = [version.class_file] if is_python_100 else version.files
            if any((path / name).is_file() for name in needed):
                return path, version
    return None


def index_idx(folder: Path) -> DatasetIndex:
    """Index MNIST, or a dataset in its format."""
    files = {}
    for file in sorted(folder.iterdir(), reverse=True):  # the unpacked file over the packed one
        if match := IDX_FILE.fullmatch(file.name):
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
    size, start = math.prod(shape), 4 + 4 * len(shape)
    if path.suffix == ".gz":
        if size > MAX_EXPANSION * path.stat().st_size + 2**26:
            raise DataError(
                f"{path} declares {size:,} bytes of pixels, more than {MAX_EXPANSION} times its "
                "size; unpack it yourself if you trust it"
            )
        return LazyArray(shape, UINT8, read_gzip, path, start, shape)
    if path.stat().st_size < start + size:
        raise DataError(f"{path} is truncated: it declares {size:,} bytes of pixels")
    return LazyArray(shape, UINT8, map_array, path, UINT8, start, shape, False)


def read_gzip(path: Path, start: int, shape: tuple[int, ...]) -> np.ndarray:
    with gzip.open(path) as file:
        file.read(start)
        data = file.read(math.prod(shape))
        file.read(1)  # to the end, where the checksum is verified
    if len(data) < math.prod(shape):
        raise EOFError("truncated")
    return np.frombuffer(data, np.uint8).reshape(shape)


def index_cifar(folder: Path, version: Cifar) -> DatasetIndex:
    """Index the files of CIFAR-10 or CIFAR-100 that are present."""
    parts, classes, path = [], None, folder
    try:
        for name, split in version.files.items():
            if (path := folder / name).is_file():
                pixels, labels = read_cifar(path, version.label_bytes)
                images = LazyArray(pixels.shape, UINT8, cifar_images, path, version.label_bytes)
                images.cached = pixels
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
        records = map_array(path, UINT8, 0, (count, label_bytes + CIFAR_BYTES), False)
        rows, labels = records[:, label_bytes:], np.array(records[:, label_bytes - 1])
    else:
        content = read_pickle(path)
        labels, data = content.get("fine_labels", content.get("labels")), content.get("data")
        if not isinstance(data, PickledArray):
            raise ValueError("it has no array of pixels")
        rows = data.pixels()
        if not isinstance(labels, list) or len(labels) != len(rows):
            raise ValueError("it does not have one label per image")
        labels = np.array(labels, np.int64)
    return rows.reshape(len(rows), 3, 32, 32).transpose(0, 2, 3, 1), labels


def cifar_images(path: Path, label_bytes: int) -> np.ndarray:
    return read_cifar(path, label_bytes)[0]


class PickledArray:
    """State of a pickled array, not yet trusted."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, tuple) else ()

    def pixels(self) -> np.ndarray:
        match self.state:
            case (
                _,
                (int(), int()) as shape,
                PickledType(name="u1"),
                bool() | int() as fortran,
                data,
            ):
                data = data.encode("latin1") if isinstance(data, str) else data
                array = np.frombuffer(data, np.uint8)
                return array.reshape(shape, order="F" if fortran else "C")
        raise ValueError("its array is not two-dimensional uint8")


class PickledType:
    """Name of a pickled dtype."""

    def __init__(self, name: Any = "", *_: Any) -> None:
        self.name = as_text(name)

    def __setstate__(self, state: Any) -> None:
        pass


class Latin1:
    """Bytes, which Python 3 writes into old pickle protocols as a call of `codecs.encode`."""

    def __new__(cls, text: Any, encoding: Any = "latin1") -> Any:
        return str(text).encode("latin1")


# All that CIFAR's pickles refer to. None of these does more than store its arguments.
PICKLE_CLASSES: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): PickledType,
    ("_codecs", "encode"): Latin1,
}


class Unpickler(pickle._Unpickler):  # the Python version: the C one trusts sizes in the file
    """Restricted unpickler: rejects other classes, and BUILD on anything but arrays, since setting
    the state of a class would change it for the whole process."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLE_CLASSES:
            raise DataError(f"it refers to {module}.{name}, and loading it could run code")
        return PICKLE_CLASSES[module, name]

    def load_build(self) -> None:
        target: Any = self.stack[-2]  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(target, PickledArray | PickledType):
            raise DataError(f"it sets the state of a {type(target).__name__}")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch: Any = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a dictionary with string keys."""
    try:
        with path.open("rb") as file:
            content = Unpickler(file, encoding="bytes").load()
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
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
