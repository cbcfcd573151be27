"""Is the explanation true? Maps put to the test on the model that they explain.

Insertion and deletion (Petsiuk et al. 2018, arXiv:1806.07421): the patches that a map calls
important must make the class likely when they are shown, and unlikely when they are hidden. And
the sanity check of Adebayo et al. 2018 (arXiv:1810.03292): a map that stays the same when the
weights are replaced by random ones does not explain the weights.

Shapes: B images, C channels, H x W pixels, h x w patches, n = h * w, K classes.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, unknown
from vitrail.inspection.findings import Curves, Trust
from vitrail.inspection.relevance import METHODS, checked, standing_still
from vitrail.models.build import Model, build
from vitrail.models.initialization import initialize

Blank = Literal["mean", "blur"]

AT_ONCE = 64  # pictures through the model at a time
BLUR = 10 / 224  # sigma as a share of a side: 10 pixels at 224, as Fong & Vedaldi 2017 have it
HEAD_STD = 0.02  # of a fresh head's weights: fresh heads are zero, and zero has no gradient


@torch.no_grad()
def insertion_deletion(
    model: Model,
    images: Tensor,
    maps: Tensor,
    classes: Tensor,
    *,
    steps: int = 20,
    blank: Blank = "mean",
) -> Curves:
    """How the probability of `classes` (B,) moves as patches come and go, mean over images.

    Patches are taken in the order of `maps` (B, h, w), largest first, equal ones in raster order.
    Deletion begins with the picture and hides them, insertion begins with a blank and shows them.
    The blank is each picture's mean color, or the picture blurred. There are at most as many
    steps as patches.
    """
    classes = checked_task(model, images, maps, classes, steps, blank)
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)  # (B, n)
    places = order.argsort(dim=1).unflatten(1, maps.shape[1:])  # when the turn of each patch is
    count = order.shape[1]
    shown = torch.linspace(0, count, min(steps, count) + 1, dtype=torch.float64).round().long()
    jobs = torch.cartesian_prod(torch.arange(len(shown)), torch.arange(len(images)))
    inserted = torch.empty(len(jobs), dtype=torch.float64)
    deleted = torch.empty(len(jobs), dtype=torch.float64)
    empty = BLANKS[blank](images)
    with standing_still(model):
        for here in torch.arange(len(jobs)).split(AT_ONCE // 2):
            step, image = jobs[here].unbind(1)
            best = places[image] < shown[step].to(places.device)[:, None, None]
            best = as_pixels(best, images)  # (b, 1, H, W)
            pictures, blanks = images[image], empty[image]
            both = torch.cat([pictures.where(best, blanks), blanks.where(best, pictures)])
            chances = chance(model, both, classes[image].repeat(2)).double().cpu()
            inserted[here], deleted[here] = chances.chunk(2)
    shares = shown.double() / count
    insertion, deletion = (x.view(len(shown), -1).mean(dim=1) for x in (inserted, deleted))
    return Curves(
        shares=shares.numpy(),
        insertion=insertion.numpy(),
        deletion=deletion.numpy(),
        insertion_area=float(torch.trapezoid(insertion, shares)),
        deletion_area=float(torch.trapezoid(deletion, shares)),
    )


def sanity(model: Model, method: str, images: Tensor, classes: Tensor | None = None) -> float:
    """How alike a method's maps are for this model and for the same with random weights.

    Spearman's rank correlation, mean over images: near 0 for a method that depends on what was
    learned, 1 for one that would draw the same map for any weights.
    """
    classes = predicted(model, images) if classes is None else classes
    make = METHODS[known(method)]
    return agreement(make(model, images, classes), make(fresh(model), images, classes))


def score(
    model: Model,
    images: Tensor,
    classes: Tensor | None = None,
    methods: Sequence[str] = tuple(METHODS),
) -> Trust:
    """Every method put to both tests, for `classes` (B,) or what the model itself says."""
    for method in methods:
        known(method)
    classes = predicted(model, images) if classes is None else classes
    other = fresh(model)
    curves, sane = {}, {}
    for method in methods:
        maps = METHODS[method](model, images, classes)
        curves[method] = insertion_deletion(model, images, maps, classes)
        sane[method] = agreement(maps, METHODS[method](other, images, classes))
    return Trust(curves=curves, sanity=sane, images=len(images))


def checked_task(
    model: Model, images: Tensor, maps: Tensor, classes: Tensor, steps: int, blank: str
) -> Tensor:
    """The classes, if all of it goes together."""
    if blank not in get_args(Blank):
        raise unknown("blank", blank, get_args(Blank))
    if steps < 1:
        raise ConfigError(f"steps={steps} is no way from nothing to everything; take 1 or more")
    if maps.ndim != 3 or len(maps) != len(images) or not len(images):
        raise ConfigError(
            f"maps of shape {tuple(maps.shape)} do not go with {len(images)} pictures; "
            "give (pictures, patches down, patches across), of one picture or more"
        )
    (down, across), (height, width) = maps.shape[1:], images.shape[2:]
    if not down or not across or height % down or width % across:
        raise ConfigError(
            f"maps of {down}x{across} patches do not divide pictures of {height}x{width} pixels"
        )
    if not model.config.num_classes:
        raise ConfigError("a model without a head knows no classes, so no map can be scored")
    return checked(classes, len(images), model.config.num_classes).to(images.device)


def known(method: str) -> str:
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    return method


def as_pixels(patches: Tensor, images: Tensor) -> Tensor:
    """Each patch's value at each of its pixels: (B, h, w) → (B, 1, H, W)."""
    down, across = images.shape[2] // patches.shape[1], images.shape[3] // patches.shape[2]
    return patches.repeat_interleave(down, 1).repeat_interleave(across, 2)[:, None]


def mean_color(images: Tensor) -> Tensor:
    return images.mean(dim=(2, 3), keepdim=True).expand_as(images)


def blurred(images: Tensor) -> Tensor:
    """Every pixel a Gaussian mean of those around it; outside the picture there is nothing."""
    height, width = images.shape[2:]
    return weights_around(height).to(images) @ images @ weights_around(width).to(images).mT


def weights_around(side: int) -> Tensor:
    places = torch.arange(side, dtype=torch.float64)
    weights = torch.exp(-(((places[:, None] - places) / (BLUR * side)) ** 2) / 2)
    return weights / weights.sum(dim=1, keepdim=True)  # (side, side), each row sums to 1


BLANKS = {"mean": mean_color, "blur": blurred}


def chance(model: Model, images: Tensor, classes: Tensor) -> Tensor:
    """The probability of its class for each picture: (B,)."""
    return model(images).softmax(dim=1).gather(1, classes[:, None])[:, 0]


@torch.no_grad()
def predicted(model: Model, images: Tensor) -> Tensor:
    """The likeliest class of each picture: (B,)."""
    with standing_still(model):
        return torch.cat([model(part).argmax(dim=1) for part in images.split(AT_ONCE)])


def fresh(model: Model) -> Model:
    """The same architecture with random weights, always the same ones; its head too is random."""
    weight = next(model.parameters())
    other = build(model.config, device="cpu")
    generator = torch.Generator().manual_seed(0)
    initialize(other, generator=generator)
    for head in (other.head, getattr(other, "distillation_head", None)):
        if head is not None:
            nn.init.normal_(head.weight, std=HEAD_STD, generator=generator)
    return other.eval().to(weight)


def agreement(maps: Tensor, others: Tensor) -> float:
    """Spearman's rank correlation of maps (B, h, w), mean over images; 0 for one without order."""
    found = [
        correlation(ranks(one), ranks(other))
        for one, other in zip(maps.flatten(1), others.flatten(1), strict=True)
    ]
    return sum(found) / len(found)


def ranks(values: Tensor) -> Tensor:
    """How many are smaller, and half of those that are equal: (n,)."""
    above = values[:, None] > values  # (n, n)
    return above.sum(dim=1).double() + (values[:, None] == values).sum(dim=1).double() / 2


def correlation(one: Tensor, other: Tensor) -> float:
    one, other = one - one.mean(), other - other.mean()
    size = one.norm() * other.norm()
    return float(one @ other / size) if size > 0 else 0.0
