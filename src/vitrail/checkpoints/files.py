"""Read and write tensor files: .npz, .safetensors and torch pickles (.pt, .pth, .bin, .ckpt).

Files are untrusted. A `LazyTensor` knows its shape and reads its values on demand, so a file can be
parsed and rejected before memory is allocated. No code from a file is ever executed. Writes go to a
temporary file that is renamed into place.
"""

import argparse
import io
import json
import os
import pickle
import re
import stat
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.data.arrays import check_npz_size, npz_members
from vitrail.data.pickles import PickledCall, Unpickler
from vitrail.data.storage import atomic_path
from vitrail.errors import CheckpointError, DataError, VitrailError

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin")  # standard names, by preference
# Keys under which training scripts store the state dict, by priority. Averaged weights (EMA) come
# first, as in timm: they are the better model.
EMA_KEYS = ("state_dict_ema", "model_ema")
STATE_DICT_KEYS = (*EMA_KEYS, "state_dict", "model", "model_state_dict", "teacher", "net")
MAX_JSON_BYTES = 2**26  # 21,843 class names have 2**19
MAX_NAME = 500  # letters of a tensor's name; patterns are matched to it, and prefixes removed
N_AVERAGED = "n_averaged"  # the counter buffer of torch's AveragedModel
SUFFIXES = {".npz": "npz", ".safetensors": "safetensors"}
SUFFIXES |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".tar"), "torch")  # timm's .pth.tar


class LazyTensor(NamedTuple):
    """A tensor in a file: the shape is known, the values are read on demand."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> "LazyTensor":
        """Apply a function lazily; its output shape is inferred on the meta device."""
        shape = tuple(function(torch.empty(self.shape, device="meta")).shape)
        return LazyTensor(shape, lambda: function(self.read()))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a file or folder, and the settings stored with them."""

    tensors: dict[str, LazyTensor]
    settings: dict[str, Any] = field(default_factory=dict)  # config.json, or the file's metadata
    skipped: dict[str, str] = field(default_factory=dict)  # unused tensors: name → reason
    guesses: dict[str, str] = field(default_factory=dict)  # ambiguities: part → interpretation
    layout: tuple[str, ...] = ()  # top-level keys of a training checkpoint

    def without(self, patterns: Mapping[str, str]) -> "Checkpoint":
        """Skip the tensors whose names match a pattern, each with the reason of the pattern."""
        tensors, skipped = {}, dict(self.skipped)
        for name, tensor in self.tensors.items():
            pattern = next((pattern for pattern in patterns if re.match(pattern, name)), None)
            if pattern is None:
                tensors[name] = tensor
            else:
                module = re.sub(rf"({pattern}).+", r"\1*", name)  # one line per module
                skipped[re.sub(r"\.\d+\.", ".*.", module)] = patterns[pattern]
        return replace(self, tensors=tensors, skipped=skipped)

    def shape(self, name: str, ndim: int) -> tuple[int, ...]:
        """Return the shape of a required tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"missing tensors: {name}")
        shape = self.tensors[name].shape
        if len(shape) != ndim or 0 in shape:
            raise CheckpointError(
                f"shape mismatch: {name} is {shape}, expected {ndim} non-empty axes"
            )
        return shape

    def size(self, name: str, ndim: int = 1, axis: int = 0) -> int:
        """Return one dimension of an optional tensor; 0 if it is absent."""
        return self.shape(name, ndim)[axis] if name in self.tensors else 0

    def count(self, pattern: str) -> int:
        """Count the distinct values of the pattern's group."""
        return len({match[1] for name in self.tensors if (match := re.match(pattern, name))})

    def units(self, pattern: str) -> tuple[int, ...]:
        """Count the units of each stage of a ResNet; the pattern's groups are stage and unit."""
        matches = [match for name in self.tensors if (match := re.match(pattern, name))]
        stages = Counter(stage for stage, _ in {(int(match[1]), match[2]) for match in matches})
        return tuple(units for _, units in sorted(stages.items()))


class OpenFile:
    """An open file, whose contents stay the same if another process replaces the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    @contextmanager
    def stream(self) -> Iterator[io.BufferedReader]:
        """Read from the start. The position is shared: one reader at a time."""
        with readable_errors(self.path), os.fdopen(os.dup(self.descriptor), "rb") as stream:
            stream.seek(0)
            yield stream


def read_file(path: Path) -> Checkpoint:
    """Open a tensor file of any supported type."""
    readers = {"npz": read_npz, "safetensors": read_safetensors, "torch": read_torch}
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise CheckpointError(f"unsupported file suffix: {path}; supported: {', '.join(SUFFIXES)}")
    with readable_errors(path):
        check_regular(path)
        checkpoint = readers[kind](path)
        if any(len(name) > MAX_NAME for name in checkpoint.tensors):
            raise CheckpointError(f"{path} has a tensor name of more than {MAX_NAME} letters")
        return checkpoint


def check_regular(path: Path) -> os.stat_result:
    """Raise for a named pipe or a device, which could block or never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status


@contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Convert whatever a corrupt file makes a library raise into a one-line `CheckpointError`."""
    try:
        yield
    except FileNotFoundError:  # safetensors raises it for unreadable files, too
        denied = os.path.exists(path) and not os.access(path, os.R_OK)
        reason = "permission denied" if denied else "file not found"
        raise CheckpointError(f"{reason}: {path}") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder; expected a weights file") from None
    except PermissionError:
        raise CheckpointError(f"permission denied: {path}") from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} contains Python objects other than tensors, and loading it could run code; "
            "ask its author for a .safetensors file"
        ) from None
    except VitrailError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        raise CheckpointError(f"{path} is corrupt or has an unknown format: {reason}") from None


def weight_files(names: Iterable[str]) -> list[str]:
    """Return the weights file among a folder's names: none, one, or several if ambiguous.

    A sharded model is represented by its index.
    """
    names = sorted(names)
    for name in WEIGHTS:
        if name in names:
            return [name]
    for suffix in (".safetensors", ".npz", ".pth", ".pt"):  # by preference
        if matches := [name for name in names if name.endswith(suffix) and "/" not in name]:
            return matches
    return []


def shard_names(index: Path) -> list[str]:
    """Return the files listed in the index of a sharded model."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{index} has no valid weight_map")
    if any(Path(name).name != name for name in files.values()):
        raise CheckpointError(f"{index} refers to files outside its folder")
    return sorted(set(files.values()))


def read_npz(path: Path) -> Checkpoint:
    """Open an .npz. Each array is read, and its CRC checked, on demand."""
    file, tensors = OpenFile(path), {}

    def read(name: str, info: zipfile.ZipInfo) -> Tensor:
        with (
            file.stream() as stream,
            zipfile.ZipFile(stream) as archive,
            archive.open(info) as member,
        ):
            array = np.lib.format.read_array(member, allow_pickle=False)
            member.read()  # up to the end, where zipfile checks the CRC
        if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bfloat16 of JAX
            array = np.ascontiguousarray(array).view(np.int16)
            return torch.from_numpy(array).view(torch.bfloat16)
        if array.dtype.kind not in "fiu":
            raise CheckpointError(
                f"{name} has dtype {array.dtype}; expected floating-point weights"
            )
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))

    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        for info, _, shape, _, dtype in npz_members(path, archive):
            if dtype.hasobject:
                raise CheckpointError(
                    f"{path} contains pickled Python objects, and loading it could run code"
                )
            name = info.filename.removesuffix(".npy")
            tensors[name] = LazyTensor(shape, partial(read, name, info))
    return Checkpoint(tensors)


def read_safetensors(path: Path) -> Checkpoint:
    """Open a .safetensors file; tensors are read directly into their final memory."""
    with safe_open(path, framework="pt"):
        pass  # validates the header against the file
    file = OpenFile(path)

    def read(name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
        if dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(f"{name} has the unsupported dtype {dtype}")
        with file.stream() as stream:
            tensor = torch.empty(shape, dtype=SAFETENSORS_DTYPES[dtype], device="cpu")
            stream.seek(8 + length + data_offsets[0])
            if stream.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != tensor.nbytes:
                raise EOFError(f"{name} is truncated")
            return tensor

    with file.stream() as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: LazyTensor(tuple(info["shape"]), partial(read, name, **info))
        for name, info in header.items()
    }
    return Checkpoint(tensors, metadata)


def read_torch(path: Path) -> Checkpoint:
    """Open a torch pickle with `weights_only=True`.

    Names and shapes come from a memory map. Values are read into memory at the first access: a map
    would crash the process if the file were overwritten.
    """
    file = OpenFile(path)
    try:
        check_pickles(path, file)
    except DataError as error:
        raise CheckpointError(f"{path} is not a checkpoint of torch: {error}") from None
    content = load_pickle(path, mmap=True)
    mapped = state_dict_of(path, content)
    skipped = {} if mapped.pop(N_AVERAGED, None) is None else {N_AVERAGED: "a counter"}
    loaded: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        if not loaded:
            with file.stream() as stream:
                loaded.update(state_dict_of(path, load_pickle(stream)))
        return loaded[name]

    tensors = {
        name: LazyTensor(tuple(tensor.shape), partial(read, name))
        for name, tensor in mapped.items()
    }
    guesses = {}
    if candidates := list(state_dicts(content)):
        first, *others = candidates
        if others:
            kind = "averaged weights" if first in EMA_KEYS else "weights"
            guesses = {"state dict": f"using the {kind} {first}, not {', '.join(others)}"}
    layout = tuple(map(str, content)) if candidates else ()
    return Checkpoint(tensors, skipped=skipped, guesses=guesses, layout=layout)


class TorchUnpickler(Unpickler):
    """Rejects what costs torch more than the file's size allows. `weights_only` runs no code of a
    file, but calls `bytearray(2**40)`."""

    def load(self) -> Any:
        try:
            return super().load()
        except KeyError:  # no such opcode
            raise DataError("it is not a pickle") from None
        except AttributeError:  # items of an object that is not of builtins, such as a deque
            raise pickle.UnpicklingError from None

    def persistent_load(self, pid: Any) -> None:
        pass  # storages stay unread

    def find_class(self, module: str, name: str) -> Any:
        return partial(self.store, name)

    def store(self, name: str, *args: Any) -> PickledCall:
        match name, args:
            case "bytearray", (int() as length, *_):
                self.total += length
            case "encode", (_, encoding, *_) if encoding not in ("latin1", b"latin1"):
                raise DataError(f"it encodes text as {encoding!r:.40}")  # punycode is quadratic
            case "_rebuild_from_type_v2", (function, _, arguments, *_):
                function(*arguments)
            case _, (_, *_) if name.endswith("Tensor"):
                raise DataError(f"it calls {name:.40}")
        call = PickledCall()
        call.size = self.count(args)
        return call

    dispatch: Any = Unpickler.dispatch | {pickle.NEWOBJ[0]: Unpickler.dispatch[pickle.REDUCE[0]]}


def check_pickles(path: Path, file: OpenFile) -> None:
    """Read the pickles of a file for torch, which reads the others of an archive as bytes."""
    with file.stream() as stream:
        if stream.read(4) != b"PK\3\4":  # how torch recognizes an archive
            stream.seek(0)
            for _ in range(5):  # before torch 1.6: magic number, version, system, tensors, storages
                if stream.peek(1):
                    TorchUnpickler(stream).load()
            return
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            check_npz_size(path, members)
            if any(info.compress_type for info in members) or not has_one_directory(stream):
                raise CheckpointError(f"{path} is not an archive of torch.save")
            for info in members:
                if info.filename.lower().endswith(".pkl"):
                    TorchUnpickler(io.BytesIO(archive.read(info))).load()


def has_one_directory(stream: BinaryIO) -> bool:
    """Return whether the directory of a zip ends where its end record begins.

    Elsewhere, `zipfile` and torch look for it in different places and could find two.
    """
    end = stream.seek(-22, os.SEEK_END)
    signature, size, start, comment = struct.unpack("<4s8x2LH", stream.read())
    stream.seek(max(0, end - 76))
    record = stream.read(76)
    if record[56:60] == b"PK\6\7":  # zip64, which torch writes
        end -= 76
        size, start = struct.unpack_from("<2Q", record, 40)
        if record[:4] != b"PK\6\6" or struct.unpack_from("<Q", record, 64) != (end,):
            return False
    return signature == b"PK\5\6" and not comment and start + size == end


def load_pickle(source: Path | BinaryIO, *, mmap: bool = False) -> Any:
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.simplefilter("ignore")  # about pickles that are rejected below
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap or None)
        except RuntimeError as error:
            if not mmap or "mmap" not in str(error):
                raise
            return torch.load(source, map_location="cpu", weights_only=True)  # before torch 1.6


def state_dicts(content: Any) -> dict[str, Mapping[Any, Any]]:
    """Return the state dicts inside a training checkpoint, in order of priority."""
    if not isinstance(content, Mapping):
        return {}
    return {
        key: state
        for key in STATE_DICT_KEYS
        if isinstance(state := content.get(key), Mapping)
        and any(isinstance(value, Tensor) for value in state.values())
    }


def state_dict_of(path: Path, content: Any) -> dict[str, Tensor]:
    """Return the tensors of a state dict or of a training checkpoint that contains one."""
    content = next(iter(state_dicts(content).values()), content)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} contains a {type(content).__name__}; expected a state dict")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        keys = ", ".join(map(str, list(content)[:8])) or "none"
        raise CheckpointError(f"{path} contains no state dict; keys: {keys}")
    for name, tensor in tensors.items():
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not dense or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise CheckpointError(f"{path}: {name} is not a dense CPU tensor with its own storage")
    return tensors


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    """Write tensors atomically; the suffix decides the file type."""
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        supported = ", ".join(SUFFIXES)
        raise CheckpointError(f"cannot write {path}: unsupported suffix; use one of {supported}")
    with atomic_write(path) as temporary:
        if kind == "npz":
            with temporary.open("wb") as file:
                arrays: Any = {name: tensor.numpy() for name, tensor in tensors.items()}
                np.savez(file, **arrays)
        elif kind == "safetensors":
            save_file({n: t.contiguous() for n, t in tensors.items()}, temporary, metadata)
        else:
            torch.save(dict(tensors), temporary)


def write_json(path: Path, values: Any) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    with readable_errors(path):
        if (size := check_regular(path).st_size) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path} has {size:,} bytes, above the limit of {MAX_JSON_BYTES:,}"
            )
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return values


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` on success and deleted on failure."""
    try:
        with atomic_path(path) as temporary:
            yield temporary
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except (SafetensorError, RuntimeError) as error:  # raised by the writers when a disk is full
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"cannot write {path}: {reason}") from None
