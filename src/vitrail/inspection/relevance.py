"""Class-specific maps: attention weighted by the gradient of a class's logit.

Both rules multiply one matrix per layer, from the last layer to the first, onto the row of weights
with which the head reads tokens. So it is enough to carry that row along, with the graph of one
block at a time: the tokens that enter each block are kept from a forward pass without gradients,
and the block is run again with an explicit attention map. `METHODS` has every map that
`faithfulness.py` can evaluate.

Shapes: B images, h x w patches, N tokens, D width, H heads, K classes.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.inspection.attention import iter_layers, patch_grid, require_attention, token_offset
from vitrail.inspection.rollout import fuse_heads, head_weights, rollout, scale_to_max
from vitrail.models.attention import attention_weights
from vitrail.models.encoder import Block
from vitrail.models.pos_embed import Grid, RelativeKeys
from vitrail.models.vit import Model, VisionTransformer, eval_mode

Rule = Callable[[Tensor, Tensor], Tensor]  # row (B, N), a layer's map (B, N, N) → row
Method = Callable[[Model, Tensor, Tensor | None], Tensor]  # model, images, classes → (B, h, w)

BATCH_VALUES = 2**24  # of all layers' tokens and one layer's attention: 64 MB, a few times over


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


def plain_rollout(model: Model, images: Tensor) -> Tensor:
    """Attention rollout with the paper's settings; the same for every class: (B, h, w)."""
    vit = require_attention(model, "rollout")
    with eval_mode(vit):
        return rollout(vit, images)


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
    "rollout": lambda model, images, classes: plain_rollout(model, images),
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
    size = gradient_batch_size(vit, images)
    batches = images.split(size)
    batch_classes = [None] * len(batches)
    if classes is not None:
        classes = check_classes(classes, len(images), vit.config.num_classes).to(images.device)
        batch_classes = classes.split(size)
    rows = []
    with torch.inference_mode(False), eval_mode(vit):
        for batch, chosen in zip(batches, batch_classes, strict=True):
            with torch.no_grad():
                (*entering, last), grid = tokens_by_layer(vit, batch)
                row = head_weights(vit, last, "mean")  # (B, N)
            gradient = logit_gradient(vit, last, chosen)  # (B, N, D)
            for index in reversed(range(len(entering))):
                layer_map, gradient = backward_block(vit, index, entering.pop(), grid, gradient)
                row = rule(row, layer_map)
            rows.append(row)
    return to_maps(vit, torch.cat(rows), images)


def tokens_by_layer(vit: VisionTransformer, images: Tensor) -> tuple[list[Tensor], Grid]:
    """Return the tokens (B, N, D) before the first block and after each, and their grid."""
    tokens, grid = vit.prepare_tokens(images)
    layers = [tokens]
    for index in range(vit.config.depth):
        layers.append(vit.encoder.run_layer(index, layers[-1], grid))
    return layers, grid


@torch.enable_grad()
def logit_gradient(vit: VisionTransformer, tokens: Tensor, classes: Tensor | None) -> Tensor:
    """Return the gradient of each image's class logit by the last tokens: (B, N, D)."""
    tokens = tokens.detach().requires_grad_()
    logits = vit.run_head(vit.encoder.norm(tokens))[1]  # (B, K)
    assert logits is not None
    classes = logits.argmax(dim=1) if classes is None else classes
    return torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), tokens)[0]


@torch.enable_grad()
def backward_block(
    vit: VisionTransformer, index: int, tokens: Tensor, grid: Grid, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient of a block's output, return the mean over heads of the positive part of
    gradient times attention (B, N, N), and the gradient of the block's input (B, N, D)."""
    tokens = tokens.detach().requires_grad_()
    entered, relative = vit.encoder.layer_inputs(index, tokens, grid)
    output, weights = forward_with_attention(vit.encoder.blocks[index], entered, relative)
    weight_gradient, input_gradient = torch.autograd.grad(output, (weights, tokens), gradient)
    return (weight_gradient * weights.detach()).relu_().mean(dim=1), input_gradient


def forward_with_attention(
    block: Block, tokens: Tensor, relative: RelativeKeys | None
) -> tuple[Tensor, Tensor]:
    """Run a block without the fused kernel: its tokens, and the attention (B, H, N, N)."""
    recorded: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        recorded.append(attention_weights(query, key, bias))
        return recorded[0] @ value

    return block(tokens, relative, attend=attend), recorded[0]


def row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """Multiply a row (B, N) by a matrix (B, N, N)."""
    return (row[:, None] @ matrix)[:, 0]


def to_maps(vit: VisionTransformer, rows: Tensor, images: Tensor) -> Tensor:
    """Arrange the patches of rows (B, N) on their grid: (B, h, w), the maximum of each image 1."""
    patches = rows[:, vit.config.num_prefix :]
    return scale_to_max(patches.unflatten(1, patch_grid(vit, images)))


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
