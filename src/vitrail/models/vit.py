"""The Vision Transformer: images as sequences of patches.

Section 3.1 of Dosovitskiy et al. 2021. `forward` is the data flow; the methods below it are its
steps, in order.

Shapes: B images, C channels, H x W pixels, h x w patches, N tokens, D width, K classes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, renamed_attribute
from vitrail.models.attention import ATTENTIONS, SelfAttention, has_hooks
from vitrail.models.config import (
    BitConfig,
    Config,
    InitScheme,
    MixerConfig,
    StemKind,
    VitConfig,
    as_int,
)
from vitrail.models.encoder import Encoder
from vitrail.models.init import initialize
from vitrail.models.mixer import MlpMixer
from vitrail.models.patch_embed import ConvStem, PatchStem, check_images
from vitrail.models.pooling import POOLS
from vitrail.models.pos_embed import POS_EMBEDS, Grid, NoPosEmbed
from vitrail.models.registry import configuration
from vitrail.models.resnet import BiT, ResNetStem

STEMS: dict[StemKind, type[nn.Module]] = {
    "patches": PatchStem,
    "conv": ConvStem,
    "resnet": ResNetStem,
}


class VisionTransformer(nn.Module):
    """Normalized images (B, C, H, W) to logits (B, K)."""

    metadata: Any | None = None  # preprocessing, class names and provenance, set by `vitrail.load`
    facts = renamed_attribute("facts", "metadata")

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.stem = STEMS[config.stem](config)
        self.cls_token = token_parameter(bool(config.class_token), width)
        self.distillation_token = token_parameter(config.distillation, width)
        self.registers = token_parameter(config.registers, width)
        at_stem = config.position_place == "stem"
        self.position = (POS_EMBEDS[config.position] if at_stem else NoPosEmbed)(config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Encoder(config)
        self.pool = POOLS[config.pool](config)
        self.representation = linear_or_none(config.num_pooled, config.representation)
        self.head = linear_or_none(config.num_features, config.num_classes)
        self.distillation_head = linear_or_none(width, config.distillation * config.num_classes)
        # The head reads only the class tokens, so the last block computes only these: the same
        # logits with one twelfth less work in a model of 12 blocks. None computes all tokens.
        self.head_tokens = config.num_class_tokens if config.pool == "cls" else None
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, K), or the features if the model has no head."""
        patches = self.embed_patches(images)  # (B, h, w, D)
        tokens, grid = self.assemble_tokens(patches)  # (B, N, D), equation 1
        tokens, sizes = self.run_encoder(tokens, grid)  # (B, N, D), equations 2 and 3
        features, logits = self.run_head(tokens, sizes)  # (B, D), equation 4, and (B, K)
        return features if logits is None else logits

    def embed_patches(self, images: Tensor) -> Tensor:
        """Return the patch embeddings (B, h, w, D), without positions."""
        check_images(images, self.config.channels, self.config.stride)
        return self.stem(images)

    def assemble_tokens(self, patches: Tensor) -> tuple[Tensor, Grid]:
        """Add prefix tokens and positions to patches (B, h, w, D); return tokens and grid."""
        grid, prefix = (patches.shape[1], patches.shape[2]), self.config.num_class_tokens
        tokens = patches.flatten(1, 2)  # (B, h * w, D)
        tokens = prepend(tokens, self.cls_token, self.distillation_token)
        tokens = self.dropout(self.position(tokens, grid))
        if self.training and self.config.patch_dropout:
            kept = drop_patches(tokens[:, prefix:], self.config.patch_dropout)
            tokens = torch.cat([tokens[:, :prefix], kept], dim=1)
        if self.registers is not None:  # after the class tokens, without position
            rest = prepend(tokens[:, prefix:], self.registers)
            tokens = torch.cat([tokens[:, :prefix], rest], dim=1)
        if self.encoder.pre_norm is not None:
            tokens = self.encoder.pre_norm(tokens)
        return tokens, grid  # (B, N, D)

    def run_encoder(self, tokens: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """Return the tokens that the head reads, and with token merging their sizes (B, N).

        All tokens if a hook could read them.
        """
        hooked = has_hooks(self.encoder.norm, *self.encoder.blocks[-1].modules())
        num_queries = None if hooked else self.head_tokens
        if self.merge:
            return self.encoder.forward_merging(tokens, self.config.num_prefix, num_queries)
        return self.encoder(tokens, grid, num_queries), None

    def run_head(self, tokens: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the features (B, D), and the logits (B, K) or None without a head."""
        features = self.pool_features(tokens, sizes)
        if self.head is None:
            return features, None
        logits = self.head(features)  # (B, K)
        if self.distillation_head is None:
            return features, logits
        both = torch.stack([logits, self.distillation_head(tokens[:, 1])])  # (2, B, K)
        return features, both.mean(dim=0)

    def pool_features(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        features = self.pool(tokens, sizes)  # (B, D)
        if self.representation is None:
            return features
        return torch.tanh(self.representation(features))

    def prepare_tokens(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Return the input of the encoder (B, N, D) and its patch grid."""
        return self.assemble_tokens(self.embed_patches(images))

    def features(self, images: Tensor) -> Tensor:
        """Return one vector per image (B, D): the input of the head (equation 4)."""
        return self.pool_features(*self.run_encoder(*self.prepare_tokens(images)))

    def patch_features(self, images: Tensor) -> Tensor:
        """Return the patches after the final norm as a feature map (B, D, h, w), for dense use."""
        tokens, grid = self.prepare_tokens(images)
        patches = self.encoder(tokens, grid)[:, self.config.num_prefix :]  # (B, h * w, D)
        return patches.mT.unflatten(2, grid)

    def distillation_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the class token and of the distillation token, each (B, K)."""
        assert self.head is not None
        assert self.distillation_head is not None
        tokens, sizes = self.run_encoder(*self.prepare_tokens(images))
        return self.head(self.pool(tokens, sizes)), self.distillation_head(tokens[:, 1])

    def tokens(self, images: Tensor) -> Tensor:
        """Return the input of the encoder: (B, N, D)."""
        return self.prepare_tokens(images)[0]

    def encode(self, images: Tensor) -> Tensor:
        """Return all tokens after the last block and the final norm: (B, N, D)."""
        return self.encoder(*self.prepare_tokens(images))

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the tokens (B, N, D) after each block."""
        tokens, grid = self.prepare_tokens(images)
        for index in range(self.config.depth):
            tokens = self.encoder.run_layer(index, tokens, grid)
            yield tokens

    def attention_maps(
        self,
        images: Tensor,
        *,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the attention weights (B, heads, N, N) of each layer, or of some.

        They are computed separately from the forward pass, which keeps its fused attention. Layers
        are in ascending order; negative indices count from the end.
        """
        indices = set(resolve_indices("layers", layers, self.config.depth))
        heads = resolve_indices("heads", heads, self.config.heads)

        def maps() -> Iterator[Tensor]:
            tokens, grid = self.prepare_tokens(images)
            for index in range(max(indices, default=-1) + 1):
                if index in indices:
                    inputs, relative = self.encoder.layer_inputs(index, tokens, grid)
                    tokens_in = self.encoder.blocks[index].norm1(inputs)
                    yield self.encoder.attention(index).attention_map(tokens_in, relative, heads)
                if index < max(indices):
                    tokens = self.encoder.run_layer(index, tokens, grid)

        return maps()

    @property
    def checkpointing(self) -> bool:
        """Activation checkpointing: recompute the blocks in the backward pass to save memory."""
        return self.encoder.checkpointing

    @checkpointing.setter
    def checkpointing(self, enabled: bool) -> None:
        self.encoder.checkpointing = enabled

    @property
    def merge(self) -> int:
        """Pairs of similar patches that each block merges: faster, slightly less accurate."""
        return self.encoder.merge

    @merge.setter
    def merge(self, pairs: int) -> None:
        merge = as_int(pairs)
        if merge is None or merge < 0:
            raise ConfigError(f"merge={pairs!r} must be an integer >= 0, pairs per block; 0 is off")
        axial = self.config.attention == "axial"
        if merge and (axial or self.encoder.positions):
            position = f"position={self.config.position!r} in the encoder layers"
            raise ConfigError(
                f"merge={merge} removes tokens from the grid that "
                f"{'axial attention' if axial else position} needs; only models with "
                "position_place='stem' and attention='global' can merge"
            )
        self.encoder.merge = merge


def resolve_indices(name: str, indices: int | Sequence[int] | None, count: int) -> list[int]:
    """Return non-negative indices below `count`; None means all."""
    if indices is None:
        return list(range(count))
    indices = [indices] if isinstance(indices, int) else indices
    for index in indices:
        if not -count <= index < count:
            raise ConfigError(f"{name}={list(indices)}: {index} is out of range; there are {count}")
    return [index % count for index in indices]


def token_parameter(count: int, width: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(int(count), width)) if count else None


def linear_or_none(channels_in: int, channels_out: int) -> nn.Linear | None:
    return nn.Linear(channels_in, channels_out) if channels_out else None


def prepend(tokens: Tensor, *prefix: Tensor | None) -> Tensor:
    """Prepend learned tokens (n, D) to the tokens of each image."""
    expanded = [part.expand(tokens.shape[0], -1, -1) for part in prefix if part is not None]
    return torch.cat([*expanded, tokens], dim=1) if expanded else tokens


def drop_patches(patches: Tensor, rate: float) -> Tensor:
    """Drop a random fraction of the patches (B, n, D) of each image, keeping their order.

    PatchDropout, Liu et al. 2022 (arXiv:2208.07220).
    """
    images, count, width = patches.shape
    keep = max(1, round((1 - rate) * count))
    order = torch.rand(images, count, device=patches.device).argsort(dim=1)
    indices = order[:, :keep].sort(dim=1).values  # (B, keep)
    return patches.gather(1, indices[..., None].expand(-1, -1, width))  # (B, keep, D)


# Models of every family.

Model = VisionTransformer | BiT | MlpMixer


def create(
    name: str,
    *,
    init: InitScheme = "google",
    head_bias: float = 0.0,
    generator: torch.Generator | None = None,
    **changes: Any,
) -> Model:
    """Create a randomly initialized model by name; `changes` override fields of its config.

    >>> model = create("ViT-B/16", num_classes=10, image_size=384)
    """
    config = configuration(name)
    config = config.change(**changes) if changes else config
    with torch.random.fork_rng(devices=[], enabled=generator is not None):
        if generator is not None:  # constructors of registered attentions use that of the CPU
            torch.default_generator.manual_seed(generator.initial_seed())
        model = build(config, device=torch.get_default_device())
    initialize(model, init, head_bias=head_bias, generator=generator)
    return model


def build(config: Config, *, device: torch.device | str = "meta") -> Model:
    """Create the modules of a config with uninitialized weights, by default on `meta`.

    With a registered attention, they have the values of its constructor, unless on `meta`.
    """
    on_meta = torch.device(device).type == "meta"
    if isinstance(config, VitConfig) and ATTENTIONS[config.attention] is not SelfAttention:
        with torch.device("meta" if on_meta else "cpu"):
            return VisionTransformer(config).to(device)
    with torch.device("meta"):
        match config:
            case VitConfig():
                model = VisionTransformer(config)
            case BitConfig():
                model = BiT(config)
            case MixerConfig():
                model = MlpMixer(config)
    return model if on_meta else model.to_empty(device=device)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and restore the mode of every submodule on exit."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
