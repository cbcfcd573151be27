"""The training loop: pre-training, fine-tuning and masked patches differ in what is passed in.

It prints nothing and opens nothing. What changes from step to step is in `TrainState`; logging,
evaluation and checkpoints are in the `on_step` callback (`trainer.py`).

Shapes: micro-batches of B images (B, C, H, W), targets (B,) or (B, K).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.data.loader import Batch, torch_threads_for
from vitrail.errors import VitrailError
from vitrail.training.objectives import Objective
from vitrail.training.optim import EMA, make_optimizers, set_learning_rates
from vitrail.training.schedules import Schedule

Prepare = Callable[[Batch, np.random.Generator, int], tuple[Tensor, Tensor]]
Autocast = Callable[[], AbstractContextManager[object]]


@dataclass
class TrainState:
    """What changes from step to step."""

    objective: nn.Module  # contains the model; its forward is the loss
    wrapped: nn.Module  # the same, wrapped for DDP, FSDP or CPU data parallelism
    optimizers: list[torch.optim.Optimizer]
    schedule: Schedule
    ema: EMA | None = None
    scaler: torch.amp.GradScaler | None = None  # float16 only
    step: int = 0
    lr_scale: float = 1.0  # halved when the run is rolled back after divergence

    @cached_property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.objective.parameters())


def make_state(objective: Objective, wrapped: nn.Module, schedule: Schedule) -> TrainState:
    """Create the optimizers, and the average if configured, of all trainable weights."""
    named = {
        name.removeprefix("model."): parameter
        for name, parameter in objective.named_parameters()
        if parameter.requires_grad
    }
    settings, depth = schedule.settings, getattr(objective.model.config, "depth", 0)
    return TrainState(
        objective=objective,
        wrapped=wrapped,
        optimizers=make_optimizers(named.items(), settings.optim, depth),
        schedule=schedule,
        ema=EMA(named, settings.average) if settings.average else None,
    )


class StepResult(NamedTuple):
    """Metrics of one step."""

    loss: float
    grad_norm: float
    indices: list[int]  # the samples of the batch


class DivergedError(VitrailError):
    """The loss is not finite, or far above its initial value."""

    def __init__(self, message: str, step: int, indices: list[int]) -> None:
        super().__init__(message)
        self.step = step
        self.indices = indices


def train_loop(
    state: TrainState,
    *,
    batches: Callable[[int], Iterator[Batch]],
    prepare: Prepare,
    on_step: Callable[[TrainState, StepResult], bool],
    autocast: Autocast = nullcontext,
) -> None:
    """Take steps until the end of the schedule, or until `on_step` returns False.

    `batches(step)` yields the micro-batches of a step; `prepare` converts one to normalized floats
    and targets, given a random generator and the step.
    """
    while state.step < state.schedule.steps:
        result = train_step(state, batches(state.step), prepare, autocast)
        state.step += 1
        if not on_step(state, result):
            return


def train_step(
    state: TrainState, batches: Iterator[Batch], prepare: Prepare, autocast: Autocast = nullcontext
) -> StepResult:
    """Take one optimizer step on `schedule.accumulate` micro-batches."""
    schedule = state.schedule
    set_learning_rates(state.optimizers, schedule.lr_factor(state.step) * state.lr_scale)
    losses, indices = [], []
    for micro_step in range(schedule.accumulate):
        with torch_threads_for(state.num_parameters):
            batch = next(batches)
            rng = seed_micro_batch(schedule.settings.seed, state.step, micro_step)
            images, targets = prepare(batch, rng, state.step)
        last = micro_step == schedule.accumulate - 1
        with distributed.sync_gradients(state.wrapped, enabled=last):
            with autocast():
                loss = state.wrapped(images, targets) / schedule.accumulate
            (state.scaler.scale(loss) if state.scaler else loss).backward()
        losses.append(loss.detach())
        indices += batch.indices.tolist()
    with torch_threads_for(state.num_parameters):
        norm = optimizer_step(state, torch.stack(losses).sum(), indices)
    return StepResult(
        float(distributed.all_reduce_mean(torch.stack(losses).sum())), float(norm), indices
    )


def optimizer_step(state: TrainState, loss: Tensor, indices: list[int]) -> Tensor:
    """Clip gradients and update the weights, unless loss or gradients are not finite.

    In float16, gradients overflow occasionally: the step is skipped, and the scale is halved.
    Returns the gradient norm.
    """
    scaler = state.scaler
    if scaler:
        for optimizer in state.optimizers:
            scaler.unscale_(optimizer)
    norm = distributed.clip_grad_norm(
        state.wrapped.parameters(), state.schedule.settings.optim.clip_norm
    )
    finite = bool(torch.isfinite(norm))  # the same on all processes, unlike the loss
    diverged = distributed.all_reduce_any(not bool(torch.isfinite(loss)) or not (finite or scaler))
    if finite and not diverged:
        for optimizer in state.optimizers:
            scaler.step(optimizer) if scaler else optimizer.step()
        if state.ema is not None:
            state.ema.update()
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if diverged:
        message = f"loss {float(loss):g}, gradient norm {float(norm):g}"
        raise DivergedError(message, state.step, indices)
    if scaler:
        scaler.update() if finite else scaler.update(scaler.get_scale() / 2)
    return norm


def seed_micro_batch(seed: int, step: int, micro_step: int) -> np.random.Generator:
    """Return the generator of one micro-batch, and seed torch's, which dropout uses."""
    key = (seed, step, micro_step, distributed.rank())
    words = np.random.SeedSequence(key).generate_state(2, np.uint32)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    return np.random.default_rng(words)


def autocast_for(precision: torch.dtype, device: torch.device) -> Autocast:
    """Return the autocast context of a precision; weights stay float32."""
    if precision == torch.float32:
        return nullcontext
    return lambda: torch.autocast(device.type, precision)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock measures the work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
