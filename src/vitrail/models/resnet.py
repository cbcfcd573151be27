"""ResNets with weight standardization and GroupNorm: the hybrid's stem, BiT and AxialResNet.

The stem is a ResNet-v1 (activation after the sum) with TensorFlow's SAME padding, which is
asymmetric for even sizes: 224 pixels under a 7x7 convolution of stride 2 are padded by 2 before and
3 after. BiT (Kolesnikov et al. 2020, arXiv:1912.11370) is a ResNet-v2 (activation before each
convolution) with symmetric padding. AxialResNet (appendix D.6) is a BiT whose 3x3 convolutions are
replaced by attention along columns and along rows.

Shapes: B images, C channels, H x W pixels, h x w cells of the feature map, D width, K classes.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import renamed_attribute
from vitrail.models.config import BitConfig, Numerics, ResizeMethod, VitConfig, pair
from vitrail.models.encoder import run_block
from vitrail.models.init import initialize
from vitrail.models.patch_embed import PatchProjection, check_images
from vitrail.models.pos_embed import is_tracing, resize_line

GROUPS = 32  # of every GroupNorm (Wu & He 2018)
ROOT_WIDTH = 64  # channels after the root convolution, for width factor 1
EXPANSION = 4  # ratio of output to inner channels of a bottleneck
AXIAL_HEADS = 8
AXIAL_CELLS = 56  # side of the first feature map for images of 224 pixels


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose kernels are standardized to mean 0 and variance 1 (Qiao et al. 2019)."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        numerics: Numerics,
        *,
        stride: int = 1,
        same: bool = True,  # TensorFlow's SAME padding instead of a symmetric one
    ) -> None:
        padding = 0 if same else kernel // 2
        super().__init__(
            channels_in, channels_out, kernel, stride=stride, padding=padding, bias=False
        )
        self.same = same
        self.eps = numerics.conv_eps
        self.eps_inside_root = numerics.conv_eps_inside_root

    def forward(self, input: Tensor) -> Tensor:
        if self.same:
            input = pad_same(input, self.kernel_size[0], self.stride[0])
        return F.conv2d(input, self.standardized_weight(), None, self.stride, self.padding)

    def standardized_weight(self) -> Tensor:
        kernels = self.weight.flatten(1)  # (out, in * k * k)
        if self.eps_inside_root:  # equal to a LayerNorm over each kernel
            normed = F.layer_norm(kernels, kernels.shape[1:], eps=self.eps)
        else:
            centered = kernels - kernels.mean(dim=1, keepdim=True)
            deviation = torch.linalg.vector_norm(centered, dim=1, keepdim=True)
            normed = centered / (deviation / kernels.shape[1] ** 0.5 + self.eps)
        return normed.view_as(self.weight)


def pad_same(images: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad for ceil(size / stride) outputs; if the total is odd, the extra row or column is last."""
    if is_tracing():  # the size may be symbolic, and is a multiple of the stride (`check_images`)
        rows = columns = max(0, kernel - stride)
    else:
        height, width = images.shape[-2:]
        rows = max(0, ((height - 1) // stride) * stride + kernel - height)
        columns = max(0, ((width - 1) // stride) * stride + kernel - width)
    edges = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
    return F.pad(images, edges, value=value) if any(edges) else images


def group_norm(channels: int, numerics: Numerics) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=numerics.group_norm_eps)


class Bottleneck(nn.Module):
    """Bottleneck unit of a ResNet-v1."""

    def __init__(
        self, channels_in: int, inner: int, channels_out: int, config: VitConfig, *, stride: int
    ) -> None:
        super().__init__()
        numerics = config.numerics
        self.conv1 = StandardizedConv2d(channels_in, inner, 1, numerics)
        self.norm1 = group_norm(inner, numerics)
        self.conv2 = StandardizedConv2d(inner, inner, 3, numerics, stride=stride)
        self.norm2 = group_norm(inner, numerics)
        self.conv3 = StandardizedConv2d(inner, channels_out, 1, numerics)
        self.norm3 = group_norm(channels_out, numerics)  # initialized to zero
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


class PreActBottleneck(nn.Module):
    """Bottleneck unit of a ResNet-v2: norm and activation precede each convolution."""

    def __init__(
        self, channels_in: int, inner: int, channels_out: int, config: BitConfig, *, stride: int
    ) -> None:
        super().__init__()
        numerics = config.numerics
        self.norm1 = group_norm(channels_in, numerics)
        self.conv1 = StandardizedConv2d(channels_in, inner, 1, numerics, same=False)
        self.norm2 = group_norm(inner, numerics)
        if config.unit == "axial":
            self.conv2 = RowAndColumnAttention(inner, config, stride)
        else:
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


class AxialAttention(nn.Module):
    """Position-sensitive attention along the rows or columns of a feature map (B, C, h, w).

    Equation 4 of Wang et al. 2020 (arXiv:2003.07853), of which appendix D.6 takes AxialResNet:
    softmax(q k + q r_q + k r_k) (v + r_v), where the learned r depend on the offset between query
    and key, and queries and keys have half as many channels as values. Their code normalizes all
    terms over the batch; here q, k and v have a GroupNorm, and the logits the usual scale.
    """

    def __init__(self, channels: int, cells: int, numerics: Numerics, *, columns: bool) -> None:
        super().__init__()
        self.cells, self.columns = cells, columns
        self.method: ResizeMethod = numerics.position_resize
        self.qkv = nn.Conv2d(channels, 2 * channels, 1, bias=False)
        self.norm = group_norm(2 * channels, numerics)
        self.table = nn.Parameter(torch.empty(2 * cells - 1, 2 * channels // AXIAL_HEADS))

    def forward(self, images: Tensor) -> Tensor:
        # M lines and heads of n cells each, K channels per head.
        joint = self.norm(self.qkv(images))  # (B, 2 C, h, w)
        joint = joint.mT if self.columns else joint  # lines are along the last axis
        shape = (joint.shape[0], joint.shape[2], AXIAL_HEADS, joint.shape[3])
        joint = joint.unflatten(1, (AXIAL_HEADS, -1)).permute(4, 0, 3, 1, 2)
        query, key, value = halves_and_whole(joint.flatten(1, 3))  # (n, M, K / 2), twice; (n, M, K)
        cells, table = shape[3], self.table
        if cells != self.cells:
            table = resize_line(table, 2 * cells - 1, self.method)
        index = torch.arange(cells, device=table.device)
        offsets = F.embedding(index - index[:, None] + cells - 1, table)  # (n, n, 2 K)
        r_query, r_key, r_value = halves_and_whole(offsets)  # (n, n, …), of each query and key
        scores = query.transpose(0, 1) @ key.permute(1, 2, 0)  # (M, n, n)
        scores = scores + (query @ r_query.mT).transpose(0, 1)
        scores = scores + (key @ r_key.permute(1, 2, 0)).permute(1, 2, 0)
        weights = (scores * query.shape[-1] ** -0.5).softmax(dim=-1)
        mixed = weights @ value.transpose(0, 1)  # (M, n, K)
        mixed = mixed + (weights.transpose(0, 1) @ r_value).transpose(0, 1)
        mixed = mixed.reshape(*shape, -1).permute(0, 2, 4, 1, 3).flatten(1, 2)  # (B, C, h, w)
        return mixed.mT if self.columns else mixed


def halves_and_whole(joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the last axis into two quarters and a half."""
    first, whole = joint.chunk(2, dim=-1)
    return (*first.chunk(2, dim=-1), whole)  # pyright: ignore[reportReturnType]: two chunks


class RowAndColumnAttention(nn.Module):
    """Attention along columns, along rows, and average pooling for a stride of 2."""

    def __init__(self, channels: int, config: BitConfig, stride: int) -> None:
        super().__init__()
        cells = AXIAL_CELLS * stride * ROOT_WIDTH * config.width_factor // channels
        self.columns = AxialAttention(channels, cells, config.numerics, columns=True)
        self.rows = AxialAttention(channels, cells, config.numerics, columns=False)
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        images = self.rows(self.columns(images))
        if self.stride > 1:
            images = images.unflatten(3, (-1, self.stride)).mean(dim=4)
            images = images.unflatten(2, (-1, self.stride)).mean(dim=3)
        return images


def make_stages(
    unit: Callable[..., nn.Module],
    channels: int,
    blocks: tuple[int, ...],
    config: VitConfig | BitConfig,
    width: int,
    expansion: int = EXPANSION,
) -> tuple[list[nn.Sequential], int]:
    """Build `blocks` units per stage, and return them with their output channels."""
    stages: list[nn.Sequential] = []
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        units = []
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            units.append(unit(channels, inner, expansion * inner, config, stride=stride))
            channels = expansion * inner
        stages.append(nn.Sequential(*units))
    return stages, channels


class ResNet(nn.Module):
    """ResNet-v1 without head: images to a feature map."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        width, numerics = ROOT_WIDTH * config.resnet_width, config.numerics
        self.root = StandardizedConv2d(config.channels, width, 7, numerics, stride=2)
        self.norm = group_norm(width, numerics)
        stages, self.channels_out = make_stages(
            Bottleneck, width, config.resnet_blocks, config, width
        )
        self.stages = nn.ModuleList(stages)

    def forward(self, images: Tensor) -> Tensor:
        images = F.relu(self.norm(self.root(images)))  # (B, C, H / 2, W / 2)
        images = pad_same(images, 3, 2, value=float("-inf"))
        images = F.max_pool2d(images, 3, 2)  # (B, C, H / 4, W / 4)
        for stage in self.stages:
            images = stage(images)  # every stage but the first has stride 2
        return images


class ResNetStem(nn.Module):
    """The hybrid's stem: patches of a ResNet feature map instead of the image."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.resnet = ResNet(config)
        self.projection = PatchProjection(
            self.resnet.channels_out, config.width, pair(config.patch_size)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(self.resnet(images))  # (B, h, w, D)


class BiT(nn.Module):
    """BiT ResNet-v2 or AxialResNet: normalized images (B, C, H, W) to logits (B, K)."""

    metadata: Any | None = None  # preprocessing, class names and provenance, set by `vitrail.load`
    facts = renamed_attribute("facts", "metadata")

    def __init__(self, config: BitConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False  # activation checkpointing
        numerics = config.numerics
        width, expansion = ROOT_WIDTH * config.width_factor, config.expansion
        root = width * expansion // EXPANSION
        self.root = StandardizedConv2d(config.channels, root, 7, numerics, stride=2, same=False)
        stages, channels = make_stages(
            PreActBottleneck, root, config.blocks, config, width, expansion
        )
        self.stages = cast(list[nn.Sequential], nn.ModuleList(stages))
        self.norm = group_norm(channels, numerics)
        self.head = nn.Linear(channels, config.num_classes) if config.num_classes else None
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, K), or the features if the model has no head."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """Return the mean over the last feature map: (B, C)."""
        images = self.root_map(images)
        for stage in self.stages:
            for unit in stage:
                images = run_block(unit, images, checkpointing=self.checkpointing)
        return F.relu(self.norm(images)).mean(dim=(2, 3))

    def tokens(self, images: Tensor) -> Tensor:
        """Return the input of the first unit, with one token per cell: (B, h * w, C)."""
        return self.root_map(images).flatten(2).mT

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the feature map after each unit as tokens (B, h * w, C)."""
        images = self.root_map(images)
        for stage in self.stages:
            for unit in stage:
                images = unit(images)
                yield images.flatten(2).mT

    def root_map(self, images: Tensor) -> Tensor:
        """Root convolution and pooling: (B, C, H / 4, W / 4)."""
        check_images(images, self.config.channels, self.config.stride)
        # Zero padding is not neutral here: there is no activation before the maximum.
        return F.max_pool2d(F.pad(self.root(images), (1, 1, 1, 1)), 3, 2)
