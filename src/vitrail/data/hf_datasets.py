"""Data sets of Hugging Face: `hf:owner/name`, or a folder of parquet or Arrow files.

Pictures come as the bytes they were stored in; nothing is decoded here. The library `datasets` is
imported only when it is needed; it is in the extra `data`.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.files import OUTSIDE, Disk, is_inside, outside
from vitrail.data.folders import split_order
from vitrail.data.lists import LABEL, by_name, labels_of
from vitrail.data.samples import Collection, LabelTable, Rows, Sample
from vitrail.data.splits import canonical
from vitrail.errors import DataError
from vitrail.extras import require

PREFIX = "hf:"


class Columns(NamedTuple):
    """Which columns of a table hold the picture and the label, and what the labels are called."""

    image: str
    label: str
    classes: tuple[str, ...] | None
    several: bool


class TableStore:
    """Pictures that are cells of Arrow tables, which stay on the disk."""

    in_memory = False

    def __init__(
        self, tables: Sequence[Any], column: str, rows: Rows, roots: tuple[str, ...]
    ) -> None:
        self.tables = tuple(tables)
        self.column = column
        self.rows = rows
        self.roots = roots

    def read(self, row: int) -> bytes:
        part, place = self.rows.place(row)
        try:
            cell = self.tables[part][place][self.column]
        except Exception as error:  # whatever pyarrow throws
            raise failed(f"row {self.rows[row]}", error) from None
        return picture_in(cell, self.rows[row], self.roots)

    def sizes(self, rows: np.ndarray) -> None:
        return None


class Stream:
    """The samples of a split one after the other, none of them kept."""

    def __init__(self, table: Any, columns: Columns, split: str, roots: tuple[str, ...]) -> None:
        if columns.classes is None:
            raise DataError(
                f"the column {columns.label} does not name its classes, which a stream needs; "
                "open the set without streaming"
            )
        self.table = table
        self.columns = columns
        self.split = split
        self.roots = roots
        self.classes = columns.classes
        self.multi_label = columns.several

    def __iter__(self) -> Iterator[Sample]:
        for number, row in enumerate(self.table):
            name, label = f"{self.split}/{number}", row[self.columns.label]
            label = tuple(label) if self.multi_label else label
            yield Sample(picture_in(row[self.columns.image], name, self.roots), label, name)


def is_table_folder(folder: Path) -> bool:
    """Whether a folder holds parquet files, or what `save_to_disk` writes."""
    marks = ("dataset_dict.json", "state.json")
    if any((folder / mark).is_file() for mark in marks):
        return True
    patterns = ("*.parquet", "*.arrow", "*/*.parquet", "*/*.arrow")
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def from_hf(reference: str) -> Collection:
    """All splits of a set of the hub or of a folder."""
    loaded = load(reference)
    tables = loaded if isinstance(loaded, dict) else {"": loaded}
    named = {canonical(str(name)): table for name, table in tables.items()}
    splits = sorted(named, key=split_order)
    columns = columns_of(named[splits[0]].features, reference)
    labels, notes = LabelTable(), []
    labels.multi_label = columns.several
    for split in list(splits):
        found = labels_in(named[split], columns)
        if found and all(label == ("-1",) for label in found):  # how the hub writes "not known"
            notes.append(f"{split} has no labels and was left out")
            splits.remove(split)
            continue
        for label in found:
            labels.add(label)
    if not len(labels):
        raise DataError(f"{reference} holds no pictures with labels")
    classes, places = by_name(labels, columns.classes)
    if columns.classes:  # labels are numbers of these
        places = {str(number): number for number in range(len(classes))}
    rows = Rows([(split or "row", len(named[split])) for split in splits])
    stated = np.repeat(np.arange(len(splits), dtype=np.uint8), [len(named[s]) for s in splits])
    pictures = [undecoded(named[split], columns.image) for split in splits]
    return Collection(
        names=rows,
        labels=labels.numbered(places, classes, reference),
        classes=classes,
        store=TableStore(pictures, columns.image, rows, roots_of(reference)),
        split_names=tuple(splits) if splits != [""] else (),
        split=stated if splits != [""] else None,
        notes=tuple(notes),
    )


def stream(reference: str, split: str = "train") -> Stream:
    """A split as it comes over the network or off the disk; memory stays flat."""
    loaded = load(reference, streaming=True)
    tables = {canonical(str(name)): table for name, table in loaded.items()}
    if canonical(split) not in tables:
        raise DataError(f"{reference} has no split {split!r}; it has {', '.join(tables)}")
    table = tables[canonical(split)]
    if table.features is None:
        table = table._resolve_features()
    columns = columns_of(table.features, reference)
    pictures = undecoded(table, columns.image)
    return Stream(pictures, columns, canonical(split), roots_of(reference))


def load(reference: str, *, streaming: bool = False) -> Any:
    """What `datasets` makes of a reference: a table per split, or one table."""
    datasets = library(reference)
    address, _, config = reference.removeprefix(PREFIX).partition("@")
    folder = None if reference.startswith(PREFIX) else Path(reference)
    try:
        if folder is None:
            return datasets.load_dataset(address, config or None, streaming=streaming)
        if any((folder / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(str(folder))
            if not streaming:
                return loaded
            tables = loaded if isinstance(loaded, dict) else {"train": loaded}
            return {name: table.to_iterable_dataset() for name, table in tables.items()}
        if folder.is_file():
            kind = folder.suffix.removeprefix(".").lower()
            return datasets.load_dataset(kind, data_files=str(folder), streaming=streaming)
        return datasets.load_dataset(str(folder), streaming=streaming)
    except Exception as error:  # the hub, the network and pyarrow have many words for failing
        raise failed(reference, error) from None


def library(reference: str) -> Any:
    return require("datasets", extra="data", feature=reference)


def columns_of(features: Any, reference: str) -> Columns:
    """Find the picture by its type, and the label by its type or its name."""
    datasets = library(reference)
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [
        Columns("", name, tuple(inner.names), inner is not kind)
        for name, kind in features.items()
        if isinstance(inner := getattr(kind, "feature", kind), datasets.ClassLabel)
    ]
    plain = [name for name in LABEL if name in features]
    found = ", ".join(features) or "none"
    if not images:
        raise DataError(f"{reference} has no column of pictures; its columns: {found}")
    if not labels and not plain:
        raise DataError(f"{reference} has no column of labels; its columns: {found}")
    usual = sorted(labels, key=lambda columns: columns.label not in LABEL)
    if usual:
        return usual[0]._replace(image=images[0])
    return Columns(images[0], plain[0], None, hasattr(features[plain[0]], "feature"))


def labels_in(table: Any, columns: Columns) -> list[tuple[str, ...]]:
    """The labels of a table as texts; the pictures are not touched."""
    values = table.select_columns([columns.label])[columns.label][:]
    if columns.several:
        return [tuple(str(item) for item in value) for value in values]
    return [(str(value),) if isinstance(value, int) else labels_of(value)[0] for value in values]


def undecoded(table: Any, column: str) -> Any:
    return table.cast_column(column, library("pictures").Image(decode=False))


def roots_of(reference: str) -> tuple[str, ...]:
    """The folders whose files a table may name: its own, or the caches of the hub."""
    if OUTSIDE.get():
        return ("/",)
    if not reference.startswith(PREFIX):
        path = Path(reference)
        return (os.path.realpath(path.parent if path.is_file() else path),)
    config = library(reference).config
    hub = require("huggingface_hub.constants", extra="data", feature=reference)
    caches = (hub.HF_HUB_CACHE, config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH)
    return tuple(map(os.path.realpath, caches))


def picture_in(cell: Any, name: str, roots: tuple[str, ...]) -> bytes:
    """The bytes of a picture, which may lie in a file of their own below one of `roots`."""
    if isinstance(cell, dict) and cell.get("bytes"):
        return cell["bytes"]
    if isinstance(cell, dict) and cell.get("path"):
        if not any(is_inside(cell["path"], root) for root in roots):
            raise outside(name, cell["path"], roots[0])
        return Disk().read_all(cell["path"])
    raise DataError(f"{name} holds no picture")


def failed(what: str, error: Exception) -> DataError:
    words = " ".join(str(error).split())[:300] or type(error).__name__
    return DataError(f"Hugging Face datasets cannot open {what}: {words}")
