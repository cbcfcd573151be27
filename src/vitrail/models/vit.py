"""The Vision Transformer: a picture is cut into patches, and the patches are read as words.

Section 3.1 of Dosovitskiy et al. 2021. `forward` is the table of contents; `tokens`, `features`
and the iterators stop where somebody wants to look.

Shapes: B images, C channels, H x W pixels, N tokens, D width, K classes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.config import VitConfig
from vitrail.models.encoder import Encoder
from vitrail.models.initialization import initialize
from vitrail.models.merging import check_merge, encode_merging
from vitrail.models.pooling import POOLS
from vitrail.models.position import POSITIONS, Grid, NoPosition
from vitrail.models.stems import STEMS, check_images


class VisionTransformer(nn.Module):
    """Images (B, C, H, W), already normalized → logits (B, K)."""

    metadata: Any | None = None  # preprocessing, class names and provenance, set by `vitrail.load`

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.stem = STEMS[config.stem](config)
        self.cls_token = token_parameter(config.pool == "cls", width)
        self.distillation_token = token_parameter(config.distillation, width)
        self.registers = token_parameter(config.registers, width)
        at_stem = config.position_place == "stem"
        self.position = (POSITIONS[config.position] if at_stem else NoPosition)(config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Encoder(config)
        self.pool = POOLS[config.pool](config)
        self.representation = linear_or_none(width, config.representation)
        self.head = linear_or_none(config.num_features, config.num_classes)
        self.distillation_head = linear_or_none(width, config.distillation * config.num_classes)
        # Only these tokens are read after the last block, so only they are computed in it: the
        # same logits for less work, one twelfth of a model of 12 blocks.
        self.read = config.placed_prefix if config.pool == "cls" else None
        initialize(self)

    @property
    def checkpointing(self) -> bool:
        """Forget what blocks compute and compute it again for the gradient: less memory."""
        return self.encoder.checkpointing

    @checkpointing.setter
    def checkpointing(self, enabled: bool) -> None:
        self.encoder.checkpointing = enabled

    @property
    def merge(self) -> int:
        """Pairs of similar patches that each block merges: faster, and a little less exact."""
        return self.encoder.merge

    @merge.setter
    def merge(self, pairs: int) -> None:
        self.encoder.merge = check_merge(pairs, self.config)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); features where the model has no head."""
        features, logits = self.heads(*self.tokens_and_sizes(images))
        return features if logits is None else logits

    def features(self, images: Tensor) -> Tensor:
        """One vector per image (equation 4): what the head, probes and exports look at."""
        return self.pooled(*self.tokens_and_sizes(images))

    def heads(self, tokens: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Features (B, D) of what the encoder made, and logits (B, K), None without a head."""
        features = self.pooled(tokens, sizes)
        if self.head is None:
            return features, None
        logits = self.head(features)  # (B, K)
        if self.distillation_head is None:
            return features, logits
        both = torch.stack([logits, self.distillation_head(tokens[:, 1])])  # (2, B, K)
        return features, both.mean(dim=0)

    def pooled(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        features = self.pool(tokens, sizes)  # (B, D)
        if self.representation is None:
            return features
        return torch.tanh(self.representation(features))  # (B, R)

    def two_opinions(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the class token and of the distillation token, each (B, K)."""
        assert self.head is not None
        assert self.distillation_head is not None
        tokens, sizes = self.tokens_and_sizes(images)
        return self.head(self.pool(tokens, sizes)), self.distillation_head(tokens[:, 1])

    def tokens_and_sizes(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the heads read, and how many patches each token stands for if some were merged."""
        tokens, grid = self.tokens_and_grid(images)
        if self.merge:
            return encode_merging(self.encoder, tokens, self.config.num_prefix, self.read)
        return self.encoder(tokens, grid, read=self.read), None

    def encode(self, images: Tensor) -> Tensor:
        """All tokens after the last block and its norm: (B, N, D)."""
        return self.encoder(*self.tokens_and_grid(images))

    def tokens(self, images: Tensor) -> Tensor:
        """What the encoder reads: patches, class token and positions (equation 1)."""
        return self.tokens_and_grid(images)[0]

    def tokens_and_grid(self, images: Tensor) -> tuple[Tensor, Grid]:
        return self.place(self.patches(images))

    def patches(self, images: Tensor) -> Tensor:
        """A vector for each patch, which does not know yet where it is: (B, h, w, D)."""
        check_images(images, self.config.channels, self.config.stride)
        return self.stem(images)

    def place(self, patches: Tensor) -> tuple[Tensor, Grid]:
        """Patches (B, h, w, D) with their positions and the other tokens, and their grid."""
        grid = (patches.shape[1], patches.shape[2])
        tokens = patches.flatten(1, 2)  # (B, h * w, D)
        tokens = put_before(tokens, self.cls_token, self.distillation_token)
        tokens = self.dropout(self.position(tokens, grid))
        placed = self.config.placed_prefix
        if self.training and self.config.patch_dropout:
            kept = some_patches(tokens[:, placed:], self.config.patch_dropout)
            tokens = torch.cat([tokens[:, :placed], kept], dim=1)
        if self.registers is not None:  # between the placed tokens and the patches, unplaced
            rest = put_before(tokens[:, placed:], self.registers)
            tokens = torch.cat([tokens[:, :placed], rest], dim=1)
        return tokens, grid  # (B, N, D)

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """The tokens after each block, one layer in memory at a time."""
        tokens, grid = self.tokens_and_grid(images)
        for index in range(len(self.encoder.blocks)):
            tokens = self.encoder.step(index, *self.encoder.enter(index, tokens, grid))
            yield tokens

    def attention_maps(
        self,
        images: Tensor,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """Each layer's attention (B, heads, N, N), or that of chosen ones, one at a time.

        Computed beside the forward pass, which keeps its fused attention. Layers come in their
        order; negative numbers count from the last.
        """
        wanted = set(chosen("layers", layers, self.config.depth))
        heads = chosen("heads", heads, self.config.heads)
        return self.maps(images, wanted, heads)

    def maps(self, images: Tensor, wanted: set[int], heads: Sequence[int]) -> Iterator[Tensor]:
        tokens, grid = self.tokens_and_grid(images)
        for index in range(max(wanted, default=-1) + 1):
            entered, relative = self.encoder.enter(index, tokens, grid)
            if index in wanted:
                yield self.encoder.blocks[index].attention_map(entered, relative, heads)
            if index < max(wanted):
                tokens = self.encoder.step(index, entered, relative)


def chosen(what: str, numbers: Sequence[int] | None, count: int) -> list[int]:
    """All numbers below `count`, or those that were asked for."""
    if numbers is None:
        return list(range(count))
    for number in numbers:
        if not -count <= number < count:
            raise ConfigError(f"{what}={list(numbers)} asks for {number}; there are {count}")
    return [number % count for number in numbers]


def token_parameter(count: int, width: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(int(count), width)) if count else None


def linear_or_none(channels_in: int, channels_out: int) -> nn.Linear | None:
    return nn.Linear(channels_in, channels_out) if channels_out else None


def put_before(tokens: Tensor, *extra: Tensor | None) -> Tensor:
    """Learned tokens (n, D) before the tokens of every image."""
    given = [part.expand(tokens.shape[0], -1, -1) for part in extra if part is not None]
    return torch.cat([*given, tokens], dim=1) if given else tokens


def some_patches(patches: Tensor, dropout: float) -> Tensor:
    """Patches (B, n, D) without a share of them, other ones for each image, in their order.

    PatchDropout, Liu et al. 2022 (arXiv:2208.07220): the encoder reads the fewer tokens.
    """
    images, count, width = patches.shape
    keep = max(1, round((1 - dropout) * count))
    order = torch.rand(images, count, device=patches.device).argsort(dim=1)
    places = order[:, :keep].sort(dim=1).values  # (B, keep)
    return patches.gather(1, places[..., None].expand(-1, -1, width))  # (B, keep, D)
