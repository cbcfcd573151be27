"""Losses match torch, or their formulas."""

import pytest
import torch
import torch.nn.functional as F

from vitrail.training.losses import LOSSES, hard_distillation, soft_distillation

LOGITS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 3
LABELS = torch.tensor([0, 3, 1, 1, 2])
ONE_HOT = F.one_hot(LABELS, 4).float()
MIXED = 0.7 * ONE_HOT + 0.3 * ONE_HOT.flip(0)
SEVERAL = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1]])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("targets", [LABELS, MIXED], ids=["labels", "shares"])
def test_softmax_matches_torch(targets, smoothing):
    expected = F.cross_entropy(LOGITS, targets, label_smoothing=smoothing)
    assert torch.equal(LOSSES["softmax"](LOGITS, targets, smoothing), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("targets", [ONE_HOT, MIXED, SEVERAL], ids=["one", "mixed", "several"])
def test_sigmoid_is_summed_over_classes_and_averaged_over_images(targets, smoothing):
    smooth = targets * (1 - smoothing) + smoothing / 4
    chance = LOGITS.double().sigmoid()
    each = -(smooth * chance.log() + (1 - smooth) * (1 - chance).log())
    loss = LOSSES["sigmoid"](LOGITS, targets, smoothing)
    torch.testing.assert_close(loss.double(), each.sum(dim=1).mean(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_index_and_one_hot_targets_agree(kind, smoothing):
    loss = LOSSES[kind]
    torch.testing.assert_close(loss(LOGITS, LABELS, smoothing), loss(LOGITS, ONE_HOT, smoothing))


@pytest.mark.parametrize("kind", LOSSES)
def test_half_precision_logits_are_reduced_in_float32(kind):
    half = LOGITS.bfloat16()
    for targets in (LABELS, MIXED.bfloat16()):
        loss = LOSSES[kind](half, targets, 0.1)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, LOSSES[kind](half.float(), targets.clone(), 0.1))


@pytest.mark.parametrize("kind", LOSSES)
def test_extreme_logits_give_finite_losses(kind):
    logits = torch.tensor([[1e4, -1e4, 0.0, 3.0]], requires_grad=True)
    loss = LOSSES[kind](logits, torch.tensor([1]), 0.0)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_soft_distillation_formula():
    teacher = LOGITS.roll(1, 0)
    p, q = (teacher.double() / 3).softmax(1), (LOGITS.double() / 3).softmax(1)
    expected = 9 * (p * (p / q).log()).sum(dim=1).mean()
    loss = soft_distillation(LOGITS, teacher, 3.0)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-6)


def test_soft_distillation_is_zero_for_equal_logits():
    logits = LOGITS.clone().requires_grad_()
    loss = soft_distillation(logits, LOGITS + 5, 2.0)  # a constant does not change probabilities
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_hard_distillation_uses_the_argmax():
    teacher = LOGITS.roll(1, 0)
    expected = F.cross_entropy(LOGITS, teacher.argmax(1))
    assert torch.equal(hard_distillation(LOGITS, teacher), expected)
