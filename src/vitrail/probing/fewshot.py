"""The paper's few-shot protocol (section 4.1, big_vision's evaluator), on arrays and on datasets.

`fewshot` takes features and labels. `try_shots` repeats it for numbers of shots, seeds and probes:
for each seed a few images of every class are drawn, a probe is fitted to their features, and
evaluated on all test images.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.datasets import ImageDataset, Splits, evaluation_split, open_dataset
from vitrail.data.provenance import DataProvenance
from vitrail.errors import ConfigError, DataError, unknown
from vitrail.probing.features import Features
from vitrail.probing.probes import Array, NeighborProbe, Probe, check_labels, fit_logistic
from vitrail.probing.ridge import DEFAULT_L2, L2_GRID, RidgeProbe, check_l2, fit, fit_path

Shots = int | Literal["all"]
PROBES = ("ridge", "neighbors", "logistic")
# Student's t, two-sided 95 %, for 1 to 10 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class FewshotResult(NamedTuple):
    """A probe and its predictions of the test rows."""

    accuracy: float
    predicted: Tensor  # (n,) int64, the class of each test row
    weights: Tensor  # (D + 1, C) float64, for whitened features with the constant 100 appended
    l2: float  # the penalty: the given one, or the best of several
    probe: RidgeProbe


def fewshot(
    features_train: Array,
    labels_train: Array,
    features_test: Array,
    labels_test: Array,
    l2: float | Sequence[float] = DEFAULT_L2,
) -> FewshotResult:
    """Fit the paper's closed-form probe to some features and evaluate it on others.

        >>> import torch, vitrail
        >>> labels = torch.arange(40) % 4
        >>> features = torch.eye(4)[labels] + 0.1 * torch.randn(40, 4)
        >>> result = vitrail.fewshot(features[:20], labels[:20], features[20:], labels[20:])
        >>> result.accuracy
        1.0
        >>> result.weights.shape  # D features and a constant, C classes
        torch.Size([5, 4])

    Features are (n, D) tensors or arrays of floats, labels (n,) whole numbers from 0; the
    number of classes is the largest training label plus one. Weights and accuracy are those of
    big_vision, to the last digits of float64. Of several l2, `RidgePath.best` chooses one:
    leave-one-out on the training rows, with a prior at 1024.
    """
    if isinstance(l2, Sequence):
        path = fit_path(features_train, labels_train, l2=l2)
        probe = path.probes[path.best]
    else:
        probe = fit(features_train, labels_train, l2=l2)
    labels = check_labels(labels_test, len(features_test), probe.classes)
    if not len(labels):
        raise DataError("no test rows given; pass at least one")
    predicted = probe.predict(features_test)
    accuracy = int(torch.sum(predicted == labels)) / len(labels)
    return FewshotResult(accuracy, predicted, probe.weights, probe.l2, probe)


class Trial(NamedTuple):
    """Accuracies of one kind of probe at one number of shots, one for each seed."""

    probe: str
    shots: Shots
    accuracies: tuple[float, ...]
    l2: tuple[float, ...] = ()  # of each seed, for ridge

    @property
    def mean(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % CI of the mean over seeds, by Student's t; None with one seed."""
        degrees = len(self.accuracies) - 1
        if degrees < 1:
            return None
        std = float(np.std(self.accuracies, ddof=1))
        half = student_t(degrees) * std / math.sqrt(len(self.accuracies))
        return max(0.0, self.mean - half), min(1.0, self.mean + half)

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval or (None, None)
        return self._asdict() | {"accuracy": self.mean, "low": low, "high": high}


def student_t(degrees: int) -> float:
    """Return Student's t, two-sided 95 %."""
    return STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.5 / degrees


def open_pair(data: str, origin: DataProvenance) -> tuple[ImageDataset, ImageDataset]:
    """Open the training images and the images to evaluate on: test, or else val.

    A dataset that the backbone was trained on keeps the split of that training.
    """
    splits = origin.splits_for(data)
    split = evaluation_split(data, splits=splits)
    if split is None:
        split, splits = "test", Splits(val=0.0, test=0.2)
    return open_dataset(data, "train", splits=splits), open_dataset(data, split, splits=splits)


def draw(labels: np.ndarray, classes: int, shots: Shots, seed: int) -> np.ndarray:
    """Draw rows of `shots` images of each class, as big_vision does."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
    return np.concatenate([part if shots == "all" else part[:shots] for part in rows])


def try_shots(
    train: Features,
    test: Features,
    *,
    shots: Sequence[Shots],
    seeds: int = 3,
    probes: Sequence[str] = ("ridge",),
    l2: float = DEFAULT_L2,
) -> Iterator[list[Trial]]:
    """Yield a trial of each probe for each number of shots; ridge at `l2` and at the best l2."""
    check_protocol(shots, seeds, probes, l2)
    classes = len(train.classes)
    if train.classes != test.classes:
        raise DataError("training and test images have different classes")
    counts = np.bincount(train.labels, minlength=classes)
    if classes < 2 or not counts.all():
        missing = [name for name, count in zip(train.classes, counts, strict=True) if not count]
        what = f"no training images of {missing[0]!r}" if missing else "a single class"
        raise DataError(f"{what}; a probe needs images of each of two classes or more")
    for count in shots:
        results: dict[str, list[tuple[Probe, float]]] = {}
        every = count == "all" or count >= counts.max()  # each draw would have the same images
        for seed in range(1 if every else seeds):
            rows = draw(train.labels, classes, count, seed)
            part = (train.values[rows], train.labels[rows], classes)
            for name in probes:
                fitted: dict[str, Probe] = {}
                if name == "neighbors":
                    fitted[name] = NeighborProbe(*part)
                elif name == "logistic":
                    fitted[name] = fit_logistic(*part)
                else:
                    path = fit_path(*part, l2=sorted({l2, *L2_GRID}))
                    fitted[f"ridge, {l2:g}"] = next(p for p in path.probes if p.l2 == l2)
                    fitted["ridge, best"] = path.probes[path.best]
                for label, probe in fitted.items():
                    results.setdefault(label, []).append((probe, accuracy_of(probe, test)))
        yield [
            Trial(
                probe=label,
                shots=count,
                accuracies=tuple(accuracy for _, accuracy in row),
                l2=tuple(probe.l2 for probe, _ in row if isinstance(probe, RidgeProbe)),
            )
            for label, row in results.items()
        ]


def accuracy_of(probe: Probe, test: Features) -> float:
    return float((probe.predict(test.values).numpy() == test.labels).mean())


def check_protocol(shots: Sequence[Shots], seeds: int, probes: Sequence[str], l2: float) -> None:
    """Check the arguments of `try_shots` before anything is computed."""
    check_l2(l2)
    for count in shots:
        if count != "all" and count < 1:
            raise ConfigError(f"shots={count} must be 1 or more, or all")
    if not shots or seeds < 1:
        raise ConfigError("pass at least one number of shots and one seed")
    for name in probes:
        if name not in PROBES:
            raise unknown("probe", name, PROBES)
