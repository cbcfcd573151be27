"""Muon orthogonalizes gradients of any shape."""

import pytest
import torch
from torch import nn

from vitrail.training.optim import (
    COEFFICIENTS,
    NEWTON_SCHULZ_STEPS,
    Muon,
    newton_schulz,
    orthogonalize,
)

# In the square case the smallest singular values are too small to be raised in five steps.
SHAPES = [(24, 40), (40, 24), (16, 64), (64, 16), (12, 13), (1, 7), (7, 1)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(matrix):
    """Return U f(S) Vᵀ in double precision, f being five steps of the polynomial."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        s = a * s + b * s**3 + c * s**5
    return u @ vh, u @ torch.diag(s) @ vh


def shape_scale(matrix):
    return max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_approach_one(shape):
    matrix = random(*shape)
    turned = orthogonalize([matrix])[0].double() / shape_scale(matrix)
    nearest, stepped = exact(matrix)
    values = torch.linalg.svdvals(turned)
    assert values.min() > 0.65
    assert values.max() < 1.25
    torch.testing.assert_close(turned, stepped, atol=1e-5, rtol=1e-5)
    # The directions are those of the exact factor: what is left over is symmetric and positive.
    rest = nearest.mT @ turned if shape[0] > shape[1] else turned @ nearest.mT
    torch.testing.assert_close(rest, rest.mT, atol=1e-5, rtol=1e-5)
    assert torch.linalg.eigvalsh(rest).min() > 0.65


@pytest.mark.parametrize("shape", [(32, 32), (32, 128)])
def test_badly_scaled_matrices(shape):
    u, _, vh = torch.linalg.svd(random(*shape).double(), full_matrices=False)
    matrix = (u @ torch.diag(torch.logspace(3, -4, 32).double()) @ vh).float()
    _, stepped = exact(matrix)
    torch.testing.assert_close(newton_schulz(matrix[None])[0].double(), stepped, atol=1e-3, rtol=0)


def test_scales_and_batches_do_not_matter():
    matrix = random(24, 40)
    for size in (1e-5, 1e6):
        scaled, plain = orthogonalize([matrix * size, matrix])
        torch.testing.assert_close(scaled, plain, atol=2e-2, rtol=0)
    matrices = [random(*shape, seed=i) for i, shape in enumerate(SHAPES + SHAPES[::-1])]
    together, shared = orthogonalize(matrices), orthogonalize(matrices, cores=3)
    for matrix, update, other in zip(matrices, together, shared, strict=True):
        assert update.shape == matrix.shape
        torch.testing.assert_close(update, orthogonalize([matrix])[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(update, other, atol=1e-6, rtol=1e-6)


def test_groups_keep_their_rates_and_parts():
    shapes = [(24, 8), (8, 8), (32, 8), (8, 32)]
    weights = [nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate(shapes)]
    before = [weight.detach().clone() for weight in weights]
    gradients = [random(*shape, seed=9 + i) for i, shape in enumerate(shapes)]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    groups = [
        {"params": weights[:1], "parts": 3, "lr": 0.5, "weight_decay": 0.1},
        {"params": weights[1:], "lr": 0.25},
    ]
    Muon(groups).step()
    turned = [torch.cat(orthogonalize([*gradients[0].chunk(3)])), *orthogonalize(gradients[1:])]
    expected = [before[0] * (1 - 0.05) - 0.5 * turned[0]]
    expected += [b - 0.25 * t for b, t in zip(before[1:], turned[1:], strict=True)]
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, atol=1e-5, rtol=1e-4)


def test_nesterov_momentum():
    weight = nn.Parameter(torch.zeros(6, 9))
    optimizer = Muon([weight], lr=0.1, momentum=0.95)
    momentum, expected = torch.zeros(6, 9), torch.zeros(6, 9)
    for seed in range(3):
        gradient = random(6, 9, seed=seed)
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        expected -= 0.1 * orthogonalize([0.95 * momentum + 0.05 * gradient])[0]
    torch.testing.assert_close(weight.detach(), expected, atol=1e-5, rtol=1e-4)


def test_weight_without_gradient_is_unchanged_and_vectors_raise():
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    weights[1].grad = random(4, 4)
    Muon([{"params": weights, "weight_decay": 0.1}]).step()
    assert torch.equal(weights[0], torch.ones(4, 4))
    assert not torch.equal(weights[1], torch.ones(4, 4))
    with pytest.raises(AssertionError, match="matrices"):
        Muon([nn.Parameter(torch.zeros(3))])
