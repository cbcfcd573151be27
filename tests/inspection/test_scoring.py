"""Maps put to the test: insertion, deletion, and weights that know nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vitrail import BiT, BitConfig, ConfigError, VisionTransformer, VitConfig
from vitrail.inspection import scoring
from vitrail.inspection.relevance import METHODS
from vitrail.inspection.scoring import agreement, fresh, insertion_deletion, sanity, score


class LooksAtOnePatch(nn.Module):
    """Sure of class 1 where the patch at (row, column) of 2 x 2 pixels is bright."""

    def __init__(self, row, column, sure=50.0):
        super().__init__()
        self.config = SimpleNamespace(num_classes=2)
        self.where = (slice(None), slice(None), *(slice(2 * i, 2 * i + 2) for i in (row, column)))
        self.sure = sure
        self.batches = []

    def forward(self, images):
        self.batches.append(len(images))
        bright = images[self.where].mean(dim=(1, 2, 3)) > 0.9
        return torch.stack([torch.zeros(len(images)), self.sure * (bright.float() * 2 - 1)], dim=1)


def bright_patch(row, column):
    """Pictures of 4 x 6 pixels, dark but for one patch of a grid of 2 x 3."""
    images = torch.zeros(1, 3, 4, 6)
    images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 1
    return images


def in_order(*patches):
    """A map (1, 2, 3) in which these patches come first, in this order."""
    order = torch.zeros(6)
    for place, patch in enumerate(patches):
        order[patch] = 10 - place
    return order.view(1, 2, 3)


@pytest.fixture
def trained(tiny):
    """A ViT whose weights are not those that models begin with."""
    model = VisionTransformer(tiny.change(image_size=16)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4, generator=generator)
    return model


def test_the_patch_that_decides_must_come_first():
    model, images, classes = LooksAtOnePatch(1, 2), bright_patch(1, 2), torch.tensor([1])
    areas = [
        insertion_deletion(model, images, in_order(*rest, 5, *range(place, 5)), classes)
        for place in range(6)
        for rest in [range(place)]
    ]
    insertion = [curves.insertion_area for curves in areas]
    deletion = [curves.deletion_area for curves in areas]
    assert insertion == sorted(insertion, reverse=True)
    assert len(set(insertion)) == 6
    assert deletion == sorted(deletion)


@pytest.mark.parametrize("place", range(6))
def test_areas_are_those_found_by_hand(place):
    """The probability jumps from 0 to 1 with the patch's turn, half a step of area before it."""
    model, classes = LooksAtOnePatch(1, 2), torch.tensor([1])
    maps = in_order(*range(place), 5, *range(place, 5))
    found = insertion_deletion(model, bright_patch(1, 2), maps, classes)
    np.testing.assert_allclose(found.shares, np.arange(7) / 6)
    jump = (np.arange(7) > place).astype(float)
    np.testing.assert_allclose(found.insertion, jump, atol=1e-12)
    np.testing.assert_allclose(found.deletion, 1 - jump, atol=1e-12)
    assert found.insertion_area == pytest.approx((6 - place - 0.5) / 6)
    assert found.deletion_area == pytest.approx((place + 0.5) / 6)


def test_curves_are_the_mean_over_pictures_whatever_the_batches(trained, monkeypatch):
    images, maps = torch.randn(5, 3, 16, 16), torch.rand(5, 4, 4)
    classes = torch.tensor([0, 1, 2, 0, 1])
    together = insertion_deletion(trained, images, maps, classes, steps=7)
    alone = [
        insertion_deletion(trained, images[i : i + 1], maps[i : i + 1], classes[i : i + 1], steps=7)
        for i in range(5)
    ]
    monkeypatch.setattr(scoring, "AT_ONCE", 6)
    few = insertion_deletion(trained, images, maps, classes, steps=7)
    for name in ("insertion", "deletion"):
        mean = np.mean([getattr(curves, name) for curves in alone], axis=0)
        np.testing.assert_allclose(getattr(together, name), mean, atol=1e-6)
        np.testing.assert_allclose(getattr(few, name), mean, atol=1e-6)


def test_curves_begin_and_end_with_the_picture_and_the_blank(trained):
    images, classes = torch.randn(2, 3, 16, 16), torch.tensor([2, 1])
    found = insertion_deletion(trained, images, torch.rand(2, 4, 4), classes)
    with torch.no_grad():
        blank = images.mean(dim=(2, 3), keepdim=True).expand_as(images)
        whole, nothing = (
            float(trained(x).softmax(1)[[0, 1], classes].mean()) for x in (images, blank)
        )
    assert found.insertion[[0, -1]] == pytest.approx([nothing, whole], abs=1e-6)
    assert found.deletion[[0, -1]] == pytest.approx([whole, nothing], abs=1e-6)
    assert len(found.shares) == 17  # 16 patches have no 20 steps


def test_at_most_64_pictures_go_through_the_model_at_once():
    model = LooksAtOnePatch(0, 0)
    images = bright_patch(0, 0).expand(30, -1, -1, -1)
    insertion_deletion(model, images, torch.rand(30, 2, 3), torch.ones(30, dtype=torch.long))
    assert max(model.batches) == 64
    assert sum(model.batches) == 2 * 7 * 30


def test_patches_of_equal_value_go_by_their_index():
    model, classes = LooksAtOnePatch(0, 1), torch.tensor([1])
    found = insertion_deletion(model, bright_patch(0, 1), torch.zeros(1, 2, 3), classes)
    np.testing.assert_allclose(found.insertion, np.arange(7) > 1, atol=1e-12)


def test_steps_are_whole_patches_and_shares_say_how_many():
    model, classes = LooksAtOnePatch(0, 1), torch.tensor([1])
    found = insertion_deletion(model, bright_patch(0, 1), torch.rand(1, 2, 3), classes, steps=4)
    np.testing.assert_allclose(found.shares * 6, [0, 2, 3, 4, 6])


def test_blurring_keeps_a_flat_picture_and_spreads_a_point():
    flat = torch.full((1, 3, 224, 32), 0.7)
    torch.testing.assert_close(scoring.blurred(flat), flat)
    point = torch.zeros(1, 1, 224, 224, dtype=torch.float64)
    point[..., 112, 112] = 1
    spread = scoring.blurred(point)[0, 0]
    assert float(spread.sum()) == pytest.approx(1)
    places = torch.arange(224).double() - 112
    assert float((spread.sum(dim=0) * places**2).sum()) == pytest.approx(100, rel=1e-3)


def test_a_blurred_blank_begins_with_the_blurred_picture(trained):
    images, classes = torch.randn(1, 3, 16, 16), torch.tensor([0])
    found = insertion_deletion(trained, images, torch.rand(1, 4, 4), classes, blank="blur")
    with torch.no_grad():
        expected = trained(scoring.blurred(images)).softmax(1)[0, 0]
    assert found.insertion[0] == pytest.approx(float(expected), abs=1e-6)


def test_an_order_found_by_trying_beats_a_random_one():
    torch.manual_seed(0)
    weights = torch.randn(4, 4)  # the true importance of each patch of a bag of patches

    class Bag(nn.Module):
        config = SimpleNamespace(num_classes=2)

        def forward(self, images):
            patches = images.unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(1, 4, 5))  # (B, 4, 4)
            told = (patches * weights).sum(dim=(1, 2))
            return torch.stack([-told, told], dim=1)

    images, classes = torch.rand(20, 3, 8, 8), torch.ones(20, dtype=torch.long)
    patches = images.unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(1, 4, 5))
    blank = images.mean(dim=(1, 2, 3))[:, None, None]
    perfect = insertion_deletion(Bag(), images, (patches - blank) * weights, classes)
    random = insertion_deletion(Bag(), images, torch.rand(20, 4, 4), classes)
    assert perfect.insertion_area > random.insertion_area + 0.01
    assert perfect.deletion_area < random.deletion_area - 0.01


@pytest.mark.parametrize("method", ["rollout", "gradient rollout", "relevance", "last layer"])
def test_a_model_that_has_those_very_random_weights_agrees_with_itself(trained, method):
    images, classes = torch.randn(3, 3, 16, 16), torch.tensor([0, 1, 2])
    assert sanity(fresh(trained), method, images, classes) == pytest.approx(1)
    assert sanity(trained, method, images, classes) < 0.9


@pytest.mark.parametrize("method", ["random", "center"])
def test_a_map_that_does_not_know_the_weights_fails_the_sanity_check(trained, method):
    assert sanity(trained, method, torch.randn(3, 3, 16, 16)) == pytest.approx(1)


def test_rank_correlation_is_spearmans_ties_included():
    one = torch.tensor([[[1.0, 2.0], [2.0, 5.0]]])
    assert agreement(one, one**3) == pytest.approx(1)
    assert agreement(one, -one) == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 and 2, 1, 3, 4: covariance 3.75, sums of squares 4.5 and 5
    other = torch.tensor([[[2.0, 1.0], [3.0, 4.0]]])
    assert agreement(one, other) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert agreement(one, torch.ones(1, 2, 2)) == 0
    both = agreement(torch.cat([one, one]), torch.cat([one, -one]))
    assert both == pytest.approx(0)


def test_fresh_weights_are_always_the_same_and_have_a_head(trained):
    state = torch.random.get_rng_state()
    one, two = fresh(trained), fresh(trained)
    assert torch.equal(state, torch.random.get_rng_state())
    assert one.config == trained.config
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])
    assert one.head.weight.std() > 0.01
    assert fresh(trained.double()).head.weight.dtype == torch.float64


def test_every_method_is_scored_for_the_classes_the_model_predicts(trained):
    images = torch.randn(3, 3, 16, 16)
    trained.train()
    trust = score(trained, images)
    assert trained.training
    assert trust.images == 3
    assert list(trust.curves) == list(trust.sanity) == list(METHODS)
    classes = trained.eval()(images).argmax(dim=1)
    maps = METHODS["relevance"](trained, images, classes)
    expected = insertion_deletion(trained, images, maps, classes)
    assert trust.curves["relevance"].insertion_area == expected.insertion_area
    assert trust.sanity["relevance"] == sanity(trained, "relevance", images, classes)


def test_what_cannot_be_scored_is_refused(trained, tiny):
    images, maps, classes = torch.randn(2, 3, 16, 16), torch.rand(2, 4, 4), torch.tensor([0, 1])
    with pytest.raises(ConfigError, match="unknown method 'rolout'; did you mean 'rollout'"):
        score(trained, images, methods=("rolout",))
    with pytest.raises(ConfigError, match="unknown method"):
        sanity(trained, "grad-cam", images, classes)
    with pytest.raises(ConfigError, match="unknown blank 'blurr'; did you mean 'blur'"):
        insertion_deletion(trained, images, maps, classes, blank="blurr")
    with pytest.raises(ConfigError, match="steps=0"):
        insertion_deletion(trained, images, maps, classes, steps=0)
    with pytest.raises(ConfigError, match="3x3 patches do not divide pictures of 16x16"):
        insertion_deletion(trained, images, torch.rand(2, 3, 3), classes)
    with pytest.raises(ConfigError, match="do not go with 2 pictures"):
        insertion_deletion(trained, images, maps[:1], classes)
    with pytest.raises(ConfigError, match="the model knows 0 to 2"):
        insertion_deletion(trained, images, maps, torch.tensor([0, 3]))
    headless = VisionTransformer(tiny.change(image_size=16, num_classes=0))
    with pytest.raises(ConfigError, match="without a head"):
        score(headless, images, methods=("center",))
    with pytest.raises(ConfigError, match="has no attention"):
        score(BiT(BitConfig(blocks=(1,), num_classes=3)), images)


def test_oblong_and_hybrid_grids_cover_their_pixels():
    config = VitConfig(
        depth=1, width=8, mlp_width=8, heads=2, patch_size=1, image_size=(8, 16), num_classes=3
    ).change(stem="resnet")
    model = VisionTransformer(config)
    images = torch.randn(2, 3, 8, 16)
    found = insertion_deletion(model, images, torch.rand(2, 2, 4), torch.tensor([0, 1]))
    assert len(found.shares) == 9
    pixels = scoring.as_pixels(torch.arange(8).view(1, 2, 4), images)
    assert pixels.shape == (1, 1, 8, 16)
    assert pixels[0, 0, 3, 4] == 1
    assert pixels[0, 0, 4, 3] == 4
