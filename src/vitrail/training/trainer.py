"""A training run: `RunConfig` → `Trainer` → `fit` → a bundle.

`run` is what the commands call, and `train` is `vitrail.train`. The run's folder is a bundle with
settings.toml, metrics.jsonl, report.html and, until the run is finished, the resumable state.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from safetensors.torch import load_file

from vitrail import distributed
from vitrail.checkpoints.files import write_file
from vitrail.checkpoints.load import check_reference, load
from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.save import save, save_adapter
from vitrail.data.datasets import ImageDataset
from vitrail.data.provenance import DataProvenance
from vitrail.data.storage import same_location, write_atomic
from vitrail.errors import ConfigError, TrainingError, renamed_keyword
from vitrail.evaluation.dataset import HELD_OUT
from vitrail.evaluation.results import EvaluationResult
from vitrail.formatting import comma_list, duration, percent, shell_command
from vitrail.models.config import pair
from vitrail.models.lora import add_lora, merge_lora
from vitrail.models.registry import name_of
from vitrail.models.vit import Model
from vitrail.models.vit import build as build_empty
from vitrail.reports.pages import run_page
from vitrail.training import checkpoint, recipes
from vitrail.training.auto_config import AutoConfig, choose_accumulation, image_size_stages
from vitrail.training.budget import TimeBudget, compile_if_faster, plan_time_budget
from vitrail.training.callbacks import Callback, MetricsLog
from vitrail.training.checkpoint import (
    StopSignal,
    check_folder,
    graceful_stop,
    has_state,
    lock_folder,
)
from vitrail.training.config import RunConfig, Settings
from vitrail.training.cpu_parallel import CpuDataParallel
from vitrail.training.data_module import (
    BatchStream,
    batch_preparation,
    limit_test_images,
    open_splits,
    reference_of,
)
from vitrail.training.loop import (
    DivergedError,
    Evaluator,
    StepResult,
    TrainState,
    autocast_for,
    make_state,
    metrics,
    preserve_global_state,
    seed_micro_batch,
    train_loop,
)
from vitrail.training.memory import memory_options, num_trainable
from vitrail.training.model_init import (
    PROBE_HEAD,
    build_model,
    load_pretrained,
    probe_init,
    set_weights,
)
from vitrail.training.objectives import (
    Classification,
    FeatureDistillation,
    TeacherFeatures,
    make_objective,
)
from vitrail.training.optim import freeze
from vitrail.training.schedules import Schedule

DIVERGED = 3.0  # times the initial loss
LOSS_WINDOW = 10  # steps over which the initial and the recent loss are compared
BEST_WEIGHTS = "best-{}.safetensors"  # by step, until the end of a run with patience
EVALUATIONS = 20  # at most, in a run of a fixed length
OOM_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True, kw_only=True)
class Result:
    folder: Path
    step: int
    seconds: float
    finished: bool  # False: it was stopped, and can be resumed
    outcomes: dict[str, EvaluationResult] = field(default_factory=dict)  # by split


@renamed_keyword("watch", "callback")
def train(
    data: str | PathLike[str] | ImageDataset | Mapping[str, ImageDataset],
    out: str | PathLike[str],
    *,
    start: str | PathLike[str] = "",
    recipe: str | PathLike[str] = "",
    settings: Settings | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    **changes: Any,
) -> Result:
    """Train a model on images, or fine-tune `start`, any model reference; the bundle is `out`.

    >>> result = train("images", "runs/first", minutes=10)
    >>> result.outcomes["val"].accuracy
    >>> train("images", "runs/second", start="builtin:vit-photos", epochs=4)
    >>> train("images", "runs/third", model={"name": "ViT-Ti/16"}, optim={"kind": "adamw"})

    `data` is a reference, an opened dataset to train on, or several by split: train, val, test.
    `changes` override `settings` or those of `recipe`; what is not given is chosen from the data.
    `resume` continues a run that was stopped; `changes` must then not alter what it computes.
    `callback` receives the run's events.
    """
    if not isinstance(start, str | PathLike):
        raise ConfigError(
            f"start is a {type(start).__name__}, which a resumed run could not load again; "
            "save it with vitrail.save, and pass that folder"
        )
    reference, opened = reference_of(data)
    folder, start = Path(out), fspath(start)
    if resume and (recipe or settings):
        raise ConfigError("a run is resumed with its own settings; leave recipe and settings out")
    if resume:
        before, own_data, own_start = recipes.read_run(folder)
        if not same_location(reference, own_data):
            raise ConfigError(
                f"{out} was trained on {own_data}, not {reference}; pass that dataset to resume"
            )
        if start and not same_location(start, own_start):
            init = own_start or "random initialization"
            raise ConfigError(f"{out} started from {init}, not {start}; leave start out to resume")
        chosen, start = recipes.override(before, changes), own_start
        recipes.check_same_run(before, chosen)
    else:
        chosen = recipes.combine(fspath(recipe), settings, changes)
    config = RunConfig(data=reference, out=folder, settings=chosen, start=start, resume=resume)
    if opened is not None:
        config = replace(config, splits=open_splits(opened, chosen))
    return run(config, callback)


def run(
    config: RunConfig, callback: Callback | None = None, *, started: float | None = None
) -> Result:
    """Train a model. `started` is when the time budget began (time.monotonic)."""
    started = time.monotonic() if started is None else started
    if config.settings.lora is not None and not config.start:
        raise ConfigError(
            f"lora={config.settings.lora} adapts a pre-trained model, and none is given; use "
            "`vitrail finetune` with --from (in Python start=)"
        )
    for reference in (config.start, config.settings.loss.teacher):
        check_reference(reference)  # before the data is read
    with distributed.process_group(config.settings.machine.device) as device:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # by torchrun
        if restarts and has_state(config.out):
            config = replace(config, resume=True)
        first = distributed.is_main()
        callback = callback if first and callback is not None else Callback()
        lock = lock_folder(config.out) if first else nullcontext()
        with lock, graceful_stop() as stop, preserve_global_state(device):
            check_folder(config)
            trainer = Trainer(config, callback, device, started=started, stop=stop)
            if trainer.settings.machine.compile:
                resumed = config.resume and has_state(config.out) and recipes.is_run(config.out)
                before = recipes.read_run(config.out)[0] if resumed else None
                compile_if_faster(trainer, before=before)
            if config.overwrite and first and not config.resume:
                recipes.clear_run(config.out)  # only now that the new run can start
            distributed.barrier()
            return trainer.fit()


class Trainer:
    """A run, ready to start: logging, evaluation, checkpoints and stopping."""

    def __init__(
        self,
        config: RunConfig,
        callback: Callback,
        device: torch.device,
        *,
        started: float | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        """Open the data, complete the settings, and create the model and its training state."""
        self.config, self.callback, self.device = config, callback, device
        self.folder = config.out
        self.started = time.monotonic() if started is None else started
        self.stop = StopSignal() if stop is None else stop  # an unset signal is false
        self.used = 0.0  # seconds, of earlier parts of a resumed run
        self.saved = 0.0  # time of the last checkpoint
        self.losses: list[float] = []
        self.timings: dict[str, float] = {}  # seconds by part of the run
        self.reached = False  # settings.until_accuracy, or the end of settings.patience
        # For settings.patience: accuracy, -loss and step of the best evaluation on val; evaluations
        # in total and since then.
        self.best: dict[str, float] = {}
        self.probe_note = ""  # if the linear probe is the result of the run
        self.budget: TimeBudget | None = None
        self.metrics = MetricsLog(None)
        auto, teacher = self.build_model()
        self.build_training(auto, teacher)

    def build_model(self) -> tuple[AutoConfig, Model | None]:
        """Open the data, complete the settings, create the model; load the teacher of the loss."""
        config, device, log = self.config, self.device, self.callback.log
        splits = config.splits or open_splits(config.data, config.settings)
        for note in splits.notes:
            log(f"note: {note}")
        model, auto = build_model(
            config.settings, splits, config.start, device, log, started=self.started
        )
        self.settings, self.reasons, settings = auto.settings, auto.reasons, auto.settings
        assert settings.batch_size is not None, "set by auto_config"
        self.batch_size = settings.batch_size
        if auto.test_images is not None:
            splits = limit_test_images(splits, auto.test_images)
        teacher = None
        if settings.loss.teacher:
            teacher = load(settings.loss.teacher, image_size=settings.loss.teacher_size).to(device)
        auto.choose_execution(model.config, device)
        (height, width), train = pair(model.config.image_size), splits.train
        count = self.num_parameters = sum(p.numel() for p in model.parameters())  # without LoRA
        log(f"{name_of(model.config)}, {count:,} parameters, {height} x {width} pixels")
        log(f"{len(train):,} training images of {len(train.classes):,} classes")
        for reason in auto.reasons:
            log(f"  {reason}")
        if settings.machine.checkpointing:
            if not hasattr(model, "checkpointing"):
                raise ConfigError(
                    f"{name_of(model.config)} does not support machine.checkpointing; leave it out"
                )
            model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]
        model.to(device)  # before its free memory is measured
        self.probe = None  # initialization of the head, and the result to beat
        if config.start and settings.head_init == "probe":
            if config.overwrite and same_location(config.start, str(config.out)):
                raise ConfigError(
                    f"a linear probe of {config.start} may be the result of the run, which would "
                    "overwrite it; choose another --out"
                )
            resume_from = config.out if config.resume and has_state(config.out) else None
            splits, self.probe = probe_init(model, splits, auto, self.callback, resume_from)
        self.model, self.splits = model, splits
        if settings.lora is not None:
            add_lora(model, settings.lora, settings.lora_alpha, seed=settings.seed)
            log(f"  LoRA of rank {settings.lora}: {num_trainable(model):,} trainable parameters")
        if frozen := freeze(model, settings.optim.freeze):
            log(f"  frozen: {comma_list(frozen)}; {num_trainable(model):,} trainable parameters")
        return auto, teacher

    def build_training(self, auto: AutoConfig, teacher: Model | None) -> None:
        """Create the schedule, the objective with its optimizers, the batches and the evaluator."""
        settings, splits, model, device = self.settings, self.splits, self.model, self.device
        samples, batch, log = len(splits.train), self.batch_size, self.callback.log
        if settings.minutes is not None and (settings.steps or settings.epochs):
            log("note: minutes set the length of the run; epochs and steps are ignored")
        steps = settings.steps or max(1, round((settings.epochs or 1.0) * samples / batch))
        every = settings.evaluate_every or max(1.0, steps * batch / samples / EVALUATIONS)
        self.schedule = schedule = Schedule(
            settings=settings,
            length=steps,
            accumulate=choose_accumulation(settings, model, device, log),
            processes=distributed.world_size(),
            stages=image_size_stages(settings, model.config),
            evaluate_every=max(1, round(every * samples / batch)),
        )
        if settings.minutes is None:
            schedule.lr_factor(0)  # raises if the warmup does not fit
            if settings.average**steps > 0.1:
                log(
                    f"note: with average={settings.average:g}, {steps:,} steps are too few: the "
                    "average stays close to the initialization"
                )
        counts = splits.train.class_counts() if settings.loss.logit_adjustment else None
        objective = make_objective(model, settings, teacher=teacher, class_counts=counts)
        objective.to(device).train()
        self.teacher = None
        if isinstance(objective, FeatureDistillation):
            self.teacher = TeacherFeatures(objective.teacher, cached=auto.augmentation.views > 0)
        wrapped = distributed.parallelize(objective, settings.machine.strategy)
        if auto.shards > 1 and isinstance(objective, Classification | FeatureDistillation):
            wrapped = CpuDataParallel(objective, auto.shards)
        state = self.state = make_state(objective, wrapped, schedule)
        self.precision = auto.precision
        if auto.precision == torch.float16:  # too little range for gradients
            state.scaler = torch.amp.GradScaler(device.type)
        preprocessing = get_metadata(model).preprocessing
        self.batches = BatchStream(
            splits.train,
            preprocessing,
            auto.augmentation,
            model.config.channels,
            schedule,
            full_size=self.teacher is not None,
            skipped=splits.skipped,
        )
        self.prepare = batch_preparation(
            preprocessing,
            auto.mixing,
            len(splits.train.classes),
            device,
            steps_per_epoch=samples / batch,
            teacher=self.teacher,
            image_size=schedule.image_size,
        )
        self.evaluator = Evaluator(objective, state.ema, splits, preprocessing, settings, device)

    @property
    def micro_batch(self) -> int:
        """Images per forward pass on one device."""
        return self.batch_size // distributed.world_size() // self.schedule.accumulate

    def epochs(self, steps: int) -> float:
        return steps * self.batch_size / len(self.splits.train)

    def elapsed(self) -> float:
        return self.used + time.monotonic() - self.started

    def fit(self) -> Result:
        """Take all steps, or those that are left, and write the bundle and the report."""
        self.timings["preparing"] = time.monotonic() - self.started
        try:
            self.begin()
            finished = self.train_steps()
            outcomes = self.finish() if finished else {}
            if not finished:
                self.save_checkpoint()
                self.splits.log_skipped(self.callback.log)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not any(message in str(error) for message in OOM_MESSAGES):
                raise
            raise ConfigError(self.out_of_memory()) from None
        finally:
            self.callback.on_train_end()
            self.metrics.close()
            if self.teacher is not None:
                self.teacher.save()
        return Result(
            folder=self.folder,
            step=self.state.step,
            seconds=self.elapsed(),
            finished=finished,
            outcomes=outcomes,
        )

    def begin(self) -> None:
        """Restore the state, plan the time budget, and write the run's files."""
        if self.config.resume and has_state(self.folder):
            self.restore_checkpoint()
            self.callback.log(f"resumed at step {self.state.step:,}")
        if self.settings.minutes is not None:
            self.budget = plan_time_budget(self)
        first, step = distributed.is_main(), self.state.step
        if first:
            recipes.write_run(
                self.folder,
                self.settings,
                data=self.config.data,
                start=self.config.start,
                processes=self.schedule.processes,
                micro_batch=self.micro_batch,
            )
            if self.probe is not None and not step:
                self.probe.save(self.folder)
        log_folder = self.folder if first else None
        self.metrics = MetricsLog(log_folder, after_step=step, steps=self.schedule.length)
        if not has_state(self.folder):
            self.save_checkpoint()  # to roll back to; and a full disk fails early
        self.saved = time.monotonic()
        self.metrics.start_step()
        self.stop.graceful = True
        self.callback.on_train_begin(step, self.schedule.steps)

    def out_of_memory(self) -> str:
        """Return the error message: how to resume, or start over, with less memory."""
        batch = self.batch_size // distributed.world_size()
        checkpointing = bool(getattr(self.model, "checkpointing", False))
        options = memory_options(batch, self.micro_batch, checkpointing=checkpointing)
        advice = f"try {', or '.join(options)}"
        if has_state(self.folder):  # not while the time of a step is measured
            advice = f"the state is saved in {self.folder}: resume with {', or '.join(options)}"
        if not options:
            advice = (
                "start another run with smaller images, --optim.kind adafactor or --optim.freeze"
            )
        return f"out of memory at step {self.state.step:,}; {advice}"

    def train_steps(self) -> bool:
        """Take all steps, with rollbacks after divergence; return whether the run is complete."""
        retries = self.settings.retries
        while True:
            try:
                train_loop(
                    self.state,
                    batches=self.batches,
                    prepare=self.prepare,
                    on_step=self.on_step,
                    autocast=autocast_for(self.precision, self.device),
                )
                return self.reached or self.state.step >= self.schedule.steps
            except DivergedError as error:
                reason = self.explain_divergence(error)
                if not retries:
                    raise TrainingError(reason) from None
                retries -= 1
                scale, elapsed = self.state.lr_scale / 2, self.elapsed()
                self.restore_checkpoint()
                self.state.lr_scale, self.used = scale, elapsed
                self.losses.clear()
                self.batches.expected = None
                self.metrics.rewind(self.state.step)
                self.callback.log(
                    f"{reason}; rolled back to step {self.state.step:,} with learning rate x "
                    f"{scale:g}"
                )

    def on_step(self, state: TrainState, result: StepResult) -> bool:
        """Log, evaluate and save between two steps. Return False to stop the loop."""
        self.losses.append(result.loss)
        if len(self.losses) > 2 * LOSS_WINDOW:
            initial, recent = max(self.losses[:LOSS_WINDOW]), min(self.losses[-LOSS_WINDOW:])
            if not recent <= DIVERGED * initial + 1:  # also for NaN
                message = f"loss {result.loss:g}, initially {initial:g}"
                raise DivergedError(message, state.step - 1, result.indices)
        schedule, step = self.schedule, state.step
        row = self.metrics.end_step(state, result, elapsed=self.elapsed(), epoch=self.epochs(step))
        self.callback.on_step(row)
        if self.budget is not None:
            self.budget.observe(schedule.image_size(step - 1), self.metrics.step_seconds)
            if distributed.broadcast_object(self.budget.due()):
                self.budget.correct(schedule, step)
        if distributed.all_reduce_any(bool(self.stop)):
            return False
        last, every = step >= schedule.steps, schedule.evaluate_every
        # A time budget moves the end of the run: the final evaluation may follow soon.
        soon = self.budget is not None and schedule.steps - step < every / 2
        if not last and every and step % every == 0 and not soon:
            self.reached = self.evaluate()
        due = time.monotonic() - self.saved > 60 * self.settings.save_minutes
        if not last and distributed.broadcast_object(due):
            self.save_checkpoint()
        self.metrics.start_step()
        return not self.reached

    def evaluate(self) -> bool:
        """Evaluate during training; return whether the target accuracy is reached."""
        started, size = time.monotonic(), self.schedule.image_size(self.state.step - 1)
        with self.timed("evaluating"):
            row = self.evaluator.during_training(size)
        self.log_evaluation(row)
        final_size = size == self.schedule.stages[-1][1]
        if self.budget is not None:
            self.budget.evaluation = time.monotonic() - started
            if final_size:
                self.budget.final = self.evaluator.final_cost * self.budget.evaluation
        if not final_size:
            return False
        target, patience = self.settings.until_accuracy, self.settings.patience
        if patience is not None and self.track_best(row) >= patience:
            return True
        return target is not None and row.get("val/accuracy", 0.0) >= target

    def track_best(self, row: dict[str, float]) -> int:
        """Save the weights if val is better than ever; return the evaluations since the best."""
        score, best = (row["val/accuracy"], -row["val/loss"]), self.best
        count = best.get("evaluations", 0) + 1
        if best and score <= (best["accuracy"], best["-loss"]):
            self.best = {**best, "evaluations": count, "stale": best["stale"] + 1}
            return int(self.best["stale"])
        self.best = {"accuracy": score[0], "-loss": score[1], "step": self.state.step}
        self.best |= {"evaluations": count, "stale": 0}
        with self.state.ema.applied() if self.state.ema else nullcontext():
            weights = distributed.gather_state_dict(self.state.objective)
        if distributed.is_main():
            write_file(self.folder / BEST_WEIGHTS.format(self.state.step), weights, None)
        return 0

    def restore_best(self) -> None:
        """Restore the best weights on val at the end of a run with `patience`, and log it."""
        self.track_best(metrics("val", self.evaluator.evaluate("val")))
        step, count = int(self.best["step"]), int(self.best["evaluations"])
        if step != self.state.step:
            self.state.ema = self.evaluator.ema = None
            set_weights(self.model, load_file(self.folder / BEST_WEIGHTS.format(step)))
        accuracy, images = self.best["accuracy"], len(self.splits.held_out["val"])
        # Expected maximum of independent normal variables (Blom 1958).
        deviations = NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
        optimism = deviations * math.sqrt(accuracy * (1 - accuracy) / images)
        self.callback.log(
            f"keeping the weights of step {step:,}: val accuracy {percent(accuracy)}, the best of "
            f"{count} evaluations on {images:,} images, so optimistic by up to {percent(optimism)}"
        )

    def log_evaluation(self, metrics: dict[str, float]) -> None:
        if not metrics:
            return
        step = self.state.step
        row = {"step": step, "epoch": round(self.epochs(step), 4), **metrics}
        row["seconds"] = round(self.elapsed(), 3)
        self.metrics.add(row)
        self.callback.on_evaluate(row)

    def explain_divergence(self, error: DivergedError) -> str:
        """Return where the first non-finite value is, with which images, and what to do."""
        step, found = error.step, list[str]()
        self.batches.expected = None
        batches = self.batches(step)
        for micro_step in range(self.schedule.accumulate):
            rng = seed_micro_batch(self.settings.seed, step, micro_step)
            images, targets = self.prepare(next(batches), rng, step)
            where = checkpoint.first_nonfinite(self.state.objective, images, targets)
            found += distributed.all_gather_object(where)
        where = next((one for one in found if one != checkpoint.GRADIENTS), found[0])
        names = comma_list([self.splits.train.name(index) for index in error.indices])
        remedy = "check these images and the initialization of your own modules"
        if step:  # the weights were updated
            remedy = f"the last good state is saved in {self.folder}: resume with a smaller"
            also = " and --optim.muon-learning-rate" * (self.settings.optim.kind == "muon")
            remedy += f" --optim.learning-rate{also}, or use --retries 3"
        what = f"training diverged at step {step:,} ({error}); first non-finite value: {where}"
        return f"{what}; batch: {names}; {remedy}"

    def finish(self) -> dict[str, EvaluationResult]:
        """Evaluate, write the bundle and the report, and remove the state."""
        self.timings["steps"] = self.metrics.total_seconds
        with self.timed("evaluating"):
            if self.settings.patience is not None:
                self.restore_best()
            outcomes, row = self.evaluator.final(self.keep_better_of_probe())
        self.log_evaluation(row)
        if self.settings.loss.logit_adjustment or self.settings.balance:
            each = [f"{name} {percent(o.balanced_accuracy)}" for name, o in outcomes.items()]
            self.callback.log(f"balanced accuracy: {', '.join(each)}")
        self.splits.log_skipped(self.callback.log)
        self.write_bundle(outcomes)
        if distributed.is_main():
            self.write_report(outcomes)
        distributed.barrier()
        if distributed.is_main():
            checkpoint.remove_state(self.folder)
            (self.folder / PROBE_HEAD).unlink(missing_ok=True)
            self.remove_earlier_best()
        return outcomes

    def keep_better_of_probe(self) -> dict[str, EvaluationResult]:
        """Compare with the linear probe on dev, and return to the probe if that is better.

        Returns the outcome on dev. Sharded weights (FSDP) are kept as they are.
        """
        probe, evaluator = self.probe, self.evaluator
        if probe is None or not probe.dev or self.settings.machine.strategy == "fsdp":
            return {}
        tuned = evaluator.evaluate(probe.dev)
        keep_probe, comparison = probe.beats(tuned), probe.comparison(tuned)
        winner = "linear probe" if keep_probe else "fine-tuned model"
        self.callback.log(f"{comparison}; keeping the {winner}")
        if not keep_probe:
            return {probe.dev: tuned}
        self.probe_note = f"linear probe, which fine-tuning did not improve; {comparison}"
        self.state.ema = evaluator.ema = None
        classes = get_metadata(self.model).class_names
        start = load_pretrained(self.config.start, self.settings, classes, lambda line: None)
        updates = {n: x for n, x in self.model.state_dict().items() if n.endswith(".lora_b")}
        zeros = {name: torch.zeros_like(update) for name, update in updates.items()}
        set_weights(self.model, start.state_dict() | zeros | probe.init)
        held_out = evaluator.evaluate(probe.dev)  # before the head is fitted to dev too
        set_weights(self.model, probe.final)
        return {probe.dev: held_out}

    def write_bundle(self, outcomes: dict[str, EvaluationResult]) -> None:
        """Write the model as it is now; all processes call this."""
        with self.state.ema.applied() if self.state.ema else nullcontext():
            weights = distributed.gather_state_dict(self.state.objective)
        if not distributed.is_main():
            return
        settings, model = self.settings, build_empty(self.model.config)
        model.metadata = self.model.metadata
        provenance: dict[str, object] = {
            **DataProvenance.of(self.config.data, self.splits.train).to_dict(),
            "steps": self.state.step,
            "seconds": round(self.elapsed(), 1),
            "seed": settings.seed,
        }
        if self.config.start:
            provenance["from"] = self.config.start
        provenance |= {"result": self.probe_note} if self.probe_note else {}
        provenance |= {f"{name} accuracy": round(o.accuracy, 6) for name, o in outcomes.items()}
        if settings.lora is not None:
            provenance["lora"] = settings.lora
            alpha, path = settings.lora_alpha, self.folder / recipes.ADAPTER
            save_adapter(path, weights, model, settings.lora, alpha, provenance)
            weights = merge_lora(weights, alpha / settings.lora)
        model.load_state_dict(weights, assign=True)  # already a copy
        save(model, self.folder, provenance=provenance)

    def write_report(self, outcomes: dict[str, EvaluationResult]) -> None:
        config, train, step = self.model.config, self.splits.train, self.state.step
        folder, data = self.folder, self.config.data
        data = "DATA" if data.startswith("dataset:") else data
        page = run_page(
            title=folder.resolve().name,
            probe_note=self.probe_note,
            facts={
                "model": name_of(config),
                "parameters": f"{self.num_parameters:,}",
                "image size": "{} x {} pixels".format(*pair(config.image_size)),
                "data": self.config.data,
                "training images": f"{len(train):,} of {len(train.classes):,} classes",
                "steps": f"{step:,} ({self.epochs(step):.1f} epochs)",
                "time": duration(self.elapsed()),
            },
            choices=self.reasons,
            rows=self.metrics.rows,
            outcomes=outcomes,
            sources=dict(self.splits.held_out),
            class_names=train.classes,
            settings=recipes.to_toml(self.settings),
            timings=self.timings,
            skipped=self.splits.skipped,
            next_steps=[
                shell_command("evaluate", folder, data, "--out", folder / "evaluation")
                if any(name in outcomes for name in HELD_OUT)
                else shell_command("predict", folder, "IMAGES"),
                shell_command("inspect", folder, "--out", folder / "inspection"),
                shell_command("convert", folder, "model.safetensors", "--to", "timm"),
            ],
        )
        write_atomic(self.folder / recipes.REPORT, page)

    # Checkpoints

    def save_checkpoint(self) -> None:
        state = self.state
        extra = {
            "step": state.step,
            "seconds": self.elapsed(),
            "rate_scale": state.lr_scale,
            "plan": self.schedule.state_dict(),
            "best": self.best,
        }
        if state.scaler is not None:
            extra["scaler"] = state.scaler.state_dict()
        average = state.ema.values if state.ema is not None else None
        with self.timed("saving"):
            checkpoint.save_state(self.folder, state.objective, state.optimizers, average, extra)
            if state.step:
                self.write_bundle({})  # usable while the run continues
        if distributed.is_main():
            self.remove_earlier_best(keep=int(self.best.get("step", 0)))
        self.saved = time.monotonic()

    def remove_earlier_best(self, keep: int | None = None) -> None:
        """Delete the weights of earlier best evaluations, which no state refers to any more."""
        for path in self.folder.glob(BEST_WEIGHTS.format("*")):
            if keep is None or path.name != BEST_WEIGHTS.format(keep):
                path.unlink(missing_ok=True)

    def restore_checkpoint(self) -> None:
        state, schedule = self.state, self.schedule
        average = state.ema.values if state.ema is not None else None
        extra = checkpoint.load_state(self.folder, state.objective, state.optimizers, average)
        for line in extra.get("damaged", ()):
            self.callback.log(f"note: {line}")
        state.step, self.used = extra["step"], extra["seconds"]
        self.started = time.monotonic()
        state.lr_scale = extra["rate_scale"]
        accumulate = schedule.accumulate
        schedule.load_state_dict(extra["plan"])
        self.best = extra.get("best", {})
        if schedule.accumulate != accumulate:
            self.callback.log(
                f"  micro-batches of {self.micro_batch}, as before the run was stopped; "
                "--machine.micro-batch changes that"
            )
        if state.scaler is not None and "scaler" in extra:
            state.scaler.load_state_dict(extra["scaler"])

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds to a part of the run."""
        started = time.monotonic()
        yield
        self.timings[part] = self.timings.get(part, 0.0) + time.monotonic() - started
