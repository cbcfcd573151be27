"""Faithfulness of maps, measured on the model that they explain.

Insertion and deletion (Petsiuk et al. 2018, arXiv:1806.07421): pixels that a map calls important
must raise the probability of the class when they are shown, and lower it when they are hidden. The
sanity check of Adebayo et al. 2018 (arXiv:1810.03292): a map that stays the same when the weights
are replaced by random ones does not explain the weights.

Shapes: B images, C channels, H x W pixels, h x w patches, K classes, s steps.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.checkpoints.metadata import get_metadata
from vitrail.errors import ConfigError, unknown
from vitrail.inspection.attention import batch_size_for, token_offset
from vitrail.inspection.relevance import METHODS, check_classes
from vitrail.models.init import initialize
from vitrail.models.vit import Model, build, eval_mode

BASELINES = ("random", "center")  # maps that do not depend on the model
STEPS = 20  # of pixels inserted or deleted
BLUR = 10 / 224  # sigma as a fraction of a side: 10 pixels at 224, as in Fong & Vedaldi 2017
HEAD_STD = 0.02  # of a randomized head: initialized heads are zero, which have no gradient


class Curves(NamedTuple):
    """Probability of a class as pixels are inserted or deleted, most important first."""

    shares: np.ndarray  # (s + 1,) fraction of the pixels, 0 to 1
    insertion: np.ndarray  # (s + 1,) mean probability, starting with the blurred image
    deletion: np.ndarray  # (s + 1,) mean probability, starting with the whole image
    insertion_area: float  # under the curve: larger is better
    deletion_area: float  # smaller is better


class Faithfulness(NamedTuple):
    """Insertion and deletion curves and the sanity check of each method."""

    curves: dict[str, Curves]  # of methods and `BASELINES`
    sanity: dict[str, float]  # rank correlation of maps with those of random weights
    images: int


@torch.no_grad()
def insertion_deletion(
    model: Model,
    images: Tensor,
    maps: Tensor,
    classes: Tensor,
    *,
    steps: int = STEPS,
    progress: Callable[[int], None] | None = None,
) -> Curves:
    """Measure the mean probability of `classes` (B,) as pixels are inserted and deleted.

    As in Petsiuk et al.: pixels are ordered by `maps` (B, h, w), enlarged to the image, largest
    first, equal ones in raster order. Insertion starts with the blurred image and sharpens them,
    because pixels on a plain background would show the edges of the revealed region; deletion
    starts with the image and sets them to its mean color. `progress` is called with the number of
    images done.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps} must be at least 1")
    if maps.ndim != 3 or len(maps) != len(images) or not len(images):
        raise ConfigError(
            f"maps have shape {tuple(maps.shape)}; expected (images, rows, columns) for "
            f"{len(images)} images, and at least one image"
        )
    (rows, columns), (height, width) = maps.shape[1:], images.shape[2:]
    if not rows or not columns or height % rows or width % columns:
        raise ConfigError(
            f"maps of {rows}x{columns} patches do not divide images of {height}x{width} pixels"
        )
    if not model.config.num_classes:
        raise ConfigError("the model has no head, so insertion and deletion are not defined")
    classes = check_classes(classes, len(images), model.config.num_classes).to(images.device)

    counts = torch.linspace(0, height * width, steps + 1, dtype=torch.float64).round().long()
    total = images.new_zeros(2, steps + 1, dtype=torch.float64, device="cpu")
    with eval_mode(model):
        for done, (image, values, label) in enumerate(zip(images, maps, classes, strict=True), 1):
            pixels = enlarge(values.cpu().double(), (height, width), token_offset(model))
            # Products round differently on each CPU: pixels that differ by less are equal.
            pixels = (pixels * (2**24 / pixels.abs().max().clamp_min(1e-300))).round()
            order = pixels.flatten().argsort(descending=True, stable=True)
            ranks = order.argsort().view_as(pixels).to(image.device)  # 0: the most important pixel
            blurry, plain = blur(image), image.mean(dim=(1, 2), keepdim=True)
            together = max(1, batch_size_for(model, (height, width)) // 2)
            parts = []  # probabilities with the first pixels inserted, and deleted: (2, s)
            for part in counts.to(images.device).split(together):
                chosen = (ranks < part[:, None, None])[:, None]  # (s, 1, H, W)
                both = torch.cat([image.where(chosen, blurry), plain.where(chosen, image)])
                probability = get_metadata(model).probabilities(model(both))[:, label]
                parts.append(probability.double().cpu().unflatten(0, (2, -1)))
            total += torch.cat(parts, dim=1)
            if progress is not None:
                progress(done)
    insertion, deletion = total / len(images)
    shares = counts.double() / (height * width)
    return Curves(
        shares=shares.numpy(),
        insertion=insertion.numpy(),
        deletion=deletion.numpy(),
        insertion_area=float(torch.trapezoid(insertion, shares)),
        deletion_area=float(torch.trapezoid(deletion, shares)),
    )


def enlarge(values: Tensor, size: tuple[int, int], offset: float) -> Tensor:
    """Interpolate a map (h, w) linearly between token centers: (H, W)."""
    matrices = []
    for side, count in zip(size, values.shape, strict=True):
        positions = torch.arange(side, dtype=torch.float64) + 0.5
        positions = positions * count / side - 0.5 + offset  # in tokens
        distance = positions.clamp(0, count - 1)[:, None] - torch.arange(count)
        matrices.append((1 - distance.abs()).clamp_min(0).to(values))  # rows sum to 1
    down, across = matrices
    return down @ values @ across.mT


def blur(image: Tensor) -> Tensor:
    """Apply a Gaussian blur that ignores what is outside of the image."""
    kernels = []
    for side in image.shape[-2:]:
        places = torch.arange(side, dtype=torch.float64)
        weights = torch.exp(-(((places[:, None] - places) / (BLUR * side)) ** 2) / 2)
        kernels.append((weights / weights.sum(dim=1, keepdim=True)).to(image))  # rows sum to 1
    return kernels[0] @ image @ kernels[1].mT


def evaluate_faithfulness(
    model: Model,
    images: Tensor,
    classes: Tensor | None = None,
    methods: Sequence[str] = tuple(METHODS),
    progress: Callable[[str, int, int], None] | None = None,
) -> Faithfulness:
    """Evaluate methods for `classes` (B,), by default the predicted ones.

    The sanity check compares a method's maps with those for random weights by Spearman's rank
    correlation, mean over images: near 0 if they depend on what was learned, 1 if not. `progress`
    is called with the current test, the number of images done, and their total.
    """
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    report = progress or (lambda what, done, total: None)
    classes = predict_classes(model, images) if classes is None else classes
    random_model = randomize(model)
    curves, sanity = {}, {}
    for method in methods:
        what = f"scoring {method}"
        report(what, 0, len(images))
        maps = METHODS[method](model, images, classes)
        step = lambda done, what=what: report(what, done, len(images))  # noqa: E731
        curves[method] = insertion_deletion(model, images, maps, classes, progress=step)
        sanity[method] = rank_correlation(maps, METHODS[method](random_model, images, classes))
    return Faithfulness(curves=curves, sanity=sanity, images=len(images))


@torch.no_grad()
def predict_classes(model: Model, images: Tensor) -> Tensor:
    """Return the predicted class of each image: (B,)."""
    with eval_mode(model):
        parts = images.split(batch_size_for(model, (images.shape[2], images.shape[3])))
        return torch.cat([model(part).argmax(dim=1) for part in parts])


def randomize(model: Model) -> Model:
    """Return the same architecture with random weights, head included; always the same ones."""
    weight = next(model.parameters())
    other = build(model.config, device="cpu")
    generator = torch.Generator().manual_seed(0)
    initialize(other, generator=generator)
    for head in (other.head, getattr(other, "distillation_head", None)):
        if head is not None:
            nn.init.normal_(head.weight, std=HEAD_STD, generator=generator)
    return other.eval().to(weight)


def rank_correlation(maps: Tensor, others: Tensor) -> float:
    """Return Spearman's rank correlation of maps (B, h, w), mean over images; 0 for a constant."""
    pairs = (x.flatten(1).cpu().double().numpy() for x in (maps, others))
    return float(np.mean([correlation(*map(ranks, pair)) for pair in zip(*pairs, strict=True)]))


def ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks; equal values share their mean."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[group]


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Pearson's correlation; 0 for a constant."""
    one, other = one - one.mean(), other - other.mean()
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / size if size > 0 else 0.0
