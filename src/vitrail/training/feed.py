"""The micro-batches of any step: the loader, begun anew where the image size changes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vitrail import distributed
from vitrail.data.loader import Batch, Loader
from vitrail.data.mixing import mixup_big_vision, mixup_or_cutmix
from vitrail.data.order import TrainingOrder
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.samples import Source
from vitrail.data.transforms import TrainTransform, normalize
from vitrail.data.variation import Augmentation, Mixing
from vitrail.training.plan import Plan


@dataclass
class Feed:
    """Call it with a step for that step's micro-batches. Steps in a row come from one loader."""

    source: Source
    preprocessing: Preprocessing
    augmentation: Augmentation
    channels: int
    plan: Plan
    skipped: dict[str, str] = field(default_factory=dict)
    expected: tuple[int, int] = (-1, 0)  # the step and size the running loader is at
    running: Iterator[Batch] = field(default_factory=lambda: iter(()))

    def __call__(self, step: int) -> Iterator[Batch]:
        size = self.plan.size(step)
        if self.expected != (step, size):
            self.running = iter(self.loader(step, size))
        self.expected = (step + 1, size)
        return self.running

    def loader(self, step: int, size: int) -> Loader:
        settings, accumulate = self.plan.settings, self.plan.accumulate
        assert settings.batch_size is not None
        order = TrainingOrder(
            samples=len(self.source),
            batch_size=settings.batch_size // accumulate,
            seed=settings.seed,
            start_step=step * accumulate,
            repeats=settings.repeats,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        transform = TrainTransform(
            preprocessing=at_size(self.preprocessing, size),
            augmentation=self.augmentation,
            channels=self.channels,
        )
        return Loader(
            self.source,
            transform,
            order,
            seed=settings.seed,
            workers=settings.machine.workers,
            strict=settings.strict,
            skipped=self.skipped,
        )


def at_size(preprocessing: Preprocessing, size: int | None) -> Preprocessing:
    """The same preparation for pictures of another height; their shape stays."""
    height, width = preprocessing.size
    if size is None or size == height:
        return preprocessing
    cut = preprocessing.resize_to
    if cut is not None:
        cut = (cut[0] * size // height, cut[1] * size // height)
    return replace(preprocessing, size=(size, width * size // height), resize_to=cut)


def preparation(
    preprocessing: Preprocessing,
    mixing: Mixing,
    classes: int,
    device: torch.device,
    *,
    epoch: float,
) -> Callable[[Batch, np.random.Generator, int], tuple[Tensor, Tensor]]:
    """Bytes → normalized and mixed floats on the device, and targets that fit them.

    Mixing begins after some epochs, each of so many steps.
    """
    first_mixed = mixing.after * epoch

    def prepare(batch: Batch, rng: np.random.Generator, step: int) -> tuple[Tensor, Tensor]:
        images = normalize(batch.images.to(device, non_blocking=True), preprocessing)
        labels = batch.labels.to(device, non_blocking=True)
        if not (mixing.mixup or mixing.cutmix) or step < first_mixed:
            return images, labels
        if mixing.style == "big_vision":
            if rng.random() >= mixing.chance:
                return images, labels
            return mixup_big_vision(images, labels, classes=classes, alpha=mixing.mixup, rng=rng)
        return mixup_or_cutmix(
            images,
            labels,
            classes=classes,
            mixup_alpha=mixing.mixup,
            cutmix_alpha=mixing.cutmix,
            chance=mixing.chance,
            rng=rng,
        )

    return prepare
