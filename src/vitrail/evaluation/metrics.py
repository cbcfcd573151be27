"""Classification metrics and their 95 % confidence intervals.

The last argument of most metrics is `weights` (R, N), how often each image counts; they return
named values (R,). Weights of one give the metric itself, and `estimate` also resamples images for
the interval (bootstrap, the same draws on every run).
An undefined value, such as the recall of a class without images, is NaN and left out of means.

Shapes: N images, B images of a batch, K classes, R resamples.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LossKind = Literal["softmax", "sigmoid"]
Statistic = Callable[[np.ndarray], dict[str, np.ndarray]]  # weights (R, N) → values (R,) by name

COVERAGE = 0.8  # of `accuracy_at_80`
MAX_CURVE_POINTS = 200
RESAMPLES, MIN_RESAMPLES = 1000, 100
BUDGET = 5 * 10**8  # images x classes x resamples of multi-label data: some seconds
CELLS = 2**21  # weights at a time: 16 MB
CLASSES = 64  # at a time, to avoid a second copy of all labels


class SampleScores(NamedTuple):
    loss: Tensor  # (B,)
    predicted: Tensor  # (B,) class with the largest logit
    rank: Tensor  # (B,) classes ranked above the label; above the best-ranked of several labels
    confidence: Tensor  # (B,) probability of the predicted class
    label_probability: Tensor  # (B,) probability of the label; of the most likely of several


class Estimate(NamedTuple):
    """A metric with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def score_samples(logits: Tensor, labels: Tensor, loss: LossKind) -> SampleScores:
    """Score logits (B, K) against labels (B,), or 0/1 labels (B, K), on the logits' device.

    Ties go to the class that comes first, so that constant logits score at chance. An image without
    any label counts as wrong, and so does one with NaN logits: it is assigned to the first wrong
    class with NaN confidence, which keeps it in the confusion matrix and off its diagonal.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    multi_label, classes = labels.ndim == 2, logits.shape[1]
    ordered = logits.nan_to_num(nan=-math.inf)
    best = ordered.masked_fill(labels == 0, -math.inf).argmax(1) if multi_label else labels  # (B,)
    at_best = ordered.gather(1, best[:, None])  # (B, 1)
    before = torch.arange(classes, device=logits.device) < best[:, None]  # (B, K)
    rank = ((ordered > at_best) | ((ordered == at_best) & before)).sum(1)
    broken = logits.isnan().any(1)
    unlabeled = ~labels.bool().any(1) if multi_label else torch.zeros_like(broken)
    first_wrong = (labels == 0).int().argmax(1) if multi_label else (labels == 0).long()
    first_wrong = first_wrong.clamp_max(classes - 1)  # a single class has no wrong one
    predicted = torch.where(broken, first_wrong, ordered.argmax(1))
    probabilities = logits.sigmoid() if loss == "sigmoid" else logits.softmax(1)  # (B, K)
    confidence = probabilities.gather(1, predicted[:, None])[:, 0]
    if loss == "softmax":
        losses = F.cross_entropy(logits, labels, reduction="none")
    else:
        targets = (labels if multi_label else F.one_hot(labels, classes)).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    return SampleScores(
        loss=losses,
        predicted=predicted,
        rank=rank.masked_fill(broken | unlabeled, classes),
        confidence=confidence.masked_fill(broken, math.nan),
        label_probability=probabilities.gather(1, best[:, None])[:, 0].masked_fill(unlabeled, 0.0),
    )


def estimate(
    statistics: Sequence[Statistic],
    samples: int,
    resamples: int = RESAMPLES,
    known: Mapping[str, float] | None = None,
) -> dict[str, Estimate]:
    """Return the values of statistics with their intervals; `known` values are taken as given."""
    ones = np.ones((1, samples))
    values = {name: float(x[0]) for one in statistics for name, x in one(ones).items()}
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in values}
    for weights in resample_weights(samples, resamples):
        for statistic in statistics:
            for name, resampled in statistic(weights).items():
                drawn[name].append(resampled)
    return {
        name: interval(
            value,
            np.concatenate(drawn[name]),
            num_covered(samples) if name == "accuracy_at_80" else samples,
            math.inf if name == "loss" else 1.0,
        )
        for name, value in (values | dict(known or {})).items()
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


def means(columns: Mapping[str, np.ndarray], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Mean of each column (N,); NaN for a column with a value that is not finite."""
    table = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)  # (N, C)
    finite = np.isfinite(table).all(axis=0)
    values = weights @ np.where(finite, table, 0.0) / weights.sum(axis=1, keepdims=True)  # (R, C)
    return dict(zip(columns, np.where(finite, values, np.nan).T, strict=True))


def balanced_accuracy(
    labels: np.ndarray, correct: np.ndarray, classes: int, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Mean recall over the classes that occur; labels (N,)."""
    support = sum_by_group(weights, labels, classes)
    hits = sum_by_group(weights[:, correct], labels[correct], classes)
    return {"balanced_accuracy": nan_mean(safe_divide(hits, support))}


def accuracy_at_80(
    confidence: np.ndarray, correct: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Accuracy on the 80 % of the images with the most confident predictions; NaN comes last."""
    count = num_covered(len(correct))
    hits = [np.interp(count, *curve) for curve in hits_by_count(confidence, correct, weights)]
    return {"accuracy_at_80": np.array(hits) / count}


def num_covered(samples: int) -> int:
    """Number of images at `COVERAGE`; at least one."""
    return max(1, round(COVERAGE * samples))


def selective_curve(confidence: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coverages and selective accuracies, at most `MAX_CURVE_POINTS` of them."""
    samples = len(correct)
    counts = np.linspace(1, samples, min(samples, MAX_CURVE_POINTS)).round().astype(np.int64)
    (curve,) = hits_by_count(confidence, correct, np.ones((1, samples)))
    return counts / samples, np.interp(counts, *curve) / counts


def hits_by_count(
    confidence: np.ndarray, correct: np.ndarray, weights: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers of images and of correct ones down to each confidence, from 0; for weights (R, N).

    Images of equal confidence count together, because softmax in float32 is 1.0 for many images,
    whose order, often by class, must not matter. Numbers between two confidences are interpolated.
    """
    _, groups = np.unique(-confidence, return_inverse=True)  # the highest first, NaN last
    for row in weights:  # N numbers stay in the cache, R x N would not
        images, hits = np.bincount(groups, row), np.bincount(groups, row * correct)
        yield np.append(0, images.cumsum()), np.append(0, hits.cumsum())


def f1_averages(
    predicted: np.ndarray, truth: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Micro and macro F1 of bool (N, K) each; macro over the classes present or predicted."""
    weights = weights.astype(np.float32)  # integers: exact
    hits, support, assigned = np.empty((3, len(weights), truth.shape[1]))
    for start in range(0, truth.shape[1], CLASSES):
        part = slice(start, start + CLASSES)
        hits[:, part] = weights @ (predicted[:, part] & truth[:, part]).astype(np.float32)
        support[:, part] = weights @ truth[:, part].astype(np.float32)
        assigned[:, part] = weights @ predicted[:, part].astype(np.float32)
    micro = f1(*(counts.sum(axis=1) for counts in (hits, support, assigned)))
    return {"f1_micro": micro, "f1_macro": nan_mean(f1(hits, support, assigned))}


def f1(hits: np.ndarray, support: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """F1 from true positives, images with the label, and images assigned to the class.

    NaN for a class that is neither present nor predicted.
    """
    return safe_divide(2 * hits, support + predicted)


def average_precisions(scores: np.ndarray, truth: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Average precision of each class from scores (N, K) and bool (N, K): (R, K).

    As in scikit-learn: no interpolation, images of equal score count together, a NaN score ranks
    last. NaN for a class without positives.
    """
    values = np.full((len(weights), truth.shape[1]), np.nan)
    for k in np.flatnonzero(truth.any(axis=0)).tolist():
        positive = truth[:, k]
        # Precision matters at the scores of positives only: a group is everything from one of them
        # to the next, best group first.
        column = np.where(np.isnan(scores[:, k]), -np.inf, scores[:, k])
        thresholds = np.unique(column[positive])
        groups = len(thresholds) - np.searchsorted(thresholds, column, side="right")
        size = int(groups.max()) + 1
        hits = sum_by_group(weights[:, positive], groups[positive], size)
        totals = np.cumsum(sum_by_group(weights, groups, size), axis=1)
        precisions = safe_divide(np.cumsum(hits, axis=1), totals)
        values[:, k] = safe_divide(np.nansum(precisions * hits, axis=1), hits.sum(axis=1))
    return values


def sum_by_group(weights: np.ndarray, groups: np.ndarray, size: int) -> np.ndarray:
    """Sum weights (R, N) by the group of each image (N,). (R, size)"""
    flat = groups + size * np.arange(len(weights))[:, None]
    total = np.bincount(flat.ravel(), weights=weights.ravel(), minlength=size * len(weights))
    return total.reshape(len(weights), size)


def safe_divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide; NaN where the denominator is 0."""
    out = np.full(np.shape(denominator), np.nan)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)


def nan_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis without NaN; NaN if nothing is left (`np.nanmean` would warn)."""
    return safe_divide(np.nansum(values, axis=-1), (~np.isnan(values)).sum(axis=-1))


class ConfusedPair(NamedTuple):
    """Images of one class that were assigned to another."""

    label: int
    predicted: int
    images: int
    share: float  # of the images with this label


def most_confused(confusion: np.ndarray, count: int) -> list[ConfusedPair]:
    """The largest off-diagonal entries of a confusion matrix (K, K)."""
    wrong = confusion - np.diag(confusion.diagonal())
    support = confusion.sum(axis=1)
    order = np.argsort(-wrong, axis=None, kind="stable")[:count]
    pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
    return [
        ConfusedPair(int(a), int(b), int(wrong[a, b]), float(wrong[a, b] / support[a]))
        for a, b in pairs
        if wrong[a, b]
    ]
