"""Mixup and cutmix: pictures and labels of a batch mixed with those of others in the batch.

These come after normalization, on the device of the batch, and give soft targets. Label smoothing
is a matter of the loss.

Shapes: B images (B, C, H, W) of floats; labels (B,), or (B, K) for several labels each; K classes.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augmentation import Box
from vitrail.errors import ConfigError

Rng = np.random.Generator
Pairing = Literal["flip", "roll"]

# Who is mixed with whom: the first with the last, as in timm; or each with the one before it, as in
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
    """Zhang et al. 2018 (arXiv:1710.09412): x and y become share * own + (1 - share) * other's."""
    share = draw_share(alpha, rng)
    return blend(images, soft(labels, classes), share, pairing)


def mixup_big_vision(
    images: Tensor, labels: Tensor, *, classes: int, alpha: float, rng: Rng
) -> tuple[Tensor, Tensor]:
    """As AugReg has it: the larger share is always an image's own."""
    share = draw_share(alpha, rng)
    return blend(images, soft(labels, classes), max(share, 1 - share), "roll")


def cutmix(
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    alpha: float,
    rng: Rng,
    pairing: Pairing = "flip",
) -> tuple[Tensor, Tensor]:
    """Yun et al. 2019 (arXiv:1905.04899): a box of every image comes from another one.

    The labels' shares are those of the pixels, after the box was cut off at the borders.
    """
    height, width = images.shape[-2:]
    box = cutmix_box(height, width, draw_share(alpha, rng), rng)
    return paste(images, soft(labels, classes), box, pairing)


def mixup_or_cutmix(
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    mixup_alpha: float,
    cutmix_alpha: float,
    rng: Rng,
    chance: float = 1.0,
    switch: float = 0.5,
    pairing: Pairing = "flip",
) -> tuple[Tensor, Tensor]:
    """One of the two for each batch: cutmix with probability `switch`; neither with 1 - `chance`.

    An alpha of 0 leaves the method out.
    """
    if rng.random() >= chance or not (mixup_alpha or cutmix_alpha):
        return images, soft(labels, classes)
    if not mixup_alpha or (cutmix_alpha and rng.random() < switch):
        return cutmix(images, labels, classes=classes, alpha=cutmix_alpha, rng=rng, pairing=pairing)
    return mixup(images, labels, classes=classes, alpha=mixup_alpha, rng=rng, pairing=pairing)


def blend(
    images: Tensor, targets: Tensor, share: float, pairing: Pairing = "flip"
) -> tuple[Tensor, Tensor]:
    """share * own + (1 - share) * other's, of images and of targets (B, K)."""
    if not images.is_floating_point():
        raise ConfigError(f"images of {images.dtype} cannot be mixed; normalize them before")
    other = PAIRINGS[pairing]
    return images.lerp(other(images), 1 - share), targets.lerp(other(targets), 1 - share)


def paste(
    images: Tensor, targets: Tensor, box: Box, pairing: Pairing = "flip"
) -> tuple[Tensor, Tensor]:
    """A box of the other image on each, and targets (B, K) as the pixels are shared."""
    height, width = images.shape[-2:]
    rows = slice(box.top, box.top + box.height)
    columns = slice(box.left, box.left + box.width)
    other = PAIRINGS[pairing]
    pasted = images.clone()
    pasted[..., rows, columns] = other(images[..., rows, columns])
    return pasted, targets.lerp(other(targets), box.height * box.width / (height * width))


def cutmix_box(height: int, width: int, share: float, rng: Rng) -> Box:
    """A box with the image's shape and 1 - share of its area, about a random pixel."""
    side = math.sqrt(1 - share)
    top, bottom = span(int(height * side), height, rng)
    left, right = span(int(width * side), width, rng)
    return Box(top, left, bottom - top, right - left)


def span(length: int, within: int, rng: Rng) -> tuple[int, int]:
    """Begin and end of a stretch about a random place, cut off at both ends."""
    middle = int(rng.integers(within))
    return max(0, middle - length // 2), min(within, middle + (length + 1) // 2)


def draw_share(alpha: float, rng: Rng) -> float:
    """From Beta(alpha, alpha); all of it when alpha is 0."""
    if alpha < 0:
        raise ConfigError(f"alpha={alpha} must not be negative; 0 turns mixing off")
    return float(rng.beta(alpha, alpha)) if alpha else 1.0


def soft(labels: Tensor, classes: int) -> Tensor:
    """Labels (B,) as (B, K) of zeros and ones; labels that are (B, K) already stay."""
    if labels.ndim == 1:
        return F.one_hot(labels.long(), classes).to(torch.float32)
    if labels.ndim != 2 or labels.shape[1] != classes:
        raise ConfigError(f"labels of shape {tuple(labels.shape)} are not for {classes} classes")
    return labels.to(torch.float32)
