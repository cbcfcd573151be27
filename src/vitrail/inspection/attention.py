"""Attention over many pictures: how far it reaches, how wide it is, which heads agree.

Maps are made beside the forward pass, which keeps its fused attention, some rows at a time, and
added up at once: no layer's maps are ever held as a whole, however many pictures there are.

Shapes: B images, L layers, H heads, N tokens: P of the prefix (class token, registers, ...), then
h x w patches; K channels per head, D width; q queries and T tokens that are left of N.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError
from vitrail.inspection.findings import Study
from vitrail.inspection.layers import Layer, grid_of, walk, with_attention
from vitrail.models.config import VitConfig
from vitrail.models.pos_embed import Grid
from vitrail.models.vit import VisionTransformer, eval_mode

NORMS_KEPT = 2**23  # norms that quantiles are taken of, over all layers
OUTLYING = 3.0  # times the median norm of a layer
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
FEW_PATCHES = 36  # below this a picture's attention is no longer worth browsing


@torch.inference_mode()
def study(
    model: VisionTransformer,
    batches: Iterable[Tensor],
    *,
    progress: Callable[[int], None] | None = None,
) -> Study:
    """How attention goes over batches of normalized images (B, C, H, W), all of one size.

    Distance is that between the centers of query and key in pixels, weighted by attention, mean
    over queries and images (figure 7, right). Variants differ by what stands before the patches:

        patches                 rows and columns of class token, registers etc. are dropped, and
                                what is left is taken as it is: the usual port
        patches, renormalized   the same with each row that is left divided by its sum
        all tokens              those tokens count too, as queries and as keys, and stand at the
                                center of the picture; rows sum to 1 as they are

    A model without such tokens has "patches" alone: there, all three are the same.

    Entropy is a share of log N, mean over all queries and images; redundancy the cosine similarity
    of the heads' whole maps, mean over images. Norms are those of the tokens after each block,
    before the last norm. An outlier's norm is above 3 times the median of its layer. Where pictures
    are very many, quantiles and outliers are those of every second, fourth, ... picture.

    `progress` hears how many images are done.
    """
    with_attention(model, "attention distance")
    tally = None
    with eval_mode(model):
        for images in batches:
            tally = tally or Tally(model, grid_of(model, images))
            tally.add(images)
            if progress is not None:
                progress(tally.images)
    if tally is None or not tally.images:
        raise DataError("there are no images to study attention with; give one or more")
    return tally.finish()


class Tally:
    """Sums over the images so far, in float64."""

    def __init__(self, model: VisionTransformer, grid: Grid) -> None:
        self.model, self.grid = model, grid
        config, device = model.config, next(model.parameters()).device
        self.patch = config.stride
        self.prefix = config.num_prefix
        self.places = places(grid, self.patch, self.prefix).to(device)  # (N, 2)
        self.images = 0

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(config.depth, *shape, dtype=torch.float64, device=device)

        names = ("patches", "patches, renormalized", "all tokens")
        variants = names if self.prefix else names[:1]
        self.distance = {name: zeros(config.heads) for name in variants}
        self.entropy = zeros(config.heads)
        self.redundancy = zeros(config.heads, config.heads)
        self.prefix_norms = zeros(self.prefix)
        self.norms = Sample(max(2, NORMS_KEPT // (config.depth * grid[0] * grid[1])))

    def add(self, images: Tensor) -> None:
        grid = grid_of(self.model, images)
        if grid != self.grid:
            raise DataError(
                f"images of {grid[0]} x {grid[1]} patches came after images of {self.grid[0]} x "
                f"{self.grid[1]}; a study is of images of one size"
            )
        patch_norms = []
        for index, layer in enumerate(walk(self.model, images)):
            self.add_maps(index, layer)
            norms = torch.linalg.vector_norm(layer.tokens, dim=-1, dtype=torch.float64)  # (B, N)
            self.prefix_norms[index] += norms[:, : self.prefix].sum(0)
            patch_norms.append(norms[:, self.prefix :])
        self.norms.add(torch.stack(patch_norms, dim=1).float().cpu().numpy())  # (B, L, h * w)
        self.images += len(images)

    def add_maps(self, index: int, layer: Layer) -> None:
        count, heads = layer.query.shape[:2]
        products = self.entropy.new_zeros(count, heads, heads)
        for images, rows in layer.slices():
            scores = layer.scores(images, rows)
            maps = scores.softmax(dim=-1).double()  # (b, H, q, N)
            self.entropy[index] -= (maps * scores.log_softmax(dim=-1)).sum(dim=(0, 2, 3))
            products[images] += maps.flatten(2) @ maps.flatten(2).mT
            self.add_distances(index, maps, rows)
        lengths = products.diagonal(dim1=1, dim2=2).sqrt()  # (B, H)
        alike = products / (lengths[:, :, None] * lengths[:, None])
        self.redundancy[index] += alike.sum(0)

    def add_distances(self, index: int, maps: Tensor, rows: slice) -> None:
        apart = torch.cdist(self.places[rows], self.places)  # (q, N)
        weighted, prefix = maps * apart, self.prefix
        to_patches = weighted[..., prefix:].sum(-1)  # (b, H, q)
        if prefix:
            to_all = weighted[..., :prefix].sum(-1) + to_patches
            self.distance["all tokens"][index] += to_all.sum(dim=(0, 2))
            own = slice(max(0, prefix - rows.start), None)  # queries that are patches
            to_patches = to_patches[..., own]
            kept = maps[..., own, prefix:].sum(-1).clamp_min(torch.finfo(maps.dtype).tiny)
            self.distance["patches, renormalized"][index] += (to_patches / kept).sum(dim=(0, 2))
        self.distance["patches"][index] += to_patches.sum(dim=(0, 2))

    def finish(self) -> Study:
        tokens = len(self.places)
        queries = dict.fromkeys(self.distance, tokens - self.prefix) | {"all tokens": tokens}
        evenly = math.log(tokens) or 1.0  # the entropy of looking at all tokens alike
        norms = self.norms.values()  # (images, L, h * w)
        middle = np.quantile(norms, 0.5, axis=(0, 2), keepdims=True)  # (1, L, 1)
        return Study(
            images=self.images,
            patch=(float(self.patch[0]), float(self.patch[1])),
            distance={
                name: array(total / (self.images * queries[name]))
                for name, total in self.distance.items()
            },
            entropy=array(self.entropy / (self.images * tokens * evenly)),
            redundancy=array(self.redundancy / self.images),
            norms=np.quantile(norms, QUANTILES, axis=(0, 2)).T,
            prefix_norms=array(self.prefix_norms / self.images),
            outliers=(norms > OUTLYING * middle).mean(axis=(0, 2)),
        )


class Sample:
    """Every picture's values; where they grow too many, those of every second, fourth, ... one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: list[np.ndarray] = []
        self.every, self.seen = 1, 0

    def add(self, values: np.ndarray) -> None:
        for value in values:
            if self.seen % self.every == 0:
                self.kept.append(value.copy())  # or the whole batch would be held with it
            self.seen += 1
            if len(self.kept) > self.most:
                self.kept, self.every = self.kept[::2], 2 * self.every

    def values(self) -> np.ndarray:
        return np.stack(self.kept)


def places(grid: Grid, patch: tuple[int, int], prefix: int) -> Tensor:
    """Where tokens stand, in pixels from the center, down and across; the prefix at the center."""
    down, across = (
        (torch.arange(count, dtype=torch.float64) - (count - 1) / 2) * pixels
        for count, pixels in zip(grid, patch, strict=True)
    )
    patches = torch.cartesian_prod(down, across)  # (h * w, 2)
    return torch.cat([patches.new_zeros(prefix, 2), patches])  # (N, 2)


def array(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()


@torch.inference_mode()
def attention_for_browser(
    model: VisionTransformer, image: Tensor, *, most: int = 4_000_000
) -> tuple[np.ndarray, np.ndarray, Grid]:
    """All of an image's (C, H, W) attention as bytes (L, H, T, T), what each row's largest stands
    for (L, H, T), and the grid of its patches.

    Each row's largest is 255. Where that would be more than `most` bytes, patches are put together
    in blocks of 2 x 2, 3 x 3, ...: as keys they are added up, as queries averaged. Where that would
    leave fewer than 36 patches, heads are averaged to one instead. Other tokens stay single; they
    come first.
    """
    with_attention(model, "attention browser")
    config = model.config
    fine = grid_of(model, image[None])
    heads, block, grid = coarseness(config, fine, most)
    owners = owners_of(fine, block, config.num_prefix).to(image.device)
    member = F.one_hot(owners).to(image.dtype)  # (N, T): who is put together
    layers, peaks = [], []
    with eval_mode(model):
        for layer in walk(model, image[None]):
            coarse = put_together(layer, member)
            if heads == 1:
                coarse = coarse.mean(0, keepdim=True)
            peaks.append(coarse.amax(-1))
            layers.append((255 * coarse / peaks[-1][..., None]).round().byte().cpu())
    return torch.stack(layers).numpy(), torch.stack(peaks).float().cpu().numpy(), grid


def put_together(layer: Layer, member: Tensor) -> Tensor:
    """A layer's maps between coarse tokens, of which `member` (N, T) says what each is made of:
    (H, T, T)."""
    coarse = member.new_zeros(layer.query.shape[1], member.shape[1], member.shape[1])
    for images, rows in layer.slices():
        maps = layer.scores(images, rows).softmax(dim=-1)[0]  # (H, q, N)
        coarse += member[rows].mT @ (maps @ member)  # (H, T, T)
    return coarse / member.sum(0)[:, None]


def coarseness(config: VitConfig, grid: Grid, most: int) -> tuple[int, int, Grid]:
    """How many heads and what blocks of patches are small enough, and the grid of the blocks."""
    smaller = (1, 1)
    for heads, fewest in ((config.heads, FEW_PATCHES), (1, 1)):
        for block in range(1, max(grid) + 1):
            smaller = math.ceil(grid[0] / block), math.ceil(grid[1] / block)
            patches = smaller[0] * smaller[1]
            if block > 1 and patches < fewest:
                break
            if config.depth * heads * (config.num_prefix + patches) ** 2 <= most:
                return heads, block, smaller
    return 1, max(grid), smaller  # as small as it can be


def owners_of(grid: Grid, block: int, prefix: int) -> Tensor:
    """The number of the coarse token that each of the N tokens becomes a part of."""
    down, across = (torch.arange(side) // block for side in grid)
    patches = prefix + down[:, None] * (across[-1] + 1) + across  # (h, w)
    return torch.cat([torch.arange(prefix), patches.flatten()])
