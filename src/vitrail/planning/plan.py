"""`make_plan`: FLOPs, memory, time and accelerator-days of a training run before it starts."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from vitrail import distributed
from vitrail.checkpoints.load import is_name, load
from vitrail.errors import ConfigError
from vitrail.models.config import Config, pair
from vitrail.models.registry import configuration, name_of
from vitrail.models.vit import build
from vitrail.planning.flops import (
    ACCELERATORS,
    EXA,
    PUBLISHED_RUNS,
    UTILIZATION,
    Cost,
    cost_of,
)
from vitrail.planning.memory import (
    Memory,
    Trace,
    largest_batch,
    step_parts,
    trace_evaluation,
    trace_step,
)
from vitrail.planning.request import PlanRequest, StepTiming, time_steps
from vitrail.training.auto_config import choose_accumulation, choose_precision, dataset_stats
from vitrail.training.data_module import DataSplits, open_splits
from vitrail.training.loop import MAX_BATCH
from vitrail.training.memory import free_bytes

USABLE = 0.9  # of an accelerator's memory; kernels and the allocator need the rest
HEADLESS = 2  # classes of a model without a head, which could not be trained otherwise


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted cost of a training run."""

    request: PlanRequest  # complete: image size, classes and images are filled in
    config: Config
    cost: Cost
    precision: str
    micro_batch: int
    memory: Memory  # of one device
    free: int  # bytes on this machine's device
    largest_batch: int | None  # images at once that fit there; None for several devices
    timing: StepTiming | None  # None if no steps were timed
    utilization: float
    notes: list[str]

    @property
    def accumulate(self) -> int:
        return self.request.images_per_device // self.micro_batch

    @property
    def exaflops(self) -> float | None:
        """Of the whole run, if its length is known."""
        if self.request.images is None or self.request.epochs is None:
            return None
        return self.cost.training * self.request.images * self.request.epochs / EXA

    def to_dict(self) -> dict[str, Any]:
        request, memory = self.request, self.memory
        return {
            "model": name_of(self.config),
            "image_size": self.config.image_size,
            "classes": self.config.num_classes,
            "parameters": self.cost.parameters,
            "tokens": self.cost.tokens,
            "flops": {"forward": self.cost.forward, "training": self.cost.training},
            "batch_size": request.batch_size,
            "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
            "optimizer": request.optimizer,
            "average": request.average,
            "checkpointing": request.checkpointing,
            "precision": self.precision,
            "devices": request.devices,
            "strategy": request.strategy,
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
            "images": request.images,
            "epochs": request.epochs,
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
    config = resolve_config(request, splits)
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
    micro_batch, checkpointing = choose_micro_batch(request, config, device)
    request = replace(request, checkpointing=checkpointing)
    precision, _ = choose_precision(request.precision, device, config)
    accumulate = request.images_per_device // micro_batch
    trace = trace_step(config, request.settings(), accumulate=accumulate, precision=precision)
    memory = estimate_memory(trace, request, config, micro_batch, splits)
    free, timing, fitting = free_bytes(device), None, None
    if request.devices > 1:
        if measure:
            notes.append("time is measured for one device only")
    elif measure and memory.peak > free:
        notes.append("does not fit in the free memory of this machine: no time was measured")
    elif measure:
        timing = time_steps(request, config.channels, micro_batch)
        if timing is None:
            notes.append("the timed steps were killed, most likely for lack of memory")
        elif timing["peak"] and device.type == "cpu":
            lost = timing["peak"] - timing["process"] - memory.tensors
            memory = replace(
                memory,
                process=timing["process"],
                fragmentation_share=max(0, lost) / memory.tensors,
                measured=True,
            )
    if request.devices == 1:
        fitting = largest_batch(trace, request, config, memory, free)
    return Plan(
        request=request,
        config=config,
        cost=cost_of(config),
        precision=str(precision).removeprefix("torch."),
        micro_batch=micro_batch,
        memory=memory,
        free=free,
        largest_batch=fitting,
        timing=timing,
        utilization=utilization,
        notes=notes,
    )


def resolve_config(request: PlanRequest, splits: DataSplits | None) -> Config:
    """Return the model as it would be trained: its image size, classes and channels."""
    changes: dict[str, Any] = {}
    if request.image_size is not None:
        changes["image_size"] = request.image_size
    classes = request.classes if splits is None else len(splits.train.classes)
    if is_name(request.model):
        if splits is not None:
            changes["channels"] = dataset_stats(splits.train).channels
        config = configuration(request.model).change(**changes)
    else:
        config = load(request.model, log=lambda _: None, **changes).config
    return config.change(num_classes=classes or config.num_classes or HEADLESS)


def choose_micro_batch(
    request: PlanRequest, config: Config, device: torch.device
) -> tuple[int, bool]:
    """Return images at once and checkpointing: as requested, or as `vitrail train` chooses."""
    if request.micro_batch is not None or request.devices > 1:
        return request.micro_batch or request.images_per_device, request.checkpointing
    model = build(config)
    if request.checkpointing:
        model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]
    accumulate = choose_accumulation(request.settings(), model, device, lambda line: None)
    return request.images_per_device // accumulate, getattr(model, "checkpointing", False)


def estimate_memory(
    trace: Trace,
    request: PlanRequest,
    config: Config,
    micro_batch: int,
    splits: DataSplits | None,
) -> Memory:
    """Count tensors; what surrounds them is an estimate until steps are timed.

    Several devices are assumed to be accelerators, where it is little: only tensors count.
    """
    whole = {part: trace.total(part) for part in ("weights", "optimizer", "average")}
    held_out = [] if splits is None else map(len, splits.held_out.values())
    evaluation, evaluated = 0, min(MAX_BATCH, max(held_out, default=0))
    if evaluated:  # beside the weights, and a second copy of them while the average replaces them
        evaluation = sum(whole.values()) + whole["average"] + trace_evaluation(config, evaluated)
    memory = Memory(
        parts=step_parts(trace, request, config, micro_batch),
        whole={**whole, "gradients": whole["weights"]},
        evaluation=evaluation,
    )
    return memory if request.devices == 1 else replace(memory, process=0, fragmentation_share=0.0)
