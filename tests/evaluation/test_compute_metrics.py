import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    precision_recall_fscore_support,
)

from vitrail.evaluation.assess import assess
from vitrail.evaluation.bootstrap import wilson
from vitrail.evaluation.calibration import confidence_at, fit_temperature
from vitrail.evaluation.findings import Findings, Predictions
from vitrail.evaluation.outcome import Tally

SINGLE = ["accuracy", "loss", "balanced_accuracy", "ece", "accuracy_at_80"]
SEVERAL = ["accuracy", "loss", "mean_average_precision", "f1_micro", "f1_macro"]


class Named:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def name(self, index):
        return f"picture {index}"


def assessed(logits, labels, loss="softmax", notes=()) -> Findings:
    logits = np.asarray(logits, np.float32)
    pictures, classes = logits.shape
    places = np.arange(pictures)
    tally = Tally(classes, multi_label=labels.ndim == 2, loss=loss)
    tally.add(torch.tensor(logits), torch.tensor(labels), torch.tensor(places))
    predictions = Predictions(
        classes=tuple(f"class {k}" for k in range(classes)),
        logits=logits,
        labels=labels,
        indices=places,
        loss=loss,
    )
    return assess(predictions, tally.finish(Named(pictures), {}), notes)  # type: ignore


def single(seed=0, pictures=150, classes=4):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(pictures, classes)).astype(np.float32)
    labels = np.where(
        rng.random(pictures) < 0.6, logits.argmax(axis=1), rng.integers(classes, size=pictures)
    )
    return logits, labels


def several(seed=0, pictures=120, classes=7):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(pictures, classes)).astype(np.float32)
    truth = logits + rng.normal(size=logits.shape) > 0.7
    truth[:, 2] = False
    return logits, truth


@pytest.mark.parametrize("classes", [2, 4])
def test_numbers_of_single_labels_are_those_of_scikit_learn(classes):
    logits, labels = single(classes=classes)
    got = assessed(logits, labels, notes=["a note"])
    predicted = logits.argmax(axis=1)
    assert list(got.estimates) == SINGLE
    values = {name: estimate.value for name, estimate in got.estimates.items()}
    assert values["accuracy"] == got.outcome.accuracy == (predicted == labels).mean()
    assert values["loss"] == got.outcome.loss
    want = balanced_accuracy_score(labels, predicted)
    assert values["balanced_accuracy"] == pytest.approx(want)
    columns = precision_recall_fscore_support(labels, predicted)
    for k, one in enumerate(got.classes):
        assert one.name == f"class {k}"
        assert one.average_precision is None
        found = (one.precision, one.recall, one.f1, one.pictures)
        assert found == pytest.approx([column[k] for column in columns])
    assert got.notes == ("a note",)


def test_intervals_are_around_the_values():
    for found in (assessed(*single(classes=7)), assessed(*several())):
        for value, low, high in found.estimates.values():
            assert 0 <= low < value < high


def test_more_than_five_classes_have_a_top_five():
    got = assessed(*single(classes=7))
    assert list(got.estimates) == ["accuracy", "top5", *SINGLE[1:]]
    assert got.estimates["top5"].value == got.outcome.top5


def test_accuracy_at_80_is_on_the_curve_of_selective_accuracy():
    got = assessed(*single(pictures=100))
    assert got.selective is not None
    (place,) = np.flatnonzero(got.selective.coverage == 0.8)
    assert got.selective.accuracy[place] == got.estimates["accuracy_at_80"].value
    assert got.selective.accuracy[-1] == got.accuracy


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_calibration_is_about_the_probability_of_the_predicted_class(loss):
    logits, labels = single()
    got = assessed(logits, labels, loss).calibration
    assert got is not None
    confidence = confidence_at(logits, 1.0, loss)
    assert np.nansum(got.confidence * got.counts) == pytest.approx(confidence.sum())
    assert np.nansum(got.accuracy * got.counts) == (logits.argmax(axis=1) == labels).sum()
    assert got.temperature == fit_temperature(logits, labels, loss)


def test_numbers_of_several_labels_are_those_of_scikit_learn():
    logits, truth = several()
    got = assessed(logits, truth)
    assert list(got.estimates) == SEVERAL
    values = {name: estimate.value for name, estimate in got.estimates.items()}
    assert (values["accuracy"], values["loss"]) == (got.outcome.accuracy, got.outcome.loss)
    told = truth.any(axis=0)
    want = average_precision_score(truth[:, told], logits[:, told])
    assert values["mean_average_precision"] == pytest.approx(want)
    for average in ("micro", "macro"):
        want = f1_score(truth, logits > 0, average=average)
        assert values[f"f1_{average}"] == pytest.approx(want)
    precisions = average_precision_score(truth[:, told], logits[:, told], average=None)
    assert [got.classes[k].average_precision for k in np.flatnonzero(told)] == pytest.approx(
        precisions.tolist()
    )
    assert math.isnan(got.classes[2].average_precision)  # type: ignore
    assert got.classes[2].pictures == got.classes[2].precision == 0
    assert got.calibration is got.selective is None


def test_the_same_predictions_give_the_same_findings():
    for case in (single(), several()):
        assert assessed(*case).estimates == assessed(*case).estimates


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_broken_logits_are_told_and_left_out_of_the_calibration(bad, loss):
    logits, labels = single(classes=7)
    predicted = logits.argmax(axis=1)
    logits[:20, 3] = bad
    got = assessed(logits, labels, loss, notes=["first"])
    if math.isnan(bad):
        assert got.accuracy == (predicted == labels)[20:].sum() / 150
        assert sum(one.recall * one.pictures for one in got.classes) == pytest.approx(
            got.accuracy * 150
        )
    kept = assessed(logits[20:], labels[20:], loss)
    assert got.calibration is not None
    assert kept.calibration is not None
    for name, value in vars(kept.calibration).items():
        np.testing.assert_array_equal(getattr(got.calibration, name), value)
    assert got.estimates["ece"].value == kept.estimates["ece"].value
    assert got.notes[0] == "first"
    assert "20 of 150 pictures" in got.notes[1]
    assert not math.isfinite(got.estimates["loss"].low)
    assert got.estimates["accuracy"].low < got.accuracy < got.estimates["accuracy"].high
    json.dumps(got.to_dict(), allow_nan=False)


def test_the_classes_numbers_are_those_of_the_confusion_matrix_even_of_broken_logits():
    logits, labels = single()
    logits[:20] = math.nan
    got = assessed(logits, labels)
    confusion = got.outcome.confusion
    assert confusion is not None
    hits, said = confusion.diagonal(), confusion.sum(axis=0)
    assert [one.precision for one in got.classes] == pytest.approx((hits / said).tolist())


def test_a_model_without_mistakes_may_still_make_some():
    logits, labels = single()
    labels = logits.argmax(axis=1)
    got = assessed(logits, labels).estimates
    assert got["accuracy"] == got["balanced_accuracy"] == (1, *wilson(150, 150))
    assert got["accuracy_at_80"] == (1, *wilson(120, 120))  # as many were answered


@pytest.mark.parametrize("labels", ["single", "several"])
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 0.0, 3e38])
def test_a_model_that_says_nothing_of_use_is_no_trouble(fill, labels):
    logits, truth = single() if labels == "single" else several()
    for loss in ("softmax", "sigmoid"):
        got = assessed(np.full_like(logits, fill), truth, loss)
        json.dumps(got.to_dict(), allow_nan=False)
        assert got.estimates["accuracy"].value == got.accuracy
    assert bool(got.notes) == (not fill < math.inf)


@pytest.mark.parametrize("pictures", [1, 2, 3])
def test_very_few_pictures_are_no_trouble(pictures):
    for logits, labels in (single(1, pictures, 9), several(1, pictures)):
        found = assessed(logits, labels)
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["samples"] == pictures


def test_pictures_of_nothing_are_no_trouble():
    logits, truth = several()
    got = assessed(logits, np.zeros_like(truth))
    assert math.isnan(got.estimates["mean_average_precision"].value)
    assert got.estimates["f1_micro"].value == 0


def test_more_classes_than_a_confusion_matrix_has_room_for_still_have_findings():
    logits, labels = single(pictures=30, classes=1200)
    got = assessed(logits, labels)
    assert got.outcome.confusion is None
    assert len(got.classes) == 1200
    assert sum(one.pictures for one in got.classes) == 30


def test_predictions_may_be_read_only():
    logits, labels = single()
    logits.setflags(write=False)
    labels.setflags(write=False)
    assert assessed(logits, labels).predictions is not None
