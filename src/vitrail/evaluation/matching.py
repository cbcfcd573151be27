"""Whether a model and a data set speak of the same classes, and which is which.

Names decide. A set that shows some of a model's classes is fine; a class that the model has never
heard of is not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitrail.data.samples import LabelSets, Sample, Source
from vitrail.errors import ConfigError
from vitrail.formatting import comma_list


class Relabeled:
    """A source whose classes have the numbers that a model gives them."""

    def __init__(self, source: Source, classes: Sequence[str], numbers: Sequence[int]) -> None:
        self.source = source
        self.classes = tuple(classes)
        self.numbers = np.asarray(numbers, np.int64)  # of each class of the source
        self.multi_label = source.multi_label
        self.in_memory = getattr(source, "in_memory", False)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Sample:
        sample = self.source[index]
        if isinstance(sample.label, tuple):
            return sample._replace(label=tuple(self.numbers[list(sample.label)].tolist()))
        return sample._replace(label=int(self.numbers[sample.label]))

    def name(self, index: int, /) -> str:
        return self.source.name(index)

    def labels(self) -> np.ndarray | LabelSets:
        found = self.source.labels()
        if isinstance(found, LabelSets):
            return LabelSets(self.numbers[found.classes], found.ends)
        return self.numbers[found]


class Match(NamedTuple):
    """A source in the model's terms, or the model's columns in those of the source."""

    source: Source
    columns: list[int] | None  # of the logits, those to keep in this order; None: all
    notes: list[str]


def match(
    names: Sequence[str],
    outputs: int,
    source: Source,
    *,
    restrict: bool = False,
    by_order: bool = False,
) -> Match:
    """Bring the classes of a model (its names, if it has any) and of a source together.

    With `restrict` the model may choose among the classes of the source only, as is usual for
    ImageNet-A and ImageNet-R; else all its classes compete. `by_order` is for classes that go by
    other names and are the same: the first is the first, and so on.
    """
    classes = source.classes
    if not outputs:
        raise ConfigError(
            "the model has no head and names no classes; `vitrail fewshot` or `vitrail finetune` "
            "gives it one"
        )
    places = {name: place for place, name in enumerate(names)}
    known = [name for name in classes if name in places]
    if by_order or not names:
        return by_number(outputs, source, named=bool(names))
    own = comma_list(names, quoted=True)
    if not known:
        raise ConfigError(
            f"the model tells {own} apart and the data {comma_list(classes, quoted=True)}; if "
            "these are the same classes in the same order, say --by-order (in Python by_order=True)"
        )
    if len(known) < len(classes):
        lacking = [name for name in classes if name not in places]
        raise ConfigError(
            f"the model does not know {comma_list(lacking, quoted=True)}; it knows {own}"
        )
    numbers = [places[name] for name in classes]
    if tuple(names) == tuple(classes):
        return Match(source, None, [])
    if restrict or len(classes) == outputs:
        left = outputs - len(classes)
        notes = [f"{left:,} classes of the model are left out of the choice"] if left else []
        return Match(source, numbers, notes)
    note = f"the pictures show {len(classes):,} of the model's {outputs:,} classes"
    return Match(Relabeled(source, names, numbers), None, [note])


def by_number(outputs: int, source: Source, *, named: bool) -> Match:
    """The first class of one is the first of the other, if they have equally many."""
    if outputs != len(source.classes):
        raise ConfigError(
            f"the model tells {outputs:,} classes apart and the data has {len(source.classes):,}: "
            f"{comma_list(source.classes, quoted=True)}; it must be a data set of the same classes"
        )
    why = "calls its classes otherwise" if named else "does not say what its classes are called"
    return Match(source, None, [f"the model {why}: they are matched by their order"])
