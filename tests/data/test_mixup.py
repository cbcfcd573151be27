"""Images and targets are mixed in the same proportion; randomness comes from the generator."""

import numpy as np
import pytest
import torch

from vitrail.data import augment as mixup
from vitrail.errors import ConfigError

METHODS = {
    "mixup": lambda *batch, **how: mixup.mixup(*batch, alpha=0.8, **how),
    "mixup, rolled": lambda *batch, **how: mixup.mixup(*batch, alpha=0.8, pairing="roll", **how),
    "mixup_big_vision": lambda *batch, **how: mixup.mixup_big_vision(*batch, alpha=0.2, **how),
    "cutmix": lambda *batch, **how: mixup.cutmix(*batch, alpha=1.0, **how),
    "either": lambda *batch, **how: mixup.mixup_or_cutmix(
        *batch, mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.9, **how
    ),
}


def batch(count=4, size=(6, 8)):
    """Return constant images whose value is their position, which is also their label."""
    values = torch.arange(float(count))
    return values[:, None, None, None].expand(-1, 3, *size).clone(), torch.arange(count)


def seeded(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_targets_are_mixed_in_proportion_to_pixels(method, count):
    images, labels = batch(count)
    for seed in range(30):
        mixed, targets = method(images, labels, classes=count, rng=seeded(seed))
        assert mixed.shape == images.shape
        assert torch.allclose(targets.sum(1), torch.ones(count))
        assert targets.min() >= 0
        expected = targets @ torch.arange(float(count))  # an image's value is its label
        torch.testing.assert_close(mixed.mean((1, 2, 3)), expected)
    assert torch.equal(images, batch(count)[0])


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_mixing_depends_only_on_the_generator(method):
    images, labels = batch()
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = [method(images, labels, classes=4, rng=seeded(seed)) for seed in range(9)]
    second = [method(images, labels, classes=4, rng=seeded(seed)) for seed in range(9)]
    for (images1, targets1), (images2, targets2) in zip(first, second, strict=True):
        assert torch.equal(images1, images2)
        assert torch.equal(targets1, targets2)
    assert len({targets.sum(0)[0].item() + targets[0, 0].item() for _, targets in first}) > 3
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("method", [mixup.mixup, mixup.mixup_big_vision, mixup.cutmix])
def test_alpha_zero_mixes_nothing(method):
    images, labels = batch()
    mixed, targets = method(images, labels, classes=4, alpha=0.0, rng=seeded())
    assert torch.equal(mixed, images)
    assert torch.equal(targets, torch.eye(4))


def is_mixup(images):
    """Return whether values between those of the images occur; CutMix makes none."""
    return not torch.equal(images, images.round())


def test_alpha_zero_disables_a_method():
    images, labels = batch()
    for seed in range(9):
        how = {"classes": 4, "rng": seeded(seed)}
        mixed, _ = mixup.mixup_or_cutmix(images, labels, mixup_alpha=0, cutmix_alpha=1, **how)
        assert not is_mixup(mixed)
        mixed, _ = mixup.mixup_or_cutmix(images, labels, mixup_alpha=1, cutmix_alpha=0, **how)
        assert is_mixup(mixed)
        mixed, _ = mixup.mixup_or_cutmix(images, labels, mixup_alpha=0, cutmix_alpha=0, **how)
        assert torch.equal(mixed, images)


def test_prob_and_switch_prob():
    images, labels = batch()
    kinds = {"neither": 0, "cutmix": 0, "mixup": 0}
    rng = seeded()
    how = {"mixup_alpha": 5.0, "cutmix_alpha": 5.0, "prob": 0.6, "switch_prob": 0.25}
    for _ in range(2000):
        mixed, _ = mixup.mixup_or_cutmix(images, labels, classes=4, rng=rng, **how)
        if torch.equal(mixed, images):
            kinds["neither"] += 1
        else:
            kinds["mixup" if is_mixup(mixed) else "cutmix"] += 1
    assert abs(kinds["neither"] - 800) < 80
    assert abs(kinds["cutmix"] - 300) < 60
    assert abs(kinds["mixup"] - 900) < 80


def test_big_vision_keeps_the_larger_share():
    images, labels = batch()
    rng = seeded()
    for _ in range(50):
        _, targets = mixup.mixup_big_vision(images, labels, classes=4, alpha=0.5, rng=rng)
        assert targets.diag().min() >= 0.5
        assert targets[1, :2].sum() == pytest.approx(1)  # mixed with the one before it


def test_pairings():
    images, labels = batch()
    targets = mixup.one_hot(labels, 4)
    flipped, _ = mixup.blend(images, targets, 0.0, "flip")
    assert flipped[:, 0, 0, 0].tolist() == [3, 2, 1, 0]
    rolled, _ = mixup.blend(images, targets, 0.0, "roll")
    assert rolled[:, 0, 0, 0].tolist() == [3, 0, 1, 2]


def test_multi_label_targets_are_mixed():
    images, _ = batch(2)
    labels = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    _, targets = mixup.blend(images, mixup.one_hot(labels, 3), 0.75, "flip")
    torch.testing.assert_close(targets, torch.tensor([[0.75, 1.0, 0.25], [0.25, 1.0, 0.75]]))


def test_cutmix_box_area_and_bounds():
    rng = seeded()
    for share in (0.0, 0.3, 0.75, 1.0):
        boxes = [mixup.cutmix_box(32, 48, share, rng) for _ in range(300)]
        for top, left, height, width in boxes:
            assert 0 <= top <= top + height <= 32
            assert 0 <= left <= left + width <= 48
        largest = max(box.height * box.width for box in boxes) / (32 * 48)
        assert largest <= 1 - share
        assert largest > 0.85 * (1 - share) - 0.05
    assert mixup.cutmix_box(1, 1, 0.5, rng).height == 0


def test_mixing_preserves_the_dtype():
    images, labels = batch()
    for method in (mixup.mixup, mixup.cutmix):
        mixed, targets = method(images.bfloat16(), labels, classes=4, alpha=1.0, rng=seeded())
        assert mixed.dtype == torch.bfloat16
        assert targets.dtype == torch.float32


def test_invalid_batches_are_rejected():
    images, labels = batch()
    with pytest.raises(ConfigError, match="normalize them first"):
        mixup.mixup(images.byte(), labels, classes=4, alpha=1.0, rng=seeded())
    with pytest.raises(ConfigError, match=r"labels of shape \(4, 3\) do not fit 4 classes"):
        mixup.mixup(images, torch.zeros(4, 3), classes=4, alpha=1.0, rng=seeded())
    with pytest.raises(ConfigError, match="alpha=-1"):
        mixup.cutmix(images, labels, classes=4, alpha=-1, rng=seeded())
