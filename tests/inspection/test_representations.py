"""Filters, positions, token mixing, patch tokens, neighbors: against plain computations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tiny_models import awake
from tiny_runs import write_colors
from vitrail import BitConfig, MixerConfig, VitConfig
from vitrail.data.datasets import open_dataset
from vitrail.inspection import representations as file
from vitrail.inspection.images import load_samples
from vitrail.inspection.representations import (
    compare_with_dataset,
    filter_components,
    position_similarity,
    scatter,
    token_colors,
    token_mixing,
)
from vitrail.probing.features import features_of

SIZES = {"depth": 2, "patch_size": 4, "image_size": (12, 20)}
VIT = VitConfig(width=16, mlp_width=16, heads=2, num_classes=3, **SIZES)
MIXER = MixerConfig(width=12, tokens_mlp=40, channels_mlp=8, **SIZES)


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
    "hybrid": (VIT.change(stem="resnet", patch_size=1, image_size=16), "stem.resnet.root"),
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
    signs = np.sign((flat * directions).sum(1))[:, None]
    np.testing.assert_allclose(flat * signs, directions, atol=1e-6)
    np.testing.assert_allclose(shares, explained, atol=1e-6)


def test_equal_kernels_and_no_positions():
    model = awake(VIT.change(position="none"))
    model.stem.projection.weight.data.fill_(0.5)
    components, explained = filter_components(model)
    assert len(components) == 1
    assert np.isfinite(components).all()
    assert explained.tolist() == [0]
    assert position_similarity(model) == {}
    for size in ((4, 4), (8, 8)):  # equal patches are gray
        np.testing.assert_allclose(token_colors(model, torch.zeros(1, 3, *size)), 0.5)


ADDED = {
    "learned": {},
    "mean": {"pool": "mean"},
    "registers": {"registers": 3, "distillation": True},
    "learned-2d": {"position": "learned-2d"},
    "sines": {"position": "sincos-2d"},
    "shared": {"position_place": "shared"},
    "every layer": {"position_place": "every-layer"},
}


@pytest.mark.parametrize("changes", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize("grid", [None, (2, 4), (1, 1)])
def test_positions_are_compared_by_cosine(changes, grid):
    model = awake(VIT.change(**changes))
    tables = position_similarity(model, grid)
    if len(model.encoder.positions) > 1:
        assert list(tables) == ["positions of layer 0", "positions of layer 1"]
    grid = grid or (3, 5)
    positions = model.encoder.positions or [model.position]
    for position, similarity in zip(positions, tables.values(), strict=True):
        rows = position.embedding(grid)[model.config.num_class_tokens :].detach().double()
        expected = F.cosine_similarity(rows[:, None], rows, dim=-1).reshape(*grid, *grid)
        assert similarity.shape == (*grid, *grid)
        np.testing.assert_allclose(similarity, expected, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"pool": "mean"}, {"registers": 2}])
def test_relative_positions_compare_offsets_with_offset_zero(changes):
    model = awake(VIT.change(position="relative", **changes))
    tables = position_similarity(model)
    assert list(tables) == [f"relative positions of layer {i}" for i in (0, 1)]
    keys = model.encoder.positions[1].table.detach().double()
    expected = F.cosine_similarity(keys, keys[14], dim=-1).tolist()
    for here in np.ndindex(3, 5):
        for there in np.ndindex(3, 5):
            offset = (here[0] - there[0]) * 5 + here[1] - there[1]  # query less key, in the raster
            found = tables["relative positions of layer 1"][here + there]
            assert found == pytest.approx(expected[14 + offset], abs=1e-6)


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


@pytest.mark.parametrize(
    "changes", [{}, {"pool": "mean"}, {"registers": 2}, {"channels": 1}], ids=str
)
@pytest.mark.parametrize("size", [(12, 20), (8, 8)])
def test_colors_are_the_first_three_principal_components_of_the_patches(changes, size):
    model = awake(VIT.change(**changes))
    images = torch.randn(18, model.config.channels, *size)  # more than go in at once
    with torch.no_grad():
        tokens = model.encode(images)[:, model.config.num_prefix :].double().flatten(0, 1)
    tokens = tokens - tokens.mean(0)
    _, vectors = torch.linalg.eigh(tokens.T @ tokens)
    colors = token_colors(model, images)
    assert colors.shape == (18, size[0] // 4, size[1] // 4, 3)
    for channel in range(3):
        direction = vectors[:, -1 - channel]
        direction = direction * direction[direction.abs().argmax()].sign()
        values = (tokens @ direction).numpy()
        low, high = np.percentile(values, [1, 99])
        expected = np.clip((values - low) / (high - low), 0, 1)
        np.testing.assert_allclose(colors[..., channel].ravel(), expected, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 30])
def test_neighbors_are_the_most_similar_by_cosine_without_the_image_itself(size, tmp_path):
    model = awake(VIT.change(image_size=8))
    dataset = open_dataset(write_colors(tmp_path / "colors.npz", train=size), "train")
    images = list(load_samples(model, dataset, range(min(3, size)), {}))
    _, neighbors, used = compare_with_dataset(model, dataset, images, lambda *_: None, {})
    assert used == size
    features = torch.tensor(features_of(model, dataset, cache=False).values).double()
    rows = {dataset.name(row): row for row in range(size)}
    for row, found in enumerate(neighbors):
        alike = F.cosine_similarity(features[row], features).tolist()
        shown = [rows[near.name] for near in found]
        assert row not in shown
        similarities = [near.similarity for near in found]
        np.testing.assert_allclose(similarities, [alike[other] for other in shown], atol=1e-6)
        del alike[row]
        np.testing.assert_allclose(similarities, sorted(alike)[::-1][:6], atol=1e-6)
        labels = [dataset.classes[dataset[other].label] for other in shown]
        assert [near.label for near in found] == labels


def clusters(count, classes=3):
    random = np.random.default_rng(0)
    labels = np.sort(np.arange(count) % classes)
    return random.normal(size=(count, 20)) + 9 * np.eye(20)[labels], labels


def test_scatter_keeps_clusters_and_is_deterministic():
    features, labels = clusters(60)
    found = scatter(features, labels, ["a", "b", "c"])
    assert found.method == "t-SNE"
    assert found.classes == ("a", "b", "c")
    distances = np.linalg.norm(found.points[:, None] - found.points, axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert (labels[distances.argmin(1)] == labels).all()
    np.testing.assert_array_equal(found.points, scatter(features, labels, ["a"]).points)


def test_scatter_without_scikit_learn_is_a_pca(monkeypatch):
    monkeypatch.setattr(file, "find_spec", lambda name: None)
    features, labels = clusters(60)
    found = scatter(features, labels, ["a", "b", "c"])
    assert found.method == "principal components"
    centered = features - features.mean(0)
    sizes = np.linalg.svd(centered, compute_uv=False)[:2]
    np.testing.assert_allclose(np.linalg.norm(found.points, axis=0), sizes, rtol=1e-5)
    some = scatter(features, labels, ["a", "b", "c"], max_points=30)  # evenly
    assert np.bincount(some.labels).tolist() == [10, 10, 10]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("width", [1, 3])
def test_scatter_of_few_points(count, width):
    features = np.random.default_rng(0).normal(size=(count, width))
    found = scatter(features, np.zeros(count, int), ["a"])
    assert found.points.shape == (count, 2)
    assert np.isfinite(found.points).all()
