"""`make_plan`: FLOPs, memory, time and accelerator-days of a training run before it starts.

Memory is counted without computing: the real step of `vitrail.training` (forward, backward,
clipping, optimizer, weight average) runs on fake tensors, which have shapes but no memory, while
`AllocationRecorder` notes when each block of memory is allocated and freed. So checkpointing,
accumulation, precision, every optimizer and every model family are counted as they are. Two
micro-batch sizes give two traces with the same events; a block's size is a linear function of the
images, so the trace of any micro-batch follows.

A process holds more than its tensors: Python and torch themselves, and the fragmentation of the
heap. glibc allocates blocks below a threshold of up to 32 MiB from one heap, and small objects fill
part of each freed hole; while they live, the next tensor of the same size does not fit there. A few
real steps measure this overhead (`request.py`); without them it is estimated. With
MALLOC_MMAP_THRESHOLD_=65536 in the environment, each tensor is mapped separately and nothing is
lost.
"""

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitrail import distributed
from vitrail.checkpoints.load import is_name, load
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Mixing, Preprocessing
from vitrail.data.transforms import normalize
from vitrail.errors import ConfigError
from vitrail.formatting import MIB
from vitrail.models.config import Config, pair
from vitrail.models.lora import add_lora
from vitrail.models.registry import configuration, name_of
from vitrail.models.vit import build
from vitrail.planning.flops import ACCELERATORS, EXA, PUBLISHED_RUNS, UTILIZATION, Cost, cost_of
from vitrail.planning.request import PlanRequest, StepTiming, time_steps
from vitrail.training.auto_config import (
    choose_accumulation,
    choose_precision,
    choose_shards,
    dataset_stats,
)
from vitrail.training.config import Settings
from vitrail.training.cpu_parallel import worth_sharding
from vitrail.training.data_module import batch_preparation, open_splits
from vitrail.training.loop import MAX_BATCH, autocast_for, make_state, train_step
from vitrail.training.memory import free_bytes
from vitrail.training.objectives import make_objective
from vitrail.training.optim import is_muon_parameter
from vitrail.training.schedules import Schedule

PARTS = ("weights", "gradients", "optimizer", "average", "activations")
SAMPLED = (2, 4)  # micro-batches of the two traces; many operations treat 1 as a special case
CPU = torch.device("cpu")
PROCESS = 325 * MIB  # Python, torch and vitrail after a step of the smallest model; measured
FRAGMENTATION = 0.25  # of the tensors: 0.16 to 0.32 in six models on glibc 2.36
FLOAT = 4  # bytes of a weight
USABLE = 0.9  # of an accelerator's memory; kernels and the allocator need the rest
HEADLESS = 2  # classes of a model without a head, which could not be trained otherwise


class Trace(NamedTuple):
    """Allocations (+1) and frees (-1) of a training step, in order."""

    blocks: np.ndarray  # (events,) which block
    signs: np.ndarray  # (events,) +1 or -1
    fixed: np.ndarray  # (blocks,) bytes that do not depend on the batch
    per_image: np.ndarray  # (blocks,) bytes per image of a micro-batch
    parts: np.ndarray  # (blocks,) index into PARTS
    begin: int  # first event of the step; what is allocated before, stays

    def at_peak(self, images: int) -> dict[str, int]:
        """Return the bytes of each part when their sum is largest."""
        change = (self.fixed + self.per_image * images)[self.blocks] * self.signs
        total = np.cumsum(change)
        peak = self.begin + int(np.argmax(total[self.begin :]))
        parts = self.parts[self.blocks[: peak + 1]]
        sums = np.bincount(parts, weights=change[: peak + 1], minlength=len(PARTS))
        return {part: round(n) for part, n in zip(PARTS, sums.tolist(), strict=True)}

    def total(self, part: str) -> int:
        """Return the bytes of all blocks of a part that does not depend on the batch."""
        return round(self.fixed[self.parts == PARTS.index(part)].sum())


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
            # On a CPU, `models/encoder.py` keeps the slope in place of the input x if there is a
            # gradient; otherwise the output is in the memory of x.
            before, after = (x.untyped_storage()._cdata for x in (args[0], output))
            if args[0].dtype == torch.float32 and before in self.block_of:
                block = self.block_of[before]
                if torch.is_grad_enabled():
                    self.block_of[before] = self.allocate(self.sizes[block])
                    self.events.append((block, -1))
                else:
                    self.block_of[before], self.block_of[after] = self.block_of[after], block
        return output

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        self.events.append((len(self.sizes) - 1, 1))
        return len(self.sizes) - 1

    def free(self, storage: int) -> None:
        self.events.append((self.block_of.pop(storage), -1))

    def tag(self, tensors: Iterable[Tensor], part: str) -> None:
        for tensor in tensors:
            self.parts[self.block_of[tensor.untyped_storage()._cdata]] = part


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
    """Record a step of `accumulate` micro-batches; more than two behave like two.

    Returns the recorder, its events until the end of the step, and the index of the first event of
    the step.
    """
    model, recorder, size = build(config), AllocationRecorder(), pair(config.image_size)
    if settings.lora is not None:
        add_lora(model, settings.lora)

    def batches() -> Iterator[Batch]:
        while True:
            pixels = torch.empty((images, config.channels, *size), dtype=torch.uint8)
            indices: Any = np.zeros(0)  # a fake tensor has no `tolist`
            yield Batch(pixels, torch.zeros(images, dtype=torch.long), indices)

    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        model.to_empty(device="cpu")  # fake weights, which the recorder sees
        if settings.machine.checkpointing:
            model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]
        objective = make_objective(model, settings)
        schedule = Schedule(
            settings=settings, length=8, accumulate=accumulate, stages=((0.0, size[0]),), steps=8
        )
        state = make_state(objective, objective, schedule)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:  # the first step allocates the optimizer's state
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
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(
                lambda p: recorder.tag([p.grad], "gradients")
            )
        prepare = batch_preparation(
            preprocessing_for(config), Mixing(), config.num_classes, CPU, steps_per_epoch=1
        )
        train_step(state, batches(), prepare, autocast_for(precision, CPU))
        # Blocks freed together (autocast's cache) come in no fixed order: sort them.
        runs = groupby(recorder.events, key=lambda event: event[1])
        events = [event for sign, run in runs for event in (run if sign > 0 else sorted(run))]
    return recorder, events, begin


def trace_evaluation(config: Config, images: int) -> int:
    """Return the peak bytes of a forward pass without gradients, excluding the weights."""
    model, recorder = build(config), AllocationRecorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, torch.no_grad():
        model.eval().to_empty(device="cpu")
        begin = len(recorder.events)
        shape = (images, config.channels, *pair(config.image_size))
        model(normalize(torch.empty(shape, dtype=torch.uint8), preprocessing_for(config)))
        changes = [recorder.sizes[block] * sign for block, sign in recorder.events[begin:]]
        return int(np.cumsum(changes).max(initial=0))


def preprocessing_for(config: Config) -> Preprocessing:
    half = (0.5,) * config.channels
    return Preprocessing(size=pair(config.image_size), mean=half, std=half)


class Memory(NamedTuple):
    """Bytes of one device."""

    parts: dict[str, int]  # tensors at the peak of a step, by purpose
    whole: dict[str, int]  # weights, gradients, optimizer, average: of all devices together
    evaluation: int  # the peak of an evaluation, with what stays
    process: int
    fragmentation_share: float  # of the tensors
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
            parts["copies"] = (shards - (not accumulated)) * trace.total("gradients")
        return parts
    if request.strategy == "ddp":  # DDP's gradient buckets
        return trace.at_peak(images) | {"buckets": trace.total("gradients")}
    share = np.array([1.0 if part == "activations" else 1 / request.devices for part in PARTS])
    if accumulated:  # gradients stay whole until the last micro-batch of a step
        share[PARTS.index("gradients")] = 1.0
    share = share[trace.parts]
    sharded = trace._replace(fixed=trace.fixed * share, per_image=trace.per_image * share)
    # While a block computes, its weights and those of the next are gathered, then its gradients;
    # and what is outside of blocks. Muon needs the whole gradients of all matrices it updates.
    model = build(config)
    blocks = [sum(p.numel() for p in b.parameters()) for b in distributed.blocks(model)]
    outside = sum(p.numel() for p in model.parameters()) - sum(blocks)
    weights = 3 * max(blocks) + outside
    if request.optimizer == "muon":
        matrices = (p for name, p in model.named_parameters() if is_muon_parameter(name, p))
        weights = max(weights, sum(p.numel() for p in matrices))
    return sharded.at_peak(images) | {"gathered": FLOAT * weights}


def largest_batch(
    trace: Trace, request: PlanRequest, config: Config, memory: Memory, free: int
) -> int:
    """Return how many images at once fit on one device; 0 if not even one does."""

    def fits(images: int) -> bool:
        tensors = sum(step_parts(trace, request, config, images).values())
        return memory.process + tensors * (1 + memory.fragmentation_share) <= free

    return bisect_left(range(1, 2**24), True, key=lambda images: not fits(images))


@dataclass(frozen=True, kw_only=True)
class Plan:
    request: PlanRequest  # complete: image size, classes and images are filled in
    config: Config
    cost: Cost
    precision: str
    micro_batch: int
    accumulate: int  # micro-batches of a step
    exaflops: float | None  # of the whole run, if its length is known
    memory: Memory  # of one device
    free: int  # bytes on this machine's device
    largest_batch: int | None  # images at once that fit there; None for several devices
    timing: StepTiming | None  # None if no steps were timed
    utilization: float
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        request, memory = self.request, self.memory
        names = ("batch_size", "optimizer", "lora", "average", "checkpointing", "devices")
        names += ("strategy", "images", "epochs")
        return {
            "model": name_of(self.config),
            "image_size": self.config.image_size,
            "classes": self.config.num_classes,
            "parameters": self.cost.parameters,
            "tokens": self.cost.tokens,
            "flops": {"forward": self.cost.forward, "training": self.cost.training},
            **{name: getattr(request, name) for name in names},
            "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
            "precision": self.precision,
            "memory": {
                "peak": memory.peak,
                "tensors": memory.tensors,
                "parts": memory.parts,
                "process": memory.process,
                "holes": memory.fragmentation,
                "evaluation": memory.evaluation,
                "measured": memory.measured,
                "whole": memory.whole,
            },
            "free": self.free,
            "largest_batch": self.largest_batch,
            "time": self.time(),
            "exaflops": self.exaflops,
            "utilization": self.utilization,
            "accelerators": self.days(),
            "published": [run._asdict() | {"reached": run.utilization} for run in PUBLISHED_RUNS],
            "notes": self.notes,
        }

    def time(self) -> dict[str, Any] | None:
        """Return seconds on this machine."""
        if self.timing is None:
            return None
        step, request = self.timing["step"], self.request
        epoch = None if request.images is None else step * request.images / request.batch_size
        return {
            "step": step,
            "images_per_second": request.batch_size / step,
            "epoch": epoch,
            "run": None if epoch is None or request.epochs is None else epoch * request.epochs,
            "steps": self.timing["steps"],
        }

    def days(self) -> list[dict[str, Any]]:
        """Return the days of each accelerator: of one device, and of as many as requested."""
        if self.exaflops is None:
            return []
        rows = []
        for accelerator in ACCELERATORS:
            days = accelerator.days(self.exaflops * EXA, self.utilization)
            fits = self.memory.tensors <= USABLE * accelerator.memory
            row = {"device_days": days, "days": days / self.request.devices, "fits": fits}
            rows.append(accelerator._asdict() | row)
        return rows


def make_plan(
    request: PlanRequest, *, measure: bool = True, utilization: float = UTILIZATION
) -> Plan:
    """Count FLOPs and memory and, with `measure`, time a few training steps."""
    if not 0 < utilization <= 1:
        raise ConfigError(f"utilization={utilization:g} must be a share of the peak, such as 0.35")
    device, notes = distributed.init(), []
    splits = open_splits(request.data, request.settings()) if request.data else None
    changes: dict[str, Any] = {}  # of the model as it would be trained
    if request.image_size is not None:
        changes["image_size"] = request.image_size
    if is_name(request.model):
        if splits is not None:
            changes["channels"] = dataset_stats(splits.train).channels
        config = configuration(request.model).change(**changes)
    else:
        config = load(request.model, log=lambda _: None, **changes).config
    classes = request.classes if splits is None else len(splits.train.classes)
    config = config.change(num_classes=classes or config.num_classes or HEADLESS)
    if request.checkpointing and not hasattr(build(config), "checkpointing"):
        raise ConfigError(f"{name_of(config)} has no checkpointing; leave it out")
    images, epochs = request.images, request.epochs
    if images is None and splits is not None:
        images = float(len(splits.train))
    if epochs is not None and images is None:
        raise ConfigError(f"epochs={epochs:g} needs the number of images; pass images or data")
    if request.images is not None and epochs is None:
        epochs = 1.0
    size = pair(config.image_size)[0]
    filled = {"image_size": size, "classes": config.num_classes, "images": images}
    request = replace(request, **filled, epochs=epochs)
    micro_batch = request.micro_batch or request.images_per_device
    if request.micro_batch is None and request.devices == 1:  # as `vitrail train` chooses
        model: Any = build(config)
        if request.lora is not None:
            add_lora(model, request.lora)
        if request.checkpointing:
            model.checkpointing = True
        micro_batch //= choose_accumulation(request.settings(), model, device, lambda line: None)
        request = replace(request, checkpointing=getattr(model, "checkpointing", False))
    precision, _ = choose_precision(request.precision, device, config)
    accumulate = request.images_per_device // micro_batch
    trace = trace_step(config, request.settings(), accumulate=accumulate, precision=precision)
    # Tensors are counted; what surrounds them is an estimate until steps are timed. Several devices
    # are assumed to be accelerators, where it is little.
    whole = {part: trace.total(part) for part in ("weights", "optimizer", "average")}
    held_out = [] if splits is None else map(len, splits.held_out.values())
    evaluation, evaluated = 0, min(MAX_BATCH, max(held_out, default=0))
    if evaluated:  # beside the weights, and a second copy of them while the average replaces them
        evaluation = sum(whole.values()) + whole["average"] + trace_evaluation(config, evaluated)
    memory = Memory(
        parts=step_parts(trace, request, config, micro_batch),
        whole={**whole, "gradients": trace.total("gradients")},
        evaluation=evaluation,
        process=PROCESS if request.devices == 1 else 0,
        fragmentation_share=FRAGMENTATION if request.devices == 1 else 0.0,
    )
    free, timing, fitting = free_bytes(device), None, None
    if request.devices > 1:
        if measure:
            notes.append("time is measured for one device only")
    elif measure and memory.peak > free:
        notes.append("does not fit in the free memory of this machine: no time was measured")
    elif measure:
        timing = time_steps(request, config.channels, micro_batch)
        if timing is None:
            notes.append("the timed steps were killed, most likely out of memory")
        elif timing["peak"] and device.type == "cpu":
            lost = timing["peak"] - timing["process"] - memory.tensors
            memory = memory._replace(
                process=timing["process"],
                fragmentation_share=max(0, lost) / memory.tensors,
                measured=True,
            )
    if request.devices == 1:
        fitting = largest_batch(trace, request, config, memory, free)
    cost, exaflops = cost_of(config), None
    if images is not None and epochs is not None:
        exaflops = cost.training * images * epochs / EXA
    return Plan(
        request=request,
        config=config,
        cost=cost,
        precision=str(precision).removeprefix("torch."),
        micro_batch=micro_batch,
        accumulate=accumulate,
        exaflops=exaflops,
        memory=memory,
        free=free,
        largest_batch=fitting,
        timing=timing,
        utilization=utilization,
        notes=notes,
    )
