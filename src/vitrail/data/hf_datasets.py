"""Datasets of Hugging Face: `hf:owner/name`, or a folder of parquet or Arrow files.

Images are returned as the stored bytes, not decoded. The library `datasets` is imported on first
use; it is in the extra `data`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.datasets import (
    DatasetIndex,
    ImageStore,
    LabelEncoder,
    RowNames,
    canonical_split,
    split_order,
)
from vitrail.data.folders import LABEL_COLUMNS, number_classes, parse_labels
from vitrail.data.storage import ALLOW_OUTSIDE, LocalStorage, is_inside, outside_error
from vitrail.errors import DataError
from vitrail.extras import require

PREFIX = "hf:"
SAVED_MARKERS = ("dataset_dict.json", "state.json")  # written by `save_to_disk`


class Columns(NamedTuple):
    """Columns of the image and of the label."""

    image: str
    label: str
    classes: tuple[str, ...] | None
    multi_label: bool


class TableStore(ImageStore):
    """Images that are cells of memory-mapped Arrow tables."""

    def __init__(
        self, tables: Sequence[Any], column: str, rows: RowNames, roots: tuple[str, ...]
    ) -> None:
        self.tables = tuple(tables)
        self.column = column
        self.rows = rows
        self.roots = roots

    def read(self, row: int) -> bytes:
        """Return the bytes of an image; they may be in a file below one of `roots`."""
        part, index = self.rows.locate(row)
        name = self.rows[row]
        try:
            cell = self.tables[part][index][self.column]
        except Exception as error:  # pyarrow raises various exceptions
            raise open_error(f"row {name}", error) from None
        if isinstance(cell, dict) and cell.get("bytes"):
            return cell["bytes"]
        if isinstance(cell, dict) and cell.get("path"):
            if not any(is_inside(cell["path"], root) for root in self.roots):
                raise outside_error(name, cell["path"], self.roots[0])
            return LocalStorage().read_all(cell["path"])
        raise DataError(f"{name} contains no image")


def is_table_folder(folder: Path) -> bool:
    """Return whether a folder contains parquet files, or the output of `save_to_disk`."""
    if any((folder / marker).is_file() for marker in SAVED_MARKERS):
        return True
    patterns = ("*.parquet", "*.arrow", "*/*.parquet", "*/*.arrow")
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def index_hf(reference: str) -> DatasetIndex:
    """Index all splits of a dataset of the hub, a folder or a file."""
    library = require("datasets", extra="data", feature=reference)
    loaded = load_tables(library, reference)
    loaded = loaded if isinstance(loaded, dict) else {"": loaded}
    tables = {canonical_split(str(name)): table for name, table in loaded.items()}
    splits = sorted(tables, key=split_order)
    columns = find_columns(library, tables[splits[0]].features, reference)
    encoder, notes = LabelEncoder(), []
    encoder.multi_label = columns.multi_label
    for split in list(splits):
        values = tables[split].select_columns([columns.label])[columns.label][:]
        labels = [
            tuple(map(str, value)) if columns.multi_label else parse_labels(value)[0]
            for value in values
        ]
        if labels and all(label == ("-1",) for label in labels):  # unlabeled on the hub
            notes.append(f"split {split} has no labels and was skipped")
            splits.remove(split)
            continue
        for label in labels:
            encoder.add(label)
    if not len(encoder):
        raise DataError(f"{reference} contains no labeled images")
    classes, ids = number_classes(encoder, columns.classes)
    if columns.classes:  # labels are ids of these
        ids = {str(number): number for number in range(len(classes))}
    lengths = [len(tables[split]) for split in splits]
    rows = RowNames([(split or "row", n) for split, n in zip(splits, lengths, strict=True)])
    undecoded = library.Image(decode=False)
    images = [tables[split].cast_column(columns.image, undecoded) for split in splits]
    path = Path(reference)
    # the folders of files that a table may name
    roots = [os.path.realpath(path.parent if path.is_file() else path)]
    if ALLOW_OUTSIDE.get():
        roots = ["/"]
    elif reference.startswith(PREFIX):
        hub = require("huggingface_hub.constants", extra="data", feature=reference)
        caches = library.config.HF_DATASETS_CACHE, library.config.DOWNLOADED_DATASETS_PATH
        roots = [os.path.realpath(root) for root in (hub.HF_HUB_CACHE, *caches)]
    split_ids = np.repeat(np.arange(len(splits), dtype=np.uint8), lengths)
    return DatasetIndex(
        names=rows,
        labels=encoder.encode(ids, classes, reference),
        classes=classes,
        store=TableStore(images, columns.image, rows, tuple(roots)),
        split_names=tuple(splits) if splits != [""] else (),
        split_ids=split_ids if splits != [""] else None,
        notes=tuple(notes),
    )


def load_tables(library: Any, reference: str) -> Any:
    """Return a dictionary of tables by split, or one table."""
    repository, _, config = reference.removeprefix(PREFIX).partition("@")
    try:
        if reference.startswith(PREFIX):
            return library.load_dataset(repository, config or None)
        path = Path(reference)
        if any((path / marker).is_file() for marker in SAVED_MARKERS):
            return library.load_from_disk(str(path))
        if path.is_file():
            kind = path.suffix.removeprefix(".").lower()
            return library.load_dataset(kind, data_files=str(path))
        return library.load_dataset(str(path))
    except Exception as error:  # the hub, the network and pyarrow raise various exceptions
        raise open_error(reference, error) from None


def find_columns(library: Any, features: Any, reference: str) -> Columns:
    """Find the image column by type, and the label column by type or name."""
    images = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    typed = [
        Columns("", name, tuple(inner.names), inner is not kind)
        for name, kind in features.items()
        if isinstance(inner := getattr(kind, "feature", kind), library.ClassLabel)
    ]
    named = [name for name in LABEL_COLUMNS if name in features]
    columns = ", ".join(features) or "none"
    if not images:
        raise DataError(f"{reference} has no image column; its columns: {columns}")
    if not typed and not named:
        raise DataError(f"{reference} has no label column; its columns: {columns}")
    if typed:
        best = min(typed, key=lambda column: column.label not in LABEL_COLUMNS)
        return best._replace(image=images[0])
    return Columns(images[0], named[0], None, hasattr(features[named[0]], "feature"))


def open_error(what: str, error: Exception) -> DataError:
    message = " ".join(str(error).split())[:300] or type(error).__name__
    return DataError(f"Hugging Face datasets cannot open {what}: {message}")
