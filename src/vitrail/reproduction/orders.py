"""A run of the paper as a value: a packaged recipe with a few changes, on a data set.

JFT is not public; the folders are where the sets are expected.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vitrail.reproduction.published import JFT_IMAGES
from vitrail.training.config import Settings
from vitrail.training.recipes import grid, read_recipe


class Set(NamedTuple):
    """A data set of the paper: training pictures and classes."""

    folder: str
    images: float
    classes: int


SETS = {
    "JFT": Set("/data/jft", JFT_IMAGES, 18_291),  # the paper says 18k; BiT's paper this number
    "ImageNet-21k": Set("/data/imagenet21k", 14_197_122, 21_843),
    "ImageNet": Set("/data/imagenet", 1_281_167, 1000),
    "CIFAR-10": Set("/data/cifar10", 50_000, 10),
    "CIFAR-100": Set("/data/cifar100", 50_000, 100),
    "Pets": Set("/data/pets", 3680, 37),
    "Flowers-102": Set("/data/flowers", 1020, 102),
}
LARGEST_RATE = 0.06  # of fine-tuning on ImageNet, for ResNets and hybrids only


@dataclass(frozen=True, kw_only=True)
class Order:
    """One run of the paper: a recipe with changes, on a data set."""

    label: str
    recipe: str
    settings: Settings  # the recipe's, changed
    data: str  # the folder
    images: float  # training pictures in it
    classes: int
    start: "Order | None" = None  # whose model is fine-tuned
    note: str = ""

    @property
    def steps(self) -> int:
        assert self.settings.batch_size is not None
        epochs = self.settings.epochs or 0.0
        return self.settings.steps or round(epochs * self.images / self.settings.batch_size)

    @property
    def epochs(self) -> float:
        assert self.settings.batch_size is not None
        return self.settings.epochs or self.steps * self.settings.batch_size / self.images

    @property
    def folder(self) -> str:
        """Where the run goes."""
        return "runs/" + re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")


def order(
    label: str,
    recipe: str,
    data: str = "JFT",
    *,
    part: float | None = None,
    model: Mapping[str, Any] | None = None,
    optim: Mapping[str, Any] | None = None,
    start: Order | None = None,
    note: str = "",
    **changes: Any,
) -> Order:
    """A recipe with some settings changed, on a set or a part of it."""
    settings, where = read_recipe(recipe), SETS[data]
    if "steps" in changes:
        changes["epochs"] = None
    settings = replace(
        settings,
        model=replace(settings.model, **(model or {})),
        optim=replace(settings.optim, **(optim or {})),
        **changes,
    )
    images = where.images if part is None else part
    return Order(
        label=label,
        recipe=recipe,
        settings=settings,
        data=where.folder + (f"-{images / 1e6:.0f}m" if images < where.images else ""),
        images=images,
        classes=where.classes,
        start=start,
        note=note,
    )


def slug(model: str) -> str:
    """`ViT-B/16` as recipes are named: vit-b16."""
    return model.lower().replace("/", "").replace("+", "-")


def on_jft(model: str, epochs: int | None = None) -> Order:
    """A row of table 6."""
    if model == "BiT-R200x3":
        note = "table 3 has no row for it: the learning rate of BiT-R152x2"
        name, changes = f"{model} on JFT, 14 epochs", {"name": model}
        return order(name, "paper-jft-bit-r152x2", model=changes, epochs=14.0, note=note)
    recipe = f"paper-jft-{slug(model)}"
    epochs = epochs or int(read_recipe(recipe).epochs or 0)
    return order(f"{model} on JFT, {epochs} epochs", recipe, epochs=float(epochs))


def finetuned(before: Order, data: str = "ImageNet", size: int | None = None) -> Order:
    """A model fitted to another set, at 384 pixels unless another size is given."""
    at_512 = size in (512, 518)
    recipe = f"paper-finetune-{data.lower().removesuffix('-102').replace('-', '')}"
    recipe += "-512" if at_512 else ""
    pure = before.label.startswith("ViT")  # appendix B.1.1: the others may take larger steps
    rates = ", ".join(f"{rate:g}" for rate in grid(recipe) if rate < LARGEST_RATE or not pure)
    label = f"{before.label}, then {data}{f' at {size}' if at_512 else ''}"
    changes = {"image_size": size} if size not in (None, 512) else {}
    note = f"the paper chose the learning rate among {rates}; then --dev 0"
    return order(label, recipe, data, model=changes, start=before, note=note)


def on_imagenet(before: Order) -> Order:
    """Fine-tuned at 384 pixels; ViT-H/14 at the nearest size that its patches divide."""
    return finetuned(before, size=392 if "H/14" in before.label else None)
