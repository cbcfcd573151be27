"""Tokens → one vector: the class token, the mean of the patches, or a learned question.

Each takes the encoder's normalized tokens. `num_prefix` tokens come before the patches. Where
patches were merged, sizes (B, N) say how many each token stands for, and it counts as often.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import Pool, VitConfig
from vitrail.models.encoder import Mlp, look_through
from vitrail.models.kept import bare
from vitrail.models.merging import size_scores


class ClassToken(nn.Module):
    """Take the first token: the paper's choice (equation 4)."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()

    def forward(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        return tokens[:, 0]


class PatchMean(nn.Module):
    """Average the patches, after the norm as in the authors' code (appendix D.3)."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.prefix = config.num_prefix

    def forward(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        patches = tokens[:, self.prefix :]
        if sizes is None:
            return patches.mean(dim=1)
        shares = sizes[:, None, self.prefix :]  # (B, 1, N)
        shares = (shares / shares.sum(dim=-1, keepdim=True)).to(patches.dtype)
        return (shares @ patches)[:, 0]


class AttentionPool(nn.Module):
    """One learned query looks at all patches (Zhai et al. 2022; big_vision's MAP head)."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.prefix = config.num_prefix
        self.probe = nn.Parameter(torch.empty(1, config.width))
        self.query = nn.Linear(config.width, config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)
        self.merge = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.numerics.norm_eps)
        self.mlp = Mlp(config.width, config.mlp_width, config.numerics)

    def forward(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        scores = None if sizes is None else size_scores(sizes[:, self.prefix :], tokens.dtype)
        if bare(self.key_value):
            layer, query = self.key_value, self.ask(tokens)
            patches = tokens[:, self.prefix :]
            mixed = look_through(layer.weight, layer.bias, query, patches, scores)
        else:
            query, key, value = self.split_heads(tokens)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=scores)
        pooled = self.merge(mixed.flatten(1))  # (B, H, 1, K) → (B, D)
        return pooled + self.mlp(self.norm(pooled))

    def attention_map(self, tokens: Tensor, heads: Sequence[int] | None = None) -> Tensor:
        """How much each patch counts, for all or the chosen heads: (B, H, 1, N)."""
        query, key, _ = self.split_heads(tokens)
        if heads is not None:
            query, key = query[:, list(heads)], key[:, list(heads)]
        return (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1)

    def split_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.key_value(tokens[:, self.prefix :]).chunk(2, dim=-1)
        key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.ask(tokens), key, value  # (B, H, 1, K), (B, H, N, K), (B, H, N, K)

    def ask(self, tokens: Tensor) -> Tensor:
        """The learned query, once for each image: (B, H, 1, K)."""
        query = self.query(self.probe).unflatten(-1, (self.heads, -1)).transpose(0, 1)  # (H, 1, K)
        return query.expand(tokens.shape[0], -1, -1, -1)


POOLS: dict[Pool, type[nn.Module]] = {
    "cls": ClassToken,
    "mean": PatchMean,
    "map": AttentionPool,
}
