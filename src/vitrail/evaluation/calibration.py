"""Whether a model's confidence can be believed, and the temperature that mends it.

After Guo et al. 2017 (arXiv:1706.04599). Pure functions of arrays. Logits may hold -inf, which is
a class that is ruled out, but neither NaN nor +inf: those have no confidence.

Shapes: N pictures, K classes.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vitrail.evaluation.findings import Calibration
from vitrail.evaluation.measures import share
from vitrail.evaluation.outcome import Loss

BINS = 15
COLDEST, HOTTEST = 0.01, 100.0  # temperatures; a model that is always right would want 0
CLOSE_ENOUGH = 1e-10  # relative
MOST_STEPS = 100  # halving alone would take 40
RULED_OUT = -1e30  # for -inf: its probability is 0, and 0 times it is 0
CHUNK = 2**17  # logits at a time: a megabyte, which stays in the cache


class Bins(NamedTuple):
    """What a reliability diagram shows."""

    counts: np.ndarray  # int64 (bins,)
    confidence: np.ndarray  # (bins,) mean; NaN in an empty bin
    accuracy: np.ndarray  # (bins,) mean; NaN in an empty bin


def edges() -> np.ndarray:
    return np.linspace(0, 1, BINS + 1)


def bin_of(confidence: np.ndarray) -> np.ndarray:
    """The bin of each confidence; on an edge it is the lower one, as in scikit-learn. (N,)"""
    return np.searchsorted(edges()[1:-1], confidence)


def reliability(confidence: np.ndarray, right: np.ndarray) -> Bins:
    """What was promised and what was kept, by bin."""
    place = bin_of(confidence)
    counts = np.bincount(place, minlength=BINS)
    promised, kept = (np.bincount(place, weights=x, minlength=BINS) for x in (confidence, right))
    return Bins(counts, share(promised, counts), share(kept, counts))


def expected_calibration_error(bins: Bins) -> float:
    """The mean gap between confidence and accuracy, by the bins' counts; NaN of no pictures."""
    gaps = np.nan_to_num(np.abs(bins.confidence - bins.accuracy))
    return float(share(gaps @ bins.counts, bins.counts.sum()))


def calibrate(
    logits: np.ndarray, labels: np.ndarray, confidence: np.ndarray, right: np.ndarray, loss: Loss
) -> Calibration:
    """All there is to say about logits (N, K) and labels (N,), given what was made of them."""
    bins = reliability(confidence, right)
    scaled = cross_fitted_confidence(logits, labels, loss)
    return Calibration(
        edges=edges(),
        counts=bins.counts,
        confidence=bins.confidence,
        accuracy=bins.accuracy,
        ece=expected_calibration_error(bins),
        brier=brier_score(logits, labels, loss),
        temperature=fit_temperature(logits, labels, loss),
        ece_scaled=expected_calibration_error(reliability(scaled, right)),
    )


def cross_fitted_confidence(logits: np.ndarray, labels: np.ndarray, loss: Loss) -> np.ndarray:
    """Each picture's confidence at a temperature it had no part in. (N,)

    Pictures at even places get that of the odd ones, and the other way round.
    """
    scaled = np.empty(len(labels))
    even, odd = slice(0, None, 2), slice(1, None, 2)
    for part, rest in ((even, odd), (odd, even)):
        temperature = fit_temperature(logits[rest], labels[rest], loss)
        scaled[part] = confidence_at(logits[part], temperature, loss)
    return scaled


def confidence_at(logits: np.ndarray, temperature: float, loss: Loss) -> np.ndarray:
    """The probability of the likeliest class of logits / temperature. (N,)"""
    found = [probabilities(logits[rows], loss, temperature).max(axis=1) for rows in chunks(logits)]
    return np.concatenate([np.empty(0), *found])


def brier_score(logits: np.ndarray, labels: np.ndarray, loss: Loss) -> float:
    """The mean squared distance of probabilities from the truth, summed over classes."""
    total = 0.0
    for rows in chunks(logits):
        chances = probabilities(logits[rows], loss)
        of_truth = np.take_along_axis(chances, labels[rows, None], axis=1)
        total += float((chances**2).sum() + (1 - 2 * of_truth).sum())
    return total / len(labels) if len(labels) else math.nan


def probabilities(logits: np.ndarray, loss: Loss, temperature: float = 1.0) -> np.ndarray:
    """Softmax or sigmoids of logits / temperature, in float64. (N, K)"""
    logits = logits.astype(np.float64) / temperature
    if loss == "sigmoid":
        return sigmoid(logits)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # so that nothing overflows, and what is close to 0 is exact
    return np.where(x < 0, small, 1.0) / (1 + small)


def fit_temperature(logits: np.ndarray, labels: np.ndarray, loss: Loss) -> float:
    """The T in [0.01, 100] for which logits / T have the least log loss; 1 if none is better.

    The loss is convex in b = 1 / T, so that its slope has one root. Newton's steps find it. Where
    one leaves what is known to enclose the root, or is not much shorter than the one before, the
    end is tried instead, and then the middle.
    """
    b, before = 1.0, math.inf
    low, high = ends = 1 / HOTTEST, 1 / COLDEST
    untried = set(ends)
    for _ in range(MOST_STEPS):
        slope, curvature = derivatives(logits, labels, b, loss)
        if slope == 0:
            break
        low, high = (b, high) if slope < 0 else (low, b)
        step = slope / curvature if curvature > 0 else math.inf
        if min(abs(step), high - low) <= CLOSE_ENOUGH * b:
            break
        end = high if slope < 0 else low
        if low < b - step < high and abs(step) < 0.5 * before:
            after = b - step
        elif end in untried:
            after = end
            untried.remove(end)
        else:
            after = math.sqrt(low * high)
        b, before = after, abs(after - b)
    return 1 / b


def derivatives(
    logits: np.ndarray, labels: np.ndarray, b: float, loss: Loss
) -> tuple[float, float]:
    """Slope and curvature in b of the log loss of b * logits, summed over pictures.

    softmax: with z = x - x_true the loss is log sum exp(b z); slope E[z], curvature Var[z]
    sigmoid: with z = -x of the true class, x of others, it is sum log(1 + exp(b z));
             slope sum s z, curvature sum s (1 - s) z^2, s = sigmoid(b z)

    A picture whose true class is ruled out is lost at every temperature, and left out.
    """
    slope = curvature = 0.0
    for rows in chunks(logits):
        x, truth = logits[rows].astype(np.float64), labels[rows, None]
        of_truth = np.take_along_axis(x, truth, axis=1)
        if loss == "sigmoid":
            np.put_along_axis(x, truth, -of_truth, axis=1)
            z = np.where(np.isfinite(x), x, 0.0)
            s = sigmoid(b * z)
            slope += float((s * z).sum())
            curvature += float((s * (1 - s) * z**2).sum())
        else:
            z = np.maximum(x, RULED_OUT) - of_truth
            z[np.isinf(of_truth[:, 0])] = 0.0
            odds = np.exp(b * (z - z.max(axis=1, keepdims=True)))
            totals = odds.sum(axis=1)
            mean = np.einsum("nk,nk->n", odds, z) / totals
            odds *= z
            slope += float(mean.sum())
            curvature += float((np.einsum("nk,nk->n", odds, z) / totals - mean**2).sum())
    return slope, curvature


def chunks(logits: np.ndarray) -> Iterator[slice]:
    """Rows, a few at a time."""
    rows = max(1, CHUNK // logits.shape[1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
