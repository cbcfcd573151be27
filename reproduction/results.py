"""The results of an experiment: means over seeds with 95 % CIs, verdicts, and the report of them.

Two or three seeds say little about the deviation between seeds, so it is pooled over all jobs of an
experiment. Effects of a seed that all jobs share (which images, in which order) cancel in the
difference of two jobs of the same seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from reproduction.figures import Lines, Point, dot_chart, line_chart
from reproduction.jobs import PROTOCOL, Datasets, Key, Result
from reproduction.report import TEXT, Figure, Report, Table, Verdict
from vitrail.evaluation.metrics import RESAMPLES, Estimate, resample_weights
from vitrail.probing.fewshot import student_t


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95 % CI."""

    values: tuple[float, ...]
    error: float = 0.0  # half CI of a single run
    paired: float = 0.0  # half CI of a single run, in a difference of runs of the same seed

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
    def text(self) -> str:
        """`71.2 ± 0.8`, in percent."""
        return f"{100 * self.mean:.1f} ± {100 * self.half:.1f}"

    @property
    def signed(self) -> str:
        """`+1.2 ± 0.8`, for a difference in points."""
        return f"{100 * self.mean:+.1f} ± {100 * self.half:.1f}"

    def __sub__(self, other: "Mean") -> "Mean":
        values = tuple(a - b for a, b in zip(self.values, other.values, strict=True))
        error = math.hypot(self.paired, other.paired)
        return Mean(values, error, error)

    def __neg__(self) -> "Mean":
        return replace(self, values=tuple(-value for value in self.values))

    def point(self, x: float = 0.0) -> Point:
        return Point(x, self.mean, self.half)


def pooled_means(values: Mapping[Key, float | None]) -> dict[Key, Mean]:
    """Return key without seed → mean; all keys have the same seeds, two at least."""
    groups: dict[Key, list[float]] = {}
    for (*key, _), value in values.items():
        assert value is not None
        groups.setdefault(tuple(key), []).append(value)
    table = np.array(list(groups.values()))  # (jobs, seeds)
    jobs, seeds = table.shape
    within = table - table.mean(axis=1, keepdims=True)

    def half_interval(residuals: np.ndarray, degrees: int) -> float:
        return student_t(degrees) * math.sqrt(float(np.sum(residuals**2)) / degrees)

    error = half_interval(within, jobs * (seeds - 1))
    paired = half_interval(within - within.mean(axis=0), max(1, jobs - 1) * (seeds - 1))
    return {key: Mean(tuple(row), error, paired) for key, row in groups.items()}


def average(means: Sequence[Mean]) -> Mean:
    """Return the mean of several jobs with independent errors, seed by seed."""
    values = np.array([mean.values for mean in means]).mean(axis=0)
    root = math.sqrt(len(means))
    return Mean(tuple(values.tolist()), means[0].error / root, means[0].paired / root)


def slope(points: Sequence[tuple[float, Mean]]) -> Mean:
    """Return the least-squares slope over log2 x, seed by seed: the gain per doubling of x."""
    xs = np.log2([x for x, _ in points])
    xs -= xs.mean()
    values = np.array([mean.values for _, mean in points]).T @ xs / np.sum(xs**2)
    root, first = math.sqrt(float(np.sum(xs**2))), points[0][1]
    return Mean(tuple(values.tolist()), first.error / root, first.paired / root)


def bootstrap_mean(values: np.ndarray) -> Estimate:
    """Return the mean over images (n,) with its bootstrap 95 % CI."""
    weights = np.concatenate(list(resample_weights(len(values), RESAMPLES)))  # (resamples, n)
    low, high = np.quantile(weights @ values / len(values), [0.025, 0.975]).tolist()
    return Estimate(float(values.mean()), low, high)


def parts_verdict(parts: Sequence[Mean]) -> Verdict:
    """Return the verdict of a claim whose parts are quantities that it says are positive."""
    confirmed = [part.low > 0 for part in parts]
    if any(confirmed):
        return "holds" if all(confirmed) else "holds in part"
    return "does not hold" if any((-part).low > 0 for part in parts) else "inconclusive"


def rules_verdict(parts: Sequence[bool]) -> Verdict:
    """Return the verdict of a claim whose parts hold or not."""
    if all(parts):
        return "holds"
    return "holds in part" if any(parts) else "does not hold"


def equality_verdict(gap: Mean, margin: float) -> Verdict:
    """Return whether two are equally good."""
    sides = (gap, -gap)
    if all(side.low > -margin for side in sides):
        return "holds"
    return "does not hold" if any(side.low > margin for side in sides) else "inconclusive"


@dataclass(frozen=True)
class Results:
    """The result of each job of an experiment."""

    name: str
    datasets: Datasets
    jobs: Mapping[Key, Result] = field(default_factory=dict)

    @cached_property
    def accuracy(self) -> dict[Key, Mean]:  # key without seed → test accuracy
        return pooled_means({key: result.accuracy for key, result in self.jobs.items()})

    @cached_property
    def fewshot(self) -> dict[Key, Mean]:
        return pooled_means({key: result.fewshot for key, result in self.jobs.items()})

    @property
    def score(self) -> dict[Key, Mean]:
        """What models are compared by: test accuracy, or few-shot accuracy on other datasets."""
        return self.fewshot if self.datasets.probes else self.accuracy

    def report(
        self,
        verdict: Verdict,
        values: Mapping[str, Any],
        rows: Sequence[Sequence[str]],
        head: Sequence[str] = (),
        lines: Sequence[Lines] = (),
        dots: Sequence[Mapping[str, Point]] = (),
        tables: Sequence[Table] = (),
        figures: Mapping[str, bytes] | None = None,
    ) -> Report:
        """Fill `values` into the experiment's text; rows and points into its table and chart."""
        text, figures = TEXT[self.name], dict(figures or {})
        counts = sorted({result.test_images for result in self.jobs.values()})
        tested = {"test_images": " to ".join(f"{count:,}" for count in counts)}
        context = {**PROTOCOL, **text, **self.datasets.names, **tested, **values}

        def fill(template: str) -> str:
            return template.format_map(context)

        context["measure"] = fill(context["measure"])

        if lines:
            panels = (
                {k: fill(x) if isinstance(x, str) else x for k, x in panel.items()}
                for panel in text["panels"]
            )
            figures[f"{self.name}.svg"] = line_chart([*zip(panels, lines, strict=True)])
        if dots:
            columns = dict(zip(map(fill, text["columns"]), dots, strict=True))
            figures[f"{self.name}.svg"] = dot_chart(columns)
        captions = dict.fromkeys(figures, text.get("figure")) | text.get("figures", {})
        data = {key: value for key, value in values.items() if not isinstance(value, str)}
        if "seeds" in text:
            data |= {"accuracy": self.accuracy, "fewshot": self.fewshot}
        return Report(
            name=self.name,
            title=text["title"],
            claim=text["claim"],
            method=fill(text["method"]),
            result=fill(text["result"]),
            verdict=verdict,
            tables=[Table(fill(text["table"]), [*map(fill, head or text["head"])], rows), *tables],
            figures=[Figure(file, captions[file], figures[file]) for file in figures],
            data=data,
            published=not self.jobs,
        )
