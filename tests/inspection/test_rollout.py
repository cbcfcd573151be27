"""Attention rollout, against plain loops over maps that are all held at once."""

import numpy as np
import pytest
import torch
from test_attention_study import SHAPES, TOLERANCE, awake, pictures, selfish, stacked, uniform

from vitrail import ConfigError, DataError, create
from vitrail.inspection import layers
from vitrail.inspection import rollout as module
from vitrail.inspection.rollout import rollout, without_lowest

FUSES = {"mean": np.mean, "max": np.max, "min": np.min}


def by_hand(model, images, fuse="mean", discard=0.0):
    """Rollout of one picture after another, one value after another."""
    config = model.config
    maps = stacked(model, images)
    high, wide = images.shape[2] // config.stride[0], images.shape[3] // config.stride[1]
    results = []
    for place in range(len(images)):
        product = np.eye(maps.shape[-1])
        for layer in maps[:, place]:
            fused = FUSES[fuse](layer, axis=0)
            lowest = np.argsort(fused, axis=None)[: int(discard * fused.size)]
            for row, column in zip(*np.unravel_index(lowest, fused.shape), strict=True):
                if column >= config.num_class_tokens:
                    fused[row, column] = 0
            fused = fused + np.eye(len(fused))
            fused = np.array([row / row.sum() for row in fused])
            product = fused @ product
        patches = product[:, config.num_prefix :]
        if config.pool == "cls":
            row = patches[:2].mean(0) if config.distillation else patches[0]
        elif config.pool == "mean":
            row = patches[config.num_prefix :].mean(0)
        else:
            with torch.no_grad():
                weights = model.pool.attention_map(model.encode(images))[place, :, 0].double()
            row = FUSES[fuse](weights.numpy(), axis=0) @ patches[config.num_prefix :]
        results.append(row.reshape(high, wide) / row.max())
    return np.stack(results)


def close(ours, expected, dtype=torch.float64):
    assert ours.dtype == dtype
    assert tuple(ours.shape) == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rollout_is_the_product_of_the_layers(shape, dtype):
    model = awake(dtype=dtype, **SHAPES[shape])
    images = pictures(model)
    found = rollout(model, images)
    assert found.std(dim=(1, 2)).min() > 0
    close(found, by_hand(model, images), dtype)


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("discard", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("shape", ["oblong", "distillation, registers", "mean, registers", "map"])
def test_heads_are_fused_and_the_lowest_values_discarded(shape, fuse, discard):
    model = awake(**SHAPES[shape])
    images = pictures(model, count=2)
    expected = by_hand(model, images, fuse, discard)
    close(rollout(model, images, fuse=fuse, discard=discard), expected)


def test_a_picture_of_another_size_keeps_its_aspect():
    model = awake()
    images = torch.randn(2, 3, 8, 28, dtype=torch.float64)
    found = rollout(model, images)
    assert found.shape == (2, 2, 7)
    close(found, by_hand(model, images))


@pytest.mark.parametrize("shape", ["class token", "relative", "mean"])
def test_slices_do_not_matter(shape, monkeypatch):
    model = awake(**SHAPES[shape])
    images = pictures(model, count=5)
    whole = rollout(model, images, discard=0.5)
    monkeypatch.setattr(layers, "AT_ONCE", 2000)  # a few rows
    monkeypatch.setattr(module, "AT_ONCE", 2 * model.config.num_tokens**2 * 8)  # two pictures
    seen = []
    whole_walk = module.walk
    monkeypatch.setattr(module, "walk", lambda m, x: seen.append(len(x)) or whole_walk(m, x))
    close(rollout(model, images, discard=0.5), whole.numpy())
    assert seen == [2, 2, 1]


def test_the_class_token_is_never_discarded():
    maps = torch.tensor([[[0.01, 0.30, 0.69], [0.02, 0.49, 0.49], [0.90, 0.03, 0.07]]])
    kept = without_lowest(maps, 0.5, spare=1)  # four of nine: 0.01, 0.02, 0.03, 0.07
    expected = torch.tensor([[[0.01, 0.30, 0.69], [0.02, 0.49, 0.49], [0.90, 0.0, 0.0]]])
    assert torch.equal(kept, expected)
    assert without_lowest(maps, 0.5, spare=0)[0, :2, 0].tolist() == [0, 0]


def test_equal_values_are_kept_together():
    maps = torch.full((1, 4, 4), 0.25)
    assert torch.equal(without_lowest(maps, 0.9, spare=0), maps)


def test_a_map_that_is_the_same_everywhere_is_left_as_it_is():
    model = selfish()
    found = rollout(model, pictures(model))
    assert torch.equal(found, torch.full_like(found, 0.1))  # ten patches


def test_attention_that_is_alike_everywhere_rolls_out_flat():
    model = uniform()
    found = rollout(model, pictures(model))
    assert (found.amax(dim=(1, 2)) - found.amin(dim=(1, 2))).max() < 1e-12


def test_the_map_can_go_into_a_gradient():
    model = awake()
    found = rollout(model, pictures(model))
    weight = torch.ones_like(found, requires_grad=True)
    (found * weight).sum().backward()
    assert torch.equal(weight.grad, found)


@pytest.mark.parametrize("name", ["BiT-R50x1", "Mixer-S/32"])
def test_a_model_without_attention_has_no_rollout(name):
    with torch.device("meta"):
        model, images = create(name), torch.zeros(1, 3, 224, 224)
    with pytest.raises(ConfigError, match=f"^{name} has no attention, and so no rollout; look at"):
        rollout(model, images)


def test_impossible_settings_are_refused():
    model = awake()
    with pytest.raises(ConfigError, match="unknown fuse 'maximum'; known: mean, max, min"):
        rollout(model, pictures(model), fuse="maximum")
    for discard in (1.0, -0.1):
        with pytest.raises(ConfigError, match=f"discard={discard} is a share of attention"):
            rollout(model, pictures(model), discard=discard)
    with pytest.raises(DataError, match="whole number"):
        rollout(model, torch.zeros(1, 3, 2, 2, dtype=torch.float64))
