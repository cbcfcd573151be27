"""Explanation maps: attention rollout, and attention weighted by the gradient of a class's logit.

Attention rollout (Abnar & Zuidema 2020; figures 6 and 14): each layer's attention is fused over its
heads, the identity is added for the residual connection, rows are divided by their sums, and the
layers are multiplied. One layer is in memory at a time.

The class-specific rules multiply one matrix per layer, from the last layer to the first, onto the
row of weights with which the head reads tokens. So it is enough to carry that row along, with the
graph of one block at a time: the tokens that enter each block are kept from a forward pass without
gradients, and the block is run again with an explicit attention map. `METHODS` has every map that
`faithfulness.py` can evaluate.

Shapes: B images, h x w patches, N tokens: P of the prefix, then the patches; D width, H heads,
K classes.
"""

from collections import deque
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
    token_offset,
)
from vitrail.models.pooling import AttentionPool
from vitrail.models.pos_embed import Grid
from vitrail.models.vit import Model, VisionTransformer, eval_mode

Fuse = Literal["mean", "max", "min"]
Rule = Callable[[Tensor, Tensor], Tensor]  # row (B, N), a layer's map (B, N, N) → row
Method = Callable[[Model, Tensor, Tensor | None], Tensor]  # model, images, classes → (B, h, w)

FUSES: dict[Fuse, Callable[..., Tensor]] = {
    "mean": torch.mean,  # the paper's (appendix D.8)
    "max": torch.amax,
    "min": torch.amin,
}
PRODUCT_BYTES = 64 * 2**20  # of products (N, N) of the images that go through the model together
BATCH_VALUES = 2**24  # of all layers' tokens and one layer's attention: 64 MB, a few times over


def rollout(model: Model, images: Tensor, *, fuse: Fuse = "mean", discard: float = 0.0) -> Tensor:
    """Return how much each patch contributes to the head's input, for normalized images: (B, h, w).

    The head's input is the class token (with a distillation token, both), the mean of the patches,
    or the output of attention pooling. The largest value is 1, nothing else is normalized; a
    constant map is left as it is.

    `discard` is the fraction of each layer's fused values that are set to zero, lowest first,
    before the identity is added; those of the class token's column stay.
    """
    vit = require_attention(model, "rollout")
    if fuse not in FUSES:
        raise unknown("fuse", fuse, FUSES)
    if not 0 <= discard < 1:
        raise ConfigError(f"discard={discard} is a fraction of attention: at least 0 and below 1")
    high, wide = patch_grid(vit, images)
    tokens = vit.config.num_prefix + high * wide
    products = max(1, PRODUCT_BYTES // (tokens * tokens * images.element_size()))
    together = min(products, batch_size_for(vit, (images.shape[2], images.shape[3])))
    rows = []
    with torch.no_grad(), eval_mode(vit):
        for batch in images.split(together):
            product = last = None
            for layer in iter_layers(vit, batch):
                attention = fuse_heads(layer, fuse)  # (B, N, N)
                if discard:
                    values = attention.flatten(1)
                    rank = int(values.shape[1] * discard) + 1
                    lowest = attention < values.kthvalue(rank, dim=1).values[:, None, None]
                    lowest[..., : vit.config.num_class_tokens] = False
                    attention = attention.masked_fill(lowest, 0)
                attention.diagonal(dim1=1, dim2=2).add_(1)
                attention /= attention.sum(dim=-1, keepdim=True)
                product = attention if product is None else attention @ product
                last = layer.tokens
            assert product is not None
            assert last is not None
            rows.append(row_times(head_weights(vit, last, fuse), product))
    return to_maps(vit, torch.cat(rows), images)


def fuse_heads(layer: LayerAttention, fuse: Fuse) -> Tensor:
    """Return one map for all heads: (B, N, N)."""
    images, _, tokens, _ = layer.query.shape
    fused = layer.query.new_empty(images, tokens, tokens)
    for part, rows in layer.slices():
        fused[part, rows] = FUSES[fuse](layer.distributions(part, rows), dim=1)
    return fused


def head_weights(model: VisionTransformer, tokens: Tensor, fuse: Fuse) -> Tensor:
    """Return the weight of each of the last tokens (B, N, D) in the head's input: (B, N)."""
    config, weights = model.config, tokens.new_zeros(tokens.shape[:2])
    if isinstance(model.pool, AttentionPool):
        maps = model.pool.attention_map(model.encoder.norm(tokens))  # (B, H, 1, h * w)
        weights[:, config.num_prefix :] = FUSES[fuse](maps[:, :, 0], dim=1)
    else:
        if config.pool != "mean":
            weights[:, : config.num_class_tokens] = 1 / config.num_class_tokens
        if config.pool != "cls":
            weights[:, config.num_prefix :] = 1 / (tokens.shape[1] - config.num_prefix)
    return weights


def gradient_rollout(model: Model, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Attention rollout that counts only attention in favor of the class: (B, h, w).

    A layer's map is the mean over heads of the positive part of gradient times attention; the
    identity is added and rows are divided by their sum, as in rollout. `classes` (B,) default to
    the predicted ones. The largest value of each map is 1.
    """

    def rule(row: Tensor, layer_map: Tensor) -> Tensor:
        row = row / (1 + layer_map.sum(dim=-1))  # divides the rows of layer_map + identity
        return row + row_times(row, layer_map)

    return class_maps(model, images, classes, rule)


def relevance(model: Model, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Transformer relevance for a class: (B, h, w), the largest value of each map 1.

    Chefer et al. 2021, "Generic attention-model explainability" (arXiv:2103.15679), rule for
    self-attention: R <- R + A R, starting with the identity, with A the mean over heads of the
    positive part of gradient times attention. It is the simpler successor of the same authors'
    variant with layer-wise relevance propagation. `classes` (B,) default to the predicted ones.
    """
    return class_maps(model, images, classes, lambda row, layer: row + row_times(row, layer))


def last_layer(model: Model, images: Tensor) -> Tensor:
    """Attention of the head's input in the last layer, mean over heads: (B, h, w)."""
    vit = require_attention(model, "map of its last layer")
    rows = []
    with torch.no_grad(), eval_mode(vit):
        for batch in images.split(gradient_batch_size(vit, images)):
            (last,) = deque(iter_layers(vit, batch), maxlen=1)
            weights = head_weights(vit, last.tokens, "mean")
            rows.append(row_times(weights, fuse_heads(last, "mean")))
    return to_maps(vit, torch.cat(rows), images)


def random_map(model: Model, images: Tensor) -> Tensor:
    """Baseline: uniform noise, the same on every call: (B, h, w)."""
    shape = (len(images), *patch_grid(require_attention(model, "map"), images))
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(images)


def center_map(model: Model, images: Tensor) -> Tensor:
    """Baseline: a centered Gaussian, sigma a quarter of each side: (B, h, w).

    On a square image its width does not matter to insertion and deletion, only the order.
    """
    vit = require_attention(model, "map")
    offset = token_offset(vit)
    down, across = (
        torch.exp(-8 * ((torch.arange(side) + 0.5 - offset) / side - 0.5) ** 2)  # sigma = side/4
        for side in patch_grid(vit, images)
    )
    gaussian = (down[:, None] * across).to(images)  # (h, w)
    return (gaussian / gaussian.max()).expand(len(images), -1, -1)


CLASS_AGNOSTIC = ("rollout", "last layer")
CLASS_SPECIFIC = ("relevance", "gradient rollout")  # the default of the server first
METHODS: dict[str, Method] = {
    "rollout": lambda model, images, classes: rollout(model, images),
    "gradient rollout": gradient_rollout,
    "relevance": relevance,
    "last layer": lambda model, images, classes: last_layer(model, images),
    "random": lambda model, images, classes: random_map(model, images),
    "center": lambda model, images, classes: center_map(model, images),
}


def class_maps(model: Model, images: Tensor, classes: Tensor | None, rule: Rule) -> Tensor:
    """Carry each image's row back through all layers: (B, h, w)."""
    vit = require_attention(model, "map of a class")
    if vit.head is None:
        raise ConfigError("the model has no head, so there are no class maps; use rollout")
    if classes is not None:
        classes = check_classes(classes, len(images), vit.config.num_classes).to(images.device)
    size, rows = gradient_batch_size(vit, images), []
    with torch.inference_mode(False), eval_mode(vit):
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            with torch.no_grad():
                tokens, grid = vit.prepare_tokens(images[part])
                entering = []  # the tokens (B, N, D) that enter each block
                for index in range(vit.config.depth):
                    entering.append(tokens)
                    tokens = vit.encoder.run_layer(index, tokens, grid)
                row = head_weights(vit, tokens, "mean")  # (B, N)
            with torch.enable_grad():
                tokens = tokens.detach().requires_grad_()
                logits = vit.run_head(vit.encoder.norm(tokens))[1]  # (B, K)
                assert logits is not None
                chosen = logits.argmax(dim=1) if classes is None else classes[part]
                logit = logits.gather(1, chosen[:, None]).sum()
                (gradient,) = torch.autograd.grad(logit, tokens)  # (B, N, D)
            for index in reversed(range(vit.config.depth)):
                layer_map, gradient = backward_block(vit, index, entering.pop(), grid, gradient)
                row = rule(row, layer_map)
            rows.append(row)
    return to_maps(vit, torch.cat(rows), images)


@torch.enable_grad()
def backward_block(
    vit: VisionTransformer, index: int, tokens: Tensor, grid: Grid, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient of a block's output, return the mean over heads of the positive part of
    gradient times attention (B, N, N), and the gradient of the block's input (B, N, D)."""
    recorded: list[Tensor] = []
    attention = vit.encoder.attention(index)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        recorded.append(attention.weights(query, key, bias))  # (B, H, N, N)
        return recorded[0] @ value

    tokens = tokens.detach().requires_grad_()
    entered, relative = vit.encoder.layer_inputs(index, tokens, grid)
    output = vit.encoder.blocks[index](entered, relative, attend=attend)
    (weights,) = recorded
    weight_gradient, input_gradient = torch.autograd.grad(output, (weights, tokens), gradient)
    return (weight_gradient * weights.detach()).relu_().mean(dim=1), input_gradient


def row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """Multiply a row (B, N) by a matrix (B, N, N)."""
    return (row[:, None] @ matrix)[:, 0]


def to_maps(vit: VisionTransformer, rows: Tensor, images: Tensor) -> Tensor:
    """Arrange the patches of rows (B, N) on their grid: (B, h, w), the maximum of each image 1;
    constant maps stay as they are."""
    maps = rows[:, vit.config.num_prefix :].unflatten(1, patch_grid(vit, images))
    largest, smallest = maps.amax(dim=(1, 2), keepdim=True), maps.amin(dim=(1, 2), keepdim=True)
    return torch.where(largest > smallest, maps / largest, maps)


def check_classes(classes: Tensor, images: int, num_classes: int) -> Tensor:
    """Return class indices as int64 if they are valid, one per image."""
    if classes.shape != (images,) or classes.is_floating_point():
        raise ConfigError(
            f"classes have shape {tuple(classes.shape)} and type {classes.dtype}; "
            f"expected one integer for each of {images} images"
        )
    if images and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        raise ConfigError(
            f"classes {int(classes.min())} to {int(classes.max())} are out of range; "
            f"the model has classes 0 to {num_classes - 1}"
        )
    return classes.long()


def gradient_batch_size(vit: VisionTransformer, images: Tensor) -> int:
    """Return how many images to process at a time: all layers' tokens are kept of each."""
    config, (height, width) = vit.config, patch_grid(vit, images)
    tokens = height * width + config.num_prefix
    values = tokens * (config.depth * config.width + config.heads * tokens)  # of one image
    return max(1, BATCH_VALUES // values)
