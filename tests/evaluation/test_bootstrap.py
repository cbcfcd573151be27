import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score

from vitrail.evaluation import bootstrap, metrics
from vitrail.evaluation.calibration import expected_calibration_error, reliability_bins
from vitrail.evaluation.results import Estimate

RNG = np.random.default_rng(0)
N = 80
CONFIDENCE = RNG.random(N).round(1)
CONFIDENCE[7] = math.nan
CORRECT = RNG.random(N) < 0.7
LABELS = RNG.integers(6, size=N) % 5  # class 0 twice as often, class 5 never
SCORES = RNG.normal(size=(N, 4)).round(1)
TRUTH = SCORES + RNG.normal(size=(N, 4)) > 1
TRUTH[:, 3] = False
DRAWN = next(bootstrap.resample_weights(N, 30))


def repeated(times, *columns):
    """The resample itself."""
    return (np.repeat(column, times.astype(int), axis=0) for column in columns)


def accuracy_of(correct):
    return bootstrap.estimate(
        {"accuracy": float(correct.mean())}, [bootstrap.means({"accuracy": correct})], len(correct)
    )["accuracy"]


def test_resamples_have_the_size_of_the_data():
    assert DRAWN.shape == (30, N)
    assert (DRAWN.sum(axis=1) == N).all()
    assert (DRAWN == 0).mean() == pytest.approx(1 / math.e, abs=0.03)


def test_draws_are_deterministic_and_independent_of_blocks(monkeypatch):
    whole = np.concatenate(list(bootstrap.resample_weights(50, 20)))
    monkeypatch.setattr(bootstrap, "CELLS", 350)
    parts = list(bootstrap.resample_weights(50, 20))
    assert [len(part) for part in parts] == [7, 7, 6]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_means_equal_those_of_the_resample():
    got = bootstrap.means({"a": CONFIDENCE, "b": CORRECT})(DRAWN)
    assert np.isnan(got["a"]).all()  # one value is NaN
    want = [next(repeated(times, CORRECT)).mean() for times in DRAWN]
    np.testing.assert_allclose(got["b"], want)


def test_balanced_accuracy_equals_that_of_the_resample():
    predicted = np.where(CORRECT, LABELS, 4 - LABELS + (LABELS == 2))
    got = bootstrap.balanced_accuracy(LABELS, CORRECT, 6)(DRAWN)["balanced_accuracy"]
    want = [balanced_accuracy_score(LABELS, predicted, sample_weight=times) for times in DRAWN]
    np.testing.assert_allclose(got, want)


def test_ece_equals_that_of_the_resample():
    got = bootstrap.expected_calibration_error(CONFIDENCE, CORRECT)(DRAWN)["ece"]
    for value, times in zip(got, DRAWN, strict=True):
        confidence, correct = repeated(times, CONFIDENCE, CORRECT)
        known = np.isfinite(confidence)
        want = expected_calibration_error(*reliability_bins(confidence[known], correct[known]))
        assert value == pytest.approx(want)


@pytest.mark.parametrize("coverage", [0.01, 0.5, 0.8, 1.0])
def test_selective_accuracy_equals_that_of_the_resample(coverage):
    got = bootstrap.accuracy_at_80(CONFIDENCE, CORRECT, coverage)(DRAWN)["accuracy_at_80"]
    for value, times in zip(got, DRAWN, strict=True):
        want = metrics.selective_accuracy(*repeated(times, CONFIDENCE, CORRECT), coverage)
        assert value == pytest.approx(want)


def test_mean_average_precision_equals_that_of_the_resample():
    got = bootstrap.mean_average_precision(SCORES, TRUTH)(DRAWN)["mean_average_precision"]
    for value, times in zip(got, DRAWN, strict=True):
        want = average_precision_score(TRUTH[:, :3], SCORES[:, :3], sample_weight=times)
        assert value == pytest.approx(want)


def test_class_without_drawn_positives_is_left_out():
    truth = np.array([[True, True], [False, False], [False, True]])
    scores = np.array([[1.0, 0.0], [2.0, 1.0], [3.0, 2.0]])
    statistic = bootstrap.mean_average_precision(scores, truth)
    assert statistic(np.array([[0.0, 2, 1]]))["mean_average_precision"].tolist() == [1]
    assert np.isnan(statistic(np.array([[0.0, 3, 0]]))["mean_average_precision"]).all()


def test_f1_equals_that_of_the_resample(monkeypatch):
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


def test_accuracy_interval_is_close_to_the_binomial():
    for samples, share in ((200, 0.5), (1000, 0.9), (1000, 0.2)):
        correct = np.arange(samples) < share * samples
        got = accuracy_of(correct)
        drawn_shares = np.random.default_rng(1).binomial(samples, share, size=100_000) / samples
        low, high = np.quantile(drawn_shares, [0.025, 0.975])
        assert got.value == share
        assert (got.low, got.high) == pytest.approx((low, high), abs=0.15 * (high - low))


def test_interval_halves_with_four_times_the_images():
    widths = [np.ptp(accuracy_of(np.arange(n) % 3 > 0)[1:]) for n in (200, 800, 3200)]
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.15)
    assert widths[1] / widths[2] == pytest.approx(2, rel=0.15)


def test_coverage_of_the_interval_is_close_to_95_percent():
    correct = np.random.default_rng(3).random((150, 400)) < 0.7
    columns = {str(k): correct[:, k] for k in range(400)}
    values = {name: float(column.mean()) for name, column in columns.items()}
    intervals = bootstrap.estimate(values, [bootstrap.means(columns)], 150).values()
    assert np.mean([low <= 0.7 <= high for _, low, high in intervals]) == pytest.approx(
        0.94, abs=0.03
    )


@pytest.mark.parametrize("seed", range(10))
def test_interval_contains_the_value(seed):
    """Also for the ECE, which grows in every resample."""
    rng = np.random.default_rng(seed)
    samples = int(rng.integers(1, 200))
    confidence = rng.random(samples)
    correct = rng.random(samples) < confidence
    statistics = [
        bootstrap.expected_calibration_error(confidence, correct),
        bootstrap.accuracy_at_80(confidence, correct),
    ]
    ones = np.ones((1, samples))
    values = {name: float(x[0]) for one in statistics for name, x in one(ones).items()}
    for value, low, high in bootstrap.estimate(values, statistics, samples, 100).values():
        assert 0 <= low <= value <= high <= 1


def test_interval_is_clipped_to_the_possible_range():
    drawn = np.linspace(0.5, 1, 101)
    assert bootstrap.interval(0.9, drawn, 50).high == 1
    assert bootstrap.interval(0.9, drawn, 50, math.inf).high == pytest.approx(0.9 + 0.2375)
    assert bootstrap.interval(0.1, drawn, 50).low == 0


def test_nan_has_no_interval():
    drawn = np.array([math.nan, 0.5, 0.5])
    assert bootstrap.interval(0.5, drawn, 50) == Estimate(0.5, 0.5, 0.5)
    for value, drawn_shares in ((math.nan, drawn), (math.inf, drawn), (0.5, drawn[:1])):
        got = bootstrap.interval(value, drawn_shares, 50)
        assert math.isnan(got.low)
        assert math.isnan(got.high)


def test_wilson_interval_equals_tables():
    narrow, wide = bootstrap.wilson_interval(9000, 10_000), bootstrap.wilson_interval(9, 10)
    assert narrow == pytest.approx((0.894, 0.906), abs=1e-3)
    assert wide == pytest.approx((0.596, 0.982), abs=1e-3)


@pytest.mark.parametrize("samples", [1, 3, 10, 49, 1000])
def test_perfect_accuracy_has_the_wilson_interval(samples):
    correct, wrong = accuracy_of(np.ones(samples)), accuracy_of(np.zeros(samples))
    assert (correct.value, correct.high) == (1, 1)
    assert (wrong.value, wrong.low) == (0, 0)
    assert correct.low == pytest.approx(1 - wrong.high)
    assert wrong.high == pytest.approx(3.84 / (samples + 3.84), rel=1e-3)


def test_bootstrap_wider_than_wilson_is_kept():
    drawn = np.linspace(0.5, 1, 101)
    assert bootstrap.interval(1.0, drawn, 10_000).low == pytest.approx(1 - 0.2375)
    assert bootstrap.interval(0.0, 0 * drawn, 50, math.inf) == Estimate(0, 0, 0)  # a loss of 0


def test_number_of_resamples_depends_on_the_data():
    assert bootstrap.num_resamples(5000, 20) == 1000
    assert 100 < bootstrap.num_resamples(40_000, 80) < 1000
    assert bootstrap.num_resamples(50_000, 1000) == 100
