"""The paper's few-shot protocol (section 4.1, big_vision's evaluator) on anybody's pictures.

For each seed a few pictures of every class are drawn, a probe is fitted to their features, and
judged on all test pictures.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vitrail.data.datasets import ImageDataset, Splits, evaluation_split, open_dataset
from vitrail.errors import ConfigError, DataError, unknown
from vitrail.probing.features import Features
from vitrail.probing.others import fit_logistic, fit_neighbors
from vitrail.probing.ridge import PATH, USUAL_L2, check_l2, fit_path

Shots = int | Literal["all"]
# Student's t, two-sided 95 %, for 1 to 10 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one kind of probe does with so many pictures of each class, seed by seed."""

    probe: str
    shots: Shots
    accuracies: tuple[float, ...]
    l2: tuple[float, ...] = ()  # of each seed, where the probe has one

    @property
    def mean(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the mean over endless seeds lies, 19 times of 20; None with one seed."""
        half = half_interval(self.accuracies)
        return None if half is None else (max(0.0, self.mean - half), min(1.0, self.mean + half))

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval or (None, None)
        return {
            "probe": self.probe,
            "shots": self.shots,
            "accuracy": self.mean,
            "low": low,
            "high": high,
            "accuracies": list(self.accuracies),
            "l2": list(self.l2),
        }


def half_interval(values: Sequence[float]) -> float | None:
    """How far the mean of these may be from that of endless ones, 19 times of 20."""
    degrees = len(values) - 1
    if degrees < 1:
        return None
    return student(degrees) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def student(degrees: int) -> float:
    """Student's t, two-sided 95 %."""
    return STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.5 / degrees


def open_pair(data: str) -> tuple[ImageDataset, ImageDataset]:
    """The pictures to learn from and those to be judged by: test, or else val."""
    judged = evaluation_split(data)
    cut = None if judged else Splits(val=0.0, test=0.2)
    return open_dataset(data, "train", splits=cut), open_dataset(data, judged or "test", splits=cut)


def draw(labels: np.ndarray, classes: int, shots: Shots, seed: int) -> np.ndarray:
    """Rows of `shots` pictures of each class, as big_vision draws them."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
    return np.concatenate([part if shots == "all" else part[:shots] for part in rows])


def try_shots(
    train: Features,
    test: Features,
    *,
    shots: Sequence[Shots],
    seeds: int = 3,
    probes: Sequence[str] = ("ridge",),
    l2: float = USUAL_L2,
) -> Iterator[list[Trial]]:
    """For each number of shots, the trial of each probe; ridge at `l2` and at `Path.best`."""
    check_protocol(shots, seeds, probes, l2)
    check_features(train, test)
    for count in shots:
        found: dict[str, tuple[list[float], list[float]]] = {}
        for seed in range(1 if count == "all" else seeds):  # all pictures are always the same
            rows = draw(train.labels, len(train.classes), count, seed)
            part = (train.values[rows], train.labels[rows], len(train.classes))
            for name in probes:
                for label, accuracy, used in FITS[name](part, test, l2):
                    accuracies, chosen = found.setdefault(label, ([], []))
                    accuracies.append(accuracy)
                    chosen += used
        yield [
            Trial(probe=label, shots=count, accuracies=tuple(accuracies), l2=tuple(chosen))
            for label, (accuracies, chosen) in found.items()
        ]


Part = tuple[np.ndarray, np.ndarray, int]  # features, labels, and the number of classes
Fitted = Iterator[tuple[str, float, list[float]]]  # name, accuracy, and the l2 that was used


def by_ridge(part: Part, test: Features, l2: float) -> Fitted:
    path = fit_path(*part, l2=sorted({l2, *PATH}))
    fixed = next(probe for probe in path.probes if probe.l2 == l2)
    best = path.probes[path.best]
    yield f"ridge, {l2:g}", right(fixed, test), [l2]
    yield "ridge, best", right(best, test), [best.l2]


def by_neighbors(part: Part, test: Features, l2: float) -> Fitted:
    yield "neighbors", right(fit_neighbors(*part), test), []


def by_logistic(part: Part, test: Features, l2: float) -> Fitted:
    yield "logistic", right(fit_logistic(*part), test), []


FITS: dict[str, Callable[[Part, Features, float], Fitted]] = {
    "ridge": by_ridge,
    "neighbors": by_neighbors,
    "logistic": by_logistic,
}


def right(probe: Any, test: Features) -> float:
    """The share of the test pictures that a probe names rightly."""
    return float((probe.predict(test.values).numpy() == test.labels).mean())


def check_features(train: Features, test: Features) -> None:
    if train.classes != test.classes:
        raise DataError("the classes of the training and the test pictures are not the same")
    counts = np.bincount(train.labels, minlength=len(train.classes))
    if len(train.classes) < 2 or not counts.all():
        lacking = [name for name, count in zip(train.classes, counts, strict=True) if not count]
        what = f"no picture of {lacking[0]!r}" if lacking else "a single class"
        raise DataError(f"{what} to learn from; a probe needs some of each of two classes or more")


def check_protocol(shots: Sequence[Shots], seeds: int, probes: Sequence[str], l2: float) -> None:
    """Refuse what cannot be tried, before anything is computed."""
    check_l2(l2)
    for count in shots:
        if count != "all" and count < 1:
            raise ConfigError(f"shots={count} leaves nothing to learn from; give 1 or more, or all")
    if not shots or seeds < 1:
        raise ConfigError("give at least one number of shots, and at least one seed")
    for name in probes:
        if name not in FITS:
            raise unknown("probe", name, FITS)
