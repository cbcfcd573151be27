"""MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601): MLPs over tokens and over channels.

Shapes: B images, N tokens, D width, K classes.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from vitrail.errors import DataError, renamed_attribute
from vitrail.models.config import MixerConfig, pair
from vitrail.models.encoder import Mlp, drop_path, run_block
from vitrail.models.init import initialize
from vitrail.models.patch_embed import PatchProjection, check_images


class MixerBlock(nn.Module):
    """Token mixing, then channel mixing."""

    def __init__(self, config: MixerConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        numerics = config.numerics
        self.norm1 = nn.LayerNorm(config.width, eps=numerics.norm_eps)
        self.token_mixing = Mlp(config.num_tokens, config.tokens_mlp, numerics)
        self.norm2 = nn.LayerNorm(config.width, eps=numerics.norm_eps)
        self.channel_mixing = Mlp(config.width, config.channels_mlp, numerics)
        self.drop_path = drop_path

    def forward(self, tokens: Tensor) -> Tensor:
        rate = self.drop_path if self.training else 0.0
        tokens = tokens + drop_path(self.token_mixing(self.norm1(tokens).mT).mT, rate)
        return tokens + drop_path(self.channel_mixing(self.norm2(tokens)), rate)


class MlpMixer(nn.Module):
    """Normalized images (B, C, H, W) to logits (B, K). The image size is fixed."""

    metadata: Any | None = None  # preprocessing, class names and provenance, set by `vitrail.load`
    facts = renamed_attribute("facts", "metadata")

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False  # activation checkpointing
        self.stem = PatchProjection(config.channels, config.width, pair(config.patch_size))
        last = max(1, config.depth - 1)
        self.blocks = nn.ModuleList(
            MixerBlock(config, config.drop_path * index / last) for index in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.width, eps=config.numerics.norm_eps)
        self.head = nn.Linear(config.width, config.num_classes) if config.num_classes else None
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, K), or the features if the model has no head."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """Return the mean over all tokens after the final norm: (B, D)."""
        tokens = self.tokens(images)
        for block in self.blocks:
            tokens = run_block(block, tokens, checkpointing=self.checkpointing)
        return self.norm(tokens).mean(dim=1)

    def tokens(self, images: Tensor) -> Tensor:
        """Return the input of the first block, one token per patch: (B, N, D)."""
        config = self.config
        check_images(images, config.channels, pair(config.patch_size))
        if images.shape[-2:] != pair(config.image_size):
            raise DataError(
                f"images of {images.shape[-2]}x{images.shape[-1]} pixels do not fit this Mixer: "
                f"its token-mixing weights are tied to image_size={config.image_size}"
            )
        return self.stem(images).flatten(1, 2)

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the tokens after each block."""
        tokens = self.tokens(images)
        for block in self.blocks:
            tokens = block(tokens)
            yield tokens
