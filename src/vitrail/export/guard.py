"""What int8 costs: the share of right answers with and without it, on the same pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath

import torch
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import Dataset
from vitrail.data.loader import Batch
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.evaluation.dataset import match_classes, open_evaluation_split
from vitrail.evaluation.evaluate import Progress, run_inference
from vitrail.evaluation.results import ResultAccumulator
from vitrail.formatting import percent
from vitrail.models.vit import Model, eval_mode

Data = Dataset | str | PathLike[str]
AT_ONCE = 32  # pictures


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Accuracies of a model and of its int8 version."""

    accuracy: float
    int8_accuracy: float
    pictures: int
    data: str  # which pictures these are
    notes: tuple[str, ...] = ()

    @property
    def drop(self) -> float:
        return self.accuracy - self.int8_accuracy


def measure(
    model: Model,
    engine: Callable[[Tensor], Tensor],
    data: Data | None = None,
    *,
    progress: Progress | None = None,
) -> Cost:
    """Look at all pictures of the test split with both; without `data`, at the model's own."""
    source, name, notes = pictures_for(model, data)
    metadata = get_metadata(model)
    matched = match_classes(metadata.class_names, model.config.num_classes, source)
    tallies = [
        ResultAccumulator(len(matched.source.classes), multi_label=matched.source.multi_label)
        for _ in range(2)
    ]

    def predict(images: Tensor) -> Tensor:
        return torch.stack([model(images), engine(images)])  # (2, B, K)

    def take(logits: Tensor, batch: Batch) -> None:
        chosen = logits if matched.columns is None else logits[..., matched.columns]
        for tally, each in zip(tallies, chosen, strict=True):
            tally.update(each, batch.labels, batch.indices)

    with eval_mode(model):
        skipped = run_inference(
            predict,
            matched.source,
            metadata.preprocessing,
            take,
            channels=model.config.channels,
            batch_size=AT_ONCE,
            progress=progress,
        )
    before, after = (tally.finish(matched.source, skipped) for tally in tallies)
    return Cost(
        accuracy=before.accuracy,
        int8_accuracy=after.accuracy,
        pictures=before.samples,
        data=name,
        notes=(*notes, *matched.notes),
    )


def pictures_for(model: Model, data: Data | None) -> tuple[Dataset, str, list[str]]:
    """The pictures to measure by, what they are called, and what should be known of them."""
    metadata = get_metadata(model)
    if data is not None:
        name = fspath(data) if isinstance(data, str | PathLike) else "the given pictures"
        source, notes = open_evaluation_split(data, None, metadata)
        return source, name, notes
    own = metadata.provenance.get("data")
    ask = "give --data, pictures with labels that it has not learned from"
    if not isinstance(own, str) or not own:
        raise ConfigError(f"int8 rounds weights, and what that costs must be measured; {ask}")
    try:
        source, notes = open_evaluation_split(own, None, metadata)
    except VitrailError as error:
        raise ConfigError(
            f"int8 must be measured, and the pictures of the training cannot be opened: {error}; "
            f"{ask}"
        ) from None
    return source, own, notes


def refuse(cost: Cost, max_drop: float) -> None:
    """Stop if int8 loses too much."""
    if cost.drop > max_drop:
        raise CheckpointError(
            f"int8 is right on {percent(cost.int8_accuracy)} of {cost.pictures:,} pictures and the "
            f"model on {percent(cost.accuracy)}: a loss of more than max_drop={max_drop:g}; "
            "allow more with --max-drop, or stay with float"
        )
