"""Features made visible: PCA of patch tokens, nearest neighbors, a dataset in two dimensions.

Shapes: B images, h x w patches, q queries, n images of a dataset, D features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import ImageDataset
from vitrail.data.decode import thumbnail
from vitrail.inspection.attention import batch_size_for, patch_grid
from vitrail.inspection.images import InputImage, evenly_spaced
from vitrail.inspection.weights import normalize_rows, principal_components, to_float64
from vitrail.models.vit import Model, VisionTransformer
from vitrail.probing.features import features_of

NEIGHBORS = 6
THUMBNAIL = 96  # pixels of a neighbor's longer side
MAX_IMAGES = 5000  # of a dataset whose features are computed
MAX_SIMILARITIES = 2**22  # held at once
PERCENTILES = (1, 99)  # of components: the range of colors
TSNE_DIMENSIONS = 50  # of the input, as t-SNE's authors advise
TSNE_PERPLEXITY = 30.0
TSNE_MIN_POINTS = 5


class Neighbor(NamedTuple):
    """A similar image of the dataset."""

    name: str
    label: str
    similarity: float
    pixels: np.ndarray  # uint8 (height, width, 3), a thumbnail


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Features of a dataset in two dimensions."""

    points: np.ndarray  # (n, 2)
    labels: np.ndarray  # (n,)
    classes: tuple[str, ...]
    method: str  # t-SNE or principal components


@torch.no_grad()
def token_colors(model: VisionTransformer, images: Tensor) -> np.ndarray:
    """Return colors (B, h, w, 3) of patches, 0 to 1: similar where the tokens are similar.

    Red, green and blue are the first three principal components of the patch tokens after the
    encoder, over all images (as Oquab et al. 2023 show DINOv2).
    """
    grid = patch_grid(model, images)
    patches = grid[0] * grid[1]
    batches = images.split(batch_size_for(model, (images.shape[2], images.shape[3])))
    parts = [to_float64(model.encode(batch)[:, -patches:]) for batch in batches]
    tokens = np.concatenate(parts).reshape(len(images) * patches, -1)
    components = project(tokens, 3)
    low, high = np.percentile(components, PERCENTILES, axis=0)
    spread = high - low
    scaled = np.where(spread > 0, (components - low) / np.where(spread > 0, spread, 1), 0.5)
    colors = np.full((len(tokens), 3), 0.5)  # fewer components leave a channel at 0.5
    colors[:, : scaled.shape[1]] = scaled.clip(0, 1)
    return colors.reshape(len(images), *grid, 3).astype(np.float32)


def nearest_rows(
    queries: np.ndarray, bank: np.ndarray, count: int, *, exclude: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the bank (n, D) most similar to each query (q, D), and the similarities.

    By cosine similarity, both (q, count), most similar first; fewer if the bank is smaller.
    `exclude` is a row of the bank per query that is left out: the query itself.
    """
    queries = normalize_rows(queries.astype(np.float32))
    bank = normalize_rows(bank.astype(np.float32))
    count = max(0, min(count, len(bank) - (exclude is not None)))
    indices = np.zeros((len(queries), count), np.int64)
    similarity = np.zeros((len(queries), count), np.float32)
    step = max(1, MAX_SIMILARITIES // max(1, len(bank)))
    for first in range(0, len(queries), step):
        part = slice(first, first + step)
        scores = queries[part] @ bank.T  # (step, n)
        if exclude is not None:
            scores[np.arange(len(scores)), exclude[part]] = -np.inf
        indices[part] = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        similarity[part] = np.take_along_axis(scores, indices[part], axis=1)
    return indices, similarity


def scatter(
    features: np.ndarray, labels: np.ndarray, classes: Sequence[str], *, max_points: int = 2000
) -> Scatter:
    """Project features (n, D) to two dimensions, deterministically.

    By t-SNE if scikit-learn is installed, else by the first two principal components. More than
    `max_points` images are subsampled evenly.
    """
    rows = np.arange(len(features))
    if len(rows) > max_points:
        rows = np.linspace(0, len(features) - 1, max_points).round().astype(np.int64)
    chosen = features[rows].astype(np.float64)
    points = project(chosen, TSNE_DIMENSIONS) if len(rows) else np.zeros((0, 2))
    method = "principal components"
    if find_spec("sklearn") and len(rows) >= TSNE_MIN_POINTS and points.shape[1] > 1:
        from sklearn.manifold import TSNE

        perplexity = min(TSNE_PERPLEXITY, (len(points) - 1) / 3)
        tsne = TSNE(perplexity=perplexity, init="pca", random_state=0)
        points, method = tsne.fit_transform(points), "t-SNE"
    points = np.pad(points, ((0, 0), (0, 1)))[:, :2]  # if there is one direction only
    return Scatter(
        points=points.astype(np.float32),
        labels=np.asarray(labels)[rows],
        classes=tuple(classes),
        method=method,
    )


def project(vectors: np.ndarray, count: int) -> np.ndarray:
    """Project vectors (m, D) onto their first principal components: (m, up to count)."""
    directions, _ = principal_components(vectors, count)
    return (vectors - vectors.mean(axis=0)) @ directions.T


def compare_with_dataset(
    model: Model,
    dataset: ImageDataset,
    images: Sequence[InputImage],
    progress: Callable[[str, int, int], None],
    skipped: dict[str, str],
) -> tuple[Scatter, list[tuple[Neighbor, ...]], int]:
    """Return the dataset in two dimensions, the nearest neighbors of each image, and how many
    images of the dataset were used. Unreadable ones are added to `skipped`, by name."""
    subset = dataset
    if len(dataset) > MAX_IMAGES:
        subset = dataset.subset(np.array(evenly_spaced(len(dataset), MAX_IMAGES)))
    bank = features_of(
        model,
        subset,
        batch_size=batch_size_for(model, get_metadata(model).preprocessing.size),
        progress=lambda done, total: progress("features", done, total),
    )
    skipped |= bank.skipped
    rows = np.array([subset.row(index) for index in bank.indices.tolist()])  # in the collection
    neighbors = []
    for image in images:
        with torch.inference_mode():
            query = model.features(image.tensor[None]).float().cpu().numpy()
        itself = None
        if image.row is not None and dataset.row(image.row) in rows:
            itself = np.flatnonzero(rows == dataset.row(image.row))
        nearest, similarity = nearest_rows(query, bank.values, NEIGHBORS, exclude=itself)
        closest = []
        for row_index, value in zip(nearest[0].tolist(), similarity[0].tolist(), strict=True):
            index = int(bank.indices[row_index])
            small = thumbnail(subset, index, THUMBNAIL, enlarge=False)
            pixels = np.zeros((1, 1, 3), np.uint8) if small is None else np.asarray(small)
            label = bank.classes[bank.labels[row_index]]
            closest.append(Neighbor(subset.name(index), label, value, pixels))
        neighbors.append(tuple(closest))
    return scatter(bank.values, bank.labels, bank.classes), neighbors, len(subset)
