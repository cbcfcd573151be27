"""Several processes and devices: only this file knows of them, and it does nothing with one.

`torchrun` starts a process per device and says so in the environment. "ddp" gives each process a
copy of the model; "fsdp" gives each a part of every weight, gathered block by block when it is
needed. Weights, gradients and optimizer state are then DTensors: `whole` gathers one, `share_like`
takes this process's part. Everything else is written as if there were one process.
"""

import logging
import os
import pickle
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist  # torch itself has loaded it; what is in it is loaded when needed
from torch import Tensor, nn

from vitrail.errors import CheckpointError, ConfigError, unknown

DEVICES = ("cpu", "cuda", "mps")
TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what it tells each process


def start(device: str = "") -> torch.device:
    """The device of this process; under torchrun, the processes find each other. Idempotent."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    kind = device_kind(device, count)
    if count == 1:
        return torch.device(device or kind)
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={count} asks for {count} processes, and {missing[0]} is not set; "
            "start them with torchrun, or unset WORLD_SIZE"
        )
    chosen = torch.device(kind)
    if kind == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if chosen.index >= torch.cuda.device_count():
            raise ConfigError(
                f"torchrun started process {chosen.index + 1} on this machine, which has "
                f"{torch.cuda.device_count()} GPUs; start one process for each, or use device=cpu"
            )
        torch.cuda.set_device(chosen)
    if not several():
        # Both kinds of tensors: flags and objects go over the processor and never wait for a GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return chosen


def device_kind(device: str, count: int) -> str:
    """cpu, cuda or mps: what was asked for, if this machine has it, or the best there is."""
    kind, _, index = device.partition(":")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not kind:
        kind = "cuda" if there["cuda"] else "mps" if there["mps"] and count == 1 else "cpu"
    if kind not in DEVICES or (index and not index.isdecimal()):
        raise unknown("device", device, DEVICES)
    if not there.get(kind, True):
        raise ConfigError(f"device={device}: torch finds none on this machine; use device=cpu")
    if kind == "mps" and count > 1:
        raise ConfigError(f"device=mps is one device, not {count}; use device=cpu, or no torchrun")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device}: this machine has {torch.cuda.device_count()} GPUs")
    return kind


def stop() -> None:
    """Let go of the other processes."""
    if several():
        dist.destroy_process_group()


def leave(status: int) -> None:
    """End a process of several with its work done; one alone ends in the usual way.

    Threads of torch's may still let go of tensors while Python takes itself apart, which ends the
    process with "terminate called" and SIGABRT: torchrun would call a finished run a failure.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def several() -> bool:
    """Other processes take part."""
    return dist.is_available() and dist.is_initialized()


def restarted() -> bool:
    """Whether torchrun has started this process in place of one that died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def rank() -> int:
    return dist.get_rank() if several() else 0


def world_size() -> int:
    return dist.get_world_size() if several() else 1


def is_first() -> bool:
    return rank() == 0


def spread(objective: nn.Module, strategy: str) -> nn.Module:
    """What gives the loss: the objective, copied to all processes ("ddp") or split ("fsdp").

    All begin with the weights of the first process. With "fsdp" the objective itself is changed.
    """
    if not several():
        return objective
    if strategy == "ddp":
        # Kernels of 1 x 1 have two ways to say the same strides, and torch wonders which.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return nn.parallel.DistributedDataParallel(objective)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for tensor in objective.state_dict().values():
        dist.broadcast(tensor, src=0)
    device = next(objective.parameters()).device
    mesh = init_device_mesh(device.type, (world_size(),))
    for block in blocks(objective.get_submodule("model")):
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh, reshard_after_forward=True)  # parts, outside of a forward
    if hasattr(objective, "logits"):  # or an evaluation would meet parts, not weights
        register_fsdp_forward_method(objective, "logits")
    return objective


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: a Transformer's or Mixer's blocks, a BiT's units."""
    encoder: Any = getattr(model, "encoder", model)
    if hasattr(encoder, "stages"):
        return [unit for stage in encoder.stages for unit in stage]
    return list(encoder.blocks)


def sync_gradients(module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Off for all but the last micro-batch of a step: summing once is enough."""
    if enabled:
        return nullcontext()
    if hasattr(module, "no_sync"):
        return module.no_sync()  # type: ignore[operator]
    return kept_apart(module) if hasattr(module, "set_requires_gradient_sync") else nullcontext()


@contextmanager
def kept_apart(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def sum_over(tensor: Tensor) -> Tensor:
    """The sum over all processes."""
    if not several():
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def mean(tensor: Tensor) -> Tensor:
    """The mean over all processes."""
    return sum_over(tensor) / world_size() if several() else tensor


def any_true(flag: bool) -> bool:
    """At least one process says so; all of them learn it."""
    if not several():
        return flag
    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def wait() -> None:
    """Until all processes are here."""
    any_true(False)


def gather_objects(value: Any) -> list[Any]:
    """The value of every process, in their order, for all of them."""
    if not several():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """The value that the first process has."""
    if not several():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def clip(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """The norm of all gradients together; they are scaled down to `max_norm` if it is more."""
    found = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in found if parameter.grad is not None]
    at_once = None if any(g.device.type == "mps" for g in gradients) else True  # torch has no such
    norm = whole(nn.utils.get_total_norm(gradients, foreach=at_once))
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(found, max_norm, norm, foreach=at_once)
    return norm


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is split among processes; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore


def share_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that all of them have, split as `like` is."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def bare(module: nn.Module) -> nn.Module:
    """The objective inside what `spread` and torch.compile put around it."""
    while hasattr(module, "_orig_mod") or isinstance(module, nn.parallel.DistributedDataParallel):
        module = module._orig_mod if hasattr(module, "_orig_mod") else module.module  # type: ignore
    return module


def full_weights(objective: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's weights on the processor of the first process; nothing elsewhere."""
    model = bare(bare(objective).get_submodule("model"))
    weights = {}
    for name, tensor in model.state_dict().items():  # one whole weight at a time
        gathered = whole(tensor)
        if is_first():
            weights[name] = gathered.detach().to("cpu", copy=True)
    return weights


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors into an empty folder that all processes see, each process its part."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, sync_files=True, overwrite=False)
    with one_reason(), quiet():
        save(tensors, storage_writer=writer, no_dist=not several())


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors with what was written under their names, however it was split then.

    Runs no code from the files: torch reads the tensors with `weights_only`, and the `.metadata`,
    which torch would unpickle freely, may here name only the records that it consists of.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata = Records(file).load()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    with one_reason(), quiet():
        load(tensors, storage_reader=Reader(folder), no_dist=not several())


class Records(pickle._Unpickler):  # Python's own: C's has no way to refuse an instruction
    """Knows nothing but tensors' names, shapes and places: not even torch's record of bytes,
    which are objects to be unpickled in their turn. State is set on new records only: on a class,
    a function or a member of an enumeration, it would stay for the whole process."""

    MAY = re.compile(
        r"torch\.(Size|b?float\d+|u?int\d+|bool)|torch\.serialization\._get_layout"
        r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
        r"|torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|StorageMeta"
        r"|TensorProperties|TensorStorageMetadata|ChunkStorageMetadata|_MEM_FORMAT_ENCODING)"
        r"|pathlib(\._local)?\.(Posix|Windows)Path"
    )

    def find_class(self, module: str, name: str) -> Any:
        if "." in name or not self.MAY.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"its .metadata asks for {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        record: Any = self.stack[-2]  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(record, type) or not is_dataclass(record):
            raise pickle.UnpicklingError(f"its .metadata would change a {type(record).__name__}")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch: Any = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


@contextmanager
def one_reason() -> Iterator[None]:
    """What went wrong in any process, in place of torch's list of tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        if not isinstance(first, Exception):
            raise first from None  # Ctrl-C is no damage
        raise CheckpointError(reason_of(first)) from error


def reason_of(error: BaseException) -> str:
    """The first line of an error, in the system's words if it is one of the system's."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or type(error).__name__).strip().splitlines()[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Torch tells that one process is one process, and logs what it does with every tensor."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
            yield
    finally:
        logging.disable(before)
