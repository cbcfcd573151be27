"""How far a number may be off: 95 % intervals by drawing the pictures again.

A statistic takes how often each picture was drawn, (R, N), and gives named values, (R,) each; from
all ones it makes those of the data itself. Draws are the same on every run.

Shapes: R resamples, N pictures, K classes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vitrail.evaluation import measures
from vitrail.evaluation.calibration import BINS, bin_of
from vitrail.evaluation.findings import Estimate
from vitrail.evaluation.measures import COVERAGE, share

RESAMPLES = 1000
FEWEST = 100
BUDGET = 5 * 10**8  # pictures times classes times resamples, where all count: some seconds
CELLS = 2**21  # weights at a time: 16 MB
CLASSES = 64  # at a time, so that no second copy of all labels is made

Statistic = Callable[[np.ndarray], dict[str, np.ndarray]]


def affordable(pictures: int, classes: int) -> int:
    """How many resamples there is time for when each looks at every class of every picture."""
    return min(RESAMPLES, max(FEWEST, BUDGET // (pictures * classes)))


def estimates(
    values: Mapping[str, float],
    statistics: Sequence[Statistic],
    pictures: int,
    resamples: int = RESAMPLES,
) -> dict[str, Estimate]:
    """The values with their intervals; the statistics give the same names."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in values}
    for weights in draws(pictures, resamples):
        for statistic in statistics:
            for name, drawn in statistic(weights).items():
                found[name].append(drawn)
    return {
        name: interval(
            value,
            np.concatenate(found[name]),
            measures.answered(pictures, COVERAGE) if name == "accuracy_at_80" else pictures,
            math.inf if name == "loss" else 1.0,
        )
        for name, value in values.items()
    }


def draws(pictures: int, resamples: int) -> Iterator[np.ndarray]:
    """How often each picture is drawn when N are drawn of N; (R, N), some resamples at a time."""
    rng = np.random.default_rng(0)
    rows = max(1, CELLS // pictures)
    for start in range(0, resamples, rows):
        weights = np.empty((min(rows, resamples - start), pictures))
        for row in weights:
            row[:] = np.bincount(rng.integers(pictures, size=pictures), minlength=pictures)
        yield weights


def interval(value: float, drawn: np.ndarray, pictures: int, most: float = 1.0) -> Estimate:
    """The middle 95 % of the resamples, moved so that their median is the value.

    For means the move is next to nothing. An ECE or an average precision grows when pictures
    repeat, so that the resamples of one may all lie above the value they are to enclose.

    Where all pictures are right, or none, so they are in all resamples; how far that may be off is
    for their number to say, and the interval is Wilson's at least.
    """
    drawn = drawn[np.isfinite(drawn)]
    if not math.isfinite(value) or not len(drawn):
        return Estimate(value, math.nan, math.nan)
    low, middle, high = np.quantile(drawn, [0.025, 0.5, 0.975]).tolist()
    low, high = max(0.0, value - (middle - low)), min(most, value + (high - middle))
    if most == 1 and value in (0, 1):
        least, greatest = wilson(int(value) * pictures, pictures)
        low, high = min(low, least), max(high, greatest)
    return Estimate(value, low, high)


def wilson(right: int, pictures: int) -> tuple[float, float]:
    """Where the share over endless such pictures lies, 19 times of 20 (Wilson 1927)."""
    z, p = 1.96, right / pictures
    middle = p + z * z / (2 * pictures)
    half = z * math.sqrt(p * (1 - p) / pictures + z * z / (4 * pictures**2))
    low, high = ((middle + sign * half) / (1 + z * z / pictures) for sign in (-1, 1))
    return low if right else 0.0, high if right < pictures else 1.0


def means(columns: Mapping[str, np.ndarray]) -> Statistic:
    """The mean of each column (N,); NaN of one that is not finite throughout."""
    table = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)  # (N, C)
    told = np.isfinite(table).all(axis=0)
    table = np.where(told, table, 0.0)

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        found = weights @ table / weights.sum(axis=1, keepdims=True)  # (R, C)
        return dict(zip(columns, np.where(told, found, np.nan).T, strict=True))

    return statistic


def balanced_accuracy(labels: np.ndarray, right: np.ndarray, classes: int) -> Statistic:
    """The mean recall of the classes that were drawn; labels (N,)."""

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        shown = by_group(weights, labels, classes)
        hits = by_group(weights[:, right], labels[right], classes)
        return {"balanced_accuracy": measures.balanced_accuracy(hits, shown)}

    return statistic


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray) -> Statistic:
    """Over pictures whose confidence (N,) is a number."""
    known = np.isfinite(confidence)
    gaps = np.zeros((len(known), BINS))
    gaps[known, bin_of(confidence[known])] = right[known] - confidence[known]

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        return {"ece": share(np.abs(weights @ gaps).sum(axis=1), weights @ known)}

    return statistic


def accuracy_at(name: str, confidence: np.ndarray, right: np.ndarray, coverage: float) -> Statistic:
    """Under `name`, the accuracy on the share of what was drawn that is most confident."""
    order = measures.surest_first(confidence)
    ordered = right[order].astype(np.float64)
    count = measures.answered(len(order), coverage)

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        found = np.empty(len(weights))
        for row, times in enumerate(weights):
            drawn = times[order]
            reached = np.cumsum(drawn)
            last = np.searchsorted(reached, count)  # which may be drawn more often than is wanted
            wanted = count - (reached[last] - drawn[last])
            found[row] = (drawn * ordered)[:last].sum() + wanted * ordered[last]
        return {name: found / count}

    return statistic


def mean_average_precision(scores: np.ndarray, truth: np.ndarray) -> Statistic:
    """Over the classes drawn that have a positive; scores (N, K) and bool (N, K)."""
    classes = np.flatnonzero(truth.any(axis=0))

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        found = np.full((len(weights), len(classes)), np.nan)
        for column, k in enumerate(classes):
            positive = truth[:, k]
            groups = measures.threshold_groups(scores[:, k], positive)
            size = int(groups.max()) + 1
            found[:, column] = measures.area_under_steps(
                by_group(weights[:, positive], groups[positive], size),
                by_group(weights, groups, size),
            )
        return {"mean_average_precision": measures.known_mean(found)}

    return statistic


def f1(said: np.ndarray, truth: np.ndarray) -> Statistic:
    """Micro and macro, of bool (N, K) each."""
    classes = truth.shape[1]

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        weights = weights.astype(np.float32)  # whole numbers: exact
        hits, shown, told = np.empty((3, len(weights), classes), np.float32)
        for start in range(0, classes, CLASSES):
            part = slice(start, start + CLASSES)
            hits[:, part] = weights @ (said[:, part] & truth[:, part]).astype(np.float32)
            shown[:, part] = weights @ truth[:, part].astype(np.float32)
            told[:, part] = weights @ said[:, part].astype(np.float32)
        return {
            "f1_micro": measures.f1_micro(hits, shown, told),
            "f1_macro": measures.f1_macro(hits, shown, told),
        }

    return statistic


def by_group(weights: np.ndarray, groups: np.ndarray, size: int) -> np.ndarray:
    """The weights (R, N) summed by each picture's group (N,). (R, size)"""
    flat = groups + size * np.arange(len(weights))[:, None]
    total = np.bincount(flat.ravel(), weights=weights.ravel(), minlength=size * len(weights))
    return total.reshape(len(weights), size)
