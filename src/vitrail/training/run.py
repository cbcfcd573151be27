"""A training run from its order to its bundle: what the commands and `vitrail.train` call.

The run's folder is a bundle, with settings.toml, metrics.jsonl, report.html and, while it is not
finished, the state from which it can be resumed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vitrail import distributed
from vitrail.checkpoints.bundle import contains_model
from vitrail.errors import ConfigError, TrainingError
from vitrail.evaluation.outcome import Outcome
from vitrail.formatting import comma_list, percent
from vitrail.training import ending, state
from vitrail.training.budget import Budget
from vitrail.training.compiling import compile_if_it_pays
from vitrail.training.device import autocast_for
from vitrail.training.folder import clear_run, is_run, read_run, write_run
from vitrail.training.head_init import PROBE_HEAD, set_weights
from vitrail.training.learner import fitted
from vitrail.training.loop import DivergedError, Step, TrainState, seeded, train
from vitrail.training.memory import less_of_it
from vitrail.training.pace import Window, correct, make_budget
from vitrail.training.records import Records
from vitrail.training.settings import Settings
from vitrail.training.setup import Order, Setup, set_up
from vitrail.training.survival import Stop, first_bad_layer, orderly_stop, sole_writer
from vitrail.training.watch import Watch

EXPLODED = 3.0  # times the first loss; one that large will not come back
FIRST_STEPS = 10  # whose loss is the first loss


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a run."""

    folder: Path
    step: int
    seconds: float
    finished: bool  # False: it was asked to stop, and can be resumed
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # split → how good it is


def run(order: Order, watch: Watch | None = None, *, begun: float | None = None) -> Result:
    """Train a model. `begun` is when the clock of a time budget started (time.monotonic)."""
    begun = time.monotonic() if begun is None else begun
    device = distributed.init(order.settings.machine.device)
    try:
        if distributed.is_restart() and state.has_state(order.out):
            order = replace(order, resume=True)
        first = distributed.is_main()
        watch = watch if first and watch is not None else Watch()
        with sole_writer(order.out) if first else nullcontext(), orderly_stop() as stop:
            check_folder(order)
            setup = set_up(order, watch, device, begun=begun)
            if setup.settings.machine.compile:
                setup = compile_if_it_pays(setup, watch, began=began(order))
            if order.overwrite and first and not order.resume:
                clear_run(order.out)  # not before it is known that the new one can begin
            distributed.barrier()
            return Run(order, setup, watch, stop, begun).go()
    finally:
        distributed.shutdown()


def began(order: Order) -> Settings | None:
    """The settings that a run which is now resumed began with."""
    resumed = order.resume and state.has_state(order.out) and is_run(order.out)
    return read_run(order.out)[0] if resumed else None


def check_folder(order: Order) -> None:
    """Refuse a folder that holds another run, and one in which there is nothing to resume."""
    unfinished = state.has_state(order.out)
    if order.overwrite and not order.resume and (is_run(order.out) or not order.out.exists()):
        return
    if unfinished and not order.resume:
        raise ConfigError(
            f"{order.out} holds a run that is not finished; say --resume to go on with it, "
            "or name another --out"
        )
    if contains_model(order.out) and not unfinished:
        what = "is finished" if order.resume else "holds a model already"
        raise ConfigError(f"{order.out} {what}; name another --out for a new run")


def out_of_memory(error: Exception) -> bool:
    """How torch says so on each device."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return any(word in str(error) for word in words)


class Run:
    """What happens during a run, beside the learning itself."""

    def __init__(self, order: Order, setup: Setup, watch: Watch, stop: Stop, begun: float) -> None:
        self.order, self.setup, self.watch, self.stop = order, setup, watch, stop
        self.folder = order.out
        self.plan, self.state = setup.plan, setup.state
        self.begun, self.used = begun, 0.0  # seconds; of earlier parts of a resumed run
        self.timings: dict[str, float] = {"preparing": time.monotonic() - begun}
        self.losses: list[float] = []
        self.reached = False  # the accuracy that was wanted
        self.budget: Budget | None = None  # of a run with a time to keep
        self.records: Records | None = None  # of the first process
        self.window = Window(setup.plan)  # begun anew with the first step
        self.saved = time.monotonic()  # when the state was, for the last time

    def go(self) -> Result:
        """The whole run, or what is left of it."""
        try:
            self.begin()
            finished = self.take_steps()
            outcomes = self.finish() if finished else {}
            if not finished:
                self.save()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise ConfigError(self.advice()) from None
        finally:
            self.watch.end()
            if self.records:
                self.records.close()
        return Result(
            folder=self.folder,
            step=self.state.step,
            seconds=self.elapsed(),
            finished=finished,
            outcomes=outcomes,
        )

    def begin(self) -> None:
        """Everything before the next step: the state, the time to keep, and what is written."""
        if self.order.resume and state.has_state(self.folder):
            self.restore()
            self.watch.say(f"resumed at step {self.state.step:,}")
        if self.setup.settings.minutes is not None:
            self.budget = make_budget(self.setup, self.watch, elapsed=self.elapsed())
        if distributed.is_main():
            write_run(
                self.folder,
                self.setup.settings,
                data=self.order.data,
                start=self.order.start,
                processes=self.plan.processes,
                micro_batch=self.setup.micro_batch,
            )
            if self.setup.probe is not None and not self.state.step:
                self.setup.probe.save(self.folder)
            self.records = Records(self.folder, after_step=self.state.step)
        if not state.has_state(self.folder):
            self.save()  # a place to go back to; and a full disk shows now
        self.saved = time.monotonic()
        self.window = Window(self.plan)
        self.watch.begin(self.state.step, self.plan.steps)

    def advice(self) -> str:
        """What to do where memory is not enough: go on in another way, or begin anew."""
        setup = self.setup
        twice = bool(getattr(setup.learner.model, "checkpointing", False))
        options = less_of_it(setup.share, setup.micro_batch, checkpointing=twice)
        way = f"try {', or '.join(options)}"
        if state.has_state(self.folder):  # not while the time of a step is tried
            way = f"the state is kept in {self.folder}: resume with {', or '.join(options)}"
        if not options:
            way = (
                "begin another run with smaller pictures, --optim.kind adafactor or --optim.freeze"
            )
        return f"step {self.state.step:,} needs more memory than there is; {way}"

    def take_steps(self) -> bool:
        """All steps; whether the run came to its end. After an explosion, again from before it."""
        retries = self.setup.settings.retries
        while True:
            try:
                train(
                    self.state,
                    self.plan,
                    batches=self.setup.feed,
                    prepare=self.setup.prepare,
                    after=self.after,
                    autocast=autocast_for(self.setup.precision, self.setup.device),
                )
                return self.reached or self.state.step >= self.plan.steps
            except DivergedError as error:
                reason = self.explain(error)
                if not retries:
                    raise TrainingError(reason) from None
                retries -= 1
                self.go_back(reason)

    def after(self, done: TrainState, step: Step) -> bool:
        """What happens between two steps; False ends the run, for now or for good."""
        self.check_loss(step)
        row = self.window.add(done, step, self.elapsed())
        row["epoch"] = round(self.setup.epochs(done.step), 4)
        self.watch.step(row)
        if self.records and self.window.due(done.step):
            self.records.add(self.window.close(row))
        if self.budget is not None:
            self.budget.observe(self.plan.size(done.step - 1), self.window.seconds)
            if distributed.broadcast_object(self.budget.due()):
                correct(self.budget, self.plan, done.step)
        if distributed.all_reduce_any(bool(self.stop)):
            return False
        last, every = done.step >= self.plan.steps, self.plan.evaluate_every
        if not last and every and done.step % every == 0:
            self.reached = self.evaluate()
        wait = time.monotonic() - self.saved > 60 * self.setup.settings.save_minutes
        if not last and distributed.broadcast_object(wait):
            self.save()
        self.window.begin()
        return not self.reached

    def check_loss(self, step: Step) -> None:
        """Stop a run that has exploded instead of heating the room with it."""
        self.losses.append(step.loss)
        if len(self.losses) <= 2 * FIRST_STEPS:
            return
        first, recent = max(self.losses[:FIRST_STEPS]), min(self.losses[-FIRST_STEPS:])
        if not recent <= EXPLODED * first + 1:  # NaN compares as false
            what = f"loss {step.loss:g} after {first:g} at first"
            raise DivergedError(what, self.state.step - 1, step.indices)

    def evaluate(self) -> bool:
        """Look how good the model is by now; whether that is as good as was wanted."""
        begun, size = time.monotonic(), self.plan.size(self.state.step - 1)
        with self.timed("evaluating"):
            row = self.setup.judge.one(size)
        self.tell(row)
        if self.budget is not None:
            self.budget.evaluation = time.monotonic() - begun
            if size == self.plan.stages[-1][1]:
                self.budget.final = self.setup.judge.share_of_all() * self.budget.evaluation
        wanted = self.setup.settings.until_accuracy
        if wanted is None or size != self.plan.stages[-1][1]:
            return False
        return row.get("val/accuracy", 0.0) >= wanted  # never test: an end is a choice

    def tell(self, verdict: dict[str, float]) -> None:
        if not verdict:
            return
        step = self.state.step
        row = {"step": step, "epoch": round(self.setup.epochs(step), 4), **verdict}
        row["seconds"] = round(self.elapsed(), 3)
        if self.records:
            self.records.add(row)
        self.watch.evaluated(row)

    def explain(self, error: DivergedError) -> str:
        """What went wrong where, with which pictures, and what is left."""
        step, setup = error.step, self.setup
        batch = next(replace(setup.feed, expected=(-1, 0), skipped={})(step))
        images, targets = setup.prepare(batch, seeded(setup.settings.seed, step, 0), step)
        layer = first_bad_layer(self.state.objective, images, targets)
        names = [setup.material.train.name(index) for index in error.indices]
        return (
            f"training failed at step {step:,} ({error}); the first bad value is in {layer}; "
            f"the batch was {comma_list(names)}; the last good state is kept in {self.folder}:"
            " resume with a smaller --optim.learning-rate, or use --retries 3"
        )

    def go_back(self, reason: str) -> None:
        """To the last good state, and on from there at half the learning rate."""
        scale, elapsed = self.state.rate_scale / 2, self.elapsed()
        self.restore()
        self.state.rate_scale, self.used = scale, elapsed
        self.losses.clear()
        self.setup.feed.expected = (-1, 0)
        self.watch.say(
            f"{reason}; back to step {self.state.step:,} at {scale:g} of the learning rate"
        )

    def finish(self) -> dict[str, Outcome]:
        """Judge, write the bundle and the report; then the state is no longer needed."""
        self.timings["steps"] = self.window.total
        with self.timed("evaluating"):
            outcomes, row = self.setup.judge.all(self.keep_better())
        self.tell(row)
        ending.finish(self, outcomes)
        distributed.barrier()
        if distributed.is_main():
            state.remove_state(self.folder)
            (self.folder / PROBE_HEAD).unlink(missing_ok=True)
        return outcomes

    def keep_better(self) -> dict[str, Outcome]:
        """Compare with the linear probe on dev; if that is better, return to it.

        Gives what is known of dev. Weights that are spread over processes ("fsdp") stay.
        """
        probe, judge = self.setup.probe, self.setup.judge
        if probe is None or not probe.dev or self.setup.settings.machine.strategy == "fsdp":
            return {}
        tuned = judge.of(probe.dev)
        kept = "linear probe" if probe.beats(tuned) else "fine-tuned model"
        self.watch.say(
            f"{probe.dev} accuracy (n={probe.images:,}): fine-tuned {percent(tuned.accuracy)}, "
            f"linear probe {percent(probe.accuracy)}; the {kept} is kept"
        )
        if not probe.beats(tuned):
            return {probe.dev: tuned}
        self.state.average = judge.average = None
        settings, model = self.setup.settings, self.setup.learner.model
        start = fitted(self.order.start, settings, model.config.num_classes, lambda line: None)
        set_weights(model, start.state_dict() | probe.init)
        held_out = judge.of(probe.dev)  # before the head learns from dev too
        set_weights(model, probe.final)
        return {probe.dev: held_out}

    # The resumable state

    def save(self) -> None:
        extra = {
            "step": self.state.step,
            "seconds": self.elapsed(),
            "rate_scale": self.state.rate_scale,
            "plan": self.plan.to_dict(),
        }
        if self.state.scaler is not None:
            extra["scaler"] = self.state.scaler.state_dict()
        with self.timed("saving"):
            state.save_state(self.folder, **self.parts(), extra=extra)
            if self.state.step:
                ending.write_bundle(self, {})  # to be used while the run goes on
        self.saved = time.monotonic()

    def restore(self) -> None:
        """Go back to the last state that was saved."""
        peaks = [[g["peak"] for g in o.param_groups] for o in self.state.optimizers]
        extra = state.load_state(self.folder, **self.parts())
        for line in extra.get("damaged", ()):
            self.watch.say(f"note: {line}")
        for optimizer, peak in zip(self.state.optimizers, peaks, strict=True):
            for group, value in zip(optimizer.param_groups, peak, strict=True):
                group["peak"] = value  # the settings may have changed it on purpose
        self.state.step, self.used = extra["step"], extra["seconds"]
        self.begun = time.monotonic()
        self.state.rate_scale = extra["rate_scale"]
        chosen = self.plan.accumulate
        self.plan.restore(extra["plan"])
        if self.plan.accumulate != chosen:
            self.watch.say(
                f"  {self.setup.micro_batch} pictures at once, as the run began, whatever memory "
                "is free now; --machine.micro-batch changes that"
            )
        if self.state.scaler is not None and "scaler" in extra:
            self.state.scaler.load_state_dict(extra["scaler"])

    def parts(self) -> dict[str, Any]:
        average = self.state.average
        return {
            "objective": self.state.objective,
            "optimizers": self.state.optimizers,
            "average": average.values if average is not None else None,
        }

    # Time

    def elapsed(self) -> float:
        return self.used + time.monotonic() - self.begun

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the seconds towards a part of the run."""
        begun = time.monotonic()
        yield
        self.timings[part] = self.timings.get(part, 0.0) + time.monotonic() - begun
