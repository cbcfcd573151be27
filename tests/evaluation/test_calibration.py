import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from vitrail.evaluation import calibration
from vitrail.evaluation.calibration import (
    BINS,
    calibrate,
    confidence_at,
    cross_fitted_confidence,
    expected_calibration_error,
    fit_temperature,
    reliability,
)
from vitrail.evaluation.outcome import losses, score

LOSSES = ("softmax", "sigmoid")


def case(seed, pictures=200, classes=4, scale=3.0):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.normal(size=(pictures, classes))).astype(np.float32)
    right = rng.random(pictures) < 0.6
    labels = np.where(right, logits.argmax(axis=1), rng.integers(classes, size=pictures))
    return logits, labels


def drawn_from(logits, seed=0):
    """Labels as the softmax of the logits says."""
    chances = calibration.probabilities(logits, "softmax").cumsum(axis=1)
    return (np.random.default_rng(seed).random((len(logits), 1)) > chances).sum(axis=1)


def log_loss(logits, labels, temperature, loss) -> float:
    scaled = torch.tensor(logits).double() / temperature
    return float(losses(scaled, torch.tensor(labels), loss).mean())


@pytest.mark.parametrize("seed", range(30))
def test_the_reliability_diagram_and_its_error_are_those_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    confidence = rng.random(int(rng.integers(1, 300))) ** rng.choice([0.2, 1.0, 5.0])
    if seed % 2:  # on edges, where it matters which bin they belong to
        confidence = rng.choice(np.linspace(0, 1, BINS + 1), size=len(confidence))
    right = rng.random(len(confidence)) < confidence
    kept, promised = calibration_curve(right, confidence, pos_label=True, n_bins=BINS)
    counts = np.bincount(np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence))
    counts = counts[counts > 0]
    got = reliability(confidence, right)
    full = got.counts > 0
    np.testing.assert_array_equal(got.counts[full], counts)
    np.testing.assert_allclose(got.confidence[full], promised)
    np.testing.assert_allclose(got.accuracy[full], kept)
    assert np.isnan(got.confidence[~full]).all()
    assert np.isnan(got.accuracy[~full]).all()
    want = counts @ np.abs(kept - promised) / len(confidence)
    assert expected_calibration_error(got) == pytest.approx(want)


def test_a_confidence_on_an_edge_is_in_the_lower_bin_and_the_ends_are_inside():
    got = reliability(np.array([0.0, 0.2, np.nextafter(0.2, 1), 1.0]), np.ones(4, bool))
    assert np.flatnonzero(got.counts).tolist() == [0, 2, 3, 14]


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_brier_score_is_that_of_scikit_learn(classes, loss, monkeypatch):
    monkeypatch.setattr(calibration, "CHUNK", 64)
    logits, labels = case(classes, 50, classes)
    labels[:classes] = range(classes)
    got = calibration.brier_score(logits, labels, loss)
    truth = np.eye(classes)[labels]
    if loss == "softmax":
        chances = torch.tensor(logits).double().softmax(1).numpy()
        want = brier_score_loss(truth, chances, scale_by_half=False)
    else:  # as many problems of two classes, whose score scikit-learn halves
        chances = torch.tensor(logits).double().sigmoid().numpy()
        want = sum(brier_score_loss(truth[:, k], chances[:, k]) for k in range(classes))
    assert got == pytest.approx(want)


@pytest.mark.parametrize("loss", LOSSES)
def test_confidence_at_temperature_one_is_the_outcomes(loss):
    logits, labels = case(0)
    logits[3] = [-900, 900, 0, -math.inf]
    want = score(torch.tensor(logits), torch.tensor(labels), loss).confidence
    np.testing.assert_allclose(confidence_at(logits, 1.0, loss), want, rtol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("b", [0.02, 0.3, 1.0, 4.0])
def test_derivatives_are_those_of_the_loss(loss, b, monkeypatch):
    monkeypatch.setattr(calibration, "CHUNK", 64)
    logits, labels = case(1)
    at = torch.tensor(b, dtype=torch.float64, requires_grad=True)
    value = losses(torch.tensor(logits).double() * at, torch.tensor(labels), loss).sum()
    (slope,) = torch.autograd.grad(value, at, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, at)
    got = calibration.derivatives(logits, labels, b, loss)
    assert got == pytest.approx((slope.item(), curvature.item()), rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(12))
def test_no_other_temperature_has_a_smaller_loss(loss, seed):
    rng = np.random.default_rng(seed)
    classes = 2 if seed % 3 == 0 else int(rng.integers(3, 12))
    scale = float(10 ** rng.uniform(-2.5, 2))
    logits, labels = case(seed, int(rng.integers(5, 80)), classes, scale)
    got = fit_temperature(logits, labels, loss)
    least = log_loss(logits, labels, got, loss)
    for other in [*np.geomspace(0.01, 100, 400), got * 0.999, got * 1.001]:
        if 0.01 <= other <= 100:
            assert least <= log_loss(logits, labels, other, loss) * (1 + 1e-12)
    if 0.01 < got < 100:
        slope, curvature = calibration.derivatives(logits, labels, 1 / got, loss)
        assert abs(slope / curvature * got) < 1e-9


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 3.0, 40.0])
def test_a_known_temperature_is_found_again(temperature):
    logits = 2 * np.random.default_rng(0).normal(size=(20_000, 5))
    labels = drawn_from(logits)
    got = fit_temperature(logits * temperature, labels, "softmax")
    assert got == pytest.approx(temperature, rel=0.03)
    assert got == pytest.approx(temperature * fit_temperature(logits, labels, "softmax"), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("logits", "labels", "want"),
    [
        ([[0.0, 0.0, 0.0]] * 3, [0, 1, 2], {"softmax": 1.0, "sigmoid": 1.0}),
        ([], [], {"softmax": 1.0, "sigmoid": 1.0}),
        ([[5.0, -5.0, -5.0]], [0], {"softmax": 0.01, "sigmoid": 0.01}),
        ([[50.0, -50.0, -50.0]] * 4, [0] * 4, {"softmax": 0.01, "sigmoid": 0.01}),
        ([[5.0, -5.0, -5.0]], [1], {"softmax": 100.0, "sigmoid": 100.0}),
        ([[9e30, -9e30, 0.0]], [1], {"softmax": 100.0, "sigmoid": 100.0}),
        ([[9e30, -9e30, -9e30]], [0], {"softmax": 1.0, "sigmoid": 1.0}),
        ([[-math.inf, 2.0, 1.0]], [0], {"softmax": 1.0}),
        ([[-math.inf, 2.0, 1.0]], [1], {"softmax": 0.01}),
    ],
)
def test_where_no_temperature_is_best_it_stays_or_ends(logits, labels, want, loss):
    logits = np.array(logits, np.float32).reshape(-1, 3)
    if loss in want:
        got = fit_temperature(logits, np.array(labels, np.int64), loss)
        assert got == pytest.approx(want[loss], rel=1e-12)
    else:
        assert 0.01 <= fit_temperature(logits, np.array(labels, np.int64), loss) <= 100


def test_a_class_that_is_ruled_out_changes_nothing():
    logits, labels = case(2)
    more = np.concatenate([logits, np.full((200, 1), -np.inf, np.float32)], axis=1)
    assert fit_temperature(more, labels, "softmax") == fit_temperature(logits, labels, "softmax")
    want = calibration.brier_score(logits, labels, "softmax")
    assert calibration.brier_score(more, labels, "softmax") == pytest.approx(want)


def test_the_temperature_is_the_same_on_every_run_and_in_pieces(monkeypatch):
    logits, labels = case(3)
    whole = fit_temperature(logits, labels, "softmax")
    assert fit_temperature(logits, labels, "softmax") == whole
    monkeypatch.setattr(calibration, "CHUNK", 40)
    assert fit_temperature(logits, labels, "softmax") == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_half_is_scaled_by_what_the_other_needs(loss):
    logits, labels = case(4, 101)
    got = cross_fitted_confidence(logits, labels, loss)
    from_even = fit_temperature(logits[::2], labels[::2], loss)
    from_odd = fit_temperature(logits[1::2], labels[1::2], loss)
    assert from_even != pytest.approx(from_odd, rel=1e-3)
    np.testing.assert_array_equal(got[1::2], confidence_at(logits[1::2], from_even, loss))
    np.testing.assert_array_equal(got[::2], confidence_at(logits[::2], from_odd, loss))


def test_scaling_mends_a_model_that_is_too_sure():
    logits = 2 * np.random.default_rng(0).normal(size=(5000, 5))
    labels = drawn_from(logits)
    hot = logits * 4
    got = calibrate(
        hot, labels, confidence_at(hot, 1, "softmax"), hot.argmax(axis=1) == labels, "softmax"
    )
    assert got.temperature == pytest.approx(4, rel=0.05)
    assert got.ece > 0.2
    assert got.ece_scaled < 0.03
    assert got.counts.sum() == 5000


@pytest.mark.parametrize("pictures", [0, 1])
def test_next_to_no_pictures_are_no_trouble(pictures):
    logits, labels = case(5, pictures)
    right = logits.argmax(axis=1) == labels
    got = calibrate(logits, labels, confidence_at(logits, 1, "softmax"), right, "softmax")
    assert got.counts.sum() == pictures
    for value in (got.ece, got.brier, got.ece_scaled):
        assert math.isfinite(value) == bool(pictures)
    assert 0.01 <= got.temperature <= 100
