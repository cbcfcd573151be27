import pytest
import torch
import torch.nn.functional as F

from vitrail import create
from vitrail.models.init import whiten, whitening_filters


def smooth_pictures(count=40, side=24, channels=3):
    """Noise of which neighbors are much alike, as in photographs."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(count, channels, side + 4, side + 4, generator=generator)
    return F.avg_pool2d(noise, 5, stride=1)


def seen_by(filters, pictures):
    return F.conv2d(pictures, filters).transpose(0, 1).flatten(1)  # (n, .)


def test_what_whitening_filters_see_varies_alike_and_has_nothing_in_common():
    pictures = smooth_pictures()
    filters = whitening_filters(pictures, 24, 3)[:12]
    seen = torch.cov(seen_by(filters, pictures))
    assert torch.allclose(seen, torch.eye(12), atol=0.05)
    random = torch.randn(12, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    alike = torch.corrcoef(seen_by(random, pictures)).fill_diagonal_(0).abs().max()
    assert alike > 0.5  # which random filters do not manage


def test_each_filter_comes_with_both_signs():
    filters = whitening_filters(smooth_pictures(), 16, 3)
    assert filters.shape == (16, 3, 3, 3)
    assert torch.equal(filters[8:], -filters[:8])
    assert whitening_filters(smooth_pictures(channels=1), 40, 3).shape == (18, 1, 3, 3)


def test_filters_that_there_is_no_direction_for_stay_as_they_were_drawn():
    model = create("ViT-Mu/4", stem="conv", channels=1, width=64)
    before = model.stem.first_conv.weight.clone()
    whiten(model.stem, smooth_pictures(channels=1))
    after = model.stem.first_conv.weight
    assert len(after) == 32
    assert torch.equal(after[18:], before[18:])
    assert after[:18].std().item() == pytest.approx(before.std().item(), rel=1e-4)


def test_pictures_of_one_color_give_filters_all_the_same():
    filters = whitening_filters(torch.ones(4, 3, 16, 16), 48, 3)
    assert filters.isfinite().all()
