"""Class folders, and lists of image files.

    photos/daisy/1.jpg               photos/train/daisy/1.jpg
    photos/daisy/more/2.jpg          photos/val/daisy/2.jpg

Folders below a class folder belong to it, hidden files are ignored, files that are not images are
counted. A class is a folder with at least one image in any split.

    file,class,split                 {"file": "1.jpg", "labels": ["cat", "sofa"]}
    train/daisy/1.jpg,daisy,train    {"file": "2.jpg", "labels": []}

A list is CSV or JSON lines, with paths relative to it. Several labels are separated by `;` or `|`,
or are a JSON array. Classes are in the order of `classes.txt` or `classes.json` beside the list, if
there is one. Files outside the folder of the list, also through a link, are rejected unless
`storage.allow_outside` allows them.
"""

import csv
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.datasets import (
    SPLITS,
    DatasetIndex,
    ImageDataset,
    ImageStore,
    PackedStrings,
    SampleEncoder,
    canonical_split,
    case_collisions,
    is_image_name,
    sort_classes,
    split_order,
)
from vitrail.data.storage import (
    ALLOW_OUTSIDE,
    is_inside,
    is_remote,
    outside_error,
    read_error,
    read_file,
    request,
)
from vitrail.errors import DataError, similar_path
from vitrail.formatting import comma_list

MAX_VISITS = 100  # of a folder, via links: two links in each of 30 folders are 2**30 paths
MAX_COLUMNS = 1000  # every row takes time for each of them, however short it is
FILE_COLUMNS = ("file", "path", "image", "file_name", "filename", "filepath", "image_path")
LABEL_COLUMNS = ("label", "class", "labels", "classes", "class_name")
MULTI_LABEL_COLUMNS = ("labels", "classes")  # even if each image has one label
LIST_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson")
CLASS_FILES = ("classes.json", "classes.txt")


@dataclass(eq=False)
class FolderStore(ImageStore):
    """Images that are files below a folder."""

    root: str
    names: PackedStrings

    def read(self, row: int) -> bytes:
        return read_file(os.path.join(self.root, self.names[row]))

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        sizes = np.full(len(rows), -1, np.int64)  # of a missing file, which raises when read
        for position, row in enumerate(rows.tolist()):
            with suppress(OSError, ValueError):
                sizes[position] = os.stat(os.path.join(self.root, self.names[row])).st_size
        return sizes


def index_folder(root: Path, split: str | None = None) -> DatasetIndex | None:
    """Index class folders, of one split only if it exists; None if there are no images.

    Without split folders, every folder is scanned once.
    """
    subfolders, outside = list_folder(root)
    split_folders = {}  # such as {"training": "train", "valid": "val"}
    for name in subfolders:
        # A class may be called train, too: splits contain class folders and no images.
        if (alias := canonical_split(name)) in SPLITS:
            below, images = list_folder(root / name)
            if not images and any(any_image(root / name / folder) for folder in below):
                split_folders[name] = alias
    others = (name for name in subfolders if name not in split_folders)
    if len(split_folders) == 1 and any(list_folder(root / name)[1] for name in others):
        split_folders = {}  # the only one among folders of images is a class
    split_names = tuple(sorted(set(split_folders.values()), key=split_order))
    names, encoder, class_names = PackedStrings(), SampleEncoder(), set[str]()
    skipped_by_class: dict[str, Counter[str]] = defaultdict(Counter)  # files by extension
    for top, top_split in (split_folders or {"": ""}).items():
        is_selected = split not in split_names or split == top_split
        for name in list_folder(root / top)[0] if top else subfolders:
            skipped = skipped_by_class[name] if is_selected else Counter()
            for path in walk_images(root, f"{top}/{name}" if top else name, skipped):
                class_names.add(name)
                if not is_selected:
                    break
                names.append(path)
                encoder.add((name,), top_split)
    if not class_names:
        return None
    classes = tuple(sorted(class_names))
    skipped = sum((skipped_by_class[name] for name in classes), Counter())
    notes = skipped_notes(skipped, 0 if split_folders else outside) + case_collisions(classes)
    if empty := sorted(skipped_by_class.keys() - class_names):
        notes.append(f"folders without images: {comma_list(empty)}")
    for name in subfolders if split_folders else ():
        if name not in split_folders and any_image(root / name):
            notes.append(f"{name}/ is not a split and was skipped")
    ids = {name: number for number, name in enumerate(classes)}
    store = FolderStore(str(root), names)
    return encoder.index(str(root), names, store, classes, ids, splits=split_names, notes=notes)


def walk_images(root: str | Path, folder: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield sorted paths relative to `root` of the images in a folder; count other files."""
    visits: Counter[tuple[int, int]] = Counter()
    parents: list[tuple[int, int]] = []  # of the current folder, below the first
    stack = [(folder, iter(list_entries(os.path.join(root, folder))))]
    while stack:
        parent, entries = stack[-1]
        entry = next(entries, None)
        if entry is None:
            stack.pop()
            del parents[-1:]
            continue
        path = f"{parent}/{entry.name}" if parent else entry.name
        if is_folder(entry):
            info = entry.stat()
            inode = (info.st_dev, info.st_ino)
            if inode in parents:  # a link to a parent folder
                continue
            visits[inode] += 1
            if visits[inode] > MAX_VISITS:
                raise DataError(
                    f"links in {os.path.join(root, folder)} lead to {entry.name} more than "
                    f"{MAX_VISITS} times; remove unneeded links"
                )
            parents.append(inode)
            stack.append((path, iter(list_entries(os.path.join(root, path)))))
        elif is_image_name(entry.name):
            yield path
        else:
            skipped[os.path.splitext(entry.name)[1].lower() or "no extension"] += 1


def list_entries(path: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder sorted by name, without hidden ones."""
    try:
        with os.scandir(path) as entries:
            visible = [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except OSError as error:
        raise read_error(path, error) from None
    return sorted(visible, key=lambda entry: entry.name)


def list_folder(path: Path) -> tuple[list[str], int]:
    """Return the subfolders of a folder, and the number of images directly in it."""
    entries = list_entries(path)
    folders = [entry.name for entry in entries if is_folder(entry)]
    return folders, sum(is_image_name(e.name) and not is_folder(e) for e in entries)


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False


def any_image(folder: Path) -> bool:
    return next(walk_images(folder, "", Counter()), None) is not None


def skipped_notes(extensions: Counter[str], outside: int = 0) -> list[str]:
    """Describe skipped files: images outside class folders, and other files by extension."""
    notes = [f"images outside class folders skipped: {outside:,}"] if outside else []
    if extensions:
        counts = ", ".join(f"{name} {count:,}" for name, count in extensions.most_common(5))
        notes.append(f"files that are not images skipped: {extensions.total():,} ({counts})")
    return notes


def open_single_class(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], name: str
) -> ImageDataset:
    """Open image files and folders of images as a dataset of the one class `name`."""
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    names, skipped = PackedStrings(), Counter[str]()
    for reference in map(Path, paths):
        path = reference.expanduser()
        if path.is_dir():
            for image in walk_images(path, "", skipped):
                names.append(os.path.join(path, image))
        elif path.is_file() and is_image_name(path.name):
            names.append(os.fspath(path))
        else:
            reason = "not an image" if path.exists() else "not found"
            hint = similar_path(str(path)) * (not path.exists())
            hint = hint or "; expected an image or a folder of images"
            raise DataError(f"{name}={reference}: {reason}{hint}")
    if not len(names):
        raise DataError(f"{name}={', '.join(map(str, paths))}: contains no images")
    labels, notes = np.zeros(len(names), np.int32), tuple(skipped_notes(skipped))
    store = FolderStore("", names)
    return ImageDataset(DatasetIndex(names, labels, (name,), store, notes=notes))


# Lists.


class ListRow(NamedTuple):
    file: str
    labels: tuple[str, ...]
    split: str = ""  # as written; empty if not stated
    multi_label: bool = False  # whether the line could hold several labels


def index_list(path: Path) -> DatasetIndex:
    try:
        text = io.TextIOWrapper(io.BytesIO(read_file(str(path))), "utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise read_error(path, error) from None
    names, encoder = PackedStrings(), SampleEncoder()
    for row in list_rows(text, path.name):
        names.append(row.file)
        encoder.add(row.labels, row.split, multi_label=row.multi_label)
    if not names:
        raise DataError(f"{path} lists no images")
    if not ALLOW_OUTSIDE.get():
        check_inside(path, names)
    classes, ids = number_classes(encoder, read_classes(str(path.parent)))
    store = FolderStore(str(path.parent), names)
    return encoder.index(str(path), names, store, classes, ids, notes=case_collisions(classes))


def check_inside(path: Path, names: PackedStrings) -> None:
    """Reject a list with files outside its folder.

    Files are resolved one by one only in folders with links: resolving each of a million takes
    longer than reading the list.
    """
    folder = str(path.parent)
    root = os.path.realpath(folder)

    @cache
    def inspect(parent: str) -> tuple[bool, bool]:
        """Return whether a folder is inside, and whether some of its files may be links."""
        location, has_links = os.path.join(folder, parent), True
        with suppress(OSError, ValueError), os.scandir(location) as entries:
            has_links = any(entry.is_symlink() for entry in entries)
        return is_inside(location, root), has_links

    for name in names:
        inside, has_links = inspect(os.path.dirname(name))
        if not inside or (has_links and not is_inside(os.path.join(folder, name), root)):
            raise outside_error(str(path), name, folder)


def list_rows(text: str, name: str) -> Iterator[ListRow]:
    """Parse a list; the extension of `name` selects the format."""
    columns: tuple[str, str] | None = None
    for number, values in list_lines(text, name):
        values = {str(key).strip().lower(): value for key, value in values.items()}
        if columns is None or columns[0] not in values:
            file = next((key for key in FILE_COLUMNS if key in values), "")
            label = next((key for key in LABEL_COLUMNS if key in values), "")
            if not (file and label):
                kind, accepted = ("label", LABEL_COLUMNS) if file else ("file", FILE_COLUMNS)
                raise DataError(
                    f"{name} has no {kind} column ({', '.join(accepted[:3])}); its columns: "
                    f"{', '.join(values)[:200] or 'none'}"
                )
            columns = file, label
        file, label = values.get(columns[0]), values.get(columns[1])
        if not file or not isinstance(file, str):
            raise DataError(f"{name}: line {number} has no file name")
        labels, multi_label = parse_labels(label)
        multi_label = multi_label or columns[1] in MULTI_LABEL_COLUMNS
        if not labels and not multi_label:
            raise DataError(f"{name}: line {number} has no label")
        yield ListRow(file, labels, str(values.get("split") or "").strip(), multi_label)


def list_lines(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and values of each line, of CSV or JSON lines."""
    if PurePosixPath(name).suffix.lower() in (".jsonl", ".ndjson"):
        for number, line in enumerate(io.StringIO(text), 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if not isinstance(values, dict):
                raise DataError(f"{name}: line {number} is not a JSON object")
            yield number, values
        return
    header = text.partition("\n")[0]
    delimiter = next((sign for sign in ",\t;" if sign in header), ",")
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    try:
        if (count := len(reader.fieldnames or ())) > MAX_COLUMNS:
            raise DataError(f"{name} has {count:,} columns, above the limit of {MAX_COLUMNS:,}")
        for values in reader:
            if None in values:
                raise DataError(f"{name}: line {reader.line_num} has more cells than the header")
            yield reader.line_num, values
    except csv.Error as error:
        raise DataError(f"{name}: line {reader.line_num}: {error}") from None


def parse_labels(value: Any) -> tuple[tuple[str, ...], bool]:
    """Return the labels of a cell, and whether its notation allows several."""
    match value:
        case None | "":
            return (), False
        case bool() | int() | float():  # 3 and 3.0 are the same class
            return (str(value).removesuffix(".0"),), False
        case list():
            return tuple(dict.fromkeys(str(item).strip() for item in value)), True
        case str() if value.startswith("[") and value.endswith("]"):
            try:
                return parse_labels(json.loads(value))
            except (ValueError, RecursionError):
                return (value,), False
        case str():
            parts = [part.strip() for part in value.replace("|", ";").split(";")]
            return tuple(dict.fromkeys(part for part in parts if part)), len(parts) > 1
    return (str(value),), False


def number_classes(
    encoder: SampleEncoder, classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return classes in order, and the id of each label; labels may also be ids of `classes`."""
    ids = {} if classes is None else {str(number): number for number in range(len(classes))}
    classes = sort_classes(encoder.codes) if classes is None else classes
    return classes, ids | {name: number for number, name in enumerate(classes)}


def read_classes(folder: str) -> tuple[str, ...] | None:
    """Read classes.json or classes.txt in a folder, if there is one."""
    for name in CLASS_FILES:
        path, exists = os.path.join(folder, name), False
        with suppress(DataError):  # some remote stores deny access to missing keys
            exists = request(path, "isfile") if is_remote(path) else os.path.isfile(path)
        if exists:
            return parse_classes(read_file(path).decode("utf-8-sig", "replace"), path)
    return None


def parse_classes(text: str, path: str) -> tuple[str, ...]:
    """Parse class names: one per line, or a JSON list, {name: id} or {id: name}."""
    value: Any = [line.strip() for line in text.splitlines() if line.strip()]
    if path.endswith(".json"):
        try:
            value = json.loads(text)
            if isinstance(value, dict) and isinstance(value.get("classes"), list):
                value = value["classes"]
            if isinstance(value, dict) and all(str(key).isdigit() for key in value):
                value = {name: int(number) for number, name in value.items()}
        except (ValueError, TypeError, RecursionError) as error:
            raise read_error(path, error) from None
        if isinstance(value, dict) and sorted(value.values(), key=str) == sorted(
            range(len(value)), key=str
        ):
            value = sorted(value, key=lambda name: value[name])
    if not isinstance(value, list) or not value or len(set(map(str, value))) != len(value):
        raise DataError(f"{path} is not a list of unique class names")
    return tuple(str(name) for name in value)
