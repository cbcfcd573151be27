"""Faithfulness of maps: insertion, deletion, and the sanity check with random weights."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tiny_models import random_model
from vitrail import BiT, BitConfig, ConfigError, VisionTransformer
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import preset
from vitrail.inspection import attention, faithfulness
from vitrail.inspection.attention import token_offset
from vitrail.inspection.faithfulness import (
    enlarge,
    evaluate_faithfulness,
    insertion_deletion,
    randomize,
    rank_correlation,
)
from vitrail.inspection.relevance import METHODS


class LastPatchModel(nn.Module):
    """Sure of class 1 where the last of 2 x 3 patches of 2 x 2 pixels is bright."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_classes=2)
        self.metadata = Metadata(preprocessing=preset("google", (4, 6)))

    def forward(self, images):
        bright = images[..., 2:, 4:].mean(dim=(1, 2, 3)) > 0.9
        return torch.stack([torch.zeros(len(images)), 50 * (bright.float() * 2 - 1)], dim=1)


@pytest.fixture
def trained(tiny):
    """A ViT whose weights are not those that models begin with."""
    return random_model(tiny.change(image_size=16))


@pytest.mark.parametrize("place", range(6))
def test_areas_equal_those_by_hand(place, monkeypatch):
    """The probability jumps from 0 to 1 with the patch's turn, half a step of area before it."""
    monkeypatch.setattr(faithfulness, "BLUR", 1e6)  # leaves the mean color
    image = torch.zeros(1, 3, 4, 6)
    image[..., 2:, 4:] = 1
    order = torch.tensor([*range(place), 5, *range(place, 5)])
    ranks = -order.argsort().view(1, 2, 3).float()
    maps = ranks.repeat_interleave(2, 1).repeat_interleave(2, 2)
    found = insertion_deletion(LastPatchModel(), image, maps, torch.tensor([1]), steps=6)
    np.testing.assert_allclose(found.shares, np.arange(7) / 6)
    jump = (np.arange(7) > place).astype(float)
    np.testing.assert_allclose(found.insertion, jump, atol=1e-12)
    np.testing.assert_allclose(found.deletion, 1 - jump, atol=1e-12)
    assert found.insertion_area == pytest.approx((6 - place - 0.5) / 6)
    assert found.deletion_area == pytest.approx((place + 0.5) / 6)


def test_curves_are_the_mean_over_images_for_any_batch_size(trained, monkeypatch):
    images, maps = torch.randn(5, 3, 16, 16), torch.rand(5, 4, 4)
    classes = torch.tensor([0, 1, 2, 0, 1])
    together = insertion_deletion(trained, images, maps, classes, steps=7)
    alone = [
        insertion_deletion(trained, images[i : i + 1], maps[i : i + 1], classes[i : i + 1], steps=7)
        for i in range(5)
    ]
    monkeypatch.setattr(attention, "MAX_BATCH", 6)
    few = insertion_deletion(trained, images, maps, classes, steps=7)
    for name in ("insertion", "deletion"):
        mean = np.mean([getattr(curves, name) for curves in alone], axis=0)
        np.testing.assert_allclose(getattr(together, name), mean, atol=1e-6)
        np.testing.assert_allclose(getattr(few, name), mean, atol=1e-6)


def test_center_map_is_centered_for_any_stem(tiny):
    images = torch.zeros(1, 3, 32, 32)
    for stem in ("patches", "conv"):
        model = VisionTransformer(tiny.change(image_size=32, patch_size=4, stem=stem))
        bump = enlarge(METHODS["center"](model, images, None)[0], (32, 32), token_offset(model))
        inner = bump[4:29, 4:29]  # where there are tokens on both sides
        middle = (inner * (torch.arange(4, 29) + 0.5)).sum() / inner.sum()
        assert float(middle) == pytest.approx(16, abs=0.6)


def test_rounding_does_not_order_equal_pixels(trained):
    images, classes = torch.randn(1, 3, 16, 16), torch.tensor([1])
    maps = METHODS["center"](trained, images, None).double()  # symmetric: most pixels have equals
    exact = insertion_deletion(trained, images, maps, classes)
    rounded = insertion_deletion(trained, images, maps + 1e-14 * torch.randn(4, 4), classes)
    np.testing.assert_array_equal(rounded.insertion, exact.insertion)
    np.testing.assert_array_equal(rounded.deletion, exact.deletion)


def test_multi_label_models_use_sigmoids(trained):
    trained.metadata = Metadata(preprocessing=preset("google", (16, 16)), multi_label=True)
    images, classes = torch.randn(1, 3, 16, 16), torch.tensor([1])
    found = insertion_deletion(trained, images, torch.rand(1, 4, 4), classes, steps=2)
    with torch.no_grad():
        assert found.insertion[-1] == pytest.approx(float(trained(images)[0, 1].sigmoid()))


@pytest.mark.parametrize("method", ["rollout", "gradient rollout", "relevance", "last layer"])
def test_sanity_check_of_random_and_trained_weights(trained, method):
    images, classes = torch.randn(3, 3, 16, 16), torch.tensor([0, 1, 2])
    for model, equal in ((randomize(trained), True), (trained, False)):
        correlation = evaluate_faithfulness(model, images, classes, [method]).sanity[method]
        assert correlation == pytest.approx(1) if equal else correlation < 0.9


def test_rank_correlation_is_spearmans_with_ties():
    one = torch.tensor([[[1.0, 2.0], [2.0, 5.0]]])
    assert rank_correlation(one, one**3) == pytest.approx(1)
    assert rank_correlation(one, -one) == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 and 2, 1, 3, 4: covariance 3.75, sums of squares 4.5 and 5
    other = torch.tensor([[[2.0, 1.0], [3.0, 4.0]]])
    assert rank_correlation(one, other) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert rank_correlation(one, torch.ones(1, 2, 2)) == 0
    both = rank_correlation(torch.cat([one, one]), torch.cat([one, -one]))
    assert both == pytest.approx(0)


def test_random_weights_are_deterministic_and_include_the_head(trained):
    state = torch.random.get_rng_state()
    one, two = randomize(trained), randomize(trained)
    assert torch.equal(state, torch.random.get_rng_state())
    assert one.config == trained.config
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])
    assert one.head.weight.std() > 0.01
    assert randomize(trained.double()).head.weight.dtype == torch.float64


def test_every_method_is_evaluated_for_the_predicted_classes(trained):
    images, calls = torch.randn(3, 3, 16, 16), []
    trained.train()
    result = evaluate_faithfulness(trained, images, progress=lambda *call: calls.append(call))
    assert trained.training
    assert calls == [(f"scoring {method}", done, 3) for method in METHODS for done in range(4)]
    assert (result.sanity["random"], result.sanity["center"]) == pytest.approx((1, 1))
    assert result.images == 3
    assert list(result.curves) == list(result.sanity) == list(METHODS)
    classes = trained.eval()(images).argmax(dim=1)
    maps = METHODS["relevance"](trained, images, classes)
    expected = insertion_deletion(trained, images, maps, classes)
    assert result.curves["relevance"].insertion_area == expected.insertion_area


def test_invalid_arguments(trained, tiny):
    images, maps, classes = torch.randn(2, 3, 16, 16), torch.rand(2, 4, 4), torch.tensor([0, 1])
    with pytest.raises(ConfigError, match="unknown method 'rolout'; did you mean 'rollout'"):
        evaluate_faithfulness(trained, images, methods=("rolout",))
    with pytest.raises(ConfigError, match="steps=0"):
        insertion_deletion(trained, images, maps, classes, steps=0)
    with pytest.raises(ConfigError, match="3x3 patches do not divide images of 16x16"):
        insertion_deletion(trained, images, torch.rand(2, 3, 3), classes)
    with pytest.raises(ConfigError, match="for 2 images"):
        insertion_deletion(trained, images, maps[:1], classes)
    with pytest.raises(ConfigError, match="the model has classes 0 to 2"):
        insertion_deletion(trained, images, maps, torch.tensor([0, 3]))
    headless = VisionTransformer(tiny.change(image_size=16, num_classes=0))
    with pytest.raises(ConfigError, match="no head"):
        evaluate_faithfulness(headless, images, methods=("center",))
    with pytest.raises(ConfigError, match="has no attention"):
        evaluate_faithfulness(BiT(BitConfig(blocks=(1,), num_classes=3)), images)
