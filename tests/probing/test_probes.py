"""Nearest neighbors and logistic regression agree with the plainest way of computing them; and
what all probes have in common."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.errors import ConfigError, DataError
from vitrail.probing import probes
from vitrail.probing.probes import fit_logistic, fit_neighbors
from vitrail.probing.ridge import fit, fit_path


def some(n=90, d=10, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    features = (
        rng.normal(2, rng.uniform(0.1, 4, d), (n, d)) + rng.normal(0, 1, (classes, d))[labels]
    )
    return features.astype(np.float32), labels


@pytest.mark.parametrize("k", [1, 5, 20, 1000])
def test_neighbors_vote_as_a_plain_loop_says(k, monkeypatch):
    monkeypatch.setattr(probes, "NEIGHBOR_CHUNK", 7)
    features, labels = some()
    asked, _ = some(seed=1)
    probe = fit_neighbors(features, labels, k=k)
    scores = probe.scores(asked).numpy()
    for row, found in zip(asked.astype(np.float64), scores, strict=True):
        lengths = np.linalg.norm(features.astype(np.float64), axis=1) * np.linalg.norm(row)
        cosines = features @ row / lengths
        votes = np.zeros(3)
        for i in np.argsort(-cosines)[:k]:
            votes[labels[i]] += np.exp(cosines[i] / 0.07)
        np.testing.assert_allclose(found, votes, rtol=1e-4)
    assert torch.equal(probe.predict(asked), torch.from_numpy(scores.argmax(1)))


def test_neighbors_look_at_directions_only():
    features, labels = some()
    probe = fit_neighbors(features, labels)
    assert torch.equal(probe.predict(features), probe.predict(1000 * features))
    assert probe.scores(np.zeros((1, 10), np.float32)).isfinite().all()


@pytest.mark.parametrize("decay", [1.0, 1e-2, 1e-4])
def test_logistic_probabilities_are_those_of_scikit_learn(decay):
    features, labels = some(n=200, classes=4)
    x = features.astype(np.float64)
    x = (x - x.mean(0)) / (x.std(0) + 1e-5)
    theirs = LogisticRegression(C=1 / (decay * len(x)), tol=1e-9, max_iter=5000).fit(x, labels)
    ours = fit_logistic(features, labels, decay=decay).scores(features).softmax(1)
    np.testing.assert_allclose(ours, theirs.predict_proba(x), atol=1e-4)


def test_logistic_regression_is_at_a_minimum():
    features, labels = some()
    weight, bias = (part.requires_grad_() for part in fit_logistic(features, labels).linear())
    x = torch.from_numpy(features).double()
    std = x.std(0, correction=0) + 1e-5
    penalty = probes.DECAY / 2 * (weight * std).square().sum()
    loss = F.cross_entropy(F.linear(x, weight, bias), torch.from_numpy(labels)) + penalty
    slopes = torch.autograd.grad(loss, (weight, bias))
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-5


def test_the_same_rows_give_the_same_classifier():
    first, second = (fit_logistic(*some()).linear() for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_logits_are_the_linear_map_whatever_the_chunks(monkeypatch):
    features, labels = some()
    probe = fit_logistic(features, labels)
    expected = F.linear(torch.from_numpy(features).double(), *probe.linear())
    monkeypatch.setattr(probes, "CHUNK", 7)
    torch.testing.assert_close(probe.scores(features), expected)
    assert torch.equal(probe.predict(features), expected.argmax(1))


@pytest.mark.parametrize("fitting", [fit_neighbors, fit_logistic])
def test_one_shot_equal_rows_and_constant_features_do_no_harm(fitting):
    features, labels = some(n=6, classes=3)
    features[:, 2] = 0.1
    features[3] = features[1]
    for count in (3, 6):
        probe = fitting(features[:count], labels[:count], classes=5)
        scores = probe.scores(features)
        assert scores.shape == (6, 5)
        assert scores.isfinite().all()
        assert int(probe.predict(features).max()) <= 2


@pytest.mark.parametrize("fitting", [fit_neighbors, fit_logistic])
def test_unusable_rows_are_refused(fitting):
    features, labels = some()
    with pytest.raises(DataError, match="all 90 labels are 0"):
        fitting(features, 0 * labels)
    with pytest.raises(DataError, match="fitted on 10"):
        fitting(features, labels).predict(features[:, 1:])
    features[5, 5] = np.nan
    with pytest.raises(DataError, match="row 5"):
        fitting(features, labels)


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="k=0"):
        fit_neighbors(*some(), k=0)
    with pytest.raises(ConfigError, match="temperature=0"):
        fit_neighbors(*some(), temperature=0)
    with pytest.raises(ConfigError, match="decay=0"):
        fit_logistic(*some(), decay=0)
    with pytest.raises(ConfigError, match="decay=inf gives weights that are not finite"):
        fit_logistic(*some(), decay=float("inf"))


def test_a_fit_that_needs_more_steps_than_it_has_is_a_classifier_all_the_same(monkeypatch):
    features, labels = some()
    monkeypatch.setattr(probes, "STEPS", 2)
    hasty = fit_logistic(features, labels, decay=1e-9)
    assert float((hasty.predict(features).numpy() == labels).mean()) > 0.6


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that is made meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for made in found if isinstance(found, tuple | list) else (found,):
            self.numbers = max(self.numbers, made.numel() if isinstance(made, torch.Tensor) else 0)
        return found


@pytest.mark.parametrize("fitting", [fit, fit_neighbors, fit_logistic])
def test_a_prediction_never_holds_the_scores_of_all_rows(fitting, monkeypatch):
    probe = fitting(*some(n=100, classes=50))
    asked, _ = some(n=300, classes=50, seed=1)
    expected = probe.scores(asked).argmax(1)
    monkeypatch.setattr(probes, "MAX_VALUES", 1000)
    with Largest() as largest:
        assert torch.equal(probe.predict(asked), expected)
    assert largest.numbers <= 300 * 10  # the rows themselves; scores would be 300 * 50
    assert torch.equal(probe.scores(asked).argmax(1), expected)


def test_leaving_one_out_never_holds_the_scores_of_many_rows_for_very_many_classes(monkeypatch):
    features, labels = some(n=300, classes=50)
    whole = fit_path(features, labels)
    monkeypatch.setattr(probes, "MAX_VALUES", 1000)
    with Largest() as largest:
        path = fit_path(features, labels)
    assert largest.numbers <= 11 * 10 * 50  # the weights of ten probes; 300 * 10 * 50 are scores
    assert path.accuracies == whole.accuracies
    assert path.errors == pytest.approx(whole.errors, rel=1e-12)
    torch.testing.assert_close(path.held_out, whole.held_out)
