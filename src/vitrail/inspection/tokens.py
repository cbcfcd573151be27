"""Features as something to look at: tokens as colors, neighbors, a data set as a map.

Shapes: B images, h x w patches, q queries, n pictures, D features.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from vitrail.inspection.findings import Scatter
from vitrail.inspection.layers import at_once, grid_of
from vitrail.inspection.weights import as_array, principal, unit
from vitrail.models.vit import VisionTransformer

LARGEST = 2**22  # similarities held at once
OUTLIERS = (1, 99)  # percentiles: what lies beyond is as dark, or as bright, as can be
BEFORE_TSNE = 50  # dimensions, as t-SNE's authors advise
PERPLEXITY = 30.0
FEWEST = 5  # points that t-SNE can arrange


@torch.no_grad()
def token_colors(model: VisionTransformer, images: Tensor) -> np.ndarray:
    """Patches as colors (B, h, w, 3), 0 to 1: alike where the model sees them alike.

    Red, green and blue are the first three principal components of the patch tokens after the
    encoder, of all images together (Oquab et al. 2023 show DINOv2 like this).
    """
    grid = grid_of(model, images)
    patches = grid[0] * grid[1]
    parts = images.split(at_once(model, (images.shape[2], images.shape[3])))
    parts = [as_array(model.encode(part)[:, -patches:]) for part in parts]
    tokens = np.concatenate(parts).reshape(len(images) * patches, -1)
    found = projected(tokens, 3)
    low, high = np.percentile(found, OUTLIERS, axis=0)
    spread = high - low
    scaled = np.where(spread > 0, (found - low) / np.where(spread > 0, spread, 1), 0.5)
    colors = np.full((len(tokens), 3), 0.5)  # fewer components leave a color in the middle
    colors[:, : scaled.shape[1]] = scaled.clip(0, 1)
    return colors.reshape(len(images), *grid, 3).astype(np.float32)


def neighbors(
    features: np.ndarray, bank: np.ndarray, count: int = 6, *, exclude: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of the bank (n, D) are most like each of the features (q, D), and how much.

    By cosine similarity, both (q, count), the most similar first; fewer if there are no more.
    `exclude` names a row of the bank for each query, itself, that is no answer.
    """
    queries, answers = unit(features.astype(np.float32)), unit(bank.astype(np.float32))
    count = max(0, min(count, len(bank) - (exclude is not None)))
    indices = np.zeros((len(queries), count), np.int64)
    similarity = np.zeros((len(queries), count), np.float32)
    step = max(1, LARGEST // max(1, len(bank)))
    for first in range(0, len(queries), step):
        part = slice(first, first + step)
        scores = queries[part] @ answers.T  # (step, n)
        if exclude is not None:
            scores[np.arange(len(scores)), exclude[part]] = -np.inf
        indices[part] = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        similarity[part] = np.take_along_axis(scores, indices[part], axis=1)
    return indices, similarity


def scatter(
    features: np.ndarray, labels: np.ndarray, classes: Sequence[str], *, most: int = 2000
) -> Scatter:
    """Features (n, D) as points of a plane, the same ones each time.

    By t-SNE if scikit-learn is installed, else by the first two principal components. More than
    `most` pictures are thinned out evenly.
    """
    rows = np.arange(len(features))
    if len(rows) > most:
        rows = np.linspace(0, len(features) - 1, most).round().astype(np.int64)
    chosen = features[rows].astype(np.float64)
    points = projected(chosen, BEFORE_TSNE) if len(rows) else np.zeros((0, 2))  # (n, up to 50)
    method = "principal components"
    if find_spec("sklearn") and len(rows) >= FEWEST and points.shape[1] > 1:
        points, method = tsne(points), "t-SNE"
    points = np.pad(points, ((0, 0), (0, 1)))[:, :2]  # where there is one direction only
    return Scatter(
        points=points.astype(np.float32),
        labels=np.asarray(labels)[rows],
        classes=tuple(classes),
        method=method,
    )


def tsne(points: np.ndarray) -> np.ndarray:
    """Points (n, 2), near each other where those of many dimensions are."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)


def projected(vectors: np.ndarray, count: int) -> np.ndarray:
    """Vectors (m, D) along their first principal components: (m, up to count)."""
    directions, _ = principal(vectors, count)
    return (vectors - vectors.mean(axis=0)) @ directions.T
