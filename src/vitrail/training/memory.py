"""How many pictures fit at once: what a step keeps for its gradient, counted on one.

And how the C library is asked to keep what a step gives back.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.formatting import MIB
from vitrail.training.settings import Settings

USABLE = 0.6  # share of the free memory that activations may take; kernels need some too
REMEMBERED = {"sgd": 4, "lion": 4, "adafactor": 2}  # bytes for each weight; 8 by the others
# What a container or a service may take: where Linux says so, in its newer and its older way.
GROUPS = Path("/sys/fs/cgroup")
LIMITED = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
# A variable that glibc reads at the start of a process, its number in malloc.h, and a value.
KEPT = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 * MIB),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "MALLOC_ARENA_MAX": (-8, 1),
}


def activation_bytes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Bytes that a forward pass of one such batch keeps for the backward pass.

    The model is run where its weights are, which may be the meta device, where tensors have
    shapes and no memory; every tensor that autograd keeps is counted once.
    """
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    device = next(model.parameters()).device
    kept: dict[int, Tensor] = {}  # by storage; held, so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    learning = model.training
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.train()(torch.zeros(shape, device=device))
    model.train(learning)
    own = [tensor for key, tensor in kept.items() if key not in weights]
    return sum(tensor.untyped_storage().nbytes() for tensor in own)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes that share the memory
        return min([int(facts["MemAvailable"].split()[0]) * 1024, *left_to_group()]) // here
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def left_to_group() -> list[int]:
    """What a container that this process is in may still take; nothing where there is no limit."""
    left = []
    for limit, taken, droppable in LIMITED:
        try:
            most, now = (int((GROUPS / name).read_text()) for name in (limit, taken))
            lines = (GROUPS / limit).with_name("memory.stat").read_text().splitlines()
            files = int(dict(line.split() for line in lines)[droppable])
            left.append(max(0, most - now + files))
        except (OSError, KeyError, ValueError):  # no such file; or "max", which is no number
            continue
    return left


def bytes_per_weight(settings: Settings) -> int:
    """What learning keeps of each weight beside itself: gradient, moments, average."""
    return 4 + REMEMBERED.get(str(settings.optim.kind), 8) + 4 * bool(settings.average)


def largest_micro_batch(share: int, bytes_each: int, free: int) -> int:
    """The largest part of a process's share of a batch that fits, all parts alike."""
    return largest_divisor(share, int(free * USABLE) // max(1, bytes_each))


def largest_divisor(number: int, most: int) -> int:
    """The largest number up to `most` that divides `number`; 1 if there is no other."""
    return next(size for size in range(max(1, min(number, most)), 0, -1) if number % size == 0)


def less_of_it(share: int, micro_batch: int, *, checkpointing: bool) -> list[str]:
    """Options for a run that needs less memory than one so cut, and is the same run.

    Where a micro-batch is given, checkpointing is not turned on by itself; so both are named.
    """
    options = []
    if micro_batch > 1:
        smaller = f"--machine.micro-batch {largest_divisor(share, micro_batch // 2)}"
        options.append(smaller + " --machine.checkpointing" * checkpointing)
    if not checkpointing:
        options.append("--machine.checkpointing")
    return options


def keep_memory() -> None:
    """Ask the C library to keep what a step gives back for the next one, for all threads alike.

    Otherwise it returns memory to the system after each step, which clears it page by page when
    it is asked for again (4 to 13 % of a step), and each thread hoards a heap of its own: twice the
    memory. Only glibc has these settings, and nothing depends on them; whoever has set one
    outside knows better. It holds for the whole process, from now on: the commands that train in
    parts call it, and the library does not, whose process is somebody else's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not KEPT.keys() & os.environ.keys():
        for setting, value in KEPT.values():
            mallopt(setting, value)
