"""Fewer tokens from block to block: patches that look alike go on as one.

Token merging, Bolya et al. 2023 (arXiv:2210.09461). In each block, between attention and MLP, the
most similar pairs of patches are replaced by their mean, weighted by how many patches each already
stands for. Attention then counts a token once for each patch it stands for. Nothing is learned, so
any trained model can do it; the answers change a little, and exact duplicates change nothing.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head, M merged pairs.
"""

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.checks import whole_number
from vitrail.models.config import VitConfig
from vitrail.models.encoder import Block, Encoder


class Match(NamedTuple):
    """Who stays and who joins whom. Places count through all images, as in (B * N, D)."""

    kept: Tensor  # (B, N - M) places of the tokens that stay
    gone: Tensor  # (B, M) places of the patches that join another
    into: Tensor  # (B, M) places of those others, among the kept


def check_merge(merge: object, config: VitConfig) -> int:
    """The number of pairs, or a refusal: merged patches have no place in a grid any more."""
    pairs = whole_number(merge)
    if pairs is None or pairs < 0:
        raise ConfigError(f"merge={merge!r} must be a whole number of pairs per block; 0 is off")
    if pairs and config.layer_positions:
        raise ConfigError(
            f"merge={pairs} leaves tokens without the grid that position={config.position!r} in "
            "the encoder's layers needs; only models with position_place='stem' can merge"
        )
    return pairs


def encode_merging(
    encoder: Encoder, tokens: Tensor, prefix: int, read: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """The encoder's tokens, fewer than came in, and how many patches each stands for (B, N).

    The first `prefix` tokens stay as they are. If only the first `read` tokens are read, which are
    among these, the last block computes no others.
    """
    if encoder.training:
        raise ConfigError(
            f"merge={encoder.merge} is for answers, and this model is in training mode; "
            "call model.eval(), or set model.merge = 0"
        )
    sizes, last = None, len(encoder.blocks) - 1
    for index, block in enumerate(encoder.blocks):
        if index == last and read is not None:
            scores = size_scores(sizes, tokens.dtype)
            seen = block.attention(block.norm1(tokens), read=read, scores=scores)
            tokens = block.sum(tokens[:, :read], block.branch1(seen))
        else:
            tokens, keys = attend(block, tokens, sizes)
            tokens, sizes = merge_most_similar(tokens, keys, sizes, encoder.merge, prefix)
        tokens = block.sum(tokens, block.branch2(block.mlp(block.norm2(tokens))))  # equation 3
    return encoder.norm(tokens), sizes


def attend(block: Block, tokens: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first half of a block, equation 2, and the keys (B, H, N, K) it used."""
    query, key, value = block.attention.query_key_value(block.norm1(tokens))
    seen = block.attention.mix(query, key, value, size_scores(sizes, query.dtype))
    return block.sum(tokens, block.branch1(seen)), key


def size_scores(sizes: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What sizes (B, N) add to attention scores: as if each merged patch were still there."""
    return None if sizes is None else sizes.log().to(dtype)[:, None, None]  # (B, 1, 1, N)


def merge_most_similar(
    tokens: Tensor, keys: Tensor, sizes: Tensor | None, pairs: int, prefix: int
) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, N, D) without `pairs` of the patches, at most half of them; and the sizes."""
    pairs = min(pairs, (tokens.shape[1] - prefix) // 2)
    if not pairs:
        return tokens, sizes
    if sizes is None:
        exact = torch.promote_types(tokens.dtype, torch.float32)  # bfloat16 cannot count to 257
        sizes = torch.ones(tokens.shape[:2], dtype=exact, device=tokens.device)
    return merge(tokens, sizes, match(keys, pairs, prefix))


def match(keys: Tensor, pairs: int, prefix: int) -> Match:
    """Bipartite soft matching: of every other patch, the `pairs` most like one of the others.

    Alike are two patches whose keys (B, H, N, K), summed over heads, point the same way.
    """
    images, _, count, _ = keys.shape
    summed = reduce(torch.add, keys[:, :, prefix:].float().unbind(1))  # faster than keys.sum(1)
    pointing = F.normalize(summed, dim=-1)  # (B, N - prefix, K)
    best, partner = (pointing[:, 0::2] @ pointing[:, 1::2].mT).max(dim=-1)  # of half of them
    order = best.argsort(dim=-1, descending=True)
    gone, rest = order[:, :pairs], order[:, pairs:]
    places = torch.arange(count, device=keys.device).expand(images, -1)
    kept = [places[:, :prefix], prefix + 2 * rest, places[:, prefix + 1 :: 2]]
    into = prefix + rest.shape[1] + partner.gather(1, gone)
    image = torch.arange(images, device=keys.device)[:, None]  # (B, 1)
    return Match(
        kept=image * count + torch.cat(kept, dim=1),
        gone=image * count + prefix + 2 * gone,
        into=image * (count - pairs) + into,
    )


def merge(tokens: Tensor, sizes: Tensor, matched: Match) -> tuple[Tensor, Tensor]:
    """Each token that stays becomes the mean of itself and those that join it, by their sizes."""
    before, joining = sizes.take(matched.kept), sizes.take(matched.gone)
    after = before.put(matched.into, joining, accumulate=True)  # (B, N - M)
    table = tokens.flatten(0, 1)  # (B * N, D)
    kept = F.embedding(matched.kept, table).mul_((before / after)[..., None])
    joined = F.embedding(matched.gone, table).mul_((joining / after.take(matched.into))[..., None])
    kept.flatten(0, 1).index_add_(0, matched.into.flatten(), joined.flatten(0, 1))
    return kept, after  # (B, N - M, D), (B, N - M)
