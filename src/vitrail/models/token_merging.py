"""Token merging (Bolya et al. 2023, arXiv:2210.09461): fewer tokens from block to block.

In each block, between attention and MLP, the most similar pairs of patches are replaced by their
mean, weighted by the number of patches each token represents. Attention counts a token once for
each of these patches. There is nothing to train, so it works with any trained model; logits change
slightly, and merging exact duplicates changes nothing.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head, M merged pairs.
"""

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.config import VitConfig, as_int
from vitrail.models.encoder import Encoder


class Match(NamedTuple):
    """Indices of kept and merged tokens, into the flattened batch (B * N, D)."""

    kept: Tensor  # (B, N - M)
    merged: Tensor  # (B, M)
    target: Tensor  # (B, M): where each merged token goes, an index into the flattened `kept`


def check_merge(merge: object, config: VitConfig) -> int:
    """Validate the number of pairs to merge per block."""
    pairs = as_int(merge)
    if pairs is None or pairs < 0:
        raise ConfigError(f"merge={merge!r} must be an integer >= 0, pairs per block; 0 is off")
    if pairs and config.num_layer_positions:
        raise ConfigError(
            f"merge={pairs} removes tokens from the grid that position={config.position!r} in "
            "the encoder layers needs; only models with position_place='stem' can merge"
        )
    return pairs


def encode_merging(
    encoder: Encoder, tokens: Tensor, num_prefix: int, num_queries: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run the encoder with merging; return its tokens and their sizes (B, N).

    The first `num_prefix` tokens are never merged. If `num_queries` is given, the last block
    computes only that many tokens, and merges nothing.
    """
    if encoder.training:
        raise ConfigError(
            f"merge={encoder.merge} is for inference, and this model is in training mode; "
            "call model.eval(), or set model.merge = 0"
        )
    keys: list[Tensor] = []  # (B, H, N, K), of the current block

    def attend(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
        keys[:] = [key]
        return F.scaled_dot_product_attention(query, key, value, size_bias(sizes, query.dtype))

    sizes, last = None, len(encoder.blocks) - 1
    for index, block in enumerate(encoder.blocks):
        if index == last and num_queries is not None:
            bias = size_bias(sizes, tokens.dtype)
            tokens = block.add_attention(tokens, num_queries=num_queries, bias=bias)
        else:
            tokens = block.add_attention(tokens, attend=attend)
            tokens, sizes = merge_most_similar(tokens, keys[0], sizes, encoder.merge, num_prefix)
        tokens = block.add_mlp(tokens)
    return encoder.norm(tokens), sizes


def size_bias(sizes: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Attention bias (B, 1, 1, N) that counts each token as often as its size."""
    return None if sizes is None else sizes.log().to(dtype)[:, None, None]


def merge_most_similar(
    tokens: Tensor, keys: Tensor, sizes: Tensor | None, pairs: int, num_prefix: int
) -> tuple[Tensor, Tensor | None]:
    """Merge up to `pairs` pairs of patches, at most half of them; return tokens and sizes."""
    pairs = min(pairs, (tokens.shape[1] - num_prefix) // 2)
    if not pairs:
        return tokens, sizes
    if sizes is None:
        exact = torch.promote_types(tokens.dtype, torch.float32)  # bfloat16 cannot count to 257
        sizes = torch.ones(tokens.shape[:2], dtype=exact, device=tokens.device)
    return merge(tokens, sizes, bipartite_matching(keys, pairs, num_prefix))


def bipartite_matching(keys: Tensor, pairs: int, num_prefix: int) -> Match:
    """Bipartite soft matching: of every other patch, the `pairs` most similar to one of the rest.

    The similarity of two patches is the cosine of their keys (B, H, N, K), summed over heads.
    """
    images, _, count, _ = keys.shape
    summed = reduce(torch.add, keys[:, :, num_prefix:].float().unbind(1))  # faster than keys.sum(1)
    directions = F.normalize(summed, dim=-1)  # (B, N - num_prefix, K)
    best, partner = (directions[:, 0::2] @ directions[:, 1::2].mT).max(dim=-1)
    order = best.argsort(dim=-1, descending=True)
    merged, rest = order[:, :pairs], order[:, pairs:]
    indices = torch.arange(count, device=keys.device).expand(images, -1)
    kept = [indices[:, :num_prefix], num_prefix + 2 * rest, indices[:, num_prefix + 1 :: 2]]
    target = num_prefix + rest.shape[1] + partner.gather(1, merged)
    image = torch.arange(images, device=keys.device)[:, None]  # (B, 1)
    return Match(
        kept=image * count + torch.cat(kept, dim=1),
        merged=image * count + num_prefix + 2 * merged,
        target=image * (count - pairs) + target,
    )


def merge(tokens: Tensor, sizes: Tensor, match: Match) -> tuple[Tensor, Tensor]:
    """Replace each kept token by the mean of itself and what is merged into it, by size."""
    kept_sizes, merged_sizes = sizes.take(match.kept), sizes.take(match.merged)
    new_sizes = kept_sizes.put(match.target, merged_sizes, accumulate=True)  # (B, N - M)
    table = tokens.flatten(0, 1)  # (B * N, D)
    kept = F.embedding(match.kept, table).mul_((kept_sizes / new_sizes)[..., None])
    weights = merged_sizes / new_sizes.take(match.target)
    merged = F.embedding(match.merged, table).mul_(weights[..., None])
    kept.flatten(0, 1).index_add_(0, match.target.flatten(), merged.flatten(0, 1))
    return kept, new_sizes  # (B, N - M, D), (B, N - M)
