"""The layers of an encoder one after the other, each with what its attention maps are made of.

The forward pass keeps its fused attention. `Layer.scores` makes a map, or some rows of it, beside
it; the numbers are those of `models/attention.py`, and a test holds them together bit for bit.

Shapes: B images, H heads, N tokens, K channels per head, D width; b images and q queries at once.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.attention import relative_bias
from vitrail.models.patch_embed import check_images
from vitrail.models.pos_embed import Grid, RelativeKeys
from vitrail.models.registry import name_of
from vitrail.models.vit import Model, VisionTransformer

AT_ONCE = 4 * 2**20  # bytes of maps made together: they should still be in the cache when read
VALUES_AT_ONCE = 2**24  # of the pictures that go through a model together: 64 MB
MOST_AT_ONCE = 64  # pictures: more are no faster


def with_attention(model: nn.Module, what: str) -> VisionTransformer:
    """The model, if there is attention in it to look at; `what` cannot be had otherwise."""
    if isinstance(model, VisionTransformer):
        return model
    name = name_of(model.config)  # pyright: ignore[reportArgumentType]: another family
    raise ConfigError(
        f"{name} has no attention, and so no {what}; look at its filters, or ask a Vision "
        "Transformer or a hybrid, such as ViT-S/16 or R26+ViT-S/32"
    )


class Layer(NamedTuple):
    """What a layer's maps are made of, and what comes after it."""

    query: Tensor  # (B, H, N, K)
    key: Tensor  # (B, H, N, K)
    relative: RelativeKeys | None
    tokens: Tensor  # (B, N, D), after the block

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Images and queries whose maps are made at once: several images, or rows of one."""
        images, heads, tokens, _ = self.query.shape
        rows = max(1, AT_ONCE // (heads * tokens * self.query.element_size()))
        together = max(1, rows // tokens)
        for first in range(0, images, together):
            for row in range(0, tokens, rows):
                yield slice(first, first + together), slice(row, row + rows)

    def scores(self, images: slice, rows: slice) -> Tensor:
        """Attention before its softmax: (b, H, q, N)."""
        query, key = self.query[images, :, rows], self.key[images]
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if self.relative is not None:
            offsets = self.relative.offsets[rows]
            scores += relative_bias(query, RelativeKeys(self.relative.keys, offsets))
        return scores


def walk(model: VisionTransformer, images: Tensor) -> Iterator[Layer]:
    """Each layer in turn, one in memory at a time."""
    recorded: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        recorded[:] = query, key
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    tokens, grid = model.prepare_tokens(images)
    for index, block in enumerate(model.encoder.blocks):
        tokens, relative = model.encoder.layer_inputs(index, tokens, grid)
        tokens = block(tokens, relative, attend=attend)
        query, key = recorded
        yield Layer(query, key, relative, tokens)


def at_once(model: Model, size: tuple[int, int]) -> int:
    """How many pictures of (height, width) pixels go through a model together.

    Counted is what a block holds of the tokens or, if that is more, the first maps of a ResNet.
    """
    height, width = size
    values = 16 * height * width  # 64 channels at half the size
    if isinstance(model, VisionTransformer):
        config, (down, across) = model.config, model.config.stride
        tokens = config.num_prefix + (height // down) * (width // across)
        values = max(values, tokens * (4 * config.width + config.mlp_width))
    return max(1, min(MOST_AT_ONCE, VALUES_AT_ONCE // values))


def lag(model: Model) -> float:
    """How far what a token sees lies above and to the left of its patch, as a share of a patch.

    Half a patch, less half a pixel, after a convolutional stem: each of its 3x3 kernels stands on
    the first of the two pixels that it goes on by. Elsewhere tokens see their patches (the paths
    through a ResNet disagree, by a tenth of a patch on the whole).
    """
    if isinstance(model, VisionTransformer) and model.config.stem == "conv":
        return (1 - 1 / model.config.stride[0]) / 2
    return 0.0


def grid_of(model: VisionTransformer, images: Tensor) -> Grid:
    """Patches down and across of images (B, C, H, W) that the model can read."""
    down, across = model.config.stride
    check_images(images, model.config.channels, (down, across))
    return images.shape[2] // down, images.shape[3] // across
