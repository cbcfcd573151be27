"""What a model has learned: filters, position embeddings, token mixing, and features made visible.

Figure 7 (left and center) and figure 10 of Dosovitskiy et al. 2021; figure 5 of Tolstikhin et al.
2021; the colors of patch tokens as Oquab et al. 2023 show DINOv2. Weights are analyzed in float64.

Shapes: D kernels of P x P pixels and C channels, or D features; B images, h x w patches, N = h * w,
q queries, n images of a dataset.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.load import first_kernel
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import ImageDataset
from vitrail.data.decode import thumbnail
from vitrail.inspection.attention import batch_size_for, patch_grid
from vitrail.inspection.images import InputImage, evenly_spaced
from vitrail.models.mixer import MlpMixer
from vitrail.models.pos_embed import Grid, NoPosEmbed, RelativePosEmbed
from vitrail.models.resnet import StandardizedConv2d
from vitrail.models.vit import Model, VisionTransformer
from vitrail.probing.features import features_of

MAX_COMPONENTS = 28  # as many as figure 7 shows
MIN_VARIANCE = 1e-8  # a smaller fraction of the variance is rounding error
NEIGHBORS = 6
THUMBNAIL = 96  # pixels of a neighbor's longer side
MAX_IMAGES = 5000  # of a dataset whose features are computed
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


class Scatter(NamedTuple):
    """Features of a dataset in two dimensions."""

    points: np.ndarray  # (n, 2)
    labels: np.ndarray  # (n,)
    classes: tuple[str, ...]
    method: str  # t-SNE or principal components


@torch.no_grad()
def filter_components(model: Model, count: int = MAX_COMPONENTS) -> tuple[np.ndarray, np.ndarray]:
    """Return the principal components (n, P, P, C) of the first layer's kernels, largest first, and
    the share of the variance (n,) that each explains.

    Kernels are taken as they are applied: those of a ResNet's root are standardized. n is smaller
    than `count` if there are fewer kernels, or fewer numbers in each.
    """
    name = first_kernel(dict(model.state_dict()))
    layer: Any = model.get_submodule(name.removesuffix(".weight"))
    standardized = isinstance(layer, StandardizedConv2d)
    weight = layer.standardized_weight() if standardized else layer.weight  # (D, C, P, P)
    kernels = to_float64(weight).transpose(0, 2, 3, 1)  # (D, P, P, C)
    components, explained = principal_components(kernels.reshape(len(kernels), -1), count)
    return components.reshape(-1, *kernels.shape[1:]).astype(np.float32), explained


def principal_components(vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return directions (n, D) of largest variance of vectors (m, D), and their shares of it.

    n is `count`, or less where the remaining variance is rounding, but at least 1. The entry of
    largest magnitude of each direction is positive.
    """
    centered = vectors - vectors.mean(axis=0)
    _, sizes, directions = np.linalg.svd(centered, full_matrices=False)
    variance = sizes**2
    explained = variance / max(variance.sum(), np.finfo(float).tiny)
    count = max(1, min(count, int((explained > MIN_VARIANCE).sum())))
    directions = directions[:count]
    largest = np.abs(directions).argmax(axis=1)
    signs = np.sign(directions[np.arange(count), largest])
    return directions * signs[:, None], explained[:count]


@torch.no_grad()
def position_similarity(
    model: VisionTransformer, grid: Grid | None = None
) -> dict[str, np.ndarray]:
    """Return the similarity (h, w, h, w) of patch positions, on the model's grid or another.

    One for each table of positions: the stem's, the one that layers share, or one per layer,
    counted from 0; none without position embeddings. Prefix tokens are left out.

    Absolute positions are compared by cosine similarity. Relative ones have a key for each offset
    and none for a position: tile (i, j) is the cosine similarity of the key of the offset from
    (i, j) to each patch with the key of offset zero. Offsets are those of the raster order
    (appendix D.4), so that the end of a row is next to the beginning of the row below.
    """
    grid = model.config.grid if grid is None else grid
    tables: list[Any] = [*model.encoder.positions] or [model.position]
    if isinstance(tables[0], NoPosEmbed):
        return {}
    kind = "relative positions" if isinstance(tables[0], RelativePosEmbed) else "positions"
    names = [f"{kind} of layer {layer}" for layer in range(len(tables))]
    if len(tables) == 1:
        names = [f"{kind} of all layers" if model.config.position_place == "shared" else kind]
    patches = grid[0] * grid[1]
    similarities = {}
    for name, table in zip(names, tables, strict=True):
        if isinstance(table, RelativePosEmbed):
            keys, offsets = table.embedding(grid)
            units = normalize_rows(to_float64(keys[: 2 * patches - 1]))  # (2 N - 1, K), no prefix
            by_offset = units @ units[patches - 1]  # with the offset of a patch to itself
            similarity = by_offset[offsets[-patches:, -patches:].cpu().numpy()]
        else:
            units = normalize_rows(to_float64(table.embedding(grid)[-patches:]))  # (N, D)
            similarity = units @ units.T
        similarities[name] = similarity.reshape(*grid, *grid).astype(np.float32)
    return similarities


@torch.no_grad()
def token_mixing(model: MlpMixer, count: int = MAX_COMPONENTS) -> np.ndarray:
    """Return weights (n, h, w) over patches of hidden units of the first token-mixing MLP.

    The `count` units with the largest weights, low spatial frequencies first, as in Mixer's
    figure 5.
    """
    weight = to_float64(model.blocks[0].token_mixing.fc1.weight)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]: a MixerBlock
    largest = np.argsort(-np.linalg.norm(weight, axis=1), kind="stable")[:count]
    units = weight[largest].reshape(-1, *model.config.grid)  # (n, h, w)
    down, across = (np.fft.fftfreq(side) for side in model.config.grid)
    power = np.abs(np.fft.fft2(units)) ** 2
    total = np.maximum(power.sum(axis=(1, 2)), np.finfo(float).tiny)
    frequency = (power * np.hypot(down[:, None], across)).sum(axis=(1, 2)) / total  # (n,)
    return units[np.argsort(frequency, kind="stable")].astype(np.float32)


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors to length 1; a zero vector stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(vectors.dtype).tiny)


def to_float64(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


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


def scatter(
    features: np.ndarray, labels: np.ndarray, classes: Sequence[str], *, max_points: int = 2000
) -> Scatter:
    """Project features (n, D) to two dimensions, deterministically.

    By t-SNE if scikit-learn is installed, else by the first two principal components. More than
    `max_points` images are subsampled evenly.
    """
    rows = evenly_spaced(len(features), max_points)
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
    """Return the dataset in two dimensions, for each image the others of the dataset with the most
    similar features, and how many images of the dataset were used. Unreadable ones are added to
    `skipped`, by name."""
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
    units = normalize_rows(bank.values)  # (n, D)
    neighbors = []
    for image in images:
        with torch.inference_mode():
            query = model.features(image.tensor[None])[0].float().cpu().numpy()  # (D,)
        itself = -1 if image.row is None else dataset.row(image.row)
        others = np.flatnonzero(rows != itself)
        similarity = units[others] @ normalize_rows(query)  # cosine
        closest = []
        for place in np.argsort(-similarity, kind="stable")[:NEIGHBORS].tolist():
            index = int(bank.indices[others[place]])
            small = thumbnail(subset, index, THUMBNAIL, enlarge=False)
            pixels = np.zeros((1, 1, 3), np.uint8) if small is None else np.asarray(small)
            label = bank.classes[bank.labels[others[place]]]
            closest.append(Neighbor(subset.name(index), label, float(similarity[place]), pixels))
        neighbors.append(tuple(closest))
    return scatter(bank.values, bank.labels, bank.classes), neighbors, len(subset)
