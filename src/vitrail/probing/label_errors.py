"""Possible label errors and outliers of a dataset, from features: `vitrail check --labels`.

Every image is scored by a closed-form probe that was fitted without it (ridge.py). Confident
learning (Northcutt et al. 2021, arXiv:1911.00068) estimates how many labels are wrong. The
threshold of a class is its mean probability over the images with that label; an image is counted
for the most probable class whose threshold it reaches. The fraction of counted images of a label
that fall into other classes is extrapolated to all images of that label, and that many images with
the smallest margins (logit of the label minus the best other logit) are suspects. The probe is
first fitted a second time without the images that were counted for another class, so that they
cannot confirm each other.

Shapes: N images, D features, K classes.
"""

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints.load import load
from vitrail.data.datasets import ImageDataset, open_splits
from vitrail.data.storage import atomic_path, read_error
from vitrail.data.tar_shards import write_splits
from vitrail.errors import ConfigError, DataError, similar_path
from vitrail.evaluation.calibration import probabilities
from vitrail.probing import ridge
from vitrail.probing.features import features_of, pixels_of

ROUNDS = 2  # fits: on all images, then without those that count for another class
OUTLIERS = 0.02  # of the images are listed as the most unusual ones
COLUMNS = ("name", "split", "index", "label", "suggested", "margin", "action")
CSV: Any = {"errors": "surrogateescape", "newline": ""}  # file names may be any bytes
PIXELS = "pixels"  # instead of a model: the features are small copies of the images
ACTIONS = ("keep", "fix", "drop")


@dataclass(frozen=True, kw_only=True)
class LabelCheck:
    """Images whose label is suspicious, and the most unusual ones; most suspicious first."""

    errors: list[dict[str, Any]]  # name, split, index, label, suggested, margin
    outliers: list[dict[str, Any]]  # name, split, index, label, distance
    accuracy: float  # of the probe on left-out images: how far the suggestions can be trusted
    images: int
    features: str  # features that the probe was fitted to


def check_labels(
    reference: str,
    model: str = PIXELS,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> LabelCheck:
    """Check the labels of all splits, with the features of a model, or pixels."""
    backbone = None if model == PIXELS else load(model)
    parts: list[tuple[str, ImageDataset, Any]] = []
    for split, dataset in open_splits(reference).items():
        if dataset.multi_label:
            raise DataError("the images have several labels; --labels needs one label per image")
        if backbone is None:
            features = pixels_of(dataset, progress=progress, **options)
        else:
            features = features_of(backbone, dataset, progress=progress, **options)
        parts.append((split, dataset, features))
    classes = parts[0][2].classes
    values = np.concatenate([features.values for _, _, features in parts])
    labels = np.concatenate([features.labels for _, _, features in parts])
    rows = [
        {"name": dataset.name(i), "split": split, "index": i, "label": classes[label]}
        for split, dataset, features in parts
        for i, label in zip(features.indices.tolist(), features.labels.tolist(), strict=True)
    ]
    p = out_of_fold(values, labels, len(classes))
    suspects, suggested, margins = confident_learning(p, labels)
    distances = class_distances(values, labels)
    unusual = np.argsort(-distances, kind="stable")[: round(OUTLIERS * len(distances))]
    return LabelCheck(
        errors=[
            rows[i] | {"suggested": classes[suggested[i]], "margin": float(margins[i])}
            for i in suspects
        ],
        outliers=[rows[i] | {"distance": float(distances[i])} for i in unusual],
        accuracy=float((p.argmax(axis=1) == labels).mean()),
        images=len(labels),
        features="32 x 32 pixels" if backbone is None else model,
    )


def out_of_fold(values: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Return probabilities (N, K) by probes that were fitted without the image and suspects."""
    kept, p = np.ones(len(labels), bool), np.zeros((0, classes))
    for _ in range(ROUNDS):
        path = ridge.fit_path(values[kept], labels[kept], classes)
        scores = path.probes[path.best].scores(values)
        scores[torch.from_numpy(kept)] = path.held_out
        p = probabilities(path.scale * scores.numpy(), "softmax")
        counted = confident_classes(p, labels)
        kept = (counted < 0) | (counted == labels)
        counts = np.bincount(labels[kept], minlength=classes)
        if (counts[np.unique(labels)] < 2).any():  # too few images are left of a class
            break
    return p


def confident_classes(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the class that each image counts for, -1 if none. (N,)"""
    counts = np.bincount(labels, minlength=p.shape[1])
    means = [p[labels == k, k].mean() if n else 2.0 for k, n in enumerate(counts)]
    confident = np.where(p >= np.array(means), p, -1.0)
    return np.where(confident.max(axis=1) >= 0, confident.argmax(axis=1), -1)


def confident_learning(
    p: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return suspects by rising margin, and the suggested class and margin of each image (N,)."""
    counted = confident_classes(p, labels)
    every, confident, agreeing = (
        np.bincount(labels[rows], minlength=p.shape[1])
        for rows in (slice(None), counted >= 0, counted == labels)
    )
    wrong = round(float((every * (confident - agreeing) / np.maximum(confident, 1)).sum()))
    others = np.log(np.maximum(p, 1e-12))
    margins = others[np.arange(len(labels)), labels]
    np.put_along_axis(others, labels[:, None], -np.inf, axis=1)
    margins = margins - others.max(axis=1)
    suspects = np.argsort(margins, kind="stable")[:wrong]
    return suspects[margins[suspects] < 0], others.argmax(axis=1), margins


def class_distances(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the distance of each row from the mean of its class. (N,)"""
    distances = np.empty(len(values))
    for k in np.unique(labels):
        rows = labels == k
        distances[rows] = np.linalg.norm(values[rows] - values[rows].mean(axis=0), axis=1)
    return distances


def write_review(errors: list[dict[str, Any]], path: Path) -> None:
    """Write the suspects as CSV, to be reviewed: the column `action` is keep, fix or drop."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", **CSV) as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in errors:
            values = row | {"margin": f"{row['margin']:.4f}", "action": ""}
            writer.writerow(values[name] for name in COLUMNS)


def read_review(review: Path) -> list[tuple[str, int, dict[str, str]]]:
    """Return split, index and columns of each line."""
    try:
        with review.open(encoding="utf-8-sig", **CSV) as file:
            needed = [name for name in COLUMNS if name not in ("label", "margin")]
            table = [{name: row[name] for name in needed} for row in csv.DictReader(file)]
        return [(row["split"], int(row["index"]), row) for row in table]
    except OSError as error:
        hint = similar_path(str(review)) * isinstance(error, FileNotFoundError)
        raise DataError(f"{read_error(review, error)}{hint}") from None
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{review} is not a review of vitrail check --labels: {error!r}; expected the columns "
            f"{', '.join(COLUMNS)}"
        ) from None


def check_unreviewed(review: Path) -> None:
    if review.exists() and any((row["action"] or "").strip() for _, _, row in read_review(review)):
        raise ConfigError(
            f"{review} contains actions, which would be lost; use it with --apply, or pass another "
            "--out"
        )


def apply_review(reference: str, review: Path, folder: Path) -> Counter[str]:
    """Write the dataset as .tar shards with the actions of a reviewed CSV; count the actions.

    Images are found by name, since files may be deleted meanwhile; those not found count as
    missing.
    """
    datasets = open_splits(reference)
    changes: dict[str, dict[int, int | None]] = {split: {} for split in datasets}
    counts = Counter[str]()
    rows = read_review(review)
    places: dict[str, dict[str, list[int]]] = {row["name"]: {} for _, _, row in rows}
    for split, dataset in datasets.items():
        for index in range(len(dataset)):
            if (name := dataset.name(index)) in places:
                places[name].setdefault(split, []).append(index)
    for line, (split, index, row) in enumerate(rows, 2):
        action = (row["action"] or "keep").strip().lower()
        where = f"{review}, line {line}"
        if action not in ACTIONS:
            raise DataError(f"{where}: unknown action {action!r}; expected keep, fix or drop")
        found = places[row["name"]]
        if not found:
            counts["missing"] += 1
            continue
        # Deletions change splits and indices; while they do not, images may share a name.
        split = split if split in found else next(iter(found))
        index = index if index in found[split] else found[split][0]
        if action == "fix" and row["suggested"] not in datasets[split].classes:
            raise DataError(f"{where}: unknown class {row['suggested']!r} in column suggested")
        counts[action] += 1
        if action == "fix":
            changes[split][index] = datasets[split].classes.index(row["suggested"])
        elif action == "drop":
            changes[split][index] = None
    if rows and counts["missing"] == len(rows):
        raise DataError(f"{review}: none of its images is in {reference}; is it the same DATA?")
    if not counts["fix"] + counts["drop"]:
        which = "image that still exists" if counts["missing"] else "line"
        raise DataError(f"{review}: no {which} has an action; write fix or drop into that column")
    if next(folder.glob("*.tar"), None):
        raise ConfigError(f"{folder} already contains .tar files; choose another folder")
    reviewed = {}
    for split, dataset in datasets.items():
        labels, changed = np.array(dataset.index.labels), changes[split]
        for index, label in changed.items():
            labels[dataset.row(index)] = -1 if label is None else label  # -1 is dropped
        kept = [i for i in range(len(dataset)) if changed.get(i, 0) is not None]
        if not kept:
            raise DataError(f"{review} drops every image of split {split!r}; keep at least one")
        index = dataset.index._replace(labels=labels)
        reviewed[split] = ImageDataset(index, dataset.rows).subset(np.array(kept))
    for _ in write_splits(reviewed, folder):
        pass
    return counts
