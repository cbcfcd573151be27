"""Evaluation results: one type for the quick evaluation during training and for the full one.

Shapes: N images, B images of a batch, K classes.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.data.datasets import Dataset, Label
from vitrail.errors import DataError, renamed_attribute, warn_renamed
from vitrail.evaluation.metrics import Estimate, LossKind, SampleScores, score_samples

MAX_MISTAKES = 24  # kept, and shown on a page
MAX_CONFUSION_CLASSES = 1000  # larger confusion matrices are not kept: 8 MB
MAX_JSON_CLASSES = 100  # larger confusion matrices are not written to JSON
SCORE_BATCH = 1024
MISTAKE_KEYS = ("index", "name", "label", "predicted", "confidence", "chance")  # in JSON
CLASS_KEYS = ("name", "pictures", "precision", "recall", "f1", "average_precision")


class ClassMetrics(NamedTuple):
    """Metrics of one class; an undefined value, such as the recall of no images, is NaN."""

    name: str
    support: int  # images with this label
    precision: float
    recall: float
    f1: float
    average_precision: float | None = None  # multi-label data only

    pictures = renamed_attribute("pictures", "support")


@dataclass(frozen=True, slots=True)
class Mistake:
    """An image with a wrong top-1 prediction."""

    index: int  # in the source
    name: str
    label: Label  # true class, or all classes that apply
    predicted: int
    confidence: float  # probability of the predicted class
    label_probability: float  # of the most likely label if there are several

    chance = renamed_attribute("chance", "label_probability")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Reliability diagram and calibration metrics (Guo et al. 2017, arXiv:1706.04599).

    Bins are of equal width; a confidence on an edge belongs to the lower bin.
    """

    edges: np.ndarray  # (bins + 1,) from 0 to 1
    counts: np.ndarray  # int64 (bins,) predictions
    confidence: np.ndarray  # (bins,) mean confidence; NaN in an empty bin
    accuracy: np.ndarray  # (bins,) NaN in an empty bin
    ece: float  # expected calibration error
    brier: float  # squared error of the probabilities, summed over classes
    temperature: float  # divisor of the logits with the least NLL
    ece_scaled: float  # ECE after temperature scaling, cross-fitted on two halves


class SelectiveAccuracy(NamedTuple):
    """Accuracy by coverage: the model abstains on all but its most confident predictions."""

    coverage: np.ndarray  # (points,) rising to 1
    accuracy: np.ndarray  # (points,)

    def at(self, coverage: float) -> float:
        """Return the accuracy at the first point with at least this coverage."""
        index = int(np.searchsorted(self.coverage, coverage - 1e-9))
        return float(self.accuracy[min(index, len(self.accuracy) - 1)])


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Logits of every image that could be read, in the order of the source."""

    classes: tuple[str, ...]  # columns of the logits
    logits: np.ndarray  # float32 (N, K)
    labels: np.ndarray  # int64 (N,), or bool (N, K) for multi-label data
    indices: np.ndarray  # int64 (N,), in the source
    loss: LossKind = "softmax"
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images, and why

    @property
    def multi_label(self) -> bool:
        return self.labels.ndim == 2

    @cached_property
    def scores(self) -> SampleScores:
        """Scores of each image; all metrics are computed from them."""
        loss = "sigmoid" if self.multi_label else self.loss
        batches = [
            score_samples(torch.tensor(self.logits[rows]), torch.tensor(self.labels[rows]), loss)
            for rows in (slice(n, n + SCORE_BATCH) for n in range(0, len(self.labels), SCORE_BATCH))
        ]
        return SampleScores(*(torch.cat(column) for column in zip(*batches, strict=True)))


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Metrics of a model on a dataset; the quick evaluation leaves the second half empty."""

    samples: int  # images that could be read
    accuracy: float  # top-1; with several labels, the top-1 class is one of them
    top5: float | None  # None below 6 classes
    loss: float  # mean
    balanced_accuracy: float = math.nan  # mean recall of classes with images; NaN if multi-label
    confusion: np.ndarray | None  # int64 (K, K), rows are labels, columns predictions
    mistakes: tuple[Mistake, ...] = ()  # most confident first
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images, and why

    estimates: dict[str, Estimate] = field(default_factory=dict)  # accuracy, top5, loss, ece, …
    classes: tuple[ClassMetrics, ...] = ()
    calibration: Calibration | None = None  # None for multi-label data
    selective: SelectiveAccuracy | None = None  # the same
    notes: tuple[str, ...] = ()  # decisions made for the user, and warnings
    predictions: Predictions | None = None

    @property
    def outcome(self) -> "EvaluationResult":
        """The result itself; 0.1 had a separate object for the quick evaluation."""
        warn_renamed(".outcome.loss", ".loss")
        return self

    @property
    def multi_label(self) -> bool:
        return any(c.average_precision is not None for c in self.classes)

    @property
    def accuracy_at_80(self) -> float:
        """Selective accuracy at 80 % coverage; NaN if unknown."""
        known = self.estimates.get("accuracy_at_80")
        return math.nan if known is None else known.value

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; a large confusion matrix is left out, NaN and inf become None."""
        large = self.confusion is not None and len(self.confusion) > MAX_JSON_CLASSES
        values: dict[str, Any] = {
            "samples": self.samples,
            "accuracy": self.accuracy,
            "top5": self.top5,
            "loss": self.loss,
            "confusion": None if large else self.confusion,
            "mistakes": [dict(zip(MISTAKE_KEYS, astuple(m), strict=True)) for m in self.mistakes],
            "skipped": self.skipped,
        }
        if self.estimates:
            values["estimates"] = {name: e._asdict() for name, e in self.estimates.items()}
            values["classes"] = [dict(zip(CLASS_KEYS, c, strict=True)) for c in self.classes]
            if self.calibration is not None:
                values["calibration"] = vars(self.calibration)
            if self.selective is not None:
                values["selective"] = self.selective._asdict()
            values["notes"] = self.notes
        return to_json(values)


def to_json(value: Any) -> Any:
    """Turn arrays and tuples into lists, and NaN and inf, which JSON lacks, into None."""
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarize(
    scores: SampleScores,
    labels: np.ndarray,
    indices: np.ndarray,
    classes: int,
    source: Dataset,
    skipped: dict[str, str],
) -> EvaluationResult:
    """Accuracy, loss, confusion and mistakes of scored images, whose order does not matter.

    Labels are int64 (N,), or bool (N, K) for multi-label data; indices (N,) are in the source.
    """
    samples, multi_label = len(indices), labels.ndim == 2
    if not samples:
        raise no_readable_images(len(source), skipped)
    predicted, rank, confidence, label_probability = (x.numpy() for x in scores[1:])
    confusion, balanced = None, math.nan
    if not multi_label:
        hits = np.bincount(labels[predicted == labels], minlength=classes)
        support = np.bincount(labels, minlength=classes)
        balanced = float((hits[support > 0] / support[support > 0]).mean())
    if classes <= MAX_CONFUSION_CLASSES and not multi_label:
        confusion = np.bincount(labels * classes + predicted, minlength=classes**2)
        confusion = confusion.reshape(classes, classes)
    wrong = np.flatnonzero(rank > 0)
    certainty = np.nan_to_num(confidence[wrong], nan=-math.inf)
    mistakes = wrong[np.lexsort((indices[wrong], -certainty))[:MAX_MISTAKES]]
    return EvaluationResult(
        samples=samples,
        accuracy=int((rank == 0).sum()) / samples,
        top5=int((rank < 5).sum()) / samples if classes > 5 else None,
        loss=float(scores.loss.double().sum()) / samples,
        balanced_accuracy=balanced,
        confusion=confusion,
        mistakes=tuple(
            Mistake(
                index=int(indices[n]),
                name=source.name(int(indices[n])),
                label=tuple(labels[n].nonzero()[0].tolist()) if multi_label else int(labels[n]),
                predicted=int(predicted[n]),
                confidence=float(confidence[n]),
                label_probability=float(label_probability[n]),
            )
            for n in mistakes.tolist()
        ),
        skipped=dict(skipped),
    )


def no_readable_images(total: int, skipped: Mapping[str, str]) -> DataError:
    detail = next((f": {name}: {reason}" for name, reason in skipped.items()), "")
    return DataError(f"none of {total:,} images could be read{detail}")
