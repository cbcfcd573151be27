"""Everything a run needs, made in the order in which it is needed, before its first step."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vitrail import distributed
from vitrail.errors import ConfigError
from vitrail.formatting import comma_list, percent
from vitrail.models.build import Model
from vitrail.models.config import pair
from vitrail.models.registry import name_of
from vitrail.training import choices
from vitrail.training.averaging import Average
from vitrail.training.cores import EachCoreAPart, parts_for
from vitrail.training.device import choose_precision, scaler_for
from vitrail.training.feed import Feed, preparation
from vitrail.training.head_init import (
    ProbeHead,
    fit_probe_head,
    read_probe_head,
    set_weights,
)
from vitrail.training.judge import Judge
from vitrail.training.learner import Learner, build_learner
from vitrail.training.loop import Prepare, TrainState
from vitrail.training.material import Material, hold_out_dev, open_material, subsample
from vitrail.training.memory import (
    USABLE,
    activation_bytes,
    bytes_per_weight,
    free_bytes,
    largest_divisor,
    largest_micro_batch,
)
from vitrail.training.objectives import Classification, Objective, make_objective
from vitrail.training.optimizers import freeze, make_optimizers
from vitrail.training.plan import Plan
from vitrail.training.settings import Settings
from vitrail.training.state import has_state
from vitrail.training.watch import Watch

GRADIENT = 4  # bytes; each part of a batch has its own
EVALUATIONS = 20  # at most, in a run of a given length


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to train, on what, and where to put it."""

    data: str
    out: Path
    settings: Settings
    start: str = ""  # a model reference to fine-tune; "" begins with fresh weights
    resume: bool = False
    overwrite: bool = False  # an earlier run in the folder goes
    material: Material | None = None  # what to learn from, where that is not simply the data


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run works with."""

    settings: Settings  # complete
    reasons: list[str]  # for what was chosen
    material: Material
    learner: Learner
    plan: Plan
    state: TrainState
    feed: Feed
    prepare: Prepare
    judge: Judge
    precision: torch.dtype
    device: torch.device
    probe: ProbeHead | None = None  # where the head starts, and what fine-tuning has to beat

    @property
    def batch_size(self) -> int:
        assert self.settings.batch_size is not None
        return self.settings.batch_size

    @property
    def micro_batch(self) -> int:
        """Pictures at once on one device."""
        return self.share // self.plan.accumulate

    @property
    def share(self) -> int:
        """Pictures of a batch that one process has."""
        return self.batch_size // distributed.world_size()

    def epochs(self, steps: int) -> float:
        return steps * self.batch_size / len(self.material.train)


def set_up(
    order: Order, watch: Watch, device: torch.device, *, begun: float | None = None
) -> Setup:
    """Look at the data, choose what is open, and build the model and what moves it."""
    material = order.material or open_material(order.data, order.settings)
    for note in material.notes:
        watch.say(f"note: {note}")
    look = choices.look_at(material.train)
    learner = build_learner(
        order.settings, material, look, order.start, device, watch.say, begun=begun
    )
    settings, model = learner.settings, learner.model
    varied = choices.choose_variation(settings, look, fine_tuning=bool(order.start))
    precision, why = choose_precision(settings.machine.precision, device, model.config)
    reasons = [
        *learner.reasons,
        f"pictures are varied by {choices.describe(*varied)}",
        f"{str(precision).removeprefix('torch.')}: {why}",
        *why_parts(parts_for(model.config, settings, precision, device)),
        *why_early(settings),
    ]
    introduce(learner, material, reasons, watch)
    if settings.machine.checkpointing:
        forget_activations(model)
    probe = None
    if order.start and settings.head_init == "probe":
        material, probe = probed(order, material, learner, device, watch)
    plan = make_plan(settings, learner, material, device, watch)
    state = make_state(settings, learner, precision, device, watch)
    classes = len(material.train.classes)
    epoch = len(material.train) / (settings.batch_size or 1)  # in steps
    return Setup(
        settings=settings,
        reasons=reasons,
        material=material,
        learner=learner,
        plan=plan,
        state=state,
        feed=Feed(
            source=material.train,
            preprocessing=learner.preprocessing,
            augmentation=varied[0],
            channels=model.config.channels,
            plan=plan,
        ),
        prepare=preparation(learner.preprocessing, varied[1], classes, device, epoch=epoch),
        judge=Judge(
            material=material,
            objective=state.objective,
            average=state.average,
            preprocessing=learner.preprocessing,
            settings=settings,
            device=device,
        ),
        precision=precision,
        device=device,
        probe=probe,
    )


def probed(
    order: Order, material: Material, learner: Learner, device: torch.device, watch: Watch
) -> tuple[Material, ProbeHead | None]:
    """Hold dev out of the training set and start the head as a probe of the rest.

    A resumed run finds the probe in its folder, and the head's weights in its state.
    """
    train, name, dev = hold_out_dev(material)
    cut = train is not material.train
    if len(dev):
        judged = {name: dev} | material.judged
        material = replace(material, train=train, judged=judged)
    if order.resume and has_state(order.out):
        return material, read_probe_head(order.out)
    model, settings = learner.model, learner.settings
    probe = fit_probe_head(
        model.to(device),
        train if learner.probe_images is None else subsample(train, learner.probe_images),
        dev if len(dev) else None,
        name,
        cut=cut,
        preprocessing=learner.preprocessing,
        workers=settings.machine.workers,
        strict=settings.strict,
        progress=watch.progress,
    )
    set_weights(model, probe.init)
    if probe.dev:
        found = accuracy_line(probe.accuracy, probe.images)
        watch.say(f"linear probe of the frozen model: {name} {found}")
    return material, probe


def accuracy_line(accuracy: float, images: int) -> str:
    """`accuracy 87.4 % (n=293)`"""
    return f"accuracy {percent(accuracy)} (n={images:,})"


def why_parts(parts: int) -> list[str]:
    if parts == 1:
        return []
    return [f"{parts} parts of a batch at once: cores need not wait for each other"]


def why_early(settings: Settings) -> list[str]:
    if settings.until_accuracy is None:
        return []
    share = percent(settings.until_accuracy)
    return [f"the run ends once {share} of val are right: chosen by val, which flatters it there"]


def forget_activations(model: Model) -> None:
    """Let a model compute them again for the gradient."""
    if not hasattr(model, "checkpointing"):
        raise ConfigError(f"{name_of(model.config)} has no checkpointing; leave it out")
    model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]


def introduce(learner: Learner, material: Material, reasons: list[str], watch: Watch) -> None:
    """Say what will learn from what, and what was chosen why."""
    config, train = learner.model.config, material.train
    count = sum(p.numel() for p in learner.model.parameters())
    height, width = pair(config.image_size)
    watch.say(f"{name_of(config)}, {count:,} parameters, {height} x {width} pixels")
    watch.say(f"{len(train):,} pictures of {len(train.classes):,} classes to learn from")
    for reason in reasons:
        watch.say(f"  {reason}")


def make_plan(
    settings: Settings, learner: Learner, material: Material, device: torch.device, watch: Watch
) -> Plan:
    samples, batch = len(material.train), settings.batch_size
    assert batch is not None
    if settings.minutes is not None and (settings.steps or settings.epochs):
        watch.say("note: the minutes decide how long to train, not epochs or steps")
    steps = settings.steps or max(1, round((settings.epochs or 1.0) * samples / batch))
    every = settings.evaluate_every or max(1.0, steps * batch / samples / EVALUATIONS)
    plan = Plan(
        settings=settings,
        length=steps,
        accumulate=accumulation(settings, learner.model, device, watch),
        processes=distributed.world_size(),
        stages=choices.stages_of(settings, learner.model.config),
        evaluate_every=max(1, round(every * samples / batch)),
    )
    if settings.minutes is None:
        plan.rate(0)  # a warm-up that does not fit is refused now
        if settings.average**steps > 0.1:
            watch.say(f"note: in {steps:,} steps the average stays close to the first weights")
    return plan


def accumulation(settings: Settings, model: Model, device: torch.device, watch: Watch) -> int:
    """Into how many micro-batches a step is cut so that it fits into memory."""
    assert settings.batch_size is not None
    processes = distributed.world_size()
    share, odd = divmod(settings.batch_size, processes)
    if odd or not share:
        raise ConfigError(
            f"batch_size={settings.batch_size} does not split over {processes} processes; "
            f"try {max(1, share) * processes}"
        )
    if settings.machine.micro_batch is not None:
        return parts_of(share, settings.machine.micro_batch)
    shape = (1, model.config.channels, *pair(model.config.image_size))
    needed = activation_bytes(model, shape)
    parts = parts_for(model.config, settings, torch.float32, device)
    each = bytes_per_weight(settings) + GRADIENT * (parts if parts > 1 else 0)
    own = each * sum(p.numel() for p in model.parameters())
    there = free_bytes(device)
    free = max(0, there - own)
    short = distributed.broadcast_object(needed > USABLE * free)
    if short and getattr(model, "checkpointing", None) is False:
        model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]
        needed = activation_bytes(model, shape)
        short = distributed.broadcast_object(needed > USABLE * free)
        watch.say("  memory is short: what blocks compute is computed twice instead of kept")
    if short:
        watch.say(
            f"note: {there / 2**30:.1f} GiB of memory are free, and learning may need "
            f"{(own + needed) / 2**30:.1f}; try --optim.kind adafactor, smaller pictures, or "
            "--optim.freeze"
        )
    micro = distributed.broadcast_object(largest_micro_batch(share, needed, free))
    if micro < share:
        watch.say(
            f"  a batch of {share} needs {share * needed / 2**30:.1f} GiB of memory and does not "
            f"fit: {share // micro} parts of {micro} are accumulated"
        )
    return share // micro


def parts_of(share: int, micro_batch: int) -> int:
    """Parts of a process's share of a batch, each so large, or all of it."""
    micro = min(micro_batch, share)
    if micro < 1 or share % micro:
        raise ConfigError(
            f"machine.micro_batch={micro_batch} does not divide the {share} pictures that a "
            f"process has of a batch; try {largest_divisor(share, micro)}"
        )
    return share // micro


def make_state(
    settings: Settings,
    learner: Learner,
    precision: torch.dtype,
    device: torch.device,
    watch: Watch,
) -> TrainState:
    """The objective, spread over the processes, and its optimizers."""
    model = learner.model
    if frozen := freeze(model, settings.optim.freeze):
        left = sum(p.numel() for p in model.parameters() if p.requires_grad)
        watch.say(f"  frozen: {comma_list(frozen)}; {left:,} parameters learn")
    objective = make_objective(model, settings, teacher=learner.teacher)
    objective.to(device).train()  # a model that was loaded comes ready to answer
    wrapped = distributed.parallelize(objective, settings.machine.strategy)
    parts = parts_for(model.config, settings, precision, device)
    if parts > 1 and isinstance(objective, Classification):
        wrapped = EachCoreAPart(objective, parts)
    return state_for(objective, wrapped, settings, scaler=scaler_for(precision, device))


def state_for(
    objective: Objective,
    wrapped: nn.Module,
    settings: Settings,
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> TrainState:
    """Optimizers, and an average where it is asked for, of all weights that learn."""
    named = {
        name.removeprefix("model."): parameter
        for name, parameter in objective.named_parameters()
        if parameter.requires_grad
    }
    depth = getattr(objective.model.config, "depth", 0)
    return TrainState(
        objective=objective,
        wrapped=wrapped,
        optimizers=make_optimizers(named.items(), settings.optim, depth),
        average=Average(named, settings.average) if settings.average else None,
        scaler=scaler,
    )
