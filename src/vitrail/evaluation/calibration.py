"""Calibration: reliability diagram, ECE, Brier score, and temperature scaling.

After Guo et al. 2017 (arXiv:1706.04599). Pure functions of arrays. Logits may contain -inf (an
excluded class), but neither NaN nor +inf.

Shapes: N images, K classes.
"""

import math
from collections.abc import Iterator

import numpy as np

from vitrail.evaluation.metrics import LossKind, safe_divide
from vitrail.evaluation.results import Calibration

BINS = 15
EDGES = np.linspace(0, 1, BINS + 1)
INNER_EDGES = EDGES[1:-1]  # an edge belongs to the bin below, as in scikit-learn
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0  # a model without mistakes would get 0
TOLERANCE = 1e-10  # relative
MAX_STEPS = 100  # bisection alone would take 40
EXCLUDED = -1e30  # replaces -inf: its probability is 0, and 0 times it is 0
CHUNK = 2**17  # logits at a time: a megabyte, which stays in the cache


def calibration_metrics(
    logits: np.ndarray,
    labels: np.ndarray,
    confidence: np.ndarray,
    correct: np.ndarray,
    loss: LossKind,
) -> Calibration:
    """Return the calibration metrics of logits (N, K) and labels (N,)."""
    counts, mean_confidence, accuracy = bins = reliability_bins(confidence, correct)
    scaled = np.empty(len(labels))  # confidence at the temperature fitted on the other half
    even, odd = slice(0, None, 2), slice(1, None, 2)
    for part, rest in ((even, odd), (odd, even)):
        temperature, own = fit_temperature(logits[rest], labels[rest], loss), logits[part]
        for rows in chunks(own):
            scaled[part][rows] = probabilities(own[rows], loss, temperature).max(axis=1)
    return Calibration(
        edges=EDGES,
        counts=counts,
        confidence=mean_confidence,
        accuracy=accuracy,
        ece=expected_calibration_error(*bins),
        brier=brier_score(logits, labels, loss),
        temperature=fit_temperature(logits, labels, loss),
        ece_scaled=expected_calibration_error(*reliability_bins(scaled, correct)),
    )


def reliability_bins(
    confidence: np.ndarray, correct: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, mean confidences and accuracies of the bins; NaN in an empty bin. (BINS,) each"""
    bins = np.searchsorted(INNER_EDGES, confidence)
    counts = np.bincount(bins, minlength=BINS)
    sums = [np.bincount(bins, weights=x, minlength=BINS) for x in (confidence, correct)]
    return counts, safe_divide(sums[0], counts), safe_divide(sums[1], counts)


def expected_calibration_error(
    counts: np.ndarray, confidence: np.ndarray, accuracy: np.ndarray
) -> float:
    """ECE: mean gap between confidence and accuracy, weighted by count; NaN without images."""
    gaps = np.nan_to_num(np.abs(confidence - accuracy))
    return float(safe_divide(gaps @ counts, counts.sum()))


def ece_by_weights(
    confidence: np.ndarray, correct: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """ECE over images with finite confidence (N,), for weights (R, N) of the bootstrap."""
    known = np.isfinite(confidence)
    gaps = np.zeros((len(known), BINS))
    bins = np.searchsorted(INNER_EDGES, confidence[known])
    gaps[known, bins] = correct[known] - confidence[known]
    return {"ece": safe_divide(np.abs(weights @ gaps).sum(axis=1), weights @ known)}


def brier_score(logits: np.ndarray, labels: np.ndarray, loss: LossKind) -> float:
    """Mean squared error of the probabilities, summed over classes."""
    total = 0.0
    for rows in chunks(logits):
        predicted = probabilities(logits[rows], loss)
        of_label = np.take_along_axis(predicted, labels[rows, None], axis=1)
        total += float((predicted**2).sum() + (1 - 2 * of_label).sum())
    return total / len(labels) if len(labels) else math.nan


def probabilities(logits: np.ndarray, loss: LossKind, temperature: float = 1.0) -> np.ndarray:
    """Softmax or sigmoid of logits / temperature in float64. (N, K)"""
    logits = logits.astype(np.float64) / temperature
    if loss == "sigmoid":
        return sigmoid(logits)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # does not overflow, and is exact close to 0
    return np.where(x < 0, small, 1.0) / (1 + small)


def fit_temperature(logits: np.ndarray, labels: np.ndarray, loss: LossKind) -> float:
    """Temperature in [0.01, 100] with the least NLL of logits / T; 1 if none is better.

    The loss is convex in b = 1 / T, so its slope has one root, found by safeguarded Newton steps:
    a step that leaves the bracket, or is not much shorter than the one before, is replaced by the
    end of the interval, and after that by bisection.
    """
    b, previous = 1.0, math.inf
    low, high = ends = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    untried = set(ends)
    for _ in range(MAX_STEPS):
        slope, curvature = derivatives(logits, labels, b, loss)
        if slope == 0:
            break
        low, high = (b, high) if slope < 0 else (low, b)
        step = slope / curvature if curvature > 0 else math.inf
        if min(abs(step), high - low) <= TOLERANCE * b:
            break
        end = high if slope < 0 else low
        if low < b - step < high and abs(step) < 0.5 * previous:
            after = b - step
        elif end in untried:
            after = end
            untried.remove(end)
        else:
            after = math.sqrt(low * high)
        b, previous = after, abs(after - b)
    return 1 / b


def derivatives(
    logits: np.ndarray, labels: np.ndarray, b: float, loss: LossKind
) -> tuple[float, float]:
    """First and second derivative in b of the NLL of b * logits, summed over images.

    softmax: with z = x - x_label the loss is log sum exp(b z); slope E[z], curvature Var[z]
    sigmoid: with z = -x of the label, x of other classes, it is sum log(1 + exp(b z));
             slope sum s z, curvature sum s (1 - s) z^2, s = sigmoid(b z)

    An image whose label has the logit -inf is wrong at every temperature, and left out.
    """
    slope = curvature = 0.0
    for rows in chunks(logits):
        x, label = logits[rows].astype(np.float64), labels[rows, None]
        of_label = np.take_along_axis(x, label, axis=1)
        if loss == "sigmoid":
            np.put_along_axis(x, label, -of_label, axis=1)
            z = np.where(np.isfinite(x), x, 0.0)
            s = sigmoid(b * z)
            slope += float((s * z).sum())
            curvature += float((s * (1 - s) * z**2).sum())
        else:
            z = np.maximum(x, EXCLUDED) - of_label
            z[np.isinf(of_label[:, 0])] = 0.0
            odds = np.exp(b * (z - z.max(axis=1, keepdims=True)))
            totals = odds.sum(axis=1)
            mean = np.einsum("nk,nk->n", odds, z) / totals
            odds *= z
            slope += float(mean.sum())
            curvature += float((np.einsum("nk,nk->n", odds, z) / totals - mean**2).sum())
    return slope, curvature


def chunks(logits: np.ndarray) -> Iterator[slice]:
    rows = max(1, CHUNK // logits.shape[1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
