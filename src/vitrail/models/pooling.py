"""Pooling: from the encoder's normalized tokens to one vector per image.

The first `num_prefix` tokens are not patches. After token merging, `sizes` (B, N) holds the number
of patches that each token represents; tokens are weighted by it.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.attention import NORMS, attend_without_kv, attention_weights, is_plain_linear
from vitrail.models.config import Pool, VitConfig
from vitrail.models.encoder import Mlp, size_bias


class ClassToken(nn.Module):
    """The class token: the paper's choice (equation 4)."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()

    def forward(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        return tokens[:, 0]


class PatchMean(nn.Module):
    """The mean of the patches (global average pooling, appendix D.3)."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.prefix = config.num_prefix

    def forward(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        patches = tokens[:, self.prefix :]
        if sizes is None:
            return patches.mean(dim=1)
        weights = sizes[:, None, self.prefix :]  # (B, 1, N)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(patches.dtype)
        return (weights @ patches)[:, 0]


class ClassTokenAndMean(PatchMean):
    """The class token and the mean of the patches, concatenated: DINOv2's linear classifier."""

    def forward(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        return torch.cat([tokens[:, 0], super().forward(tokens, sizes)], dim=1)


class AttentionPool(nn.Module):
    """Attention of one learned query to all patches (Zhai et al. 2022; big_vision's MAP head)."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.prefix = config.num_prefix
        self.probe = nn.Parameter(torch.empty(1, config.width))
        self.query = nn.Linear(config.width, config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)
        self.merge = nn.Linear(config.width, config.width)  # output projection
        self.norm = NORMS[config.norm](config.width, eps=config.numerics.norm_eps)
        self.mlp = Mlp(config.width, config.mlp_width, config.numerics)

    def forward(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        bias = None if sizes is None else size_bias(sizes[:, self.prefix :], tokens.dtype)
        if is_plain_linear(self.key_value):
            weight, kv_bias = self.key_value.weight, self.key_value.bias
            query = self.probe_query(tokens.shape[0])
            mixed = attend_without_kv(weight, kv_bias, query, tokens[:, self.prefix :], bias)
        else:
            query, key, value = self.query_key_value(tokens)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        pooled = self.merge(mixed.flatten(1))  # (B, H, 1, K) → (B, D)
        return pooled + self.mlp(self.norm(pooled))

    def attention_map(self, tokens: Tensor, heads: Sequence[int] | None = None) -> Tensor:
        """Return the attention weights of the patches (B, H, 1, N), for all or some heads."""
        query, key, _ = self.query_key_value(tokens)
        if heads is not None:
            query, key = query[:, list(heads)], key[:, list(heads)]
        return attention_weights(query, key)

    def query_key_value(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.key_value(tokens[:, self.prefix :]).chunk(2, dim=-1)
        key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.probe_query(tokens.shape[0]), key, value  # (B, H, 1, K) and twice (B, H, N, K)

    def probe_query(self, batch: int) -> Tensor:
        """The learned query, expanded to the batch: (B, H, 1, K)."""
        query = self.query(self.probe).unflatten(-1, (self.heads, -1)).transpose(0, 1)  # (H, 1, K)
        return query.expand(batch, -1, -1, -1)


POOLS: dict[Pool, type[nn.Module]] = {
    "cls": ClassToken,
    "mean": PatchMean,
    "map": AttentionPool,
    "cls+mean": ClassTokenAndMean,
}
