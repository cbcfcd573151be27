"""Attention layer by layer: maps, and statistics over many images.

The forward pass keeps its fused attention. `LayerAttention.weights` computes a map, or some rows of
it, separately; its values are bit-identical to those of `models/attention.py` (tested). Statistics
are accumulated over blocks of rows, so that no layer's maps are ever held as a whole.

Shapes: B images, L layers, H heads, N tokens: P of the prefix (class token, registers, ...), then
h x w patches; K channels per head, D width; b images and q queries at once; T merged tokens.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError, DataError
from vitrail.models.attention import Relative, SelfAttention, relative_bias
from vitrail.models.patch_embed import check_images
from vitrail.models.pos_embed import Grid
from vitrail.models.registry import name_of
from vitrail.models.vit import Model, VisionTransformer, eval_mode

CHUNK_BYTES = 4 * 2**20  # of maps computed together: they should stay in the cache
BATCH_VALUES = 2**24  # activations of images that go through a model together: 64 MB
MAX_BATCH = 64  # images: larger batches are no faster
MAX_NORMS = 2**23  # norms kept for quantiles, over all layers
OUTLIER_FACTOR = 3.0  # times the median norm of a layer
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
MIN_PATCHES = 36  # that the attention browser keeps before it averages heads instead


class AttentionStats(NamedTuple):
    """Attention over many images, by layer and head: figure 7, right, and figure 11."""

    images: int
    patch: tuple[float, float]  # height and width of a patch in pixels
    distance: dict[str, np.ndarray]  # variant → (L, H) mean distance in pixels
    entropy: np.ndarray  # (L, H) mean over queries, as a fraction of the maximum: 0 to 1
    redundancy: np.ndarray  # (L, H, H) cosine similarity of the heads' maps, 1 on the diagonal
    norms: np.ndarray  # (L, 5) quantiles 0, 0.25, 0.5, 0.75, 1 of the patch tokens' norms
    prefix_norms: np.ndarray  # (L, P) mean norm of class token, registers, ...
    outliers: np.ndarray  # (L,) fraction of patch tokens whose norm is far above the median


def require_attention(model: nn.Module, what: str) -> VisionTransformer:
    """Return the model if it is a Vision Transformer; else raise an error about `what` it lacks."""
    if isinstance(model, VisionTransformer):
        return model
    config: Any = model.config
    axial = getattr(config, "unit", "") == "axial"
    reason = "attends along lines of feature maps of several sizes" if axial else "has no attention"
    raise ConfigError(
        f"{name_of(config)} {reason}, so there is no {what}; use a Vision Transformer or a hybrid, "
        "such as ViT-S/16 or R26+ViT-S/32, or inspect its filters only"
    )


class LayerAttention(NamedTuple):
    """Queries and keys of a layer, from which its maps are computed, and its output."""

    attention: SelfAttention
    query: Tensor  # (B, H, N, K)
    key: Tensor  # (B, H, N, K)
    relative: Relative
    tokens: Tensor  # (B, N, D), after the block

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield images and queries whose maps fit `CHUNK_BYTES`: several images, or rows of one."""
        images, heads, tokens, _ = self.query.shape
        rows = max(1, CHUNK_BYTES // (heads * tokens * self.query.element_size()))
        together = max(1, rows // tokens)
        for first in range(0, images, together):
            for row in range(0, tokens, rows):
                yield slice(first, first + together), slice(row, row + rows)

    def weights(self, images: slice, rows: slice) -> Tensor:
        """Return the attention weights of some queries: (b, H, q, N)."""
        query, key = self.query[images, :, rows], self.key[images]
        return self.attention.weights(query, key, relative_bias(query, self.relative, rows))

    def distributions(self, images: slice, rows: slice) -> Tensor:
        """Return the weights; those without softmax as absolute values divided by their sum."""
        weights = self.weights(images, rows)
        if self.attention.fused:
            return weights
        weights = weights.abs()
        return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def iter_layers(model: VisionTransformer, images: Tensor) -> Iterator[LayerAttention]:
    """Run the encoder, one layer in memory at a time."""
    recorded: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        recorded[:] = query, key
        return attention.attend(query, key, value, bias)

    tokens, grid = model.prepare_tokens(images)
    for index, block in enumerate(model.encoder.blocks):
        attention = model.encoder.attention(index)
        tokens, relative = model.encoder.layer_inputs(index, tokens, grid)
        tokens = block(tokens, relative, attend=attend)
        query, key = recorded
        yield LayerAttention(attention, query, key, relative, tokens)


def batch_size_for(model: Model, size: tuple[int, int]) -> int:
    """Return how many images of (height, width) pixels go through a model together.

    The larger of a block's activations and the first feature maps of a ResNet counts.
    """
    height, width = size
    values = 16 * height * width  # 64 channels at half the size
    if isinstance(model, VisionTransformer):
        config, (down, across) = model.config, model.config.stride
        tokens = config.num_prefix + (height // down) * (width // across)
        values = max(values, tokens * (4 * config.width + config.mlp_width))
    return max(1, min(MAX_BATCH, BATCH_VALUES // values))


def token_offset(model: Model) -> float:
    """Return how far up and left of its patch a token's receptive field is, in patches.

    Half a patch minus half a pixel after a convolutional stem: each 3x3 kernel of stride 2 is
    centered on the first of two pixels. 0 elsewhere (the paths through a ResNet disagree, by a
    tenth of a patch in the mean).
    """
    if isinstance(model, VisionTransformer) and model.config.stem == "conv":
        return (1 - 1 / model.config.stride[0]) / 2
    return 0.0


def patch_grid(model: VisionTransformer, images: Tensor) -> Grid:
    """Return the rows and columns of patches of valid images (B, C, H, W)."""
    down, across = model.config.stride
    check_images(images, model.config.channels, (down, across))
    return images.shape[2] // down, images.shape[3] // across


@torch.inference_mode()
def attention_stats(model: VisionTransformer, batches: Iterable[Tensor]) -> AttentionStats:
    """Compute attention statistics over batches of normalized images (B, C, H, W) of one size.

    Distance is that between the centers of query and key in pixels, weighted by attention, mean
    over queries and images (figure 7, right). Variants differ in how prefix tokens count:

        patches                 rows and columns of class token, registers etc. are dropped, and
                                the rest is taken as it is: the usual implementation
        patches, renormalized   the same with each remaining row divided by its sum
        all tokens              prefix tokens count too, as queries and as keys, and are placed at
                                the center of the image; rows sum to 1 as they are

    A model without prefix tokens has "patches" alone: there, all three are equal.

    Entropy is a fraction of log N, mean over all queries and images; redundancy the cosine
    similarity of the heads' whole maps, mean over images. Norms are those of the tokens after each
    block, before the final norm. An outlier's norm is above 3 times the median of its layer. With
    very many images, quantiles and outliers are those of every second, fourth, ... image.
    """
    require_attention(model, "attention distance")
    stats = None
    with eval_mode(model):
        for images in batches:
            stats = stats or StatsAccumulator(model, patch_grid(model, images))
            stats.add(images)
    if stats is None or not stats.images:
        raise DataError("attention statistics need at least one image")
    return stats.result()


class StatsAccumulator:
    """Sums over images, in float64."""

    def __init__(self, model: VisionTransformer, grid: Grid) -> None:
        self.model, self.grid = model, grid
        config, device = model.config, next(model.parameters()).device
        self.prefix = config.num_prefix
        down, across = (
            (torch.arange(count, dtype=torch.float64) - (count - 1) / 2) * pixels
            for count, pixels in zip(grid, config.stride, strict=True)
        )
        patches = torch.cartesian_prod(down, across)  # centers in pixels from the image's: (h w, 2)
        self.positions = torch.cat([patches.new_zeros(self.prefix, 2), patches]).to(device)
        self.images = 0

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(config.depth, *shape, dtype=torch.float64, device=device)

        names = ("patches", "patches, renormalized", "all tokens")
        variants = names if self.prefix else names[:1]
        self.distance = {name: zeros(config.heads) for name in variants}
        self.entropy = zeros(config.heads)
        self.redundancy = zeros(config.heads, config.heads)
        self.prefix_norms = zeros(self.prefix)
        # Norms of every `norms_step`-th image, doubled whenever `max_norm_images` are exceeded.
        self.norms: list[np.ndarray] = []
        self.norms_step = 1
        self.max_norm_images = max(2, MAX_NORMS // (config.depth * grid[0] * grid[1]))

    def add(self, images: Tensor) -> None:
        grid = patch_grid(self.model, images)
        if grid != self.grid:
            raise DataError(
                f"images of {grid[0]} x {grid[1]} patches after images of {self.grid[0]} x "
                f"{self.grid[1]}; attention statistics need images of one size"
            )
        patch_norms = []
        for index, layer in enumerate(iter_layers(self.model, images)):
            self.add_maps(index, layer)
            norms = torch.linalg.vector_norm(layer.tokens, dim=-1, dtype=torch.float64)  # (B, N)
            self.prefix_norms[index] += norms[:, : self.prefix].sum(0)
            patch_norms.append(norms[:, self.prefix :])
        for norms in torch.stack(patch_norms, dim=1).float().cpu().numpy():  # (L, h * w)
            if self.images % self.norms_step == 0:
                self.norms.append(norms.copy())  # a view would keep the whole batch
            self.images += 1
            if len(self.norms) > self.max_norm_images:
                self.norms, self.norms_step = self.norms[::2], 2 * self.norms_step

    def add_maps(self, index: int, layer: LayerAttention) -> None:
        (count, heads), prefix = layer.query.shape[:2], self.prefix
        products = self.entropy.new_zeros(count, heads, heads)
        for images, rows in layer.slices():
            maps = layer.distributions(images, rows).double()  # (b, H, q, N)
            self.entropy[index] += torch.special.entr(maps).sum(dim=(0, 2, 3))
            products[images] += maps.flatten(2) @ maps.flatten(2).mT
            weighted = maps * torch.cdist(self.positions[rows], self.positions)  # (b, H, q, N)
            to_patches = weighted[..., prefix:].sum(-1)  # (b, H, q)
            if prefix:
                to_all = weighted[..., :prefix].sum(-1) + to_patches
                self.distance["all tokens"][index] += to_all.sum(dim=(0, 2))
                patches = slice(max(0, prefix - rows.start), None)  # queries that are patches
                to_patches = to_patches[..., patches]
                total = maps[..., patches, prefix:].sum(-1).clamp_min(torch.finfo(maps.dtype).tiny)
                renormalized = (to_patches / total).sum(dim=(0, 2))
                self.distance["patches, renormalized"][index] += renormalized
            self.distance["patches"][index] += to_patches.sum(dim=(0, 2))
        lengths = products.diagonal(dim1=1, dim2=2).sqrt()  # (B, H)
        self.redundancy[index] += (products / (lengths[:, :, None] * lengths[:, None])).sum(0)

    def result(self) -> AttentionStats:
        tokens = len(self.positions)
        queries = dict.fromkeys(self.distance, tokens - self.prefix) | {"all tokens": tokens}
        max_entropy = math.log(tokens) or 1.0
        norms = np.stack(self.norms)  # (images, L, h * w)
        median = np.quantile(norms, 0.5, axis=(0, 2), keepdims=True)  # (1, L, 1)
        down, across = self.model.config.stride
        return AttentionStats(
            images=self.images,
            patch=(float(down), float(across)),
            distance={
                name: (total / (self.images * queries[name])).cpu().numpy()
                for name, total in self.distance.items()
            },
            entropy=(self.entropy / (self.images * tokens * max_entropy)).cpu().numpy(),
            redundancy=(self.redundancy / self.images).cpu().numpy(),
            norms=np.quantile(norms, QUANTILES, axis=(0, 2)).T,
            prefix_norms=(self.prefix_norms / self.images).cpu().numpy(),
            outliers=(norms > OUTLIER_FACTOR * median).mean(axis=(0, 2)),
        )


@torch.inference_mode()
def attention_for_browser(
    model: VisionTransformer, image: Tensor, *, max_bytes: int = 4_000_000
) -> tuple[np.ndarray, np.ndarray, Grid]:
    """Return all attention of an image (C, H, W) as bytes (L, H, T, T), the value that each row's
    255 stands for (L, H, T), and the grid of its patches.

    Beyond `max_bytes`, patches are merged in blocks of 2 x 2, 3 x 3, ...: summed as keys, averaged
    as queries. If fewer than 36 patches would be left, heads are averaged to one instead. Prefix
    tokens are not merged; they come first.
    """
    require_attention(model, "attention browser")
    config, full_grid = model.config, patch_grid(model, image[None])
    prefix, blocks = config.num_prefix, range(1, max(full_grid) + 1)
    grids = {n: (math.ceil(full_grid[0] / n), math.ceil(full_grid[1] / n)) for n in blocks}
    fitting = (
        (heads, block, grid)
        for heads, fewest in ((config.heads, MIN_PATCHES), (1, 1))
        for block, grid in grids.items()
        if block == 1 or math.prod(grid) >= fewest
        if config.depth * heads * (prefix + math.prod(grid)) ** 2 <= max_bytes
    )
    heads, block, grid = next(fitting, (1, max(full_grid), (1, 1)))
    down, across = (torch.arange(side) // block for side in full_grid)
    patches = prefix + down[:, None] * grid[1] + across  # (h, w)
    merged = torch.cat([torch.arange(prefix), patches.flatten()]).to(image.device)  # (N,)
    member = F.one_hot(merged).to(image.dtype)  # (N, T)
    layers, peaks = [], []
    with eval_mode(model):
        for layer in iter_layers(model, image[None]):
            maps = member.new_zeros(layer.query.shape[1], member.shape[1], member.shape[1])
            for images, rows in layer.slices():
                part = layer.distributions(images, rows)[0]  # (H, q, N)
                maps += member[rows].mT @ (part @ member)  # (H, T, T)
            maps = maps / member.sum(0)[:, None]
            if heads == 1:
                maps = maps.mean(0, keepdim=True)
            peaks.append(maps.amax(-1))
            layers.append((255 * maps / peaks[-1][..., None]).round().byte().cpu())
    return torch.stack(layers).numpy(), torch.stack(peaks).float().cpu().numpy(), grid
