"""What all steps of the ladder stand on: the model to begin with, pictures to learn from, and dev,
the pictures to choose by."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitrail.data.samples import Samples
from vitrail.data.splits import Splits, divide
from vitrail.errors import DataError
from vitrail.training.budget import ENDING
from vitrail.training.choices import FEW, MANY, look_at
from vitrail.training.learner import Learner, build_learner
from vitrail.training.material import Material, open_material
from vitrail.training.setup import Order
from vitrail.training.watch import Watch

# Appendix B.1.1: 10 % of Pets and Flowers, 2 % of CIFAR, 1 % of ImageNet.
DEV = {FEW: 0.1, MANY: 0.02}  # training pictures below which this share of them is dev
DEV_OF_MANY = 0.01
TRIALS = "trials"  # in the ladder's folder, while it is climbed


@dataclass(kw_only=True)
class Clock:
    """The time there is: until `deadline`, or as much as it takes (infinity)."""

    deadline: float
    shortest: float  # seconds of a run that takes one step, as far as is known

    def left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all steps stand on."""

    order: Order
    material: Material  # the whole training set, and what the result is judged by
    learner: Learner
    part: Samples  # what trials learn from
    dev: Samples
    clock: Clock
    watch: Watch

    @property
    def cut(self) -> bool:
        """Whether dev is a part of the training set."""
        return self.part is not self.material.train

    def folder(self, name: str, rate: float) -> Path:
        return self.order.out / TRIALS / f"{slug(name)}-{rate:g}"


def slug(name: str) -> str:
    return name.replace(" ", "-")


def prepare(order: Order, watch: Watch, device: torch.device, begun: float) -> Ground:
    """Open the data, load the model, and keep dev apart."""
    since = time.monotonic()
    material = open_material(order.data, order.settings)
    if material.train.multi_label:
        raise DataError(
            f"the pictures of {order.data} have several labels each, and the ladder's probes take "
            "one for each; fine-tune without --ladder"
        )
    for note in material.notes:
        watch.say(f"note: {note}")
    part, dev = apart(material)
    look, settings = look_at(material.train), order.settings
    learner = build_learner(settings, material.train, look, order.start, device, watch.say)
    minutes = settings.minutes
    whence = "val" if part is material.train else "cut out of train"
    watch.say(f"{len(part):,} pictures to learn from, {len(dev):,} to choose by: {whence}")
    clock = Clock(
        deadline=math.inf if minutes is None else begun + 60 * minutes,
        shortest=ENDING + time.monotonic() - since,  # a run does the same before its first step
    )
    return Ground(
        order=order,
        material=material,
        learner=learner,
        part=part,
        dev=dev,
        clock=clock,
        watch=watch,
    )


def apart(material: Material) -> tuple[Samples, Samples]:
    """What to learn from while choosing, and what to choose by.

    A set that has val beside test is divided already; otherwise some of each class is kept apart.
    """
    train, judged = material.train, material.judged
    if "val" in judged and "test" in judged:
        return train, judged["val"]
    share = next((part for below, part in DEV.items() if len(train) < below), DEV_OF_MANY)
    names = [train.name(index) for index in range(len(train))]
    kept = divide(names, train.labels(), Splits(val=share, test=0.0)) > 0
    if not kept.any():
        raise DataError(
            f"{material.reference} has {len(train)} training pictures, too few to keep some apart "
            "to choose by; the ladder needs three of a class, or pictures in val and in test"
        )
    rows = np.arange(len(train)) if train.rows is None else train.rows
    return Samples(train.collection, rows[~kept]), Samples(train.collection, rows[kept])
