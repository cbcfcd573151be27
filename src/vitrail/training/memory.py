"""How many pictures fit at once: what a step keeps for its gradient, counted on one."""

import os

import torch
from torch import Tensor, nn

USABLE = 0.6  # share of the free memory that activations may take; kernels need some too


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
        return int(facts["MemAvailable"].split()[0]) * 1024 // here
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def largest_micro_batch(share: int, bytes_each: int, free: int) -> int:
    """The largest part of a process's share of a batch that fits, all parts alike."""
    fitting = max(1, int(free * USABLE) // max(1, bytes_each))
    return next(size for size in range(min(share, fitting), 0, -1) if share % size == 0)
