"""Numbers over seeds: means with intervals, their differences, and what they say of a claim.

Two or three seeds say little about how far seeds lie apart; all cells of an experiment together say
it well, so the deviation is pooled over them. What a seed does to all cells alike (the pictures it
draws, the order it shows them in) falls out of a difference between two of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitrail.probing.shots import student
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Key
from vitrail.reproduction.figures import Mark, Row
from vitrail.reproduction.report import Verdict

Pick = Callable[[Result], float]


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and how far the true one may be off, 19 times of 20."""

    values: tuple[float, ...]
    error: float = 0.0  # of a single run
    paired: float = 0.0  # of a single run, beside another of the same seed

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def half(self) -> float:
        return self.error / math.sqrt(len(self.values))

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def text(self) -> str:
        """`71.2 ± 0.8`, in percent."""
        return f"{100 * self.mean:.1f} ± {100 * self.half:.1f}"

    @property
    def signed(self) -> str:
        """`+1.2 ± 0.8`, for a difference in points."""
        return f"{100 * self.mean:+.1f} ± {100 * self.half:.1f}"

    def __sub__(self, other: "Mean") -> "Mean":
        """How much better this is, seed by seed."""
        values = tuple(a - b for a, b in zip(self.values, other.values, strict=True))
        error = math.hypot(self.paired, other.paired)
        return Mean(values, error, error)

    def __neg__(self) -> "Mean":
        return replace(self, values=tuple(-value for value in self.values))

    def mark(self, x: float) -> Mark:
        return Mark(x, self.mean, self.low, self.high)

    def row(self, name: str, group: str = "") -> Row:
        return Row(name, self.mean, self.low, self.high, group)

    def to_dict(self) -> dict[str, float | Sequence[float]]:
        return {"mean": self.mean, "half": self.half, "values": list(self.values)}


def fewshot(result: Result) -> float:
    return result.fewshot


def accuracy(result: Result) -> float:
    assert result.accuracy is not None
    return result.accuracy


def by_seed(results: Mapping[Key, Result], pick: Pick) -> dict[Key, Mean]:
    """The cells that differ in their seed alone, taken together."""
    return over_seeds({key: pick(result) for key, result in results.items()})


def over_seeds(values: Mapping[Key, float]) -> dict[Key, Mean]:
    """The same for numbers; every cell has the same seeds, two at least."""
    found: dict[Key, list[float]] = {}
    for (*key, _), value in values.items():
        found.setdefault(tuple(key), []).append(value)
    table = np.array(list(found.values()))  # (cells, seeds)
    cells, seeds = table.shape
    within = table - table.mean(axis=1, keepdims=True)
    beside = within - within.mean(axis=0)
    error = deviation(within, cells * (seeds - 1))
    paired = deviation(beside, max(1, cells - 1) * (seeds - 1))
    return {key: Mean(tuple(row), error, paired) for key, row in found.items()}


def deviation(residuals: np.ndarray, degrees: int) -> float:
    """How far a run may be off: the standard deviation times Student's t."""
    return student(degrees) * math.sqrt(float(np.sum(residuals**2)) / degrees)


def average(means: Sequence[Mean]) -> Mean:
    """The mean of several cells that err independently, seed by seed."""
    values = np.array([mean.values for mean in means]).mean(axis=0)
    count = math.sqrt(len(means))
    return Mean(tuple(values.tolist()), means[0].error / count, means[0].paired / count)


def judged(parts: Sequence[Mean]) -> Verdict:
    """What parts of a claim say, each a quantity that the claim has above zero.

    A part is seen if all of its interval lies above zero, refuted if all of it lies below.
    """
    seen = [part.low > 0 for part in parts]
    refuted = [part.high < 0 for part in parts]
    if all(seen):
        return "holds"
    if any(seen):
        return "holds in part"
    return "does not hold" if any(refuted) else "cannot be told"


def tested(results: Mapping[Key, Result]) -> str:
    """How many test pictures models are judged by."""
    return " to ".join(f"{count:,}" for count in sorted({r.judged for r in results.values()}))


def numbers(means: Mapping[Key, Mean]) -> dict[str, object]:
    """For report.json: `learned, stem` → its mean, interval and values."""
    return {", ".join(map(str, key)): mean.to_dict() for key, mean in means.items()}
