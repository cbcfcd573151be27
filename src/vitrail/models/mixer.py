"""MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601): no attention, only MLPs, two ways round.

Shapes: B images, N tokens, D width, K classes.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from vitrail.errors import DataError
from vitrail.models.checks import pair
from vitrail.models.config import MixerConfig
from vitrail.models.encoder import Mlp, drop_path, step
from vitrail.models.initialization import initialize
from vitrail.models.stems import PatchProjection, check_images


class MixerBlock(nn.Module):
    """Mix each channel over the tokens, then each token over its channels."""

    def __init__(self, config: MixerConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        numerics = config.numerics
        self.norm1 = nn.LayerNorm(config.width, eps=numerics.norm_eps)
        self.token_mixing = Mlp(config.num_tokens, config.tokens_mlp, numerics)
        self.norm2 = nn.LayerNorm(config.width, eps=numerics.norm_eps)
        self.channel_mixing = Mlp(config.width, config.channels_mlp, numerics)
        self.drop_path = drop_path

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.branch(self.token_mixing(self.norm1(tokens).mT).mT)
        return tokens + self.branch(self.channel_mixing(self.norm2(tokens)))

    def branch(self, tokens: Tensor) -> Tensor:
        return drop_path(tokens, self.drop_path) if self.training else tokens


class MlpMixer(nn.Module):
    """Images (B, C, H, W), already normalized → logits (B, K). The image size is fixed."""

    metadata: Any | None = None  # preprocessing, class names and provenance, set by `vitrail.load`

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False  # forget what blocks compute, and compute it again
        self.stem = PatchProjection(config.channels, config.width, pair(config.patch_size))
        last = max(1, config.depth - 1)
        self.blocks = nn.ModuleList(
            MixerBlock(config, config.drop_path * index / last) for index in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.width, eps=config.numerics.norm_eps)
        self.head = nn.Linear(config.width, config.num_classes) if config.num_classes else None
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); features where the model has no head."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """One vector per image: the mean over all tokens, after the norm."""
        tokens = self.tokens(images)
        for block in self.blocks:
            tokens = step(block, tokens, self.checkpointing)
        return self.norm(tokens).mean(dim=1)  # (B, D)

    def tokens(self, images: Tensor) -> Tensor:
        """What the first block reads: one token for each patch (B, N, D)."""
        config = self.config
        check_images(images, config.channels, pair(config.patch_size))
        if images.shape[-2:] != pair(config.image_size):
            raise DataError(
                f"images of {images.shape[-2]}x{images.shape[-1]} pixels do not fit this Mixer: "
                f"its token-mixing weights are tied to image_size={config.image_size}"
            )
        return self.stem(images).flatten(1, 2)

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """The tokens after each block, one layer in memory at a time."""
        tokens = self.tokens(images)
        for block in self.blocks:
            tokens = block(tokens)
            yield tokens
