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

from vitrail.evaluation import measures
from vitrail.evaluation.outcome import Tally

SEEDS = range(40)


def single(seed):
    """Labels and predictions; with few pictures, classes are missing from either."""
    rng = np.random.default_rng(seed)
    classes = 2 if seed % 4 == 0 else int(rng.integers(3, 9))
    pictures = int(rng.integers(1, 40))
    return classes, rng.integers(classes, size=pictures), rng.integers(classes, size=pictures)


def several(seed):
    """Scores and truth of several labels; scores are tied, classes may be without a positive."""
    rng = np.random.default_rng(seed)
    pictures, classes = int(rng.integers(2, 60)), int(rng.integers(2, 7))
    scores = rng.normal(size=(pictures, classes)).round(int(rng.integers(3)))
    return scores, rng.random((pictures, classes)) < rng.choice([0.03, 0.3, 0.9])


@pytest.mark.parametrize("seed", SEEDS)
def test_precision_recall_and_f1_of_a_confusion_matrix_are_those_of_scikit_learn(seed):
    classes, truth, predicted = single(seed)
    confusion = confusion_matrix(truth, predicted, labels=range(classes))
    hits, shown, said = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    precision, recall, f1, support = precision_recall_fscore_support(
        truth, predicted, labels=range(classes), zero_division=np.nan
    )
    np.testing.assert_allclose(measures.precision(hits, said), precision)
    np.testing.assert_allclose(measures.recall(hits, shown), recall)
    np.testing.assert_allclose(measures.f1(hits, shown, said), f1)
    np.testing.assert_array_equal(shown, support)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("seed", SEEDS)
def test_balanced_accuracy_is_that_of_scikit_learn(seed):
    classes, truth, predicted = single(seed)
    hits = np.bincount(truth[truth == predicted], minlength=classes)
    got = measures.balanced_accuracy(hits, np.bincount(truth, minlength=classes))
    assert got == pytest.approx(balanced_accuracy_score(truth, predicted))


@pytest.mark.parametrize("seed", SEEDS)
def test_f1_of_several_labels_is_that_of_scikit_learn(seed):
    scores, truth = several(seed)
    said = scores > 0
    counts = (said & truth).sum(axis=0), truth.sum(axis=0), said.sum(axis=0)
    for average, got in (
        (None, measures.f1(*counts)),
        ("macro", measures.f1_macro(*counts)),
        ("micro", measures.f1_micro(*counts)),
    ):
        want = f1_score(truth, said, average=average, zero_division=np.nan)
        np.testing.assert_allclose(got, want)


@pytest.mark.parametrize("seed", SEEDS)
def test_average_precision_is_that_of_scikit_learn(seed):
    scores, truth = several(seed)
    columns = zip(scores.T, truth.T, strict=True)
    got = np.array([measures.average_precision(*column) for column in columns])
    told = truth.any(axis=0)
    assert np.isnan(got[~told]).all()
    if told.any():
        want = average_precision_score(truth[:, told], scores[:, told], average=None)
        np.testing.assert_allclose(got[told], want)
        want = average_precision_score(truth[:, told], scores[:, told])
        assert float(measures.known_mean(got)) == pytest.approx(want)


def test_a_score_that_is_no_number_is_the_least_of_all():
    truth = np.array([True, False, False, True])
    got = measures.average_precision(np.array([math.nan, -1.0, -math.inf, 2.0]), truth)
    assert got == measures.average_precision(np.array([0.0, 1.0, 0.0, 2.0]), truth) == 0.75


@pytest.mark.parametrize("seed", SEEDS)
def test_the_outcomes_top_k_accuracy_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    classes = 2 if seed % 4 == 0 else int(rng.integers(3, 30))
    logits = rng.normal(size=(50, classes))
    labels = rng.integers(classes, size=50)
    tally = Tally(classes)
    for part in (slice(0, 16), slice(16, 50)):
        tally.add(*(torch.tensor(x[part]) for x in (logits, labels, np.arange(50))))
    scores = logits[:, 1] - logits[:, 0] if classes == 2 else logits  # as it wants two classes
    for k, right in ((1, tally.counts[1]), (5, tally.counts[2])):
        if k < classes:
            want = top_k_accuracy_score(labels, scores, k=k, labels=range(classes))
            assert right / 50 == pytest.approx(want)


def test_what_is_not_known_is_left_out_of_a_mean_and_nothing_has_none():
    assert measures.known_mean(np.array([math.nan, 1.0, 3.0])) == 2
    assert np.isnan(measures.known_mean(np.array([math.nan])))
    assert np.isnan(measures.known_mean(np.empty(0)))


def test_the_least_sure_are_left_unanswered_and_the_later_of_equally_sure_ones():
    confidence = np.array([0.5, 0.9, 0.5, math.nan, 0.7])
    right = np.array([True, True, False, True, False])
    assert measures.surest_first(confidence).tolist() == [1, 4, 0, 2, 3]
    assert measures.accuracy_at(confidence, right, 0.6) == pytest.approx(2 / 3)
    assert measures.accuracy_at(confidence, right, 0.8) == pytest.approx(2 / 4)
    assert measures.accuracy_at(confidence, right, 0.01) == 1  # one is always answered
    curve = measures.selective(confidence, right)
    assert curve.coverage.tolist() == [0.2, 0.4, 0.6, 0.8, 1.0]
    np.testing.assert_allclose(curve.accuracy, [1, 1 / 2, 2 / 3, 2 / 4, 3 / 5])


def test_a_coverage_is_rounded_to_whole_pictures_and_never_to_none():
    assert [measures.answered(n, 0.8) for n in (1, 5, 6, 8, 35, 50_000)] == [1, 4, 5, 6, 28, 40_000]
    assert measures.answered(10, 0.01) == 1


@pytest.mark.parametrize("pictures", [1, 2, 199, 200, 201, 12_345])
def test_a_curve_has_few_points_rises_to_all_and_tells_what_the_function_tells(pictures):
    rng = np.random.default_rng(pictures)
    confidence = rng.random(pictures).round(2)
    right = rng.random(pictures) < confidence
    curve = measures.selective(confidence, right)
    assert len(curve.coverage) == min(200, pictures)
    assert (np.diff(curve.coverage) > 0).all()
    assert curve.coverage[-1] == 1
    assert curve.accuracy[-1] == right.mean()
    for point in range(0, len(curve.coverage), 37):
        got = measures.accuracy_at(confidence, right, curve.coverage[point])
        assert got == pytest.approx(curve.accuracy[point])
