"""The ladder: from a probe in seconds to full fine-tuning, and which step paid.

    few-shot probe     ridge on frozen features, l2 by leave-one-out
    linear head        logistic regression on the same features
    attention-only     all weights frozen but those of attention and head (Touvron et al. 2022)
    full fine-tuning

Each step is judged by dev, pictures that it has not learned from; the two last with a grid of
learning rates (appendix B.1.1 of the paper). The best step, of equal ones the cheaper, is then
fitted to the whole training set; with a time to keep, a probe to the pictures for which there was
time. What the set has of val and test beside dev chooses nothing.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vitrail import distributed
from vitrail.checkpoints.files import write_json
from vitrail.errors import ConfigError
from vitrail.evaluation.outcome import Outcome
from vitrail.models.registry import name_of
from vitrail.training import rungs
from vitrail.training.ground import TRIALS, Ground, prepare, slug
from vitrail.training.run import check_folder
from vitrail.training.rungs import Rung, Seen
from vitrail.training.setup import Order
from vitrail.training.summit import fit_again, train_again
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

    `rate` is the one learning rate to try, in place of a grid. `dev` in the settings is the share
    of train to choose by, where a set has no val beside test. With `minutes` all of it ends on
    time, counted from `begun`; if judging the result alone takes too long for that, it is told, and
    done all the same. A ladder that is stopped starts over the next time, but the run at its end,
    on all pictures, can be resumed like any other.
    """
    begun = time.monotonic() if begun is None else begun
    watch = watch or Watch()
    refuse(order)
    share = order.settings.dev
    order = replace(order, settings=replace(order.settings, dev=None))  # the last run sees all
    device = distributed.init(order.settings.machine.device)
    with trials_removed(order.out):
        with sole_writer(order.out):
            check_folder(order)
            ground = prepare(order, watch, device, begun, share)
            found, seen = tried(ground, device, rate)
            chosen = found.chosen
            watch.say(f"chosen: {chosen.name}")
            if chosen.name in rungs.PROBES:
                outcomes = fit_again(ground, chosen, seen, device)
                return told(replace(found, finished=True, outcomes=outcomes), begun)
        told(found, begun)
        finished, outcomes = train_again(ground, chosen, device)
        return told(replace(found, finished=finished, outcomes=outcomes), begun)


@contextmanager
def trials_removed(folder: Path) -> Iterator[None]:
    """Take the runs of the grid away in the end, however that comes."""
    try:
        yield
    finally:
        trials = folder / TRIALS
        for name in (rungs.ATTENTION, rungs.FULL):
            for trial in trials.glob(f"{slug(name)}-*"):
                shutil.rmtree(trial, ignore_errors=True)
        with suppress(OSError):  # it holds something else, or does not exist
            trials.rmdir()


def told(climb: Climb, begun: float) -> Climb:
    """Write down how it went so far."""
    climb = replace(climb, seconds=time.monotonic() - begun)
    write_json(climb.folder / LADDER, climb.to_dict())
    return climb


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


def tried(ground: Ground, device: torch.device, rate: float | None) -> tuple[Climb, Seen]:
    """All steps, from cheap to costly; and the features that the first two have seen."""
    begun, model = time.monotonic(), ground.learner.model
    seen = rungs.look(ground, device)
    found = []
    for name in rungs.PROBES:
        found.append(rungs.probed(name, seen, begun))
        ground.watch.say(f"  {name}: {rungs.of_dev(found[-1].accuracy)}")
        begun = time.monotonic()
    rates = rungs.rates_around(ground.learner.settings.optim) if rate is None else (rate,)
    reserve = FINAL * max(0.0, ground.clock.free())
    for name, share in ((rungs.ATTENTION, 1 / 2), (rungs.FULL, 1)):
        freeze = rungs.frozen(name, model)
        if freeze is None:
            problem = f"{name_of(model.config)} has no attention"
            found.append(Rung(name=name, accuracy=None, seconds=0.0, problem=problem))
            continue
        free = ground.clock.free()
        seconds = free if math.isinf(free) else share * (free - reserve)
        found.append(rungs.climbed(ground, name, rates, freeze, seconds))
    climb = Climb(
        folder=ground.order.out,
        data=ground.order.data,
        start=ground.order.start,
        dev="train" if ground.cut else "val",
        pictures=len(ground.dev),
        rungs=tuple(found),
    )
    return climb, seen
