"""What all steps of the ladder stand on: the model to begin with, pictures to learn from, and dev,
the pictures to choose by; and the time there is, with what a look at the pictures takes of it."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loader import usual_workers
from vitrail.data.samples import Samples
from vitrail.errors import DataError
from vitrail.evaluation.passes import look_at_all
from vitrail.formatting import duration
from vitrail.training.budget import ENDING
from vitrail.training.choices import look_at
from vitrail.training.device import synchronize
from vitrail.training.learner import Learner, build_learner
from vitrail.training.material import Material, hold_out_dev, open_material, subsample
from vitrail.training.setup import Order
from vitrail.training.watch import Watch

TRIALS = "trials"  # in the ladder's folder, while it is climbed
WARM_UP, TIMED = 4, 32  # pictures that tell how long a look at one takes
PROBING = 1 / 4  # share of the time that computing features may take
JUDGING = 1 / 2  # share that judging the result may take; if it takes more, it comes on top


@dataclass(kw_only=True)
class Clock:
    """The time there is: until `deadline`, or as much as it takes (infinity)."""

    deadline: float
    shortest: float  # seconds of a run that takes one step, as far as is known
    judging: float = 0.0  # seconds that judging the result takes, if there is a deadline

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def free(self) -> float:
        """What is left before the result has to be judged."""
        return self.left() - self.judging


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all steps stand on."""

    order: Order
    material: Material  # the whole training set, and what the result is judged by
    learner: Learner
    part: Samples  # what trials learn from
    shown: Samples  # what probes learn from: all of that, or what there is time for
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


def prepare(
    order: Order, watch: Watch, device: torch.device, begun: float, share: float | None
) -> Ground:
    """Open the data, load the model, and keep dev apart: `share` of train, or the usual one."""
    since = time.monotonic()
    material = open_material(order.data, order.settings)
    if material.train.multi_label:
        raise DataError(
            f"the pictures of {order.data} have several labels each, and the ladder's probes take "
            "one for each; fine-tune without --ladder"
        )
    others = (note for samples in material.judged.values() for note in samples.notes)
    for note in dict.fromkeys((*material.notes, *others)):
        watch.say(f"note: {note}")
    part, dev = apart(material, share)
    look, settings = look_at(material.train), order.settings
    learner = build_learner(settings, material, look, order.start, device, watch.say)
    minutes = settings.minutes
    whence = "val" if part is material.train else "cut out of train"
    watch.say(f"{len(part):,} pictures to learn from, {len(dev):,} to choose by: {whence}")
    clock = Clock(
        deadline=math.inf if minutes is None else begun + 60 * minutes,
        shortest=ENDING + time.monotonic() - since,  # a run does the same before its first step
    )
    ground = Ground(
        order=order,
        material=material,
        learner=learner,
        part=part,
        shown=part,
        dev=dev,
        clock=clock,
        watch=watch,
    )
    return ground if minutes is None else affordable(ground, device)


def apart(material: Material, share: float | None = None) -> tuple[Samples, Samples]:
    """What to learn from while choosing, and what to choose by.

    A set that has val beside test is divided already; otherwise some of each class is kept apart.
    """
    part, _, dev = hold_out_dev(material, share)
    if not len(dev):
        raise DataError(
            f"{material.reference} has {len(part)} training pictures, too few to keep some apart "
            "to choose by; the ladder needs three of a class, or pictures in val and in test"
        )
    return part, dev


def affordable(ground: Ground, device: torch.device) -> Ground:
    """The ground with no more pictures for the probes, and to choose by, than there is time for."""
    clock, say = ground.clock, ground.watch.say
    judged, each = sum(map(len, ground.material.judged.values())), seconds_each(ground, device)
    clock.judging = each * judged
    if clock.judging > JUDGING * clock.left():
        takes = f"judging the result by {judged:,} pictures takes about {duration(clock.judging)}"
        say(f"note: {takes}, which comes on top of the time that was given")
        clock.deadline += clock.judging
    room = int(PROBING * max(0.0, clock.free()) / each)
    dev = subsample(ground.dev, room // 2)
    shown = subsample(ground.part, room - len(dev))
    clock.shortest += each * len(dev)  # each run is judged by them
    for what, few, many in (("the probes see", shown, ground.part), ("dev is", dev, ground.dev)):
        if len(few) < len(many):
            say(f"{what} {len(few):,} of {len(many):,} pictures: there is no time for more")
    return replace(ground, shown=shown, dev=dev)


def seconds_each(ground: Ground, device: torch.device) -> float:
    """How long a look at one picture takes, from some of dev."""
    dev, learner = ground.dev, ground.learner
    model, workers = learner.model.to(device).eval(), learner.settings.machine.workers

    def seconds(count: int) -> tuple[float, float]:
        """To read each of so many pictures, and to make features of it."""
        making = 0.0

        def features(images: Tensor) -> Tensor:
            nonlocal making
            begun = time.monotonic()
            found = model.features(images)
            synchronize(device)
            making += time.monotonic() - begun
            return found

        begun = time.monotonic()
        look_at_all(
            features,
            dev.take(np.linspace(0, len(dev) - 1, count, dtype=int)),
            learner.preprocessing,
            lambda found, batch: None,
            channels=model.config.channels,
            batch_size=count,
            workers=0,  # other processes take longer to start than to read so few
            device=device,
        )
        return (time.monotonic() - begun - making) / count, making / count

    seconds(min(WARM_UP, len(dev)))
    reading, making = seconds(min(TIMED, len(dev)))
    workers = usual_workers(dev) if workers is None else workers
    return max(1e-6, reading / max(1, workers) + making)  # a coarse clock may see none pass
