"""95 % confidence intervals: bootstrap over images, and Wilson's for proportions.

A statistic maps resample weights (R, N), how often each image was drawn, to named values (R,);
weights of all ones give the values of the data itself. Draws are the same on every run.

Shapes: R resamples, N images, K classes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vitrail.evaluation import metrics
from vitrail.evaluation.calibration import BINS, bin_of
from vitrail.evaluation.metrics import COVERAGE, safe_divide
from vitrail.evaluation.results import Estimate

RESAMPLES, MIN_RESAMPLES = 1000, 100
BUDGET = 5 * 10**8  # images x classes x resamples of multi-label data: some seconds
CELLS = 2**21  # weights at a time: 16 MB
CLASSES = 64  # at a time, to avoid a second copy of all labels

Statistic = Callable[[np.ndarray], dict[str, np.ndarray]]


def num_resamples(samples: int, classes: int) -> int:
    """Resamples that fit the time budget if each visits every class of every image."""
    return min(RESAMPLES, max(MIN_RESAMPLES, BUDGET // (samples * classes)))


def estimate(
    values: Mapping[str, float],
    statistics: Sequence[Statistic],
    samples: int,
    resamples: int = RESAMPLES,
) -> dict[str, Estimate]:
    """Add intervals to values; the statistics return the same names."""
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in values}
    for weights in resample_weights(samples, resamples):
        for statistic in statistics:
            for name, resampled in statistic(weights).items():
                drawn[name].append(resampled)
    return {
        name: interval(
            value,
            np.concatenate(drawn[name]),
            metrics.num_covered(samples, COVERAGE) if name == "accuracy_at_80" else samples,
            math.inf if name == "loss" else 1.0,
        )
        for name, value in values.items()
    }


def resample_weights(samples: int, resamples: int) -> Iterator[np.ndarray]:
    """How often each of N images is drawn in N draws with replacement; (R, N), in blocks."""
    rng = np.random.default_rng(0)
    rows = max(1, CELLS // samples)
    for start in range(0, resamples, rows):
        weights = np.empty((min(rows, resamples - start), samples))
        for row in weights:
            row[:] = np.bincount(rng.integers(samples, size=samples), minlength=samples)
        yield weights


def interval(value: float, drawn: np.ndarray, samples: int, upper: float = 1.0) -> Estimate:
    """Central 95 % of the resamples, shifted so that their median is the value.

    For means the shift is negligible. ECE and average precision grow when images repeat, so their
    resamples may all lie above the value. If all images are correct, or none, every resample is
    equal; the interval is then at least Wilson's.
    """
    drawn = drawn[np.isfinite(drawn)]
    if not math.isfinite(value) or not len(drawn):
        return Estimate(value, math.nan, math.nan)
    low, median, high = np.quantile(drawn, [0.025, 0.5, 0.975]).tolist()
    low, high = max(0.0, value - (median - low)), min(upper, value + (high - median))
    if upper == 1 and value in (0, 1):
        least, greatest = wilson_interval(int(value) * samples, samples)
        low, high = min(low, least), max(high, greatest)
    return Estimate(value, low, high)


def wilson_interval(correct: int, samples: int) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson 1927)."""
    z, p = 1.96, correct / samples
    middle = p + z * z / (2 * samples)
    half = z * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples**2))
    low, high = ((middle + sign * half) / (1 + z * z / samples) for sign in (-1, 1))
    return low if correct else 0.0, high if correct < samples else 1.0


def means(columns: Mapping[str, np.ndarray]) -> Statistic:
    """Mean of each column (N,); NaN for a column with a value that is not finite."""
    table = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)  # (N, C)
    finite = np.isfinite(table).all(axis=0)
    table = np.where(finite, table, 0.0)

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        values = weights @ table / weights.sum(axis=1, keepdims=True)  # (R, C)
        return dict(zip(columns, np.where(finite, values, np.nan).T, strict=True))

    return statistic


def balanced_accuracy(labels: np.ndarray, correct: np.ndarray, classes: int) -> Statistic:
    """Mean recall over the classes drawn; labels (N,)."""

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        support = sum_by_group(weights, labels, classes)
        hits = sum_by_group(weights[:, correct], labels[correct], classes)
        return {"balanced_accuracy": metrics.balanced_accuracy(hits, support)}

    return statistic


def expected_calibration_error(confidence: np.ndarray, correct: np.ndarray) -> Statistic:
    """ECE over images with finite confidence (N,)."""
    known = np.isfinite(confidence)
    gaps = np.zeros((len(known), BINS))
    gaps[known, bin_of(confidence[known])] = correct[known] - confidence[known]

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        return {"ece": safe_divide(np.abs(weights @ gaps).sum(axis=1), weights @ known)}

    return statistic


def accuracy_at_80(
    confidence: np.ndarray, correct: np.ndarray, coverage: float = COVERAGE
) -> Statistic:
    """Selective accuracy at a coverage."""
    order = metrics.confidence_order(confidence)
    ordered = correct[order].astype(np.float64)
    count = metrics.num_covered(len(order), coverage)

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        hits = np.empty(len(weights))
        for row, times in enumerate(weights):
            drawn = times[order]
            total = np.cumsum(drawn)
            last = np.searchsorted(total, count)  # may be drawn more often than still needed
            needed = count - (total[last] - drawn[last])
            hits[row] = (drawn * ordered)[:last].sum() + needed * ordered[last]
        return {"accuracy_at_80": hits / count}

    return statistic


def mean_average_precision(scores: np.ndarray, truth: np.ndarray) -> Statistic:
    """mAP over the classes drawn that have a positive; scores (N, K) and bool (N, K)."""
    classes = np.flatnonzero(truth.any(axis=0))

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        values = np.full((len(weights), len(classes)), np.nan)
        for column, k in enumerate(classes):
            positive = truth[:, k]
            groups = metrics.threshold_groups(scores[:, k], positive)
            size = int(groups.max()) + 1
            values[:, column] = metrics.average_precision_of_counts(
                sum_by_group(weights[:, positive], groups[positive], size),
                sum_by_group(weights, groups, size),
            )
        return {"mean_average_precision": metrics.nan_mean(values)}

    return statistic


def f1(predicted: np.ndarray, truth: np.ndarray) -> Statistic:
    """Micro and macro F1 of bool (N, K) each."""
    classes = truth.shape[1]

    def statistic(weights: np.ndarray) -> dict[str, np.ndarray]:
        weights = weights.astype(np.float32)  # integers: exact
        hits, support, assigned = np.empty((3, len(weights), classes), np.float32)
        for start in range(0, classes, CLASSES):
            part = slice(start, start + CLASSES)
            hits[:, part] = weights @ (predicted[:, part] & truth[:, part]).astype(np.float32)
            support[:, part] = weights @ truth[:, part].astype(np.float32)
            assigned[:, part] = weights @ predicted[:, part].astype(np.float32)
        return metrics.f1_averages(hits, support, assigned)

    return statistic


def sum_by_group(weights: np.ndarray, groups: np.ndarray, size: int) -> np.ndarray:
    """Sum weights (R, N) by the group of each image (N,). (R, size)"""
    flat = groups + size * np.arange(len(weights))[:, None]
    total = np.bincount(flat.ravel(), weights=weights.ravel(), minlength=size * len(weights))
    return total.reshape(len(weights), size)
