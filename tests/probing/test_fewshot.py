"""The few-shot protocol agrees with its authors' code."""

import numpy as np
import pytest
import torch

from vitrail.errors import ConfigError, DataError
from vitrail.probing.fewshot import fewshot
from vitrail.probing.ridge import L2_GRID, fit_path


@pytest.fixture(params=["wide", "tall"])
def case(golden, request):
    """What the authors' code gives for fewer, and for more rows than features."""
    return np.load(golden / f"fewshot-{request.param}.npz")


def rows(case):
    return [case[name] for name in ("x_train", "y_train", "x_test", "y_test")]


def right(case, l2):
    """How many of the test rows the authors get right; they write it as a share in float32."""
    return round(float(case[f"accuracy_{l2:g}"]) * len(case["y_test"]))


def relative(ours, theirs):
    return np.abs(ours.numpy() - theirs).max() / np.abs(theirs).max()


def test_weights_and_accuracy_are_the_authors(case):
    assert len(case["l2"])
    for l2 in case["l2"].tolist():
        result = fewshot(*rows(case), l2=l2)
        theirs = case[f"weights_{l2:g}"]
        assert relative(result.weights, theirs) < 1e-10
        np.testing.assert_allclose(result.weights, theirs, rtol=1e-6)
        assert result.accuracy == right(case, l2) / len(case["y_test"])
        assert result.l2 == l2


def test_the_path_has_the_authors_weights_and_accuracies(case):
    x, y, x_test, y_test = rows(case)
    path = fit_path(x, y, int(case["classes"]), case["l2"].tolist())
    for probe in path.probes:
        np.testing.assert_allclose(probe.weights, case[f"weights_{probe.l2:g}"], rtol=1e-6)
        assert int((probe.predict(x_test).numpy() == y_test).sum()) == right(case, probe.l2)


def test_the_usual_l2_is_the_authors(case):
    np.testing.assert_allclose(fewshot(*rows(case)).weights, case["weights_1024"], rtol=1e-6)


def test_tensors_and_arrays_give_the_same(case):
    result = fewshot(*rows(case))
    other = fewshot(*map(torch.from_numpy, rows(case)))
    assert torch.equal(result.weights, other.weights)
    assert torch.equal(result.predicted, other.predicted)
    assert result.accuracy == other.accuracy


def test_of_several_l2_the_best_left_out_is_taken(case):
    path = fit_path(*rows(case)[:2])
    result = fewshot(*rows(case), l2=L2_GRID)
    assert result.l2 == path.probes[path.best].l2
    assert torch.equal(result.weights, path.probes[path.best].weights)


def test_unusable_test_rows_are_refused(case):
    x, y, x_test, y_test = rows(case)
    with pytest.raises(DataError, match="no test rows"):
        fewshot(x, y, x_test[:0], y_test[:0])
    with pytest.raises(DataError, match="is not among"):
        fewshot(x, y, x_test, y_test + 1)
    with pytest.raises(DataError, match="features; the probe"):
        fewshot(x, y, x_test[:, 1:], y_test)
    with pytest.raises(ConfigError, match="l2="):
        fewshot(x, y, x_test, y_test, l2=0)


def test_the_example_is_true():
    labels = torch.arange(40) % 4
    features = torch.eye(4)[labels] + 0.1 * torch.randn(40, 4)
    result = fewshot(features[:20], labels[:20], features[20:], labels[20:])
    assert result.accuracy == 1.0
    assert result.weights.shape == (5, 4)
