"""The ladder: from a probe in seconds to full fine-tuning, and which step paid.

    few-shot probe     ridge on frozen features, l2 by leave-one-out
    linear head        logistic regression on the same features
    attention-only     all weights frozen but those of attention and head (Touvron et al. 2022)
    full fine-tuning

Each step is judged by dev, pictures that it has not learned from; the two last with a grid of
learning rates (appendix B.1.1 of the paper). The best step, of equal ones the cheaper, is then
fitted to the whole training set. What the set has of val and test beside dev chooses nothing.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import parallel
from vitrail.checkpoints.files import write_json
from vitrail.checkpoints.heads import with_head
from vitrail.checkpoints.load import load
from vitrail.checkpoints.save import save
from vitrail.data.sources import fingerprint
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evaluation.calibration import fit_temperature
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.outcome import Outcome
from vitrail.models.build import Model
from vitrail.models.names import name_of
from vitrail.probing.memory import MEMORY, Memory, save_memory
from vitrail.probing.others import fit_logistic
from vitrail.probing.ridge import fit_path
from vitrail.probing.teaching import remember
from vitrail.training import rungs
from vitrail.training.budget import ENDING
from vitrail.training.choices import FEW, look_at
from vitrail.training.folder import BUNDLE, clear_run, write_run
from vitrail.training.learner import build_learner
from vitrail.training.material import Material, open_material
from vitrail.training.run import check_folder, run
from vitrail.training.rungs import ATTENTION, FULL, LINEAR, PROBE, Clock, Ground, Rung, Seen
from vitrail.training.setup import Order
from vitrail.training.survival import sole_writer
from vitrail.training.watch import Watch

LADDER = "ladder.json"
FINAL = 1 / 3  # share of the time after the probes that is kept for the run on all pictures


@dataclass(frozen=True, kw_only=True)
class Climb:
    """What became of the ladder; `folder` is the bundle of the step that was chosen."""

    folder: Path
    data: str
    start: str
    dev: str  # the split that dev is, or was cut out of
    pictures: int  # in dev
    rungs: tuple[Rung, ...]
    seconds: float = 0.0
    finished: bool = False  # False: the last run was stopped, and can be resumed
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # split → how good the result is

    @property
    def chosen(self) -> Rung:
        """The best on dev; of equal ones the cheaper."""
        return max(self.rungs, key=lambda rung: -1.0 if rung.accuracy is None else rung.accuracy)

    def before(self, rung: Rung) -> float | None:
        """The best accuracy of the steps before one; None if there is none."""
        cheaper = self.rungs[: self.rungs.index(rung)]
        return max((r.accuracy for r in cheaper if r.accuracy is not None), default=None)

    def gain(self, rung: Rung) -> float | None:
        """By how much a step is better than the best before it."""
        before = self.before(rung)
        return None if before is None or rung.accuracy is None else rung.accuracy - before

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            "folder": str(self.folder),
            "data": self.data,
            "from": self.start,
            "dev": {"split": self.dev, "pictures": self.pictures},
            "rungs": [self.described(rung) for rung in self.rungs],
            "finished": self.finished,
            "seconds": round(self.seconds, 1),
            "results": {split: outcome.to_dict() for split, outcome in self.outcomes.items()},
        }

    def described(self, rung: Rung) -> dict[str, Any]:
        return {
            "name": rung.name,
            "accuracy": rung.accuracy,
            "gain": self.gain(rung),
            "seconds": round(rung.seconds, 1),
            "chosen": rung is self.chosen,
            "learning_rate": rung.rate,
            "problem": rung.problem,
            "trials": [
                {
                    "learning_rate": trial.rate,
                    "accuracy": trial.accuracy,
                    "steps": trial.steps,
                    "seconds": round(trial.seconds, 1),
                    "problem": trial.problem,
                }
                for trial in rung.trials
            ],
        }


def climb(
    order: Order,
    watch: Watch | None = None,
    *,
    rate: float | None = None,
    begun: float | None = None,
) -> Climb:
    """Try every step, and make the bundle of the best one in `order.out`.

    `rate` is the one learning rate to try, in place of a grid. With `minutes` in the settings all
    of it ends on time, counted from `begun`. A ladder that is stopped starts over the next time,
    but the run at its end, on all pictures, can be resumed like any other.
    """
    begun = time.monotonic() if begun is None else begun
    watch = watch or Watch()
    refuse(order)
    device = parallel.start(order.settings.machine.device)
    with trials_in(order.out):
        with sole_writer(order.out):
            check_folder(order)
            ground = prepare(order, watch, device, begun)
            found, seen = tried(ground, device, rate)
            watch.say(f"chosen: {found.chosen.name}")
            if found.chosen.name in rungs.PROBES:
                model, memory = head_of(found.chosen.name, ground, seen)
                outcomes = kept(ground, model, memory, device)
                return told(replace(found, outcomes=outcomes, finished=True), begun)
        return told(trained_again(ground, found, device), begun)


def refuse(order: Order) -> None:
    """What a ladder cannot do, before anything is computed."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ConfigError(
            f"the ladder runs in one process, and there are {processes}; start it without torchrun"
        )
    if order.resume:
        raise ConfigError("a ladder starts over and cannot be resumed; leave --resume out")
    settings = order.settings
    if settings.objective != "classify":
        raise ConfigError(
            f"the ladder compares classifiers, and objective={settings.objective!r} makes none; "
            "leave one of them out"
        )
    if settings.until_accuracy is not None:
        raise ConfigError(
            "until_accuracy ends one run early, and the ladder compares whole ones; leave it out"
        )


def prepare(order: Order, watch: Watch, device: torch.device, begun: float) -> Ground:
    """Open the data, load the model, and keep dev apart."""
    since = time.monotonic()
    material = open_material(order.data, order.settings)
    if material.train.multi_label:
        raise DataError(
            f"the pictures of {order.data} have several labels each, and the ladder's probes take "
            "one for each; fine-tune without --ladder"
        )
    for note in material.notes:
        watch.say(f"note: {note}")
    part, dev = rungs.apart(material)
    look, settings = look_at(material.train), order.settings
    learner = build_learner(settings, material.train, look, order.start, device, watch.say)
    minutes = settings.minutes
    watch.say(
        f"{name_of(learner.model.config)}: {len(part):,} pictures to learn from, {len(dev):,} to "
        f"choose by, {'cut out of train' if part is not material.train else 'the set’s own val'}"
    )
    clock = Clock(
        deadline=math.inf if minutes is None else begun + 60 * minutes,
        shortest=ENDING + time.monotonic() - since,  # a run does the same before its first step
    )
    return Ground(
        order=order,
        material=material,
        learner=learner,
        part=part,
        dev=dev,
        clock=clock,
        watch=watch,
    )


def tried(ground: Ground, device: torch.device, rate: float | None) -> tuple[Climb, Seen]:
    """All steps, from cheap to costly; and the features that the first ones have seen."""
    begun = time.monotonic()
    ground.learner.model.to(device)
    seen = rungs.look(ground)
    ground.learner.model.to("cpu")  # which leaves the device to the runs
    results = []
    for name in (PROBE, LINEAR):
        results.append(rungs.probed(name, seen, begun))
        ground.watch.say(f"  {name}: {result(results[-1])}")
        begun = time.monotonic()
    rates = rungs.rates_around(ground.learner.settings.optim) if rate is None else (rate,)
    reserve = FINAL * max(0.0, ground.clock.left())
    for name, share in ((ATTENTION, 1 / 2), (FULL, 1)):
        freeze = frozen(name, ground.learner.model)
        if freeze is None:
            problem = f"{name_of(ground.learner.model.config)} has no attention"
            results.append(Rung(name=name, accuracy=None, seconds=0.0, problem=problem))
            continue
        room = ground.clock.left()
        seconds = room if math.isinf(room) else share * (room - reserve)
        results.append(rungs.climbed(ground, name, rates, freeze, seconds))
    climb = Climb(
        folder=ground.order.out,
        data=ground.order.data,
        start=ground.order.start,
        dev="train" if ground.cut else "val",
        pictures=len(ground.dev),
        rungs=tuple(results),
    )
    return climb, seen
