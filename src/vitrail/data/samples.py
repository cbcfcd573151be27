"""What a data set is: samples by number, each a picture and the classes it shows.

A `Collection` is everything a set holds, in arrays, so that a million samples cost some tens of
megabytes; `Samples` is the part of it that a split has, as a `Source`. Where the pictures lie is
the business of a `Store`: a folder, shards, arrays.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vitrail.errors import DataError
from vitrail.formatting import comma_list

if TYPE_CHECKING:
    from vitrail.data.splits import Splits

Label = int | tuple[int, ...]

PICTURES = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".webp", ".avif"))
PICTURES |= {".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}


class Sample(NamedTuple):
    """One picture and what it shows."""

    data: bytes | np.ndarray  # an encoded picture, or pixels uint8 (H, W) or (H, W, C)
    label: Label  # one class, or all classes that apply
    name: str  # what a person calls it: a path in the folder, a member of a shard, a row


class Source(Protocol):
    """A data set, or one split of it. It can be sent to other processes."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def multi_label(self) -> bool: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample:
        """Read one sample; a `DataError` if it cannot be read."""
        ...

    def name(self, index: int, /) -> str:
        """What a person calls the sample, without reading it."""
        ...

    def labels(self) -> "np.ndarray | LabelSets":
        """All labels, without reading a picture: an array, or tuples where several may apply."""
        ...


class Store(Protocol):
    """Where the pictures of a collection are."""

    @property
    def in_memory(self) -> bool:
        """Whether a picture is at hand as pixels, so that other processes would only cost."""
        ...

    def read(self, row: int) -> bytes | np.ndarray: ...

    def sizes(self, rows: np.ndarray) -> np.ndarray | None:
        """Bytes of each picture, without reading any; None where that cannot be known."""
        ...


class Names(Protocol):
    """What a person calls each sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...

    def __iter__(self) -> Iterator[str]: ...


class Texts:
    """Many short texts in two arrays: as a list, a million of them would take ten times more."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.bytes = bytearray()
        self.ends = array("q")
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        self.bytes += text.encode("utf-8", "surrogateescape")  # file names may be any bytes
        self.ends.append(len(self.bytes))

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> str:
        start = self.ends[index - 1] if index else 0
        return self.bytes[start : self.ends[index]].decode("utf-8", "surrogateescape")


class Rows:
    """Names for pictures that have none: `train/0`, `train/1`, …, `test/0`, …"""

    def __init__(self, parts: Sequence[tuple[str, int]]) -> None:
        self.parts = tuple(parts)
        self.starts = np.cumsum([0, *(length for _, length in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> str:
        part, row = self.place(index)
        return f"{self.parts[part][0]}/{row}"

    def place(self, index: int) -> tuple[int, int]:
        """Which part, and which row of it."""
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return part, int(index - self.starts[part])


class LabelSets:
    """For each sample the classes that apply, in two arrays."""

    def __init__(self, classes: np.ndarray, ends: np.ndarray) -> None:
        self.classes = classes  # (all labels of all samples,)
        self.ends = ends  # (n,) where the labels of each sample end

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> tuple[int, ...]:
        index = index + len(self) if index < 0 else index
        start = self.ends[index - 1] if index else 0
        return tuple(self.classes[start : self.ends[index]].tolist())

    def take(self, rows: np.ndarray) -> "LabelSets":
        """The label sets of some samples."""
        starts = np.concatenate([[0], self.ends[:-1]])[rows] if len(self) else rows
        counts = self.ends[rows] - starts
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return LabelSets(self.classes[np.repeat(starts, counts) + inside], ends)


@dataclass(frozen=True, kw_only=True)
class Collection:
    """All samples of a data set, whichever split they belong to."""

    names: Names
    labels: np.ndarray | LabelSets
    classes: tuple[str, ...]
    store: Store
    split_names: tuple[str, ...] = ()  # the splits that the set itself states
    split: np.ndarray | None = None  # (n,) which of those each sample belongs to
    notes: tuple[str, ...] = ()  # what was left out, and what looks odd


class Samples:
    """Some samples of a collection, in its order."""

    def __init__(
        self,
        collection: Collection,
        rows: np.ndarray | None = None,
        notes: Iterable[str] = (),
        splits: "Splits | None" = None,
    ) -> None:
        self.collection = collection
        self.rows = rows  # None: all
        self.splits = splits  # how the set was divided, where it does not say so itself
        self.classes = collection.classes
        self.multi_label = isinstance(collection.labels, LabelSets)
        self.in_memory = collection.store.in_memory
        self.notes = (*collection.notes, *notes)

    def __len__(self) -> int:
        return len(self.collection.names) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int, /) -> Sample:
        row = self.row(index)
        found = self.collection.labels[row]
        label = found if isinstance(found, tuple) else int(found)
        return Sample(self.collection.store.read(row), label, self.collection.names[row])

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def name(self, index: int, /) -> str:
        return self.collection.names[self.row(index)]

    def labels(self) -> np.ndarray | LabelSets:
        found = self.collection.labels
        if self.rows is None:
            return found
        return found.take(self.rows) if isinstance(found, LabelSets) else found[self.rows]

    def numbers(self) -> np.ndarray:
        """The class of each sample, of a set where one applies: int64 (n,)."""
        found = self.labels()
        assert not isinstance(found, LabelSets)
        return np.asarray(found, np.int64)

    def take(self, places: np.ndarray) -> "Samples":
        """The samples at these places."""
        rows = places if self.rows is None else self.rows[places]
        return Samples(self.collection, rows, splits=self.splits)

    def sizes(self) -> np.ndarray | None:
        """Bytes of each picture, without reading any; None where that cannot be known."""
        rows = np.arange(len(self)) if self.rows is None else self.rows
        return self.collection.store.sizes(rows)

    def row(self, index: int) -> int:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of {length}")
        index = index + length if index < 0 else index
        return int(index) if self.rows is None else int(self.rows[index])


class LabelTable:
    """Labels as they are written, numbered once all of them are known."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.found = array("i")  # places in `seen`
        self.ends = array("q")
        self.multi_label = False

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, labels: Sequence[str]) -> None:
        """The labels of the next sample."""
        for label in labels:
            self.found.append(self.seen.setdefault(label, len(self.seen)))
        self.ends.append(len(self.found))

    def numbered(
        self, places: dict[str, int], classes: tuple[str, ...], where: str
    ) -> np.ndarray | LabelSets:
        """Every label as the number that `places` gives it."""
        for label in self.seen:
            if label not in places:
                raise DataError(f"{where}: label {label!r} is not among {told(classes)}")
        numbers = np.array([places[label] for label in self.seen], np.int32)
        found = numbers[np.frombuffer(self.found, np.int32)] if len(self.found) else numbers
        ends = np.frombuffer(self.ends, np.int64) if len(self.ends) else np.zeros(0, np.int64)
        return LabelSets(found, ends) if self.multi_label else found


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names in the order classes have: by number if all are numbers, else by letter."""
    names = set(names)
    if all(name.isascii() and name.isdigit() for name in names):
        return tuple(sorted(names, key=by_number))
    return tuple(sorted(names))


def by_number(digits: str) -> tuple[int, str, str]:
    """Orders digits as numbers; `int` refuses to read thousands of them."""
    return len(digits.lstrip("0")), digits.lstrip("0"), digits


def told(classes: tuple[str, ...]) -> str:
    """`the 3 classes ape, bee, cat`, the first of them by name."""
    return f"the {len(classes):,} classes {comma_list(classes)}"


def is_picture(name: str) -> bool:
    """Whether a file is called like a picture; what it is, decoding will tell."""
    return name[name.rfind(".") :].lower() in PICTURES


def same_but_for_case(classes: Iterable[str]) -> list[str]:
    """A note about each two classes that a careless hand may have made of one."""
    seen: dict[str, str] = {}
    notes = []
    for name in classes:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            notes.append(f"classes {other!r} and {name!r} differ in case only, and count as two")
    return notes
