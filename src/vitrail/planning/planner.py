"""A wish → what it will take: size, work, memory, time, days."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from vitrail import distributed
from vitrail.checkpoints.load import is_name, load
from vitrail.errors import ConfigError
from vitrail.models.config import Config, pair
from vitrail.models.registry import configuration, name_of
from vitrail.models.vit import build
from vitrail.planning.accelerators import (
    ACCELERATORS,
    REPORTED,
    UTILIZATION,
    device_days,
    reached,
)
from vitrail.planning.cost import EXA, Cost, cost_of
from vitrail.planning.memory import Memory, largest_batch, step_parts
from vitrail.planning.probe import Measured, probe
from vitrail.planning.trace import Trace, trace_evaluation, trace_step
from vitrail.planning.wish import Wish
from vitrail.training.auto_config import choose_accumulation, choose_precision, dataset_stats
from vitrail.training.data_module import DataSplits, open_splits
from vitrail.training.evaluator import MAX_BATCH
from vitrail.training.memory import free_bytes

USABLE = 0.9  # of an accelerator's memory; kernels and the allocator need the rest
HEADLESS = 2  # classes of a model without a head, which cannot learn otherwise


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a training run will take."""

    wish: Wish  # complete: image size, classes and pictures are known
    config: Config
    cost: Cost
    precision: str
    micro_batch: int
    memory: Memory  # of one device
    free: int  # bytes on this machine's device
    largest_batch: int | None  # pictures at once that fit there; None for several devices
    measured: Measured | None  # a probe's; None if there was none
    utilization: float
    notes: list[str]

    @property
    def accumulate(self) -> int:
        return self.wish.share // self.micro_batch

    @property
    def exaflops(self) -> float | None:
        """Of the whole training, if its length is known."""
        if self.wish.images is None or self.wish.epochs is None:
            return None
        return self.cost.training * self.wish.images * self.wish.epochs / EXA

    def to_dict(self) -> dict[str, Any]:
        wish, memory = self.wish, self.memory
        return {
            "model": name_of(self.config),
            "image_size": self.config.image_size,
            "classes": self.config.num_classes,
            "parameters": self.cost.parameters,
            "tokens": self.cost.tokens,
            "flops": {"forward": self.cost.forward, "training": self.cost.training},
            "batch_size": wish.batch_size,
            "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
            "optimizer": wish.optimizer,
            "average": wish.average,
            "checkpointing": wish.checkpointing,
            "precision": self.precision,
            "devices": wish.devices,
            "strategy": wish.strategy,
            "memory": {
                "peak": memory.peak,
                "tensors": memory.tensors,
                "parts": memory.parts,
                "process": memory.process,
                "holes": memory.lost,
                "evaluation": memory.evaluation,
                "measured": memory.measured,
                "whole": memory.whole,
            },
            "free": self.free,
            "largest_batch": self.largest_batch,
            "time": self.time(),
            "images": wish.images,
            "epochs": wish.epochs,
            "exaflops": self.exaflops,
            "utilization": self.utilization,
            "accelerators": self.days(),
            "published": [asdict(report) | {"reached": reached(report)} for report in REPORTED],
            "notes": self.notes,
        }

    def time(self) -> dict[str, Any] | None:
        """Seconds on this machine."""
        if self.measured is None:
            return None
        step, wish = self.measured.step, self.wish
        epoch = None if wish.images is None else step * wish.images / wish.batch_size
        return {
            "step": step,
            "images_per_second": wish.batch_size / step,
            "epoch": epoch,
            "run": None if epoch is None or wish.epochs is None else epoch * wish.epochs,
            "steps": self.measured.steps,
        }

    def days(self) -> list[dict[str, Any]]:
        """For each kind of accelerator: of one device, and of as many as were asked for."""
        if self.exaflops is None:
            return []
        rows = []
        for one in ACCELERATORS:
            days = device_days(self.exaflops * EXA, one, self.utilization)
            fits = self.memory.tensors <= USABLE * one.memory
            found = {"device_days": days, "days": days / self.wish.devices, "fits": fits}
            rows.append(asdict(one) | found)
        return rows


def plan(wish: Wish, *, probing: bool = True, utilization: float = UTILIZATION) -> Outlook:
    """Count, trace and, unless told otherwise, take a few steps."""
    if not 0 < utilization <= 1:
        raise ConfigError(f"utilization={utilization:g} must be a share of the peak, such as 0.35")
    device = distributed.init()
    material = open_splits(wish.data, wish.settings()) if wish.data else None
    config = config_of(wish, material)
    if wish.checkpointing and not hasattr(build(config), "checkpointing"):
        raise ConfigError(f"{name_of(config)} has no checkpointing; leave it out")
    wish = completed(wish, config, material)
    precision, _ = choose_precision(wish.precision, device, config)
    micro, checkpointing = at_once(wish, config, device)
    wish = replace(wish, checkpointing=checkpointing)
    trace = trace_step(config, wish.settings(), accumulate=wish.share // micro, precision=precision)
    memory = memory_of(trace, wish, config, micro, judged_at_once(material))
    free = free_bytes(device)
    notes: list[str] = []
    measured = None
    if probing and worth_a_probe(wish, memory, free, notes):
        measured = probe(wish, config.channels, micro)
        if measured is None:
            notes.append("the probe was killed, most likely for want of memory")
        elif measured.peak and device.type == "cpu":
            memory = as_measured(memory, measured)
    return Outlook(
        wish=wish,
        config=config,
        cost=cost_of(config),
        precision=str(precision).removeprefix("torch."),
        micro_batch=micro,
        memory=memory,
        free=free,
        largest_batch=None
        if wish.devices > 1
        else largest_batch(trace, wish, config, memory, free),
        measured=measured,
        utilization=utilization,
        notes=notes,
    )


def config_of(wish: Wish, material: DataSplits | None) -> Config:
    """The model as it would be trained: its size, its classes, its channels."""
    changes: dict[str, Any] = {}
    if wish.image_size is not None:
        changes["image_size"] = wish.image_size
    classes = wish.classes if material is None else len(material.train.classes)
    if is_name(wish.model):
        if material is not None:
            changes["channels"] = dataset_stats(material.train).channels
        config = configuration(wish.model).change(**changes)
    else:
        config = load(wish.model, log=lambda _: None, **changes).config
    wanted = classes or config.num_classes or HEADLESS
    return config.change(num_classes=wanted)


def completed(wish: Wish, config: Config, material: DataSplits | None) -> Wish:
    """With everything that the model and the data say."""
    images, epochs = wish.images, wish.epochs
    if images is None and material is not None:
        images = float(len(material.train))
    if epochs is not None and images is None:
        raise ConfigError(f"epochs={epochs:g} of how many pictures? Give images, or data")
    if wish.images is not None and epochs is None:
        epochs = 1.0
    size = pair(config.image_size)[0]
    return replace(wish, image_size=size, classes=config.num_classes, images=images, epochs=epochs)


def at_once(wish: Wish, config: Config, device: torch.device) -> tuple[int, bool]:
    """Pictures at once, and whether blocks are computed twice.

    What was asked for; alone on this machine, what `vitrail train` would choose.
    """
    if wish.micro_batch is not None:
        return wish.micro_batch, wish.checkpointing
    if wish.devices > 1:
        return wish.share, wish.checkpointing
    model = build(config)
    if wish.checkpointing:
        model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]
    parts = choose_accumulation(wish.settings(), model, device, lambda line: None)
    return wish.share // parts, getattr(model, "checkpointing", False)


def judged_at_once(material: DataSplits | None) -> int:
    """Pictures of a batch when the model is evaluated."""
    if material is None:
        return 0
    return min(MAX_BATCH, max(map(len, material.held_out.values()), default=0))


def memory_of(trace: Trace, wish: Wish, config: Config, micro: int, judged: int) -> Memory:
    """Counted; what surrounds the tensors is an estimate until a probe has been taken.

    Several devices are taken for accelerators, where it is little: tensors alone are told.
    """
    whole = {part: trace.part(part) for part in ("weights", "optimizer", "average")}
    evaluation = 0
    if judged:  # beside the weights, and a second copy of them where the average takes their place
        stays = sum(whole.values()) + whole["average"]
        evaluation = stays + trace_evaluation(config, judged)
    memory = Memory(
        parts=step_parts(trace, wish, config, micro),
        whole={**whole, "gradients": whole["weights"]},
        evaluation=evaluation,
    )
    return memory if wish.devices == 1 else replace(memory, process=0, holes=0.0)


def worth_a_probe(wish: Wish, memory: Memory, free: int, notes: list[str]) -> bool:
    if wish.devices > 1:
        notes.append("time is measured for one device only")
        return False
    if memory.peak > free:
        notes.append("it does not fit into the free memory of this machine: no time was measured")
        return False
    return True


def as_measured(memory: Memory, measured: Measured) -> Memory:
    """The same tensors, with what the probe's process held around them."""
    lost = measured.peak - measured.process - memory.tensors
    return replace(
        memory, process=measured.process, holes=max(0, lost) / memory.tensors, measured=True
    )
