"""The training loop and the evaluation: objectives and data are passed in.

The loop prints nothing and opens nothing. What changes from step to step is in `TrainState`;
logging, evaluation and checkpoints are in the `on_step` callback (`trainer.py`).

Shapes: micro-batches of B images (B, C, H, W), targets (B,) or (B, K).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.data.loader import Batch, torch_threads_for
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.evaluation.evaluate import quick_evaluate, run_inference
from vitrail.evaluation.results import EvaluationResult
from vitrail.training.config import Settings
from vitrail.training.data_module import DataSplits, at_size
from vitrail.training.objectives import Objective
from vitrail.training.optim import EMA, make_optimizers, set_learning_rates
from vitrail.training.schedules import Schedule

Prepare = Callable[[Batch, np.random.Generator, int], tuple[Tensor, Tensor]]
Autocast = Callable[[], AbstractContextManager[object]]

MAX_BATCH = 128
MAX_SKIPPED = 20  # consecutive float16 steps, which reduce the scale from 65,536 to below 0.1
CPU_BATCH = 16  # of timed forward passes
TIMED_PASSES = 2
EVALUATION_OVERHEAD = 1.3  # ratio of an evaluation to its forward passes: data loading


@dataclass
class TrainState:
    """What changes from step to step."""

    objective: nn.Module  # contains the model; its forward is the loss
    wrapped: nn.Module  # the same, wrapped for DDP, FSDP or CPU data parallelism
    optimizers: list[torch.optim.Optimizer]
    schedule: Schedule
    ema: EMA | None = None
    scaler: torch.amp.GradScaler | None = None  # float16 only
    skipped: int = 0  # consecutive steps whose gradients overflowed in float16
    step: int = 0
    lr_scale: float = 1.0  # halved when the run is rolled back after divergence
    num_parameters: int = 0  # of the objective, for the number of threads


def make_state(objective: Objective, wrapped: nn.Module, schedule: Schedule) -> TrainState:
    """Create the optimizers of all trainable weights, and the EMA if configured."""
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
        num_parameters=sum(weight.numel() for weight in objective.parameters()),
    )


class StepResult(NamedTuple):
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
    loss = torch.stack(losses).sum()
    with torch_threads_for(state.num_parameters):
        norm = optimizer_step(state, loss, indices)
    return StepResult(float(distributed.all_reduce_mean(loss)), float(norm), indices)


def optimizer_step(state: TrainState, loss: Tensor, indices: list[int]) -> Tensor:
    """Clip gradients and update the weights, unless loss or gradients are not finite.

    In float16, gradients overflow occasionally: the step is skipped, and the scale is halved, up to
    `MAX_SKIPPED` times in a row. Returns the gradient norm.
    """
    scaler = state.scaler
    if scaler:
        for optimizer in state.optimizers:
            scaler.unscale_(optimizer)
    norm = distributed.clip_grad_norm(
        state.wrapped.parameters(), state.schedule.settings.optim.clip_norm
    )
    finite = bool(torch.isfinite(norm))  # the same on all processes, unlike the loss
    state.skipped = 0 if finite else state.skipped + 1
    overflowed = not finite and (scaler is None or state.skipped >= MAX_SKIPPED)
    diverged = distributed.all_reduce_any(overflowed or not bool(torch.isfinite(loss)))
    if finite and not diverged:
        for optimizer in state.optimizers:
            scaler.step(optimizer) if scaler else optimizer.step()
        if state.ema is not None:
            state.ema.update()
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if scaler:
        scaler.update() if finite else scaler.update(scaler.get_scale() / 2)
    if diverged:
        message = f"loss {float(loss):g}, gradient norm {float(norm):g}"
        if state.skipped > 1:
            message += f", {state.skipped} steps in a row skipped in float16"
        state.skipped = 0
        raise DivergedError(message, state.step, indices)
    return norm


def seed_micro_batch(seed: int, step: int, micro_step: int) -> np.random.Generator:
    """Return the generator of one micro-batch, and seed torch's, which dropout uses."""
    key = (seed, step, micro_step, distributed.rank())
    words = np.random.SeedSequence(key).generate_state(2, np.uint32)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    return np.random.default_rng(words)


@contextmanager
def preserve_global_state(device: torch.device) -> Iterator[None]:
    """Restore the global random generators and torch's number of threads after `with`."""
    numpy_state, threads = np.random.get_state(), torch.get_num_threads()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def autocast_for(precision: torch.dtype, device: torch.device) -> Autocast:
    """Return the autocast context of a precision; weights stay float32."""
    if precision == torch.float32:
        return nullcontext
    return lambda: torch.autocast(device.type, precision)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock measures the work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


# Evaluation on the held-out splits


class Evaluator:
    """Evaluates the objective's model, with the averaged weights if there are any."""

    def __init__(
        self,
        objective: nn.Module,
        ema: EMA | None,
        splits: DataSplits,
        preprocessing: Preprocessing,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.objective, self.ema, self.splits = objective, ema, splits
        self.preprocessing, self.settings, self.device = preprocessing, settings, device
        self.channels = len(preprocessing.mean)
        sizes = [len(samples) for samples in splits.held_out.values()]
        self.batch_size = min(MAX_BATCH, max([1, *sizes]))
        # Cost of `final` relative to `during_training`.
        self.final_cost = sum(sizes) / sizes[0] if sizes else 0.0
        self.loader_options: dict[str, Any] = {
            "channels": self.channels,
            "batch_size": self.batch_size,
            "workers": settings.machine.workers,
            "device": device,
        }

    def during_training(self, image_size: int | None = None) -> dict[str, float]:
        """Return the metrics of the split that is evaluated during training, as val/accuracy.

        A model that is still trained at a smaller image size is evaluated at that size.
        """
        if not self.splits.held_out:
            return {}
        name = next(iter(self.splits.held_out))
        if self.settings.until_accuracy is not None or self.settings.patience is not None:
            name = "val"
        if self.settings.objective == "masked-patches":
            return {f"{name}/loss": self.masked_loss(name)}
        return metrics(name, self.evaluate(name, image_size))

    def final(
        self, known: Mapping[str, EvaluationResult] | None = None
    ) -> tuple[dict[str, EvaluationResult], dict[str, float]]:
        """Return the outcomes and metrics of all splits; those of `known` are not recomputed."""
        held_out = self.splits.held_out
        if self.settings.objective == "masked-patches":
            return {}, {f"{name}/loss": self.masked_loss(name) for name in held_out}
        known = known or {}
        outcomes = {name: known.get(name) or self.evaluate(name) for name in held_out}
        row = {key: x for name, o in outcomes.items() for key, x in metrics(name, o).items()}
        return outcomes, row

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the objective into evaluation mode, with the averaged weights."""
        self.objective.eval()
        try:
            with self.ema.applied() if self.ema else nullcontext():
                yield
        finally:
            self.objective.train()

    def evaluate(self, split: str, image_size: int | None = None) -> EvaluationResult:
        with self.evaluating():
            result = quick_evaluate(
                self.objective.logits,  # pyright: ignore[reportArgumentType]
                self.splits.held_out[split],
                at_size(self.preprocessing, image_size),
                loss=self.settings.loss.kind or "softmax",
                **self.loader_options,
            )
        self.splits.skipped.update(result.skipped)
        return result

    def masked_loss(self, split: str) -> float:
        """Return the mean masked patch loss, with the same masks every time.

        Masks depend on the number of processes: each draws its own, batch by batch.
        """
        total, calls = torch.zeros(2, dtype=torch.float64), count()

        def predict(images: Tensor) -> Tensor:
            seed_micro_batch(0, next(calls), 0)
            return self.objective(images, None)

        def add(loss: Tensor, batch: Batch) -> None:
            total.add_(torch.tensor([float(loss) * len(batch.images), len(batch.images)]))

        samples, options = self.splits.held_out[split], self.loader_options
        with self.evaluating():
            skipped = run_inference(predict, samples, self.preprocessing, add, **options)
        self.splits.skipped.update(skipped)
        summed, images = distributed.all_reduce_sum(total).tolist()
        return summed / max(1.0, images)

    def estimate_seconds(self) -> float:
        """Return the expected duration of `during_training`, from a few forward passes."""
        if not self.splits.held_out:
            return 0.0
        size, batch = self.preprocessing.size, self.batch_size
        if self.device.type == "cpu":
            batch = min(batch, CPU_BATCH)  # as fast, per image
        images = torch.zeros(batch, self.channels, *size, device=self.device)
        times = []
        with torch.no_grad():
            for _ in range(TIMED_PASSES):
                started = time.monotonic()
                if self.settings.objective == "masked-patches":
                    self.objective(images, torch.zeros(len(images), device=self.device))
                else:
                    self.objective.logits(images)  # pyright: ignore[reportCallIssue]
                synchronize(self.device)
                times.append(time.monotonic() - started)
        samples = len(next(iter(self.splits.held_out.values()))) / distributed.world_size()
        return EVALUATION_OVERHEAD * min(times) * samples / batch


def metrics(split: str, outcome: EvaluationResult) -> dict[str, float]:
    """Return the metrics of an evaluation by name, such as val/accuracy."""
    row = {f"{split}/accuracy": outcome.accuracy, f"{split}/loss": outcome.loss}
    return row if outcome.top5 is None else row | {f"{split}/top5": outcome.top5}
