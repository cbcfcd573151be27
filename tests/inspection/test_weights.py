"""Filters, positions and token mixing, against plain computations in float64."""

import math

import numpy as np
import pytest
import torch

from tiny_models import awake
from vitrail import BitConfig, MixerConfig, VitConfig, load
from vitrail.inspection.weights import (
    filter_components,
    position_similarity,
    principal_components,
    token_mixing,
)

VIT = VitConfig(
    depth=2, width=16, mlp_width=16, heads=2, patch_size=4, image_size=(12, 20), num_classes=3
)
MIXER = MixerConfig(
    depth=2, width=12, tokens_mlp=40, channels_mlp=8, patch_size=4, image_size=(12, 20)
)


def plainly(kernels, count):
    """Eigenvectors of the covariance of (D, C, P, Q) kernels, as rows in the order P, Q, C."""
    rows = kernels.detach().double().permute(0, 2, 3, 1).flatten(1)
    rows = rows - rows.mean(0)
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    return vectors.T.flip(0)[:count].numpy(), (values.flip(0) / values.sum())[:count].numpy()


FIRST = {
    "patches": (VIT, "stem.projection"),
    "gray": (VIT.change(channels=1), "stem.projection"),
    "oblong patches": (VIT.change(patch_size=(4, 5), width=64), "stem.projection"),
    "convolutions": (VIT.change(stem="conv", image_size=16), "stem.layers.0"),
    "hybrid": (
        VIT.change(stem="resnet", resnet_blocks=(1,), patch_size=1, image_size=16),
        "stem.resnet.root",
    ),
    "BiT": (BitConfig(blocks=(1,), num_classes=3), "root"),
    "Mixer": (MIXER, "stem"),
}


@pytest.mark.parametrize("name", FIRST)
def test_filters_are_the_principal_components_of_the_first_kernels(name):
    config, path = FIRST[name]
    model = awake(config)
    layer = model.get_submodule(path)
    kernels = layer.standardized_weight() if hasattr(layer, "standardized_weight") else layer.weight
    components, shares = filter_components(model, count=10)
    count = len(components)
    directions, explained = plainly(kernels, count)
    _, channels, high, wide = kernels.shape
    assert components.shape == (count, high, wide, channels)
    assert count == min(10, kernels.shape[0] - 1, channels * high * wide)
    flat = components.reshape(count, -1)
    alike = np.abs((flat * directions).sum(axis=1))
    np.testing.assert_allclose(alike, 1, atol=1e-6)
    np.testing.assert_allclose(shares, explained, atol=1e-6)
    np.testing.assert_allclose(
        flat * np.sign((flat * directions).sum(1))[:, None], directions, atol=1e-6
    )


def test_filters_of_the_golden_model_are_28(golden):
    components, explained = filter_components(load(golden / "vit-token.npz"))
    assert components.shape == (28, 8, 8, 3)
    assert np.all(np.diff(explained) <= 0)
    assert 0.9 < explained.sum() < 1


def test_signs_of_components_are_fixed():
    vectors = np.random.default_rng(0).normal(size=(30, 7))
    directions, _ = principal_components(vectors, 5)
    opposite, _ = principal_components(-vectors, 5)
    largest = np.take_along_axis(directions, np.abs(directions).argmax(1)[:, None], axis=1)
    assert (largest > 0).all()
    np.testing.assert_allclose(directions, opposite, atol=1e-12)


def test_equal_kernels_have_one_component():
    model = awake(VIT)
    model.stem.projection.weight.data.fill_(0.5)
    components, explained = filter_components(model)
    assert len(components) == 1
    assert np.isfinite(components).all()
    assert explained.tolist() == [0]


def cosine(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.sqrt(
        sum(a * a for a in one) * sum(b * b for b in other)
    )


def by_loops(rows, grid):
    """Every pair of patches, one after the other."""
    found = np.zeros((*grid, *grid))
    for here in np.ndindex(*grid):
        for there in np.ndindex(*grid):
            one, other = (rows[i * grid[1] + j] for i, j in (here, there))
            found[here + there] = cosine(one, other)
    return found


ADDED = {
    "learned": {},
    "mean": {"pool": "mean"},
    "registers": {"registers": 3, "distillation": True},
    "learned-2d": {"position": "learned-2d"},
    "sines": {"position": "sincos-2d"},
    "shared": {"position_place": "shared"},
}


@pytest.mark.parametrize("changes", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize("grid", [None, (2, 4), (1, 1)])
def test_positions_are_compared_by_cosine(changes, grid):
    model = awake(VIT.change(**changes))
    position = model.encoder.positions[0] if len(model.encoder.positions) else model.position
    (similarity,) = position_similarity(model, grid).values()
    grid = grid or (3, 5)
    rows = position.embedding(grid)[model.config.num_class_tokens :].tolist()
    assert similarity.shape == (*grid, *grid)
    np.testing.assert_allclose(similarity, by_loops(rows, grid), atol=1e-6)


def test_every_layer_has_its_own_positions():
    model = awake(VIT.change(position_place="every-layer"))
    tables = position_similarity(model)
    assert list(tables) == ["positions of layer 0", "positions of layer 1"]
    rows = model.encoder.positions[1].table[1:].tolist()
    np.testing.assert_allclose(tables["positions of layer 1"], by_loops(rows, (3, 5)), atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"pool": "mean"}, {"registers": 2}])
def test_relative_positions_compare_offsets_with_offset_zero(changes):
    model = awake(VIT.change(position="relative", **changes))
    tables = position_similarity(model)
    assert list(tables) == [f"relative positions of layer {i}" for i in (0, 1)]
    keys = model.encoder.positions[1].table.tolist()
    for here in np.ndindex(3, 5):
        for there in np.ndindex(3, 5):
            offset = (here[0] - there[0]) * 5 + here[1] - there[1]  # query less key, in the raster
            expected = cosine(keys[14 + offset], keys[14])
            assert tables["relative positions of layer 1"][here + there] == pytest.approx(
                expected, abs=1e-6
            )


def test_no_positions():
    assert position_similarity(awake(VIT.change(position="none"))) == {}


def test_zero_positions_have_similarity_zero():
    model = awake(VIT)
    model.position.table.data.zero_()
    assert not position_similarity(model)["positions"].any()


def test_token_mixing_sorts_large_units_by_frequency():
    model = awake(MIXER)
    weight = model.blocks[0].token_mixing.fc1.weight.data  # (40, 15)
    weight[:] *= 0.01
    slow, quick = torch.ones(3, 5), torch.ones(3, 5)
    slow[:, :2] = -1
    quick[:, 1::2] = -1
    weight[7], weight[30] = 3 * quick.flatten(), slow.flatten()  # the quick one is larger
    found = token_mixing(model, count=2)
    np.testing.assert_allclose(found, np.stack([slow, 3 * quick]), atol=1e-6)
    rows = {tuple(row) for row in weight.tolist()}
    assert all(tuple(unit.flatten().tolist()) in rows for unit in token_mixing(model, count=28))
    assert token_mixing(model, count=28).shape == (28, 3, 5)
    assert token_mixing(model, count=99).shape == (40, 3, 5)


def test_zero_mixing_weights():
    model = awake(MIXER)
    model.blocks[0].token_mixing.fc1.weight.data.zero_()
    assert not token_mixing(model).any()
