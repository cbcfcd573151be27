import math
from functools import partial

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
from vitrail.evaluation.metrics import Estimate, interval, wilson_interval

SEEDS = range(20)


def single_label(seed):
    """Labels and predictions; with few samples, classes are missing from either."""
    rng = np.random.default_rng(seed)
    classes = 2 if seed % 4 == 0 else int(rng.integers(3, 9))
    samples = int(rng.integers(1, 40))
    return classes, rng.integers(classes, size=samples), rng.integers(classes, size=samples)


def with_resamples(samples, resamples=5):
    """Weights of the data itself, and of some resamples."""
    return np.concatenate([np.ones((1, samples)), *metrics.resample_weights(samples, resamples)])


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.filterwarnings("ignore:A single label was found")
@pytest.mark.parametrize("seed", SEEDS)
def test_single_label_metrics_equal_scikit_learn(seed):
    classes, truth, predicted = single_label(seed)
    confusion = confusion_matrix(truth, predicted, labels=range(classes))
    hits, rows, columns = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, predicted, labels=range(classes), zero_division=np.nan
    )
    np.testing.assert_allclose(metrics.safe_divide(hits, columns), precision)
    np.testing.assert_allclose(metrics.safe_divide(hits, rows), recall)
    np.testing.assert_allclose(metrics.f1(hits, rows, columns), f1)
    weights = with_resamples(len(truth))
    got = metrics.balanced_accuracy(truth, truth == predicted, classes, weights)
    for value, times in zip(got["balanced_accuracy"], weights.astype(int), strict=True):
        drawn = np.repeat(truth, times), np.repeat(predicted, times)
        assert value == pytest.approx(balanced_accuracy_score(*drawn))


@pytest.mark.parametrize("seed", SEEDS)
def test_multi_label_metrics_equal_scikit_learn(seed, monkeypatch):
    """Scores are tied; classes may be without a positive, in the data or in a resample."""
    monkeypatch.setattr(metrics, "CLASSES", 3)
    rng = np.random.default_rng(seed)
    samples, classes = int(rng.integers(2, 60)), int(rng.integers(2, 7))
    scores = rng.normal(size=(samples, classes)).round(int(rng.integers(3)))
    truth = rng.random((samples, classes)) < rng.choice([0.03, 0.3, 0.9])
    weights = with_resamples(samples)
    averages = metrics.f1_averages(scores > 0, truth, weights)
    precisions = metrics.average_precisions(scores, truth, weights)
    for row, times in enumerate(weights):
        options = {"sample_weight": times, "zero_division": np.nan}
        for name in ("macro", "micro"):
            want = f1_score(truth, scores > 0, average=name, **options)
            np.testing.assert_allclose(averages[f"f1_{name}"][row], want)
        present = times @ truth > 0
        assert np.isnan(precisions[row, ~present]).all()
        if present.any():
            columns = truth[:, present], scores[:, present]
            want = average_precision_score(*columns, average=None, sample_weight=times)
            np.testing.assert_allclose(precisions[row, present], want)


def test_nan_scores_rank_last_and_means_ignore_nan():
    truth, ones = np.array([[True], [False], [False], [True]]), np.ones((1, 4))
    for scores in ([math.nan, -1.0, -math.inf, 2.0], [0.0, 1.0, 0.0, 2.0]):
        assert metrics.average_precisions(np.array([scores]).T, truth, ones) == 0.75
    assert metrics.nan_mean(np.array([math.nan, 1.0, 3.0])) == 2
    assert np.isnan(metrics.nan_mean(np.array([math.nan])))
    assert np.isnan(metrics.nan_mean(np.empty(0)))


@pytest.mark.parametrize("seed", SEEDS)
def test_top_k_accuracy_equals_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    classes = 2 if seed % 4 == 0 else int(rng.integers(3, 30))
    logits = rng.normal(size=(50, classes))
    labels = rng.integers(classes, size=50)
    rank = metrics.score_samples(torch.tensor(logits), torch.tensor(labels), "softmax").rank
    scores = logits[:, 1] - logits[:, 0] if classes == 2 else logits  # as it expects
    for k in (1, 5):
        if k < classes:
            want = top_k_accuracy_score(labels, scores, k=k, labels=range(classes))
            assert float((rank < k).double().mean()) == pytest.approx(want)


def test_selective_accuracy_orders_by_confidence_and_averages_ties():
    confidence = np.array([0.5, 0.9, 0.5, math.nan, 0.7])
    correct = np.array([True, True, False, True, False])
    at_80 = metrics.accuracy_at_80(confidence, correct, np.ones((1, 5)))["accuracy_at_80"]
    assert at_80 == pytest.approx(2 / 4)
    coverage, accuracy = metrics.selective_curve(confidence, correct)
    assert coverage.tolist() == [0.2, 0.4, 0.6, 0.8, 1.0]
    np.testing.assert_allclose(accuracy, [1, 1 / 2, 1.5 / 3, 2 / 4, 3 / 5])
    assert [metrics.num_covered(n) for n in (1, 5, 6, 8, 35, 50_000)] == [1, 4, 5, 6, 28, 40_000]
    # Saturated confidences: the order of the images, such as by class, does not matter.
    certain, weights = np.ones(10), np.array([np.ones(10), [*[2, 0] * 5]])
    for right in (np.arange(10) < 5, np.arange(10) >= 5):
        at_80 = metrics.accuracy_at_80(certain, right, weights)["accuracy_at_80"]
        np.testing.assert_allclose(at_80, [right.mean(), right[::2].mean()])
    distinct, weights = np.arange(10) / 10, np.array([[*[0] * 5, 1, 3, 2, 0, 4]])
    at_80 = metrics.accuracy_at_80(distinct, distinct > 0.75, weights)["accuracy_at_80"]
    assert at_80 == pytest.approx(4 / 8)  # of 4, 2 and 2 of the 3


def test_most_confused_pairs_come_first():
    counts = np.array([[8, 2, 0], [1, 5, 0], [0, 7, 3]])
    assert metrics.most_confused(counts, 2) == [(2, 1, 7, 0.7), (0, 1, 2, 0.2)]
    assert metrics.most_confused(np.diag([3, 4]), 5) == []


def test_resamples_are_deterministic_and_independent_of_blocks(monkeypatch):
    whole = np.concatenate(list(metrics.resample_weights(80, 20)))
    assert (whole.sum(axis=1) == 80).all()
    assert (whole == 0).mean() == pytest.approx(1 / math.e, abs=0.03)
    monkeypatch.setattr(metrics, "CELLS", 560)
    parts = list(metrics.resample_weights(80, 20))
    assert [len(part) for part in parts] == [7, 7, 6]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def accuracy_of(correct):
    statistic = partial(metrics.means, {"accuracy": correct})
    return metrics.estimate([statistic], len(correct))["accuracy"]


def test_coverage_of_the_interval_is_close_to_95_percent():
    correct = np.random.default_rng(3).random((150, 400)) < 0.7
    columns = {str(k): correct[:, k] for k in range(400)}
    intervals = metrics.estimate([partial(metrics.means, columns)], 150).values()
    covered = np.mean([low <= 0.7 <= high for _, low, high in intervals])
    assert covered == pytest.approx(0.94, abs=0.03)


def test_interval_is_clipped_to_the_possible_range():
    drawn = np.linspace(0.5, 1, 101)
    assert interval(0.9, drawn, 50).high == 1
    assert interval(0.9, drawn, 50, math.inf).high == pytest.approx(0.9 + 0.2375)
    assert interval(0.1, drawn, 50).low == 0
    assert interval(1.0, drawn, 10_000).low == pytest.approx(1 - 0.2375)  # wider than Wilson's
    assert interval(0.0, 0 * drawn, 50, math.inf) == Estimate(0, 0, 0)  # a loss of 0
    holed = np.array([math.nan, 0.5, 0.5])
    assert interval(0.5, holed, 50) == Estimate(0.5, 0.5, 0.5)
    for value, shares in ((math.nan, holed), (math.inf, holed), (0.5, holed[:1])):
        assert np.isnan(interval(value, shares, 50)[1:]).all()


@pytest.mark.parametrize("samples", [1, 3, 10, 49, 1000])
def test_perfect_accuracy_has_the_wilson_interval(samples):
    correct, wrong = accuracy_of(np.ones(samples)), accuracy_of(np.zeros(samples))
    assert (correct.value, correct.high) == (1, 1)
    assert (wrong.value, wrong.low) == (0, 0)
    assert correct.low == pytest.approx(1 - wrong.high)
    assert wrong.high == pytest.approx(3.84 / (samples + 3.84), rel=1e-3)
    assert wilson_interval(9000, 10_000) == pytest.approx((0.894, 0.906), abs=1e-3)
    assert wilson_interval(9, 10) == pytest.approx((0.596, 0.982), abs=1e-3)
