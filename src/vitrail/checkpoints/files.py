"""Tensors in files: .npz, .safetensors, and torch's .pt, .pth and .bin.

An `Entry` knows the shape of a tensor and reads its values only when asked, so that a file can be
understood, and refused, before memory is taken. No code from a file is ever run. A file is written
under a temporary name and renamed: it is whole or absent.
"""

import json
import math
import os
import pickle
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import CheckpointError

MOST_UNPACKED = 20  # times a file's size that its arrays may have; more is an attack
SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
SUFFIXES = {
    ".npz": "npz",
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its shape now, its values on demand."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Entry":
        """This tensor after a change of shape, which is worked out without reading it."""
        shape = tuple(change(torch.empty(self.shape, device="meta")).shape)
        return Entry(shape, lambda: change(self.read()))


@dataclass(frozen=True, slots=True)
class Weights:
    """What a file or folder holds: tensors by name, and what is written beside them."""

    entries: dict[str, Entry]
    settings: dict[str, Any] = field(default_factory=dict)  # config.json, or a file's metadata
    left_out: dict[str, str] = field(default_factory=dict)  # tensors no model needs, and why


def read_file(path: Path) -> Weights:
    """The tensors of one file, whichever kind it is."""
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        known = ", ".join(SUFFIXES)
        raise CheckpointError(f"{path} has no ending that weights have; known: {known}")
    with clear_errors(path):
        reader = {"npz": read_npz, "safetensors": read_safetensors, "torch": read_torch}[kind]
        return reader(path)


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turn whatever a broken file makes a library say into one line about the file."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder where a file of weights is expected") from None
    except PermissionError:
        raise CheckpointError(f"{path} may not be read or written by this user") from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} holds more than tensors, and loading it could run code; "
            "ask its author for a .safetensors file"
        ) from None
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
        OverflowError,
        RuntimeError,
        MemoryError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
        SafetensorError,
    ) as error:
        words = str(error).strip().splitlines()
        reason = words[0][:200] if words else type(error).__name__
        raise CheckpointError(f"{path} is broken or of another kind: {reason}") from None


def read_npz(path: Path) -> Weights:
    """Arrays of an .npz, each read and checked against its checksum when it is asked for."""
    entries = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if sum(info.file_size for info in members) > MOST_UNPACKED * path.stat().st_size + 2**28:
            raise CheckpointError(f"{path} would grow beyond reason when unpacked")
        for info in members:
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as stream:
                shape, _, dtype = read_header(stream)
                start = stream.tell()
            if math.prod(shape) * dtype.itemsize + start != info.file_size:
                raise CheckpointError(f"{path}: {name} is not as long as it says")
            entries[name] = Entry(shape, npz_reader(path, info))
    return Weights(entries)


def npz_reader(path: Path, info: zipfile.ZipInfo) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with clear_errors(path), zipfile.ZipFile(path) as archive, archive.open(info) as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
            stream.read()  # to its end, where the checksum is compared
            return to_tensor(info.filename.removesuffix(".npy"), array)

    return read


def read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and type of an array; refuses Python objects, which would run code."""
    version = np.lib.format.read_magic(stream)
    reader = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if reader is None:
        raise ValueError(f"version {version} of the array format is not known")
    shape, fortran, dtype = reader(stream)
    if dtype.hasobject:
        raise CheckpointError("the file holds Python objects, and loading it could run code")
    return shape, fortran, dtype


def to_tensor(name: str, array: np.ndarray) -> Tensor:
    """A tensor of the array's values; JAX stores bfloat16 as two bytes without a meaning."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fiu":
        raise CheckpointError(f"{name} holds {array.dtype} values, which are no weights")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array)


def read_safetensors(path: Path) -> Weights:
    """Tensors of a .safetensors file, each read straight into the memory where it will stay."""
    with safe_open(path, framework="pt") as file:  # checks the header against the file
        metadata = dict(file.metadata() or {})
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    entries = {}
    for name, about in header.items():
        dtype = SAFETENSORS_TYPES.get(about["dtype"])
        shape, start = tuple(about["shape"]), 8 + length + about["data_offsets"][0]
        entries[name] = Entry(shape, safetensors_reader(path, name, dtype, shape, start))
    return Weights(entries, metadata)


def safetensors_reader(
    path: Path, name: str, dtype: torch.dtype | None, shape: tuple[int, ...], start: int
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if dtype is None:
            raise CheckpointError(f"{name} holds values of a type that weights do not have")
        with clear_errors(path), path.open("rb") as stream:
            tensor = torch.empty(shape, dtype=dtype)
            stream.seek(start)
            if stream.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != tensor.nbytes:
                raise EOFError(f"{name} is cut off")
            return tensor

    return read


def read_torch(path: Path) -> Weights:
    """Tensors of a pickle, of which only tensors are believed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickles that are then refused
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)  # before torch 1.6
    for key in ("state_dict", "model", "teacher", "model_ema"):  # training states
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not tensors by name")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    return Weights(
        {name: Entry(tuple(t.shape), lambda t=t: t.detach()) for name, t in tensors.items()}
    )


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    """Write tensors as .npz or .safetensors, by the path's ending: whole or not at all."""
    kind = SUFFIXES.get(path.suffix.lower())
    with whole_or_absent(path) as temporary:
        if kind == "npz":
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **{n: t.numpy() for n, t in tensors.items()})
        elif kind == "safetensors":
            save_file({n: t.contiguous() for n, t in tensors.items()}, temporary, metadata)
        elif kind == "torch":
            torch.save(dict(tensors), temporary)
        else:
            raise CheckpointError(f"cannot write {path}: known endings are {', '.join(SUFFIXES)}")


def write_json(path: Path, values: Any) -> None:
    with whole_or_absent(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    with clear_errors(path):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no settings")
    return values


@contextmanager
def whole_or_absent(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that becomes `path` if all goes well, and goes if not."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
