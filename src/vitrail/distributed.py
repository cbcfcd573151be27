"""Distributed training: the only module that uses torch.distributed; a no-op in one process.

`torchrun` starts one process per device and sets the environment. "ddp" replicates the model;
"fsdp" (FSDP2) shards every parameter and gathers it block by block. Parameters, gradients and
optimizer state are then DTensors: `full_tensor` gathers one, `distribute_like` shards one.
"""

import os
import pickle
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist  # already imported by torch; its submodules are imported lazily
from torch import Tensor, nn

from vitrail.errors import CheckpointError, ConfigError, unknown

DEVICES = ("cpu", "cuda", "mps")
TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun


created = False  # the process group, by `init`; another belongs to the caller


def init(device: str = "") -> torch.device:
    """Return this process's device; initialize the process group under torchrun. Idempotent."""
    global created
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = local_device(device, processes)
    if processes == 1:
        return chosen
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={processes} is set, but {missing[0]} is not; start the processes with "
            "torchrun, or unset WORLD_SIZE"
        )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not is_distributed():
        # Both backends: flags and objects use gloo and never wait for a GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
        created = True
    return chosen


@contextmanager
def process_group(device: str = "") -> Iterator[torch.device]:
    """Call `init`, and on exit destroy the process group if this call created it."""
    existed = is_distributed()
    try:
        yield init(device)
    finally:
        if not existed:
            shutdown()


def local_device(device: str = "", processes: int = 1) -> torch.device:
    """Return this process's device: under torchrun, the GPU of its local rank."""
    kind = device_type(device, processes)
    local_rank = os.environ.get("LOCAL_RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None
    if kind != "cuda" or local_rank is None:
        return torch.device(device or kind)
    chosen = torch.device("cuda", int(local_rank))
    if chosen.index >= torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started process {chosen.index + 1} on a machine with "
            f"{torch.cuda.device_count()} GPUs; start one process per GPU, or use device=cpu"
        )
    return chosen


def device_type(device: str, processes: int) -> str:
    """Return cpu, cuda or mps: the requested one if available, or the best."""
    kind, _, index = device.partition(":")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not kind:
        single_mps = available["mps"] and processes == 1
        kind = "cuda" if available["cuda"] else "mps" if single_mps else "cpu"
    if kind not in DEVICES or (index and not index.isdecimal()):
        raise unknown("device", device, DEVICES)
    if not available.get(kind, True):
        raise ConfigError(f"device={device} is not available on this machine; use device=cpu")
    if kind == "mps" and processes > 1:
        raise ConfigError(f"device=mps does not support {processes} processes; use device=cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device}: this machine has {torch.cuda.device_count()} GPUs")
    return kind


def shutdown() -> None:
    """Destroy the process group if `init` created it."""
    global created
    if created and is_distributed():
        dist.destroy_process_group()
    created = False


def exit_process(status: int) -> None:
    """Exit one of several processes immediately; return if there is only one.

    torch's threads may still free tensors while the interpreter shuts down, which aborts the
    process ("terminate called", SIGABRT), and torchrun would report a finished run as failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    return rank() == 0


def parallelize(objective: nn.Module, strategy: str) -> nn.Module:
    """Replicate ("ddp") or shard ("fsdp", in place) the module that computes the loss.

    All processes start with the weights of rank 0.
    """
    if not is_distributed():
        return objective
    if strategy == "ddp":
        # 1x1 kernels have two equivalent strides, about which torch warns.
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
    fully_shard(objective, mesh=mesh, reshard_after_forward=True)
    if hasattr(objective, "logits"):  # so that evaluation gathers the weights too
        register_fsdp_forward_method(objective, "logits")
    return objective


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: Transformer or Mixer blocks, BiT units."""
    encoder: Any = getattr(model, "encoder", model)
    if hasattr(encoder, "stages"):
        return [unit for stage in encoder.stages for unit in stage]
    return list(encoder.blocks)


@contextmanager
def sync_gradients(module: Any, enabled: bool) -> Iterator[None]:
    """Disable gradient synchronization for all but the last micro-batch of a step."""
    fsdp = not enabled and hasattr(module, "set_requires_gradient_sync")
    ddp = not enabled and hasattr(module, "no_sync")
    if fsdp and not ddp:
        module.set_requires_gradient_sync(False)
    try:
        with module.no_sync() if ddp else nullcontext():
            yield
    finally:
        if fsdp and not ddp:
            module.set_requires_gradient_sync(True)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    if not is_distributed():
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def all_reduce_mean(tensor: Tensor) -> Tensor:
    return all_reduce_sum(tensor) / world_size() if is_distributed() else tensor


def all_reduce_any(flag: bool) -> bool:
    """Return, on every rank, whether the flag is set on any rank."""
    if not is_distributed():
        return flag
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def barrier() -> None:
    all_reduce_any(False)


def all_gather_object(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: Any) -> Any:
    """Return the value of rank 0."""
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def broadcast_tensors(tensors: list[Tensor], source: int) -> list[Tensor]:
    """Return the float32 tensors of one rank, in one message; others pass some of their shapes."""
    sizes = [tensor.numel() for tensor in tensors]
    if rank() == source:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
    else:
        flat = torch.empty(sum(sizes), device=tensors[0].device)
    dist.broadcast(flat, src=source)
    return [part.view_as(t) for part, t in zip(flat.split(sizes), tensors, strict=True)]


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Return the total gradient norm, and scale the gradients down to `max_norm` if given."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    foreach = None if any(g.device.type == "mps" for g in gradients) else True  # not on mps
    norm = full_tensor(nn.utils.get_total_norm(gradients, foreach=foreach))
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(trained, max_norm, norm, foreach=foreach)
    return norm


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor; return any other tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a replicated tensor, sharded like a DTensor."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile wrappers."""
    while hasattr(module, "_orig_mod") or isinstance(module, nn.parallel.DistributedDataParallel):
        module = module._orig_mod if hasattr(module, "_orig_mod") else module.module  # type: ignore
    return module


def gather_state_dict(objective: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's full state dict on the CPU of rank 0; empty on other ranks."""
    model = unwrap(unwrap(objective).get_submodule("model"))
    weights = {}
    for name, tensor in model.state_dict().items():  # one full tensor at a time
        gathered = full_tensor(tensor)
        if is_main():
            weights[name] = gathered.detach().to("cpu", copy=True)
    return weights


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors into an empty folder on shared storage; each rank writes its shards."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, sync_files=True, overwrite=False)
    with checkpoint_io():
        save(tensors, storage_writer=writer, no_dist=not is_distributed())


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, by name, from a folder that was saved with any sharding.

    Runs no code from the files: torch reads the tensors with `weights_only`, and `.metadata`, which
    torch would unpickle without limits, is read by `MetadataUnpickler`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    with checkpoint_io():
        load(tensors, storage_reader=Reader(folder), no_dist=not is_distributed())


class MetadataUnpickler(pickle._Unpickler):  # in Python: the C version cannot reject opcodes
    """Unpickles names, shapes and locations of tensors only.

    Not even torch's `BytesStorageMetadata`, whose bytes would be unpickled in turn. BUILD is
    allowed on new dataclass instances only: on a class, function or enum member, the state would
    stay for the whole process.
    """

    ALLOWED = re.compile(
        r"torch\.(Size|b?float\d+|u?int\d+|bool)|torch\.serialization\._get_layout"
        r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
        r"|torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|StorageMeta"
        r"|TensorProperties|TensorStorageMetadata|ChunkStorageMetadata|_MEM_FORMAT_ENCODING)"
        r"|pathlib(\._local)?\.(Posix|Windows)Path"
    )

    def find_class(self, module: str, name: str) -> Any:
        if "." in name or not self.ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f".metadata refers to {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        instance: Any = self.stack[-2]  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(instance, type) or not is_dataclass(instance):
            kind = type(instance).__name__
            raise pickle.UnpicklingError(f".metadata would change the state of a {kind}")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch: Any = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


@contextmanager
def checkpoint_io() -> Iterator[None]:
    """Raise the first failure of any rank as one line, instead of torch's list of tracebacks.

    Silence torch's warning about a single process.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
            yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        if not isinstance(first, Exception):
            raise first from None  # such as KeyboardInterrupt
        raise CheckpointError(error_reason(first)) from error


def error_reason(error: BaseException) -> str:
    """Return the first line of an error; the system's message for an OSError."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or type(error).__name__).strip().splitlines()[0]
