"""What an evaluation finds, and the sums it is made of.

A picture counts once, whatever the batch size and the number of processes: counts are whole
numbers, losses are summed in float64, and of two classes with equal logits the first one wins, so
that a model that knows nothing gets no more than chance.

Shapes: B pictures, K classes.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.samples import Label, Source
from vitrail.distributed import all_gather_object, all_reduce_sum
from vitrail.evaluation.passes import none_read

Loss = Literal["softmax", "sigmoid"]

MOST_MISTAKES = 24  # that are kept, and shown on a page
MOST_CONFUSED = 1000  # classes up to which a confusion matrix is kept: 8 MB
MOST_WRITTEN = 100  # classes up to which it goes into JSON


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong answer."""

    index: int  # place in the source
    name: str
    label: Label  # the true class, or all classes that apply
    predicted: int
    confidence: float  # probability of the predicted class
    chance: float  # probability of the true class; of the likeliest, if there are several


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a model does on a data set."""

    samples: int  # pictures that could be read
    accuracy: float  # share whose likeliest class is right: theirs, or one of theirs
    top5: float | None  # share with a right one among the five likeliest; None below 6 classes
    loss: float  # mean
    confusion: np.ndarray | None  # int64 (K, K), rows are the truth, columns the prediction
    mistakes: tuple[Mistake, ...] = ()  # the most confident first
    skipped: dict[str, str]  # pictures that could not be read, and why

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file; the confusion matrix only if it is small."""
        small = self.confusion is not None and len(self.confusion) <= MOST_WRITTEN
        return {
            "samples": self.samples,
            "accuracy": self.accuracy,
            "top5": self.top5,
            "loss": number(self.loss),
            "confusion": self.confusion.tolist() if small and self.confusion is not None else None,
            "mistakes": [plain(mistake) for mistake in self.mistakes],
            "skipped": dict(self.skipped),
        }


class Scores(NamedTuple):
    """What is known of each picture of a batch."""

    loss: Tensor  # (B,)
    predicted: Tensor  # (B,)
    position: Tensor  # (B,) classes that are likelier than the likeliest true one
    confidence: Tensor  # (B,)
    chance: Tensor  # (B,)


class Tally:
    """Sums over batches, on the way to an `Outcome`."""

    def __init__(self, classes: int, *, multi_label: bool = False, loss: Loss = "softmax") -> None:
        self.classes = classes
        self.multi_label = multi_label
        self.loss: Loss = "sigmoid" if multi_label else loss
        self.counts = np.zeros(3, np.int64)  # pictures, right ones, right among the first five
        self.total_loss = 0.0
        few = classes <= MOST_CONFUSED and not multi_label
        self.confusion = np.zeros((classes, classes), np.int64) if few else None
        self.mistakes: list[Mistake] = []  # without their names, which the source knows

    def add(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """A batch: logits (B, K), labels (B,) or (B, K) zeros and ones, places (B,)."""
        assert logits.shape == (len(indices), self.classes), "a row for each, a column for each"
        if len(indices):
            labels = labels.to(logits.device)
            scores = Scores(*(x.cpu() for x in score(logits, labels, self.loss)))
            self.count(scores, labels.cpu(), indices.cpu())

    def count(self, scores: Scores, labels: Tensor, indices: Tensor) -> None:
        """What is known of some pictures already; all on the CPU."""
        self.counts += [
            len(indices),
            int((scores.position == 0).sum()),
            int((scores.position < 5).sum()),
        ]
        self.total_loss += float(scores.loss.double().sum())
        if self.confusion is not None:
            np.add.at(self.confusion, (labels.numpy(), scores.predicted.numpy()), 1)
        self.remember(scores, labels, indices)

    def remember(self, scores: Scores, labels: Tensor, indices: Tensor) -> None:
        """Keep the worst of the batch's wrong answers."""
        wrong = (scores.position > 0).nonzero().flatten()
        order = scores.confidence[wrong].argsort(descending=True, stable=True)
        for row in wrong[order[:MOST_MISTAKES]].tolist():
            truth = labels[row]
            label = tuple(truth.nonzero().flatten().tolist()) if truth.ndim else int(truth)
            mistake = Mistake(
                int(indices[row]),
                "",
                label,
                int(scores.predicted[row]),
                float(scores.confidence[row]),
                float(scores.chance[row]),
            )
            self.mistakes.append(mistake)
        self.mistakes = worst(self.mistakes)

    def reduce(self) -> None:
        """The sums and the worst mistakes of all processes; each gets the same."""
        self.counts = all_reduce_sum(torch.from_numpy(self.counts)).cpu().numpy()
        total = torch.tensor([self.total_loss], dtype=torch.float64)
        self.total_loss = float(all_reduce_sum(total))
        if self.confusion is not None:
            self.confusion = all_reduce_sum(torch.from_numpy(self.confusion)).cpu().numpy()
        found = all_gather_object(self.mistakes)
        self.mistakes = worst([mistake for part in found for mistake in part])

    def finish(self, source: Source, skipped: dict[str, str]) -> Outcome:
        """The outcome of what was added; a `DataError` if that is nothing."""
        samples, right, among_five = map(int, self.counts)
        if not samples:
            raise none_read(len(source), skipped)
        return Outcome(
            samples=samples,
            accuracy=right / samples,
            top5=among_five / samples if self.classes > 5 else None,
            loss=self.total_loss / samples,
            confusion=self.confusion,
            mistakes=tuple(replace(m, name=source.name(m.index)) for m in self.mistakes),
            skipped=dict(skipped),
        )


def score(logits: Tensor, labels: Tensor, loss: Loss) -> Scores:
    """Loss, prediction and probabilities of each picture, on the logits' device.

    A picture without any true class, and one whose logits are not numbers, is wrong. The latter is
    taken for the first class that is wrong, without confidence: every picture is in the confusion
    matrix, and on its diagonal are the right ones.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    several = labels.ndim == 2
    ordered = logits.nan_to_num(nan=-math.inf)
    best = ordered.masked_fill(labels == 0, -math.inf).argmax(1) if several else labels  # (B,)
    at_best = ordered.gather(1, best[:, None])  # (B, 1)
    before = torch.arange(logits.shape[1], device=logits.device) < best[:, None]  # (B, K)
    position = ((ordered > at_best) | ((ordered == at_best) & before)).sum(1)
    broken = logits.isnan().any(1)
    hopeless = broken | ~labels.bool().any(1) if several else broken
    position = position.masked_fill(hopeless, logits.shape[1])
    first_wrong = (labels == 0).int().argmax(1) if several else (labels == 0).long()
    first_wrong = first_wrong.clamp_max(logits.shape[1] - 1)  # of a single class none is wrong
    predicted = torch.where(broken, first_wrong, ordered.argmax(1))
    chances = logits.sigmoid() if loss == "sigmoid" else logits.softmax(1)  # (B, K)
    confidence = chances.gather(1, predicted[:, None])[:, 0].masked_fill(broken, math.nan)
    chance = chances.gather(1, best[:, None])[:, 0]
    if several:
        chance = chance.masked_fill(~labels.bool().any(1), 0.0)
    return Scores(losses(logits, labels, loss), predicted, position, confidence, chance)


def losses(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Of each picture: softmax cross-entropy, or that of each class's sigmoid, summed. (B,)"""
    if loss == "softmax":
        return F.cross_entropy(logits, labels, reduction="none")
    several = labels.ndim == 2
    targets = (labels if several else F.one_hot(labels, logits.shape[1])).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)


def worst(mistakes: list[Mistake]) -> list[Mistake]:
    """The most confident ones; of equal ones those that come first in the source."""

    def badness(mistake: Mistake) -> tuple[float, int]:
        confidence = mistake.confidence
        return (math.inf if math.isnan(confidence) else -confidence, mistake.index)

    return sorted(mistakes, key=badness)[:MOST_MISTAKES]


def plain(mistake: Mistake) -> dict[str, Any]:
    label = mistake.label
    return {
        "index": mistake.index,
        "name": mistake.name,
        "label": list(label) if isinstance(label, tuple) else label,
        "predicted": mistake.predicted,
        "confidence": number(mistake.confidence),
        "chance": number(mistake.chance),
    }


def number(value: float) -> float | None:
    """JSON has no words for what is not finite."""
    return value if math.isfinite(value) else None
