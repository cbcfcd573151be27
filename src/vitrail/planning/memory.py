"""Memory of a training step, counted without computing it.

The real step of `vitrail.training` (forward, backward, clipping, optimizer, weight average) runs on
fake tensors, which have shapes and no memory, while `AllocationRecorder` notes when each block of
memory is allocated and freed. So checkpointing, accumulation, precision, every optimizer and every
model family are counted as they are, without special cases here. Two micro-batch sizes give two
traces with the same events; a block's size is a linear function of the images, so the trace of any
micro-batch follows.

A process holds more than its tensors: Python and torch themselves, and the fragmentation of the
heap. Torch asks the C library for each tensor; glibc takes blocks below a threshold of up to 32 MiB
from one heap, looks for a hole a little larger than the block (it must be aligned to 64 bytes), and
gives what is left at its edges to small objects. While those live, the next tensor of the same size
does not fit there. How much is lost depends on the order of everything, so a few real steps measure
it (`request.py`); without them there is an estimate. With MALLOC_MMAP_THRESHOLD_=65536 in the
environment tensors are mapped one by one, and none is lost.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitrail import distributed
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Mixing, Preprocessing
from vitrail.data.transforms import normalize
from vitrail.formatting import MIB
from vitrail.models.config import Config, pair
from vitrail.models.vit import build
from vitrail.planning.request import PlanRequest
from vitrail.training.auto_config import choose_precision, choose_shards
from vitrail.training.config import Settings
from vitrail.training.cpu_parallel import worth_sharding
from vitrail.training.data_module import batch_preparation
from vitrail.training.loop import autocast_for, make_state, train_step
from vitrail.training.objectives import make_objective
from vitrail.training.optim import is_muon_parameter
from vitrail.training.schedules import Schedule

PARTS = ("weights", "gradients", "optimizer", "average", "activations")
SAMPLED = (2, 4)  # micro-batches of the two traces; many operations treat 1 as a special case
CPU = torch.device("cpu")
PROCESS = 325 * MIB  # Python, torch and vitrail after a step of the smallest model; measured
FRAGMENTATION = (
    0.25  # of the tensors: 0.16 to 0.32 in six models on glibc 2.36; checkpointing: more
)
FLOAT = 4  # bytes of a weight


@dataclass(frozen=True)
class Trace:
    """Allocations (+1) and frees (-1) of a training step, in order."""

    blocks: np.ndarray  # (events,) which block
    signs: np.ndarray  # (events,) +1 or -1
    fixed: np.ndarray  # (blocks,) bytes that do not depend on the batch
    per_image: np.ndarray  # (blocks,) bytes per image of a micro-batch
    parts: np.ndarray  # (blocks,) index into PARTS
    begin: int  # first event of the step; what is allocated before, stays

    def sizes(self, images: int) -> np.ndarray:
        """Return the bytes of each block."""
        return self.fixed + self.per_image * images

    def at_peak(self, images: int) -> dict[str, int]:
        """Return the bytes of each part when their sum is largest."""
        change = self.sizes(images)[self.blocks] * self.signs
        total = np.cumsum(change)
        peak = self.begin + int(np.argmax(total[self.begin :]))
        parts = self.parts[self.blocks[: peak + 1]]
        sums = np.bincount(parts, weights=change[: peak + 1], minlength=len(PARTS))
        return {part: round(n) for part, n in zip(PARTS, sums.tolist(), strict=True)}

    def total(self, part: str, images: int = 0) -> int:
        """Return the bytes of all blocks of a part; activations never exist all at once."""
        return round(self.sizes(images)[self.parts == PARTS.index(part)].sum())


class AllocationRecorder(TorchDispatchMode):
    """Record each block of memory that fake tensors would allocate and free."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []  # (block, +1 or -1)
        self.sizes: list[int] = []  # bytes of each block
        self.parts: dict[int, str] = {}  # block → part, if it is not an activation
        self.block_of: dict[int, int] = {}  # storage → its block

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:  # `float(loss)`, `if finite`
            return True if args[0].dtype == torch.bool else 1.0
        output = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.block_of:
                    self.block_of[storage._cdata] = self.allocate(storage.nbytes())
                    weakref.finalize(storage, self.free, storage._cdata)
        if operation is torch.ops.aten.gelu.default:
            self.correct_gelu(args[0], output)
        return output

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        self.events.append((len(self.sizes) - 1, 1))
        return len(self.sizes) - 1

    def free(self, storage: int) -> None:
        self.events.append((self.block_of.pop(storage), -1))

    def correct_gelu(self, x: Tensor, y: Tensor) -> None:
        """Count what `models/encoder.py` does on a CPU instead of torch's own operation.

        With a gradient, it keeps the slope in place of x; without one, y is in the
        memory of x.
        """
        before, after = x.untyped_storage()._cdata, y.untyped_storage()._cdata
        if x.dtype != torch.float32 or before not in self.block_of:
            return
        block = self.block_of[before]
        if torch.is_grad_enabled():
            self.block_of[before] = self.allocate(self.sizes[block])
            self.events.append((block, -1))
        else:
            self.block_of[before], self.block_of[after] = self.block_of[after], block

    def tag(self, tensors: Iterable[Tensor], part: str) -> None:
        for tensor in tensors:
            self.parts[self.block_of[tensor.untyped_storage()._cdata]] = part

    def peak(self, begin: int) -> int:
        """Return the most bytes at once, beyond those allocated before event `begin`."""
        changes = [self.sizes[block] * sign for block, sign in self.events[begin:]]
        return int(np.cumsum(changes).max(initial=0))


def trace_step(
    config: Config, settings: Settings, *, accumulate: int, precision: torch.dtype
) -> Trace:
    """Trace a step that is not the first, for micro-batches of any size."""
    (few, events, begin), (many, same_events, _) = (
        record_step(config, settings, images, min(accumulate, 2), precision) for images in SAMPLED
    )
    assert events == same_events, "operations must not depend on the number of images"
    low, high = SAMPLED
    per_image = (np.array(many.sizes) - np.array(few.sizes)) / (high - low)
    blocks, signs = zip(*events, strict=True)
    parts = [PARTS.index(few.parts.get(block, "activations")) for block in range(len(per_image))]
    return Trace(
        blocks=np.array(blocks),
        signs=np.array(signs),
        fixed=np.array(few.sizes) - low * per_image,
        per_image=per_image,
        parts=np.array(parts),
        begin=begin,
    )


def record_step(
    config: Config, settings: Settings, images: int, accumulate: int, precision: torch.dtype
) -> tuple[AllocationRecorder, list[tuple[int, int]], int]:
    """Record a step of `accumulate` micro-batches; more than two are like two.

    Returns the recorder, its events until the end of the step, and the index of the first event of
    the step.
    """
    model, recorder, size = build(config), AllocationRecorder(), pair(config.image_size)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        materialize(model)
        if settings.machine.checkpointing:
            model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]
        objective = make_objective(model, settings)
        schedule = Schedule(
            settings=settings, length=8, accumulate=accumulate, stages=((0.0, size[0]),), steps=8
        )
        state = make_state(objective, objective, schedule)
        for parameter in model.parameters():  # the first step allocates the optimizer's state
            parameter.grad = torch.empty_like(parameter)
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        begin = len(recorder.events)
        recorder.tag(model.parameters(), "weights")
        for optimizer in state.optimizers:
            for values in optimizer.state.values():
                recorder.tag((v for v in values.values() if isinstance(v, Tensor)), "optimizer")
        if state.ema is not None:
            recorder.tag(state.ema.values.values(), "average")
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: recorder.tag([p.grad], "gradients")
            )
        prepare = batch_preparation(
            preprocessing_for(config), Mixing(), config.num_classes, CPU, steps_per_epoch=1
        )
        batches = fake_batches((images, config.channels, *size))
        train_step(state, batches, prepare, autocast_for(precision, CPU))
        # Blocks freed together (autocast's cache) come in no fixed order: sort them.
        runs = groupby(recorder.events, key=lambda event: event[1])
        events = [event for sign, run in runs for event in (run if sign > 0 else sorted(run))]
    return recorder, events, begin


def trace_evaluation(config: Config, images: int) -> int:
    """Return the peak bytes, beside the weights, of a forward pass without gradients."""
    model, recorder = build(config), AllocationRecorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, torch.no_grad():
        materialize(model.eval())
        begin = len(recorder.events)
        shape = (images, config.channels, *pair(config.image_size))
        model(normalize(torch.empty(shape, dtype=torch.uint8), preprocessing_for(config)))
        return recorder.peak(begin)


def materialize(model: nn.Module) -> None:
    """Replace weights on the meta device by fake ones, which the recorder sees."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))


def fake_batches(shape: tuple[int, ...]) -> Iterator[Batch]:
    class Indices:
        def tolist(self) -> list[int]:
            return []

    while True:
        images = torch.empty(shape, dtype=torch.uint8)
        yield Batch(images, torch.zeros(shape[0], dtype=torch.long), Indices())  # pyright: ignore


def preprocessing_for(config: Config) -> Preprocessing:
    half = (0.5,) * config.channels
    return Preprocessing(size=pair(config.image_size), mean=half, std=half)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    parts: dict[str, int]  # tensors at the peak of a step, by purpose
    whole: dict[str, int]  # weights, gradients, optimizer, average: of all devices together
    evaluation: int  # the peak of an evaluation, with what stays
    process: int = PROCESS
    fragmentation_share: float = FRAGMENTATION  # of the tensors
    measured: bool = False  # process and fragmentation are measured, not estimated

    @property
    def tensors(self) -> int:
        return sum(self.parts.values())

    @property
    def fragmentation(self) -> int:
        """Bytes lost between the blocks of the heap."""
        return round(self.fragmentation_share * self.tensors)

    @property
    def peak(self) -> int:
        """The most bytes that a process holds."""
        return self.process + max(self.tensors + self.fragmentation, self.evaluation)


def step_parts(trace: Trace, request: PlanRequest, config: Config, images: int) -> dict[str, int]:
    """Return the bytes of each part on each device at the peak of a step on this many images."""
    accumulated = images < request.images_per_device
    if request.devices == 1:
        device = distributed.init()
        precision, _ = choose_precision(request.precision, device, config)
        shards = choose_shards(config, request.settings(), precision, device)
        shape = (images, config.channels, *pair(config.image_size))
        parts = trace.at_peak(images)
        if shards > 1 and worth_sharding(config, shape, shards):  # training/cpu_parallel.py
            # Every further shard has its own gradients; with accumulation there is also their sum.
            parts["copies"] = (shards - (not accumulated)) * trace.total("weights")
        return parts
    if request.strategy == "ddp":  # DDP's gradient buckets
        return trace.at_peak(images) | {"buckets": trace.total("weights")}
    share = np.array([1.0 if part == "activations" else 1 / request.devices for part in PARTS])
    if accumulated:  # gradients stay whole until the last micro-batch of a step
        share[PARTS.index("gradients")] = 1.0
    share = share[trace.parts]
    sharded = replace(trace, fixed=trace.fixed * share, per_image=trace.per_image * share)
    return sharded.at_peak(images) | {"gathered": gathered(config, request)}


def gathered(config: Config, request: PlanRequest) -> int:
    """Return an upper bound of the bytes that FSDP holds unsharded on each device.

    While a block computes, its weights and those of the next are gathered, then its gradients; and
    what is outside of blocks. Muon needs the whole gradients of all matrices that it updates.
    """
    model = build(config)
    blocks = [sum(p.numel() for p in b.parameters()) for b in distributed.blocks(model)]
    outside = sum(p.numel() for p in model.parameters()) - sum(blocks)
    weights = 3 * max(blocks) + outside
    if request.optimizer == "muon":
        matrices = (p for name, p in model.named_parameters() if is_muon_parameter(name, p))
        weights = max(weights, sum(p.numel() for p in matrices))
    return FLOAT * weights


def largest_batch(
    trace: Trace, request: PlanRequest, config: Config, memory: Memory, free: int
) -> int:
    """Return how many images at once fit on one device; 0 if not even one does."""

    def fits(images: int) -> bool:
        tensors = sum(step_parts(trace, request, config, images).values())
        return memory.process + tensors * (1 + memory.fragmentation_share) <= free

    low, high = 0, 1
    while fits(high) and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
