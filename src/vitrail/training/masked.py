"""Masked patch prediction: learning from pictures without labels (appendix B.1.2 of the paper).

Half of the patch embeddings are corrupted, and the model tells from the rest what the corrupted
patches look like. Of these, 80 % become one learned vector, 10 % the embedding of a random other
patch, and 10 % stay as they are. The other patch may be of any picture of the batch, as BERT takes
any word of its vocabulary. Everything random comes from torch's generator.

Shapes: B pictures, C channels, N = h * w patches, M of them corrupted, D width, S cells of a patch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError
from vitrail.models.build import Model
from vitrail.models.config import VitConfig
from vitrail.models.vit import VisionTransformer
from vitrail.training.settings import MaskedSettings, Prediction

MASKED, SWAPPED = 0.8, 0.1  # shares of the corrupted patches; the rest stays as it is
LEVELS = 8  # of a channel: 3 bits
MOST_CHANNELS = 3  # 8**3 = 512 colors; with more channels there are more than anybody can count
START_STD = 0.02  # of the vector that stands for a masked patch, as of positions


@dataclass(frozen=True, slots=True)
class Colors:
    """Which of 512 colors each of side x side cells of a patch has on average."""

    side: int

    def outputs(self, config: VitConfig) -> int:
        if config.channels > MOST_CHANNELS:
            raise ConfigError(
                f"masked.predict asks for colors, and {config.channels} channels have "
                f"{LEVELS}^{config.channels} of them; use masked.predict='pixels'"
            )
        return self.side**2 * LEVELS**config.channels

    def targets(self, images: Tensor, config: VitConfig, preprocessing: Preprocessing) -> Tensor:
        """The number of each cell's color, in base 8 from its channels: (B, N, S)."""
        mean = torch.tensor(preprocessing.mean, device=images.device)[:, None, None]
        std = torch.tensor(preprocessing.std, device=images.device)[:, None, None]
        cells = cell_means(images.float() * std + mean, config.stride, self.side)  # (B, N, S, C)
        levels = (cells * LEVELS).floor().long().clamp(0, LEVELS - 1)
        number = torch.zeros_like(levels[..., 0])
        for level in levels.unbind(-1):
            number = LEVELS * number + level
        return number

    def loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        cells = predicted.float().unflatten(-1, (self.side**2, -1))  # (B, M, S, 8^C)
        return F.cross_entropy(cells.flatten(0, 2), targets.flatten())


@dataclass(frozen=True, slots=True)
class Pixels:
    """The pixels of a patch, normalized as the model sees them; the loss is their mean square."""

    def outputs(self, config: VitConfig) -> int:
        return config.channels * config.stride[0] * config.stride[1]

    def targets(self, images: Tensor, config: VitConfig, preprocessing: Preprocessing) -> Tensor:
        cells = cut(images.float(), config.stride)  # (B, h, w, C, P, P)
        return cells.flatten(3).flatten(1, 2)  # (B, N, C * P * P)

    def loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(predicted.float(), targets)


PREDICTIONS: dict[Prediction, Colors | Pixels] = {
    "mean-color": Colors(side=1),
    "colors-4x4": Colors(side=4),
    "pixels": Pixels(),
}


class MaskedPatches(nn.Module):
    """How wrongly the model fills in corrupted patches. `model` needs no head, and none learns.

    How to read colors from normalized pictures is told by the model's metadata.
    """

    def __init__(self, model: Model, settings: MaskedSettings, seed: int = 0) -> None:
        super().__init__()
        model = maskable(model)
        config = model.config
        self.model = model
        self.share = settings.share
        self.preprocessing = get_metadata(model).preprocessing
        self.prediction = PREDICTIONS[settings.predict]
        rng = torch.Generator().manual_seed(seed)
        self.mask = nn.Parameter(torch.empty(config.width).normal_(std=START_STD, generator=rng))
        self.head = nn.Linear(config.width, self.prediction.outputs(config))
        nn.init.zeros_(self.head.weight)  # as the model's own: no opinion before the first step
        nn.init.zeros_(self.head.bias)
        for part in (model.pool, model.representation, model.head, model.distillation_head):
            if part is not None:  # nobody reads these, and processes would wait for their gradients
                part.requires_grad_(False)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss over the corrupted patches of a batch; labels are not looked at."""
        model = self.model
        patches = model.embed_patches(images)  # (B, h, w, D)
        places = random_places(patches.flatten(1, 2), self.share)  # (B, M)
        corrupted = corrupt(patches.flatten(1, 2), places, self.mask).view_as(patches)
        tokens = model.encoder(*model.assemble_tokens(corrupted))  # (B, prefix + N, D)
        seen = pick(tokens[:, model.config.num_prefix :], places)  # (B, M, D)
        wanted = self.prediction.targets(images, model.config, self.preprocessing)
        return self.prediction.loss(self.head(seen), pick(wanted, places))


def maskable(model: nn.Module) -> VisionTransformer:
    """The model, unless it has no patches that can be masked and found again."""
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            "objective='masked-patches' needs a Vision Transformer, and the model is a "
            f"{type(model).__name__}; use another model, or objective='classify'"
        )
    if model.config.patch_dropout:
        raise ConfigError(
            f"patch_dropout={model.config.patch_dropout} leaves out patches that "
            "objective='masked-patches' must fill in; use patch_dropout=0"
        )
    return model


def random_places(patches: Tensor, share: float) -> Tensor:
    """Which patches of each picture are corrupted: as many in each, and one at least (B, M)."""
    pictures, count = patches.shape[:2]
    chosen = max(1, round(share * count))
    return torch.rand(pictures, count, device=patches.device).argsort(dim=1)[:, :chosen]


def corrupt(patches: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """Patches (B, N, D), where those at `places` are masked, swapped or left alone."""
    fate = torch.rand(places.shape, device=places.device)[..., None]  # (B, M, 1)
    other = patches.flatten(0, 1)[random_others(patches, places)]  # (B, M, D)
    replaced = torch.where(fate < MASKED + SWAPPED, other, pick(patches, places))
    replaced = torch.where(fate < MASKED, mask.to(patches.dtype), replaced)
    return patches.scatter(1, places[..., None].expand_as(replaced), replaced)


def random_others(patches: Tensor, places: Tensor) -> Tensor:
    """For each place, another patch of the batch: its number among all B * N of them (B, M)."""
    pictures, count = patches.shape[:2]
    everything = pictures * count
    own = count * torch.arange(pictures, device=places.device)[:, None] + places
    step = torch.randint(1, max(2, everything), places.shape, device=places.device)
    return (own + step) % everything


def pick(patches: Tensor, places: Tensor) -> Tensor:
    """What (B, N, …) holds at places (B, M)."""
    return patches.gather(1, places[..., None].expand(-1, -1, patches.shape[2]))


def cell_means(images: Tensor, stride: tuple[int, int], side: int) -> Tensor:
    """Each patch downsized to side x side cells: (B, N, S, C)."""
    height, width = (images.shape[2] // stride[0], images.shape[3] // stride[1])
    means = F.adaptive_avg_pool2d(images, (side * height, side * width))  # cells end with patches
    cells = cut(means, (side, side)).movedim(3, 5)  # (B, h, w, side, side, C)
    return cells.flatten(3, 4).flatten(1, 2)


def cut(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Pictures (B, C, H, W) as patches of pixels: (B, h, w, C, P, P)."""
    down, across = patch
    patches = images.unfold(2, down, down).unfold(3, across, across)  # (B, C, h, w, P, P)
    return patches.movedim(1, 3)
