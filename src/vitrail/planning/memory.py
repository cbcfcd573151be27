"""Memory of one device, by part, when a step needs most of it.

Tensors are counted exactly (`trace.py`). A process holds more: Python and torch themselves, and the
holes that the C library leaves between blocks. Torch asks it for each tensor; glibc takes blocks
below a threshold of up to 32 MiB from one heap, looks for a hole that is a little larger than the
block (it must begin at a multiple of 64 bytes), and gives the crumbs at its edges to small objects.
While those live, the next tensor of the same size does not fit there. How much is lost depends on
the order of everything, so a probe measures it; without one there is an estimate. With
MALLOC_MMAP_THRESHOLD_=65536 in the environment tensors are mapped one by one, and none is lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from vitrail import distributed
from vitrail.formatting import MIB
from vitrail.models.config import Config, pair
from vitrail.models.vit import build
from vitrail.planning.trace import PARTS, Trace
from vitrail.planning.wish import Wish
from vitrail.training.auto_config import choose_precision, choose_shards
from vitrail.training.cpu_parallel import worth_sharding
from vitrail.training.optim import is_muon_parameter

PROCESS = 325 * MIB  # Python, torch and vitrail after a step of the smallest model; measured
HOLES = 0.25  # of the tensors: 0.16 to 0.32 in six models on glibc 2.36; with checkpointing more
FLOAT = 4  # bytes of a weight


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    parts: dict[str, int]  # tensors at the peak of a step, by what they are for
    whole: dict[str, int]  # weights, gradients, optimizer, average: all of them together
    evaluation: int  # the most that evaluating needs, with what stays
    process: int = PROCESS
    holes: float = HOLES  # share of the tensors
    measured: bool = False  # whether the last two were

    @property
    def tensors(self) -> int:
        return sum(self.parts.values())

    @property
    def lost(self) -> int:
        """Bytes in the holes of the heap."""
        return round(self.holes * self.tensors)

    @property
    def peak(self) -> int:
        """What a process holds when it holds most."""
        return self.process + max(self.tensors + self.lost, self.evaluation)


def step_parts(trace: Trace, wish: Wish, config: Config, pictures: int) -> dict[str, int]:
    """Tensors on each device at the peak of a step on so many pictures at once."""
    if wish.devices == 1:
        return trace.at_peak(pictures) | copies(trace, wish, config, pictures)
    if wish.strategy == "ddp":  # gradients are summed in copies of their own
        return trace.at_peak(pictures) | {"buckets": trace.part("weights")}
    share = 1 / wish.devices
    kept_apart = pictures < wish.share  # gradients stay whole until the last part of a step
    factors = {part: share for part in PARTS if part != "activations"}
    if kept_apart:
        factors["gradients"] = 1.0
    return scaled(trace, factors).at_peak(pictures) | {"gathered": gathered(config, wish)}


def copies(trace: Trace, wish: Wish, config: Config, pictures: int) -> dict[str, int]:
    """Gradients of the other shards of a batch (`training/cpu_parallel.py`)."""
    device = distributed.init()
    precision, _ = choose_precision(wish.precision, device, config)
    parts = choose_shards(config, wish.settings(), precision, device)
    shape = (pictures, config.channels, *pair(config.image_size))
    if parts == 1 or not worth_sharding(config, shape, parts):
        return {}
    accumulated = pictures < wish.share  # then the sum so far is there too
    return {"copies": (parts - (not accumulated)) * trace.part("weights")}


def scaled(trace: Trace, factors: dict[str, float]) -> Trace:
    """The trace with each part times a factor."""
    of_part = np.array([factors.get(part, 1.0) for part in PARTS])[trace.parts]
    return replace(trace, fixed=trace.fixed * of_part, each=trace.each * of_part)


def gathered(config: Config, wish: Wish) -> int:
    """At most so many bytes are whole on each device although they are split ("fsdp").

    While a block works, its weights and those of the next are there, then its gradients; and what
    is outside of blocks. Muon needs the whole gradients of all matrices that it turns.
    """
    model = build(config)
    blocks = [count(block.parameters()) for block in distributed.blocks(model)]
    outside = count(model.parameters()) - sum(blocks)
    most = FLOAT * (3 * max(blocks) + outside)
    if wish.optimizer == "muon":
        turned = [p for name, p in model.named_parameters() if is_muon_parameter(name, p)]
        most = max(most, FLOAT * count(turned))
    return most


def count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def largest_batch(trace: Trace, wish: Wish, config: Config, memory: Memory, free: int) -> int:
    """Pictures at once on one device that fit into so much memory; 0 if not even one does."""

    def fits(pictures: int) -> bool:
        tensors = sum(step_parts(trace, wish, config, pictures).values())
        return memory.process + tensors * (1 + memory.holes) <= free

    low, high = 0, 1
    while fits(high) and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
