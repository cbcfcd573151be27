"""The one training loop: pre-training, fine-tuning and masked patches differ in what is passed in.

It prints nothing and opens nothing. What changes is in `TrainState`, what does not in `Plan`, and
what happens beside the learning is in the callbacks.

Shapes: B pictures of a micro-batch (B, C, H, W), targets (B,) or (B, K).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.data.loader import Batch
from vitrail.data.threads import cores_for
from vitrail.errors import VitrailError
from vitrail.training.averaging import Average
from vitrail.training.optimizers import set_rates
from vitrail.training.plan import Plan

Prepare = Callable[[Batch, np.random.Generator, int], tuple[Tensor, Tensor]]


@dataclass
class TrainState:
    """What changes from step to step."""

    objective: nn.Module  # holds the model; its forward is the loss
    wrapped: nn.Module  # the same, as several processes share it
    optimizers: list[torch.optim.Optimizer]
    average: Average | None = None
    scaler: torch.amp.GradScaler | None = None  # of float16 alone
    step: int = 0
    rate_scale: float = 1.0  # halved when the loss exploded and the run went back

    @cached_property
    def weights(self) -> int:
        """How many there are."""
        return sum(weight.numel() for weight in self.objective.parameters())


@dataclass
class Step:
    """What a step was like."""

    loss: float
    grad_norm: float
    indices: list[int] = field(default_factory=list)  # the samples it learned from


class DivergedError(VitrailError):
    """The loss is no number any more, or far beyond where it began."""

    def __init__(self, what: str, step: int, indices: list[int]) -> None:
        super().__init__(what)
        self.step = step
        self.indices = indices


def train(
    state: TrainState,
    plan: Plan,
    *,
    batches: Callable[[int], Iterator[Batch]],
    prepare: Prepare,
    after: Callable[[TrainState, Step], bool],
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Take steps until `plan.steps`, or until `after`, which sees each one, says to stop.

    `batches(step)` gives the micro-batches of one step; `prepare` makes floats of one, given what
    is random in it and the step.
    """
    while state.step < plan.steps:
        done = train_step(state, plan, batches(state.step), prepare, autocast)
        state.step += 1
        if not after(state, done):
            return


def train_step(
    state: TrainState,
    plan: Plan,
    batches: Iterator[Batch],
    prepare: Prepare,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """One step of the optimizers on `plan.accumulate` micro-batches."""
    set_rates(state.optimizers, plan.rate(state.step) * state.rate_scale)
    losses, indices = [], []
    for part in range(plan.accumulate):
        with cores_for(state.weights):
            batch = next(batches)
            rng = seeded(plan.settings.seed, state.step, part)
            images, targets = prepare(batch, rng, state.step)
        last = part == plan.accumulate - 1
        with distributed.sync_gradients(state.wrapped, enabled=last):
            with autocast():
                loss = state.wrapped(images, targets) / plan.accumulate
            (state.scaler.scale(loss) if state.scaler else loss).backward()
        losses.append(loss.detach())
        indices += batch.indices.tolist()
    with cores_for(state.weights):
        norm = move(state, plan.settings.optim.clip_norm, torch.stack(losses).sum(), indices)
    return Step(float(distributed.all_reduce_mean(torch.stack(losses).sum())), float(norm), indices)


def move(state: TrainState, clip_norm: float | None, loss: Tensor, indices: list[int]) -> Tensor:
    """Change the weights by their gradients, unless these are no numbers; the gradients' norm.

    In float16 gradients overflow now and then: the step is left out, and the next are scaled less.
    """
    scaler = state.scaler
    if scaler:
        for optimizer in state.optimizers:
            scaler.unscale_(optimizer)
    norm = distributed.clip_grad_norm(state.wrapped.parameters(), clip_norm)
    usable = bool(torch.isfinite(norm))  # the same for all processes, unlike the loss
    if distributed.all_reduce_any(not bool(torch.isfinite(loss)) or not (usable or scaler)):
        forget_gradients(state)
        what = f"loss {float(loss):g}, norm of the gradients {float(norm):g}"
        raise DivergedError(what, state.step, indices)
    if usable:
        for optimizer in state.optimizers:
            scaler.step(optimizer) if scaler else optimizer.step()
        if state.average is not None:
            state.average.update()
    forget_gradients(state)
    if scaler:
        scaler.update() if usable else scaler.update(scaler.get_scale() / 2)
    return norm


def forget_gradients(state: TrainState) -> None:
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)


def seeded(seed: int, step: int, part: int) -> np.random.Generator:
    """The randomness of one micro-batch; torch's too, from which dropout is drawn."""
    key = (seed, step, part, distributed.rank())
    words = np.random.SeedSequence(key).generate_state(2, np.uint32)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    return np.random.default_rng(words)
