"""Pictures as arrays: .npz files, and .npy files in pairs.

digits.npz: x_train (N, H, W) or (N, H, W, C) uint8, y_train (N,), x_test, y_test, class_names
a folder:   images.npy, labels.npy

There may be any number of channels; from five on they must be fewer than rows and columns.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.array_files import BROKEN, LazyArray, npy_array, npz_arrays
from vitrail.data.files import Disk, cannot_read
from vitrail.data.folders import split_order
from vitrail.data.lists import classes_beside
from vitrail.data.samples import Collection, LabelSets, Rows, class_order, told
from vitrail.data.splits import SPLITS, canonical, place
from vitrail.errors import DataError

IMAGES = ("x", "images", "image", "imgs", "data", "pixels")
LABELS = ("y", "labels", "label", "targets")
CLASS_NAMES = ("class_names", "classes", "label_names")
USUAL = (1, 3, 4)  # channels: they are told from rows wherever they stand
MOST_USUAL = max(USUAL)


class PixelArrays(NamedTuple):
    """Pictures that belong together, and their labels."""

    split: str  # empty where none is stated
    images: LazyArray  # (N, H, W) or (N, H, W, C) uint8
    labels: np.ndarray  # (N,), or (N, C) of 0 and 1
    name: str = ""  # what rows are called by; the split if empty


class PixelStore:
    """Pictures that are rows of arrays."""

    in_memory = True

    def __init__(self, arrays: Sequence[LazyArray], rows: Rows) -> None:
        self.arrays = tuple(arrays)
        self.rows = rows

    def read(self, row: int) -> np.ndarray:
        part, place = self.rows.place(row)
        return np.array(self.arrays[part].values[place])  # a copy: whoever gets it may change it

    def sizes(self, rows: np.ndarray) -> None:
        return None


def from_npz(path: Path) -> Collection:
    """The pictures of an .npz file."""
    try:
        arrays = npz_arrays(path)
    except BROKEN as error:
        raise cannot_read(path, error) from None
    return from_named(arrays, str(path), classes_beside(str(path.parent), Disk()))


def from_npy(path: Path) -> Collection:
    """The pictures of the .npy files in a folder; of one pair, if one of it is given."""
    files = sorted(path.glob("*.npy") if path.is_dir() else path.parent.glob("*.npy"))
    try:
        arrays = {file.stem: npy_array(file) for file in files}
    except BROKEN as error:
        raise cannot_read(path, error) from None
    if path.is_file():
        split = part_of(path.stem)[1]
        arrays = {name: array for name, array in arrays.items() if part_of(name)[1] == split}
    folder = path if path.is_dir() else path.parent
    return from_named(arrays, str(path), classes_beside(str(folder), Disk()))


def from_named(
    arrays: dict[str, LazyArray], where: str, classes: tuple[str, ...] | None
) -> Collection:
    """Pair images with labels by their names: x_train with y_train, images with labels."""
    parts = {part_of(name): array for name, array in arrays.items()}
    pixels = []
    for (kind, split), array in parts.items():
        if kind != "images":
            continue
        if ("labels", split) not in parts:
            raise DataError(f"{where} has images but no labels{f' for {split}' if split else ''}")
        array = checked(array, where)
        labels = parts["labels", split].values
        if len(labels) != array.shape[0]:
            raise DataError(f"{where} has {array.shape[0]:,} images but {len(labels):,} labels")
        pixels.append(PixelArrays(split, array, labels))
    if not pixels:
        found = ", ".join(arrays)[:200] or "none"
        raise DataError(
            f"{where} needs arrays x_train and y_train, or images and labels; has {found}"
        )
    stated = next((arrays[name] for name in CLASS_NAMES if name in arrays), None)
    return from_pixels(
        pixels, tuple(map(str, stated.values.tolist())) if stated else classes, where
    )


def from_pixels(
    pixels: list[PixelArrays], classes: tuple[str, ...] | None, where: str
) -> Collection:
    """One collection of all arrays; without names, the classes are called by their numbers."""
    pixels = sorted(pixels, key=lambda part: split_order(part.split))
    rows = Rows([(part.name or part.split or "row", part.images.shape[0]) for part in pixels])
    if not len(rows):
        raise DataError(f"{where} holds no pictures")
    written = [label_values(part.labels, where) for part in pixels]
    labels, classes = numbered(written, classes, where)
    split_names = tuple(dict.fromkeys(part.split for part in pixels if part.split))
    stated = [np.full(part.images.shape[0], place(part.split, split_names)) for part in pixels]
    return Collection(
        names=rows,
        labels=labels,
        classes=classes,
        store=PixelStore([part.images for part in pixels], rows),
        split_names=split_names,
        split=np.concatenate(stated).astype(np.uint8) if split_names else None,
    )


def part_of(name: str) -> tuple[str, str]:
    """What an array is by its name: ("images", "train") for x_train or train_images."""
    words = [word for word in re.split(r"[-_]", name.lower()) if word]
    split = next((canonical(word) for word in words if canonical(word) in SPLITS), "")
    rest = [word for word in words if canonical(word) != split or not split]
    if len(rest) == 1 and rest[0] in IMAGES:
        return "images", split
    return ("labels", split) if len(rest) == 1 and rest[0] in LABELS else (name, "other")


def label_values(labels: np.ndarray, where: str) -> np.ndarray:
    """Labels as (N,) numbers or texts, or (N, C) of 0 and 1 where several apply."""
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "f" and np.array_equal(labels, np.rint(labels)):
        labels = labels.astype(np.int64)
    several = labels.ndim == 2 and labels.dtype.kind in "iub" and np.isin(labels, (0, 1)).all()
    if several and (labels.sum(axis=1) == 1).all():
        return labels.argmax(axis=1)  # one-hot
    if not several and (labels.ndim != 1 or labels.dtype.kind not in "iuU"):
        raise DataError(f"{where} has labels of shape {labels.shape} and type {labels.dtype}")
    return labels


def numbered(
    written: list[np.ndarray], classes: tuple[str, ...] | None, where: str
) -> tuple[np.ndarray | LabelSets, tuple[str, ...]]:
    """Labels as numbers of classes, and the classes."""
    if len({labels.ndim for labels in written}) > 1:
        raise DataError(f"{where} has one label per picture in one split and several in another")
    labels = np.concatenate(written)
    if labels.dtype.kind == "U":
        classes = classes or class_order(labels.tolist())
        places = {name: number for number, name in enumerate(classes)}
        lost = next((name for name in labels.tolist() if name not in places), None)
        if lost is not None:
            raise DataError(f"{where}: label {lost!r} is not among {told(classes)}")
        return np.array([places[name] for name in labels.tolist()], np.int32), classes
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=0)) + 1
    classes = classes or tuple(str(number) for number in range(min(count, 1_000_000)))
    if count > len(classes) or (labels.ndim == 1 and labels.min(initial=0) < 0):
        raise DataError(f"{where} has labels outside its {len(classes)} classes")
    if labels.ndim == 1:
        return labels.astype(np.int32), classes
    sets = np.nonzero(labels)[1].astype(np.int32)
    return LabelSets(sets, np.cumsum(labels.astype(bool).sum(axis=1))), classes


def checked(array: LazyArray, where: str) -> LazyArray:
    """Refuse what cannot be pictures; put channels last."""
    shape = array.shape
    if array.dtype != np.uint8:
        raise DataError(
            f"{where} has images of {array.dtype}; pixels from 0 to 255 as uint8 are needed"
        )
    if len(shape) not in (3, 4) or 0 in shape[1:]:
        raise DataError(f"{where} has images of shape {shape}; (N, H, W) or (N, H, W, C) is needed")
    if len(shape) == 3 or shape[3] <= MOST_USUAL:
        return array
    _, first, middle, last = shape
    if first in USUAL or first < min(middle, last):
        order = (shape[0], middle, last, first)
        return LazyArray(order, array.dtype, channels_last, *array.where, array.read)
    if last >= min(first, middle):
        raise DataError(
            f"{where} has images of shape {shape}, which may have {first} channels or {last}; "
            "(N, H, W, C) with fewer channels than rows and columns is needed"
        )
    return array


def channels_last(*where: Any) -> np.ndarray:
    *place, read = where
    return read(*place).transpose(0, 2, 3, 1)
