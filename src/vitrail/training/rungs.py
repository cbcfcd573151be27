"""The steps of the ladder: two probes of frozen features, and runs with a grid of learning rates.

Every step is tried on a part of the training pictures and judged by dev, those kept apart.
"""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints.adapt import HEADS
from vitrail.errors import ConfigError, TrainingError
from vitrail.formatting import percent
from vitrail.models.build import Model
from vitrail.probing.features import Features, features_of
from vitrail.probing.others import Linear, fit_logistic
from vitrail.probing.ridge import Probe, fit_path
from vitrail.probing.shots import right
from vitrail.training.ground import Ground
from vitrail.training.material import Material
from vitrail.training.run import run
from vitrail.training.settings import Optim, Settings
from vitrail.training.watch import Watch

PROBE, LINEAR = "few-shot probe", "linear head"
ATTENTION, FULL = "attention-only", "full fine-tuning"

# Table 4 of the paper; the usual one first, which wins a tie.
SGD_RATES = (0.01, 0.003, 0.03, 0.001)
AROUND = (1.0, 0.3, 3.0)  # times the usual rate, of other optimizers
WORTH = 2.0  # times the shortest run: fewer learning rates rather than trials shorter than that
WEIGHT = ".attention."  # in the names of attention layers' weights
NO_TIME, TOO_SHORT = "no time is left", "the time was enough for one step only"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run with one learning rate."""

    rate: float
    accuracy: float | None = None  # on dev
    steps: int = 0
    seconds: float = 0.0
    problem: str = ""  # why there is no accuracy


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What one step of the ladder came to."""

    name: str
    accuracy: float | None  # on dev
    seconds: float
    trials: tuple[Trial, ...] = ()
    problem: str = ""  # why there is no accuracy

    @property
    def rate(self) -> float | None:
        """The best learning rate; of equal ones the first that was tried."""
        tried = [trial for trial in self.trials if trial.accuracy is not None]
        return max(tried, key=lambda trial: trial.accuracy or 0.0).rate if tried else None


def of_dev(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{percent(accuracy)} of dev"


# Probes


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Features of the pictures, which no probe changes."""

    part: Features
    dev: Features
    values: np.ndarray  # (N, D) of the whole training set, or what there was time for
    labels: np.ndarray  # (N,)


def look(ground: Ground, device: torch.device) -> Seen:
    model, settings = ground.learner.model.to(device), ground.learner.settings
    how = {"workers": settings.machine.workers, "strict": settings.strict}
    how["progress"] = ground.watch.progress
    part, dev = (features_of(model, source, **how) for source in (ground.shown, ground.dev))
    model.to("cpu")  # the device is for the runs now
    whole = (part, dev) if ground.cut else (part,)
    return Seen(
        part=part,
        dev=dev,
        values=np.concatenate([found.values for found in whole]),
        labels=np.concatenate([found.labels for found in whole]),
    )


def best_ridge(values: np.ndarray, labels: np.ndarray, classes: int) -> Probe:
    """The closed-form probe with the l2 of `Path.best`."""
    path = fit_path(values, labels, classes)
    return path.probes[path.best]


PROBES = {PROBE: best_ridge, LINEAR: fit_logistic}


def probed(name: str, seen: Seen, begun: float) -> Rung:
    """A probe of the part, judged by dev; it began when its features were asked for."""
    part = seen.part
    probe: Probe | Linear = PROBES[name](part.values, part.labels, len(part.classes))
    accuracy = right(probe, seen.dev)
    return Rung(name=name, accuracy=accuracy, seconds=time.monotonic() - begun)


# Runs


def rates_around(optim: Optim) -> tuple[float, ...]:
    """The grid for an optimizer and its usual learning rate, which comes first."""
    assert optim.learning_rate is not None, "chosen before"
    if optim.kind == "sgd":
        return SGD_RATES
    return tuple(float(f"{optim.learning_rate * factor:.2g}") for factor in AROUND)


def frozen(name: str, model: Model) -> tuple[str, ...] | None:
    """Patterns of the weights that a step leaves alone; None where it leaves nothing to learn."""
    if name != ATTENTION:
        return ()
    names = [name for name, _ in model.named_parameters()]
    return all_but_attention(names) if any(WEIGHT in name for name in names) else None


def all_but_attention(names: Sequence[str]) -> tuple[str, ...]:
    """Patterns of all weights but those of attention layers and heads, as short as can be."""
    learning = [n for n in names if WEIGHT in n or n.split(".")[0] in HEADS]
    patterns: dict[str, None] = {}
    for name in names:
        if name not in learning:
            parts = re.sub(r"\.\d+(?=\.)", ".*", name).split(".")
            wider = [".".join([*parts[:n], "*"]) for n in range(1, len(parts))]
            fitting = (p for p in wider if not any(fnmatchcase(n, p) for n in learning))
            patterns[next(fitting, ".".join(parts))] = None
    return tuple(patterns)


def tuned(settings: Settings, rate: float, freeze: Sequence[str], seconds: float) -> Settings:
    """Settings of a run with another learning rate, with more weights frozen, in a given time."""
    optim = settings.optim
    if optim.kind == "muon" and optim.learning_rate:
        matrices = optim.muon_learning_rate * rate / optim.learning_rate
        optim = replace(optim, muon_learning_rate=matrices)
    optim = replace(optim, learning_rate=rate, freeze=(*optim.freeze, *freeze))
    settings = replace(settings, optim=optim)
    if math.isinf(seconds):
        return settings
    return replace(settings, minutes=seconds / 60, epochs=None, steps=None)


def climbed(
    ground: Ground, name: str, rates: Sequence[float], freeze: Sequence[str], seconds: float
) -> Rung:
    """A run for each learning rate, as many as fit into the time; the best speaks for the step."""
    begun = time.monotonic()
    until, shortest = begun + seconds, ground.clock.shortest
    count = max(int(seconds >= shortest), int(min(len(rates), seconds / (WORTH * shortest))))
    trials = []
    for place, rate in enumerate(rates):
        room = (until - time.monotonic()) / max(1, count - place)
        if place < count and room >= ground.clock.shortest:
            trial = attempt(ground, name, rate, freeze, room)
        else:
            trial = Trial(rate=rate, problem=NO_TIME)
        trials.append(trial)
        said = of_dev(trial.accuracy) or trial.problem
        ground.watch.say(f"  {name}, learning rate {rate:g}: {said}")
    accuracies = [trial.accuracy for trial in trials if trial.accuracy is not None]
    return Rung(
        name=name,
        accuracy=max(accuracies, default=None),
        seconds=time.monotonic() - begun,
        trials=tuple(trials),
        problem="" if accuracies else "; ".join(dict.fromkeys(t.problem for t in trials)),
    )


def attempt(ground: Ground, name: str, rate: float, freeze: Sequence[str], seconds: float) -> Trial:
    """One run on the part, judged by dev. If it fails it says why; if it is stopped, all is."""
    begun = time.monotonic()
    material = Material(
        reference=ground.material.reference, train=ground.part, judged={"dev": ground.dev}
    )
    order = replace(
        ground.order,
        out=ground.folder(name, rate),
        settings=tuned(ground.learner.settings, rate, freeze, seconds),
        material=material,
        overwrite=True,
    )
    ear = Ear(ground.watch)
    try:
        result = run(order, ear)
    except (ConfigError, TrainingError) as error:  # it does not fit into memory, or diverged
        problem = str(error).partition(";")[0]
        return Trial(rate=rate, seconds=time.monotonic() - begun, problem=problem)
    if not result.finished:
        raise KeyboardInterrupt
    ground.clock.shortest = ear.first + result.seconds - ear.last
    if result.step == 1 and not math.isinf(seconds):
        return Trial(rate=rate, steps=1, seconds=time.monotonic() - begun, problem=TOO_SHORT)
    return Trial(
        rate=rate,
        accuracy=result.outcomes["dev"].accuracy,
        steps=result.step,
        seconds=time.monotonic() - begun,
    )


class Ear(Watch):
    """Passes on how a trial goes, not what is said of it; and hears when its steps were taken."""

    def __init__(self, watch: Watch) -> None:
        self.begin, self.evaluated, self.end = watch.begin, watch.evaluated, watch.end
        self.told = watch.step
        self.first = self.last = 0.0  # seconds from the beginning to the end of that step

    def step(self, row: Mapping[str, Any]) -> None:
        self.first = self.first or row["seconds"]
        self.last = row["seconds"]
        self.told(row)
