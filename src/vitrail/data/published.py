"""MNIST and CIFAR in the files they were published in.

MNIST, Fashion-MNIST, KMNIST: `train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, …, also with .gz.
CIFAR-10, CIFAR-100: the binary version, and the Python version, which is a pickle. A pickle can run
code when it is loaded; ours builds nothing but numbers and texts and refuses everything else.
"""

import gzip
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.array_files import BROKEN, MOST_UNPACKED, LazyArray, look_at
from vitrail.data.arrays import PixelArrays, from_pixels
from vitrail.data.files import cannot_read
from vitrail.data.lists import classes_in
from vitrail.data.samples import Collection
from vitrail.errors import DataError

IDX = re.compile(r"(train|t10k|test|val)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
BYTES = np.dtype(np.uint8)
PICTURE = 3 * 32 * 32  # bytes of a CIFAR picture: red, green, blue, each row by row


class Cifar(NamedTuple):
    """One of the four versions of CIFAR."""

    folder: str  # as the archive names it
    files: dict[str, str]  # file: split
    names: str  # the file with the names of the classes
    labels: int  # bytes before a picture in the binary version; 0 for Python's


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


def idx_folder(folder: Path) -> Path | None:
    """Where the MNIST files are: here, or in `raw` as torchvision puts them."""
    for place in (folder, folder / "raw", folder / "MNIST" / "raw"):
        if place.is_dir() and any(IDX.fullmatch(file.name) for file in place.iterdir()):
            return place
    return None


def cifar_folder(folder: Path) -> tuple[Path, Cifar] | None:
    """Where the CIFAR files are, and in which version."""
    for version in CIFAR:
        for place in (folder, folder / version.folder):
            # `train` and `test` are names that other files have too
            needed = [version.names] if version.folder == "cifar-100-python" else version.files
            if any((place / name).is_file() for name in needed):
                return place, version
    return None


def from_idx(folder: Path) -> Collection:
    """MNIST, or one of the sets published in its format."""
    files = {}
    for file in sorted(folder.iterdir(), reverse=True):  # the unpacked file over the packed one
        if found := IDX.fullmatch(file.name):
            files[found[1], found[2]] = file
    pixels = []
    for (part, kind), file in files.items():
        if kind == "images":
            if (part, "labels") not in files:
                raise DataError(f"{folder} has {file.name} but not the labels for it")
            images, labels = idx_array(file), idx_array(files[part, "labels"])
            if len(images.shape) != 3 or labels.shape != images.shape[:1]:
                raise DataError(f"{file} has shape {images.shape}, its labels {labels.shape}")
            pixels.append(PixelArrays("test" if part == "t10k" else part, images, labels.values))
    if not pixels:
        raise DataError(f"{folder} has labels of MNIST's kind but not the images for them")
    return from_pixels(pixels, None, str(folder))


def idx_array(path: Path) -> LazyArray:
    """Two zeros, type 8 (bytes), the number of dimensions, each of them, then the values."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            start = file.read(4)
            shape = tuple(np.frombuffer(file.read(4 * start[3]), ">u4").tolist())
            if start[:3] != b"\0\0\x08" or len(shape) != start[3]:
                raise ValueError("it does not begin as MNIST's files do")
    except BROKEN as error:
        raise cannot_read(path, error) from None
    size, begin = math.prod(shape), 4 + 4 * len(shape)
    if path.suffix == ".gz":
        if size > MOST_UNPACKED * path.stat().st_size + 2**26:
            raise DataError(
                f"{path} announces {size:,} bytes of pixels, more than {MOST_UNPACKED} times its "
                "size; unpack it yourself if you trust it"
            )
        return LazyArray(shape, BYTES, unzip, path, begin, shape)
    if path.stat().st_size < begin + size:
        raise DataError(f"{path} is cut off: {size:,} bytes of pixels were announced")
    return LazyArray(shape, BYTES, look_at, path, BYTES, begin, shape, False)


def unzip(path: Path, start: int, shape: tuple[int, ...]) -> np.ndarray:
    with gzip.open(path) as file:
        file.read(start)
        data = file.read(math.prod(shape))
        file.read(1)  # to the end, where the checksum is compared
    if len(data) < math.prod(shape):
        raise EOFError("it is cut off")
    return np.frombuffer(data, np.uint8).reshape(shape)


def from_cifar(folder: Path, version: Cifar) -> Collection:
    """CIFAR-10 or CIFAR-100, whichever files of it are there."""
    pixels = []
    for name, split in version.files.items():
        if (folder / name).is_file():
            part = python_part if version.labels == 0 else binary_part
            try:
                images, labels = part(folder / name, version.labels)
            except BROKEN as error:
                raise cannot_read(folder / name, error) from None
            pixels.append(PixelArrays(split, images, labels, name.removesuffix(".bin")))
    names = folder / version.names
    classes = None
    if names.is_file():
        named = python_classes if version.labels == 0 else text_classes
        classes = named(names)
    return from_pixels(pixels, classes, str(folder))


def binary_part(path: Path, labels: int) -> tuple[LazyArray, np.ndarray]:
    """Records of labels and a picture; of the two labels of CIFAR-100 the second is the class."""
    count, rest = divmod(path.stat().st_size, labels + PICTURE)
    if rest or not count:
        raise ValueError(f"it is no whole number of records of {labels + PICTURE} bytes")
    values = binary_records(path, labels, count)
    images = LazyArray((count, 32, 32, 3), BYTES, binary_pictures, path, labels, count)
    return images, np.array(values[:, labels - 1])


def binary_records(path: Path, labels: int, count: int) -> np.ndarray:
    return look_at(path, BYTES, 0, (count, labels + PICTURE), False)


def binary_pictures(path: Path, labels: int, count: int) -> np.ndarray:
    return pictures(binary_records(path, labels, count)[:, labels:])


def python_part(path: Path, _: int) -> tuple[LazyArray, np.ndarray]:
    content = read_pickle(path)
    labels = content.get("fine_labels", content.get("labels"))
    rows = python_rows(content)
    if not isinstance(labels, list) or len(labels) != len(rows):
        raise ValueError("it has no label for each picture")
    images = LazyArray((len(rows), 32, 32, 3), BYTES, python_pictures, path)
    images.kept = pictures(rows)
    return images, np.array(labels, np.int64)


def python_pictures(path: Path) -> np.ndarray:
    return pictures(python_rows(read_pickle(path)))


def python_rows(content: dict[str, Any]) -> np.ndarray:
    data = content.get("data")
    if not isinstance(data, PickledArray):
        raise ValueError("it has no array of pixels")
    return data.pixels()


def pictures(rows: np.ndarray) -> np.ndarray:
    """(N, 3072) to (N, 32, 32, 3)"""
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def text_classes(path: Path) -> tuple[str, ...]:
    return classes_in(path.read_text("utf-8", "replace"), str(path))


def python_classes(path: Path) -> tuple[str, ...]:
    try:
        content = read_pickle(path)
    except BROKEN as error:
        raise cannot_read(path, error) from None
    names = content.get("fine_label_names", content.get("label_names"))
    if not isinstance(names, list):
        raise DataError(f"{path} has no names of classes")
    return tuple(as_text(name) for name in names)


class PickledArray:
    """What a pickle says about an array, without asking NumPy to believe it."""

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
        raise ValueError("its array does not hold bytes in rows")


class PickledType:
    """The type of an array's values, by name only."""

    def __init__(self, name: Any = "", *_: Any) -> None:
        self.name = as_text(name)

    def __setstate__(self, state: Any) -> None:
        pass


class Latin1:
    """Bytes: Python 3 writes them into old kinds of pickles as a call of `codecs.encode`."""

    def __new__(cls, text: Any, encoding: Any = "latin1") -> Any:
        return str(text).encode("latin1")


# All that CIFAR's pickles mention; nothing of it does more than hold what it is given.
STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): PickledType,
    ("_codecs", "encode"): Latin1,
}


class Unpickler(pickle._Unpickler):  # Python's own: C's would trust the file's numbers
    """Reads numbers, texts, lists, dictionaries and arrays; refuses whatever else is asked, such as
    to change a class, which would stay for the whole process."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise DataError(f"it asks for {module}.{name}, and loading it could run code")
        return STAND_INS[module, name]

    def load_build(self) -> None:
        found: Any = self.stack[-2]  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(found, PickledArray | PickledType):
            raise DataError(f"it would change a {type(found).__name__}")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch: Any = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle, with texts as keys."""
    try:
        with path.open("rb") as file:
            content = Unpickler(file, encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path} is no file of CIFAR: {error}") from None
    except (OSError, MemoryError) as error:
        raise cannot_read(path, error) from None
    except Exception as error:  # a broken pickle may fail in any way
        raise DataError(f"{path} is no file of CIFAR, or broken: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is no file of CIFAR")
    return {as_text(key): value for key, value in content.items()}


def as_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
