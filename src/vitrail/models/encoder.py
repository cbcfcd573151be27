"""The Transformer encoder: pre-norm blocks of self-attention and MLP, and token merging.

Equations 2 and 3 of Dosovitskiy et al. 2021. `Block` is the only implementation of a block's
forward pass; token merging and inspection reuse its two halves and its `attend` argument.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head, Q queries, M merged.
"""

import math
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from vitrail.errors import ConfigError
from vitrail.models.attention import (
    NORMS,
    Attend,
    Axis,
    Relative,
    SelfAttention,
    has_forward_hooks,
)
from vitrail.models.config import Gelu, MlpKind, Numerics, VitConfig
from vitrail.models.pos_embed import (
    POS_EMBEDS,
    Grid,
    RelativePosEmbed,
    RotaryPosEmbed,
    is_tracing,
    is_transformed,
)

LINEAR = 2 * math.sqrt(2 / math.pi)  # 2 u = LINEAR x + CUBIC x^3
CUBIC = LINEAR * 0.044715
CHUNK = 2**18  # elements processed at a time, so that intermediate values stay in cache


class Mlp(nn.Module):
    """Two dense layers with a GELU in between, applied to each token."""

    def __init__(self, width: int, hidden: int, numerics: Numerics, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.gelu: Gelu = numerics.gelu

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.fc1(tokens)
        hidden = gelu(hidden, self.gelu, inplace=can_overwrite(hidden, self.fc1))
        return self.fc2(self.dropout(hidden))


class SwiGlu(nn.Module):
    """Gated MLP (Shazeer 2020), as in DINOv2's ViT-g: the first half of fc1 is the gate."""

    def __init__(self, width: int, hidden: int, numerics: Numerics, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, value = self.fc1(tokens).chunk(2, dim=-1)
        return self.fc2(self.dropout(F.silu(gate) * value))


MLPS: dict[MlpKind, type[Mlp] | type[SwiGlu]] = {"gelu": Mlp, "swiglu": SwiGlu}


class Block(nn.Module):
    """One encoder layer."""

    def __init__(self, config: VitConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        width, eps = config.width, config.numerics.norm_eps
        branch = {"scale": config.layer_scale, "dropout": config.dropout, "drop_path": drop_path}
        self.norm1 = NORMS[config.norm](width, eps=eps)
        self.attention = SelfAttention(config)
        self.branch1 = Branch(width, **branch)
        self.norm2 = NORMS[config.norm](width, eps=eps)
        self.mlp = MLPS[config.mlp](width, config.mlp_width, config.numerics, config.dropout)
        self.branch2 = Branch(width, **branch)

    def forward(
        self,
        tokens: Tensor,
        relative: Relative = None,
        num_queries: int | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """Return the first `num_queries` tokens after this block, or all: (B, Q, D)."""
        tokens = self.add_attention(tokens, relative, num_queries, attend=attend)  # equation 2
        return self.add_mlp(tokens)  # equation 3

    def add_attention(
        self,
        tokens: Tensor,
        relative: Relative = None,
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
    """All blocks, the position embeddings inside the encoder, and the norms around them."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        last = max(1, config.depth - 1)
        blocks = [Block(config, config.drop_path * index / last) for index in range(config.depth)]
        self.blocks = cast(list[Block], nn.ModuleList(blocks))  # for the type checker
        # Positions inside the encoder: none, one shared by all layers, or one each.
        count = {"shared": 1, "every-layer": config.depth}.get(config.position_place or "stem", 0)
        positions = [POS_EMBEDS[config.position](config) for _ in range(count)]
        self.positions = cast(list[Any], nn.ModuleList(positions))
        norm, eps = NORMS[config.norm], config.numerics.norm_eps
        self.pre_norm = norm(config.width, eps=eps) if config.pre_norm else None
        self.norm = norm(config.width, eps=eps)
        self.axial = config.attention == "axial"
        self.checkpointing = False  # activation checkpointing
        self.merge = 0  # pairs of patches merged per block, at inference

    def forward(self, tokens: Tensor, grid: Grid, num_queries: int | None = None) -> Tensor:
        """Return all tokens after the final norm, or the first `num_queries`.

        In the latter case the last block computes no others.
        """
        last = len(self.blocks) - 1
        for index in range(len(self.blocks)):
            tokens = self.run_layer(index, tokens, grid, num_queries if index == last else None)
        return self.norm(tokens)

    def forward_merging(
        self, tokens: Tensor, num_prefix: int, num_queries: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Like `forward`, merging similar patches; also return the sizes of the tokens (B, N).

        Token merging (Bolya et al. 2023, arXiv:2210.09461): in each block, between attention and
        MLP, the most similar pairs of patches are replaced by their mean, weighted by the number of
        patches each represents (proportional attention: log(size) is added to the logits). There is
        nothing to train. The first `num_prefix` tokens are never merged; with `num_queries` the
        last block merges nothing.
        """
        if self.training:
            raise ConfigError(
                f"merge={self.merge} works in inference only, and the model is in training mode; "
                "call model.eval(), or set model.merge = 0"
            )
        keys: list[Tensor] = []  # (B, H, N, K), of the current block

        def attend(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
            keys[:] = [key]
            return block.attention.attend(query, key, value, size_bias(sizes, query.dtype))

        sizes, last = None, len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            if index == last and num_queries is not None:
                bias = size_bias(sizes, tokens.dtype)
                tokens = block.add_attention(tokens, num_queries=num_queries, bias=bias)
            else:
                tokens = block.add_attention(tokens, attend=attend)
                tokens, sizes = merge_similar(tokens, keys[0], sizes, self.merge, num_prefix)
            tokens = block.add_mlp(tokens)
        return self.norm(tokens), sizes

    def run_layer(
        self, index: int, tokens: Tensor, grid: Grid, num_queries: int | None = None
    ) -> Tensor:
        """Return the tokens after block `index`."""
        tokens, relative = self.layer_inputs(index, tokens, grid)
        block = self.blocks[index]
        return run_block(block, tokens, relative, num_queries, checkpointing=self.checkpointing)

    def layer_inputs(self, index: int, tokens: Tensor, grid: Grid) -> tuple[Tensor, Relative]:
        """Add the position embedding of layer `index`, or return that of its attention.

        Axial attention is along rows in the first layer, along columns in the second, and so on.
        """
        if self.merge:
            raise ConfigError(
                f"merge={self.merge}: token merging is on, so tokens no longer map to patches; set "
                "model.merge = 0 to read tokens, layers or attention maps"
            )
        axis = Axis(grid, columns=index % 2 == 1) if self.axial else None
        if not self.positions:
            return tokens, axis
        position = self.positions[index % len(self.positions)]  # a shared one is the only one
        if isinstance(position, RotaryPosEmbed):
            return tokens, position.rotation(grid, tokens)
        if isinstance(position, RelativePosEmbed):
            return tokens, position.embedding(grid)
        return position(tokens, grid), axis

    def attention(self, index: int) -> SelfAttention:
        """Return the attention of block `index` if its weights can be read."""
        attention = self.blocks[index].attention
        if type(attention).forward is not SelfAttention.forward:
            raise ConfigError(
                f"encoder.blocks.{index}.attention is a {type(attention).__name__} with its own "
                "forward pass, so its attention weights are unknown; override `weights` of "
                "vitrail.models.attention.SelfAttention instead"
            )
        return attention


def run_block(block: nn.Module, tokens: Tensor, *args: object, checkpointing: bool) -> Tensor:
    """Run a block, with activation checkpointing if enabled and gradients are recorded."""
    if checkpointing and torch.is_grad_enabled():
        return cast(Tensor, checkpoint(block, tokens, *args, use_reentrant=False))
    return block(tokens, *args)


def can_overwrite(output: Tensor, *modules: nn.Module) -> bool:
    """Whether the output of `modules` may be modified in place: no autograd, no forward hooks."""
    if is_tracing() or (torch.is_grad_enabled() and output.requires_grad):
        return False
    return not has_forward_hooks(*modules)


def size_bias(sizes: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Attention bias (B, 1, 1, N) that counts each token as often as its size."""
    return None if sizes is None else sizes.log().to(dtype)[:, None, None]


def merge_similar(
    tokens: Tensor, keys: Tensor, sizes: Tensor | None, pairs: int, num_prefix: int
) -> tuple[Tensor, Tensor | None]:
    """Merge up to `pairs` pairs of patches, at most half of them; return tokens and sizes.

    Bipartite soft matching: of every other patch, the `pairs` most similar to one of the rest are
    merged into it. The similarity is the cosine of the keys (B, H, N, K), summed over heads.
    """
    images, count, _ = tokens.shape
    pairs = min(pairs, (count - num_prefix) // 2)
    if not pairs:
        return tokens, sizes
    if sizes is None:
        exact = torch.promote_types(tokens.dtype, torch.float32)  # bfloat16 cannot count to 257
        sizes = torch.ones(tokens.shape[:2], dtype=exact, device=tokens.device)
    summed = reduce(torch.add, keys[:, :, num_prefix:].float().unbind(1))  # faster than keys.sum(1)
    directions = F.normalize(summed, dim=-1)  # (B, N - num_prefix, K)
    best, partner = (directions[:, 0::2] @ directions[:, 1::2].mT).max(dim=-1)
    order = best.argsort(dim=-1, descending=True)
    chosen, rest = order[:, :pairs], order[:, pairs:]
    indices = torch.arange(count, device=keys.device).expand(images, -1)
    kept = [indices[:, :num_prefix], num_prefix + 2 * rest, indices[:, num_prefix + 1 :: 2]]
    image = torch.arange(images, device=keys.device)[:, None]  # (B, 1)
    kept = image * count + torch.cat(kept, dim=1)  # (B, N - M), into the flattened batch
    merged = image * count + num_prefix + 2 * chosen  # (B, M)
    target = num_prefix + rest.shape[1] + partner.gather(1, chosen)
    target = image * (count - pairs) + target  # (B, M), into the flattened `kept`

    kept_sizes, merged_sizes = sizes.take(kept), sizes.take(merged)
    new_sizes = kept_sizes.put(target, merged_sizes, accumulate=True)  # (B, N - M)
    table = tokens.flatten(0, 1)  # (B * N, D)
    means = F.embedding(kept, table).mul_((kept_sizes / new_sizes)[..., None])
    weights = merged_sizes / new_sizes.take(target)
    additions = F.embedding(merged, table).mul_(weights[..., None])
    means.flatten(0, 1).index_add_(0, target.flatten(), additions.flatten(0, 1))
    return means, new_sizes  # (B, N - M, D), (B, N - M)


# GELU (Hendrycks & Gimpel 2016) with a fast CPU path. The tanh approximation,
# x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), equals x s with s = sigmoid(2 u),
# and a sigmoid takes a third of the time of a tanh. Its derivative, s + y (1 - s) (2 u)', is cheap
# while s is in cache, so the forward pass computes it and the backward pass is a single
# multiplication; saving it takes as much memory as saving x.


def gelu(x: Tensor, kind: Gelu, *, inplace: bool = False) -> Tensor:
    """GELU, computed in place where possible if `inplace`.

    Falls back to torch's operator for tracing and function transforms, which need a single
    operation, and for other devices and dtypes, where it is as fast.
    """
    transformed = is_transformed() or type(x) is not Tensor
    if kind == "quick":
        return x * torch.sigmoid(1.702 * x)
    if transformed or not x.is_cpu or x.dtype != torch.float32 or not x.is_contiguous():
        return F.gelu(x, approximate="tanh" if kind == "tanh" else "none")
    if kind == "exact":
        return torch.ops.aten.gelu_(x) if inplace else F.gelu(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return TanhGelu.apply(x)
    return tanh_gelu(x, x if inplace else torch.empty_like(x))


def tanh_gelu(x: Tensor, y: Tensor, slope: Tensor | None = None) -> Tensor:
    """Write GELU of `x` into `y`, which may be `x`, and its derivative into `slope`."""
    linear = x.new_tensor(LINEAR)
    s = x.new_empty(min(CHUNK, x.numel()))
    for start in range(0, x.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        x_chunk, y_chunk = x.view(-1)[chunk], y.view(-1)[chunk]
        s = s[: x_chunk.numel()]
        torch.addcmul(linear, x_chunk, x_chunk, value=CUBIC, out=s).mul_(x_chunk).sigmoid_()
        if slope is None:
            torch.mul(x_chunk, s, out=y_chunk)
            continue
        d = slope.view(-1)[chunk]
        torch.addcmul(linear, x_chunk, x_chunk, value=3 * CUBIC, out=d)  # (2 u)'
        torch.mul(x_chunk, s, out=y_chunk)
        d.mul_(y_chunk).addcmul_(d, s, value=-1).add_(s)
    return y


class TanhGelu(torch.autograd.Function):
    """`tanh_gelu` with a first derivative; differentiating twice raises an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        slope = torch.empty_like(x)
        ctx.save_for_backward(slope)
        return tanh_gelu(x, torch.empty_like(x), slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slope,) = ctx.saved_tensors
        return grad * slope
