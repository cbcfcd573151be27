"""Classification metrics as pure functions of arrays and tensors.

An undefined value, such as the recall of a class without images, is NaN and left out of means.
Counts per class have the classes last; the bootstrap passes resampled counts, (R, K).

Shapes: N images, B images of a batch, K classes.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LossKind = Literal["softmax", "sigmoid"]

COVERAGE = 0.8  # of `accuracy_at_80`
MAX_CURVE_POINTS = 200


class SampleScores(NamedTuple):
    """Per-image scores of a batch."""

    loss: Tensor  # (B,)
    predicted: Tensor  # (B,) class with the largest logit
    rank: Tensor  # (B,) classes ranked above the label; above the best-ranked of several labels
    confidence: Tensor  # (B,) probability of the predicted class
    label_probability: Tensor  # (B,) probability of the label; of the most likely of several


def score_samples(logits: Tensor, labels: Tensor, loss: LossKind) -> SampleScores:
    """Score logits (B, K) against labels (B,), or 0/1 labels (B, K), on the logits' device.

    Ties go to the class that comes first, so that constant logits score at chance. An image without
    any label is wrong, and so is one with NaN logits: it is assigned to the first wrong class with
    NaN confidence, which keeps it in the confusion matrix and off its diagonal.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    multi_label = labels.ndim == 2
    ordered = logits.nan_to_num(nan=-math.inf)
    best = ordered.masked_fill(labels == 0, -math.inf).argmax(1) if multi_label else labels  # (B,)
    at_best = ordered.gather(1, best[:, None])  # (B, 1)
    before = torch.arange(logits.shape[1], device=logits.device) < best[:, None]  # (B, K)
    rank = ((ordered > at_best) | ((ordered == at_best) & before)).sum(1)
    broken = logits.isnan().any(1)
    wrong = broken | ~labels.bool().any(1) if multi_label else broken
    rank = rank.masked_fill(wrong, logits.shape[1])
    first_wrong = (labels == 0).int().argmax(1) if multi_label else (labels == 0).long()
    first_wrong = first_wrong.clamp_max(logits.shape[1] - 1)  # a single class has no wrong one
    predicted = torch.where(broken, first_wrong, ordered.argmax(1))
    probabilities = logits.sigmoid() if loss == "sigmoid" else logits.softmax(1)  # (B, K)
    confidence = probabilities.gather(1, predicted[:, None])[:, 0].masked_fill(broken, math.nan)
    label_probability = probabilities.gather(1, best[:, None])[:, 0]
    if multi_label:
        label_probability = label_probability.masked_fill(~labels.bool().any(1), 0.0)
    losses = sample_losses(logits, labels, loss)
    return SampleScores(losses, predicted, rank, confidence, label_probability)


def sample_losses(logits: Tensor, labels: Tensor, loss: LossKind) -> Tensor:
    """Softmax cross-entropy per image, or binary cross-entropy summed over classes. (B,)"""
    if loss == "softmax":
        return F.cross_entropy(logits, labels, reduction="none")
    targets = labels if labels.ndim == 2 else F.one_hot(labels, logits.shape[1])
    targets = targets.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)


def safe_divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide; NaN where the denominator is 0."""
    out = np.full(np.shape(denominator), np.nan)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)


def nan_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis without NaN; NaN if nothing is left (`np.nanmean` would warn)."""
    return safe_divide(np.nansum(values, axis=-1), (~np.isnan(values)).sum(axis=-1))


# Counts per class: `hits` are true positives, `support` the images with that label, `predicted`
# the images assigned to the class: diagonal, row sums and column sums of a confusion matrix.


def balanced_accuracy(hits: np.ndarray, support: np.ndarray) -> np.ndarray:
    """Mean recall over the classes that occur."""
    return nan_mean(safe_divide(hits, support))


def f1(hits: np.ndarray, support: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Harmonic mean of precision and recall; NaN for a class neither present nor predicted."""
    return safe_divide(2 * hits, support + predicted)


def f1_averages(
    hits: np.ndarray, support: np.ndarray, predicted: np.ndarray
) -> dict[str, np.ndarray]:
    """Micro and macro F1; macro is over the classes that are present or predicted."""
    micro = f1(hits.sum(axis=-1), support.sum(axis=-1), predicted.sum(axis=-1))
    return {"f1_micro": micro, "f1_macro": nan_mean(f1(hits, support, predicted))}


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """Average precision of scores (N,) and bool (N,), as in scikit-learn; NaN without positives.

    No interpolation, images of equal score count together, and a NaN score ranks last.
    """
    groups = threshold_groups(scores, truth)
    positives = np.bincount(groups, weights=truth)
    return float(average_precision_of_counts(positives, np.bincount(groups)))


def threshold_groups(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Number of distinct positive scores above each image's score. (N,)

    Precision matters at those thresholds only; a group is everything between two of them.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    thresholds = np.unique(scores[truth])
    return len(thresholds) - np.searchsorted(thresholds, scores, side="right")


def average_precision_of_counts(positives: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Average precision from the positives and images in each group, best group first."""
    precisions = safe_divide(np.cumsum(positives, axis=-1), np.cumsum(totals, axis=-1))
    return safe_divide(np.nansum(precisions * positives, axis=-1), positives.sum(axis=-1))


def confidence_order(confidence: np.ndarray) -> np.ndarray:
    """Indices by falling confidence; stable, NaN last. (N,)"""
    return np.argsort(-confidence, kind="stable")


def num_covered(samples: int, coverage: float) -> int:
    """Number of images at a coverage; at least one."""
    return max(1, round(coverage * samples))


def selective_accuracy(confidence: np.ndarray, correct: np.ndarray, coverage: float) -> float:
    """Accuracy on the share of images with the most confident predictions."""
    covered = confidence_order(confidence)[: num_covered(len(correct), coverage)]
    return float(correct[covered].mean())


def selective_curve(confidence: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coverages and selective accuracies, at most `MAX_CURVE_POINTS` of them."""
    samples = len(correct)
    hits = np.cumsum(correct[confidence_order(confidence)])
    counts = np.linspace(1, samples, min(samples, MAX_CURVE_POINTS)).round().astype(np.int64)
    return counts / samples, hits[counts - 1] / counts


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
