"""How good predictions are, in numbers: pure functions of arrays.

What cannot be told, as the recall of a class without pictures, is NaN and left out of means.
Counts may be whole numbers or, as the bootstrap has it, how often each picture was drawn; what
is counted by class has the classes last.

Shapes: N pictures, K classes.
"""

import numpy as np

from vitrail.evaluation.findings import Selective

MOST_POINTS = 200  # of a curve; more than a screen shows
COVERAGE = 0.8  # the share of pictures, the surest, whose accuracy is told: `accuracy_at_80`


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, and NaN of nothing."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)


def known_mean(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis of what is not NaN; NaN if that is nothing."""
    return share(np.nansum(values, axis=-1), (~np.isnan(values)).sum(axis=-1))


# Of each class: `hits` are the pictures that show it and were taken for it, `shown` those that show
# it, `said` those that were taken for it: a confusion matrix's diagonal, row and column sums.


def precision(hits: np.ndarray, said: np.ndarray) -> np.ndarray:
    """The share that is right of what was taken for a class."""
    return share(hits, said)


def recall(hits: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """The share of a class's pictures that was found."""
    return share(hits, shown)


def f1(hits: np.ndarray, shown: np.ndarray, said: np.ndarray) -> np.ndarray:
    """The harmonic mean of precision and recall; NaN of a class neither shown nor said."""
    return share(2 * hits, shown + said)


def f1_macro(hits: np.ndarray, shown: np.ndarray, said: np.ndarray) -> np.ndarray:
    """The mean of the classes' F1, over those that are shown or said."""
    return known_mean(f1(hits, shown, said))


def f1_micro(hits: np.ndarray, shown: np.ndarray, said: np.ndarray) -> np.ndarray:
    """F1 of all classes' pictures put together."""
    return f1(hits.sum(axis=-1), shown.sum(axis=-1), said.sum(axis=-1))


def balanced_accuracy(hits: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """The mean recall of the classes that occur."""
    return known_mean(recall(hits, shown))


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """The mean precision at each positive's score, as scikit-learn has it: no interpolation, and
    pictures of equal score come together. Takes (N,) and bool (N,); NaN without a positive.

    A score that is NaN is the least.
    """
    groups = threshold_groups(scores, truth)
    pictures = np.bincount(groups)
    return float(area_under_steps(np.bincount(groups, weights=truth), pictures))


def threshold_groups(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """For each picture how many distinct scores of positives are above its own. (N,)

    Precision matters at those scores only, so that a group is all that lies between two of them.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    thresholds = np.unique(scores[truth])
    return len(thresholds) - np.searchsorted(thresholds, scores, side="right")


def area_under_steps(positives: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """Average precision from the number of positives and of pictures in each group, best first."""
    precisions = share(np.cumsum(positives, axis=-1), np.cumsum(pictures, axis=-1))
    return share(np.nansum(precisions * positives, axis=-1), positives.sum(axis=-1))


def surest_first(confidence: np.ndarray) -> np.ndarray:
    """The order of falling confidence; equal ones stay as they are, NaN goes last. (N,)"""
    return np.argsort(-confidence, kind="stable")


def answered(pictures: int, coverage: float) -> int:
    """How many pictures a coverage is, but at least one."""
    return max(1, round(coverage * pictures))


def accuracy_at(confidence: np.ndarray, right: np.ndarray, coverage: float) -> float:
    """The accuracy on the share of pictures with the most confident predictions."""
    first = surest_first(confidence)[: answered(len(right), coverage)]
    return float(right[first].mean())


def selective(confidence: np.ndarray, right: np.ndarray) -> Selective:
    """The accuracy at every coverage, or at 200 of them where there are more pictures."""
    pictures = len(right)
    found = np.cumsum(right[surest_first(confidence)])
    counts = np.linspace(1, pictures, min(pictures, MOST_POINTS)).round().astype(np.int64)
    return Selective(coverage=counts / pictures, accuracy=found[counts - 1] / counts)
