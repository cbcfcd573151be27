"""What is wrong with a data set, before a model is trained on it.

    health = examine("photos/")
    health.leaks          the same picture in two splits
    health.verdict        sentences that say what to do

Every picture is read and decoded once. What is found is a value; printing and drawing are
elsewhere (`cli/check.py`, `sheet.py`), and so are the sentences (`verdict.py`).
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.duplicates import blank, equal_groups, near_pairs
from vitrail.data.looks import LOOK, look
from vitrail.data.samples import LabelSets, Samples
from vitrail.data.sources import open_source, splits_of
from vitrail.data.verdict import verdict
from vitrail.errors import DataError

SMALL_SHARE = 1 / 3  # of the median short side, below which a picture is much smaller
WORKERS = 4  # threads: decoding and resizing let go of the interpreter
BATCH = 256  # pictures that are under way at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One picture of a data set."""

    name: str
    split: str
    labels: tuple[str, ...]
    index: int  # in its split


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """A file that gives no pixels."""

    name: str
    split: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Twins:
    """Pictures that are the same, or two that look the same."""

    members: tuple[Member, ...]
    exact: bool  # the same bytes
    bits: int  # of 64 that differ between the difference hashes

    @property
    def leak(self) -> bool:
        return len({member.split for member in self.members}) > 1

    @property
    def conflict(self) -> bool:
        return len({member.labels for member in self.members}) > 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"leak": self.leak, "conflict": self.conflict}


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Of a side, in pixels."""

    least: int
    median: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Health:
    """What a data set holds, and what is odd about it."""

    reference: str
    splits: dict[str, int]  # pictures in each
    counts: dict[str, dict[str, int]]  # class: split: pictures
    notes: tuple[str, ...]  # what was noticed when the set was opened
    examined: int  # pictures that were read: all, unless there was a limit
    height: Range | None  # None: not a single picture could be read
    width: Range | None
    kinds: dict[str, int]  # format and mode: pictures
    unreadable: tuple[Unreadable, ...]
    duplicates: tuple[Twins, ...]  # the same bytes
    near_duplicates: tuple[Twins, ...]
    small: tuple[Member, ...]  # much smaller than the rest
    gray: tuple[Member, ...]  # if most are in color
    blank: tuple[Member, ...]  # of a single color, or nearly

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @property
    def pictures(self) -> int:
        return sum(self.splits.values())

    @property
    def leaks(self) -> tuple[Twins, ...]:
        """The same picture in more than one split; the surest first."""
        return tuple(twins for twins in self.duplicates + self.near_duplicates if twins.leak)

    @property
    def conflicts(self) -> tuple[Twins, ...]:
        """The same picture with more than one label."""
        return tuple(twins for twins in self.duplicates + self.near_duplicates if twins.conflict)

    @cached_property
    def verdict(self) -> tuple[str, ...]:
        """What to do, the most urgent first."""
        return tuple(verdict(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        facts = {name: getattr(self, name) for name in ("reference", "pictures", "examined")}
        facts |= {"verdict": list(self.verdict), "splits": self.splits, "counts": self.counts}
        facts |= {"notes": list(self.notes), "kinds": self.kinds}
        for name in ("height", "width"):
            side = getattr(self, name)
            facts[name] = None if side is None else asdict(side)
        for name in ("unreadable", "small", "gray", "blank"):
            facts[name] = [asdict(found) for found in getattr(self, name)]
        for name in ("leaks", "conflicts", "duplicates", "near_duplicates"):
            facts[name] = [twins.to_dict() for twins in getattr(self, name)]
        return facts


def examine(
    reference: str | os.PathLike[str],
    *,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Health:
    """Read every picture of every split, or `limit` of them, evenly spaced.

    `progress` is told how many pictures are done, and of how many.
    """
    parts = {split: open_source(reference, split) for split in splits_of(reference)}
    classes = tuple(dict.fromkeys(chain.from_iterable(p.classes for p in parts.values())))
    places = places_to_look(parts, limit)
    looks = np.zeros(len(places), LOOK)
    kinds: Counter[str] = Counter()
    unreadable = []
    for row, (place, seen) in enumerate(looked_at(parts, places)):
        if isinstance(seen, str):
            name = parts[place.split].name(place.row)
            unreadable.append(Unreadable(name=name, split=place.split, reason=seen))
        else:
            looks[row], kind = seen
            kinds[kind] += 1
        if progress is not None:
            progress(row + 1, len(places))
    whole = np.flatnonzero(looks["whole"])
    return summary(
        Found(looks[whole], [places[row] for row in whole], parts, labels_of(parts)),
        reference=os.fspath(reference),
        counts=counts_of(parts, classes),
        examined=len(places),
        kinds=dict(kinds.most_common()),
        unreadable=tuple(unreadable),
    )


class Row(NamedTuple):
    """Where a picture is."""

    split: str
    row: int


def places_to_look(parts: dict[str, Samples], limit: int | None) -> list[Row]:
    places = [Row(split, row) for split, part in parts.items() for row in range(len(part))]
    if limit is None or limit >= len(places):
        return places
    return [places[int(row)] for row in np.linspace(0, len(places) - 1, max(limit, 1))]


def counts_of(parts: dict[str, Samples], classes: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Pictures by class and split; those of several classes count for each."""
    counts = {name: dict.fromkeys(parts, 0) for name in classes}
    for split, labels in labels_of(parts).items():
        numbers = labels.classes if isinstance(labels, LabelSets) else labels
        for number, count in enumerate(np.bincount(numbers).tolist()):
            counts[parts[split].classes[number]][split] += count
    return counts


def labels_of(parts: dict[str, Samples]) -> dict[str, np.ndarray | LabelSets]:
    return {split: part.labels() for split, part in parts.items()}


Seen = tuple[tuple[Any, ...], str] | str  # a row of LOOK and the kind of picture; or why not


def looked_at(parts: dict[str, Samples], places: list[Row]) -> Iterator[tuple[Row, Seen]]:
    """Each place and what is there, in order; never more than a batch ahead."""
    with ThreadPoolExecutor(WORKERS) as pool:
        for start in range(0, len(places), BATCH):
            batch = places[start : start + BATCH]
            seen = pool.map(lambda place: look_at(parts[place.split], place.row), batch)
            yield from zip(batch, seen, strict=True)


def look_at(part: Samples, row: int) -> Seen:
    try:
        return look(part[row].data)
    except DataError as error:
        return str(error)


class Found(NamedTuple):
    """The pictures that could be read."""

    looks: np.ndarray  # (n,) of LOOK
    places: list[Row]
    parts: dict[str, Samples]
    labels: dict[str, np.ndarray | LabelSets]

    def member(self, row: int) -> Member:
        split, index = self.places[row]
        part = self.parts[split]
        label = self.labels[split][index]
        labels = label if isinstance(label, tuple) else (int(label),)
        names = tuple(part.classes[number] for number in labels)
        return Member(name=part.name(index), split=split, labels=names, index=index)

    def members(self, mask: np.ndarray) -> tuple[Member, ...]:
        return tuple(self.member(int(row)) for row in np.flatnonzero(mask))


def summary(found: Found, **facts: Any) -> Health:
    """What all looks together tell."""
    looks = found.looks
    short = np.minimum(looks["height"], looks["width"])
    gray = looks["gray"]
    mostly_color = 2 * np.count_nonzero(gray) < len(gray)
    return Health(
        **facts,
        splits={split: len(part) for split, part in found.parts.items()},
        notes=tuple(dict.fromkeys(chain.from_iterable(p.notes for p in found.parts.values()))),
        height=range_of(looks["height"]),
        width=range_of(looks["width"]),
        duplicates=tuple(equal_pictures(found)),
        near_duplicates=tuple(like_pictures(found)),
        small=found.members(short < SMALL_SHARE * np.median(short)) if len(looks) else (),
        gray=found.members(gray) if mostly_color else (),
        blank=found.members(blank(looks["thumbnail"])),
    )


def range_of(sides: np.ndarray) -> Range | None:
    if not len(sides):
        return None
    return Range(least=int(sides.min()), median=int(np.median(sides)), most=int(sides.max()))


def equal_pictures(found: Found) -> Iterator[Twins]:
    for group in equal_groups(found.looks["digest"]):
        yield Twins(members=tuple(found.member(int(row)) for row in group), exact=True, bits=0)


def like_pictures(found: Found) -> Iterator[Twins]:
    """Pairs of near duplicates; of equal pictures, the first stands for all."""
    _, first = np.unique(found.looks["digest"], axis=0, return_index=True)
    first = np.sort(first)
    looks = found.looks[first]
    for left, right, bits in near_pairs(looks["hash"], looks["thumbnail"]):
        members = (found.member(int(first[left])), found.member(int(first[right])))
        yield Twins(members=members, exact=False, bits=bits)
