"""Pictures → a grid of patch embeddings: what the encoder reads in place of words.

Each stem is a module in `STEMS` that takes (B, C, H, W) and gives (B, h, w, D).

Shapes: B images, C channels, H x W pixels, P patch size, h x w patches, D width.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import DataError
from vitrail.models.checks import pair
from vitrail.models.config import StemKind, VitConfig
from vitrail.models.kept import watched
from vitrail.models.resnet import ResNet


class PatchProjection(nn.Module):
    """A convolution whose patches do not overlap, done as one matrix product.

    Cutting the picture up and multiplying gives tokens in the order the encoder wants them; the
    general convolution gives the same numbers, more slowly, and they must still be turned.
    """

    def __init__(self, channels: int, width: int, patch_size: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels, *patch_size))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, images: Tensor) -> Tensor:
        down, across = self.weight.shape[2:]
        patches = images.unfold(2, down, down).unfold(3, across, across)  # (B, C, h, w, P, P)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)  # (B, h, w, C * P * P)
        return F.linear(patches, self.weight.flatten(1), self.bias)  # (B, h, w, D)


class PatchStem(nn.Module):
    """One linear map for each patch: the paper's (equation 1)."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.projection = PatchProjection(config.channels, config.width, pair(config.patch_size))

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(images)


class ConvStem(nn.Module):
    """3x3 convolutions that each halve the picture, for small data and short training.

    After Xiao et al. 2021 (arXiv:2106.14881), with GroupNorm where they have BatchNorm: it needs
    no statistics of other pictures, so a model means the same in training and after.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        halvings = pair(config.patch_size)[0].bit_length() - 1
        layers: list[nn.Module] = []
        channels = config.channels
        for index in range(halvings):
            wider = max(8, config.width >> (halvings - 1 - index))  # doubles up to D
            layers += [
                nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(math.gcd(wider, 8), wider, eps=config.numerics.group_norm_eps),
                nn.ReLU(),
            ]
            channels = wider
        self.layers = nn.Sequential(*layers)
        self.projection = PatchProjection(channels, config.width, (1, 1))

    @property
    def first(self) -> nn.Conv2d:
        """The convolution that sees the pixels."""
        return cast(nn.Conv2d, self.layers[0])

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(self.layers(images))


class ResNetStem(nn.Module):
    """The hybrid: patches of a ResNet's feature map in place of patches of the picture."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.resnet = ResNet(
            config.channels, config.resnet_blocks, config.resnet_width, config.numerics
        )
        self.projection = PatchProjection(
            self.resnet.channels_out, config.width, pair(config.patch_size)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(self.resnet(images))


STEMS: dict[StemKind, type[nn.Module]] = {
    "patches": PatchStem,
    "conv": ConvStem,
    "resnet": ResNetStem,
}


def check_images(images: Tensor, channels: int, stride: tuple[int, int] = (1, 1)) -> None:
    """Refuse a batch that the model cannot read. Compilers, which know the shapes, pass."""
    if watched():
        return
    if not isinstance(images, Tensor):
        raise DataError(f"the model takes a tensor of images, not a {type(images).__name__}")
    if images.ndim != 4 or images.shape[1] != channels:
        raise DataError(
            f"a batch of shape {tuple(images.shape)} does not fit a model of {channels} channels; "
            f"it takes (images, {channels}, height, width)"
        )
    if not images.is_floating_point():
        raise DataError(f"a batch of {images.dtype} is not normalized; the model takes floats")
    height, width = images.shape[2:]
    if height % stride[0] or width % stride[1] or not height or not width:
        step = stride[0] if stride[0] == stride[1] else f"{stride[0]}x{stride[1]}"
        raise DataError(
            f"images of {height}x{width} pixels are not a whole number of {step}-pixel patches; "
            f"resize or crop them to a multiple"
        )
