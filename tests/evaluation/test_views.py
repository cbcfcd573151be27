from dataclasses import replace

import pytest
import torch
from vitrail.evaluation.views import Views, through

from vitrail import ConfigError
from vitrail.data.preprocessing import preset

IMAGES = torch.arange(2 * 1 * 6 * 6, dtype=torch.float32).reshape(2, 1, 6, 6)


def test_one_view_is_the_picture_itself():
    def predict(images):
        return images

    assert through(predict, Views(), (6, 6), "softmax") is predict


def test_five_crops_are_the_corners_and_the_middle():
    views = list(Views(crops=5).of(IMAGES, (4, 4)))
    starts = [(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)]
    for view, (top, left) in zip(views, starts, strict=True):
        assert torch.equal(view, IMAGES[..., top : top + 4, left : left + 4])


def test_with_flips_every_view_comes_mirrored_too():
    views = list(Views(flip=True, crops=5).of(IMAGES, (4, 4)))
    assert len(views) == 10
    assert torch.equal(views[1], views[0].flip(-1))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_probabilities_are_averaged(loss):
    def predict(images):
        return torch.stack([images[:, 0, 0, 0], -images[:, 0, 0, 0]], 1) / 10

    got = through(predict, Views(flip=True), (6, 6), loss)(IMAGES)
    chances = torch.softmax if loss == "softmax" else lambda x, dim: x.sigmoid()
    wanted = (chances(predict(IMAGES), 1) + chances(predict(IMAGES.flip(-1)), 1)) / 2
    assert torch.allclose(chances(got, 1), wanted, atol=1e-6)


def test_crops_are_cut_from_what_would_have_been_cut_anyway():
    timm = preset("timm", (224, 224))
    larger = Views(crops=5).enlarged(timm)
    assert larger == replace(timm, size=(248, 248), resize_to=(248, 248))
    assert Views(flip=True).enlarged(timm) == timm


def test_a_picture_that_is_not_cut_is_made_larger_for_crops():
    assert Views(crops=5).enlarged(preset("google", (224, 112))).size == (256, 128)


@pytest.mark.parametrize("resize", ["direct", "short-side"])
def test_a_picture_that_is_made_just_as_large_as_the_model_wants_it_is_made_larger(resize):
    exact = replace(preset("google", (224, 112)), resize=resize, resize_to=(224, 112))
    larger = Views(crops=5).enlarged(exact)
    assert larger == replace(exact, size=(256, 128), resize_to=(256, 128))
    assert Views().enlarged(exact) == exact


class WithoutFloat64(torch.Tensor):
    """As on Apple's GPUs: float64 must wait until it is on the CPU."""

    def double(self):
        raise TypeError("no float64 here")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_devices_without_float64_can_average(loss):
    def predict(images):
        return images[:, 0, 0].as_subclass(WithoutFloat64)

    got = through(predict, Views(flip=True), (6, 6), loss)(IMAGES)
    assert type(got) is torch.Tensor
    assert got.shape == (2, 6)


def test_other_numbers_of_crops_are_refused():
    with pytest.raises(ConfigError, match="crops=3 cannot be cut; 1 or 5 can"):
        Views(crops=3)
