"""Where a model sees a class: attention weighed by the gradient of that class's logit.

Both rules multiply one matrix per layer, from the last layer to the first, onto a row that says
what the head reads. So it is enough to carry that row along, and to have the graph of one block at
a time: the tokens that enter each block are remembered from a forward pass without gradients, and
the block is run again with its attention map in the open. `METHODS` has every map that
`scoring.py` can put to the test.

Shapes: B images, h x w patches, N tokens, D width, H heads, K classes.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.inspection.layers import grid_of, lag, walk, with_attention
from vitrail.inspection.rollout import fused, largest_is_one, read_by_head, rollout
from vitrail.models.attention import attention_weights
from vitrail.models.encoder import Block
from vitrail.models.pos_embed import Grid, RelativeKeys
from vitrail.models.vit import Model, VisionTransformer, eval_mode

Rule = Callable[[Tensor, Tensor], Tensor]  # the row (B, N), a layer's map (B, N, N) → the row
Method = Callable[[Model, Tensor, Tensor | None], Tensor]  # model, images, classes → (B, h, w)

VALUES_AT_ONCE = 2**24  # of all layers' tokens and one layer's attention: 64 MB, a few times over


def gradient_rollout(model: Model, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Attention rollout in which only attention that speaks for the class counts: (B, h, w).

    A layer's map is the mean over heads of the positive part of gradient times attention; the
    identity is added and rows are divided by their sum, as in rollout. `classes` (B,) are the
    predicted ones if not given. The largest value of each map is 1.
    """

    def rule(row: Tensor, seen: Tensor) -> Tensor:
        row = row / (1 + seen.sum(dim=-1))  # what dividing row i of seen + identity comes to
        return row + through(row, seen)

    return class_maps(model, images, classes, rule)


def relevance(model: Model, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Transformer relevance for a class: (B, h, w), the largest value of each map 1.

    Chefer et al. 2021, "Generic attention-model explainability" (arXiv:2103.15679), its rule for
    self-attention: R <- R + A R, beginning with the identity, with A the mean over heads of the
    positive part of gradient times attention. It is the simpler successor of the same authors'
    variant with layer-wise relevance propagation. `classes` (B,) are the predicted ones if not
    given.
    """
    return class_maps(model, images, classes, lambda row, seen: row + through(row, seen))


def plain_rollout(model: Model, images: Tensor) -> Tensor:
    """Attention rollout as the paper has it; the same for every class: (B, h, w)."""
    vit = with_attention(model, "rollout")
    with eval_mode(vit):
        return rollout(vit, images)


def last_layer(model: Model, images: Tensor) -> Tensor:
    """Where what the head reads looks in the last layer, mean over heads: (B, h, w)."""
    vit = with_attention(model, "map of its last layer")
    rows = []
    with torch.no_grad(), eval_mode(vit):
        for part in images.split(followed_at_once(vit, images)):
            (last,) = deque(walk(vit, part), maxlen=1)
            rows.append(through(read_by_head(vit, last.tokens, "mean"), fused(last, "mean")))
    return as_maps(vit, torch.cat(rows), images)


def random_map(model: Model, images: Tensor) -> Tensor:
    """A map that knows nothing, the same one whenever it is asked for: (B, h, w)."""
    shape = (len(images), *grid_of(with_attention(model, "map"), images))
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(images)


def center_map(model: Model, images: Tensor) -> Tensor:
    """What photographers do: a Gaussian in the middle, a quarter of each side wide: (B, h, w).

    On a square picture its width does not matter to insertion and deletion, only the order.
    """
    vit = with_attention(model, "map")
    down, across = (
        torch.exp(-8 * ((torch.arange(side) + 0.5 - lag(vit)) / side - 0.5) ** 2)  # sigma = side/4
        for side in grid_of(vit, images)
    )
    bump = (down[:, None] * across).to(images)  # (h, w)
    return (bump / bump.max()).expand(len(images), -1, -1)


GENERAL = ("rollout", "last layer")  # the same for every class
FOR_CLASSES = (
    "relevance",
    "gradient rollout",
)  # can be asked about a class; the most telling first
METHODS: dict[str, Method] = {
    "rollout": lambda model, images, classes: plain_rollout(model, images),
    "gradient rollout": gradient_rollout,
    "relevance": relevance,
    "last layer": lambda model, images, classes: last_layer(model, images),
    "random": lambda model, images, classes: random_map(model, images),
    "center": lambda model, images, classes: center_map(model, images),
}


def class_maps(model: Model, images: Tensor, classes: Tensor | None, rule: Rule) -> Tensor:
    """Each picture's row after all layers, as a map."""
    vit = with_attention(model, "map of a class")
    if vit.head is None:
        raise ConfigError("a model without a head knows no classes; ask it for rollout")
    size = followed_at_once(vit, images)
    parts = images.split(size)
    asked = [None] * len(parts)
    if classes is not None:
        classes = checked(classes, len(images), vit.config.num_classes).to(images.device)
        asked = classes.split(size)
    with torch.inference_mode(False), eval_mode(vit):
        rows = [row_of(vit, *part, rule) for part in zip(parts, asked, strict=True)]
    return as_maps(vit, torch.cat(rows), images)


def row_of(vit: VisionTransformer, images: Tensor, classes: Tensor | None, rule: Rule) -> Tensor:
    """What is left of the row that the head reads at the first tokens: (B, N)."""
    with torch.no_grad():
        (*entering, final), grid = tokens_by_layer(vit, images)
        row = read_by_head(vit, final, "mean")  # (B, N)
    gradient = logit_gradient(vit, final, classes)  # (B, N, D)
    for index in reversed(range(len(entering))):
        seen, gradient = back_through(vit, index, entering.pop(), grid, gradient)
        row = rule(row, seen)
    return row


def tokens_by_layer(vit: VisionTransformer, images: Tensor) -> tuple[list[Tensor], Grid]:
    """The tokens (B, N, D) before the first block and after each, and their grid."""
    tokens, grid = vit.prepare_tokens(images)
    found = [tokens]
    for index in range(vit.config.depth):
        found.append(vit.encoder.run_layer(index, found[-1], grid))
    return found, grid


def logits_from(vit: VisionTransformer, tokens: Tensor) -> Tensor:
    """Logits (B, K) of the tokens after the last block."""
    logits = vit.run_head(vit.encoder.norm(tokens))[1]
    assert logits is not None
    return logits


@torch.enable_grad()
def logit_gradient(vit: VisionTransformer, tokens: Tensor, classes: Tensor | None) -> Tensor:
    """How the logit of its class moves with each picture's last tokens: (B, N, D)."""
    tokens = tokens.detach().requires_grad_()
    logits = logits_from(vit, tokens)
    classes = logits.argmax(dim=1) if classes is None else classes
    return torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), tokens)[0]


@torch.enable_grad()
def back_through(
    vit: VisionTransformer, index: int, tokens: Tensor, grid: Grid, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient of what a block made: its map of what counts (B, N, N), and the gradient
    of the tokens (B, N, D) that entered it."""
    tokens = tokens.detach().requires_grad_()
    entered, relative = vit.encoder.layer_inputs(index, tokens, grid)
    made, weights = forward_with_attention(vit.encoder.blocks[index], entered, relative)
    of_weights, of_tokens = torch.autograd.grad(made, (weights, tokens), gradient)
    return (of_weights * weights.detach()).relu_().mean(dim=1), of_tokens


def forward_with_attention(
    block: Block, tokens: Tensor, relative: RelativeKeys | None
) -> tuple[Tensor, Tensor]:
    """Run a block without the fused kernel: its tokens, and the attention (B, H, N, N)."""
    recorded: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        recorded.append(attention_weights(query, key, bias))
        return recorded[0] @ value

    return block(tokens, relative, attend=attend), recorded[0]


def through(row: Tensor, seen: Tensor) -> Tensor:
    """The row (B, N) times a map (B, N, N)."""
    return (row[:, None] @ seen)[:, 0]


def as_maps(vit: VisionTransformer, rows: Tensor, images: Tensor) -> Tensor:
    """The patches of rows (B, N) on their grid: (B, h, w), the largest of each picture 1."""
    patches = rows[:, vit.config.num_prefix :]
    return largest_is_one(patches.unflatten(1, grid_of(vit, images)))


def checked(classes: Tensor, images: int, known: int) -> Tensor:
    """Class numbers, one for each picture, that the model knows."""
    if classes.shape != (images,) or classes.is_floating_point():
        raise ConfigError(
            f"classes of shape {tuple(classes.shape)} and type {classes.dtype} do not go with "
            f"{images} pictures; give one whole number for each"
        )
    if images and not 0 <= int(classes.min()) <= int(classes.max()) < known:
        raise ConfigError(
            f"classes {int(classes.min())} to {int(classes.max())} are asked for; "
            f"the model knows 0 to {known - 1}"
        )
    return classes.long()


def followed_at_once(vit: VisionTransformer, images: Tensor) -> int:
    """How many pictures are followed back at a time: all layers' tokens are kept of each."""
    config, (height, width) = vit.config, grid_of(vit, images)
    tokens = height * width + config.num_prefix
    values = tokens * (config.depth * config.width + config.heads * tokens)  # of one picture
    return max(1, VALUES_AT_ONCE // values)
