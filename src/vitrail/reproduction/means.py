"""Numbers over seeds: means with intervals, and differences seed by seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vitrail.probing.shots import half_interval
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Key
from vitrail.reproduction.figures import Mark, Row

Pick = Callable[[Result], float]
WORTH = 0.005  # of accuracy: less is no difference, whatever its interval


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; `half` is how far the true one may be off, 19 times of 20."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def half(self) -> float | None:
        return half_interval(self.values)

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half

    @property
    def text(self) -> str:
        """`71.2 ± 0.8`, in percent."""
        beside = "" if self.half is None else f" ± {100 * self.half:.1f}"
        return f"{100 * self.mean:.1f}{beside}"

    @property
    def points(self) -> str:
        """`+1.2 ± 0.8 points`, for a difference."""
        beside = "" if self.half is None else f" ± {100 * self.half:.1f}"
        return f"{100 * self.mean:+.1f}{beside} points"

    def __neg__(self) -> "Mean":
        return Mean(tuple(-value for value in self.values))

    def above(self, least: float = 0.0) -> bool:
        """Whether all of the interval lies above; of a single seed, the value."""
        return (self.mean if self.low is None else self.low) > least

    def mark(self, x: float, label: str = "") -> Mark:
        return Mark(x, self.mean, self.low, self.high, label)

    def row(self, name: str, group: str = "") -> Row:
        return Row(name, self.mean, self.low, self.high, group)

    def to_dict(self) -> dict[str, float | Sequence[float] | None]:
        return {"mean": self.mean, "half": self.half, "values": list(self.values)}


def fewshot(result: Result) -> float:
    return result.fewshot


def accuracy(result: Result) -> float:
    assert result.accuracy is not None
    return result.accuracy


def by_seed(results: Mapping[Key, Result], pick: Pick) -> dict[Key, Mean]:
    """The cells that differ in their seed alone, taken together."""
    found: dict[Key, list[float]] = {}
    for (*key, _), result in results.items():
        found.setdefault(tuple(key), []).append(pick(result))
    return {key: Mean(tuple(values)) for key, values in found.items()}


def difference(one: Mean, other: Mean) -> Mean:
    """How much better the first is, seed by seed: what a seed does to both falls out."""
    return Mean(tuple(a - b for a, b in zip(one.values, other.values, strict=True)))


def numbers(means: Mapping[Key, Mean]) -> dict[str, object]:
    """For report.json: `learned, stem` → its mean, interval and values."""
    return {", ".join(map(str, key)): mean.to_dict() for key, mean in means.items()}
