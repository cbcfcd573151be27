"""Where the whole encoder looks: attention rollout (Abnar & Zuidema 2020), figures 6 and 14.

Each layer's attention is fused over its heads, the identity is added for the residual connection,
rows are divided by their sums, and the layers are multiplied. One layer is in memory at a time.

Shapes: B images, H heads, N tokens: P of the prefix, then h x w patches; q queries.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from vitrail.errors import ConfigError, unknown
from vitrail.inspection.layers import Layer, at_once, grid_of, walk, with_attention
from vitrail.models.pooling import AttentionPool
from vitrail.models.vit import VisionTransformer, eval_mode

AT_ONCE = 64 * 2**20  # bytes of products (N, N) of the images that go through the model together

Fuse = Literal["mean", "max", "min"]
FUSES: dict[Fuse, Callable[..., Tensor]] = {
    "mean": torch.mean,  # the paper's (appendix D.8)
    "max": torch.amax,
    "min": torch.amin,
}


def rollout(
    model: VisionTransformer, images: Tensor, *, fuse: Fuse = "mean", discard: float = 0.0
) -> Tensor:
    """How much each patch reaches what the head reads, for normalized images: (B, h, w).

    What the head reads is the class token (with a distillation token, both), the mean of the
    patches, or what attention pooling makes of them. The largest value is 1, nothing else is
    normalized; a map that is the same everywhere is left as it is.

    `discard` is the share of each layer's fused values that are set to zero, lowest first, before
    the identity is added; those of the class token's column stay.
    """
    with_attention(model, "rollout")
    if fuse not in FUSES:
        raise unknown("fuse", fuse, FUSES)
    if not 0 <= discard < 1:
        raise ConfigError(f"discard={discard} is a share of attention: at least 0 and below 1")
    high, wide = grid_of(model, images)
    tokens = model.config.num_prefix + high * wide
    products = max(1, AT_ONCE // (tokens * tokens * images.element_size()))
    together = min(products, at_once(model, (images.shape[2], images.shape[3])))
    with torch.no_grad(), eval_mode(model):
        rows = [rolled_out(model, few, fuse, discard) for few in images.split(together)]
    return largest_is_one(torch.cat(rows).unflatten(1, (high, wide)))


def rolled_out(model: VisionTransformer, images: Tensor, fuse: Fuse, discard: float) -> Tensor:
    """The share of each patch in what the head reads: (B, h * w)."""
    product = tokens = None
    for layer in walk(model, images):
        attention = fused(layer, fuse)  # (B, N, N)
        if discard:
            attention = without_lowest(attention, discard, spare=model.config.num_class_tokens)
        attention.diagonal(dim1=1, dim2=2).add_(1)
        attention /= attention.sum(dim=-1, keepdim=True)
        product = attention if product is None else attention @ product
        tokens = layer.tokens
    assert product is not None
    assert tokens is not None
    row = read_by_head(model, tokens, fuse)[:, None] @ product  # (B, 1, N)
    return row[:, 0, model.config.num_prefix :]


def fused(layer: Layer, fuse: Fuse) -> Tensor:
    """One map for all heads: (B, N, N)."""
    images, _, tokens, _ = layer.query.shape
    result = layer.query.new_empty(images, tokens, tokens)
    for some, rows in layer.slices():
        result[some, rows] = FUSES[fuse](layer.scores(some, rows).softmax(dim=-1), dim=1)
    return result


def without_lowest(maps: Tensor, share: float, *, spare: int) -> Tensor:
    """Maps (B, N, N) with the lowest share of their values at zero, but for some first columns."""
    values = maps.flatten(1)
    lowest = int(values.shape[1] * share)
    least_kept = values.kthvalue(lowest + 1, dim=1).values  # (B,)
    discarded = maps < least_kept[:, None, None]
    discarded[..., :spare] = False
    return maps.masked_fill(discarded, 0)


def read_by_head(model: VisionTransformer, tokens: Tensor, fuse: Fuse) -> Tensor:
    """How much of each of the last tokens (B, N, D) the head reads: (B, N)."""
    config, weights = model.config, tokens.new_zeros(tokens.shape[:2])
    if isinstance(model.pool, AttentionPool):
        maps = model.pool.attention_map(model.encoder.norm(tokens))  # (B, H, 1, h * w)
        weights[:, config.num_prefix :] = FUSES[fuse](maps[:, :, 0], dim=1)
    elif config.pool == "cls":
        weights[:, : config.num_class_tokens] = 1 / config.num_class_tokens
    else:
        weights[:, config.num_prefix :] = 1 / (tokens.shape[1] - config.num_prefix)
    return weights


def largest_is_one(maps: Tensor) -> Tensor:
    """Maps (B, h, w) divided by their largest values, but for those that are all the same."""
    largest, smallest = maps.amax(dim=(1, 2), keepdim=True), maps.amin(dim=(1, 2), keepdim=True)
    return torch.where(largest > smallest, maps / largest, maps)
