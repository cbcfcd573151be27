"""Mixup and CutMix, after normalization, on the device of the batch. Targets become soft.

Shapes: B images (B, C, H, W) of floats; labels (B,), or (B, K) if multi-label; K classes.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment import Box
from vitrail.errors import ConfigError

Rng = np.random.Generator
Pairing = Literal["flip", "roll"]

# Partner of each image: the first with the last, as in timm; or each with the one before it, as in
# torchvision and big_vision.
PAIRINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda batch: batch.flip(0),
    "roll": lambda batch: batch.roll(1, 0),
}


def mixup(
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    alpha: float,
    rng: Rng,
    pairing: Pairing = "flip",
) -> tuple[Tensor, Tensor]:
    """Zhang et al. 2018 (arXiv:1710.09412): x and y become lam * own + (1 - lam) * partner's."""
    return blend(images, one_hot(labels, classes), sample_lam(alpha, rng), pairing)


def mixup_big_vision(
    images: Tensor, labels: Tensor, *, classes: int, alpha: float, rng: Rng
) -> tuple[Tensor, Tensor]:
    """Mixup of AugReg: an image always keeps the larger share."""
    lam = sample_lam(alpha, rng)
    return blend(images, one_hot(labels, classes), max(lam, 1 - lam), "roll")


def cutmix(
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    alpha: float,
    rng: Rng,
    pairing: Pairing = "flip",
) -> tuple[Tensor, Tensor]:
    """Yun et al. 2019 (arXiv:1905.04899): a box of every image is replaced by its partner's.

    Targets are mixed in proportion to the pixels, after clipping the box to the image.
    """
    height, width = images.shape[-2:]
    box = cutmix_box(height, width, sample_lam(alpha, rng), rng)
    return paste(images, one_hot(labels, classes), box, pairing)


def mixup_or_cutmix(
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    mixup_alpha: float,
    cutmix_alpha: float,
    rng: Rng,
    prob: float = 1.0,
    switch_prob: float = 0.5,
    pairing: Pairing = "flip",
) -> tuple[Tensor, Tensor]:
    """Mix a batch with probability `prob`, by CutMix with probability `switch_prob`.

    An alpha of 0 disables the method.
    """
    if rng.random() >= prob or not (mixup_alpha or cutmix_alpha):
        return images, one_hot(labels, classes)
    if not mixup_alpha or (cutmix_alpha and rng.random() < switch_prob):
        return cutmix(images, labels, classes=classes, alpha=cutmix_alpha, rng=rng, pairing=pairing)
    return mixup(images, labels, classes=classes, alpha=mixup_alpha, rng=rng, pairing=pairing)


def blend(
    images: Tensor, targets: Tensor, lam: float, pairing: Pairing = "flip"
) -> tuple[Tensor, Tensor]:
    """Return lam * own + (1 - lam) * partner's, for images and for targets (B, K)."""
    if not images.is_floating_point():
        raise ConfigError(f"cannot mix {images.dtype} images; normalize them first")
    partner = PAIRINGS[pairing]
    return images.lerp(partner(images), 1 - lam), targets.lerp(partner(targets), 1 - lam)


def paste(
    images: Tensor, targets: Tensor, box: Box, pairing: Pairing = "flip"
) -> tuple[Tensor, Tensor]:
    """Paste a box of the partner, and mix targets (B, K) in proportion to the pixels."""
    height, width = images.shape[-2:]
    rows = slice(box.top, box.top + box.height)
    columns = slice(box.left, box.left + box.width)
    partner = PAIRINGS[pairing]
    pasted = images.clone()
    pasted[..., rows, columns] = partner(images[..., rows, columns])
    return pasted, targets.lerp(partner(targets), box.height * box.width / (height * width))


def cutmix_box(height: int, width: int, lam: float, rng: Rng) -> Box:
    """Return a box of the image's aspect ratio and 1 - lam of its area, at a random center."""
    side, spans = math.sqrt(1 - lam), []
    for size in (height, width):
        length, middle = int(size * side), int(rng.integers(size))
        spans.append((max(0, middle - length // 2), min(size, middle + (length + 1) // 2)))
    (top, bottom), (left, right) = spans
    return Box(top, left, bottom - top, right - left)


def sample_lam(alpha: float, rng: Rng) -> float:
    """Sample from Beta(alpha, alpha); 1 if alpha is 0."""
    if alpha < 0:
        raise ConfigError(f"alpha={alpha} must not be negative; 0 disables mixing")
    return float(rng.beta(alpha, alpha)) if alpha else 1.0


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return labels (B,) as float (B, K); labels (B, K) stay."""
    if labels.ndim == 1:
        return F.one_hot(labels.long(), classes).to(torch.float32)
    if labels.ndim != 2 or labels.shape[1] != classes:
        raise ConfigError(f"labels of shape {tuple(labels.shape)} do not fit {classes} classes")
    return labels.to(torch.float32)
