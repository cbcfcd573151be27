"""A folder of class folders, with or without train/ val/ test/ above them.

    photos/daisy/1.jpg                   photos/train/daisy/1.jpg
    photos/daisy/more/2.jpg              photos/val/daisy/2.jpg

Folders below a class folder belong to it; hidden files are not seen, files that are no pictures
are counted. A class is a folder with at least one picture in any split.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitrail.data.files import Disk, cannot_read
from vitrail.data.samples import Collection, Names, Texts, is_picture, same_but_for_case
from vitrail.data.splits import SPLITS, canonical, place
from vitrail.errors import DataError

MOST_VISITS = 100  # of one folder by different links: two in each of 30 folders make 2**30 paths
EXPECTED = "expected a folder for each class with pictures in it"


class FolderStore:
    """Pictures that are files below a folder."""

    in_memory = False

    def __init__(self, root: str, names: Names) -> None:
        self.root = root
        self.names = names
        self.disk = Disk()

    def read(self, row: int) -> bytes:
        return self.disk.read_all(os.path.join(self.root, self.names[row]))

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        return np.fromiter((self.size(int(row)) for row in rows), np.int64, len(rows))

    def size(self, row: int) -> int:
        try:
            return self.disk.size(os.path.join(self.root, self.names[row]))
        except DataError:
            return -1  # missing: reading will tell


def from_folder(root: Path, wanted: str | None = None) -> Collection:
    """The pictures of a folder; of one stated split only, if it is `wanted`."""
    stated = stated_splits(root)
    tops = stated or {"": ""}  # what is above class folders, and which split that is
    folders = {top: subfolders(root / top) for top in tops}
    found = {name for top in tops for name in folders[top] if any_picture(root / top / name)}
    classes = tuple(sorted(found))
    if not classes:
        raise DataError(f"{root} {why_empty(root)}; {EXPECTED}")
    split_names = tuple(sorted(set(tops.values()), key=split_order)) if stated else ()
    names, labels, splits = Texts(), [], []
    left_out: Counter[str] = Counter()
    for top, split in tops.items():
        if wanted in split_names and split != wanted:
            continue
        left_out.update(direct_pictures(root / top))
        for label, name in enumerate(classes):
            if name not in folders[top]:
                continue
            before = len(names)
            for path in pictures(root, f"{top}/{name}" if top else name, left_out):
                names.append(path)
            labels.append(np.full(len(names) - before, label, np.int32))
            splits.append(np.full(len(names) - before, place(split, split_names), np.uint8))
    return Collection(
        names=names,
        labels=np.concatenate(labels) if labels else np.zeros(0, np.int32),
        classes=classes,
        store=FolderStore(str(root), names),
        split_names=split_names,
        split=np.concatenate(splits) if stated and splits else None,
        notes=(*notes_about(left_out), *same_but_for_case(classes), *ignored(root, stated)),
    )


def stated_splits(root: Path) -> dict[str, str]:
    """Folders that are splits, and which: {"training": "train", "valid": "val"}.

    A folder named train may also be the class of a railway; it is a split if class folders are in
    it and no pictures, and not the only one of its kind among folders of pictures.
    """
    folders = subfolders(root)
    found = {name: canonical(name) for name in folders if canonical(name) in SPLITS}
    found = {
        name: split
        for name, split in found.items()
        if not direct_pictures(root / name)
        and any(any_picture(root / name / below) for below in subfolders(root / name))
    }
    others = [name for name in folders if name not in found]
    if len(found) == 1 and any(direct_pictures(root / name) for name in others):
        return {}
    return found


def pictures(root: Path, folder: str, left_out: Counter[str]) -> Iterator[str]:
    """Paths below `root` of the pictures in a folder of it, in order; other files are counted."""
    visits: Counter[tuple[int, int]] = Counter()
    above: list[tuple[int, int]] = []  # the folders that the walk is in, below the first
    stack = [(folder, iter(entries(os.path.join(root, folder))))]
    while stack:
        place, rest = stack[-1]
        entry = next(rest, None)
        if entry is None:
            stack.pop()
            del above[-1:]
            continue
        path = f"{place}/{entry.name}" if place else entry.name
        if is_folder(entry):
            about = entry.stat()
            here = (about.st_dev, about.st_ino)
            if here in above:  # a link to a folder it is in has no end
                continue
            visits[here] += 1
            if visits[here] > MOST_VISITS:
                raise DataError(
                    f"links in {os.path.join(root, folder)} lead to {entry.name} more than "
                    f"{MOST_VISITS} times; remove those that are not needed"
                )
            above.append(here)
            stack.append((path, iter(entries(os.path.join(root, path)))))
        elif is_picture(entry.name):
            yield path
        else:
            left_out[os.path.splitext(entry.name)[1].lower() or "no ending"] += 1


def entries(path: str | Path) -> list[os.DirEntry[str]]:
    """What a folder holds, in the order of names; hidden things are not seen."""
    try:
        with os.scandir(path) as found:
            seen = [entry for entry in found if not entry.name.startswith((".", "__MACOSX"))]
    except OSError as error:
        raise cannot_read(path, error) from None
    return sorted(seen, key=lambda entry: entry.name)


def subfolders(path: Path) -> list[str]:
    return [entry.name for entry in entries(path) if is_folder(entry)]


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in a circle
        return False


def direct_pictures(path: Path) -> dict[str, int]:
    """How many pictures lie in the folder itself, as a count of what has no class."""
    count = sum(is_picture(entry.name) and not is_folder(entry) for entry in entries(path))
    return {"pictures outside class folders": count} if count else {}


def any_picture(folder: Path) -> bool:
    return next(pictures(folder, "", Counter()), None) is not None


def why_empty(root: Path) -> str:
    found = entries(root)
    if not found:
        return "is empty"
    if count := sum(direct_pictures(root).values()):
        return f"holds {count:,} pictures but no class folders"
    return "holds no pictures"


def split_order(name: str) -> tuple[int, str]:
    """train, val, test, then others by letter."""
    return (SPLITS.index(name) if name in SPLITS else len(SPLITS), name)


def notes_about(left_out: Counter[str]) -> list[str]:
    """A line about what was left out, and nothing if nothing was."""
    outside = left_out.pop("pictures outside class folders", 0)
    notes = [f"{outside:,} pictures lie outside class folders and were left out"] if outside else []
    if left_out:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in left_out.most_common(5))
        notes.append(f"{left_out.total():,} files are no pictures and were left out: {kinds}")
    return notes


def ignored(root: Path, stated: dict[str, str]) -> list[str]:
    """A line about each folder beside the splits that holds pictures nobody will see."""
    others = [name for name in subfolders(root) if name not in stated] if stated else []
    return [f"{name}/ is no split and was left out" for name in others if any_picture(root / name)]
