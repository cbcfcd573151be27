"""Is the explanation true? Maps put to the test on the model that they explain.

Insertion and deletion (Petsiuk et al. 2018, arXiv:1806.07421): what a map calls important must
make the class likely when it is shown, and unlikely when it is hidden. And the sanity check of
Adebayo et al. 2018 (arXiv:1810.03292): a map that stays the same when the weights are replaced by
random ones does not explain the weights.

Shapes: B images, C channels, H x W pixels, h x w patches, K classes, s steps.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vitrail.checkpoints.metadata import get_metadata
from vitrail.errors import ConfigError, unknown
from vitrail.inspection.findings import Curves, Trust
from vitrail.inspection.layers import at_once, lag
from vitrail.inspection.relevance import METHODS, checked
from vitrail.models.init import initialize
from vitrail.models.vit import Model, build, eval_mode

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
    progress: Callable[[int], None] | None = None,
) -> Curves:
    """How the probability of `classes` (B,) moves as pixels come and go, mean over images.

    As Petsiuk et al. have it: pixels are taken in the order of `maps` (B, h, w), enlarged to the
    picture, largest first, equal ones in raster order. Insertion begins with the picture blurred
    and makes them sharp, because pixels on a plain ground would show the edges of what is shown;
    deletion begins with the picture and gives them its mean color. `progress` hears how many
    pictures are done.
    """
    classes = checked_task(model, images, maps, classes, steps)
    height, width = images.shape[2:]
    shown = torch.linspace(0, height * width, steps + 1, dtype=torch.float64).round().long()
    found = images.new_zeros(2, steps + 1, dtype=torch.float64, device="cpu")
    with eval_mode(model):
        for done, (image, values, asked) in enumerate(zip(images, maps, classes, strict=True), 1):
            turns = order(enlarged(values, (height, width), lag(model)))
            found += fading(model, image, turns, asked, shown.to(images.device))
            if progress is not None:
                progress(done)
    insertion, deletion = found / len(images)
    shares = shown.double() / (height * width)
    return Curves(
        shares=shares.numpy(),
        insertion=insertion.numpy(),
        deletion=deletion.numpy(),
        insertion_area=float(torch.trapezoid(insertion, shares)),
        deletion_area=float(torch.trapezoid(deletion, shares)),
    )


def enlarged(values: Tensor, size: tuple[int, int], lag: float) -> Tensor:
    """A map (h, w) at every pixel (H, W): linear between the middles of what tokens see."""
    down, across = (
        between(side, count, lag).to(values) for side, count in zip(size, values.shape, strict=True)
    )
    return down @ values @ across.mT


def between(side: int, count: int, lag: float) -> Tensor:
    """How much each pixel of a line has of each token: (side, count), rows that sum to 1."""
    places = (torch.arange(side) + 0.5) * count / side - 0.5 + lag  # in tokens
    apart = places.clamp(0, count - 1)[:, None] - torch.arange(count)
    return (1 - apart.abs()).clamp_min(0)


def order(values: Tensor) -> Tensor:
    """When the turn of each pixel (H, W) is, counted from 0."""
    best_first = values.flatten().argsort(descending=True, stable=True)
    return best_first.argsort().view_as(values)


def fading(model: Model, image: Tensor, turns: Tensor, asked: Tensor, shown: Tensor) -> Tensor:
    """The probability of a class as pixels of a picture (C, H, W) come and as they go: (2, s)."""
    blurry, plain = blurred(image), image.mean(dim=(1, 2), keepdim=True)
    together = max(1, at_once(model, (image.shape[1], image.shape[2])) // 2)
    parts = []
    for counts in shown.split(together):
        best = (turns < counts[:, None, None])[:, None]  # (s, 1, H, W)
        both = torch.cat([image.where(best, blurry), plain.where(best, image)])
        sure = get_metadata(model).probabilities(model(both))[:, asked]
        parts.append(sure.double().cpu().unflatten(0, (2, -1)))
    return torch.cat(parts, dim=1)


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
    progress: Callable[[str, int, int], None] | None = None,
) -> Trust:
    """Every method put to both tests, for `classes` (B,) or what the model itself says.

    `progress` hears what is being tested, how many pictures are done, and of how many.
    """
    tell = progress or (lambda what, done, total: None)
    for method in methods:
        known(method)
    classes = predicted(model, images) if classes is None else classes
    other = fresh(model)
    curves, sane = {}, {}
    for method in methods:
        tell(f"testing {method}", 0, len(images))
        maps = METHODS[method](model, images, classes)
        curves[method] = insertion_deletion(
            model,
            images,
            maps,
            classes,
            progress=lambda done, what=f"testing {method}": tell(what, done, len(images)),
        )
        sane[method] = agreement(maps, METHODS[method](other, images, classes))
    return Trust(curves=curves, sanity=sane, images=len(images))


def checked_task(model: Model, images: Tensor, maps: Tensor, classes: Tensor, steps: int) -> Tensor:
    """The classes, if all of it goes together."""
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


def blurred(image: Tensor) -> Tensor:
    """Every pixel a Gaussian mean of those around it; outside the picture there is nothing."""
    height, width = image.shape[-2:]
    return weights_around(height).to(image) @ image @ weights_around(width).to(image).mT


def weights_around(side: int) -> Tensor:
    places = torch.arange(side, dtype=torch.float64)
    weights = torch.exp(-(((places[:, None] - places) / (BLUR * side)) ** 2) / 2)
    return weights / weights.sum(dim=1, keepdim=True)  # (side, side), each row sums to 1


@torch.no_grad()
def predicted(model: Model, images: Tensor) -> Tensor:
    """The likeliest class of each picture: (B,)."""
    with eval_mode(model):
        parts = images.split(at_once(model, (images.shape[2], images.shape[3])))
        return torch.cat([model(part).argmax(dim=1) for part in parts])


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
