"""Logits decoded into labels and probabilities.

Shapes: B images, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vitrail.checkpoints.metadata import Metadata
from vitrail.evaluation.conformal import Conformal

DEFAULT_TOP = 5
MULTI_LABEL_THRESHOLD = 0.5  # probability from which a class applies to a multi-label model's image


class Guess(NamedTuple):
    """A class and its probability."""

    label: str
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The prediction for one image, or the error if the image cannot be read."""

    name: str  # path of the image, or its position
    guesses: tuple[Guess, ...] = ()  # top classes, most probable first
    labels: tuple[str, ...] = ()  # one class, several if multi-label, none below the threshold
    prediction_set: tuple[str, ...] = ()  # of a calibrated model: contains the true class
    error: str = ""

    @property
    def label(self) -> str:
        """The predicted class; empty if the model abstains."""
        return self.labels[0] if self.labels else ""

    @property
    def probability(self) -> float:
        """Probability of the top class."""
        return self.guesses[0].probability if self.guesses else 0.0


def decode_logits(
    logits: Tensor,
    names: Sequence[str],
    metadata: Metadata,
    *,
    top: int = DEFAULT_TOP,
    threshold: float | None = None,
    conformal: Conformal | None = None,
) -> list[Prediction]:
    """Return one prediction per row of logits (B, K); `names` are those of the images.

    Below `threshold` no label is assigned; the default is that of `conformal`, else 0, or 0.5 per
    class if multi-label.
    """
    probabilities = metadata.probabilities(logits.double())
    accepted, sets = [True] * len(probabilities), [()] * len(probabilities)
    if conformal is not None and len(probabilities):
        table = probabilities.numpy()
        if threshold is None:
            accepted = conformal.accepts(table).tolist()
        ranked = zip(conformal.sets(table), table, strict=True)
        sets = [sorted(inside.nonzero()[0], key=lambda k: -row[k]) for inside, row in ranked]
    if threshold is None:
        threshold = MULTI_LABEL_THRESHOLD if metadata.multi_label else 0.0
    best = probabilities.topk(min(top, probabilities.shape[1]))
    classes = metadata.names(probabilities.shape[1])
    predictions = []
    for name, row, values, indices, accept, inside in zip(
        names,
        probabilities,
        best.values.tolist(),
        best.indices.tolist(),
        accepted,
        sets,
        strict=True,
    ):
        guesses = tuple(Guess(classes[i], p) for i, p in zip(indices, values, strict=True))
        if metadata.multi_label:
            order = row.argsort(descending=True)
            labels = tuple(classes[i] for i in order[row[order] >= threshold].tolist())
        else:
            labels = (guesses[0].label,) if accept and values[0] >= threshold else ()
        members = tuple(classes[k] for k in inside)
        predictions.append(
            Prediction(name=name, guesses=guesses, labels=labels, prediction_set=members)
        )
    return predictions
