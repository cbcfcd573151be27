"""PCA of tokens, nearest neighbors, and a dataset in two dimensions."""

import numpy as np
import pytest
import torch

from tiny_models import awake
from vitrail import VitConfig
from vitrail.inspection import tokens as file
from vitrail.inspection.tokens import nearest_rows, scatter, token_colors

VIT = VitConfig(
    depth=1, width=16, mlp_width=16, heads=2, patch_size=4, image_size=(12, 20), num_classes=3
)


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


def test_outliers_do_not_compress_the_colors(monkeypatch):
    model = awake(VIT.change(pool="mean"))
    tokens = torch.randn(10, 15, 16)
    tokens[0, 0] = 1e4
    monkeypatch.setattr(model, "encode", lambda images: tokens)
    colors = token_colors(model, torch.zeros(10, 3, 12, 20))
    assert colors[..., 0].std() > 0.15
    assert colors[0, 0, 0, 0] == 1


@pytest.mark.parametrize("size", [(4, 4), (8, 8)])
def test_equal_patches_are_gray(size):
    model = awake(VIT.change(position="none"))
    colors = token_colors(model, torch.zeros(1, 3, *size))
    assert np.isfinite(colors).all()
    np.testing.assert_allclose(colors, 0.5)


def by_loops(features, bank, count, exclude):
    """Sorted by cosine, one query at a time."""
    found = []
    for number, query in enumerate(features):
        alike = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in bank]
        order = sorted(range(len(bank)), key=lambda row: -alike[row])
        if exclude is not None:
            order.remove(exclude[number])
        found.append([(row, alike[row]) for row in order[:count]])
    return np.array(found)


@pytest.mark.parametrize("largest", [1, 100, 2**22])
@pytest.mark.parametrize("exclude", [None, np.arange(9)[::-1] + 3])
def test_neighbors_are_the_most_similar_by_cosine(monkeypatch, largest, exclude):
    monkeypatch.setattr(file, "MAX_SIMILARITIES", largest)
    random = np.random.default_rng(0)
    features, bank = random.normal(size=(9, 5)), random.normal(size=(30, 5))
    if exclude is not None:
        features = bank[exclude]
    indices, similarity = nearest_rows(features, bank, 4, exclude=exclude)
    expected = by_loops(features, bank, 4, exclude)
    np.testing.assert_array_equal(indices, expected[..., 0])
    np.testing.assert_allclose(similarity, expected[..., 1], atol=1e-6)


def test_small_bank_without_the_query_itself():
    bank = np.eye(3)
    indices, _ = nearest_rows(bank, bank, 6, exclude=np.arange(3))
    assert indices.shape == (3, 2)
    assert not (indices == np.arange(3)[:, None]).any()
    assert nearest_rows(bank[:1], bank[:1], 6, exclude=np.array([0]))[0].shape == (1, 0)


def test_zero_features_have_similarity_zero():
    _, similarity = nearest_rows(np.zeros((1, 4)), np.ones((3, 4)), 6)
    assert similarity.tolist() == [[0, 0, 0]]


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


def test_large_datasets_are_subsampled_evenly(monkeypatch):
    monkeypatch.setattr(file, "find_spec", lambda name: None)
    features, labels = clusters(90)
    found = scatter(features, labels, ["a", "b", "c"], max_points=30)
    assert found.points.shape == (30, 2)
    assert np.bincount(found.labels).tolist() == [10, 10, 10]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("width", [1, 3])
def test_scatter_of_few_points(count, width):
    features = np.random.default_rng(0).normal(size=(count, width))
    found = scatter(features, np.zeros(count, int), ["a"])
    assert found.points.shape == (count, 2)
    assert np.isfinite(found.points).all()


def test_scatter_of_equal_points():
    found = scatter(np.ones((9, 4), np.float32), np.zeros(9, int), ["a"])
    assert np.isfinite(found.points).all()
