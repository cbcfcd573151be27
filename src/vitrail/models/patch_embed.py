"""Patch embeddings: images to a grid of tokens.

A stem maps (B, C, H, W) to (B, h, w, D); the hybrid's is in resnet.py, and `vit.py` lists them.

Shapes: B images, C channels, H x W pixels, P patch size, h x w patches, D width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import DataError
from vitrail.models.config import VitConfig, pair
from vitrail.models.pos_embed import is_tracing


class PatchProjection(nn.Module):
    """A convolution with stride equal to its kernel size, computed as one matrix product.

    The values are those of nn.Conv2d; it is faster and gives tokens in channels-last order.
    """

    def __init__(
        self, channels: int, width: int, patch_size: tuple[int, int], *, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels, *patch_size))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, images: Tensor) -> Tensor:
        height, width = self.weight.shape[2:]
        patches = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, h, P, w, P)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, h, w, C * P * P)
        return F.linear(patches, self.weight.flatten(1), self.bias)  # (B, h, w, D)


class PatchStem(nn.Module):
    """One linear projection per patch: the paper's (equation 1)."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        patch_size, bias = pair(config.patch_size), not config.pre_norm
        self.projection = PatchProjection(config.channels, config.width, patch_size, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(images)


class ConvStem(nn.Module):
    """3x3 convolutions with stride 2, for small datasets and short training.

    After Xiao et al. 2021 (arXiv:2106.14881), with GroupNorm instead of BatchNorm, so that the
    output for an image does not depend on the batch or the mode.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        depth = pair(config.patch_size)[0].bit_length() - 1
        layers: list[nn.Module] = []
        channels = config.channels
        for index in range(depth):
            width = max(8, config.width >> (depth - 1 - index))  # doubles up to D
            layers += [
                nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(math.gcd(width, 8), width, eps=config.numerics.group_norm_eps),
                nn.ReLU(),
            ]
            channels = width
        self.layers = nn.Sequential(*layers)
        self.projection = PatchProjection(channels, config.width, (1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(self.layers(images))


def check_images(images: Tensor, channels: int, stride: tuple[int, int] = (1, 1)) -> None:
    """Raise DataError for a batch that the model cannot process. Does nothing during tracing."""
    if is_tracing():
        return
    if not isinstance(images, Tensor):
        raise DataError(f"the model takes a tensor of images, not {type(images).__name__}")
    if images.ndim != 4 or images.shape[1] != channels:
        is_image = images.ndim == 3 and len(images) == channels
        hint = "; add a batch dimension: image[None]" if is_image else ""
        raise DataError(
            f"a batch of shape {tuple(images.shape)} does not fit a model of {channels} channels; "
            f"expected (images, {channels}, height, width){hint}"
        )
    if not images.is_floating_point():
        raise DataError(f"a batch of {images.dtype} is not normalized; the model takes floats")
    height, width = images.shape[2:]
    if height % stride[0] or width % stride[1] or not height or not width:
        patch = stride[0] if stride[0] == stride[1] else f"{stride[0]}x{stride[1]}"
        raise DataError(
            f"images of {height}x{width} pixels are not a whole number of {patch}-pixel patches; "
            "resize or crop them to a multiple"
        )
