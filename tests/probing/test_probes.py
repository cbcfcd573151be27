"""Nearest neighbors and logistic regression equal plain implementations; what all probes share."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.errors import ConfigError, DataError
from vitrail.probing import probes
from vitrail.probing.probes import NeighborProbe, fit_logistic
from vitrail.probing.ridge import fit


def random_rows(n=90, d=10, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    centers = rng.normal(0, 1, (classes, d))
    features = rng.normal(2, rng.uniform(0.1, 4, d), (n, d)) + centers[labels]
    return features.astype(np.float32), labels


@pytest.mark.parametrize("k", [1, 5, 20, 1000])
def test_neighbors_equal_a_plain_loop(k, monkeypatch):
    monkeypatch.setattr(probes, "NEIGHBOR_CHUNK", 7)
    monkeypatch.setattr(probes, "NEIGHBORS", k)
    features, labels = random_rows()
    queries, _ = random_rows(seed=1)
    probe = NeighborProbe(features, labels)
    scores = probe.scores(queries).numpy()
    for row, got in zip(queries.astype(np.float64), scores, strict=True):
        lengths = np.linalg.norm(features.astype(np.float64), axis=1) * np.linalg.norm(row)
        cosines = features @ row / lengths
        votes = np.zeros(3)
        for i in np.argsort(-cosines)[:k]:
            votes[labels[i]] += np.exp(cosines[i] / 0.07)
        np.testing.assert_allclose(got, votes, rtol=1e-4)
    assert torch.equal(probe.predict(queries), torch.from_numpy(scores.argmax(1)))


@pytest.mark.parametrize("decay", [1.0, probes.DECAY, 1e-4])
def test_logistic_probabilities_equal_scikit_learn(decay):
    features, labels = random_rows(n=200, classes=4)
    x = features.astype(np.float64)
    x = (x - x.mean(0)) / (x.std(0) + 1e-5)
    theirs = LogisticRegression(C=1 / (decay * len(x)), tol=1e-9, max_iter=5000).fit(x, labels)
    ours = fit_logistic(features, labels, decay=decay).scores(features).softmax(1)
    np.testing.assert_allclose(ours, theirs.predict_proba(x), atol=1e-4)


def test_logistic_regression_is_deterministic_and_its_steps_are_limited(monkeypatch):
    features, labels = random_rows()
    first, second = (fit_logistic(features, labels) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)
    monkeypatch.setattr(probes, "STEPS", 2)  # without convergence it is still a classifier
    probe = fit_logistic(features, labels, decay=1e-9)
    assert float((probe.predict(features).numpy() == labels).mean()) > 0.6
    for decay, message in ((0, "decay=0"), (float("inf"), "decay=inf gives weights that are not")):
        with pytest.raises(ConfigError, match=message):
            fit_logistic(features, labels, decay=decay)


@pytest.mark.parametrize("fitting", [fit, NeighborProbe, fit_logistic])
def test_one_shot_equal_rows_and_constant_features(fitting):
    features, labels = random_rows(n=6, classes=3)
    features[:, 2] = 0.1
    features[3] = features[1]
    for count in (3, 6):
        probe = fitting(features[:count], labels[:count], classes=5)
        scores = probe.scores(features)
        assert scores.shape == (6, 5)
        assert scores.isfinite().all()
        assert int(probe.predict(features).max()) <= 2


@pytest.mark.parametrize("fitting", [fit, NeighborProbe, fit_logistic])
def test_invalid_rows(fitting, monkeypatch):
    monkeypatch.setattr(probes, "CHUNK", 7)
    features, labels = random_rows()
    with pytest.raises(DataError, match="all 90 labels are 0"):
        fitting(features, 0 * labels)
    with pytest.raises(DataError, match="fitted on 10"):
        fitting(features, labels).predict(features[:, 1:])
    probe = fitting(features, labels)
    features[40, 5] = np.inf
    for call in (lambda: fitting(features, labels), lambda: probe.predict(features)):
        with pytest.raises(DataError, match="row 40"):
            call()


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        for one in output if isinstance(output, tuple | list) else (output,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return output


@pytest.mark.parametrize("fitting", [fit, NeighborProbe, fit_logistic])
def test_prediction_never_holds_the_scores_of_all_rows(fitting, monkeypatch):
    probe = fitting(*random_rows(n=100, classes=50))
    queries, _ = random_rows(n=300, classes=50, seed=1)
    expected = probe.scores(queries).argmax(1)
    monkeypatch.setattr(probes, "MAX_VALUES", 1000)
    with LargestTensor() as largest:
        assert torch.equal(probe.predict(queries), expected)
    assert largest.elements <= 300 * 10  # the rows themselves; scores would be 300 * 50
    assert torch.equal(probe.scores(queries).argmax(1), expected)
