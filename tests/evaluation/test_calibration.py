import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from vitrail.evaluation import calibration
from vitrail.evaluation.calibration import BINS, calibration_metrics, fit_temperature, probabilities
from vitrail.evaluation.metrics import score_samples

LOSSES = ("softmax", "sigmoid")


def case(seed, samples=200, classes=4, scale=3.0):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.normal(size=(samples, classes))).astype(np.float32)
    correct = rng.random(samples) < 0.6
    labels = np.where(correct, logits.argmax(axis=1), rng.integers(classes, size=samples))
    return logits, labels


def drawn_from(logits, seed=0):
    """Labels drawn from the softmax of the logits."""
    probabilities = calibration.probabilities(logits, "softmax").cumsum(axis=1)
    return (np.random.default_rng(seed).random((len(logits), 1)) > probabilities).sum(axis=1)


def log_loss(logits, labels, temperature, loss) -> float:
    scaled = torch.tensor(logits).double() / temperature
    return float(score_samples(scaled, torch.tensor(labels), loss).loss.mean())


@pytest.mark.parametrize("seed", range(12))
def test_reliability_bins_and_ece_equal_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    confidence = rng.random(int(rng.integers(1, 300))) ** rng.choice([0.2, 1.0, 5.0])
    if seed % 2:  # on bin edges
        confidence = rng.choice(np.linspace(0, 1, BINS + 1), size=len(confidence))
    correct = rng.random(len(confidence)) < confidence
    accuracy, mean_confidence = calibration_curve(correct, confidence, pos_label=True, n_bins=BINS)
    counts = np.bincount(np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence))
    counts = counts[counts > 0]
    bins = calibration.reliability_bins(confidence, correct)
    full = bins[0] > 0
    np.testing.assert_array_equal(bins[0][full], counts)
    np.testing.assert_allclose(bins[1][full], mean_confidence)
    np.testing.assert_allclose(bins[2][full], accuracy)
    assert np.isnan(bins[1][~full]).all()
    assert np.isnan(bins[2][~full]).all()
    ece = counts @ np.abs(accuracy - mean_confidence) / len(confidence)
    assert calibration.expected_calibration_error(*bins) == pytest.approx(ece)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("loss", LOSSES)
def test_brier_score_equals_scikit_learn(classes, loss, monkeypatch):
    monkeypatch.setattr(calibration, "CHUNK", 64)
    logits, labels = case(classes, 50, classes)
    labels[:classes] = range(classes)
    got = calibration.brier_score(logits, labels, loss)
    truth = np.eye(classes)[labels]
    if loss == "softmax":
        probabilities = torch.tensor(logits).double().softmax(1).numpy()
        want = brier_score_loss(truth, probabilities, scale_by_half=False)
    else:  # one binary problem per class
        probabilities = torch.tensor(logits).double().sigmoid().numpy()
        want = sum(brier_score_loss(truth[:, k], probabilities[:, k]) for k in range(classes))
    assert got == pytest.approx(want)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(12))
def test_temperature_minimizes_the_loss(loss, seed):
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
def test_known_temperature_is_recovered(temperature):
    logits = 2 * np.random.default_rng(0).normal(size=(20_000, 5))
    labels = drawn_from(logits)
    got = fit_temperature(logits * temperature, labels, "softmax")
    assert got == pytest.approx(temperature, rel=0.03)
    assert got == pytest.approx(temperature * fit_temperature(logits, labels, "softmax"), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("logits", "labels", "want"),
    [
        ([[0.0, 0.0, 0.0]] * 3, [0, 1, 2], 1.0),
        ([], [], 1.0),
        ([[5.0, -5.0, -5.0]], [0], 0.01),
        ([[50.0, -50.0, -50.0]] * 4, [0] * 4, 0.01),
        ([[5.0, -5.0, -5.0]], [1], 100.0),
        ([[9e30, -9e30, 0.0]], [1], 100.0),
        ([[9e30, -9e30, -9e30]], [0], 1.0),
        ([[-math.inf, 2.0, 1.0]], [0], 1.0),
        ([[-math.inf, 2.0, 1.0]], [1], 0.01),
    ],
)
def test_degenerate_logits_give_one_or_a_bound(logits, labels, want, loss):
    logits = np.array(logits, np.float32).reshape(-1, 3)
    got = fit_temperature(logits, np.array(labels, np.int64), loss)
    if loss == "sigmoid" and np.isinf(logits).any():
        assert 0.01 <= got <= 100
    else:
        assert got == pytest.approx(want, rel=1e-12)


def test_excluded_class_changes_nothing():
    logits, labels = case(2)
    more = np.concatenate([logits, np.full((200, 1), -np.inf, np.float32)], axis=1)
    assert fit_temperature(more, labels, "softmax") == fit_temperature(logits, labels, "softmax")
    want = calibration.brier_score(logits, labels, "softmax")
    assert calibration.brier_score(more, labels, "softmax") == pytest.approx(want)


def test_temperature_scaling_corrects_overconfidence():
    logits = 2 * np.random.default_rng(0).normal(size=(5000, 5))
    labels, hot = drawn_from(logits), 4 * logits
    correct = hot.argmax(axis=1) == labels
    confidence = probabilities(hot, "softmax").max(axis=1)
    got = calibration_metrics(hot, labels, confidence, correct, "softmax")
    assert got.temperature == pytest.approx(4, rel=0.05)
    assert got.ece > 0.2
    assert got.ece_scaled < 0.03
    assert got.counts.sum() == 5000
