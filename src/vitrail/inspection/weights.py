"""What needs no picture: the first filters, positions, and how a Mixer mixes tokens.

Figure 7 (left and center) and figure 10 of Dosovitskiy et al. 2021; figure 5 of Tolstikhin et al.
2021. All of it is computed in float64.

Shapes: D kernels of P x P pixels and C channels, h x w patches, N = h * w.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.load import first_kernel
from vitrail.inspection.findings import Filters, PositionTiles
from vitrail.models.mixer import MlpMixer
from vitrail.models.pos_embed import Grid, NoPosEmbed, RelativePosEmbed
from vitrail.models.resnet import StandardizedConv2d
from vitrail.models.vit import Model, VisionTransformer

SHOWN = 28  # filters: as many as figure 7 shows
NOTHING = 1e-8  # of the variance: less than this is rounding


@torch.no_grad()
def filters(model: Model, count: int = SHOWN) -> Filters:
    """Principal components of the kernels that read the picture, largest first.

    Kernels are taken as they are used: those of a ResNet's root are standardized. There are fewer
    components where there are fewer kernels, or fewer numbers in each.
    """
    kernels = as_array(kernels_of(model)).transpose(0, 2, 3, 1)  # (D, P, P, C)
    components, explained = principal(kernels.reshape(len(kernels), -1), count)
    return Filters(
        components=components.reshape(-1, *kernels.shape[1:]).astype(np.float32),
        explained=explained,
    )


def kernels_of(model: Model) -> Tensor:
    """The kernels (D, C, P, P) of the first layer that reads the picture."""
    name = first_kernel(dict(model.state_dict()))
    layer = model.get_submodule(name.removesuffix(".weight"))
    return layer.standardized_weight() if isinstance(layer, StandardizedConv2d) else layer.weight  # pyright: ignore[reportReturnType]: it is a parameter


def principal(vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Directions (n, D) along which vectors (m, D) differ most, and their shares of the variance.

    n is `count`, or less where the rest of the variance is rounding, but at least 1. The number of
    a direction that is largest in size is positive.
    """
    centered = vectors - vectors.mean(axis=0)
    _, sizes, directions = np.linalg.svd(centered, full_matrices=False)
    variance = sizes**2
    explained = variance / max(variance.sum(), np.finfo(float).tiny)
    count = max(1, min(count, int((explained > NOTHING).sum())))
    directions = directions[:count]
    largest = np.abs(directions).argmax(axis=1)
    signs = np.sign(directions[np.arange(count), largest])
    return directions * signs[:, None], explained[:count]


@torch.no_grad()
def position_similarity(
    model: VisionTransformer, grid: Grid | None = None
) -> tuple[PositionTiles, ...]:
    """How alike the positions of patches are, on the model's grid or on another.

    One for each table of positions: the stem's, the one that layers share, or one for each layer,
    counted from 0; none where there are no positions. Class and other tokens are left out.

    Positions that are added to tokens are compared by cosine similarity, each with each. Relative
    ones have a key for each offset and none for a place: tile (i, j) tells how alike the key of the
    offset from (i, j) to each patch and the key of no offset are, again by cosine. Their offsets
    are those of the raster order (appendix D.4), so that the end of a row is next to the beginning
    of the row below.
    """
    grid = model.config.grid if grid is None else grid
    tables: list[Any] = [*model.encoder.positions] or [model.position]
    if isinstance(tables[0], NoPosEmbed):
        return ()
    kind = "relative positions" if isinstance(tables[0], RelativePosEmbed) else "positions"
    titles = [f"{kind} of layer {layer}" for layer in range(len(tables))]
    if len(tables) == 1:
        titles = [f"{kind} of all layers" if model.config.position_place == "shared" else kind]
    return tuple(
        PositionTiles(
            title=title,
            kind=model.config.position,
            similarity=alike(table, grid).astype(np.float32),
        )
        for title, table in zip(titles, tables, strict=True)
    )


def alike(position: Any, grid: Grid) -> np.ndarray:
    """Cosine similarities (h, w, h, w) of the positions of patches."""
    patches = grid[0] * grid[1]
    if isinstance(position, RelativePosEmbed):
        keys, offsets = position.embedding(grid)
        units = unit(as_array(keys[: 2 * patches - 1]))  # (2 N - 1, K), without prefix rows
        similarity = units @ units[patches - 1]  # with the offset of a patch to itself
        return similarity[offsets[-patches:, -patches:].cpu().numpy()].reshape(*grid, *grid)
    units = unit(as_array(position.embedding(grid)[-patches:]))  # (N, D)
    return (units @ units.T).reshape(*grid, *grid)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1; one of length 0 stays, and is like nothing."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(vectors.dtype).tiny)


@torch.no_grad()
def mixing(model: MlpMixer, count: int = SHOWN) -> np.ndarray:
    """What hidden units of the first token-mixing MLP read: (n, h, w), a weight for each patch.

    The `count` units with the largest weights, those that change slowly over the picture first, as
    in Mixer's figure 5.
    """
    weight = as_array(model.blocks[0].token_mixing.fc1.weight)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]: a MixerBlock
    largest = np.argsort(-np.linalg.norm(weight, axis=1), kind="stable")[:count]
    units = weight[largest].reshape(-1, *model.config.grid)
    return units[np.argsort(frequency(units), kind="stable")].astype(np.float32)


def frequency(pictures: np.ndarray) -> np.ndarray:
    """How quickly pictures (n, h, w) change: the mean frequency, weighed by its power."""
    down, across = np.fft.fftfreq(pictures.shape[1]), np.fft.fftfreq(pictures.shape[2])
    cycles = np.hypot(down[:, None], across)  # (h, w), for each patch
    power = np.abs(np.fft.fft2(pictures)) ** 2
    total = np.maximum(power.sum(axis=(1, 2)), np.finfo(float).tiny)
    return (power * cycles).sum(axis=(1, 2)) / total  # (n,)


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()
