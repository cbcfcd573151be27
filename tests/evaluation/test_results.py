"""`summarize` and `compute_metrics`: values, intervals, JSON, and broken logits."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail import DataError
from vitrail.evaluation.evaluate import compute_metrics
from vitrail.evaluation.metrics import score_samples
from vitrail.evaluation.results import MAX_MISTAKES, EvaluationResult, Predictions, summarize

torch.manual_seed(0)
LOGITS = torch.randn(101, 12) * 3
LABELS = torch.randint(0, 12, (101,))
INDICES = torch.randperm(101)
GOLDEN = json.loads((Path(__file__).parent / "golden_results.json").read_text(encoding="utf-8"))


class NamedSource(list):
    """As much of a dataset as a result needs."""

    def name(self, index):
        return f"image {index}"


def quick(logits=LOGITS, loss="softmax") -> EvaluationResult:
    scores, indices = score_samples(logits, LABELS, loss), INDICES.numpy()
    return summarize(scores, LABELS.numpy(), indices, 12, NamedSource(range(101)), {})  # type: ignore


def test_mistakes_are_the_most_confident_wrong_predictions_by_index_in_the_dataset():
    got, sure, predicted = quick(), LOGITS.softmax(1).amax(1), LOGITS.argmax(1)
    wrong = (predicted != LABELS).nonzero()[:, 0]
    wrong = wrong[sure[wrong].argsort(descending=True)][:MAX_MISTAKES]
    assert [m.index for m in got.mistakes] == INDICES[wrong].tolist()
    assert got.mistakes[0].name == f"image {INDICES[wrong[0]]}"
    assert quick(LOGITS.bfloat16()).loss == pytest.approx(got.loss, rel=0.01)


def test_constant_logits_score_at_chance_and_nan_at_zero():
    got = quick(torch.zeros(101, 12))
    assert got.accuracy == pytest.approx((LABELS < 1).float().mean().item())
    assert got.top5 == pytest.approx((LABELS < 5).float().mean().item())
    got = quick(torch.full((101, 12), math.nan))
    assert got.accuracy == got.top5 == 0
    assert math.isnan(got.loss)
    assert json.loads(json.dumps(got.to_dict(), allow_nan=False))["loss"] is None


def test_nan_logits_predict_a_wrong_class():
    nan = torch.full((3, 3), math.nan)
    got = score_samples(nan, torch.tensor([0, 1, 2]), "softmax")
    assert got.predicted.tolist() == [1, 0, 0]
    labels = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]])
    assert score_samples(nan, labels, "sigmoid").predicted.tolist() == [1, 0, 2]
    alone = score_samples(nan[:, :1], torch.tensor([0, 0, 0]), "softmax")
    assert alone.rank.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("classes", "kept", "written"), [(100, True, True), (101, True, False), (1001, False, False)]
)
def test_large_confusion_matrix_is_left_out(classes, kept, written):
    got = full(np.random.default_rng(0).normal(size=(9, classes)), np.arange(9))
    assert (got.confusion is not None) is kept
    assert (got.to_dict()["confusion"] is not None) is written


def test_no_readable_image_is_an_error_with_a_reason():
    scores, none = score_samples(LOGITS[:0], LABELS[:0], "softmax"), np.zeros(0, np.int64)
    with pytest.raises(DataError, match=r"none of 3 images could be read: a.jpg: cut off"):
        summarize(scores, none, none, 3, NamedSource(range(3)), {"a.jpg": "cut off"})  # type: ignore


def full(logits, labels, loss="softmax", notes=(), classes=None) -> EvaluationResult:
    logits = np.asarray(logits, np.float32)
    classes = tuple(classes or (f"class {k}" for k in range(logits.shape[1])))
    known = {"classes": classes, "indices": np.arange(len(logits)), "loss": loss}
    predictions = Predictions(logits=logits, labels=labels, **known)
    return compute_metrics(predictions, NamedSource(range(len(logits))), notes)  # type: ignore


def single_label(seed=0, samples=150, classes=4):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(samples, classes)).astype(np.float32)
    correct, other = rng.random(samples) < 0.6, rng.integers(classes, size=samples)
    return logits, np.where(correct, logits.argmax(axis=1), other)


def multi_label(seed=0, samples=120, classes=7):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(samples, classes)).astype(np.float32)
    truth = logits + rng.normal(size=logits.shape) > 0.7
    truth[:, 2] = False
    return logits, truth


def assert_same(got, expected, path):
    """Equal structure and strings; numbers to 1e-6."""
    if isinstance(expected, dict):
        assert list(got) == list(expected), path
        for key, value in expected.items():
            assert_same(got[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), path
        for number, value in enumerate(expected):
            assert_same(got[number], value, f"{path}[{number}]")
    elif isinstance(expected, float):
        assert math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-6), (path, got, expected)
    else:
        assert got == expected, path


@pytest.mark.parametrize("name", GOLDEN)
def test_results_equal_those_of_version_0_1(name):
    case = GOLDEN[name]
    labels = np.array(case["labels"])
    labels = labels.astype(bool) if labels.ndim == 2 else labels
    result = full(case["logits"], labels, case["loss"], classes=case["classes"])
    assert_same(result.to_dict(), case["expected"], name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_broken_logits_are_left_out_of_calibration_with_a_note(bad, loss):
    logits, labels = single_label(classes=7)
    predicted = logits.argmax(axis=1)
    logits[:20, 3] = bad
    got, rest = full(logits, labels, loss, notes=["first"]), full(logits[20:], labels[20:], loss)
    if math.isnan(bad):
        assert got.accuracy == (predicted == labels)[20:].sum() / 150
        hits = sum(one.recall * one.support for one in got.classes)
        assert hits == pytest.approx(got.accuracy * 150)
    for name, value in vars(rest.calibration).items():
        np.testing.assert_array_equal(getattr(got.calibration, name), value)
    assert got.estimates["ece"].value == rest.estimates["ece"].value
    assert got.notes[0] == "first"
    assert "20 of 150 images" in got.notes[1]
    precisions = (got.confusion.diagonal() / got.confusion.sum(axis=0)).tolist()
    assert [one.precision for one in got.classes] == pytest.approx(precisions)
    assert not math.isfinite(got.estimates["loss"].low)
    assert got.estimates["accuracy"].low < got.accuracy < got.estimates["accuracy"].high
    json.dumps(got.to_dict(), allow_nan=False)


@pytest.mark.parametrize("labels", ["single-label", "multi-label"])
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 0.0, 3e38])
def test_constant_or_broken_logits(fill, labels):
    logits, truth = single_label() if labels == "single-label" else multi_label()
    for loss in ("softmax", "sigmoid"):
        got = full(np.full_like(logits, fill), truth, loss)
        json.dumps(got.to_dict(), allow_nan=False)
        assert got.estimates["accuracy"].value == got.accuracy
    assert bool(got.notes) == (not fill < math.inf)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_few_images_or_labels(samples):
    for logits, labels in (single_label(1, samples, 9), multi_label(1, samples)):
        result = full(logits, labels)
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["samples"] == samples
    logits, truth = multi_label()
    got = full(logits, np.zeros_like(truth))
    assert math.isnan(got.estimates["mean_average_precision"].value)
    assert got.estimates["f1_micro"].value == 0
