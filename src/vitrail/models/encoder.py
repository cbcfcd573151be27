"""The Transformer encoder: pre-norm blocks of self-attention and MLP.

Equations 2 and 3 of Dosovitskiy et al. 2021. `Block` is the only implementation of a block's
forward pass; token merging and inspection reuse its two halves and its `attend` argument.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head, Q queries.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import ConfigError
from vitrail.models.attention import Attend, SelfAttention
from vitrail.models.config import VitConfig
from vitrail.models.memory import can_overwrite
from vitrail.models.mlp import MLPS
from vitrail.models.pos_embed import POS_EMBEDS, Grid, RelativeKeys


class Block(nn.Module):
    """One encoder layer."""

    def __init__(self, config: VitConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        width, eps = config.width, config.numerics.norm_eps
        branch = {"scale": config.layer_scale, "dropout": config.dropout, "drop_path": drop_path}
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = SelfAttention(width, config.heads, bias=config.qkv_bias)
        self.branch1 = Branch(width, **branch)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = MLPS[config.mlp](width, config.mlp_width, config.numerics, config.dropout)
        self.branch2 = Branch(width, **branch)

    def forward(
        self,
        tokens: Tensor,
        relative: RelativeKeys | None = None,
        num_queries: int | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """Return the first `num_queries` tokens after this block, or all: (B, Q, D)."""
        tokens = self.add_attention(tokens, relative, num_queries, attend=attend)  # equation 2
        return self.add_mlp(tokens)  # equation 3

    def add_attention(
        self,
        tokens: Tensor,
        relative: RelativeKeys | None = None,
        num_queries: int | None = None,
        bias: Tensor | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """First half of the block; the arguments are those of `SelfAttention.forward`."""
        update = self.attention(self.norm1(tokens), relative, num_queries, bias, attend)
        return self.add(tokens[:, :num_queries], self.branch1(update))

    def add_mlp(self, tokens: Tensor) -> Tensor:
        """Second half of the block."""
        return self.add(tokens, self.branch2(self.mlp(self.norm2(tokens))))

    def add(self, tokens: Tensor, update: Tensor) -> Tensor:
        """tokens + update, in the memory of `update` where possible."""
        if update.dtype == tokens.dtype and can_overwrite(update, *self.modules()):
            return update.add_(tokens)
        return tokens + update


class Branch(nn.Module):
    """The end of a residual branch: dropout, LayerScale and stochastic depth."""

    def __init__(
        self, width: int, *, scale: float | None, dropout: float, drop_path: float
    ) -> None:
        super().__init__()
        self.initial_scale = scale
        self.scale = None if scale is None else nn.Parameter(torch.full((width,), scale))
        self.dropout = nn.Dropout(dropout)
        self.drop_path = drop_path

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.dropout(tokens)
        if self.scale is not None:
            tokens = tokens * self.scale
        return drop_path(tokens, self.drop_path) if self.training else tokens


def drop_path(tokens: Tensor, rate: float) -> Tensor:
    """Stochastic depth per image (Huang et al. 2016), scaled to keep the expectation."""
    if not rate:
        return tokens
    keep = torch.rand(tokens.shape[0], 1, 1, device=tokens.device) >= rate  # (B, 1, 1)
    return tokens * (keep.to(tokens.dtype) / (1 - rate))


class Encoder(nn.Module):
    """All blocks, the position embeddings inside the encoder, and the final LayerNorm."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        last = max(1, config.depth - 1)
        blocks = [Block(config, config.drop_path * index / last) for index in range(config.depth)]
        self.blocks = cast(list[Block], nn.ModuleList(blocks))  # for the type checker
        positions = [POS_EMBEDS[config.position](config) for _ in range(config.num_layer_positions)]
        self.positions = cast(list[Any], nn.ModuleList(positions))
        self.relative = config.position == "relative"
        self.norm = nn.LayerNorm(config.width, eps=config.numerics.norm_eps)
        self.checkpointing = False  # activation checkpointing
        self.merge = 0  # pairs of patches merged per block, see token_merging.py

    def forward(self, tokens: Tensor, grid: Grid, num_queries: int | None = None) -> Tensor:
        """Return all tokens after the final norm, or the first `num_queries`.

        In the latter case the last block computes no others.
        """
        last = len(self.blocks) - 1
        for index in range(len(self.blocks)):
            tokens = self.run_layer(index, tokens, grid, num_queries if index == last else None)
        return self.norm(tokens)

    def run_layer(
        self, index: int, tokens: Tensor, grid: Grid, num_queries: int | None = None
    ) -> Tensor:
        """Return the tokens after block `index`."""
        tokens, relative = self.layer_inputs(index, tokens, grid)
        block = self.blocks[index]
        return run_block(block, tokens, relative, num_queries, checkpointing=self.checkpointing)

    def layer_inputs(
        self, index: int, tokens: Tensor, grid: Grid
    ) -> tuple[Tensor, RelativeKeys | None]:
        """Add the position embedding of layer `index`, or return its relative keys."""
        if self.merge:
            raise ConfigError(
                f"merge={self.merge} leaves no token for each patch, which tokens, layers and "
                "attention maps need; set model.merge = 0 to inspect them"
            )
        if not self.positions:
            return tokens, None
        position = self.positions[index % len(self.positions)]  # a shared one is the only one
        if self.relative:
            return tokens, position.embedding(grid)
        return position(tokens, grid), None


def run_block(block: nn.Module, tokens: Tensor, *args: object, checkpointing: bool) -> Tensor:
    """Run a block, with activation checkpointing if enabled and gradients are recorded."""
    if checkpointing and torch.is_grad_enabled():
        return cast(Tensor, checkpoint(block, tokens, *args, use_reentrant=False))
    return block(tokens, *args)
