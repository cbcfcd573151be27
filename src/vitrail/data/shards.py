"""Pictures in .tar files: shards in WebDataset layout, and tars that hold a list or class folders.

    000000000.jpg 000000000.cls …        WebDataset: the label is in .cls, or in .json as "label"
    labels.csv train/daisy/1.jpg …       a list inside, with columns file, class and split
    train/daisy/1.jpg …                  class folders

The names of the classes stand in classes.json or classes.txt, beside the shards or in them; without
those, the numbers are the names. Which split a shard belongs to is in its name or its folder's:
`train-000000.tar`, `val/000.tar`.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vitrail.data.files import Disk, Storage
from vitrail.data.lists import (
    CLASSES,
    LISTS,
    SplitTable,
    by_name,
    classes_beside,
    classes_in,
    rows_of,
)
from vitrail.data.samples import Collection, LabelTable, Texts, by_number, same_but_for_case
from vitrail.data.splits import SPLITS, canonical
from vitrail.data.tars import SEVERAL, TarIndex, tar_index
from vitrail.errors import DataError

MOST_CLASSES = 1_000_000  # that may be counted up to; a larger number is no class but an id
SPARSE_CLASSES = 100_000  # the same where fewer than a tenth of the classes have an image
MOST_SHARDS = 1_000_000  # that one pattern may stand for


class Labeled(NamedTuple):
    """A picture of a tar: its place in the index, and what is known of it."""

    place: int
    labels: tuple[str, ...]
    split: str = ""
    several: bool = False


class ShardStore:
    """Pictures that are members of tars, read at their place."""

    in_memory = False

    def __init__(
        self,
        paths: Sequence[str],
        storage: Storage,
        shard: np.ndarray,
        offset: np.ndarray,
        size: np.ndarray,
    ) -> None:
        self.paths = tuple(paths)
        self.storage = storage
        self.shard = shard  # (n,) which of the paths
        self.offset = offset  # (n,)
        self.size = size  # (n,)

    def read(self, row: int) -> bytes:
        path = self.paths[self.shard[row]]
        return self.storage.read(path, int(self.offset[row]), int(self.size[row]))

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        return self.size[rows]


class MemberNames:
    """`train-000000.tar/000000017.jpg`: where to look for a picture."""

    def __init__(self, shards: Sequence[str], shard: np.ndarray, members: Texts) -> None:
        self.shards = tuple(shards)
        self.shard = shard
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> str:
        member = self.members[index]
        return f"{self.shards[self.shard[index]]}/{member}" if len(self.shards) > 1 else member


def from_shards(
    paths: Sequence[str],
    storage: Storage,
    wanted: str | None = None,
    *,
    keep_index: bool = True,
    allow_truncated: bool = False,
) -> Collection:
    """The pictures of some tars; of one split only, if `wanted` and the names of the tars tell."""
    notes = missing_in_series(paths)
    stated = splits_in_names(paths)
    split_names = {split for split in stated.values() if split}
    known = known_classes(paths[0], storage)
    if split_names:
        lost = [path for path in paths if not stated[path]]
        notes += [f"{os.path.basename(path)} names no split and was left out" for path in lost]
        # without a list of classes, those of one split may not be all
        chosen = {wanted} if known and wanted in split_names else split_names
        paths = [path for path in paths if stated[path] in chosen]
    indexes = {path: tar_index(path, storage, keep=keep_index) for path in paths}
    damages = [index.damage for index in indexes.values() if index.damage]
    if damages and not allow_truncated:
        raise DataError(damages[0])
    return collect(indexes, storage, known, stated, [*notes, *damages])


def collect(
    indexes: dict[str, TarIndex],
    storage: Storage,
    known: tuple[str, ...] | None,
    stated: dict[str, str],
    notes: list[str],
) -> Collection:
    """One collection of the labeled pictures of all tars."""
    paths = list(indexes)
    where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"
    names, table, splits = Texts(), LabelTable(), SplitTable()
    shard, offset, size = [], [], []
    for number, (path, index) in enumerate(indexes.items()):
        places = []
        for found in labeled(index, path, alone=len(paths) == 1):
            names.append(index.names[found.place])
            table.add(found.labels)
            table.multi_label |= found.several
            splits.add(found.split or stated[path])
            places.append(found.place)
        all_of_it = sum(index.first) if index.labels.bytes else len(index.names)
        if (without := all_of_it - len(places)) > 0:
            notes.append(f"{path}: {without:,} pictures have no label and were left out")
        shard.append(np.full(len(places), number, np.uint32))
        offset.append(np.frombuffer(index.offsets, np.int64)[places])
        size.append(np.frombuffer(index.sizes, np.int64)[places])
    if not names:
        some = any(len(index.names) for index in indexes.values())
        why = "says of no picture which class it is" if some else "holds no pictures"
        raise DataError(f"{where} {why}")
    classes, numbers = classes_of(table, indexes, known)
    split_names, split = splits.numbered(where, also=filter(None, stated.values()))
    store = ShardStore(paths, storage, *map(np.concatenate, (shard, offset, size)))
    return Collection(
        names=MemberNames([os.path.basename(path) for path in paths], store.shard, names),
        labels=table.numbered(numbers, classes, where),
        classes=classes,
        store=store,
        split_names=split_names,
        split=split,
        notes=(*notes, *same_but_for_case(classes)),
    )


def labeled(index: TarIndex, path: str, *, alone: bool) -> Iterator[Labeled]:
    """The pictures of a tar whose class is known, in its order or its list's."""
    lists = [name for name in (f"labels{ending}" for ending in LISTS) if name in index.texts]
    if lists:
        return from_inner_list(index, f"{path}/{lists[0]}", index.texts[lists[0]])
    return from_labels(index) if index.labels.bytes else from_folders(index, alone=alone)


def from_labels(index: TarIndex) -> Iterator[Labeled]:
    """WebDataset: what .cls and .json said; of several pictures with one key, the first."""
    for place, label in enumerate(index.labels):
        if label and index.first[place]:
            several = label.startswith(SEVERAL)
            labels = tuple(filter(None, label.split(SEVERAL))) if several else (label,)
            yield Labeled(place, labels, several=several)


def from_inner_list(index: TarIndex, where: str, text: str) -> Iterator[Labeled]:
    places = {name: place for place, name in enumerate(index.names)}
    for row in rows_of(text, where):
        place = places.get(row.file.removeprefix("./"))
        if place is None:
            raise DataError(f"{where} lists {row.file}, which is not in the tar")
        yield Labeled(place, row.labels, row.split, row.several)


def from_folders(index: TarIndex, *, alone: bool) -> Iterator[Labeled]:
    """Class folders inside the tar, with or without splits and one folder around all."""
    around = {name.partition("/")[0] for name in index.names}
    deep = all(name.count("/") >= 2 for name in index.names)
    inside = alone and deep and len(around) == 1 and canonical(next(iter(around))) not in SPLITS
    for place, name in enumerate(index.names):
        folders = name.split("/")[inside:-1]
        if len(folders) >= 2 and canonical(folders[0]) in SPLITS:
            yield Labeled(place, (folders[1],), folders[0])
        elif folders:
            yield Labeled(place, (folders[0],))


def known_classes(path: str, storage: Storage) -> tuple[str, ...] | None:
    """The classes that a file beside a shard names, or one beside its folder, `train` for one."""
    folder = os.path.dirname(path)
    found = classes_beside(folder, storage)
    above = found is None and split_in(os.path.basename(folder))
    return classes_beside(os.path.dirname(folder), storage) if above else found


def classes_of(
    table: LabelTable, indexes: dict[str, TarIndex], known: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """The classes, and the number of each label: a number in .cls is the class's number."""
    for path, index in indexes.items():
        for name in CLASSES if known is None else ():
            if name in index.texts:
                known = classes_in(index.texts[name], f"{path}/{name}")
    if not any(index.labels.bytes for index in indexes.values()):
        return by_name(table, known)
    if known is None and all(label.isascii() and label.isdigit() for label in table.seen):
        most = max(table.seen, key=by_number, default="0").lstrip("0") or "0"
        limit = min(MOST_CLASSES, max(SPARSE_CLASSES, 10 * len(table.seen)))
        if len(most) > len(str(limit)) or int(most) >= limit:
            raise DataError(
                f"label {most:.30} is no number of a class; name the classes in classes.txt"
            )
        known = tuple(str(number) for number in range(int(most) + 1))
    classes, places = by_name(table, known)
    return classes, places | {str(number): number for number in range(len(classes))}


def splits_in_names(paths: Sequence[str]) -> dict[str, str]:
    """The split that each shard's name tells, or its folder's if there are several; or nothing."""
    several = len({os.path.dirname(path) for path in paths}) > 1
    return {
        path: split_in(os.path.basename(path))
        or (split_in(os.path.basename(os.path.dirname(path))) if several else "")
        for path in paths
    }


def split_in(name: str) -> str:
    """`val` in `imagenet-validation-000017.tar`; empty if there is none."""
    words = (canonical(word) for word in re.split(r"[-_.\d]+", name))
    return next((word for word in words if word in SPLITS), "")


def missing_in_series(paths: Sequence[str]) -> list[str]:
    """A note about each gap in `train-000000.tar`, `train-000001.tar`, …"""
    found = [re.fullmatch(r"(.*?)(\d+)\.tar", path) for path in paths]
    numbers = sorted((m[1], int(m[2]), len(m[2])) for m in found if m)
    return [
        f"{os.path.basename(a)}{n + 1:0{width}}.tar is missing in the series"
        for (a, n, width), (b, m, _) in pairwise(numbers)
        if a == b and m > n + 1
    ]


def shards_at(reference: str, storage: Storage) -> list[str]:
    """The tars that a path, a folder or a pattern with `*`, `?` or braces stands for."""
    if isinstance(storage, Disk) and os.path.exists(reference):  # whatever signs are in its name
        is_tar = os.path.isfile(reference)
        found = [reference] if is_tar else shards_in(glob.escape(reference), storage)
    else:
        found = []
        for pattern in expand_braces(reference):
            if any(sign in pattern for sign in "*?["):
                found += storage.matching(pattern)
            else:
                is_tar = pattern.endswith(".tar")
                found += [pattern] if is_tar else shards_in(pattern, storage)
            if len(found) > MOST_SHARDS:
                raise DataError(f"{reference} stands for more than {MOST_SHARDS:,} files")
    if not found:
        raise DataError(f"no .tar file is called {reference}")
    return found


def shards_in(folder: str, storage: Storage) -> list[str]:
    folder = folder.rstrip("/")
    return storage.matching(f"{folder}/*.tar") or storage.matching(f"{folder}/*/*.tar")


def expand_braces(pattern: str) -> Iterator[str]:
    """`a-{000..002}.tar` and `{a,b}.tar`, as a shell understands them."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        yield pattern
        return
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if span:
        first, last, width = int(span[1]), int(span[2]), len(span[1])
        words = (f"{number:0{width}}" for number in range(first, last + 1))
    else:
        words = iter(found[1].split(","))
    for word in words:
        yield from expand_braces(pattern[: found.start()] + word + pattern[found.end() :])
