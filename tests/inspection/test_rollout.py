"""Attention rollout, against plain loops over maps that are all held at once."""

import numpy as np
import pytest
import torch
from test_attention import SHAPES, TOLERANCE, all_maps, close, random_images, random_vit

from vitrail import ConfigError, DataError
from vitrail.inspection import attention
from vitrail.inspection import relevance as module
from vitrail.inspection.relevance import rollout

FUSES = {"mean": np.mean, "max": np.max, "min": np.min}


def by_hand(model, images, fuse="mean", discard=0.0):
    """Rollout of one image after another, in loops."""
    config = model.config
    maps = all_maps(model, images)
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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rollout_is_the_product_of_the_layers(shape, dtype):
    model = random_vit(dtype=dtype, **SHAPES[shape])
    images = random_images(model)
    if shape == "class token":  # of another size than the model's
        images = torch.randn(2, 3, 8, 28, dtype=dtype)
    found = rollout(model, images)
    assert found.dtype == dtype
    assert found.std(dim=(1, 2)).min() > 0
    close(found, by_hand(model, images), dtype)


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("discard", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("shape", ["oblong", "distillation, registers", "mean, registers", "map"])
def test_heads_are_fused_and_the_lowest_values_discarded(shape, fuse, discard):
    model = random_vit(**SHAPES[shape])
    images = random_images(model, count=2)
    expected = by_hand(model, images, fuse, discard)
    close(rollout(model, images, fuse=fuse, discard=discard), expected)


@pytest.mark.parametrize("shape", ["class token", "relative", "mean"])
def test_chunk_and_batch_sizes_do_not_matter(shape, monkeypatch):
    model = random_vit(**SHAPES[shape])
    images = random_images(model, count=5)
    whole = rollout(model, images, discard=0.5)
    monkeypatch.setattr(attention, "CHUNK_BYTES", 2000)  # a few rows
    monkeypatch.setattr(module, "PRODUCT_BYTES", 2 * model.config.num_tokens**2 * 8)  # two images
    close(rollout(model, images, discard=0.5), whole.numpy())


def test_constant_map_is_not_scaled():
    """Tokens that attend to themselves only."""
    model = random_vit(position="relative", pool="mean", image_size=(8, 20))
    for block, position in zip(model.encoder.blocks, model.encoder.positions, strict=True):
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.constant_(block.attention.qkv.bias, 100.0)
        torch.nn.init.zeros_(position.table)
        torch.nn.init.constant_(position.table[position.patches - 1], 100.0)  # offset 0
    found = rollout(model, random_images(model))
    assert torch.equal(found, torch.full_like(found, 0.1))  # ten patches


def test_invalid_settings():
    model = random_vit()
    with pytest.raises(ConfigError, match="unknown fuse 'maximum'; known: mean, max, min"):
        rollout(model, random_images(model), fuse="maximum")
    for discard in (1.0, -0.1):
        with pytest.raises(ConfigError, match=f"discard={discard} is a fraction of attention"):
            rollout(model, random_images(model), discard=discard)
    with pytest.raises(DataError, match="whole number"):
        rollout(model, torch.zeros(1, 3, 2, 2, dtype=torch.float64))
