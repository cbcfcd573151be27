"""What a model said about every picture → everything there is to say about the model.

    findings = assess(predictions, outcome)

Shapes: N pictures, K classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitrail.evaluation import bootstrap, measures
from vitrail.evaluation.calibration import calibrate
from vitrail.evaluation.findings import ClassFinding, Findings, Predictions
from vitrail.evaluation.measures import COVERAGE
from vitrail.evaluation.outcome import Outcome


class Seen(NamedTuple):
    """What became of each picture."""

    loss: np.ndarray  # (N,)
    predicted: np.ndarray  # int64 (N,)
    right: np.ndarray  # bool (N,)
    among_five: np.ndarray  # bool (N,)
    confidence: np.ndarray  # (N,) NaN where logits are NaN or +inf, or all are -inf


def assess(predictions: Predictions, outcome: Outcome, notes: Sequence[str] = ()) -> Findings:
    """Numbers with intervals, and by class; calibration and selective accuracy for single labels.

    A picture whose logits are NaN or +inf has no confidence: it comes last in selective accuracy
    and has no part in the calibration. A note tells how many there are.
    """
    pictures = len(predictions.labels)
    assert outcome.samples == pictures > 0, "the outcome is of the same pictures"
    seen = see(predictions)
    broken = int(np.isnan(seen.confidence).sum())
    if broken:
        notes = (
            *notes,
            f"the logits of {broken:,} of {pictures:,} pictures are not finite: there is no loss "
            "to tell, and no confidence of those",
        )
    build = of_several_labels if predictions.multi_label else of_one_label
    return build(predictions, outcome, seen, tuple(notes))


def see(predictions: Predictions) -> Seen:
    """The scores as arrays; no confidence where logits are not finite."""
    scores = predictions.scores
    told = (predictions.logits < np.inf).all(axis=1)
    return Seen(
        loss=scores.loss.double().numpy(),
        predicted=scores.predicted.numpy(),
        right=(scores.position == 0).numpy(),
        among_five=(scores.position < 5).numpy(),
        confidence=np.where(told, scores.confidence.double().numpy(), np.nan),
    )


def of_one_label(
    predictions: Predictions, outcome: Outcome, seen: Seen, notes: tuple[str, ...]
) -> Findings:
    labels, classes = predictions.labels, len(predictions.classes)
    known = np.isfinite(seen.confidence)
    kept = slice(None) if known.all() else known  # a slice copies nothing
    calibration = calibrate(
        predictions.logits[kept],
        labels[kept],
        seen.confidence[kept],
        seen.right[kept],
        predictions.loss,
    )
    hits = np.bincount(labels[seen.right], minlength=classes)
    shown = np.bincount(labels, minlength=classes)
    said = np.bincount(seen.predicted, minlength=classes)
    values = {"accuracy": outcome.accuracy}
    columns = {"accuracy": seen.right, "loss": seen.loss}
    if outcome.top5 is not None:
        values["top5"] = outcome.top5
        columns["top5"] = seen.among_five
    values |= {
        "loss": outcome.loss,
        "balanced_accuracy": float(measures.balanced_accuracy(hits, shown)),
        "ece": calibration.ece,
        "accuracy_at_80": measures.accuracy_at(seen.confidence, seen.right, COVERAGE),
    }
    statistics = [
        bootstrap.means(columns),
        bootstrap.balanced_accuracy(labels, seen.right, classes),
        bootstrap.expected_calibration_error(seen.confidence, seen.right),
        bootstrap.accuracy_at("accuracy_at_80", seen.confidence, seen.right, COVERAGE),
    ]
    return Findings(
        outcome=outcome,
        estimates=bootstrap.estimates(values, statistics, len(labels)),
        classes=by_class(predictions.classes, hits, shown, said),
        calibration=calibration,
        selective=measures.selective(seen.confidence, seen.right),
        notes=notes,
        predictions=predictions,
    )


def of_several_labels(
    predictions: Predictions, outcome: Outcome, seen: Seen, notes: tuple[str, ...]
) -> Findings:
    logits, truth = predictions.logits, predictions.labels.astype(bool)
    taken = logits > 0  # likelier than not; what is NaN is not
    hits, shown, said = (x.sum(axis=0) for x in (taken & truth, truth, taken))
    precisions = np.array(
        [measures.average_precision(logits[:, k], truth[:, k]) for k in range(truth.shape[1])]
    )
    values = {
        "accuracy": outcome.accuracy,
        "loss": outcome.loss,
        "mean_average_precision": float(measures.known_mean(precisions)),
        "f1_micro": float(measures.f1_micro(hits, shown, said)),
        "f1_macro": float(measures.f1_macro(hits, shown, said)),
    }
    statistics = [
        bootstrap.means({"accuracy": seen.right, "loss": seen.loss}),
        bootstrap.mean_average_precision(logits, truth),
        bootstrap.f1(taken, truth),
    ]
    resamples = bootstrap.affordable(*truth.shape)
    return Findings(
        outcome=outcome,
        estimates=bootstrap.estimates(values, statistics, len(truth), resamples),
        classes=by_class(predictions.classes, hits, shown, said, precisions),
        notes=notes,
        predictions=predictions,
    )


def by_class(
    names: Sequence[str],
    hits: np.ndarray,
    shown: np.ndarray,
    said: np.ndarray,
    average_precision: np.ndarray | None = None,
) -> tuple[ClassFinding, ...]:
    """A finding for each class, from counts (K,) as `measures` has them."""
    columns = zip(
        names,
        shown.tolist(),
        measures.precision(hits, said).tolist(),
        measures.recall(hits, shown).tolist(),
        measures.f1(hits, shown, said).tolist(),
        [None] * len(names) if average_precision is None else average_precision.tolist(),
        strict=True,
    )
    return tuple(ClassFinding(*column) for column in columns)
