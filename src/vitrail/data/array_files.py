"""Arrays in .npz and .npy files, read no earlier than they are needed.

Those that are not compressed stay on the disk and are looked at where they lie. Python objects,
which could run code, are refused.
"""

import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from vitrail.data.files import cannot_read
from vitrail.errors import DataError

MOST_UNPACKED = 20  # times a file's size that its arrays may have; more is an attack
MOST_ARRAYS = 50_000  # of a file; looking at each header takes a tenth of a millisecond
BROKEN = (  # what zipfile, zlib and NumPy throw at files that are not what they seem
    OSError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    BufferError,
    RuntimeError,
    SyntaxError,
    MemoryError,
    tokenize.TokenError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


class LazyArray:
    """An array that is read when it is first asked for, in each process anew."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[..., np.ndarray], *where: Any
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.read = read
        self.where = where  # the file first, then what `read` needs to know
        self.kept: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"kept": None}

    @property
    def values(self) -> np.ndarray:
        values = self.kept  # two threads may both read it, to the same end
        if values is None:
            try:
                values = self.kept = self.read(*self.where)
            except BROKEN as error:
                raise cannot_read(self.where[0], error) from None
        return values


def npz_arrays(path: Path) -> dict[str, LazyArray]:
    """The arrays of an .npz, by name; those that are stored as they are will not be copied."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        check_unpacked(path, archive.infolist())
        for info in archive.infolist():
            with archive.open(info) as stream:
                shape, fortran, dtype = read_header(stream)
                start = stream.tell()
            name = info.filename.removesuffix(".npy")
            if dtype.hasobject:
                found[name] = LazyArray(shape, dtype, refuse, path, name)
                continue
            if math.prod(shape) * dtype.itemsize + start != info.file_size:
                raise ValueError(f"{info.filename} is not as long as it says")
            if info.compress_type == zipfile.ZIP_STORED:
                file.seek(info.header_offset + 26)  # the lengths of the name and of what follows
                lengths = np.frombuffer(file.read(4), "<u2")
                start += info.header_offset + 30 + int(lengths.sum())
                found[name] = LazyArray(shape, dtype, look_at, path, dtype, start, shape, fortran)
            else:
                found[name] = LazyArray(shape, dtype, unpack, path, info.filename)
    return found


def check_unpacked(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Refuse an archive that is small on disk and endless in memory."""
    total = sum(info.file_size for info in members)
    if len(members) > MOST_ARRAYS:
        raise ValueError(f"{len(members):,} arrays in one file; at most {MOST_ARRAYS:,} are read")
    if total > MOST_UNPACKED * path.stat().st_size + 2**28:
        raise ValueError(
            f"it unpacks to {total:,} bytes, more than {MOST_UNPACKED} times its size; "
            "if you trust it, store it uncompressed with np.savez"
        )


def npy_array(path: Path) -> LazyArray:
    with path.open("rb") as file:
        shape, fortran, dtype = read_header(file)
        start = file.tell()
    if dtype.hasobject:
        return LazyArray(shape, dtype, refuse, path, path.stem)
    if math.prod(shape) * dtype.itemsize + start > path.stat().st_size:
        raise ValueError(f"{path.name} is cut off")
    return LazyArray(shape, dtype, look_at, path, dtype, start, shape, fortran)


def look_at(
    path: Path, dtype: np.dtype, start: int, shape: tuple[int, ...], fortran: bool
) -> np.ndarray:
    """The array where it lies in the file; pages are read when they are touched."""
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def unpack(path: Path, member: str) -> np.ndarray:
    with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def refuse(path: Path, name: str) -> np.ndarray:
    raise DataError(f"{path}: {name} holds Python objects, and loading it could run code")


def read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and type of an array."""
    version = np.lib.format.read_magic(stream)
    reader = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if reader is None:
        raise ValueError(f"version {version} of the array format is not known")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers that Python 2 wrote
        try:
            return reader(stream)
        except TokenError as error:  # from Python 3.12 on it is no SyntaxError that numpy expects
            raise ValueError("the header of the array is damaged") from error
