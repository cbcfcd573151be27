import json
import math

import numpy as np
import pytest
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    precision_recall_fscore_support,
)

from vitrail.evaluation.bootstrap import wilson_interval
from vitrail.evaluation.calibration import confidence_at, fit_temperature
from vitrail.evaluation.evaluate import compute_metrics
from vitrail.evaluation.results import EvaluationResult, Predictions

SINGLE = ["accuracy", "loss", "balanced_accuracy", "ece", "accuracy_at_80"]
MULTI_LABEL = ["accuracy", "loss", "mean_average_precision", "f1_micro", "f1_macro"]


class NamedSource:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def name(self, index):
        return f"image {index}"


def result_of(logits, labels, loss="softmax", notes=()) -> EvaluationResult:
    logits = np.asarray(logits, np.float32)
    samples, classes = logits.shape
    predictions = Predictions(
        classes=tuple(f"class {k}" for k in range(classes)),
        logits=logits,
        labels=labels,
        indices=np.arange(samples),
        loss=loss,
    )
    return compute_metrics(predictions, NamedSource(samples), notes)  # type: ignore


def single_label(seed=0, samples=150, classes=4):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(samples, classes)).astype(np.float32)
    labels = np.where(
        rng.random(samples) < 0.6, logits.argmax(axis=1), rng.integers(classes, size=samples)
    )
    return logits, labels


def multi_label(seed=0, samples=120, classes=7):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(samples, classes)).astype(np.float32)
    truth = logits + rng.normal(size=logits.shape) > 0.7
    truth[:, 2] = False
    return logits, truth


@pytest.mark.parametrize("classes", [2, 4])
def test_single_label_metrics_equal_scikit_learn(classes):
    logits, labels = single_label(classes=classes)
    got = result_of(logits, labels, notes=["a note"])
    predicted = logits.argmax(axis=1)
    assert list(got.estimates) == SINGLE
    values = {name: estimate.value for name, estimate in got.estimates.items()}
    assert values["accuracy"] == got.accuracy == (predicted == labels).mean()
    assert values["loss"] == got.loss
    want = balanced_accuracy_score(labels, predicted)
    assert values["balanced_accuracy"] == pytest.approx(want)
    columns = precision_recall_fscore_support(labels, predicted)
    for k, one in enumerate(got.classes):
        assert one.name == f"class {k}"
        assert one.average_precision is None
        values = (one.precision, one.recall, one.f1, one.support)
        assert values == pytest.approx([column[k] for column in columns])
    assert got.notes == ("a note",)


def test_intervals_contain_the_values():
    for result in (result_of(*single_label(classes=7)), result_of(*multi_label())):
        for value, low, high in result.estimates.values():
            assert 0 <= low < value < high


def test_top5_needs_more_than_five_classes():
    got = result_of(*single_label(classes=7))
    assert list(got.estimates) == ["accuracy", "top5", *SINGLE[1:]]
    assert got.estimates["top5"].value == got.top5


def test_accuracy_at_80_is_on_the_selective_curve():
    got = result_of(*single_label(samples=100))
    assert got.selective is not None
    (place,) = np.flatnonzero(got.selective.coverage == 0.8)
    assert got.selective.accuracy[place] == got.estimates["accuracy_at_80"].value
    assert got.selective.accuracy[-1] == got.accuracy


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_calibration_uses_the_top_1_probability(loss):
    logits, labels = single_label()
    got = result_of(logits, labels, loss).calibration
    assert got is not None
    confidence = confidence_at(logits, 1.0, loss)
    assert np.nansum(got.confidence * got.counts) == pytest.approx(confidence.sum())
    assert np.nansum(got.accuracy * got.counts) == (logits.argmax(axis=1) == labels).sum()
    assert got.temperature == fit_temperature(logits, labels, loss)


def test_multi_label_metrics_equal_scikit_learn():
    logits, truth = multi_label()
    got = result_of(logits, truth)
    assert list(got.estimates) == MULTI_LABEL
    values = {name: estimate.value for name, estimate in got.estimates.items()}
    assert (values["accuracy"], values["loss"]) == (got.accuracy, got.loss)
    present = truth.any(axis=0)
    want = average_precision_score(truth[:, present], logits[:, present])
    assert values["mean_average_precision"] == pytest.approx(want)
    for average in ("micro", "macro"):
        want = f1_score(truth, logits > 0, average=average)
        assert values[f"f1_{average}"] == pytest.approx(want)
    precisions = average_precision_score(truth[:, present], logits[:, present], average=None)
    assert [got.classes[k].average_precision for k in np.flatnonzero(present)] == pytest.approx(
        precisions.tolist()
    )
    assert math.isnan(got.classes[2].average_precision)  # type: ignore
    assert got.classes[2].support == got.classes[2].precision == 0
    assert got.calibration is got.selective is None


def test_result_is_deterministic():
    for case in (single_label(), multi_label()):
        assert result_of(*case).estimates == result_of(*case).estimates


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_broken_logits_are_left_out_of_calibration_with_a_note(bad, loss):
    logits, labels = single_label(classes=7)
    predicted = logits.argmax(axis=1)
    logits[:20, 3] = bad
    got = result_of(logits, labels, loss, notes=["first"])
    if math.isnan(bad):
        assert got.accuracy == (predicted == labels)[20:].sum() / 150
        assert sum(one.recall * one.support for one in got.classes) == pytest.approx(
            got.accuracy * 150
        )
    kept = result_of(logits[20:], labels[20:], loss)
    assert got.calibration is not None
    assert kept.calibration is not None
    for name, value in vars(kept.calibration).items():
        np.testing.assert_array_equal(getattr(got.calibration, name), value)
    assert got.estimates["ece"].value == kept.estimates["ece"].value
    assert got.notes[0] == "first"
    assert "20 of 150 images" in got.notes[1]
    assert not math.isfinite(got.estimates["loss"].low)
    assert got.estimates["accuracy"].low < got.accuracy < got.estimates["accuracy"].high
    json.dumps(got.to_dict(), allow_nan=False)


def test_class_metrics_agree_with_the_confusion_matrix_despite_nan():
    logits, labels = single_label()
    logits[:20] = math.nan
    got = result_of(logits, labels)
    confusion = got.confusion
    assert confusion is not None
    hits, said = confusion.diagonal(), confusion.sum(axis=0)
    assert [one.precision for one in got.classes] == pytest.approx((hits / said).tolist())


def test_perfect_model_has_wilson_intervals():
    logits, labels = single_label()
    labels = logits.argmax(axis=1)
    got = result_of(logits, labels).estimates
    assert got["accuracy"] == got["balanced_accuracy"] == (1, *wilson_interval(150, 150))
    assert got["accuracy_at_80"] == (1, *wilson_interval(120, 120))  # 120 images are covered


@pytest.mark.parametrize("labels", ["single-label", "multi-label"])
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 0.0, 3e38])
def test_constant_or_broken_logits(fill, labels):
    logits, truth = single_label() if labels == "single-label" else multi_label()
    for loss in ("softmax", "sigmoid"):
        got = result_of(np.full_like(logits, fill), truth, loss)
        json.dumps(got.to_dict(), allow_nan=False)
        assert got.estimates["accuracy"].value == got.accuracy
    assert bool(got.notes) == (not fill < math.inf)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_one_to_three_images(samples):
    for logits, labels in (single_label(1, samples, 9), multi_label(1, samples)):
        result = result_of(logits, labels)
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["samples"] == samples


def test_images_without_labels():
    logits, truth = multi_label()
    got = result_of(logits, np.zeros_like(truth))
    assert math.isnan(got.estimates["mean_average_precision"].value)
    assert got.estimates["f1_micro"].value == 0


def test_too_many_classes_for_a_confusion_matrix():
    logits, labels = single_label(samples=30, classes=1200)
    got = result_of(logits, labels)
    assert got.confusion is None
    assert len(got.classes) == 1200
    assert sum(one.support for one in got.classes) == 30


def test_read_only_predictions():
    logits, labels = single_label()
    logits.setflags(write=False)
    labels.setflags(write=False)
    assert result_of(logits, labels).predictions is not None
