"""Filters that whiten pictures: a first convolution that knows what pictures are like.

Neighboring pixels are nearly equal, so nearly all that random filters see is the mean of what lies
below them. The principal directions of small patches, each divided by how much pictures vary along
it, see different things equally well. Each comes with both signs, since a ReLU follows. The idea is
that of the fastest trainings of CIFAR-10 (Page 2018; Jordan 2024, arXiv:2404.00498);
docs/notebook.md says what it brings here.

Shapes: B images (B, C, H, W), filters (n, C, P, P).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.stems import ConvStem

LEAST = 5e-4  # of the largest variance: what varies less is noise, and is not raised further
TINY = 1e-12  # pictures of one color vary along nothing


def whitening_filters(images: Tensor, count: int, size: int) -> Tensor:
    """Up to `count` filters: the directions of most variance, then each with the other sign."""
    patches = F.unfold(images.double(), size).transpose(1, 2).flatten(0, 1)  # (., C * P * P)
    variances, directions = torch.linalg.eigh(torch.cov(patches.T))  # from small to large
    filters = (directions / (variances.clamp(min=0) + LEAST * variances[-1] + TINY).sqrt()).T
    filters = filters.flip(0)[: count // 2].view(-1, images.shape[1], size, size)
    return torch.cat([filters, -filters]).to(images.dtype)


@torch.no_grad()
def whiten(stem: ConvStem, images: Tensor) -> None:
    """Let a stem's first convolution begin with them, as large as what it has; the rest stays."""
    weight = stem.first.weight
    filters = whitening_filters(images, len(weight), weight.shape[-1])
    weight[: len(filters)] = filters * (weight.std() / filters.std())
