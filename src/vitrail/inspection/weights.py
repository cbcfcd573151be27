"""Filters, position embeddings and token mixing: what can be seen without an image.

Figure 7 (left and center) and figure 10 of Dosovitskiy et al. 2021; figure 5 of Tolstikhin et al.
2021. Everything is computed in float64.

Shapes: D kernels of P x P pixels and C channels, h x w patches, N = h * w.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.load import first_kernel
from vitrail.models.mixer import MlpMixer
from vitrail.models.pos_embed import Grid, NoPosEmbed, RelativePosEmbed
from vitrail.models.resnet import StandardizedConv2d
from vitrail.models.vit import Model, VisionTransformer

MAX_COMPONENTS = 28  # as many as figure 7 shows
MIN_VARIANCE = 1e-8  # a smaller share of the variance is rounding


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
