"""Attention rollout (Abnar & Zuidema 2020), figures 6 and 14.

Each layer's attention is fused over its heads, the identity is added for the residual connection,
rows are divided by their sums, and the layers are multiplied. One layer is in memory at a time.

Shapes: B images, H heads, N tokens: P of the prefix, then h x w patches; D width.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from vitrail.errors import ConfigError, unknown
from vitrail.inspection.attention import (
    LayerAttention,
    batch_size_for,
    iter_layers,
    patch_grid,
    require_attention,
)
from vitrail.models.pooling import AttentionPool
from vitrail.models.vit import VisionTransformer, eval_mode

PRODUCT_BYTES = 64 * 2**20  # of products (N, N) of the images that go through the model together

Fuse = Literal["mean", "max", "min"]
FUSES: dict[Fuse, Callable[..., Tensor]] = {
    "mean": torch.mean,  # the paper's (appendix D.8)
    "max": torch.amax,
    "min": torch.amin,
}


def rollout(
    model: VisionTransformer, images: Tensor, *, fuse: Fuse = "mean", discard: float = 0.0
) -> Tensor:
    """Return how much each patch contributes to the head's input, for normalized images: (B, h, w).

    The head's input is the class token (with a distillation token, both), the mean of the patches,
    or the output of attention pooling. The largest value is 1, nothing else is normalized; a
    constant map is left as it is.

    `discard` is the fraction of each layer's fused values that are set to zero, lowest first,
    before the identity is added; those of the class token's column stay.
    """
    require_attention(model, "rollout")
    if fuse not in FUSES:
        raise unknown("fuse", fuse, FUSES)
    if not 0 <= discard < 1:
        raise ConfigError(f"discard={discard} is a fraction of attention: at least 0 and below 1")
    high, wide = patch_grid(model, images)
    tokens = model.config.num_prefix + high * wide
    products = max(1, PRODUCT_BYTES // (tokens * tokens * images.element_size()))
    together = min(products, batch_size_for(model, (images.shape[2], images.shape[3])))
    with torch.no_grad(), eval_mode(model):
        rows = [rollout_batch(model, batch, fuse, discard) for batch in images.split(together)]
    return scale_to_max(torch.cat(rows).unflatten(1, (high, wide)))


def rollout_batch(model: VisionTransformer, images: Tensor, fuse: Fuse, discard: float) -> Tensor:
    """Return the weight of each patch in the head's input: (B, h * w)."""
    product = tokens = None
    for layer in iter_layers(model, images):
        attention = fuse_heads(layer, fuse)  # (B, N, N)
        if discard:
            attention = discard_lowest(attention, discard, keep=model.config.num_class_tokens)
        attention.diagonal(dim1=1, dim2=2).add_(1)
        attention /= attention.sum(dim=-1, keepdim=True)
        product = attention if product is None else attention @ product
        tokens = layer.tokens
    assert product is not None
    assert tokens is not None
    row = head_weights(model, tokens, fuse)[:, None] @ product  # (B, 1, N)
    return row[:, 0, model.config.num_prefix :]


def fuse_heads(layer: LayerAttention, fuse: Fuse) -> Tensor:
    """Return one map for all heads: (B, N, N)."""
    images, _, tokens, _ = layer.query.shape
    fused = layer.query.new_empty(images, tokens, tokens)
    for part, rows in layer.slices():
        fused[part, rows] = FUSES[fuse](layer.scores(part, rows).softmax(dim=-1), dim=1)
    return fused


def discard_lowest(maps: Tensor, fraction: float, *, keep: int) -> Tensor:
    """Set the lowest fraction of maps (B, N, N) to zero, except in the first `keep` columns."""
    values = maps.flatten(1)
    threshold = values.kthvalue(int(values.shape[1] * fraction) + 1, dim=1).values  # (B,)
    discarded = maps < threshold[:, None, None]
    discarded[..., :keep] = False
    return maps.masked_fill(discarded, 0)


def head_weights(model: VisionTransformer, tokens: Tensor, fuse: Fuse) -> Tensor:
    """Return the weight of each of the last tokens (B, N, D) in the head's input: (B, N)."""
    config, weights = model.config, tokens.new_zeros(tokens.shape[:2])
    if isinstance(model.pool, AttentionPool):
        maps = model.pool.attention_map(model.encoder.norm(tokens))  # (B, H, 1, h * w)
        weights[:, config.num_prefix :] = FUSES[fuse](maps[:, :, 0], dim=1)
    elif config.pool == "cls":
        weights[:, : config.num_class_tokens] = 1 / config.num_class_tokens
    else:
        weights[:, config.num_prefix :] = 1 / (tokens.shape[1] - config.num_prefix)
    return weights


def scale_to_max(maps: Tensor) -> Tensor:
    """Divide maps (B, h, w) by their maxima; constant maps stay as they are."""
    largest, smallest = maps.amax(dim=(1, 2), keepdim=True), maps.amin(dim=(1, 2), keepdim=True)
    return torch.where(largest > smallest, maps / largest, maps)
