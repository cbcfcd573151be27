import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
    top_k_accuracy_score,
)

from vitrail.evaluation import metrics
from vitrail.evaluation.results import ResultAccumulator

SEEDS = range(40)


def single_label(seed):
    """Labels and predictions; with few samples, classes are missing from either."""
    rng = np.random.default_rng(seed)
    classes = 2 if seed % 4 == 0 else int(rng.integers(3, 9))
    samples = int(rng.integers(1, 40))
    return classes, rng.integers(classes, size=samples), rng.integers(classes, size=samples)


def multi_label(seed):
    """Scores and labels; scores are tied, classes may be without a positive."""
    rng = np.random.default_rng(seed)
    samples, classes = int(rng.integers(2, 60)), int(rng.integers(2, 7))
    scores = rng.normal(size=(samples, classes)).round(int(rng.integers(3)))
    return scores, rng.random((samples, classes)) < rng.choice([0.03, 0.3, 0.9])


@pytest.mark.parametrize("seed", SEEDS)
def test_precision_recall_and_f1_equal_scikit_learn(seed):
    classes, truth, predicted = single_label(seed)
    confusion = confusion_matrix(truth, predicted, labels=range(classes))
    hits, rows, columns = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    precision, recall, f1, support = precision_recall_fscore_support(
        truth, predicted, labels=range(classes), zero_division=np.nan
    )
    np.testing.assert_allclose(metrics.safe_divide(hits, columns), precision)
    np.testing.assert_allclose(metrics.safe_divide(hits, rows), recall)
    np.testing.assert_allclose(metrics.f1(hits, rows, columns), f1)
    np.testing.assert_array_equal(rows, support)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("seed", SEEDS)
def test_balanced_accuracy_equals_scikit_learn(seed):
    classes, truth, predicted = single_label(seed)
    hits = np.bincount(truth[truth == predicted], minlength=classes)
    got = metrics.balanced_accuracy(hits, np.bincount(truth, minlength=classes))
    assert got == pytest.approx(balanced_accuracy_score(truth, predicted))


@pytest.mark.parametrize("seed", SEEDS)
def test_multi_label_f1_equals_scikit_learn(seed):
    scores, truth = multi_label(seed)
    predicted_counts = scores > 0
    counts = (predicted_counts & truth).sum(axis=0), truth.sum(axis=0), predicted_counts.sum(axis=0)
    for average, got in (
        (None, metrics.f1(*counts)),
        ("macro", metrics.f1_averages(*counts)["f1_macro"]),
        ("micro", metrics.f1_averages(*counts)["f1_micro"]),
    ):
        want = f1_score(truth, predicted_counts, average=average, zero_division=np.nan)
        np.testing.assert_allclose(got, want)


@pytest.mark.parametrize("seed", SEEDS)
def test_average_precision_equals_scikit_learn(seed):
    scores, truth = multi_label(seed)
    columns = zip(scores.T, truth.T, strict=True)
    got = np.array([metrics.average_precision(*column) for column in columns])
    present = truth.any(axis=0)
    assert np.isnan(got[~present]).all()
    if present.any():
        want = average_precision_score(truth[:, present], scores[:, present], average=None)
        np.testing.assert_allclose(got[present], want)
        want = average_precision_score(truth[:, present], scores[:, present])
        assert float(metrics.nan_mean(got)) == pytest.approx(want)


def test_nan_score_ranks_last():
    truth = np.array([True, False, False, True])
    got = metrics.average_precision(np.array([math.nan, -1.0, -math.inf, 2.0]), truth)
    assert got == metrics.average_precision(np.array([0.0, 1.0, 0.0, 2.0]), truth) == 0.75


@pytest.mark.parametrize("seed", SEEDS)
def test_top_k_accuracy_equals_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    classes = 2 if seed % 4 == 0 else int(rng.integers(3, 30))
    logits = rng.normal(size=(50, classes))
    labels = rng.integers(classes, size=50)
    accumulator = ResultAccumulator(classes)
    for part in (slice(0, 16), slice(16, 50)):
        accumulator.update(*(torch.tensor(x[part]) for x in (logits, labels, np.arange(50))))
    scores = logits[:, 1] - logits[:, 0] if classes == 2 else logits  # as it expects
    for k, correct in ((1, accumulator.counts[1]), (5, accumulator.counts[2])):
        if k < classes:
            want = top_k_accuracy_score(labels, scores, k=k, labels=range(classes))
            assert correct / 50 == pytest.approx(want)


def test_nan_mean_ignores_nan():
    assert metrics.nan_mean(np.array([math.nan, 1.0, 3.0])) == 2
    assert np.isnan(metrics.nan_mean(np.array([math.nan])))
    assert np.isnan(metrics.nan_mean(np.empty(0)))


def test_selective_accuracy_orders_by_confidence_and_is_stable():
    confidence = np.array([0.5, 0.9, 0.5, math.nan, 0.7])
    correct = np.array([True, True, False, True, False])
    assert metrics.confidence_order(confidence).tolist() == [1, 4, 0, 2, 3]
    assert metrics.selective_accuracy(confidence, correct, 0.6) == pytest.approx(2 / 3)
    assert metrics.selective_accuracy(confidence, correct, 0.8) == pytest.approx(2 / 4)
    assert metrics.selective_accuracy(confidence, correct, 0.01) == 1  # at least one image
    coverage, accuracy = metrics.selective_curve(confidence, correct)
    assert coverage.tolist() == [0.2, 0.4, 0.6, 0.8, 1.0]
    np.testing.assert_allclose(accuracy, [1, 1 / 2, 2 / 3, 2 / 4, 3 / 5])


def test_coverage_is_rounded_to_at_least_one_image():
    assert [metrics.num_covered(n, 0.8) for n in (1, 5, 6, 8, 35, 50_000)] == [
        1,
        4,
        5,
        6,
        28,
        40_000,
    ]
    assert metrics.num_covered(10, 0.01) == 1


@pytest.mark.parametrize("samples", [1, 2, 199, 200, 201, 12_345])
def test_selective_curve_agrees_with_selective_accuracy(samples):
    rng = np.random.default_rng(samples)
    confidence = rng.random(samples).round(2)
    correct = rng.random(samples) < confidence
    coverage, accuracy = metrics.selective_curve(confidence, correct)
    assert len(coverage) == min(200, samples)
    assert (np.diff(coverage) > 0).all()
    assert coverage[-1] == 1
    assert accuracy[-1] == correct.mean()
    for point in range(0, len(coverage), 37):
        got = metrics.selective_accuracy(confidence, correct, coverage[point])
        assert got == pytest.approx(accuracy[point])


def test_most_confused_pairs_come_first():
    counts = np.array([[8, 2, 0], [1, 5, 0], [0, 7, 3]])
    assert metrics.most_confused(counts, 2) == [(2, 1, 7, 0.7), (0, 1, 2, 0.2)]
    assert metrics.most_confused(np.diag([3, 4]), 5) == []
