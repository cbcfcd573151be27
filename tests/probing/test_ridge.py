"""The closed-form probe, its path of l2, leave-one-out, and calibration."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.calibration import fit_temperature
from vitrail.probing import probes, ridge
from vitrail.probing.ridge import BIAS, DEFAULT_L2, L2_GRID, SCALES, fit, fit_moments, fit_path

SHAPES = {"few": (20, 30), "square": (24, 24), "many": (60, 12)}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
LIMITS = {"atol": 1e-9, "rtol": 1e-9}


def random_rows(n=60, d=12, classes=4, seed=0):
    """Features of classes that overlap, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centers = torch.randn(classes, d, generator=generator)
    features = 3 + 2 * torch.randn(n, d, generator=generator) + centers[labels]
    return features, labels


def whitened(features):
    """X as the protocol defines it, with the constant."""
    x = features.double()
    x = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-5)
    return F.pad(x, (0, 1), value=BIAS)


def solve(x, y, l2):
    """The least squares of the docstring, solved directly."""
    return torch.linalg.solve(x.T @ x + l2 * torch.eye(x.shape[1]).double(), x.T @ y)


def targets(labels, classes=4):
    return 2 * F.one_hot(labels, classes).double() - 1


def moments(x, labels, classes):
    sums = torch.zeros(classes, x.shape[1]).double().index_add(0, labels, x)
    return torch.bincount(labels, minlength=classes), sums, x.T @ x


@every_shape
def test_weights_and_leave_one_out_equal_direct_solutions(shape):
    features, labels = random_rows(*shape)
    x, y = whitened(features), targets(labels)
    path = fit_path(features, labels)
    assert [probe.l2 for probe in path.probes] == list(L2_GRID)
    assert DEFAULT_L2 in L2_GRID
    for probe, accuracy in zip(path.probes, path.accuracies, strict=True):
        expected = solve(x, y, probe.l2)
        torch.testing.assert_close(probe.weights, expected, **LIMITS)
        torch.testing.assert_close(fit(features, labels, l2=probe.l2).weights, expected, **LIMITS)
        others = [torch.arange(len(x)) != i for i in range(len(x))]
        unseen = torch.stack(
            [row @ solve(x[o], y[o], probe.l2) for row, o in zip(x, others, strict=True)]
        )
        assert accuracy == float((unseen.argmax(1) == labels).double().mean())
        alone = fit_path(features, labels, l2=(probe.l2,))
        torch.testing.assert_close(alone.held_out, unseen, **LIMITS)
        if probe.l2 == path.probes[path.best].l2:
            torch.testing.assert_close(path.held_out, unseen, **LIMITS)


def balanced(path):
    """The leave-one-out scores with the bias of the probe that was fitted to all rows."""
    y = targets(path.rows.labels, path.rows.classes)
    l2, n = path.probes[path.best].l2, len(y)
    without = BIAS**2 * (y.sum(0) - y) / (BIAS**2 * (n - 1) + l2)
    return path.held_out - without + BIAS * path.probes[path.best].weights[-1]


@every_shape
def test_unexplained_is_the_error_after_the_best_scale(shape):
    features, labels = random_rows(*shape)
    for l2 in (1.0, 1024.0):
        path = fit_path(features, labels, l2=(l2,))
        y, scores = (x - x.mean(1, keepdim=True) for x in (targets(labels), balanced(path)))
        factor = ((y * scores).sum() / scores.square().sum()).clamp_min(0)
        expected = (factor * scores - y).square().sum() / y.square().sum()
        assert path.unexplained == pytest.approx((float(expected),), rel=1e-9)


@pytest.mark.parametrize(
    ("unexplained", "l2", "best"),
    [
        ((0.50, 0.50, 0.50, 0.50), (64.0, 256.0, 1024.0, 4096.0), 1024),  # within noise
        ((0.50, 0.496, 0.50, 0.50), (64.0, 256.0, 1024.0, 4096.0), 1024),
        ((0.50, 0.50), (64.0, 256.0), 256),
        ((0.50, 0.50), (512.0, 2048.0), 2048),  # of equal ones, the largest
        ((0.50, 0.45, 0.50, 0.50), (64.0, 256.0, 1024.0, 4096.0), 256),  # clear evidence
        ((0.30, 0.40, 0.50, 0.60), (64.0, 256.0, 1024.0, 4096.0), 64),
        ((0.50, 0.50, 0.50, 0.40), (64.0, 256.0, 1024.0, 4096.0), 4096),
    ],
)
def test_best_leaves_1024_only_on_clear_evidence(unexplained, l2, best):
    path = replace(fit_path(*random_rows(), l2=l2), unexplained=unexplained)
    assert path.probes[path.best].l2 == best


def test_one_shot_keeps_1024():
    """Without its only example, a class cannot be predicted: there is no evidence."""
    features, _ = random_rows(n=4, d=6)
    path = fit_path(features, torch.arange(4))
    assert path.unexplained == (1.0,) * len(L2_GRID)
    assert (path.probes[path.best].l2, path.scale) == (DEFAULT_L2, ridge.DEFAULT_SCALE)
    assert path.held_out.shape == (4, 4)


@every_shape
def test_chunk_size_does_not_matter(shape, monkeypatch):
    features, labels = random_rows(*shape)
    expected = fit_path(features, labels)
    monkeypatch.setattr(probes, "CHUNK", 7)
    monkeypatch.setattr(ridge, "BLOCK", 5)
    path = fit_path(features, labels)
    assert path.accuracies == expected.accuracies
    assert path.unexplained == pytest.approx(expected.unexplained, rel=1e-12)
    torch.testing.assert_close(path.held_out, expected.held_out, **LIMITS)
    for probe, other in zip(path.probes, expected.probes, strict=True):
        torch.testing.assert_close(probe.weights, other.weights, **LIMITS)
        torch.testing.assert_close(probe.scores(features), other.scores(features), **LIMITS)


@every_shape
def test_moments_give_the_same_probe(shape):
    features, labels = random_rows(*shape)
    probe = fit_moments(*moments(features.double(), labels, 5), 16.0)  # the fifth has no rows
    expected = fit(features, labels, 5, 16.0)
    for name in ("weights", "mean", "std"):
        torch.testing.assert_close(getattr(probe, name), getattr(expected, name), **LIMITS)
    x = features.double()
    x[:, :4] = torch.tensor([0.1, 1.1, 11.1, 77.7]).double()  # squares that do not quite cancel
    probe = fit_moments(*moments(x, labels, 4))
    torch.testing.assert_close(probe.scores(x), fit(x, labels).scores(x), atol=1e-6, rtol=0)


def test_linear_map_gives_the_scores():
    features, labels = random_rows()
    path = fit_path(features, labels)
    for probe, scale in ((fit(features, labels), 1.0), (path.probes[path.best], path.scale)):
        scores = probe.scores(features)
        logits = F.linear(features.double(), *probe.linear(scale))
        torch.testing.assert_close(logits, scale * scores, **LIMITS)
        torch.testing.assert_close(whitened(features) @ probe.weights, scores, **LIMITS)
        assert torch.equal(probe.predict(features), scores.argmax(1))
        assert probe.scores(features[:0]).shape == (0, 4)


def test_arrays_memory_maps_and_other_floats_give_the_same(tmp_path):
    features, labels = random_rows()
    features = features.half().float()  # so that every type holds the same numbers
    expected = fit(features, labels).weights
    np.save(tmp_path / "features.npy", features.numpy())
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    for same in (mapped, features.numpy().astype(np.float16), features.double()):
        assert torch.equal(fit(same, labels.numpy()).weights, expected)
    transposed = features.T.contiguous().T.requires_grad_()  # summed in another order
    torch.testing.assert_close(fit(transposed, labels.numpy()).weights, expected, **LIMITS)
    doubles = features.double()
    before = doubles.clone()
    fit_path(doubles, labels.int())
    assert torch.equal(doubles, before), "the caller's features were changed"


@every_shape
def test_constant_features_equal_rows_and_tiny_penalties(shape):
    features, labels = random_rows()
    twice = torch.cat([features, features], dim=1)  # singular without a penalty
    scores = fit(twice, labels, l2=1e-14).scores(twice)
    torch.testing.assert_close(scores, fit(twice, labels, l2=1e-6).scores(twice))
    features, labels = random_rows(*shape)
    features[:, 3] = 0.1
    features[1] = features[0]  # of another class
    path = fit_path(features, labels, l2=(1e-16, 1.0))
    assert all(probe.weights.isfinite().all() for probe in path.probes)
    assert path.held_out.isfinite().all()
    assert fit_path(features, labels, l2=(1e-16,)).held_out.isfinite().all()
    assert path.probes[1].weights[3].abs().max() < 1e-6
    torch.testing.assert_close(path.probes[1].weights, fit(features, labels, l2=1.0).weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.full((60, 12), torch.nan)}, "row 0 are not finite"),
        ({"features": torch.ones(60)}, "shape"),
        ({"features": torch.ones(60, 12, dtype=torch.long)}, "expected floats"),
        ({"labels": torch.arange(59) % 4}, "expected one for each of 60 rows"),
        ({"labels": torch.full((60,), 2)}, "all 60 labels are 2"),
        ({"labels": torch.arange(60) % 4 - 1}, "label -1 is negative"),
        ({"labels": torch.rand(60)}, "expected integers"),
        ({"classes": 3}, "label 3 is out of range for 3 classes"),
        ({"features": torch.ones(0, 12), "labels": torch.arange(0)}, "no rows"),
    ],
)
def test_invalid_data_is_an_error_of_one_line(change, message):
    features, labels = random_rows()
    arguments = {"features": features, "labels": labels} | change
    for fitting in (fit, fit_path):
        with pytest.raises(DataError, match=message) as caught:
            fitting(**arguments)
        assert "\n" not in str(caught.value)


def test_invalid_penalties_moments_or_width():
    features, labels = random_rows()
    counts, sums, gram = torch.ones(3), torch.ones(3, 2), torch.eye(2)
    for l2 in (0, -1.0, float("nan"), float("inf")):
        for call in (
            lambda l2: fit(features, labels, l2=l2),
            lambda l2: fit_path(features, labels, l2=[1.0, l2]),
            lambda l2: fit_moments(counts, sums, gram, l2),
        ):
            with pytest.raises(ConfigError, match="l2="):
                call(l2)
    with pytest.raises(DataError, match="do not match"):
        fit_moments(counts, torch.ones(2, 2), gram)
    with pytest.raises(DataError, match="not finite"):
        fit_moments(counts, sums, gram * torch.nan)
    with pytest.raises(DataError, match="two classes"):
        fit_moments(torch.tensor([5, 0, 0]), sums, gram)
    with pytest.raises(ConfigError, match="no l2"):
        fit_path(features, labels, l2=())
    with pytest.raises(DataError, match="13 features; the probe was fitted on 12"):
        fit(features, labels).scores(torch.ones(2, 13))


@every_shape
def test_scale_minimizes_the_leave_one_out_cross_entropy(shape):
    path = fit_path(*random_rows(*shape))

    def cross_entropy(scale):
        return float(F.cross_entropy(scale * balanced(path), path.rows.labels))

    assert SCALES[0] < path.scale < SCALES[1]
    others = [cross_entropy(path.scale * factor) for factor in (0.97, 1.03)]
    assert cross_entropy(path.scale) < min(others)


def test_scale_is_bounded():
    features, labels = random_rows(n=200, d=12)
    shuffled = labels[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    assert fit_path(features, shuffled, l2=(0.25,)).scale == SCALES[0]
    separable = fit_path(100.0 * F.one_hot(labels).float() + 1e-3 * features[:, :4], labels)
    assert separable.accuracies[separable.best] == 1
    assert 2 < separable.scale < 10  # one wrong of 200, not certainty


def test_scale_ignores_the_only_example_of_a_class():
    features, labels = random_rows()
    single = torch.cat([labels, torch.tensor([4])])
    path = fit_path(torch.cat([features, features[:1] + 9]), single)
    temperature = fit_temperature(balanced(path)[:60].numpy(), labels.numpy(), "softmax")
    assert path.scale == pytest.approx(1 / temperature)
