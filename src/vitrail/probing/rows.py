"""Features and labels as they come: checked, and read as float64 and scored a piece at a time.

Features may be a tensor or an array (also one that is mapped from a file), of any float type and on
any device. Nothing here makes a whole copy of them.

Shapes: n rows, D features, C classes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import DataError

Features = Tensor | np.ndarray
Labels = Tensor | np.ndarray

CHUNK = 1024  # rows at a time: 6 MB at 768 features, and long enough for fast products
MOST = 2**23  # numbers made of a chunk, 64 MB: with very many classes, chunks are shorter


@dataclass(frozen=True, eq=False)
class Rows:
    """Features with their labels, which fit each other."""

    features: Features  # (n, D)
    labels: Tensor  # (n,) int64
    classes: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        return self.features.shape[1]

    def counts(self) -> Tensor:
        """Examples of each class. (C,)"""
        return torch.bincount(self.labels, minlength=self.classes)


def check(features: Features, labels: Labels, classes: int | None = None) -> Rows:
    """Rows to fit a probe to, with `classes` classes or as many as the labels say."""
    check_features(features)
    known = check_labels(labels, len(features), classes)
    found = known.unique()
    if len(found) < 2:
        raise DataError(
            f"all {len(known)} labels are {int(found[0])}; a probe needs examples of two classes"
            if len(known)
            else "there are no rows to fit a probe to; it needs examples of two classes"
        )
    return Rows(features, known, int(found[-1]) + 1 if classes is None else classes)


def check_features(features: Features, width: int | None = None) -> None:
    """A `DataError` unless they are (n, D) floats, with D = `width` if that is given."""
    if features.ndim != 2 or not features.shape[1]:
        raise DataError(f"features have shape {tuple(features.shape)}; (rows, features) is needed")
    if width is not None and features.shape[1] != width:
        raise DataError(f"rows have {features.shape[1]} features; the probe was fitted on {width}")
    if isinstance(features, Tensor):
        floating = features.is_floating_point()
    else:
        floating = np.issubdtype(features.dtype, np.floating)
    if not floating:
        raise DataError(f"features are {features.dtype}; floats are needed")


def check_labels(labels: Labels, rows: int, classes: int | None = None) -> Tensor:
    """The labels as an int64 tensor, one for each of `rows`, below `classes` if that is given."""
    known = labels.detach().cpu() if isinstance(labels, Tensor) else torch.tensor(labels)
    if known.is_floating_point() or known.is_complex() or known.dtype == torch.bool:
        raise DataError(f"labels are {labels.dtype}; whole numbers from 0 are needed")
    if known.ndim != 1 or len(known) != rows:
        raise DataError(f"{rows} rows of features and labels of shape {tuple(known.shape)} differ")
    known = known.long()
    if rows and known.min() < 0:
        raise DataError(f"label {int(known.min())} is negative; labels count from 0")
    if rows and classes is not None and known.max() >= classes:
        raise DataError(f"label {int(known.max())} is not among {classes} classes from 0")
    return known


def chunks(features: Features, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Which rows, and those rows: float64 on the CPU, the caller's to change."""
    size = size or CHUNK
    for start in range(0, len(features), size):
        part = features[start : start + size]
        if isinstance(part, Tensor):
            rows = part.detach().to("cpu", torch.float64, copy=True)
        else:
            rows = torch.from_numpy(part.astype(np.float64))
        if not rows.sum().isfinite():
            bad = start + int((~rows.isfinite()).any(1).nonzero()[0])
            raise DataError(f"features of row {bad} are not finite; leave that row out")
        yield slice(start, start + len(rows)), rows


def whole(features: Features) -> Tensor:
    """All rows in float64, where there are few."""
    return next(chunks(features, len(features)))[1]


def rows_at_once(made: int) -> int:
    """How long a chunk may be where so many numbers are made of each row."""
    return max(1, min(CHUNK, MOST // made))


def joined(parts: Iterable[tuple[slice, Tensor]], rows: int, classes: int) -> Tensor:
    """The scores of all rows, from those of one chunk after the other. (n, C)"""
    found = torch.empty(rows, classes, dtype=torch.float64)
    for place, scores in parts:
        found[place] = scores
    return found


def likeliest(parts: Iterable[tuple[slice, Tensor]], rows: int) -> Tensor:
    """The class with the highest score of each row, the first of equal ones. (n,)

    Scores (m, C) are forgotten chunk by chunk: all of them may be more than there is room for.
    """
    found = torch.empty(rows, dtype=torch.int64)
    for place, scores in parts:
        found[place] = scores.argmax(1)
    return found
