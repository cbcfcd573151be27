"""Multi-head self-attention (appendix A of the paper).

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head, Q queries.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from vitrail.errors import ConfigError
from vitrail.models.config import REGISTERED, AttentionKind, NormKind, VitConfig
from vitrail.models.pos_embed import Grid, RelativeKeys, Rotation

FORWARD_HOOKS = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
BACKWARD_HOOKS = torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks

# (query, key, value, bias) → (B, H, Q, K); the default is `SelfAttention.attend`
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Axis(NamedTuple):
    """Axial attention (appendix D.6): tokens attend to those of their row, or of their column."""

    grid: Grid
    columns: bool

    def split(self, tokens: Tensor) -> Tensor:
        """Return each row or column as a sequence: (B, h * w, D) → (B * h, w, D)."""
        tokens = tokens.unflatten(1, self.grid)
        return (tokens.transpose(1, 2) if self.columns else tokens).flatten(0, 1)

    def join(self, lines: Tensor) -> Tensor:
        """Undo `split`."""
        tokens = lines.unflatten(0, (-1, self.grid[self.columns]))
        return (tokens.transpose(1, 2) if self.columns else tokens).flatten(1, 2)

    def bias(self, like: Tensor) -> Tensor:
        """Return an additive mask (N, N) that excludes pairs of different rows, or columns."""
        height, width = self.grid
        index = torch.arange(height * width, device=like.device)
        line = index % width if self.columns else index // width
        apart = line[:, None] != line
        return torch.zeros_like(apart, dtype=like.dtype).masked_fill_(
            apart, torch.finfo(like.dtype).min / 2
        )


Relative = RelativeKeys | Rotation | Axis | None  # positions inside attention


class RmsNorm(nn.RMSNorm):
    """nn.RMSNorm that computes in the dtype of its weight, like nn.LayerNorm under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


NORMS: dict[NormKind, type[nn.LayerNorm] | type[RmsNorm]] = {
    "layernorm": nn.LayerNorm,
    "rmsnorm": RmsNorm,
}


class SelfAttention(nn.Module):
    """Self-attention with a joint projection for queries, keys and values.

    A variant is a subclass that overrides `weights`: the forward pass, attention maps and
    explanations then use it instead of the softmax and its fused kernel.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias and config.key_bias)
        self.q_bias = self.v_bias = None
        if config.qkv_bias and not config.key_bias:
            self.q_bias = nn.Parameter(torch.empty(width))
            self.v_bias = nn.Parameter(torch.empty(width))
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            eps = config.numerics.norm_eps
            self.q_norm = NORMS[config.norm](config.head_width, eps=eps)
            self.k_norm = NORMS[config.norm](config.head_width, eps=eps)
        # The output projection, which merges the heads; unrelated to token merging
        # (`VisionTransformer.merge`). The name is part of every stored bundle and state dict.
        self.merge = nn.Linear(width, width)

    def forward(
        self,
        tokens: Tensor,
        relative: Relative = None,
        num_queries: int | None = None,
        bias: Tensor | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """Return the attention output (B, Q, D) of the first `num_queries` tokens, or of all.

        `bias` (or the bias computed from `relative`) is added to the attention logits. `attend`
        replaces the method of that name, for example to record queries, keys or attention weights;
        in axial attention it gets all tokens and a bias that masks other rows or columns.
        """
        axis = relative if isinstance(relative, Axis) and attend is None else None
        if axis is not None:
            tokens, relative = axis.split(tokens), None
        # Keys that are normalized or rotated are not linear in the tokens.
        linear = self.fused and self.k_norm is None and not isinstance(relative, Rotation)
        if linear and num_queries is not None and attend is None and is_plain_linear(self.qkv):
            width, weight, b = self.merge.in_features, self.qkv.weight, self.joint_bias()
            q_bias, kv_bias = (None, None) if b is None else (b[:width], b[width:])
            query = F.linear(tokens[:, :num_queries], weight[:width], q_bias)
            query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, Q, K)
            bias = relative_bias(query, relative) if relative else bias
            mixed = attend_without_kv(weight[width:], kv_bias, query, tokens, bias)
        else:
            query, key, value = self.query_key_value(tokens, relative)
            query = query[:, :, :num_queries]
            bias = relative_bias(query, relative) if relative else bias
            mixed = (attend or self.attend)(query, key, value, bias)
        mixed = self.merge(mixed.transpose(1, 2).flatten(2))  # (B, H, Q, K) → (B, Q, D)
        return mixed if axis is None else axis.join(mixed)

    @property
    def fused(self) -> bool:
        """Whether `weights` is the softmax, so that a fused kernel can replace it."""
        return type(self).weights is SelfAttention.weights

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Return the weighted mean of the values: (B, H, Q, K)."""
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.weights(query, key, bias) @ value

    def weights(self, query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, H, Q, N)."""
        return attention_weights(query, key, bias)

    def query_key_value(self, tokens: Tensor, relative: Relative = None) -> tuple[Tensor, ...]:
        """Project tokens to queries, keys and values, each (B, H, N, K)."""
        joint = self.qkv(tokens)
        if self.q_bias is not None:
            joint = joint + self.joint_bias()
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in joint.chunk(3, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if isinstance(relative, Rotation):
            query, key = relative.rotate(query), relative.rotate(key)
        return query, key, value

    def joint_bias(self) -> Tensor | None:
        """The bias of queries, keys and values (3 D); zeros for keys without one."""
        if self.q_bias is None or self.v_bias is None:
            return self.qkv.bias
        return torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])

    def attention_map(
        self,
        tokens: Tensor,
        relative: Relative = None,
        heads: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the attention weights (B, H, N, N) of all or some heads."""
        query, key, _ = self.query_key_value(tokens, relative)
        if heads is not None and self.fused:  # heads are independent: compute no others
            query, key = query[:, list(heads)], key[:, list(heads)]
        weights = self.weights(query, key, relative_bias(query, relative))
        return weights if heads is None or self.fused else weights[:, list(heads)]


ATTENTIONS: dict[str, type[SelfAttention]] = {
    "global": SelfAttention,
    "axial": SelfAttention,  # given an `Axis` by the encoder
}


def register_attention(name: str) -> Callable[[type[SelfAttention]], type[SelfAttention]]:
    """Make a subclass of `SelfAttention` available as `attention=name` in configurations.

    >>> @register_attention("sigmoid")
    ... class SigmoidAttention(SelfAttention): ...

    A bundle stores the name only: register the class before loading one.
    """

    def register(cls: type[SelfAttention]) -> type[SelfAttention]:
        if not (isinstance(cls, type) and issubclass(cls, SelfAttention)):
            raise ConfigError(f"attention {name!r} must be a subclass of SelfAttention, not {cls}")
        if name in get_args(AttentionKind):
            raise ConfigError(f"attention {name!r} exists; choose another name")
        ATTENTIONS[name] = cls
        REGISTERED["attention"].add(name)
        return cls

    return register


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer is an nn.Linear without hooks or parametrizations, so that using its weight
    directly is equivalent to calling it."""
    return type(layer) is nn.Linear and not has_hooks(layer)


def has_hooks(*modules: nn.Module) -> bool:
    """Whether any module has a forward or backward hook."""
    return (
        has_forward_hooks(*modules)
        or any(BACKWARD_HOOKS)
        or any(module._backward_pre_hooks or module._backward_hooks for module in modules)
    )


def has_forward_hooks(*modules: nn.Module) -> bool:
    """Whether any module runs user code: a forward hook or pre-hook, or a `forward` replaced on the
    instance, as by accelerate."""
    return any(FORWARD_HOOKS) or any(
        module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)
        for module in modules
    )


def attention_weights(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias): (B, H, Q, N). The fused kernel never builds it."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return (scores if bias is None else scores + bias).softmax(dim=-1)


def attend_without_kv(
    weight: Tensor,
    kv_bias: Tensor | None,
    query: Tensor,
    tokens: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of few queries (B, H, Q, K) to tokens (B, N, D), without computing keys and values.

    Keys and values would be W x, with `weight` (2 D, D) and `kv_bias` (2 D). Since q (W x) equals
    (q W) x, the few queries are projected instead of the many tokens; and a weighted mean of W x is
    W times the weighted mean of x. The bias of the keys shifts all logits of a query equally and
    cancels in the softmax. `bias` (B, H, Q, N) is added to the attention logits.
    """
    heads, channels = query.shape[1], query.shape[3]
    w_key, w_value = weight.unflatten(0, (2, heads, channels))  # (H, K, D)
    projected = torch.einsum("bhrk,hkd->bhrd", query, w_key).flatten(1, 2)[:, None]
    if bias is not None:
        bias = bias.expand(*query.shape[:3], -1).flatten(1, 2)[:, None]  # (B, 1, H Q, N)
    mean = F.scaled_dot_product_attention(
        projected, tokens[:, None], tokens[:, None], attn_mask=bias, scale=channels**-0.5
    )  # (B, 1, H Q, D)
    mixed = torch.einsum("bhrd,hkd->bhrk", mean[:, 0].unflatten(1, (heads, -1)), w_value)
    return mixed if kv_bias is None else mixed + kv_bias.view(2, heads, 1, channels)[1]


def relative_bias(query: Tensor, relative: Relative, rows: slice = slice(None)) -> Tensor | None:
    """Attention logits (B, H, Q, N) of relative positions, scaled like those of the content, or
    those of axial attention (Q, N); `rows` are the queries if they are not the first tokens."""
    if isinstance(relative, Axis):
        return relative.bias(query)[rows]
    if not isinstance(relative, RelativeKeys):
        return None
    scores = query @ relative.keys.to(query.dtype).mT / query.shape[-1] ** 0.5  # (B, H, Q, R)
    offsets = relative.offsets[rows][: query.shape[2]]  # one row per query
    return scores.gather(-1, offsets.expand(*scores.shape[:3], -1))  # (B, H, Q, N)
