"""A list of pictures: a CSV file or JSON lines, with the paths relative to the list.

    file,class,split                  {"file": "1.jpg", "labels": ["cat", "sofa"]}
    train/daisy/1.jpg,daisy,train     {"file": "2.jpg", "labels": []}

Several labels stand in one cell with `;` or `|` between them, or in a JSON array. The order of the
classes is that of a `classes.txt` or `classes.json` beside the list, if there is one. Files outside
the folder of the list, also by way of a link, are refused unless `files.allow_outside` allows them.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.files import OUTSIDE, Disk, Storage, cannot_read, is_inside, outside
from vitrail.data.folders import FolderStore, split_order
from vitrail.data.samples import Collection, LabelTable, Texts, class_order, same_but_for_case
from vitrail.data.splits import canonical
from vitrail.errors import DataError

FILE = ("file", "path", "image", "file_name", "filename", "filepath", "image_path")
LABEL = ("label", "class", "labels", "classes", "class_name")
SEVERAL = ("labels", "classes")  # even where each picture has one
LISTS = (".csv", ".tsv", ".jsonl", ".ndjson")
CLASSES = ("classes.json", "classes.txt")
MOST_COLUMNS = 1000  # each takes time in every row, even one that ends before it


class Row(NamedTuple):
    """One line of a list."""

    file: str
    labels: tuple[str, ...]
    split: str  # as written; empty where the list does not say
    several: bool  # whether more than one label could have been there


def from_list(path: Path) -> Collection:
    """The pictures that a CSV or JSON-lines file lists."""
    try:
        text = io.TextIOWrapper(io.BytesIO(Disk().read_all(str(path))), "utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise cannot_read(path, error) from None
    names, table, splits = Texts(), LabelTable(), SplitTable()
    for row in rows_of(text, path.name):
        names.append(row.file)
        table.add(row.labels)
        table.multi_label |= row.several
        splits.add(row.split)
    if not names:
        raise DataError(f"{path} lists no pictures")
    if not OUTSIDE.get():
        check_inside(path, names)
    classes, places = by_name(table, classes_beside(str(path.parent), Disk()))
    split_names, split = splits.numbered(str(path))
    return Collection(
        names=names,
        labels=table.numbered(places, classes, str(path)),
        classes=classes,
        store=FolderStore(str(path.parent), names),
        split_names=split_names,
        split=split,
        notes=tuple(same_but_for_case(classes)),
    )


def check_inside(path: Path, names: Texts) -> None:
    """Refuse a list with files outside its folder. Files are resolved one by one only in folders
    that hold links: asking the system about each of a million takes longer than reading the list.
    """
    folder = str(path.parent)
    root = os.path.realpath(folder)

    @cache
    def look(parent: str) -> tuple[bool, bool]:
        """Whether a folder is inside, and whether some of its files may be links."""
        place, links = os.path.join(folder, parent), True
        with suppress(OSError, ValueError), os.scandir(place) as entries:
            links = any(entry.is_symlink() for entry in entries)
        return is_inside(place, root), links

    for name in names:
        inside, links = look(os.path.dirname(name))
        if not inside or (links and not is_inside(os.path.join(folder, name), root)):
            raise outside(str(path), name, folder)


def rows_of(text: str, name: str) -> Iterator[Row]:
    """The lines of a list; `name` decides the kind and is what errors call it."""
    kind = PurePosixPath(name).suffix.lower()
    lines = json_lines(text, name) if kind in (".jsonl", ".ndjson") else csv_lines(text, name)
    columns: tuple[str, str] | None = None
    for number, values in lines:
        values = {str(key).strip().lower(): value for key, value in values.items()}
        columns = columns if columns and columns[0] in values else columns_of(values, name)
        file, label = values.get(columns[0]), values.get(columns[1])
        if not file or not isinstance(file, str):
            raise DataError(f"{name}: line {number} names no file")
        labels, several = labels_of(label)
        several = several or columns[1] in SEVERAL
        if not labels and not several:
            raise DataError(f"{name}: line {number} has no label")
        yield Row(file, labels, str(values.get("split") or "").strip(), several)


def csv_lines(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    header = text.partition("\n")[0]
    fallback = ";" if ";" in header and "," not in header else ","
    tabs = "\t" in header and "," not in header
    reader = csv.DictReader(io.StringIO(text), delimiter="\t" if tabs else fallback)
    try:
        if len(reader.fieldnames or ()) > MOST_COLUMNS:
            count = len(reader.fieldnames or ())
            raise DataError(f"{name} has {count:,} columns; at most {MOST_COLUMNS:,} are read")
        for values in reader:
            if None in values:
                raise DataError(
                    f"{name}: line {reader.line_num} has more cells than the first line"
                )
            yield reader.line_num, values
    except csv.Error as error:
        raise DataError(f"{name}: line {reader.line_num}: {error}") from None


def json_lines(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(io.StringIO(text), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise DataError(f"{name}: line {number} is no JSON object")
        yield number, values


def columns_of(values: dict[str, Any], name: str) -> tuple[str, str]:
    """Which columns hold the file and the label."""
    file = next((key for key in FILE if key in values), None)
    label = next((key for key in LABEL if key in values), None)
    if file is None or label is None:
        lacking = (
            f"file ({', '.join(FILE[:3])})" if file is None else f"label ({', '.join(LABEL[:3])})"
        )
        found = ", ".join(str(key) for key in values)[:200] or "none"
        raise DataError(f"{name} has no column for the {lacking}; its columns: {found}")
    return file, label


def labels_of(value: Any) -> tuple[tuple[str, ...], bool]:
    """The labels of a cell, and whether it is written as one that may hold several."""
    match value:
        case None | "":
            return (), False
        case bool() | int() | float():
            return (f"{value:g}" if isinstance(value, float) else str(value),), False
        case list():
            return tuple(dict.fromkeys(str(item).strip() for item in value)), True
        case str() if value.startswith("[") and value.endswith("]"):
            try:
                return labels_of(json.loads(value))
            except (ValueError, RecursionError):
                return (value,), False
        case str():
            parts = [part.strip() for part in value.replace("|", ";").split(";")]
            return tuple(dict.fromkeys(part for part in parts if part)), len(parts) > 1
    return (str(value),), False


class SplitTable:
    """The split of each row as it is written, numbered once all are known."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.found = bytearray()

    def add(self, name: str) -> None:
        if len(self.seen) < 255 or name in self.seen:
            self.found.append(self.seen.setdefault(name, len(self.seen)))
        else:
            raise DataError(f"the column split has more than 255 values, such as {name!r}")

    def numbered(
        self, where: str, also: Iterable[str] = ()
    ) -> tuple[tuple[str, ...], np.ndarray | None]:
        """Names of the splits, and for each row its place among them; None if none is stated."""
        if set(self.seen) <= {""}:
            return (), None
        if "" in self.seen:
            raise DataError(f"{where}: some pictures have a split stated and others do not")
        names = {canonical(name) for name in (*self.seen, *also)}
        names = tuple(sorted(names, key=split_order))
        places = np.array([names.index(canonical(name)) for name in self.seen], np.uint8)
        return names, places[np.frombuffer(self.found, np.uint8)]


def by_name(
    table: LabelTable, classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """The classes in order, and the number of each label; a label may also be a number itself."""
    if classes is None:
        classes = class_order(table.seen)
        return classes, {name: place for place, name in enumerate(classes)}
    numbers = {str(place): place for place in range(len(classes))}
    return classes, numbers | {name: place for place, name in enumerate(classes)}


def classes_beside(folder: str, storage: Storage) -> tuple[str, ...] | None:
    """What classes.json or classes.txt in a folder says, if there is one."""
    for name in CLASSES:
        path = os.path.join(folder, name)
        if storage.exists(path):
            return classes_in(storage.read_all(path).decode("utf-8-sig", "replace"), path)
    return None


def classes_in(text: str, path: str) -> tuple[str, ...]:
    """Class names from a text with one per line, or from JSON."""
    if not path.endswith(".json"):
        return classes_from([line.strip() for line in text.splitlines() if line.strip()], path)
    try:
        return classes_from(json.loads(text), path)
    except (ValueError, RecursionError) as error:
        raise cannot_read(path, error) from None


def classes_from(value: Any, path: str) -> tuple[str, ...]:
    """Class names from a list, from {name: number} or from {number: name}."""
    if isinstance(value, dict) and isinstance(value.get("classes"), list):
        value = value["classes"]
    if isinstance(value, dict) and all(str(key).isdigit() for key in value):
        value = {name: int(number) for number, name in value.items()}
    if isinstance(value, dict) and sorted(value.values(), key=str) == sorted(
        range(len(value)), key=str
    ):
        value = sorted(value, key=lambda name: value[name])
    if not isinstance(value, list) or not value or len(set(map(str, value))) != len(value):
        raise DataError(f"{path} is no list of class names, each there once")
    return tuple(str(name) for name in value)
