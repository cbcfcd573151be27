"""What an evaluation tells: numbers with their uncertainty, and what they come from.

`Outcome` is what is cheap enough to be looked at during training; `Findings` is all there is to say
about a model on a data set, made from what it said about every picture (`Predictions`).

Shapes: N pictures, K classes.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.evaluation.outcome import Loss, Outcome, Scores, number, score

AT_ONCE = 1024  # rows of logits that are scored together


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a model said about every picture that could be read, in the order of the source."""

    classes: tuple[str, ...]  # what the columns of the logits stand for
    logits: np.ndarray  # float32 (N, K)
    labels: np.ndarray  # int64 (N,), or bool (N, K) where several classes may apply
    indices: np.ndarray  # int64 (N,), places in the source
    loss: Loss = "softmax"
    skipped: dict[str, str] = field(default_factory=dict)  # pictures that could not be read

    @property
    def multi_label(self) -> bool:
        return self.labels.ndim == 2

    @cached_property
    def scores(self) -> Scores:
        """What is known of each picture; all numbers come from here. Of one picture at least."""
        loss = "sigmoid" if self.multi_label else self.loss
        parts = [
            score(torch.tensor(self.logits[rows]), torch.tensor(self.labels[rows]), loss)
            for rows in (slice(n, n + AT_ONCE) for n in range(0, len(self.labels), AT_ONCE))
        ]
        return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


class Estimate(NamedTuple):
    """A number, and where it lies 19 times of 20 when other pictures of the kind are drawn."""

    value: float
    low: float
    high: float


class ClassFinding(NamedTuple):
    """How one class does. What cannot be said, as the recall of no pictures, is NaN."""

    name: str
    pictures: int  # that show it
    precision: float  # share that is right of what was taken for it
    recall: float  # share that was found
    f1: float
    average_precision: float | None = None  # where several classes may apply


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Whether a model that is 80 % sure is right 8 times of 10.

    Bins are of equal width; a confidence on an edge belongs to the lower bin.
    """

    edges: np.ndarray  # (bins + 1,) from 0 to 1
    counts: np.ndarray  # int64 (bins,) predictions in each
    confidence: np.ndarray  # (bins,) their mean confidence; NaN in an empty bin
    accuracy: np.ndarray  # (bins,) the share that was right; NaN in an empty bin
    ece: float  # expected calibration error (Guo et al. 2017): mean gap, by the bins' counts
    brier: float  # mean squared distance of the probabilities from the truth, summed over classes
    temperature: float  # the number by which logits are best divided (least log loss)
    ece_scaled: float  # what is left of the error: each half scaled by the other half's temperature


@dataclass(frozen=True, kw_only=True)
class Selective:
    """How accurate a model is on the pictures it is surest of."""

    coverage: np.ndarray  # (points,) rising to 1: shares of the pictures that are answered
    accuracy: np.ndarray  # (points,) accuracy on those


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything there is to say about a model on a data set."""

    outcome: Outcome
    estimates: dict[str, Estimate]  # accuracy, top5, loss, ece, …; what there is for the task
    classes: tuple[ClassFinding, ...]
    calibration: Calibration | None = None  # None where several classes may apply
    selective: Selective | None = None  # the same
    notes: tuple[str, ...] = ()  # what was done on the user's behalf
    predictions: Predictions | None = None

    @property
    def accuracy(self) -> float:
        return self.outcome.accuracy

    @property
    def samples(self) -> int:
        return self.outcome.samples

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        found: dict[str, Any] = self.outcome.to_dict()
        found["estimates"] = {
            name: {"value": number(e.value), "low": number(e.low), "high": number(e.high)}
            for name, e in self.estimates.items()
        }
        found["classes"] = [
            {key: number(x) if isinstance(x, float) else x for key, x in c._asdict().items()}
            for c in self.classes
        ]
        if self.calibration is not None:
            found["calibration"] = plain(self.calibration)
        if self.selective is not None:
            found["selective"] = plain(self.selective)
        return found | {"notes": list(self.notes)}


def plain(values: Calibration | Selective) -> dict[str, Any]:
    """The fields as numbers and lists; what is not finite as None."""
    return {
        name: number(value)
        if isinstance(value, float)
        else [number(x) if isinstance(x, float) else x for x in value.tolist()]
        for name, value in vars(values).items()
    }
