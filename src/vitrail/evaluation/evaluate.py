"""Run a model over a dataset and compute its metrics: `vitrail.evaluate`.

    result = evaluate("runs/first", "photos/")                    everything, with 95 % CIs
    result = quick_evaluate(model, source, preprocessing, …)      cheap enough for training

Shapes: N images, B images of a batch, V views, K classes, h x w pixels of a view.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.checkpoints.load import Reference, load
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.data.datasets import Dataset, LabelSets
from vitrail.data.loader import Batch, EvalSampler, Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms import Backend, EvalTransform, normalize
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import metrics
from vitrail.evaluation.calibration import calibration_metrics, ece_by_weights
from vitrail.evaluation.dataset import (
    match_classes,
    open_evaluation_split,
    read_real_labels,
    real_correct,
)
from vitrail.evaluation.metrics import LossKind, SampleScores, Statistic, score_samples
from vitrail.evaluation.results import (
    ClassMetrics,
    EvaluationResult,
    Predictions,
    SelectiveAccuracy,
    no_readable_images,
    summarize,
)
from vitrail.models.vit import Model, eval_mode

Progress = Callable[[int, int], None]


class Runner(NamedTuple):
    """Anything that returns logits: a model, or another engine."""

    run: Callable[[Tensor], Tensor]  # normalized images (B, C, H, W) → (B, K)
    metadata: Metadata
    num_classes: int
    channels: int
    device: torch.device


def evaluate(
    model: Model | Reference | Runner,
    data: Dataset | str | PathLike[str],
    split: str | None = None,
    *,
    flip: bool = False,
    crops: int = 1,
    restrict: bool = False,
    by_order: bool = False,
    real: str | PathLike[str] | None = None,
    loss: LossKind = "softmax",
    batch_size: int = 64,
    workers: int | None = None,
    backend: Backend = "torch",
    strict: bool = False,
    device: str = "",
    progress: Progress | None = None,
) -> EvaluationResult:
    """Evaluate a model on a dataset: accuracy and more with 95 % confidence intervals.

    >>> result = evaluate("runs/first", "photos")
    >>> result.accuracy, result.estimates["accuracy"], result.calibration.ece

    `model` is a model, any reference to one, or the `runner` of a `Predictor` (other engines,
    exported models); `data` is a reference or an open Dataset. `split` defaults to test, else val;
    all of a dataset without splits, or its held-out part if the model was trained on it. `flip` and
    `crops=5` average several views of each image. `restrict` limits predictions to the classes of
    the dataset; `by_order` matches classes by order instead of by name. `real` is a file of
    ImageNet-ReaL labels. Under torchrun, the processes share the work and return the same result.
    """
    torch_device = distributed.init(device)
    if isinstance(model, Runner):
        runner = model
    else:
        model = model if isinstance(model, nn.Module) else load(model).to(torch_device)
        runner = Runner(
            run=model,
            metadata=get_metadata(model),
            num_classes=model.config.num_classes,
            channels=model.config.channels,
            device=next(model.parameters()).device,
        )
    metadata = runner.metadata
    source, notes = open_evaluation_split(data, split, metadata)
    real_labels = None if real is None else read_real_labels(Path(real))
    match = match_classes(
        metadata.class_names, runner.num_classes, source, restrict=restrict, by_order=by_order
    )
    source = match.source
    if source.multi_label or metadata.multi_label:
        loss = "sigmoid"
    columns, preprocessing = match.columns, metadata.preprocessing
    predict = average_views(
        runner.run if columns is None else lambda images: runner.run(images)[:, columns],
        preprocessing.size,
        loss,
        flip=flip,
        crops=crops,
    )
    with eval_mode(model) if isinstance(model, nn.Module) else nullcontext():
        logits, indices, skipped = collect_outputs(
            predict,
            source,
            preprocessing if crops == 1 else enlarge_for_crops(preprocessing),
            channels=runner.channels,
            batch_size=batch_size,
            workers=workers,
            backend=backend,
            strict=strict,
            device=runner.device,
            progress=progress,
        )
    predictions = Predictions(
        classes=source.classes,
        logits=logits,
        labels=labels_at(source, indices),
        indices=indices,
        loss=loss,
        skipped=skipped,
    )
    result = compute_metrics(predictions, source, [*notes, *match.notes])
    if real_labels is not None:
        correct = real_correct(real_labels, match, predictions)
        statistic = partial(metrics.means, {"real_accuracy": correct})
        result.estimates.update(metrics.estimate([statistic], len(correct)))
    return result


def quick_evaluate(
    predict: Callable[[Tensor], Tensor],
    source: Dataset,
    preprocessing: Preprocessing,
    *,
    loss: LossKind = "softmax",
    **options: Any,
) -> EvaluationResult:
    """Accuracy, loss, confusion and mistakes of `predict`: images (B, C, H, W) → logits (B, K).

    `options` are those of `run_inference`. All processes return the result of the whole source.
    """
    classes, batches = len(source.classes), []  # indices and scores of each batch
    kind: LossKind = "sigmoid" if source.multi_label else loss

    def add(logits: Tensor, batch: Batch) -> None:
        if logits.ndim != 2 or logits.shape[1] != classes:
            raise ConfigError(
                f"class mismatch: the model's output has shape {tuple(logits.shape[1:])} per image "
                f"and the dataset has {classes} classes; expected the same classes in the same "
                "order"
            )
        scores = score_samples(logits, batch.labels.to(logits.device), kind)
        batches.append((batch.indices, *(x.cpu() for x in scores)))

    skipped = run_inference(predict, source, preprocessing, add, **options)
    gathered = [one for part in distributed.all_gather_object(batches) for one in part]
    if not gathered:
        raise no_readable_images(len(source), skipped)
    indices, *scores = (torch.cat(column) for column in zip(*gathered, strict=True))
    order = indices.argsort()  # so that sums do not depend on the number of processes
    rows = indices[order].numpy()
    scores = SampleScores(*(column[order] for column in scores))
    return summarize(scores, labels_at(source, rows), rows, classes, source, skipped)


def run_inference(
    predict: Callable[[Tensor], Tensor],
    source: Dataset,
    preprocessing: Preprocessing,
    take: Callable[[Tensor, Batch], None],
    *,
    channels: int,
    batch_size: int,
    workers: int | None = None,
    backend: Backend = "torch",
    strict: bool = False,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> dict[str, str]:
    """Run `predict` on every image, normalized (B, C, H, W), and pass the outputs to `take`.

    Processes take batches in turn; a batch has the same images whatever their number, so outputs
    are identical to those of one process. Returns the unreadable images of all processes, and why;
    `strict` raises on the first. `progress` gets this process's images done and in total.
    """
    if batch_size < 1 or (workers is not None and workers < 0):
        raise ConfigError(
            f"batch_size={batch_size} must be at least 1, and workers={workers} at least 0"
        )
    order = EvalSampler(
        samples=len(source),
        batch_size=batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    transform = EvalTransform(preprocessing=preprocessing, channels=channels, backend=backend)
    loader = Loader(source, transform, order, workers=workers, strict=strict)
    calls, done, problem = 0, 0, None
    # Parameters that FSDP gathers in inference mode could not be trained any more.
    with torch.inference_mode() if order.world_size == 1 else torch.no_grad():
        try:
            for batch in loader:
                calls += 1
                take(predict(normalize(batch.images.to(device), preprocessing)), batch)
                done += len(batch.indices)
                if progress is not None:
                    progress(done + len(loader.skipped), sum(map(len, order.batches())))
        except DataError as error:
            problem = error
        if order.world_size > 1:  # collectives: all processes must call the model equally often
            empty = torch.zeros(1, channels, *preprocessing.size, device=device)
            for _ in range(calls, len(replace(order, rank=0).batches())):
                predict(empty)
    for error in distributed.all_gather_object(problem):  # all processes raise the same error
        if error is not None:
            raise error
    parts = distributed.all_gather_object(loader.skipped)
    return {name: reason for part in parts for name, reason in part.items()}


def collect_outputs(
    predict: Callable[[Tensor], Tensor],
    source: Dataset,
    preprocessing: Preprocessing,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """Outputs float32 (N, D) of all readable images in order, their indices (N,), and skipped ones.

    `options` are those of `run_inference`. All processes return the outputs of the whole source.
    """
    filled, values = np.zeros(len(source), bool), np.zeros((0, 0), np.float32)

    def put(indices: np.ndarray, rows: np.ndarray) -> None:
        nonlocal values
        if not len(values):
            values = np.zeros((len(source), rows.shape[1]), np.float32)
        values[indices], filled[indices] = rows, True

    def take(outputs: Tensor, batch: Batch) -> None:
        put(batch.indices.numpy(), outputs.float().cpu().numpy())

    skipped = run_inference(predict, source, preprocessing, take, **options)
    if distributed.is_distributed():
        local = np.flatnonzero(filled)
        for part in distributed.all_gather_object((local, values[local]) if len(local) else None):
            if part is not None:
                put(*part)
    indices = np.flatnonzero(filled)
    if not len(indices):
        raise no_readable_images(len(source), skipped)
    return (values if len(indices) == len(source) else values[indices]), indices, skipped


def labels_at(source: Dataset, indices: np.ndarray) -> np.ndarray:
    """Labels of some images: int64 (N,), or bool (N, K) for multi-label data."""
    labels = source.labels()
    if not isinstance(labels, LabelSets):
        return np.asarray(labels, np.int64)[indices]
    subset = labels.take(indices)
    table = np.zeros((len(indices), len(source.classes)), bool)
    counts = np.diff(subset.ends, prepend=0)
    table[np.repeat(np.arange(len(indices)), counts), subset.classes] = True
    return table


def enlarge_for_crops(preprocessing: Preprocessing) -> Preprocessing:
    """Return the preprocessing of the images that five crops are taken from."""
    larger = preprocessing.resize_to
    if larger in (None, preprocessing.size):  # no margin: all crops would be the same
        height, width = preprocessing.size
        larger = (height * 8 // 7, width * 8 // 7)
    return replace(preprocessing, size=larger, resize_to=larger)


def average_views(
    predict: Callable[[Tensor], Tensor],
    size: tuple[int, int],
    loss: LossKind,
    *,
    flip: bool = False,
    crops: int = 1,
) -> Callable[[Tensor], Tensor]:
    """Wrap `predict` to return the logits of the mean probability over views, on the CPU.

    Views (B, C, h, w) of images (B, C, H, W) are the corners, the center, and their flips.
    """
    if crops not in (1, 5):
        raise ConfigError(f"crops={crops} is not supported; use 1 or 5")
    if not flip and crops == 1:
        return predict

    def averaged(images: Tensor) -> Tensor:
        (height, width), logits = size, []
        bottom, right = images.shape[-2] - height, images.shape[-1] - width
        corners = [(0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2)]
        for top, left in corners[:crops]:
            view = images[..., top : top + height, left : left + width]
            logits += [predict(view), predict(view.flip(-1))] if flip else [predict(view)]
        exact = torch.stack(logits).cpu().double()  # (V, B, K); not all devices have float64
        if loss == "softmax":
            return exact.log_softmax(-1).logsumexp(0).float()
        return exact.sigmoid().mean(0).logit(eps=1e-12).float()

    return averaged


def compute_metrics(
    predictions: Predictions, source: Dataset, notes: Sequence[str] = ()
) -> EvaluationResult:
    """All metrics with intervals; calibration and selective accuracy for single-label data.

    An image with NaN or +inf logits has no confidence: it comes last in selective accuracy and is
    left out of calibration. A note reports the number of such images.
    """
    scores, logits, labels = predictions.scores, predictions.logits, predictions.labels
    (samples, classes), multi_label = logits.shape, predictions.multi_label
    result = summarize(scores, labels, predictions.indices, classes, source, predictions.skipped)

    correct = (scores.rank == 0).numpy()
    columns = {"accuracy": correct}
    if result.top5 is not None and not multi_label:
        columns["top5"] = (scores.rank < 5).numpy()
    columns["loss"] = scores.loss.double().numpy()
    has_confidence = (logits < np.inf).all(axis=1)
    confidence = np.where(has_confidence, scores.confidence.double().numpy(), np.nan)
    known = np.isfinite(confidence)
    if broken := samples - int(known.sum()):
        notes = (
            *notes,
            f"{broken:,} of {samples:,} images have logits that are not finite: they have no "
            "confidence, and the loss is undefined",
        )
    statistics: list[Statistic] = [partial(metrics.means, columns)]
    resamples = metrics.RESAMPLES
    exact = {"loss": result.loss}
    calibration = selective = precisions = None
    if multi_label:
        truth, predicted = labels.astype(bool), logits > 0
        counts = [x.sum(axis=0) for x in (predicted & truth, truth, predicted)]
        precisions = metrics.average_precisions(logits, truth, np.ones((1, samples)))[0]
        statistics += [
            lambda weights: {
                "mean_average_precision": metrics.nan_mean(
                    metrics.average_precisions(logits, truth, weights)
                )
            },
            partial(metrics.f1_averages, predicted, truth),
        ]
        # Each resample visits every class of every image.
        affordable = metrics.BUDGET // (samples * classes)
        resamples = min(metrics.RESAMPLES, max(metrics.MIN_RESAMPLES, affordable))
    else:
        groups = (labels[correct], labels, scores.predicted.numpy())
        counts = [np.bincount(group, minlength=classes) for group in groups]
        rows = slice(None) if known.all() else known  # a slice copies nothing
        calibration = calibration_metrics(
            logits[rows], labels[rows], confidence[rows], correct[rows], predictions.loss
        )
        selective = SelectiveAccuracy(*metrics.selective_curve(confidence, correct))
        exact["ece"] = calibration.ece
        statistics += [
            partial(metrics.balanced_accuracy, labels, correct, classes),
            partial(ece_by_weights, confidence, correct),
            partial(metrics.accuracy_at_80, confidence, correct),
        ]
    hits, support, predicted = counts
    table = zip(
        predictions.classes,
        support.tolist(),
        metrics.safe_divide(hits, predicted).tolist(),
        metrics.safe_divide(hits, support).tolist(),
        metrics.f1(*counts).tolist(),
        [None] * classes if precisions is None else precisions.tolist(),
        strict=True,
    )
    return replace(
        result,
        estimates=metrics.estimate(statistics, samples, resamples, exact),
        classes=tuple(ClassMetrics(*row) for row in table),
        calibration=calibration,
        selective=selective,
        notes=tuple(notes),
        predictions=predictions,
    )
