"""Tensors in files: .npz, .safetensors, and torch's .pt, .pth and .bin.

An `Entry` knows the shape of a tensor and reads its values only when asked, so that a file can be
understood, and refused, before memory is taken. No code from a file is ever run. A file is written
under a temporary name and renamed: it is whole or absent.
"""

import argparse
import io
import json
import math
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.data.arrays import check_npz_size, read_npy_header
from vitrail.data.storage import atomic_path as written_whole
from vitrail.errors import CheckpointError, DataError

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
# Where training scripts keep their weights. Averages come first: they are the better model, and
# what timm itself takes.
AVERAGES = ("state_dict_ema", "model_ema")
TRAINING_STATES = (*AVERAGES, "state_dict", "model", "model_state_dict", "teacher", "net")
AVERAGED = "n_averaged"  # how many states torch's AveragedModel has seen, beside its weights
SUFFIXES = {
    ".npz": "npz",
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
    ".tar": "torch",  # timm's .pth.tar
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
    guessed: dict[str, str] = field(default_factory=dict)  # what the file leaves open, and how read
    layout: tuple[str, ...] = ()  # keys of a training state, one of which holds the tensors


class OpenFile:
    """A file that stays the one that was opened, even if another takes its name meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    @contextmanager
    def stream(self) -> Iterator[io.BufferedReader]:
        """From its beginning, for one reader at a time."""
        with clear_errors(self.path), os.fdopen(os.dup(self.descriptor), "rb") as stream:
            stream.seek(0)
            yield stream


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
    file = OpenFile(path)
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        check_npz_size(path, members)
        for info in members:
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as member:
                shape, dtype = safe_header(member)
                start = member.tell()
            if math.prod(shape) * dtype.itemsize + start != info.file_size:
                raise CheckpointError(f"{path}: {name} is not as long as it says")
            entries[name] = Entry(shape, npz_reader(file, info))
    return Weights(entries)


def npz_reader(file: OpenFile, info: zipfile.ZipInfo) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with (
            file.stream() as stream,
            zipfile.ZipFile(stream) as archive,
            archive.open(info) as member,
        ):
            array = np.lib.format.read_array(member, allow_pickle=False)
            member.read()  # to its end, where the checksum is compared
            return to_tensor(info.filename.removesuffix(".npy"), array)

    return read


def safe_header(stream: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array; refuses Python objects, which would run code."""
    shape, _, dtype = read_npy_header(stream)
    if dtype.hasobject:
        raise CheckpointError("the file holds Python objects, and loading it could run code")
    return shape, dtype


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
    with safe_open(path, framework="pt"):
        pass  # it checks the header against the file
    file = OpenFile(path)
    with file.stream() as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    metadata = header.pop("__metadata__", {})
    entries = {}
    for name, about in header.items():
        dtype = SAFETENSORS_TYPES.get(about["dtype"])
        shape, start = tuple(about["shape"]), 8 + length + about["data_offsets"][0]
        entries[name] = Entry(shape, safetensors_reader(file, name, dtype, shape, start))
    return Weights(entries, metadata)


def safetensors_reader(
    file: OpenFile, name: str, dtype: torch.dtype | None, shape: tuple[int, ...], start: int
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if dtype is None:
            raise CheckpointError(f"{name} holds values of a type that weights do not have")
        with file.stream() as stream:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            stream.seek(start)
            if stream.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != tensor.nbytes:
                raise EOFError(f"{name} is cut off")
            return tensor

    return read


def read_torch(path: Path) -> Weights:
    """Tensors of a pickle, of which only tensors are believed.

    It is looked at through a map, and read when the first value is asked for: a map would not
    survive that somebody writes over the file.
    """
    file = OpenFile(path)
    if zipfile.is_zipfile(path):
        with file.stream() as stream, zipfile.ZipFile(stream) as archive:
            check_npz_size(path, archive.infolist())
    content = load_torch(path, mmap=True)
    seen = tensors_of(path, content)
    left_out = {} if seen.pop(AVERAGED, None) is None else {AVERAGED: "a count, no weight"}
    whole: dict[str, Tensor] = {}

    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            if not whole:
                with file.stream() as stream:
                    whole.update(tensors_of(path, load_torch(stream)))
            return whole[name]

        return read

    entries = {name: Entry(tuple(t.shape), reader(name)) for name, t in seen.items()}
    states = states_in(content)
    layout = tuple(map(str, content)) if states else ()
    return Weights(entries, left_out=left_out, guessed=choice_among(states), layout=layout)


def load_torch(source: Path | BinaryIO, *, mmap: bool = False) -> Any:
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.simplefilter("ignore")  # of pickles that are then refused
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap or None)
        except RuntimeError as error:
            if not mmap or "mmap" not in str(error):
                raise
            return torch.load(source, map_location="cpu", weights_only=True)  # before torch 1.6


def states_in(content: Any) -> dict[str, Mapping[Any, Any]]:
    """The state dicts that a training state holds; the first is the one to take."""
    if not isinstance(content, Mapping):
        return {}
    found = {key: content.get(key) for key in TRAINING_STATES}
    return {
        key: state
        for key, state in found.items()
        if isinstance(state, Mapping) and any(isinstance(t, Tensor) for t in state.values())
    }


def choice_among(states: Mapping[str, Any]) -> dict[str, str]:
    """Which of several state dicts was taken, in words; nothing where there was no choice."""
    if len(states) < 2:
        return {}
    taken, *others = states
    average = ", the average" if taken in AVERAGES else ""
    return {"weights": f"{taken}{average}; not {', '.join(others)}"}


def tensors_of(path: Path, content: Any) -> dict[str, Tensor]:
    """The tensors by name, of a state dict or of a training state that holds one."""
    content = next(iter(states_in(content).values()), content)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not tensors by name")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        keys = ", ".join(map(str, list(content)[:8])) or "nothing"
        raise CheckpointError(f"{path} holds no tensors by name, but {keys}")
    for name, tensor in tensors.items():
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise CheckpointError(f"{path}: {name} is no plain tensor with values of its own")
    return tensors


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    """Write tensors as .npz or .safetensors, by the path's ending: whole or not at all."""
    kind = SUFFIXES.get(path.suffix.lower())
    with whole_or_absent(path) as temporary:
        if kind == "npz":
            with temporary.open("wb") as file:
                arrays: Any = {name: tensor.numpy() for name, tensor in tensors.items()}
                np.savez(file, **arrays)
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
    try:
        with written_whole(path) as temporary:
            yield temporary
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except (SafetensorError, RuntimeError) as error:  # how the writers say that a disk is full
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"cannot write {path}: {reason}") from None
