"""How good a model is on a data set, cheaply enough to be asked during training.

    outcome = quick_outcome(model, source, preprocessing, channels=3, batch_size=64)

Several processes share the pictures out and all get the outcome of the whole.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vitrail.data.datasets import Dataset
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError
from vitrail.evaluation.outcome import Loss, Outcome, Tally
from vitrail.evaluation.passes import look_at_all


def quick_outcome(
    predict: Callable[[Tensor], Tensor],
    source: Dataset,
    preprocessing: Preprocessing,
    *,
    loss: Loss = "softmax",
    **how: Any,
) -> Outcome:
    """Send each picture through `predict`, which makes logits (B, K) of images (B, C, H, W).

    A picture that cannot be read is left out and told. `how` is what `look_at_all` takes.
    """
    tally = Tally(len(source.classes), multi_label=source.multi_label, loss=loss)

    def take(logits: Tensor, batch: Batch) -> None:
        tally.add(fitting(logits, source), batch.labels, batch.indices)

    skipped = look_at_all(predict, source, preprocessing, take, **how)
    tally.reduce()
    return tally.finish(source, skipped)


def fitting(logits: Tensor, source: Dataset) -> Tensor:
    """The logits, if the model tells as many classes apart as the data has."""
    if logits.ndim != 2 or logits.shape[1] != len(source.classes):
        raise ConfigError(
            f"the model gives {tuple(logits.shape[1:])} numbers for a picture and the data has "
            f"{len(source.classes)} classes; they must be the same classes in the same order"
        )
    return logits
