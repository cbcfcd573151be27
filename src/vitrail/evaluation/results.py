"""Evaluation results: one type for the quick evaluation during training and for the full one.

Shapes: N images, B images of a batch, K classes.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.datasets import Dataset, Label
from vitrail.distributed import all_gather_object, all_reduce_sum
from vitrail.errors import DataError
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


@dataclass(frozen=True, slots=True)
class Mistake:
    """An image with a wrong top-1 prediction."""

    index: int  # in the source
    name: str
    label: Label  # true class, or all classes that apply
    predicted: int
    confidence: float  # probability of the predicted class
    label_probability: float  # of the most likely label if there are several


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
    """Accuracy over coverage: only the most confident share of the images is answered."""

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


class ResultAccumulator:
    """Sums over batches and processes.

    Each image counts once, whatever the batch size and the number of processes: counts are
    integers and losses are summed in float64.
    """

    def __init__(
        self, classes: int, *, multi_label: bool = False, loss: LossKind = "softmax"
    ) -> None:
        self.classes = classes
        self.loss: LossKind = "sigmoid" if multi_label else loss
        self.counts = np.zeros(3, np.int64)  # images, correct, correct among the top 5
        self.total_loss = 0.0
        keep = classes <= MAX_CONFUSION_CLASSES and not multi_label
        self.confusion = np.zeros((classes, classes), np.int64) if keep else None
        self.mistakes: list[Mistake] = []  # without names; `finish` looks them up

    def update(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Add a batch: logits (B, K), labels (B,) or 0/1 labels (B, K), indices (B,)."""
        assert logits.shape == (len(indices), self.classes)
        if len(indices):
            labels = labels.to(logits.device)
            scores = SampleScores(*(x.cpu() for x in score_samples(logits, labels, self.loss)))
            self.update_scores(scores, labels.cpu(), indices.cpu())

    def update_scores(self, scores: SampleScores, labels: Tensor, indices: Tensor) -> None:
        """Add images that are scored already; all tensors are on the CPU."""
        wrong = scores.rank > 0
        self.counts += [len(indices), int((~wrong).sum()), int((scores.rank < 5).sum())]
        self.total_loss += float(scores.loss.double().sum())
        if self.confusion is not None:
            np.add.at(self.confusion, (labels.numpy(), scores.predicted.numpy()), 1)
        rows = wrong.nonzero().flatten()
        order = scores.confidence[rows].argsort(descending=True, stable=True)
        for row in rows[order[:MAX_MISTAKES]].tolist():
            truth = labels[row]
            self.mistakes.append(
                Mistake(
                    index=int(indices[row]),
                    name="",
                    label=tuple(truth.nonzero().flatten().tolist()) if truth.ndim else int(truth),
                    predicted=int(scores.predicted[row]),
                    confidence=float(scores.confidence[row]),
                    label_probability=float(scores.label_probability[row]),
                )
            )
        self.mistakes = most_confident(self.mistakes)

    def reduce(self) -> None:
        """Combine all processes; each gets the same values."""
        self.counts = all_reduce_sum(torch.from_numpy(self.counts)).cpu().numpy()
        self.total_loss = float(
            all_reduce_sum(torch.tensor([self.total_loss], dtype=torch.float64))
        )
        if self.confusion is not None:
            self.confusion = all_reduce_sum(torch.from_numpy(self.confusion)).cpu().numpy()
        gathered = all_gather_object(self.mistakes)
        self.mistakes = most_confident([mistake for part in gathered for mistake in part])

    def finish(self, source: Dataset, skipped: dict[str, str]) -> EvaluationResult:
        samples, correct, among_five = map(int, self.counts)
        if not samples:
            raise no_readable_images(len(source), skipped)
        return EvaluationResult(
            samples=samples,
            accuracy=correct / samples,
            top5=among_five / samples if self.classes > 5 else None,
            loss=self.total_loss / samples,
            confusion=self.confusion,
            mistakes=tuple(replace(m, name=source.name(m.index)) for m in self.mistakes),
            skipped=dict(skipped),
        )


def most_confident(mistakes: list[Mistake]) -> list[Mistake]:
    """The most confident mistakes; ties in the order of the source, NaN last."""
    order = sorted(
        mistakes, key=lambda m: (math.inf if math.isnan(m.confidence) else -m.confidence, m.index)
    )
    return order[:MAX_MISTAKES]


def no_readable_images(total: int, skipped: Mapping[str, str]) -> DataError:
    detail = next((f": {name}: {reason}" for name, reason in skipped.items()), "")
    return DataError(f"none of {total:,} images could be read{detail}")
