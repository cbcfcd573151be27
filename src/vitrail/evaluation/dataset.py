"""Evaluation data: which split, whether the model was trained on it, and which class is which.

Also ImageNet-ReaL labels (Beyer et al. 2020, arXiv:2006.07159).
"""

import json
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.checkpoints.metadata import Metadata
from vitrail.data.datasets import (
    ALL,
    Dataset,
    LabelSets,
    Sample,
    canonical_split,
    evaluation_split,
    open_dataset,
)
from vitrail.data.provenance import DataProvenance, contains_any, fingerprint
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.results import Predictions
from vitrail.formatting import comma_list

HELD_OUT = ("val", "test")  # splits that models are commonly not trained on
OPTIMISTIC = "the metrics are optimistic"
REAL_NUMBER = re.compile(r"val_(\d{8})\.")


def open_evaluation_split(
    data: Dataset | str | PathLike[str], split: str | None, metadata: Metadata
) -> tuple[Dataset, list[str]]:
    """Open a split, with notes on the choice and warnings if the model may have seen its images.

    A dataset used in training keeps the split of that training.

    Default: test, else val; all of a dataset without stated splits, unless the model was trained
    on it.
    """
    if not isinstance(data, str | PathLike):
        return data, []
    origin = DataProvenance.from_dict(metadata.provenance)
    splits = origin.splits_for(data)
    if split is None:
        index = open_dataset(data, ALL).index
        if index.split_ids is None and splits is None:
            split = ALL
        else:
            last = ALL if index.split_ids is None else index.split_names[0]
            split = evaluation_split(data, splits=splits) or last
    source = open_dataset(data, split, splits=splits)
    notes = [f"split: {split}", *source.notes]
    split = canonical_split(split)
    stated = split == ALL or split in source.index.split_names
    if fingerprint(source) == origin.fingerprint:
        notes.append("the model was trained on exactly these images")
    elif contains_any(source, origin.samples) or (split not in HELD_OUT and origin.is_at(data)):
        notes.append("the model was trained on some of these images")
    elif splits is not None and not stated:  # held out of a train split that may have changed
        if fingerprint(open_dataset(data, "train", splits=origin.splits)) != origin.fingerprint:
            notes.append(
                "the train split has changed since training; the model may have been trained on a "
                "few of these images"
            )
    elif split not in HELD_OUT and not origin.samples:
        notes.append(
            "the model's training data is not recorded; if it contained some of these images, "
            f"{OPTIMISTIC}"
        )
    if taught := [name for name in origin.taught if name in source.classes]:
        notes.append(
            f"the images used to teach {comma_list(taught, quoted=True)} are not recorded; if some "
            f"of them are in this split, {OPTIMISTIC}"
        )
    return source, notes


class RelabeledSource:
    """A source, or some rows of it, whose labels are other class indices: the model's."""

    def __init__(
        self,
        source: Dataset,
        classes: Sequence[str],
        numbers: Sequence[int],
        rows: np.ndarray | None = None,
    ) -> None:
        self.source, self.classes, self.multi_label = source, tuple(classes), source.multi_label
        self.numbers = np.asarray(numbers, np.int64)  # of each class of the source
        self.rows = np.arange(len(source)) if rows is None else rows
        self.in_memory = getattr(source, "in_memory", False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Sample:
        sample = self.source[int(self.rows[index])]
        if isinstance(sample.label, tuple):
            return sample._replace(label=tuple(self.numbers[list(sample.label)].tolist()))
        return sample._replace(label=int(self.numbers[sample.label]))

    def name(self, index: int, /) -> str:
        return self.source.name(int(self.rows[index]))

    def labels(self) -> np.ndarray | LabelSets:
        labels = self.source.labels()
        if isinstance(labels, LabelSets):
            labels = labels.take(self.rows)
            return LabelSets(self.numbers[labels.classes], labels.ends)
        return self.numbers[labels][self.rows]


class ClassMatch(NamedTuple):
    """A source and the logits columns that agree on the classes."""

    source: Dataset
    columns: list[int] | None  # logits to keep, in this order; None: all
    notes: list[str]


def match_classes(
    names: Sequence[str],
    outputs: int,
    source: Dataset,
    *,
    restrict: bool = False,
    by_order: bool = False,
) -> ClassMatch:
    """Match the model's classes (its names, if it has any) with those of a source, by name.

    The source may have a subset of the model's classes. With `restrict`, only those compete, as is
    usual for ImageNet-A and ImageNet-R. `by_order` is for the same classes under other names.
    """
    classes = source.classes
    if not outputs:
        raise ConfigError(
            "the model has no classification head; train one with `vitrail fewshot` or "
            "`vitrail finetune`"
        )
    if by_order or not names:
        if outputs != len(classes):
            raise ConfigError(
                f"class mismatch: the model has {outputs:,} classes and the dataset "
                f"{len(classes):,}: {comma_list(classes, quoted=True)}; expected the same classes"
            )
        reason = "the class names differ" if names else "the model has no class names"
        return ClassMatch(source, None, [f"classes matched by order: {reason}"])
    indices = {name: index for index, name in enumerate(names)}
    unknown = [name for name in classes if name not in indices]
    listed = comma_list(names, quoted=True)
    if len(unknown) == len(classes):
        advice = "pass a dataset with classes of the model"
        if len(classes) == outputs:
            advice = "if these are the same classes in the same order, use --by-order"
            advice += " (Python: by_order=True)"
        raise ConfigError(
            f"class mismatch: the model has {listed} and the dataset "
            f"{comma_list(classes, quoted=True)}; {advice}"
        )
    if unknown:
        raise ConfigError(
            f"classes unknown to the model: {comma_list(unknown, quoted=True)}; it has {listed}"
        )
    numbers = [indices[name] for name in classes]
    if tuple(names) == tuple(classes):
        return ClassMatch(source, None, [])
    if restrict or len(classes) == outputs:
        excluded = outputs - len(classes)
        notes = [f"{excluded:,} of the model's classes are excluded"] if excluded else []
        return ClassMatch(source, numbers, notes)
    note = f"the dataset has {len(classes):,} of the model's {outputs:,} classes"
    return ClassMatch(RelabeledSource(source, names, numbers), None, [note])


def read_real_labels(path: Path) -> list[list[int]]:
    """Read ImageNet-ReaL: the classes that annotators assigned to each of the 50,000 validation
    images."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as ReaL labels: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, list) for entry in entries):
        raise DataError(f"{path} must be a JSON list with a list of classes for each image")
    return entries


def real_correct(
    entries: Sequence[Sequence[int]], match: ClassMatch, predictions: Predictions
) -> np.ndarray:
    """Whether the top-1 class is a ReaL label, for each image that has any: bool.

    Labels are indices of the model's classes in ImageNet's order.
    """
    best = predictions.logits.argmax(axis=1)
    if match.columns is not None:
        best = np.asarray(match.columns)[best]
    best[np.isnan(predictions.logits).any(axis=1)] = -1  # wrong, as in the accuracy
    correct = []
    for predicted, index in zip(best.tolist(), predictions.indices.tolist(), strict=True):
        name = match.source.name(index)
        number = REAL_NUMBER.search(name)
        if number is None or not 1 <= int(number[1]) <= len(entries):
            raise DataError(
                f"no ReaL label for {name!r}: --real needs ImageNet validation images, such as "
                "ILSVRC2012_val_00000001.JPEG"
            )
        if labels := entries[int(number[1]) - 1]:
            correct.append(predicted in labels)
    if not correct:
        raise DataError("none of these images has a ReaL label")
    return np.array(correct)
