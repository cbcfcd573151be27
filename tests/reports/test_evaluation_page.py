"""The page of an evaluation: content, order, escaping; and its summary in sentences."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from page_reader import Reader
from vitrail import DataError
from vitrail.data.datasets import Sample
from vitrail.evaluation.results import (
    Calibration,
    ClassMetrics,
    Estimate,
    EvaluationResult,
    Mistake,
    SelectiveAccuracy,
)
from vitrail.reports.pages import (
    confusion_section,
    evaluation_page,
    noise_ece,
    summary,
    weakest_classes,
)

FACTS = {"model": "ViT-Pico/8", "data": "signs"}
NAN = math.nan


def calibration(counts, confidence, accuracy, **more):
    """Equal bins; the other values have defaults."""
    counts, mean, correct = np.array(counts), np.array(confidence), np.array(accuracy)
    gaps = np.where(counts > 0, abs(mean - correct), 0)
    values = {
        "ece": float((counts * gaps).sum() / max(counts.sum(), 1)),
        "brier": 0.125,
        "temperature": 1.7,
        "ece_scaled": 0.01,
    }
    edges = np.linspace(0, 1, len(counts) + 1)
    return Calibration(
        edges=edges, counts=counts, confidence=mean, accuracy=correct, **values | more
    )


OVERCONFIDENT = calibration([0, 9, 100, 300], [NAN, 0.4, 0.6, 0.9], [NAN, 0.5, 0.6, 0.8])


def confused(names, source):
    """40 images of each class, all correct but 8 of the fourth, predicted as the sixth."""
    confusion = 40 * np.eye(len(names), dtype=np.int64)
    confusion[3, [3, 5]] = 32, 8
    classes = [ClassMetrics(name, 40, 1.0, 1.0, 1.0) for name in names]
    classes[3] = ClassMetrics(names[3], 40, 1.0, 0.8, 0.889)
    classes[5] = ClassMetrics(names[5], 40, 0.833, 1.0, 0.909)
    samples = 40 * len(names)
    return EvaluationResult(
        samples=samples,
        accuracy=1 - 8 / samples,
        top5=1.0,
        loss=0.123,
        confusion=confusion,
        mistakes=tuple(Mistake(n, source.name(n), 3, 5, 0.97, 0.01) for n in range(2)),
        skipped={"a.jpg": "it is cut off"},
        estimates={
            "accuracy": Estimate(1 - 8 / samples, 0.961, 0.993),
            "top5": Estimate(0.9976, 0.99, 1.0),
            "balanced_accuracy": Estimate(0.974, 0.955, 0.99),
            "ece": Estimate(0.0754, 0.05, 0.09),
            "accuracy_at_80": Estimate(0.991, 0.98, 1.0),
            "loss": Estimate(0.123, 0.1, 0.2),
        },
        classes=tuple(classes),
        calibration=OVERCONFIDENT,
        selective=SelectiveAccuracy(
            coverage=np.array([0.25, 0.5, 0.8, 1]), accuracy=np.array([1, 1, 0.991, 0.98])
        ),
        notes=("classes were matched by `name`",),
    )


@pytest.fixture
def result(source):
    return confused(source.classes, source)


def page_of(result, source, title="my model", facts=FACTS):
    return evaluation_page(result, source, title=title, facts=facts)


def words(text):
    return " ".join(Reader(text).said)


def test_page_is_complete_and_self_contained(result, source):
    text = page_of(result, source)
    reader = Reader(text)
    assert len(reader.asked) == 2
    assert all(value.startswith("data:image/") for value in reader.asked)
    for outside in ("http://", "https://", "<script", "nan", "inf "):
        assert outside not in text, outside
    assert not re.search(r"url\((?!#)", text)
    assert len(text) < 100_000
    shown = " ".join(reader.said)
    for expected in (
        *("my model", "ViT-Pico/8 on signs", "98.0\xa0%", "95\xa0% CI 96.1-99.3\xa0%"),
        *("392 of 400 correct", "99.8\xa0%", "97.4\xa0%", "7.5\xa0%", "99.1\xa0%", "0.123"),
        *("classes were matched by", "32 of 40", "83.3\xa0%", "88.9\xa0%", "0.125", "1.7"),
        *("Confusion matrix", "Per-class metrics", "Calibration", "ECE", "NLL", "top-1 accuracy"),
        *("Selective accuracy", "balanced accuracy", "Most confident mistakes", "(97\xa0%)"),
        "it is cut off",
    ):
        assert expected in shown, expected
    assert re.findall(r"<h2>(.*?)</h2>", text) == [
        "Confusion matrix",
        "Per-class metrics",
        "Calibration",
        "Selective accuracy",
        "Most confident mistakes",
        "Unreadable files (1)",
    ]
    levels = [int(tag[1]) for tag, _ in reader.seen if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    facts = re.findall(r"<dt>(.*?)</dt>", text)
    assert facts[:3] == ["images", "classes", "NLL"]  # model and data are the subtitle
    assert "<details>" not in text  # a short table is not folded


def test_undefined_values_are_a_dash(result, source):
    nothing = Estimate(NAN, NAN, NAN)
    absent = ClassMetrics("absent", 0, NAN, NAN, NAN)
    blind = calibration([0] * 4, [NAN] * 4, [NAN] * 4, ece=NAN, temperature=NAN, brier=NAN)
    confusion = result.confusion.copy()
    confusion[0] = 0
    odd = replace(
        result,
        loss=NAN,
        confusion=confusion,
        estimates=dict.fromkeys(result.estimates, nothing),
        classes=(absent, *result.classes[1:]),
        calibration=blind,
        selective=SelectiveAccuracy(coverage=np.array([1.0]), accuracy=np.array([NAN])),
    )
    text = page_of(odd, source)
    assert "nan" not in text.lower()
    assert "—" in words(text)
    assert "95\xa0% CI" not in text
    rows = re.findall(r"<tr><td>(.*?)</td>", text)
    assert rows[0] == "3"  # lowest F1 first
    assert rows[-1] == "absent"
    assert "“absent”" not in text


def test_perfect_model(result, source):
    perfect = replace(
        result,
        accuracy=1.0,
        mistakes=(),
        skipped={},
        confusion=40 * np.eye(10, dtype=np.int64),
        estimates=result.estimates | {"accuracy": Estimate(1.0, 0.99, 1.0)},
        classes=tuple(ClassMetrics(str(n), 40, 1.0, 1.0, 1.0) for n in range(10)),
        calibration=calibration([0, 0, 0, 400], [NAN] * 3 + [1.0], [NAN] * 3 + [1.0]),
    )
    text = page_of(perfect, source)
    for missing in ("mistakes</h2>", "Selective accuracy", "Unreadable", "Lowest recall"):
        assert missing not in text
    assert "Top-1 accuracy: 100 % (95 % CI 99.0-100 %, n=400)." in words(text)
    assert "Well calibrated" in words(text)
    bare = EvaluationResult(samples=1, accuracy=0.0, top5=None, loss=1.0, confusion=None)
    text = page_of(bare, source)
    assert "<h2>" not in text
    assert "Top-1 accuracy: 0.0 % (n=1)." in words(text)


def test_multi_label_metrics(source):
    result = EvaluationResult(
        samples=200,
        accuracy=0.9,
        top5=None,
        loss=0.5,
        confusion=None,
        mistakes=(Mistake(0, "x", (0, 2), 1, 0.9, 0.1), Mistake(1, "y", (), 1, 0.8, 0.0)),
        estimates={
            "mean_average_precision": Estimate(0.713, 0.69, 0.74),
            "f1_micro": Estimate(0.771, 0.75, 0.79),
            "f1_macro": Estimate(0.702, NAN, NAN),
        },
        classes=tuple(
            ClassMetrics(name, 50, 0.8, 0.7, 0.75, 0.812) for name in ("person", "car", "dog")
        ),
    )
    text = page_of(result, source)
    shown = words(text)
    scores = ("mAP 71.3\xa0%", "F1 (micro) 77.1\xa0%", "F1 (macro) 70.2\xa0%", "AP", "81.2\xa0%")
    for expected in scores:
        assert expected in shown
    assert "<b>person, dog</b>" in text
    assert "<b>none</b>" in text
    assert "Top-1 class is among the labels: 90.0 % (n=200)." in shown
    for missing in ("Confusion matrix", "Calibration", "balanced"):
        assert missing not in text


def test_two_hundred_classes_are_folded_and_small(source):
    names = [f"a rather long name of class {n}" for n in range(200)]
    text = page_of(confused(names, source), source)
    assert len(text) < 200_000
    folded = re.search(r"<details><summary>All 200 classes.*?</details>", text, re.DOTALL)
    assert folded is not None
    assert folded.group().count("<tr>") == 201


def test_images_that_are_gone_are_left_out(result):
    class Gone:
        def __getitem__(self, index) -> Sample:
            raise DataError("it is gone")

    text = page_of(result, Gone())
    assert "<img" not in text
    assert "predicted as" in text


def test_summary_names_the_weaknesses(result):
    sentences = list(summary(result))
    assert sentences[0] == "Top-1 accuracy: 98.0 % (95 % CI 96.1-99.3 %, n=400)."
    assert sentences[2:] == [
        "Selective accuracy at 80 % coverage: 99.1 %.",
        "Lowest recall: “3”, 80.0 % (32 of 40).",
        "Most confused: “3” predicted as “5”, 8 of 40 (20 %).",
    ]


OVER = calibration([0, 0, 0, 400], [NAN] * 3 + [0.997], [NAN] * 3 + [0.9], ece_scaled=0.05)
FEW = calibration([0, 0, 15, 25], [NAN, NAN, 0.6, 0.9], [NAN, NAN, 0.667, 0.84])
UNDER = calibration([0, 0, 200, 200], [NAN, NAN, 0.6, 0.8], [NAN, NAN, 0.9, 0.9], ece_scaled=1)
BOTH = calibration([0, 0, 200, 210], [NAN, NAN, 0.6, 0.9], [NAN, NAN, 0.8, 0.7], ece_scaled=1)


@pytest.mark.parametrize(
    ("calibration", "sentence", "scaling"),
    [
        (
            OVERCONFIDENT,
            "Overconfident: ECE 7.6 %; for example, accuracy 80.0 % at a mean confidence of 90.0 %."
            " Temperature scaling (T=1.7) reduces the ECE to 1.0 %: "
            "`vitrail evaluate … --save-temperature`.",
            True,
        ),
        (UNDER, "Underconfident: ECE 20.0 %; for example, accuracy 90.0 % at a mean", False),
        (BOTH, "Over- and underconfident: ECE 20.0 %;", False),
        (OVER, "Overconfident: ECE 9.7 %; for example, accuracy 90.0 % at a mean", True),
        (replace(OVER, ece_scaled=0.09), "Overconfident", False),
        (FEW, "No miscalibration detected: ECE 6.3 %, within sampling noise", False),
        (replace(FEW, counts=100 * FEW.counts), "Over", True),
    ],
)
def test_summary_of_calibration(result, calibration, sentence, scaling):
    said = list(summary(replace(result, calibration=calibration)))[1]
    assert said.startswith(sentence)
    assert ("Temperature scaling" in said) is scaling


def test_noise_ece_is_exceeded_once_in_twenty():
    rng = np.random.default_rng(0)
    counts, confidence = np.array([20, 50, 200, 400]), np.array([0.3, 0.55, 0.8, 0.95])
    accuracy = rng.binomial(counts, confidence, (4000, 4)) / counts
    errors = (abs(accuracy - confidence) * counts).sum(axis=1) / counts.sum()
    limit = noise_ece(calibration(counts, confidence, confidence))
    assert 0.03 < (errors > limit).mean() < 0.07


def test_summary_of_useless_confidence_and_rare_classes(result):
    flat = SelectiveAccuracy(coverage=np.array([0.5, 1.0]), accuracy=np.array([0.97, 0.98]))
    at_80 = {"accuracy_at_80": Estimate(0.98, 0.97, 0.99)}
    unsure = replace(result, selective=flat, estimates=at_80)
    assert "does not indicate mistakes" in list(summary(unsure))[2]
    rare = ClassMetrics("rare", 9, 0.0, 0.0, 0.0)
    some = replace(result, classes=(rare, *result.classes))
    assert [c.name for c in weakest_classes(some)[:2]] == ["3", "5"]
    assert "rare" not in [c.name for c in weakest_classes(some)]
    assert "“rare”" not in " ".join(summary(replace(some, confusion=None)))


def test_selective_accuracy_at_a_coverage():
    curve = SelectiveAccuracy(
        coverage=np.array([0.5, 0.8, 1.0]), accuracy=np.array([3.0, 2.0, 1.0])
    )
    assert [curve.at(x) for x in (0.1, 0.5, 0.6, 0.8, 0.81, 1)] == [3, 3, 2, 2, 1, 1]


def test_recall_bars_of_many_classes_need_enough_images():
    confusion = np.diag(np.r_[np.full(39, 12), 3])
    confusion[38] = 0
    confusion[38, :2] = 1, 8  # 9 images, none correct
    section = confusion_section(confusion, [f"class {n}" for n in range(40)])
    assert section is not None
    assert section["recall_title"].endswith("lowest 30 of 38 with at least 10 images")
    assert "class 38" not in [bar["name"] for bar in section["recalls"]]
    few = confusion_section(confusion // 4, [f"class {n}" for n in range(40)])
    assert few is not None
    assert few["recalls"] == []
