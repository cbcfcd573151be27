"""Distributions of crops, and mixed batches, match torchvision and timm."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitrail.data import augment

transforms = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")
timm_mixup = pytest.importorskip("timm.data.mixup")
pytestmark = [pytest.mark.reference, pytest.mark.slow]


def largest_gap(first, second):
    """The Kolmogorov-Smirnov statistic of two samples."""
    places = np.concatenate([first, second])
    below = [np.searchsorted(np.sort(x), places, side="right") / len(x) for x in (first, second)]
    return np.abs(below[0] - below[1]).max()


def measures(boxes):
    top, left, height, width = np.array(boxes, float).T
    return {"area": height * width, "shape": width / height, "top": top, "left": left}


def assert_same_distribution(ours, theirs):
    for name, values in measures(ours).items():
        gap = largest_gap(values, measures(theirs)[name])
        assert gap < 1.95 * (2 / len(ours)) ** 0.5, name  # exceeded by chance once in a thousand


@pytest.mark.parametrize("size", [(375, 500), (600, 200), (33, 32)], ids=str)
def test_distribution_of_inception_crops_matches_torchvision(size):
    torch.manual_seed(0)
    rng, count, image = np.random.default_rng(0), 4000, torch.empty(3, *size)
    get_params = transforms.RandomResizedCrop.get_params
    theirs = [get_params(image, [0.05, 1], [3 / 4, 4 / 3]) for _ in range(count)]
    assert_same_distribution([augment.inception_crop(*size, rng) for _ in range(count)], theirs)


def test_distribution_of_erased_boxes_matches_torchvision():
    torch.manual_seed(0)
    rng, count, image = np.random.default_rng(0), 3000, torch.ones(1, 64, 48)
    area, aspect = (0.02, 0.33), (0.3, 3.3)
    get_params = transforms.RandomErasing.get_params
    theirs = [get_params(image, area, aspect, [0.0])[:4] for _ in range(count)]
    ranges = {"area": area, "aspect": aspect}
    ours = [box_of(augment.random_erasing(image, rng, **ranges, fill=0)) for _ in range(count)]
    assert_same_distribution(ours, theirs)


def box_of(erased):
    rows, columns = (erased[0] == 0).any(1).nonzero()[:, 0], (erased[0] == 0).any(0).nonzero()[:, 0]
    top, left = int(rows[0]), int(columns[0])
    return top, left, int(rows[-1]) - top + 1, int(columns[-1]) - left + 1


def scripted(share, *places):
    """A generator whose next draws are known."""
    draws = iter(places)
    return SimpleNamespace(beta=lambda *_: share, integers=lambda _: next(draws))


def batch(count=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 20, 14, generator=generator), torch.arange(count) % 4


@pytest.mark.parametrize("peer", ["timm", "torchvision"])
@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.9, 1.0])
def test_mixup_matches(share, peer, monkeypatch):
    images, labels = batch()
    monkeypatch.setattr(np.random, "beta", lambda *_: share)
    theirs = timm_mixup.Mixup(mixup_alpha=1.0, label_smoothing=0.0, num_classes=4)
    style = {}
    if peer == "torchvision":
        theirs, style = v2.MixUp(num_classes=4), {"style": "torchvision"}
        theirs._dist = SimpleNamespace(sample=lambda _: torch.tensor(share, dtype=torch.float64))
    expected, expected_targets = theirs(images.clone(), labels)
    rng = scripted(share)
    mixed, targets = augment.mixup(images, labels, classes=4, alpha=1.0, rng=rng, **style)
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(targets, expected_targets)


@pytest.mark.parametrize("place", [(0, 0), (7, 9), (19, 13)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.9, 1.0])
def test_cutmix_matches_timm(share, place, monkeypatch):
    images, labels = batch()
    peer = timm_mixup.Mixup(mixup_alpha=0.0, cutmix_alpha=1.0, label_smoothing=0.0, num_classes=4)
    draws = iter(place)
    monkeypatch.setattr(np.random, "beta", lambda *_: share)
    monkeypatch.setattr(np.random, "randint", lambda *_, size: np.int64(next(draws)))
    expected, expected_targets = peer(images.clone(), labels)
    rng = scripted(share, *place)
    mixed, targets = augment.cutmix(images, labels, classes=4, alpha=1.0, rng=rng)
    assert torch.equal(mixed, expected)
    torch.testing.assert_close(targets, expected_targets)
