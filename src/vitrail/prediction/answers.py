"""What a model says about a picture: classes and how likely they are, or that it is not sure.

Shapes: B pictures, K classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vitrail.checkpoints.metadata import Metadata
from vitrail.errors import ConfigError

USUAL_TOP = 5
APPLIES = 0.5  # probability from which a class applies, where several may


class Guess(NamedTuple):
    """A class, and how likely the model finds it."""

    label: str
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a model says about one picture."""

    name: str  # what the picture is called
    guesses: tuple[Guess, ...] = ()  # the likeliest first
    labels: tuple[str, ...] = ()  # what it decides for: one class, several, or none
    error: str = ""  # why the picture could not be read

    @property
    def label(self) -> str:
        """The class it decides for; empty if it abstains."""
        return self.labels[0] if self.labels else ""

    @property
    def probability(self) -> float:
        """How likely it finds its best guess."""
        return self.guesses[0].probability if self.guesses else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Deciding:
    """How answers are made of logits."""

    top: int = USUAL_TOP  # classes that are told
    threshold: float | None = None  # below it nothing is decided; None: 0, or 0.5 for each of many

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ConfigError(f"top={self.top} leaves nothing to tell; give 1 or more")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold} is no probability; give 0 to 1")


def answers(
    logits: Tensor, names: Sequence[str], metadata: Metadata, deciding: Deciding
) -> list[Answer]:
    """One answer for each row of logits (B, K), which is the picture of that name."""
    several = metadata.multi_label
    threshold = deciding.threshold
    if threshold is None:
        threshold = APPLIES if several else 0.0
    chances = metadata.probabilities(logits.double())
    best = chances.topk(min(deciding.top, chances.shape[1]))
    classes = metadata.names(chances.shape[1])
    found = []
    for name, row, values, places in zip(
        names, chances, best.values.tolist(), best.indices.tolist(), strict=True
    ):
        guesses = tuple(Guess(classes[p], v) for p, v in zip(places, values, strict=True))
        if several:
            order = row.argsort(descending=True)
            chosen = tuple(classes[p] for p in order[row[order] >= threshold].tolist())
        else:
            chosen = (guesses[0].label,) if values[0] >= threshold else ()
        found.append(Answer(name=name, guesses=guesses, labels=chosen))
    return found


class Seen(NamedTuple):
    """A batch of pictures, and what became of each."""

    names: list[str]
    errors: list[str]  # why one could not be read; empty for the others
    found: Tensor | None  # logits or features, a row for each that could be read

    def answers(self, metadata: Metadata, deciding: Deciding) -> Iterator[Answer]:
        """What the logits say, in the order of the pictures."""
        good = [name for name, error in zip(self.names, self.errors, strict=True) if not error]
        told = iter(answers(self.found, good, metadata, deciding) if self.found is not None else ())
        for name, error in zip(self.names, self.errors, strict=True):
            yield Answer(name=name, error=error) if error else next(told)
