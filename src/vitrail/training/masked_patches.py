"""Masked patch prediction: self-supervised pre-training (appendix B.1.2 of the paper).

Half of the patch embeddings are corrupted, and the model predicts the corrupted patches from the
rest: 80 % are replaced by a learned mask embedding, 10 % by the embedding of a random other patch
of the batch, and 10 % are kept. All random numbers come from torch's generator.

Shapes: B images, C channels, N = h * w patches, M of them corrupted, D width, S cells of a patch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.checkpoints.metadata import get_metadata
from vitrail.errors import ConfigError
from vitrail.models.vit import Model, VisionTransformer
from vitrail.training.config import MaskedSettings, MaskedTarget

MASKED, SWAPPED = 0.8, 0.1  # fractions of the corrupted patches; the rest is kept
LEVELS = 8  # of a channel: 3 bits
MAX_CHANNELS = 3  # 8**3 = 512 colors; more channels make too many classes
MASK_STD = 0.02  # initialization of the mask embedding, as of position embeddings


# Cells along each side of a patch whose mean color is classified; None: regress the pixels.
COLOR_CELLS: dict[MaskedTarget, int | None] = {"mean-color": 1, "colors-4x4": 4, "pixels": None}


class MaskedPatches(nn.Module):
    """Masked patch prediction loss around `model`, whose own head is not used.

    The model's metadata provide the normalization from which colors are recovered.
    """

    def __init__(self, model: Model, settings: MaskedSettings, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(model, VisionTransformer):
            raise ConfigError(
                "objective='masked-patches' needs a Vision Transformer, and the model is a "
                f"{type(model).__name__}; use another model, or objective='classify'"
            )
        config = model.config
        if config.patch_dropout:
            raise ConfigError(
                f"patch_dropout={config.patch_dropout} drops patches that "
                "objective='masked-patches' must predict; use patch_dropout=0"
            )
        self.model = model
        self.share = settings.share
        self.preprocessing = get_metadata(model).preprocessing
        self.side = COLOR_CELLS[settings.predict]
        if self.side is not None and config.channels > MAX_CHANNELS:
            raise ConfigError(
                f"masked.predict needs colors, and {config.channels} channels have "
                f"{LEVELS}^{config.channels} of them; use masked.predict='pixels'"
            )
        outputs = config.channels * config.stride[0] * config.stride[1]
        if self.side is not None:
            outputs = self.side**2 * LEVELS**config.channels
        rng = torch.Generator().manual_seed(seed)
        self.mask = nn.Parameter(torch.empty(config.width).normal_(std=MASK_STD, generator=rng))
        self.head = nn.Linear(config.width, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        for part in (model.pool, model.representation, model.head, model.distillation_head):
            if part is not None:  # unused: DDP would wait for their gradients
                part.requires_grad_(False)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss over the corrupted patches of a batch; `targets` are ignored."""
        model = self.model
        patches = model.embed_patches(images)  # (B, h, w, D)
        masked = random_patches(patches.flatten(1, 2), self.share)  # (B, M)
        corrupted = corrupt(patches.flatten(1, 2), masked, self.mask).view_as(patches)
        tokens = model.encoder(*model.assemble_tokens(corrupted))  # (B, prefix + N, D)
        features = gather(tokens[:, model.config.num_prefix :], masked)  # (B, M, D)
        return self.loss(self.head(features), gather(self.targets(images), masked))

    def loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        if self.side is None:
            return F.mse_loss(predicted.float(), targets)
        cells = predicted.float().unflatten(-1, (self.side**2, -1))  # (B, M, S, 8^C)
        return F.cross_entropy(cells.flatten(0, 2), targets.flatten())

    def targets(self, images: Tensor) -> Tensor:
        """Return normalized pixels (B, N, C * P * P), or color indices of the cells (B, N, S).

        A color index has base 8 over the channels.
        """
        stride = self.model.config.stride
        if self.side is None:
            cells = patchify(images.float(), stride)  # (B, h, w, C, P, P)
            return cells.flatten(3).flatten(1, 2)
        mean = torch.tensor(self.preprocessing.mean, device=images.device)[:, None, None]
        std = torch.tensor(self.preprocessing.std, device=images.device)[:, None, None]
        cells = cell_means(images.float() * std + mean, stride, self.side)  # (B, N, S, C)
        levels = (cells * LEVELS).floor().long().clamp(0, LEVELS - 1)
        index = torch.zeros_like(levels[..., 0])
        for level in levels.unbind(-1):
            index = LEVELS * index + level
        return index


def random_patches(patches: Tensor, share: float) -> Tensor:
    """Return the indices of the patches to corrupt, the same number in each image: (B, M)."""
    batch, count = patches.shape[:2]
    corrupted = max(1, round(share * count))
    return torch.rand(batch, count, device=patches.device).argsort(dim=1)[:, :corrupted]


def corrupt(patches: Tensor, indices: Tensor, mask: Tensor) -> Tensor:
    """Return patches (B, N, D) where those at `indices` are masked, swapped or kept."""
    draw = torch.rand(indices.shape, device=indices.device)[..., None]  # (B, M, 1)
    other = patches.flatten(0, 1)[random_others(patches, indices)]  # (B, M, D)
    replaced = torch.where(draw < MASKED + SWAPPED, other, gather(patches, indices))
    replaced = torch.where(draw < MASKED, mask.to(patches.dtype), replaced)
    return patches.scatter(1, indices[..., None].expand_as(replaced), replaced)


def random_others(patches: Tensor, indices: Tensor) -> Tensor:
    """Return for each index another patch of the batch: its index among all B * N (B, M)."""
    batch, count = patches.shape[:2]
    total = batch * count
    own = count * torch.arange(batch, device=indices.device)[:, None] + indices
    step = torch.randint(1, max(2, total), indices.shape, device=indices.device)
    return (own + step) % total


def gather(patches: Tensor, indices: Tensor) -> Tensor:
    """Select (B, M, …) of (B, N, …) at indices (B, M)."""
    return patches.gather(1, indices[..., None].expand(-1, -1, patches.shape[2]))


def cell_means(images: Tensor, stride: tuple[int, int], side: int) -> Tensor:
    """Downsample each patch to side x side cells: (B, N, S, C)."""
    height, width = (images.shape[2] // stride[0], images.shape[3] // stride[1])
    means = F.adaptive_avg_pool2d(images, (side * height, side * width))  # cells end with patches
    cells = patchify(means, (side, side)).movedim(3, 5)  # (B, h, w, side, side, C)
    return cells.flatten(3, 4).flatten(1, 2)


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Split images (B, C, H, W) into patches of pixels: (B, h, w, C, P, P)."""
    height, width = patch
    patches = images.unfold(2, height, height).unfold(3, width, width)  # (B, C, h, w, P, P)
    return patches.movedim(1, 3)
