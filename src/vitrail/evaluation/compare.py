"""Compare two models on the same images: paired difference, McNemar's test, changed predictions.

Both models see the same images, so most of the sampling error cancels: only images that exactly one
of them classifies correctly show which model is better.

Shapes: N images.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vitrail.errors import DataError
from vitrail.evaluation.conformal import binomial_cdf
from vitrail.evaluation.results import Estimate, EvaluationResult, to_json

LEVEL = 0.01  # of the verdict; at 0.05, two seeds of a run would often differ (docs/reliability.md)


class ClassChange(NamedTuple):
    """Images of one class that one of the models classifies correctly."""

    name: str
    support: int
    gained: int  # correct by B alone
    lost: int  # correct by A alone
    p_value: float  # of McNemar's test


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Model B relative to model A."""

    samples: int  # images that both could read
    accuracy: tuple[float, float]
    difference: Estimate  # of accuracy, B minus A
    p_value: float  # of McNemar's exact test
    agreement: float  # share of images with the same top-1 class
    ece: tuple[float, float]
    classes: tuple[ClassChange, ...]
    gained: np.ndarray  # indices in the dataset of images that B alone classifies correctly
    lost: np.ndarray  # A alone
    indices: np.ndarray  # (N,) of all compared images
    predicted: tuple[tuple[str, ...], tuple[str, ...]]  # classes of A and B, (N,) each
    labels: tuple[str, ...]  # (N,)

    @property
    def verdict(self) -> str:
        """`B is less accurate: -2.1 points (95 % CI -3.3 to -0.9, McNemar p=0.0004)`."""
        value, low, high = (100 * bound for bound in self.difference)
        numbers = (
            f"{value:+.1f} points (95 % CI {low:+.1f} to {high:+.1f}, McNemar p={self.p_value:.2g})"
        )
        if self.p_value < LEVEL:
            return f"B is {'more' if value > 0 else 'less'} accurate: {numbers}"
        return f"no significant difference (1 % level): {numbers}"

    def to_dict(self) -> dict[str, Any]:
        flips = {
            name: [{"index": i, **self.at(i)} for i in rows.tolist()]
            for name, rows in (("gained", self.gained), ("lost", self.lost))
        }
        names = ("samples", "accuracy", "p_value", "agreement", "ece", "verdict")
        values = {name: getattr(self, name) for name in names}
        values["difference"] = self.difference._asdict()
        values["classes"] = [change._asdict() for change in self.classes]
        return to_json(values | flips)

    def at(self, index: int) -> dict[str, str]:
        """Return the label and both predictions of an image."""
        row = int(np.searchsorted(self.indices, index))
        return {"label": self.labels[row], "a": self.predicted[0][row], "b": self.predicted[1][row]}


def compare_results(first: EvaluationResult, second: EvaluationResult) -> Comparison:
    """Compare two evaluations of the same dataset, on the images that both models could read."""
    a, b = first.predictions, second.predictions
    assert a is not None
    assert b is not None
    if not (first.calibration and second.calibration):
        raise DataError("the comparison needs single-label data; these images have several labels")
    shared, rows_a, rows_b = np.intersect1d(a.indices, b.indices, return_indices=True)
    labels = np.array(a.classes)[a.labels[rows_a]]
    predicted = [
        np.array(part.classes)[part.scores.predicted.numpy()[rows]]
        for part, rows in ((a, rows_a), (b, rows_b))
    ]
    correct = [names == labels for names in predicted]
    gained, lost = correct[1] & ~correct[0], correct[0] & ~correct[1]
    classes = []
    for name in np.unique(labels):
        own = labels == name
        plus, minus = int(gained[own].sum()), int(lost[own].sum())
        classes.append(ClassChange(str(name), int(own.sum()), plus, minus, mcnemar(plus, minus)))
    more, less, n = int(gained.sum()), int(lost.sum()), len(shared) + 2
    # Agresti & Min 2005: Wald's interval after adding half an image to each cell of the table.
    value, middle = (more - less) / len(shared), (more - less) / n
    spread = 1.96 * math.sqrt(more + less + 1 - (more - less) ** 2 / n) / n
    return Comparison(
        samples=len(shared),
        accuracy=(float(correct[0].mean()), float(correct[1].mean())),
        difference=Estimate(value, min(middle - spread, value), max(middle + spread, value)),
        p_value=mcnemar(more, less),
        agreement=float((predicted[0] == predicted[1]).mean()),
        ece=(first.calibration.ece, second.calibration.ece),
        classes=tuple(sorted(classes, key=lambda c: (c.gained - c.lost, c.name))),
        gained=shared[gained],
        lost=shared[lost],
        indices=shared,
        predicted=(tuple(predicted[0].tolist()), tuple(predicted[1].tolist())),
        labels=tuple(labels.tolist()),
    )


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test; 1 without discordant images."""
    return min(1.0, 2 * binomial_cdf(min(gained, lost), gained + lost, 0.5))
