"""BiT: the ResNet-v2 baseline of the paper (Kolesnikov et al. 2020, arXiv:1912.11370).

Activations come before convolutions, paddings are even, and the pooling after the root pads with
zeros where others pad with minus infinity; those zeros can win, because nothing has been
activated yet.

Shapes: B images, C channels, H x W pixels, h x w cells, K classes.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import BitConfig, Numerics
from vitrail.models.encoder import step
from vitrail.models.initialization import initialize
from vitrail.models.resnet import EXPANSION, ROOT_WIDTH, StandardizedConv2d, group_norm
from vitrail.models.stems import check_images


class PreActivationUnit(nn.Module):
    """A bottleneck of ResNet v2: each convolution reads what was normalized and activated."""

    def __init__(self, channels_in: int, inner: int, numerics: Numerics, *, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * inner
        self.norm1 = group_norm(channels_in, numerics)
        self.conv1 = StandardizedConv2d(channels_in, inner, 1, numerics, same=False)
        self.norm2 = group_norm(inner, numerics)
        self.conv2 = StandardizedConv2d(inner, inner, 3, numerics, stride=stride, same=False)
        self.norm3 = group_norm(inner, numerics)
        self.conv3 = StandardizedConv2d(inner, channels_out, 1, numerics, same=False)
        self.shortcut = None
        if stride > 1 or channels_in != channels_out:
            self.shortcut = StandardizedConv2d(
                channels_in, channels_out, 1, numerics, stride=stride, same=False
            )

    def forward(self, images: Tensor) -> Tensor:
        active = F.relu(self.norm1(images))
        shortcut = images if self.shortcut is None else self.shortcut(active)
        inner = self.conv1(active)
        inner = self.conv2(F.relu(self.norm2(inner)))
        inner = self.conv3(F.relu(self.norm3(inner)))
        return shortcut + inner


class BiT(nn.Module):
    """Images (B, C, H, W), already normalized → logits (B, K)."""

    metadata: Any | None = None  # preprocessing, class names and provenance, set by `vitrail.load`

    def __init__(self, config: BitConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False  # forget what units compute, and compute it again
        numerics = config.numerics
        width = ROOT_WIDTH * config.width_factor
        self.root = StandardizedConv2d(config.channels, width, 7, numerics, stride=2, same=False)
        stages: list[nn.Sequential] = []
        channels = width
        for stage, units in enumerate(config.blocks):
            made = []
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                made.append(PreActivationUnit(channels, width * 2**stage, numerics, stride=stride))
                channels = EXPANSION * width * 2**stage
            stages.append(nn.Sequential(*made))
        self.stages = cast(list[nn.Sequential], nn.ModuleList(stages))
        self.norm = group_norm(channels, numerics)
        self.head = nn.Linear(channels, config.num_classes) if config.num_classes else None
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); features where the model has no head."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """One vector per image: the mean over all cells of the last feature map."""
        images = self.first_map(images)
        for stage in self.stages:
            for unit in stage:
                images = step(unit, images, self.checkpointing)
        return F.relu(self.norm(images)).mean(dim=(2, 3))  # (B, C)

    def tokens(self, images: Tensor) -> Tensor:
        """What the first block reads, a token for each cell: (B, h * w, C)."""
        return self.first_map(images).flatten(2).mT

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """The tokens after each unit, one layer in memory at a time."""
        images = self.first_map(images)
        for stage in self.stages:
            for unit in stage:
                images = unit(images)
                yield images.flatten(2).mT  # (B, h * w, C)

    def first_map(self, images: Tensor) -> Tensor:
        check_images(images, self.config.channels)
        images = F.pad(self.root(images), (1, 1, 1, 1))  # zeros, and they count
        return F.max_pool2d(images, 3, 2)  # (B, C, H / 4, W / 4)
