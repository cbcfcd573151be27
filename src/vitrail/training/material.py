"""What a run learns from and is judged by: the splits of a data set, looked over."""

from dataclasses import dataclass, field

import numpy as np

from vitrail.data.samples import LabelSets, Samples
from vitrail.data.sources import open_source, splits_of
from vitrail.data.splits import Splits, divide, representative
from vitrail.errors import ConfigError, DataError
from vitrail.formatting import comma_list
from vitrail.training.settings import Settings

# Appendix B.1.1: 10 % of Pets and Flowers, 2 % of CIFAR, 1 % of ImageNet.
DEV = {20_000: 0.1, 100_000: 0.02}  # training images below which this share of them is dev
DEV_OF_MANY = 0.01


@dataclass(frozen=True, kw_only=True)
class Material:
    """Pictures to learn from, and those to be judged by: val, test, or both."""

    reference: str
    train: Samples
    judged: dict[str, Samples]  # split → pictures; the first is looked at during training
    notes: list[str] = field(default_factory=list)


def open_material(reference: str, settings: Settings) -> Material:
    """The splits of a data set; what cannot work is refused, what is odd is noted."""
    splits = None if settings.dev is None else Splits(val=settings.dev, test=0.0)
    counts = splits_of(reference, splits=splits)
    if "train" not in counts:
        raise DataError(
            f"{reference} has no split train; it has: {', '.join(counts) or 'no pictures'}"
        )
    train = open_source(reference, "train", splits=splits)
    judged = {
        name: open_source(reference, name, splits=splits)
        for name in ("val", "test")
        if name in counts
    }
    learning = settings.objective == "classify"
    if learning and len(train.classes) < 2:
        raise DataError(
            f"{reference} has one class, {train.classes[0]!r}; telling apart needs two or more"
            if train.classes
            else f"{reference} has no classes; put the pictures of each class into its own folder"
        )
    if settings.batch_size is not None and settings.batch_size > len(train):
        raise ConfigError(
            f"batch_size={settings.batch_size} is more than the {len(train):,} training pictures; "
            f"try {max(1, len(train) // 4)}"
        )
    notes = list(train.notes)
    if learning:
        notes += missing_classes(reference, train, judged)
    if settings.until_accuracy is not None:
        check_goal(settings, reference, judged)
    if not judged:
        notes.append("nothing to evaluate on; --dev 0.1 keeps a tenth of the pictures apart")
    return Material(reference=reference, train=train, judged=judged, notes=notes)


def hold_out_dev(material: Material, share: float | None = None) -> tuple[Samples, str, Samples]:
    """What to train on while choosing; the name of the split to choose on, and that split.

    A set with val beside test is split already; otherwise a share of each class of train is held
    out, which may be no image at all where classes have one or two.
    """
    train, judged = material.train, material.judged
    for name in ("dev", "val"):
        if name in judged and (name == "dev" or "test" in judged):
            return train, name, judged[name]
    usual = next((part for below, part in DEV.items() if len(train) < below), DEV_OF_MANY)
    names = [train.name(index) for index in range(len(train))]
    kept = divide(names, train.labels(), Splits(val=share or usual, test=0.0)) > 0
    return train.take(np.flatnonzero(~kept)), "dev", train.take(np.flatnonzero(kept))


def subsample(samples: Samples, count: int) -> Samples:
    """At most `count` images, always the same: each class keeps its share, and one at least."""
    labels = samples.numbers()
    count = max(count, len(np.unique(labels)))
    if count >= len(samples):
        return samples
    return samples.take(representative(labels, count, np.random.default_rng(0)))


def check_goal(settings: Settings, reference: str, judged: dict[str, Samples]) -> None:
    """Refuse an accuracy to stop at that nothing can tell, or only pictures that are to judge."""
    wanted = f"until_accuracy={settings.until_accuracy}"
    if settings.objective != "classify":
        raise ConfigError(
            f"{wanted} needs classes, and objective={settings.objective!r} learns none; "
            "leave it out"
        )
    if "val" not in judged:
        test = ", and test is not to choose by" if "test" in judged else ""
        raise ConfigError(
            f"{wanted} needs a split val, which {reference} lacks{test}; "
            "--dev 0.1 keeps a tenth of train apart as val"
        )


def missing_classes(reference: str, train: Samples, judged: dict[str, Samples]) -> list[str]:
    """Classes that some split lacks: refused where nothing can be learned, else noted."""
    notes = []
    learned = present(train)
    for name, samples in judged.items():
        if samples.classes != train.classes:
            raise DataError(
                f"{reference}: the classes of {name} are not those of train; "
                "both need the same class folders"
            )
        asked = present(samples)
        if unknown := [samples.classes[c] for c in np.flatnonzero(asked & ~learned)]:
            lost = comma_list(unknown, quoted=True)
            raise DataError(
                f"{reference}: train has no picture of {lost}, which {name} asks for; add some, or "
                "take the class out"
            )
        if missing := [train.classes[c] for c in np.flatnonzero(learned & ~asked)]:
            notes.append(
                f"{name} has no picture of {comma_list(missing, quoted=True)}, so it will not tell "
                "how well that is learned; add some, or --dev 0.1 evaluates on a tenth of train"
            )
    return notes


def present(samples: Samples) -> np.ndarray:
    """For each class whether there is a picture of it."""
    labels = samples.labels()
    numbers = labels.classes if isinstance(labels, LabelSets) else labels
    return np.bincount(np.asarray(numbers, np.int64), minlength=len(samples.classes)) > 0
