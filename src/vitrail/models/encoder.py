"""The Transformer encoder: pre-norm self-attention and MLP blocks.

Equations 2 and 3 of Dosovitskiy et al. 2021. Tokens in, tokens out: this file knows nothing
of images or classes, which `vit.py` puts before and after it.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import ConfigError
from vitrail.models.activation import gelu
from vitrail.models.config import Gelu, MlpKind, Numerics, VitConfig
from vitrail.models.kept import bare, may_reuse
from vitrail.models.position import POSITIONS, Grid, Relative


class SelfAttention(nn.Module):
    """Every token looks at every token, in `heads` independent ways (appendix A)."""

    def __init__(self, width: int, heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.merge = nn.Linear(width, width)

    def forward(
        self,
        tokens: Tensor,
        relative: Relative | None = None,
        read: int | None = None,
        scores: Tensor | None = None,
    ) -> Tensor:
        """What the first `read` tokens, or all, have seen.

        `relative` holds a key for each offset, where positions are relative (`position.py`);
        else `scores`, if given, are added to those of attention.
        """
        if read is not None and bare(self.qkv):
            return self.look(tokens, read, relative, scores)
        query, key, value = self.query_key_value(tokens)
        query = query[:, :, :read]
        if relative is not None:
            scores = relative_scores(query, relative)
        return self.mix(query, key, value, scores)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None
    ) -> Tensor:
        """What each query finds in the values."""
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=scores)  # (B, H, N, K)
        return self.merge(mixed.transpose(1, 2).flatten(2))  # (B, N, D)

    def look(
        self, tokens: Tensor, read: int, relative: Relative | None, scores: Tensor | None
    ) -> Tensor:
        """What the first `read` tokens (R) have seen, by `look_through`."""
        width, weight, bias = self.merge.in_features, self.qkv.weight, self.qkv.bias
        bias_q, bias_kv = (None, None) if bias is None else (bias[:width], bias[width:])
        query = F.linear(tokens[:, :read], weight[:width], bias_q)
        query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, R, K)
        if relative is not None:
            scores = relative_scores(query, relative)
        mixed = look_through(weight[width:], bias_kv, query, tokens, scores)
        return self.merge(mixed.transpose(1, 2).flatten(2))  # (B, R, D)

    def attention_map(
        self,
        tokens: Tensor,
        relative: Relative | None = None,
        heads: Sequence[int] | None = None,
    ) -> Tensor:
        """Who looks at whom, for all or the chosen heads; `forward` never builds it."""
        query, key, _ = self.query_key_value(tokens)
        if heads is not None:
            query, key = query[:, list(heads)], key[:, list(heads)]
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if relative is not None:
            scores = scores + relative_scores(query, relative)
        return scores.softmax(dim=-1)  # (B, H, N, N), each row sums to 1

    def query_key_value(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Three of (B, H, N, K)."""
        parts = self.qkv(tokens).chunk(3, dim=-1)
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)


def look_through(
    weight: Tensor, bias: Tensor | None, query: Tensor, tokens: Tensor, scores: Tensor | None = None
) -> Tensor:
    """What few queries (B, H, R, K) find in tokens (B, N, D) that get no keys and no values.

    Both would be W x, by `weight` (2 D, D) and `bias` (2 D). A query q meets a key as q (W x),
    which is (q W) x: the few queries go through W in place of the many tokens. And a mean of W x
    is W times the mean of x. The bias of keys adds the same to all scores of a query, which the
    softmax does not see. `scores` (B, H, R, N) are added.
    """
    heads, channels = query.shape[1], query.shape[3]
    w_key, w_value = weight.unflatten(0, (2, heads, channels))  # (H, K, D)
    asked = torch.einsum("bhrk,hkd->bhrd", query, w_key).flatten(1, 2)[:, None]
    if scores is not None:
        scores = scores.expand(*query.shape[:3], -1).flatten(1, 2)[:, None]  # (B, 1, H R, N)
    seen = F.scaled_dot_product_attention(
        asked, tokens[:, None], tokens[:, None], attn_mask=scores, scale=channels**-0.5
    )  # (B, 1, H R, D)
    found = torch.einsum("bhrd,hkd->bhrk", seen[:, 0].unflatten(1, (heads, -1)), w_value)
    return found if bias is None else found + bias.view(2, heads, 1, channels)[1]


def relative_scores(query: Tensor, relative: Relative) -> Tensor:
    """What the offsets add to the attention scores, scaled as the content is."""
    scores = query @ relative.keys.to(query.dtype).mT / query.shape[-1] ** 0.5  # (B, H, N, R)
    offsets = relative.offsets[: query.shape[2]]  # a row for each query
    return scores.gather(-1, offsets.expand(*scores.shape[:3], -1))  # (B, H, N, N)


class Mlp(nn.Module):
    """Two dense layers with a GELU between them, the same for each token."""

    def __init__(self, width: int, hidden: int, numerics: Numerics, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.gelu: Gelu = numerics.gelu

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.fc1(tokens)
        hidden = gelu(hidden, self.gelu, reuse=may_reuse(hidden, self.fc1))
        return self.fc2(self.dropout(hidden))


class SwiGlu(nn.Module):
    """One half of the hidden channels gates the other (Shazeer 2020), as DINOv2's giant has it."""

    def __init__(self, width: int, hidden: int, numerics: Numerics, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, value = self.fc1(tokens).chunk(2, dim=-1)
        return self.fc2(self.dropout(F.silu(gate) * value))


MLPS: dict[MlpKind, type[Mlp] | type[SwiGlu]] = {"gelu": Mlp, "swiglu": SwiGlu}


class Branch(nn.Module):
    """The end of a residual branch: scale it (LayerScale), drop some of it, or all of it."""

    def __init__(
        self, width: int, *, scale: float | None, dropout: float, drop_path: float
    ) -> None:
        super().__init__()
        self.first_scale = scale
        self.scale = None if scale is None else nn.Parameter(torch.full((width,), scale))
        self.dropout = nn.Dropout(dropout)
        self.drop_path = drop_path

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.dropout(tokens)
        if self.scale is not None:
            tokens = tokens * self.scale
        return drop_path(tokens, self.drop_path) if self.training else tokens


def drop_path(tokens: Tensor, chance: float) -> Tensor:
    """Leave the branch out for some pictures (Huang et al. 2016), and weigh the rest up for it."""
    if not chance:
        return tokens
    keep = torch.rand(tokens.shape[0], 1, 1, device=tokens.device) >= chance  # (B, 1, 1)
    return tokens * (keep.to(tokens.dtype) / (1 - chance))


class Block(nn.Module):
    """One encoder layer."""

    def __init__(self, config: VitConfig, drop_path: float = 0.0) -> None:
        super().__init__()

        def branch() -> Branch:
            return Branch(
                config.width, scale=config.layer_scale, dropout=config.dropout, drop_path=drop_path
            )

        eps = config.numerics.norm_eps
        self.norm1 = nn.LayerNorm(config.width, eps=eps)
        self.attention = SelfAttention(config.width, config.heads, bias=config.qkv_bias)
        self.branch1 = branch()
        self.norm2 = nn.LayerNorm(config.width, eps=eps)
        self.mlp = MLPS[config.mlp](config.width, config.mlp_width, config.numerics, config.dropout)
        self.branch2 = branch()

    def forward(
        self, tokens: Tensor, relative: Relative | None = None, read: int | None = None
    ) -> Tensor:
        """The tokens after this layer; only the first `read`, if nobody reads the others."""
        seen = self.branch1(self.attention(self.norm1(tokens), relative, read))
        tokens = self.sum(tokens[:, :read], seen)  # equation 2
        return self.sum(tokens, self.branch2(self.mlp(self.norm2(tokens))))  # equation 3

    def sum(self, tokens: Tensor, branch: Tensor) -> Tensor:
        """tokens + branch, in the memory of the branch if it is ours alone."""
        if branch.dtype == tokens.dtype and may_reuse(branch, *self.modules()):
            return branch.add_(tokens)
        return tokens + branch

    def attention_map(
        self,
        tokens: Tensor,
        relative: Relative | None = None,
        heads: Sequence[int] | None = None,
    ) -> Tensor:
        """The map of this layer's attention for the tokens that enter the layer."""
        return self.attention.attention_map(self.norm1(tokens), relative, heads)


class Encoder(nn.Module):
    """All blocks in a row, then a LayerNorm; positions of every layer live here too."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        last = max(1, config.depth - 1)
        blocks = [Block(config, config.drop_path * index / last) for index in range(config.depth)]
        self.blocks = cast(list[Block], nn.ModuleList(blocks))  # so that types are known
        positions = [POSITIONS[config.position](config) for _ in range(config.layer_positions)]
        self.positions = cast(list[Any], nn.ModuleList(positions))
        self.relative = config.position == "relative"
        self.norm = nn.LayerNorm(config.width, eps=config.numerics.norm_eps)
        self.checkpointing = False  # forget what a block computes and do it again for the gradient
        self.merge = 0  # pairs of patches that each block merges: `merging.py`

    def forward(self, tokens: Tensor, grid: Grid, read: int | None = None) -> Tensor:
        """All tokens, or the first `read` of them: then the last block does no more than these."""
        last = len(self.blocks) - 1
        for index in range(len(self.blocks)):
            entered, relative = self.enter(index, tokens, grid)
            tokens = self.step(index, entered, relative, read if index == last else None)
        return self.norm(tokens)

    def enter(self, index: int, tokens: Tensor, grid: Grid) -> tuple[Tensor, Relative | None]:
        """What block `index` reads: tokens with this layer's positions, and its relative keys."""
        if self.merge:
            raise ConfigError(
                f"merge={self.merge} leaves no token for each patch, which all tokens, layers "
                "and attention maps are about; set model.merge = 0 to look at them"
            )
        if not self.positions:
            return tokens, None
        position = self.positions[index % len(self.positions)]  # a shared one is the only one
        return (tokens, position.at(grid)) if self.relative else (position(tokens, grid), None)

    def step(
        self, index: int, tokens: Tensor, relative: Relative | None, read: int | None = None
    ) -> Tensor:
        """What block `index` makes of what it reads."""
        return step(self.blocks[index], tokens, self.checkpointing, relative, read)


def step(block: nn.Module, tokens: Tensor, checkpointing: bool, *rest: object) -> Tensor:
    """What a block makes of tokens, remembering all of it or, for less memory, nothing."""
    if checkpointing and torch.is_grad_enabled():
        return cast(Tensor, checkpoint(block, tokens, *rest, use_reentrant=False))
    return block(tokens, *rest)
