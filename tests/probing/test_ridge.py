"""The closed-form probe, its path, and what it says of rows it has not seen."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import RidgeClassifier, RidgeClassifierCV

from vitrail.errors import ConfigError, DataError
from vitrail.probing import equations, rows
from vitrail.probing.ridge import BIAS, PATH, USUAL_L2, fit, fit_moments, fit_path

SHAPES = {"few": (20, 30), "square": (24, 24), "many": (60, 12)}
LIMITS = {"atol": 1e-9, "rtol": 1e-9}


def some(n=60, d=12, classes=4, seed=0):
    """Features whose classes can be told apart, but not easily, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centers = torch.randn(classes, d, generator=generator)
    features = 3 + 2 * torch.randn(n, d, generator=generator) + centers[labels]
    return features, labels


def whitened(features):
    """X as the protocol writes it, the constant included."""
    x = features.double()
    x = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-5)
    return F.pad(x, (0, 1), value=BIAS)


def plain(x, y, l2):
    """The least squares of the docstring, solved without any thought."""
    return torch.linalg.solve(x.T @ x + l2 * torch.eye(x.shape[1]).double(), x.T @ y)


def targets(labels, classes):
    return 2 * F.one_hot(labels, classes).double() - 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("l2", [0.25, 1024])
def test_the_weights_solve_the_whole_system(shape, l2):
    features, labels = some(*shape)
    expected = plain(whitened(features), targets(labels, 4), l2)
    torch.testing.assert_close(fit(features, labels, l2=l2).weights, expected, **LIMITS)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_path_equals_separate_solves(shape):
    features, labels = some(*shape)
    path = fit_path(features, labels)
    assert [probe.l2 for probe in path.probes] == list(PATH)
    for probe in path.probes:
        alone = fit(features, labels, l2=probe.l2)
        torch.testing.assert_close(probe.weights, alone.weights, **LIMITS)
        assert torch.equal(probe.mean, alone.mean)
        assert torch.equal(probe.std, alone.std)


def test_the_usual_path_has_ten_values_and_the_usual_one():
    assert len(PATH) == 10
    assert USUAL_L2 in PATH


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_leaving_one_out_equals_fitting_without_it(shape):
    features, labels = some(*shape)
    x, y = whitened(features), targets(labels, 4)
    path = fit_path(features, labels)
    for l2, error, accuracy in zip(PATH, path.errors, path.accuracies, strict=True):
        unseen = torch.stack(
            [x[i] @ plain(without(x, i), without(y, i), l2) for i in range(len(x))]
        )
        assert error == pytest.approx(float((unseen - y).square().mean()), rel=1e-9)
        assert accuracy == float((unseen.argmax(1) == labels).double().mean())
        if l2 == path.probes[path.best].l2:
            torch.testing.assert_close(path.held_out, unseen, **LIMITS)


def without(rows, i):
    return torch.cat([rows[:i], rows[i + 1 :]])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_weights_and_leave_one_out_are_those_of_scikit_learn(shape):
    features, labels = some(*shape)
    x, alphas = whitened(features).numpy(), np.array(PATH)
    theirs = RidgeClassifierCV(alphas, fit_intercept=False, store_cv_results=True)
    errors = theirs.fit(x, labels.numpy()).cv_results_.mean((0, 1))
    path = fit_path(features, labels)
    np.testing.assert_allclose(path.errors, errors, rtol=1e-6)
    for probe in path.probes:
        ridge = RidgeClassifier(alpha=probe.l2, fit_intercept=False, solver="cholesky")
        weights = ridge.fit(x, labels.numpy()).coef_.T
        np.testing.assert_allclose(probe.weights, weights, rtol=1e-6, atol=1e-9)


def test_the_best_is_the_least_wrong_and_of_equal_ones_the_one_with_the_largest_l2():
    path = fit_path(*some(), l2=(1.0, 2.0, 3.0, 4.0))
    for errors, best in [((1.0, 0.4, 0.5, 0.6), 1), ((0.9, 0.5, 0.5, 0.6), 2)]:
        made = type(path)(path.probes, errors, (0.9, 0.1, 0.1, 0.1), path.rows, path.spectrum)
        assert made.best == best


def test_one_shot_works():
    features, _ = some(n=4, d=6)
    path = fit_path(features, torch.arange(4))
    assert path.best == int(np.argmin(path.errors))
    assert path.held_out.shape == (4, 4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_size_of_chunks_does_not_matter(shape, monkeypatch):
    features, labels = some(*shape)
    expected = fit_path(features, labels)
    monkeypatch.setattr(rows, "CHUNK", 7)
    monkeypatch.setattr(equations, "BLOCK", 5)
    path = fit_path(features, labels)
    assert path.accuracies == expected.accuracies
    assert path.errors == pytest.approx(expected.errors, rel=1e-12)
    torch.testing.assert_close(path.held_out, expected.held_out, **LIMITS)
    for probe, other in zip(path.probes, expected.probes, strict=True):
        torch.testing.assert_close(probe.weights, other.weights, **LIMITS)
        torch.testing.assert_close(probe.scores(features), other.scores(features), **LIMITS)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sums_are_enough_for_the_same_probe(shape):
    features, labels = some(*shape)
    x = features.double()
    sums = torch.zeros(5, x.shape[1]).double().index_add(0, labels, x)  # the fifth has no rows
    probe = fit_moments(torch.bincount(labels, minlength=5), sums, x.T @ x, 16.0)
    expected = fit(features, labels, 5, 16.0)
    torch.testing.assert_close(probe.weights, expected.weights, **LIMITS)
    torch.testing.assert_close(probe.mean, expected.mean, **LIMITS)
    torch.testing.assert_close(probe.std, expected.std, **LIMITS)


def test_constant_features_survive_in_sums():
    features, labels = some()
    x = features.double()
    x[:, :4] = torch.tensor([0.1, 1.1, 11.1, 77.7]).double()  # squares that do not quite cancel
    sums = torch.zeros(4, x.shape[1]).double().index_add(0, labels, x)
    probe = fit_moments(torch.bincount(labels), sums, x.T @ x)
    torch.testing.assert_close(probe.scores(x), fit(x, labels).scores(x), atol=1e-6, rtol=0)


def test_the_linear_map_gives_the_scores():
    features, labels = some()
    probe = fit(features, labels)
    weight, bias = probe.linear()
    scores = probe.scores(features)
    torch.testing.assert_close(F.linear(features.double(), weight, bias), scores, **LIMITS)
    torch.testing.assert_close(whitened(features) @ probe.weights, scores, **LIMITS)
    assert torch.equal(probe.predict(features), scores.argmax(1))
    assert probe.scores(features[:0]).shape == (0, 4)


def test_arrays_maps_of_files_and_other_floats_are_read_alike(tmp_path):
    features, labels = some()
    features = features.half().float()  # so that every type holds the same numbers
    expected = fit(features, labels).weights
    np.save(tmp_path / "features.npy", features.numpy())
    for given in [
        np.load(tmp_path / "features.npy", mmap_mode="r"),
        features.numpy().astype(np.float16),
        features.double(),
    ]:
        assert torch.equal(fit(given, labels.numpy()).weights, expected)
    turned = features.T.contiguous().T.requires_grad_()  # summed in another order
    torch.testing.assert_close(fit(turned, labels.numpy()).weights, expected, **LIMITS)
    wide = features.double()
    before = wide.clone()
    fit_path(wide, labels.int())
    assert torch.equal(wide, before), "the caller's features were changed"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_constant_features_and_equal_rows_do_no_harm(shape):
    features, labels = some(*shape)
    features[:, 3] = 0.1
    features[1] = features[0]  # of another class
    path = fit_path(features, labels, l2=(1e-16, 1.0))
    assert all(probe.weights.isfinite().all() for probe in path.probes)
    assert path.held_out.isfinite().all()
    assert np.isfinite(path.errors).all()
    assert path.probes[1].weights[3].abs().max() < 1e-6
    torch.testing.assert_close(path.probes[1].weights, fit(features, labels, l2=1.0).weights)


def test_an_l2_below_rounding_still_has_an_answer():
    features, labels = some()
    features = torch.cat([features, features], dim=1)  # singular without a penalty
    scores = fit(features, labels, l2=1e-14).scores(features)
    torch.testing.assert_close(scores, fit(features, labels, l2=1e-6).scores(features))


def test_a_class_without_examples_is_never_predicted():
    features, labels = some()
    probe = fit(features, labels, classes=6)
    assert probe.weights.shape == (13, 6)
    assert int(probe.predict(features).max()) <= 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.full((60, 12), torch.nan)}, "row 0 are not finite"),
        ({"features": torch.ones(60)}, "shape"),
        ({"features": torch.ones(60, 12, dtype=torch.long)}, "floats are needed"),
        ({"labels": torch.arange(59) % 4}, "60 rows of features and labels of shape"),
        ({"labels": torch.full((60,), 2)}, "all 60 labels are 2"),
        ({"labels": torch.arange(60) % 4 - 1}, "label -1 is negative"),
        ({"labels": torch.rand(60)}, "whole numbers"),
        ({"classes": 3}, "label 3 is not among 3 classes"),
        ({"features": torch.ones(0, 12), "labels": torch.arange(0)}, "no rows"),
    ],
)
def test_unusable_data_is_refused_in_one_line(change, message):
    features, labels = some()
    given = {"features": features, "labels": labels} | change
    for fitting in (fit, fit_path):
        with pytest.raises(DataError, match=message) as caught:
            fitting(**given)
        assert "\n" not in str(caught.value)


def test_the_row_that_is_not_finite_is_named(monkeypatch):
    monkeypatch.setattr(rows, "CHUNK", 7)
    features, labels = some()
    probe = fit(features, labels)
    features[40, 2] = torch.inf
    with pytest.raises(DataError, match="row 40"):
        fit(features, labels)
    with pytest.raises(DataError, match="row 40"):
        probe.predict(features)


@pytest.mark.parametrize("l2", [0, -1.0, float("nan"), float("inf")])
def test_a_penalty_must_be_above_zero(l2):
    features, labels = some()
    for call in (
        lambda: fit(features, labels, l2=l2),
        lambda: fit_path(features, labels, l2=[1.0, l2]),
        lambda: fit_moments(torch.ones(2), torch.ones(2, 3), torch.eye(3), l2),
    ):
        with pytest.raises(ConfigError, match="l2="):
            call()


def test_a_path_needs_values():
    with pytest.raises(ConfigError, match="no l2"):
        fit_path(*some(), l2=())


def test_sums_that_do_not_fit_are_refused():
    good = (torch.ones(3), torch.ones(3, 2), torch.eye(2))
    with pytest.raises(DataError, match="differ"):
        fit_moments(good[0], torch.ones(2, 2), good[2])
    with pytest.raises(DataError, match="not finite"):
        fit_moments(good[0], good[1], good[2] * torch.nan)
    with pytest.raises(DataError, match="two classes"):
        fit_moments(torch.tensor([5, 0, 0]), good[1], good[2])


def test_features_of_another_width_are_refused():
    probe = fit(*some())
    with pytest.raises(DataError, match="13 features; the probe was fitted on 12"):
        probe.scores(torch.ones(2, 13))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rounding_does_not_turn_a_sign(shape):
    features, labels = some(*shape)
    features = torch.cat([features, features], dim=1)  # many eigenvalues are zero
    spectrum = fit_path(features, labels).spectrum
    assert (spectrum.values >= 0).all()
    x = whitened(features)[:, :-1]
    tiny = torch.tensor([1e-18], dtype=torch.float64)
    assert (spectrum.freedom(slice(0, len(x)), x, tiny) > 0).all()
