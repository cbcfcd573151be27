"""Convolutions with standardized weights, and the ResNet that the hybrid uses as its stem.

The stem is a ResNet v1 (activation after the sum) with GroupNorm and TensorFlow's SAME padding,
which is lopsided on even sizes: 224 pixels under a 7x7 convolution of stride 2 are padded by 2
before and 3 after. The baseline of `bit.py` is a v2 and pads evenly.

Shapes: B images, C channels, h x w cells.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import Numerics

GROUPS = 32  # of every GroupNorm (Wu & He 2018)
ROOT_WIDTH = 64  # channels after the root convolution of a network that is 1 times as wide
EXPANSION = 4  # a unit ends with this many times its inner channels


class StandardizedConv2d(nn.Module):
    """A convolution whose kernels have mean 0 and variance 1 (Qiao et al. 2019)."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        numerics: Numerics,
        *,
        stride: int = 1,
        same: bool = True,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, kernel, kernel))
        self.kernel = kernel
        self.stride = stride
        self.same = same
        self.eps = numerics.conv_eps
        self.eps_inside_root = numerics.conv_eps_inside_root

    def forward(self, images: Tensor) -> Tensor:
        weight = self.standardized()
        if self.same:
            return F.conv2d(pad_same(images, self.kernel, self.stride), weight, stride=self.stride)
        return F.conv2d(images, weight, stride=self.stride, padding=self.kernel // 2)

    def standardized(self) -> Tensor:
        """The kernels as they are used. A LayerNorm over each is the same, and one operation."""
        kernels = self.weight.flatten(1)  # (out, in * k * k)
        if self.eps_inside_root:
            normed = F.layer_norm(kernels, kernels.shape[1:], eps=self.eps)
        else:
            centered = kernels - kernels.mean(dim=1, keepdim=True)
            deviation = torch.linalg.vector_norm(centered, dim=1, keepdim=True)
            normed = centered / (deviation / kernels.shape[1] ** 0.5 + self.eps)
        return normed.view_as(self.weight)


def pad_same(images: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad so that a convolution gives ceil(size / stride) cells; an odd rest goes after."""
    height, width = images.shape[-2:]
    down = max(0, ((height - 1) // stride) * stride + kernel - height)
    across = max(0, ((width - 1) // stride) * stride + kernel - width)
    edges = (across // 2, across - across // 2, down // 2, down - down // 2)
    return F.pad(images, edges, value=value) if any(edges) else images


def group_norm(channels: int, numerics: Numerics) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=numerics.group_norm_eps)


class Unit(nn.Module):
    """A bottleneck of ResNet v1: narrow, look around, widen, add, activate."""

    def __init__(self, channels_in: int, inner: int, numerics: Numerics, *, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * inner
        self.conv1 = StandardizedConv2d(channels_in, inner, 1, numerics)
        self.norm1 = group_norm(inner, numerics)
        self.conv2 = StandardizedConv2d(inner, inner, 3, numerics, stride=stride)
        self.norm2 = group_norm(inner, numerics)
        self.conv3 = StandardizedConv2d(inner, channels_out, 1, numerics)
        self.norm3 = group_norm(channels_out, numerics)  # starts at zero: the unit does nothing
        self.shortcut = None
        if stride > 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                StandardizedConv2d(channels_in, channels_out, 1, numerics, stride=stride),
                group_norm(channels_out, numerics),
            )

    def forward(self, images: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(images)))
        inner = F.relu(self.norm2(self.conv2(inner)))
        inner = self.norm3(self.conv3(inner))
        shortcut = images if self.shortcut is None else self.shortcut(images)
        return F.relu(shortcut + inner)


class ResNet(nn.Module):
    """Root convolution, pooling, and `blocks` units per stage: pictures → a feature map."""

    def __init__(
        self, channels: int, blocks: tuple[int, ...], width_factor: int, numerics: Numerics
    ) -> None:
        super().__init__()
        width = ROOT_WIDTH * width_factor
        self.root = StandardizedConv2d(channels, width, 7, numerics, stride=2)
        self.norm = group_norm(width, numerics)
        self.stages = nn.ModuleList()
        self.channels_out = width
        for stage, units in enumerate(blocks):
            inner = width * 2**stage
            made = []
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                made.append(Unit(self.channels_out, inner, numerics, stride=stride))
                self.channels_out = EXPANSION * inner
            self.stages.append(nn.Sequential(*made))

    def forward(self, images: Tensor) -> Tensor:
        images = F.relu(self.norm(self.root(images)))  # (B, C, h / 2, w / 2)
        images = pad_same(images, 3, 2, value=float("-inf"))
        images = F.max_pool2d(images, 3, 2)  # (B, C, h / 4, w / 4)
        for stage in self.stages:
            images = stage(images)  # the first keeps the size, each later one halves it
        return images
