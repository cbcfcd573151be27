"""Memory of a training step, free memory of the machine, and malloc settings."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.formatting import MIB
from vitrail.training.config import Settings

USABLE = 0.6  # fraction of the free memory that activations may take; kernels need some too
OPTIMIZER_BYTES = {"sgd": 4, "lion": 4, "adafactor": 2}  # per weight; 8 for the others
# Memory limits of containers: cgroup v2, then v1.
CGROUP = Path("/sys/fs/cgroup")
CGROUP_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
# Environment variable of glibc, number of the option in malloc.h, value.
MALLOC_OPTIONS = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 * MIB),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "MALLOC_ARENA_MAX": (-8, 1),
}


def activation_bytes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the bytes that autograd saves in the forward pass of a batch of this shape.

    The model may be on the meta device; every saved storage is counted once.
    """
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    device = next(model.parameters()).device
    saved: dict[int, Tensor] = {}  # by storage; kept alive, so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    training = model.training
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(torch.zeros(shape, device=device))
    model.train(training)
    activations = [tensor for key, tensor in saved.items() if key not in weights]
    return sum(tensor.untyped_storage().nbytes() for tensor in activations)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            info = dict(line.split(":", 1) for line in file)
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # that share the memory
        available = int(info["MemAvailable"].split()[0]) * 1024
        return min([available, *cgroup_free_bytes()]) // processes
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def cgroup_free_bytes() -> list[int]:
    """Return what the container may still allocate; empty if there is no limit."""
    free = []
    for limit, usage, reclaimable in CGROUP_LIMITS:
        with suppress(OSError, KeyError, ValueError):  # no such file, or "max"
            most, used = (int((CGROUP / name).read_text()) for name in (limit, usage))
            lines = (CGROUP / limit).with_name("memory.stat").read_text().splitlines()
            cached = int(dict(line.split() for line in lines)[reclaimable])
            free.append(max(0, most - used + cached))
    return free


def bytes_per_weight(settings: Settings) -> int:
    """Return the bytes that training adds per weight: gradient, optimizer state, average."""
    return 4 + OPTIMIZER_BYTES.get(str(settings.optim.kind), 8) + 4 * bool(settings.average)


def num_trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`, and at least 1."""
    return next(size for size in range(max(1, min(number, limit)), 0, -1) if number % size == 0)


def memory_options(batch: int, micro_batch: int, *, checkpointing: bool) -> list[str]:
    """Return options that reduce the memory of a run without changing its result.

    An explicit micro-batch disables automatic checkpointing, so both are named.
    """
    options = []
    if micro_batch > 1:
        smaller = f"--machine.micro-batch {largest_divisor(batch, micro_batch // 2)}"
        options.append(smaller + " --machine.checkpointing" * checkpointing)
    if not checkpointing:
        options.append("--machine.checkpointing")
    return options


def configure_malloc() -> None:
    """Let glibc keep freed memory for the next step, in one arena for all threads.

    Otherwise it returns memory to the system after each step, which then zeroes it page by page (4
    to 13 % of a step), and each thread has its own arena: twice the memory. Options set in the
    environment win. This affects the whole process, so commands call it and the library does not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not MALLOC_OPTIONS.keys() & os.environ.keys():
        for option, value in MALLOC_OPTIONS.values():
            mallopt(option, value)
