"""`vitrail.evaluate`: everything there is to say about a model on a data set."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.checkpoints.load import Reference, load
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.data.samples import LabelSets, Source
from vitrail.data.transforms import Backend
from vitrail.evaluation.assess import assess
from vitrail.evaluation.bootstrap import estimates, means
from vitrail.evaluation.findings import Estimate, Findings, Predictions
from vitrail.evaluation.matching import Match, match
from vitrail.evaluation.outcome import Loss, Outcome, Tally
from vitrail.evaluation.passes import Outputs, Progress, look_at_all, none_read
from vitrail.evaluation.pictures import open_part
from vitrail.evaluation.real import read_real, real_hits
from vitrail.evaluation.views import Views, through
from vitrail.models.build import Model, eval_mode


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Whatever gives logits: a model, or what stands for one in another engine."""

    run: Callable[[Tensor], Tensor]  # normalized images (B, C, H, W) → (B, K)
    metadata: Metadata
    num_classes: int
    channels: int
    device: torch.device


def evaluate(
    model: Model | Reference | Runner,
    data: Source | str | PathLike[str],
    split: str | None = None,
    *,
    flip: bool = False,
    crops: int = 1,
    restrict: bool = False,
    by_order: bool = False,
    real: str | PathLike[str] | None = None,
    loss: Loss = "softmax",
    batch_size: int = 64,
    workers: int | None = None,
    backend: Backend = "torch",
    strict: bool = False,
    device: str = "",
    progress: Progress | None = None,
) -> Findings:
    """How good a model is: accuracy and more, each with its interval, over all pictures.

    >>> findings = evaluate("runs/first", "pictures")
    >>> findings.accuracy, findings.estimates["accuracy"], findings.calibration.ece

    `model` is a model or any reference to one, or the `runner` of a `Predictor`, for other engines
    and exported models; `data` is a data set or a source that is open already. `split` is test,
    or else val; all of a set without splits, but if the model learned from it, what was kept apart.
    `flip` and `crops=5` look at each picture several times. `restrict` leaves the choice to the
    classes that the data has; `by_order` is for classes that only go by other names. `real` is a
    file of ImageNet-ReaL labels. With torchrun, several processes share the work, and all get the
    same result.
    """
    where = distributed.init(device)
    runner = model if isinstance(model, Runner) else runner_of(model, where)
    metadata = runner.metadata
    source, notes = open_part(data, split, metadata)
    entries = None if real is None else read_real(Path(real))
    matched = match(
        metadata.class_names,
        runner.num_classes,
        source,
        restrict=restrict,
        by_order=by_order,
    )
    if matched.source.multi_label or metadata.multi_label:
        loss = "sigmoid"
    views, prepare = Views(flip=flip, crops=crops), metadata.preprocessing
    outputs = Outputs(len(source))
    with eval_mode(model) if isinstance(model, nn.Module) else nullcontext():
        skipped = look_at_all(
            through(choosing(runner.run, matched.columns), views, prepare.size, loss),
            matched.source,
            views.enlarged(prepare),
            outputs.add,
            channels=runner.channels,
            batch_size=batch_size,
            workers=workers,
            backend=backend,
            strict=strict,
            device=runner.device,
            progress=progress,
        )
    predictions = predicted(outputs, matched, loss, skipped)
    outcome = outcome_of(predictions, matched.source)
    findings = assess(predictions, outcome, [*notes, *matched.notes])
    if entries is not None:
        findings.estimates.update(by_real_labels(real_hits(entries, matched, predictions)))
    return findings


def by_real_labels(hits: np.ndarray) -> dict[str, Estimate]:
    """The accuracy by ImageNet-ReaL, of hits and misses (N,)."""
    name = "real_accuracy"
    return estimates({name: float(hits.mean())}, [means({name: hits})], len(hits))


def runner_of(model: Model | Reference, device: torch.device) -> Runner:
    """A model as it is; one that has to be loaded goes to the device."""
    if not isinstance(model, nn.Module):
        model = load(model).to(device)
    return Runner(
        run=model,
        metadata=get_metadata(model),
        num_classes=model.config.num_classes,
        channels=model.config.channels,
        device=next(model.parameters()).device,
    )


def choosing(
    run: Callable[[Tensor], Tensor], columns: list[int] | None
) -> Callable[[Tensor], Tensor]:
    """The same, which may choose among some classes only."""
    return run if columns is None else lambda images: run(images)[:, columns]


def predicted(outputs: Outputs, matched: Match, loss: Loss, skipped: dict[str, str]) -> Predictions:
    logits, indices = outputs.finish()
    source = matched.source
    if not len(indices):
        raise none_read(len(source), skipped)
    return Predictions(
        classes=source.classes,
        logits=logits,
        labels=labels_at(source, indices),
        indices=indices,
        loss=loss,
        skipped=skipped,
    )


def labels_at(source: Source, indices: np.ndarray) -> np.ndarray:
    """The labels of some pictures: int64 (N,), or bool (N, K) where several may apply."""
    found = source.labels()
    if not isinstance(found, LabelSets):
        return np.asarray(found, np.int64)[indices]
    some = found.take(indices)
    many = np.zeros((len(indices), len(source.classes)), bool)
    counts = np.diff(some.ends, prepend=0)
    many[np.repeat(np.arange(len(indices)), counts), some.classes] = True
    return many


def outcome_of(predictions: Predictions, source: Source) -> Outcome:
    tally = Tally(
        len(predictions.classes), multi_label=predictions.multi_label, loss=predictions.loss
    )
    tally.count(
        predictions.scores, torch.from_numpy(predictions.labels), torch.tensor(predictions.indices)
    )
    return tally.finish(source, predictions.skipped)
