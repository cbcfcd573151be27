"""MNIST and CIFAR in the files they were published in.

MNIST, Fashion-MNIST, KMNIST: `train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, …, also with .gz.
CIFAR-10, CIFAR-100: the binary version, and the Python version, which is a pickle. A pickle can run
code when it is loaded; this unpickler builds only numbers, strings, lists, dictionaries and arrays.
"""

import gzip
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.arrays import (
    MAX_EXPANSION,
    READ_ERRORS,
    LabeledArray,
    LazyArray,
    index_arrays,
    map_array,
)
from vitrail.data.datasets import DatasetIndex
from vitrail.data.folders import parse_classes
from vitrail.data.storage import read_error
from vitrail.errors import DataError

IDX_FILE = re.compile(r"(train|t10k|test|val)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
UINT8 = np.dtype(np.uint8)
IMAGE_BYTES = 3 * 32 * 32  # of CIFAR: red, green and blue planes


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
    is_python = version.label_bytes == 0
    parts = []
    for name, split in version.files.items():
        if (path := folder / name).is_file():
            try:
                rows, labels = read_cifar(path, version.label_bytes)
            except READ_ERRORS as error:
                raise read_error(path, error) from None
            shape = (len(rows), 32, 32, 3)
            images = LazyArray(shape, UINT8, cifar_images, path, version.label_bytes)
            images.cached = to_images(rows)
            parts.append(LabeledArray(split, images, labels, name.removesuffix(".bin")))
    path, classes = folder / version.class_file, None
    if path.is_file() and is_python:
        try:
            content = read_pickle(path)
        except READ_ERRORS as error:
            raise read_error(path, error) from None
        names = content.get("fine_label_names", content.get("label_names"))
        if not isinstance(names, list):
            raise DataError(f"{path} has no class names")
        classes = tuple(as_text(name) for name in names)
    elif path.is_file():
        classes = parse_classes(path.read_text("utf-8", "replace"), str(path))
    return index_arrays(parts, classes, folder)


def read_cifar(path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read pixels (N, 3072) and labels; of CIFAR-100's two labels the second is the class."""
    if label_bytes:
        count, rest = divmod(path.stat().st_size, label_bytes + IMAGE_BYTES)
        if rest or not count:
            raise ValueError(f"size is not a multiple of {label_bytes + IMAGE_BYTES}-byte records")
        records = map_array(path, UINT8, 0, (count, label_bytes + IMAGE_BYTES), False)
        return records[:, label_bytes:], np.array(records[:, label_bytes - 1])
    content = read_pickle(path)
    labels, data = content.get("fine_labels", content.get("labels")), content.get("data")
    if not isinstance(data, PickledArray):
        raise ValueError("it has no array of pixels")
    rows = data.pixels()
    if not isinstance(labels, list) or len(labels) != len(rows):
        raise ValueError("it does not have one label per image")
    return rows, np.array(labels, np.int64)


def cifar_images(path: Path, label_bytes: int) -> np.ndarray:
    return to_images(read_cifar(path, label_bytes)[0])


def to_images(rows: np.ndarray) -> np.ndarray:
    """(N, 3072) → (N, 32, 32, 3)"""
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


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
