"""Time budgets: how many steps fit, measured before the run and corrected as it goes.

The cost of a step is estimated from a few trial steps at each image size, then from the steps of
the run. The rest of the schedule is stretched over the steps that still fit. The same trial steps
decide whether torch.compile is faster. How much of a model can be fine-tuned in the time is planned
by `plan_finetuning`, a pure function of measured costs.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vitrail import distributed
from vitrail.data.datasets import ImageDataset
from vitrail.data.loader import default_workers
from vitrail.extras import check_compiler
from vitrail.models.config import VitConfig, pair
from vitrail.models.vit import Model, eval_mode
from vitrail.probing.features import features_of
from vitrail.training.config import Settings
from vitrail.training.cpu_parallel import CpuDataParallel
from vitrail.training.data_module import at_size
from vitrail.training.loop import autocast_for, synchronize
from vitrail.training.optim import NEWTON_SCHULZ_STEPS, Muon, orthogonalize
from vitrail.training.schedules import Schedule, Stages

if TYPE_CHECKING:
    from vitrail.training.trainer import Trainer

CORRECTIONS = 40  # in a run, evenly spaced in time
EVALUATION_FRACTION = 0.03  # of the time, for evaluations during training
MAX_EVALUATIONS = 10
SMOOTHING = 0.9  # of the measured time of a step
END_SECONDS = 2.0  # for saving and the report, in addition to the final evaluation
TRIALS = 3  # steps at each image size from which a time budget is planned
TRIAL_FRACTION = 0.01  # of the budget; limits the trial steps of one size in a single process
OVERHEAD = 1.15  # ratio of a real step to a trial step: data loading, the optimizer
MAX_COMPILED_RATIO = 0.97  # of the eager step's time; a smaller gain is noise


@dataclass
class TimeBudget:
    """The time a run has, and what its parts cost."""

    seconds: float  # in total, including the final evaluation
    used: float  # by earlier parts of a resumed run, and before this object was made
    evaluation: float  # seconds of an evaluation during training
    final: float = 0.0  # seconds of the final evaluations
    step: dict[int, float] = field(default_factory=dict)  # image size → seconds of a step
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    corrected: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.corrected = self.clock()

    def remaining(self) -> float:
        """Return the seconds for steps and evaluations during training."""
        elapsed = self.used + self.clock() - self.started
        return self.seconds - elapsed - self.final - END_SECONDS

    def observe(self, size: int, seconds: float) -> None:
        """Update the costs with a measured step, for this image size and larger ones.

        Costs that a trial does not have, such as data loading, are added to all sizes; if a step is
        faster than its trial, the machine was busy then, and all trials are scaled down.
        """
        before = self.step[size]
        change = (1 - SMOOTHING) * (seconds - before)
        for other, cost in self.step.items():
            if other >= size:
                scaled = cost * (before + change) / before
                self.step[other] = cost + change if change > 0 else scaled

    def evaluations(self) -> int:
        """Return how many evaluations during training are affordable."""
        if not self.evaluation:
            return MAX_EVALUATIONS
        return min(MAX_EVALUATIONS, int(EVALUATION_FRACTION * self.seconds / self.evaluation))

    def steps_that_fit(self, stages: Stages, progress: float, evaluations: int) -> int:
        """Return the steps that fit into the rest of the time, at their mean cost."""
        bounds = [start for start, _ in stages] + [1.0]
        shares = [max(0.0, end - max(start, progress)) for start, end in pairwise(bounds)]
        costs = [self.step[size] for _, size in stages]
        mean = costs[-1]
        if total := sum(shares):
            mean = sum(share * cost for share, cost in zip(shares, costs, strict=True)) / total
        return max(1, int((self.remaining() - evaluations * self.evaluation) / mean))

    def due(self) -> bool:
        """Return whether it is time to correct the schedule, or to end the run."""
        since = self.clock() - self.corrected
        return since >= self.seconds / CORRECTIONS or self.remaining() <= 0

    def correct(self, schedule: Schedule, step: int) -> None:
        """End the schedule when the time is up; all processes use the time of the first."""
        self.corrected = self.clock()
        if self.remaining() <= 0:
            schedule.steps = step
        else:
            every, evaluations = schedule.evaluate_every, 0
            if every:
                evaluations = max(0, (schedule.steps - 1) // every - step // every)
            fit = self.steps_that_fit(schedule.stages, schedule.progress(step), evaluations)
            schedule.stretch_to(step, step + fit)
        schedule.load_state_dict(distributed.broadcast_object(schedule.state_dict()))


def plan_time_budget(trainer: "Trainer") -> TimeBudget:
    """Measure a few steps at each image size, and plan as many steps as fit."""
    schedule, evaluator = trainer.state.schedule, trainer.evaluator
    minutes = trainer.settings.minutes
    assert minutes is not None
    evaluation = evaluator.estimate_seconds()
    step = {size: time_step(trainer, size) for _, size in schedule.stages}
    budget = TimeBudget(
        seconds=60 * minutes,
        used=trainer.elapsed(),  # with the measurements
        evaluation=evaluation,
        final=evaluator.final_cost * evaluation,
        step=step,
    )
    if trainer.state.step:  # resumed: the schedule exists, only the time is less
        budget.correct(schedule, trainer.state.step)
        return budget
    evaluations = distributed.broadcast_object(budget.evaluations())
    steps = distributed.broadcast_object(budget.steps_that_fit(schedule.stages, 0.0, evaluations))
    schedule.length = schedule.steps = steps
    schedule.evaluate_every = math.ceil(steps / (evaluations + 1)) if evaluations else 0
    schedule.lr_factor(0)  # raises if the warmup does not fit
    trainer.callback.log(
        f"  time budget of {minutes:g} min: about {steps:,} step{'s' * (steps != 1)}, "
        f"{trainer.epochs(steps):.1f} epochs, {evaluations} evaluations during training"
    )
    if trainer.epochs(steps) < 1:
        trainer.callback.log("note: less than one epoch fits into --minutes; raise it if you can")
    return budget


def time_step(trainer: "Trainer", size: int) -> float:
    """Return the seconds of a step at an image size; weights do not change."""
    train, device, micro = trainer.splits.train, trainer.device, trainer.micro_batch
    shape = at_size(trainer.batches.preprocessing, size).size
    images = torch.zeros(micro, trainer.evaluator.channels, *shape, device=device)
    targets = torch.zeros(micro, dtype=torch.long, device=device)
    if train.multi_label:
        targets = torch.zeros(micro, len(train.classes), device=device)
    if trainer.teacher is not None:  # the label, then the teacher's features
        features = trainer.teacher.teacher.model.config.num_features
        targets = torch.zeros(micro, 1 + features, device=device)
    times: list[float] = []
    muon = [one for one in trainer.state.optimizers if isinstance(one, Muon)]
    orthogonalization = 0.0
    enough = TRIAL_FRACTION * 60 * (trainer.settings.minutes or math.inf)
    while len(times) < TRIALS and (sum(times) < enough or distributed.world_size() > 1):
        started = time.monotonic()
        with autocast_for(trainer.precision, device)():
            loss = trainer.state.wrapped(images, targets)
        loss.backward()
        synchronize(device)
        times.append(time.monotonic() - started)
        for optimizer in muon:  # the other optimizers are fast
            orthogonalize(optimizer.gradients(), optimizer.cores)
            synchronize(device)
            orthogonalization = time.monotonic() - started - times[-1]
        for optimizer in trainer.state.optimizers:
            optimizer.zero_grad(set_to_none=True)
    step = min(times) * trainer.state.schedule.accumulate + orthogonalization
    return OVERHEAD * step


def compile_if_faster(trainer: "Trainer", *, before: Settings | None) -> None:
    """Compile the step if that is faster, else disable `machine.compile`.

    A resumed run keeps the decision in the settings it was started with, `before`.
    """
    state = trainer.state
    eager = state.wrapped
    if not torch.cuda.is_available():
        check_compiler("machine.compile", "leave it out")
    compiled: Any = torch.compile(eager.objective if isinstance(eager, CpuDataParallel) else eager)
    if before is not None:
        is_faster = before.machine.compile
    else:
        trainer.callback.log("  compiling, and measuring whether it is faster")
        size = state.schedule.stages[-1][1]
        state.wrapped = compiled
        compiled_seconds = time_step(trainer, size)
        state.wrapped = eager
        ratio = distributed.broadcast_object(compiled_seconds / time_step(trainer, size))
        is_faster = ratio < MAX_COMPILED_RATIO
        decision = "enabled" if is_faster else "disabled"
        trainer.callback.log(
            f"  torch.compile {decision}: a step takes {ratio:.0%} of the eager time"
        )
    if is_faster:
        state.wrapped = compiled
    else:
        machine = replace(trainer.settings.machine, compile=False)
        trainer.settings = replace(trainer.settings, machine=machine)


# Fine-tuning within a time budget. From most to least expensive:
#
#     full       all weights, at the checkpoint's image size: the paper's fine-tuning
#     growing    all weights; images of three quarters of the size first, the full size last
#     small      the same, at a smaller size than the checkpoint's
#     last       the last blocks only, at the smallest size; the others need no backward pass
#
# Crops make objects larger in training than in evaluation, so a model that was trained at a smaller
# size is better at the full one than at its own (FixRes, Touvron et al. 2019, arXiv:1906.06423).
# The constants come from trials on dev splits (docs/notebook.md, "Transfer on real weights").

FULL_EPOCHS = 12.0  # at the checkpoint's size; if more fit, nothing is saved
ENOUGH_EPOCHS = 1.5  # use the largest image size at which this many fit
TRAIN_SIZE = 3 / 4  # of the image size, for most of the run
FULL_SIZE_FROM = 0.9  # of the run
MIN_EPOCHS = 0.4  # of all weights, at the smallest size; below, the last blocks learn more
MIN_SIZE = 4 / 7  # of the checkpoint's image size: 128 of 224 pixels
LAST_BLOCKS = 1 / 3  # of the depth
BACKWARD = 2.0  # cost of a backward pass in forward passes
TIMED_FORWARD = 16  # images per timed forward pass
FINETUNE_END = 4.0  # seconds, for the first steps, saving and the report
TIMED_FEATURES = 32  # images from which the cost of features is measured
# Maximum fraction of the time left by evaluation for computing features of the probe: small if all
# weights are trained after it, large if the probe may well be the result.
PROBE_FRACTION, PROBE_FRACTION_LAST = 0.2, 0.5
MIN_PROBE_IMAGES = 500  # fewer make a poor head, whatever they cost
TEST_FRACTION, MIN_TEST_IMAGES = 0.2, 500  # of the time, for evaluating test images at the end


class FinetunePlan(NamedTuple):
    """How to fine-tune, and why."""

    name: str  # full, growing, small or last
    image_size: int
    train_images: int
    probe_images: int | None = None  # training images for the probe; None for all
    test_images: int | None = None  # held-out images to evaluate at the end, in addition to dev
    image_sizes: Stages = ()
    frozen_blocks: int = 0  # the first ones, with everything before them
    epochs: float = 0.0  # that fit, approximately
    reason: str = ""


def plan_finetuning(
    config: VitConfig,
    *,
    seconds: float,
    forward: float,
    read: float,
    train: int,
    dev: int,
    test: int,
    muon_batch: int | None = None,
) -> FinetunePlan:
    """Return the most thorough fine-tuning of `train` images that fits into `seconds`.

    `forward` and `read` are seconds per image, at the checkpoint's image size; `test` images, or as
    many as leave time for training, are evaluated at the end in addition to dev. `muon_batch` is
    the batch size if Muon trains all weights: its few steps help more than many of the last blocks.
    """
    native = pair(config.image_size)[0]
    stride = config.stride[0]
    sizes = [s for s in range(stride, native + 1, stride) if s >= MIN_SIZE * native]
    # The image size for most of a run that ends at a size.
    first_size = {s: max(stride, round(TRAIN_SIZE * s / stride) * stride) for s in sizes}
    forward_seconds = {
        size: forward * (encoder_cost(config, size) / encoder_cost(config, native))
        for size in (*sizes, *first_size.values())
    }
    orthogonalization = 0.0
    if muon_batch is not None:
        orthogonalization = forward * muon_cost(config) / muon_batch / encoder_cost(config, native)
    affordable = int(TEST_FRACTION * seconds / (forward_seconds[min(sizes)] + read))
    tested = min(test, max(MIN_TEST_IMAGES, affordable))
    evaluated = dev + tested

    def probe_images(size: int, trained: float = 1.0) -> int:
        image = forward_seconds[size] + read
        free = seconds - FINETUNE_END - evaluated * image
        fraction = PROBE_FRACTION if trained == 1 else PROBE_FRACTION_LAST
        return min(train, max(MIN_PROBE_IMAGES, int(fraction * free / image)))

    def epochs(size: int, *, trained: float = 1.0, growing: bool = True) -> float:
        """Return the epochs that fit, if a fraction of the blocks is trained."""
        cost = forward_seconds[size]
        passes = (probe_images(size, trained) + evaluated) * (cost + read)
        if growing:
            first = forward_seconds[first_size[size]]
            cost = FULL_SIZE_FROM * first + (1 - FULL_SIZE_FROM) * cost
        step = cost * (1 + BACKWARD * trained) + read + orthogonalization
        return max(0.0, seconds - FINETUNE_END - passes) / (train * step)

    smallest, frozen, sizes_of_run = min(sizes), 0, ()
    if (count := epochs(native, growing=False)) >= FULL_EPOCHS:
        name, size, reason = "full", native, f"about {count:.0f} epochs fit"
    else:
        fit = {size: epochs(size) for size in sizes}
        size = max((s for s in sizes if fit[s] >= ENOUGH_EPOCHS), default=smallest)
        count = fit[size]
        if size > smallest or count >= MIN_EPOCHS or muon_batch is not None:
            name = "growing" if size == native else "small"
            reason = f"about {count:.1f} epochs fit"
            if size < native:
                reason += f", {fit[native]:.1f} at {native} pixels"
        else:
            name = "last"
            frozen = config.depth - max(1, round(LAST_BLOCKS * config.depth))
            count = epochs(size, trained=1 - frozen / config.depth)
            reason = f"about {count:.1f} epochs fit, {fit[size]:.1f} of all weights"
        first = first_size[size]
        sizes_of_run = ((0.0, first), (FULL_SIZE_FROM, size)) if first < size else ()
    probed = probe_images(size, 1 - frozen / config.depth)
    return FinetunePlan(
        name=name,
        image_size=size,
        train_images=train,
        probe_images=probed if probed < train else None,
        test_images=tested if tested < test else None,
        image_sizes=sizes_of_run,
        frozen_blocks=frozen,
        epochs=count,
        reason=reason,
    )


def encoder_cost(config: VitConfig, size: int) -> float:
    """Return the multiply-adds of the encoder for one image, up to a constant factor."""
    tokens = (size // config.stride[0]) ** 2 + config.num_prefix
    return tokens * (4 * config.width + 2 * config.mlp_width + 2 * tokens)


def muon_cost(config: VitConfig) -> float:
    """Return the multiply-adds of a Muon step, in the unit of `encoder_cost`."""
    square = 3 * NEWTON_SCHULZ_STEPS * config.width**2  # queries, keys, values and projection
    wide = (4 * NEWTON_SCHULZ_STEPS - 2) * config.width**2 + 2 * config.width * config.mlp_width
    return 4 * square + 2 * wide


@torch.no_grad()
def seconds_per_image(model: Model, device: torch.device) -> float:
    """Measure the time of a forward pass at the model's own image size, per image."""
    config = model.config
    images = torch.zeros(TIMED_FORWARD, config.channels, *pair(config.image_size), device=device)
    model.to(device)
    with eval_mode(model):
        model.features(images[:2])
        started = time.monotonic()
        model.features(images).sum().item()  # waits for the device
        return (time.monotonic() - started) / TIMED_FORWARD


def feature_seconds(
    model: Model, samples: ImageDataset, device: torch.device, workers: int | None
) -> float:
    """Measure feature extraction on some images; loader processes share the loading."""
    forward, count = seconds_per_image(model, device), min(TIMED_FEATURES, len(samples))
    some = samples.subset(np.linspace(0, len(samples) - 1, count, dtype=int))
    started = time.monotonic()
    features_of(model, some, cache=False, batch_size=count, workers=0)
    loading = max(0.0, (time.monotonic() - started) / count - forward)
    workers = default_workers(samples) if workers is None else workers
    return max(1e-6, forward + loading / max(1, workers))  # clocks may be coarse
