import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score

from vitrail.evaluation import bootstrap, measures
from vitrail.evaluation.calibration import expected_calibration_error, reliability
from vitrail.evaluation.findings import Estimate

RNG = np.random.default_rng(0)
N = 80
CONFIDENCE = RNG.random(N).round(1)
CONFIDENCE[7] = math.nan
RIGHT = RNG.random(N) < 0.7
LABELS = RNG.integers(6, size=N) % 5  # class 0 twice as often, class 5 never
SCORES = RNG.normal(size=(N, 4)).round(1)
TRUTH = SCORES + RNG.normal(size=(N, 4)) > 1
TRUTH[:, 3] = False
DRAWN = next(bootstrap.draws(N, 30))


def repeated(times, *columns):
    """The resample itself, each picture as often as it was drawn."""
    return (np.repeat(column, times.astype(int), axis=0) for column in columns)


def accuracy_of(right):
    return bootstrap.estimates(
        {"accuracy": float(right.mean())}, [bootstrap.means({"accuracy": right})], len(right)
    )["accuracy"]


def test_as_many_pictures_are_drawn_as_there_are():
    assert DRAWN.shape == (30, N)
    assert (DRAWN.sum(axis=1) == N).all()
    assert (DRAWN == 0).mean() == pytest.approx(1 / math.e, abs=0.03)


def test_the_draws_are_the_same_on_every_run_and_in_pieces(monkeypatch):
    whole = np.concatenate(list(bootstrap.draws(50, 20)))
    monkeypatch.setattr(bootstrap, "CELLS", 350)
    parts = list(bootstrap.draws(50, 20))
    assert [len(part) for part in parts] == [7, 7, 6]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_means_are_those_of_what_was_drawn():
    got = bootstrap.means({"a": CONFIDENCE, "b": RIGHT})(DRAWN)
    assert np.isnan(got["a"]).all()  # one is no number
    want = [next(repeated(times, RIGHT)).mean() for times in DRAWN]
    np.testing.assert_allclose(got["b"], want)


def test_balanced_accuracy_is_that_of_what_was_drawn():
    predicted = np.where(RIGHT, LABELS, 4 - LABELS + (LABELS == 2))
    got = bootstrap.balanced_accuracy(LABELS, RIGHT, 6)(DRAWN)["balanced_accuracy"]
    want = [balanced_accuracy_score(LABELS, predicted, sample_weight=times) for times in DRAWN]
    np.testing.assert_allclose(got, want)


def test_the_calibration_error_is_that_of_what_was_drawn():
    got = bootstrap.expected_calibration_error(CONFIDENCE, RIGHT)(DRAWN)["ece"]
    for value, times in zip(got, DRAWN, strict=True):
        confidence, right = repeated(times, CONFIDENCE, RIGHT)
        known = np.isfinite(confidence)
        want = expected_calibration_error(reliability(confidence[known], right[known]))
        assert value == pytest.approx(want)


@pytest.mark.parametrize("coverage", [0.01, 0.5, 0.8, 1.0])
def test_accuracy_at_a_coverage_is_that_of_what_was_drawn(coverage):
    got = bootstrap.accuracy_at("x", CONFIDENCE, RIGHT, coverage)(DRAWN)["x"]
    for value, times in zip(got, DRAWN, strict=True):
        want = measures.accuracy_at(*repeated(times, CONFIDENCE, RIGHT), coverage)
        assert value == pytest.approx(want)


def test_mean_average_precision_is_that_of_what_was_drawn():
    got = bootstrap.mean_average_precision(SCORES, TRUTH)(DRAWN)["mean_average_precision"]
    for value, times in zip(got, DRAWN, strict=True):
        want = average_precision_score(TRUTH[:, :3], SCORES[:, :3], sample_weight=times)
        assert value == pytest.approx(want)


def test_a_class_whose_positives_are_not_drawn_is_left_out():
    truth = np.array([[True, True], [False, False], [False, True]])
    scores = np.array([[1.0, 0.0], [2.0, 1.0], [3.0, 2.0]])
    statistic = bootstrap.mean_average_precision(scores, truth)
    assert statistic(np.array([[0.0, 2, 1]]))["mean_average_precision"].tolist() == [1]
    assert np.isnan(statistic(np.array([[0.0, 3, 0]]))["mean_average_precision"]).all()


def test_f1_is_that_of_what_was_drawn(monkeypatch):
    monkeypatch.setattr(bootstrap, "CLASSES", 3)
    got = bootstrap.f1(SCORES > 0.5, TRUTH)(DRAWN)
    for average in ("micro", "macro"):
        want = [
            f1_score(
                TRUTH, SCORES > 0.5, average=average, sample_weight=times, zero_division=np.nan
            )
            for times in DRAWN
        ]
        np.testing.assert_allclose(got[f"f1_{average}"], want, rtol=1e-6)


def test_the_interval_of_an_accuracy_is_about_that_of_the_binomial():
    for pictures, share in ((200, 0.5), (1000, 0.9), (1000, 0.2)):
        right = np.arange(pictures) < share * pictures
        got = accuracy_of(right)
        found = np.random.default_rng(1).binomial(pictures, share, size=100_000) / pictures
        low, high = np.quantile(found, [0.025, 0.975])
        assert got.value == share
        assert (got.low, got.high) == pytest.approx((low, high), abs=0.15 * (high - low))


def test_four_times_the_pictures_halve_the_interval():
    widths = [np.ptp(accuracy_of(np.arange(n) % 3 > 0)[1:]) for n in (200, 800, 3200)]
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.15)
    assert widths[1] / widths[2] == pytest.approx(2, rel=0.15)


def test_the_truth_is_in_the_interval_about_19_times_of_20():
    right = np.random.default_rng(3).random((150, 400)) < 0.7
    columns = {str(k): right[:, k] for k in range(400)}
    values = {name: float(column.mean()) for name, column in columns.items()}
    found = bootstrap.estimates(values, [bootstrap.means(columns)], 150).values()
    assert np.mean([low <= 0.7 <= high for _, low, high in found]) == pytest.approx(0.94, abs=0.03)


@pytest.mark.parametrize("seed", range(10))
def test_the_value_is_in_its_interval(seed):
    """Also that of the calibration error, of which all resamples have more."""
    rng = np.random.default_rng(seed)
    pictures = int(rng.integers(1, 200))
    confidence = rng.random(pictures)
    right = rng.random(pictures) < confidence
    statistics = [
        bootstrap.expected_calibration_error(confidence, right),
        bootstrap.accuracy_at("accuracy_at_80", confidence, right, 0.8),
    ]
    ones = np.ones((1, pictures))
    values = {name: float(x[0]) for one in statistics for name, x in one(ones).items()}
    for value, low, high in bootstrap.estimates(values, statistics, pictures, 100).values():
        assert 0 <= low <= value <= high <= 1


def test_an_interval_stays_within_what_is_possible():
    drawn = np.linspace(0.5, 1, 101)
    assert bootstrap.interval(0.9, drawn, 50).high == 1
    assert bootstrap.interval(0.9, drawn, 50, math.inf).high == pytest.approx(0.9 + 0.2375)
    assert bootstrap.interval(0.1, drawn, 50).low == 0


def test_what_is_no_number_has_no_interval():
    drawn = np.array([math.nan, 0.5, 0.5])
    assert bootstrap.interval(0.5, drawn, 50) == Estimate(0.5, 0.5, 0.5)
    for value, found in ((math.nan, drawn), (math.inf, drawn), (0.5, drawn[:1])):
        got = bootstrap.interval(value, found, 50)
        assert math.isnan(got.low)
        assert math.isnan(got.high)


def test_wilsons_interval_holds_the_accuracy_and_narrows_with_pictures():
    narrow, wide = bootstrap.wilson(9000, 10_000), bootstrap.wilson(9, 10)
    assert narrow == pytest.approx((0.894, 0.906), abs=1e-3)
    assert wide == pytest.approx((0.596, 0.982), abs=1e-3)  # as tables have it


@pytest.mark.parametrize("pictures", [1, 3, 10, 49, 1000])
def test_where_all_are_right_or_none_the_number_of_pictures_makes_the_interval(pictures):
    right, wrong = accuracy_of(np.ones(pictures)), accuracy_of(np.zeros(pictures))
    assert (right.value, right.high) == (1, 1)
    assert (wrong.value, wrong.low) == (0, 0)
    assert right.low == pytest.approx(1 - wrong.high)
    assert wrong.high == pytest.approx(3.84 / (pictures + 3.84), rel=1e-3)


def test_resamples_that_reach_further_than_their_number_count():
    drawn = np.linspace(0.5, 1, 101)
    assert bootstrap.interval(1.0, drawn, 10_000).low == pytest.approx(1 - 0.2375)
    assert bootstrap.interval(0.0, 0 * drawn, 50, math.inf) == Estimate(0, 0, 0)  # a loss of 0


def test_there_is_time_for_all_resamples_of_little_data_and_some_of_much():
    assert bootstrap.affordable(5000, 20) == 1000
    assert 100 < bootstrap.affordable(40_000, 80) < 1000
    assert bootstrap.affordable(50_000, 1000) == 100
