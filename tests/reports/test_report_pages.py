"""The pages of an evaluation and of a run, their files, and hostile names on every page."""

import csv
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from test_inspection_page import EVERYTHING, SCATTER, STATS, curves, image_of

from page_reader import read_page
from vitrail import DataError
from vitrail.data.check import DatasetReport, DuplicateGroup, SampleInfo, UnreadableFile
from vitrail.data.datasets import open_dataset
from vitrail.data.storage import write_atomic
from vitrail.evaluation.evaluate import compute_metrics
from vitrail.evaluation.results import (
    Calibration,
    ClassMetrics,
    Estimate,
    EvaluationResult,
    Mistake,
    Predictions,
    SelectiveAccuracy,
)
from vitrail.inspection.faithfulness import Faithfulness
from vitrail.inspection.representations import Neighbor
from vitrail.reports import pages
from vitrail.reports.inspection import inspection_page, write_inspection
from vitrail.reports.pages import confusion_section, evaluation_page, run_page, summary

pytestmark = pytest.mark.slow

FACTS = {"model": "ViT-Pico/8", "data": "signs", "time": "4 min 2 s", "parameters": "2,671"}
NAN = math.nan


def calibration(counts, confidence, accuracy, **more):
    """Equal bins; the other values have defaults."""
    counts, mean, correct = np.array(counts), np.array(confidence), np.array(accuracy)
    gaps = np.where(counts > 0, abs(mean - correct), 0)
    ece = float((counts * gaps).sum() / max(counts.sum(), 1))
    values = {"ece": ece, "brier": 0.125, "temperature": 1.7, "ece_scaled": 0.01}
    bins = {"edges": np.linspace(0, 1, len(counts) + 1), "counts": counts}
    return Calibration(**bins, confidence=mean, accuracy=correct, **values | more)


OVERCONFIDENT = calibration([0, 9, 100, 300], [NAN, 0.4, 0.6, 0.9], [NAN, 0.5, 0.6, 0.8])


def confused(names, source):
    """40 images of each class, all correct but 8 of the fourth, predicted as the sixth."""
    confusion = 40 * np.eye(len(names), dtype=np.int64)
    confusion[3, [3, 5]] = 32, 8
    classes = [ClassMetrics(name, 40, 1.0, 1.0, 1.0) for name in names]
    classes[3] = ClassMetrics(names[3], 40, 1.0, 0.8, 0.889)
    classes[5] = ClassMetrics(names[5], 40, 0.833, 1.0, 0.909)
    samples = 40 * len(names)
    coverage, accuracy = np.array([0.25, 0.5, 0.8, 1]), np.array([1, 1, 0.991, 0.98])
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
        selective=SelectiveAccuracy(coverage=coverage, accuracy=accuracy),
        notes=("classes were matched by `name`",),
    )


@pytest.fixture(scope="module")
def source():
    return open_dataset("builtin:sign-digits", "test")


@pytest.fixture
def result(source):
    return confused(source.classes, source)


def page_of(result, source):
    return evaluation_page(result, source, title="my model", facts=FACTS)


def check_words(text, *expected, missing=()):
    shown = " ".join(read_page(text).said)
    assert [word for word in expected if word not in shown] == []
    assert [word for word in missing if word in text] == []


# The page of an evaluation


def test_page_is_complete_and_self_contained(result, source):
    text = page_of(result, source)
    images = [values for tag, values in read_page(text).seen if tag == "img"]
    assert [image["src"][:11] for image in images] == ["data:image/"] * 2
    assert len(text) < 100_000
    check_words(
        text,
        *("my model", "ViT-Pico/8 on signs", "98.0\xa0%", "95\xa0% CI 96.1-99.3\xa0%"),
        *("392 of 400 correct", "99.8\xa0%", "97.4\xa0%", "7.5\xa0%", "99.1\xa0%", "0.123"),
        *("classes were matched by", "32 of 40", "83.3\xa0%", "88.9\xa0%", "0.125", "1.7"),
        *("ECE", "NLL", "top-1 accuracy", "balanced accuracy", "(97\xa0%)", "it is cut off"),
        missing=("<script", "nan", "inf ", "<details>"),  # a short table is not folded
    )
    titles = "Confusion matrix|Per-class metrics|Calibration|Selective accuracy|"
    titles += "Most confident mistakes|Unreadable files (1)"
    assert "|".join(re.findall(r"<h2>(.*?)</h2>", text)) == titles


def test_undefined_values_are_a_dash(result, source):
    blind = calibration([0] * 4, [NAN] * 4, [NAN] * 4, ece=NAN, temperature=NAN, brier=NAN)
    confusion = result.confusion.copy()
    confusion[0] = 0
    odd = replace(
        result,
        loss=NAN,
        confusion=confusion,
        estimates=dict.fromkeys(result.estimates, Estimate(NAN, NAN, NAN)),
        classes=(ClassMetrics("absent", 0, NAN, NAN, NAN), *result.classes[1:]),
        calibration=blind,
        selective=SelectiveAccuracy(coverage=np.array([1.0]), accuracy=np.array([NAN])),
    )
    text = page_of(odd, source)
    check_words(text, "—", missing=("nan", "NaN", "95\xa0% CI", "“absent”"))
    rows = re.findall(r"<tr><td>(.*?)</td>", text)
    assert (rows[0], rows[-1]) == ("3", "absent")  # lowest F1 first


def test_perfect_and_minimal_results(result, source):
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
    check_words(
        page_of(perfect, source),
        *("Top-1 accuracy: 100 % (95 % CI 99.0-100 %, n=400).", "Well calibrated"),
        missing=("mistakes</h2>", "Selective accuracy", "Unreadable", "Lowest recall"),
    )
    bare = EvaluationResult(samples=1, accuracy=0.0, top5=None, loss=1.0, confusion=None)
    check_words(page_of(bare, source), "Top-1 accuracy: 0.0 % (n=1).", missing=("<h2>",))


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
        classes=tuple(ClassMetrics(x, 50, 0.8, 0.7, 0.75, 0.812) for x in ("person", "car", "dog")),
    )
    text = page_of(result, source)
    check_words(
        text,
        *("mAP 71.3\xa0%", "F1 (micro) 77.1\xa0%", "F1 (macro) 70.2\xa0%", "AP", "81.2\xa0%"),
        "Top-1 class is among the labels: 90.0 % (n=200).",
        missing=("Confusion matrix", "Calibration", "balanced"),
    )
    assert "<b>person, dog</b>" in text
    assert "<b>none</b>" in text


def test_many_classes_are_folded_and_small(source, full):
    names = [f"a rather long name of class {n}" for n in range(1000)]
    text = page_of(confused(names[:200], source), source)
    assert len(text) < 200_000
    folded = re.search(r"<details><summary>All 200 classes.*?</details>", text, re.DOTALL)
    assert folded.group().count("<tr>") == 201
    confusion = np.random.default_rng(0).poisson(0.05, (1000, 1000)) + 30 * np.eye(1000, dtype=int)
    many = replace(confused(names, source), confusion=confusion, samples=int(confusion.sum()))
    long = {"outcomes": {"val": many}, "class_names": names, "rows": list(rows(200_000))}
    assert len(run_page(**full | long | {"sources": {}})) < 400_000


def test_images_that_are_gone_are_left_out(result):
    class Gone:
        def __getitem__(self, index):
            raise DataError("it is gone")

    check_words(page_of(result, Gone()), "predicted as", missing=("<img",))


def test_summary_names_the_weaknesses(result):
    sentences = list(summary(result))
    assert sentences[0] == "Top-1 accuracy: 98.0 % (95 % CI 96.1-99.3 %, n=400)."
    assert sentences[2:] == [
        "Selective accuracy at 80 % coverage: 99.1 %.",
        "Lowest recall: “3”, 80.0 % (32 of 40).",
        "Most confused: “3” predicted as “5”, 8 of 40 (20 %).",
    ]
    leak = "the model was trained on some of these images"
    first = next(summary(replace(result, notes=("split: test", leak))))
    assert first == "The model was trained on some of these images: the metrics are optimistic."
    flat = SelectiveAccuracy(coverage=np.array([0.5, 1.0]), accuracy=np.array([0.97, 0.98]))
    unsure = replace(result, selective=flat, estimates={"accuracy_at_80": Estimate(0.98, 0.97, 1)})
    assert "does not indicate mistakes" in list(summary(unsure))[2]
    rare = ClassMetrics("rare", 9, 0.0, 0.0, 0.0)
    some = replace(result, classes=(rare, *result.classes), confusion=None)
    assert "“rare”" not in " ".join(summary(some))


OVER = calibration([0, 0, 0, 400], [NAN] * 3 + [0.997], [NAN] * 3 + [0.9], ece_scaled=0.05)
FEW = calibration([0, 0, 15, 25], [NAN, NAN, 0.6, 0.9], [NAN, NAN, 0.667, 0.84])
UNDER = calibration([0, 0, 200, 200], [NAN, NAN, 0.6, 0.8], [NAN, NAN, 0.9, 0.9], ece_scaled=1)
BOTH = calibration([0, 0, 200, 210], [NAN, NAN, 0.6, 0.9], [NAN, NAN, 0.8, 0.7], ece_scaled=1)
MOSTLY = calibration([0, 0, 150, 40], [NAN, NAN, 0.55, 0.7], [NAN, NAN, 0.65, 0.57], ece_scaled=1)


@pytest.mark.parametrize(
    ("calibration", "sentence", "scaling"),
    [
        (OVERCONFIDENT, "Overconfident: ECE 7.6 %; for example, accuracy 80.0 % at a mean", "1.0"),
        (UNDER, "Underconfident: ECE 20.0 %; for example, accuracy 90.0 % at a mean", None),
        (BOTH, "Over- and underconfident: ECE 20.0 %;", None),
        (MOSTLY, "Underconfident: ECE 10.6 %; for example, accuracy 65.0 % at a mean", None),
        (OVER, "Overconfident: ECE 9.7 %; for example, accuracy 90.0 % at a mean", "5.0"),
        (replace(OVER, ece_scaled=0.09), "Overconfident", None),
        (FEW, "No miscalibration detected: ECE 6.3 %, within sampling noise", None),
        (replace(FEW, counts=100 * FEW.counts), "Over", "1.0"),
    ],
)
def test_summary_of_calibration(result, calibration, sentence, scaling):
    said = list(summary(replace(result, calibration=calibration)))[1]
    assert said.startswith(sentence)
    advice = f"Temperature scaling (T=1.7) reduces the ECE to {scaling} %: `vitrail evaluate"
    assert (advice in said) is bool(scaling)
    assert ("Temperature" in said) is bool(scaling)


def test_recall_bars_of_many_classes_need_enough_images():
    confusion = np.diag(np.r_[np.full(39, 12), 3])
    confusion[38] = 0
    confusion[38, :2] = 1, 8  # 9 images, none correct
    names = [f"class {n}" for n in range(40)]
    section = confusion_section(confusion, names)
    assert section["recall_title"].endswith("lowest 30 of 38 with at least 10 images")
    assert "class 38" not in [bar["name"] for bar in section["recalls"]]
    assert confusion_section(confusion // 4, names)["recalls"] == []


# Its files


def result_of(source, logits, labels, loss="softmax"):
    logits, labels = np.asarray(logits, np.float32), np.asarray(labels)
    predictions = Predictions(
        classes=tuple("abcdefgh"[: logits.shape[1]]),
        logits=logits,
        labels=labels,
        indices=np.arange(len(logits))[::-1].copy(),
        loss="sigmoid" if labels.ndim == 2 else loss,
    )
    return compute_metrics(predictions, source)


def written(folder, result, source):
    paths = list(pages.write_evaluation(folder, result, source, title="t", facts=FACTS))
    assert [path.suffix for path in paths] == [".html", ".json", ".csv"]
    with paths[2].open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_per_image(source, tmp_path):
    result = result_of(source, [[2.0, 0], [2, 0], [0, 3]], [0, 1, 1])
    rows = written(tmp_path, result, source)
    assert [row["picture"] for row in rows] == [source.name(n) for n in (2, 1, 0)]
    found = ["".join(row[key] for row in rows) for key in ("label", "predicted", "right")]
    assert found == ["abb", "aab", "101"]
    assert float(rows[0]["confidence"]) == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-6)
    assert json.loads((tmp_path / "evaluation.json").read_text())["accuracy"] == 2 / 3
    assert "<html" in (tmp_path / "evaluation.html").read_text()


@pytest.mark.parametrize(
    ("logits", "labels", "loss", "correct"),
    [
        ([[17.5, 30.0]] * 2, [0, 1], "sigmoid", "01"),  # both are 1.0 in float32
        ([[NAN, 1.0], [1.0, NAN], [3.0, 0.0]], [0, 1, 0], "softmax", "001"),
        ([[NAN] * 2] * 2, [0, 1], "sigmoid", "00"),
        ([[120.0, 150.0]] * 2, [0, 1], "softmax", "01"),
        ([[20.0, 30, 0], [9.0, 8, 7], [NAN] * 3], [[0, 1, 1], [0] * 3, [1, 0, 0]],
         "sigmoid", "100"),
    ],
)  # fmt: skip
def test_csv_agrees_with_the_accuracy(logits, labels, loss, correct, source, tmp_path):
    result = result_of(source, logits, labels, loss)
    (tmp_path / "report.html").write_text("the run's own")
    rows = written(tmp_path, result, source)
    assert (tmp_path / "report.html").read_text() == "the run's own"
    assert "".join(row["right"] for row in rows) == correct
    assert correct.count("1") / len(correct) == result.accuracy
    if np.ndim(labels) == 2:
        assert [row["label"] for row in rows] == ["b|c", "", "a"]
    for row in rows:
        assert (row["predicted"] in row["label"].split("|")) == (row["right"] == "1")


def test_failed_page_leaves_the_old_one(source, tmp_path, monkeypatch):
    result = result_of(source, [[2.0, 0], [0, 3]], [0, 1])
    for name, part, write in (
        ("evaluation", "pages.mistake_figures", lambda: written(tmp_path, result, source)),
        (
            "report",
            "inspection.faithfulness_values",
            lambda: write_inspection(tmp_path, EVERYTHING),
        ),
    ):
        write()
        old = (tmp_path / f"{name}.html").read_text()
        monkeypatch.setattr(f"vitrail.reports.{part}", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write()
        assert (tmp_path / f"{name}.html").read_text() == old


# The page of a run


def rows(steps=200):
    for step in range(10, steps + 1, 10):
        now = {"step": step, "epoch": step / 50}
        train = {"loss": 2 / step, "learning_rate": 1e-3, "grad_norm": 1.0, "seconds": step / 10}
        yield now | train | {"images_per_second": 900.0}
        if step % 50 == 0:
            yield now | {"val/accuracy": 0.9, "val/loss": 0.3}


@pytest.fixture
def full(source, result):
    return {
        "title": "my run",
        "facts": FACTS,
        "rows": list(rows()),
        "choices": ["batches of 32: few pictures"],
        "outcomes": {"test": replace(result, estimates={})},
        "sources": {"test": source},
        "class_names": source.classes,
        "settings": '[model]\nname = "ViT-Pico/8"',
        "timings": {"training": 200.0, "evaluation": 42.0},
        "skipped": {"a.jpg": "it is cut off"},
        "next_steps": ["vitrail convert runs/x", "try `--minutes 9`"],
    }


def test_run_page_is_complete_and_self_contained(full):
    text = run_page(**full)
    assert len(text) < 300_000
    check_words(
        text,
        *("my run", "98.0\xa0%", "392 of 400 correct", "4 min 2 s", "2,671", "ViT-Pico/8"),
        *("Loss", "Accuracy", "Learning rate", "Images per second", "it is cut off"),
        *("batches of 32", "few pictures", "3 min 20 s", "vitrail convert runs/x", "--minutes 9"),
        *("predicted as", "(97\xa0%)", "[model]", "95\xa0% CI 96.1-99.0\xa0%"),
        missing=("<script",),
    )
    alts = [values["alt"] for tag, values in read_page(text).seen if tag == "img"]
    assert alts == ["3, predicted as 5"] * 2


def test_minimal_and_multi_label_runs(full, result):
    assert "<h2>" not in run_page(title="bare", facts={}, rows=[])
    masked = run_page(**full | {"outcomes": {}, "sources": {}})  # masked patches
    check_words(masked, "Loss", missing=("Confusion matrix",))
    mistakes = (Mistake(0, "x", (1, 2), 5, 0.9, 0.1),)
    several = replace(result, accuracy=1.0, confusion=None, mistakes=mistakes, estimates={})
    text = run_page(**full | {"outcomes": {"test": several}})
    check_words(text, "95\xa0% CI 99.0-100\xa0%", missing=("Confusion matrix",))
    assert "<b>1, 2</b>" in text


def test_page_with_an_undecodable_file_name_is_written(full, tmp_path):
    page, path = run_page(**full | {"skipped": {"\udcff.jpg": "broken"}}), tmp_path / "report.html"
    write_atomic(path, page)
    assert "?.jpg" in path.read_text(encoding="utf-8")
    with pytest.raises(DataError, match="cannot write"):
        write_atomic(path / "report.html", page)


def test_repeated_steps_replace_earlier_ones():
    again = [{"step": s, "loss": v} for s, v in ((10, 1.0), (20, 9.0), (30, 99.0), (15, 0.9))]
    found = pages.points([*again, {"step": 25, "loss": None}, {"step": 26}], "loss")
    assert found[:2] == [(10, 1.0), (15, 0.9)]
    assert math.isnan(pages.points([{"step": 1, "loss": None}], "loss")[0][1])


# HTML in the name of a class, a file, a split or a model is shown as text

NAMES = [
    "<script>alert(1)</script>\"'&",
    "</script></style></svg><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)' \" onclick=\"alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</title><!-- javascript:alert(1)",
]


def hostile_result(name, source):
    base = confused([f"{n} {name}" for n in range(10)], source)
    mistakes = (Mistake(0, name, 0, 1, 0.5, 0.1),)
    return replace(base, mistakes=mistakes, skipped={name: name}, notes=(f"{name} `{name}`",))


def evaluation(name, source):
    facts = {name: name, "model": name, "data": name}
    return evaluation_page(hostile_result(name, source), source, title=name, facts=facts)


def run(name, source):
    return run_page(
        title=name,
        facts={name: name, "model": name, "time": name},
        rows=[{"step": 1, f"{name}/loss": 1.0, f"{name}/accuracy": 0.5, "loss": 1.0}],
        choices=[f"{name}: `{name}`", name],
        outcomes={name: hostile_result(name, source)},
        sources={name: source},
        class_names=[f"{n} {name}" for n in range(10)],
        settings=name,
        timings={name: 1.0},
        skipped={f"x{name}": name},
        next_steps=[f"vitrail {name}", name],
    )


def inspection(name, source):
    values, pixels = np.eye(2, 3), np.zeros((9, 9, 3), np.uint8)
    maps = {"maps": {name: values}, "class_maps": {name: {name: values}}}
    near = (Neighbor(name, name, 1.0, pixels),)
    hostile = replace(
        EVERYTHING,
        title=name,
        facts={name: name},
        prefix=(name,),
        images=(image_of(name, label=name, predictions=((name, 0.5),), neighbors=near, **maps),),
        positions={name: EVERYTHING.positions["positions"]},
        attention=STATS._replace(distance={name: np.ones((2, 2))}),
        faithfulness=Faithfulness(curves={name: curves(0.5, 0.5)}, sanity={name: 0.9}, images=1),
        scatter=SCATTER._replace(classes=(name,) * 3, method=name),
        notes=(name,),
    )
    return inspection_page(hostile)


def dataset_check(name, source):
    sample = SampleInfo(split=name, index=0, name=name, labels=(name,))
    pair = (sample, replace(sample, index=1, labels=("b",)))
    report = DatasetReport(
        reference=name,
        splits={name: 2},
        counts={name: {name: 2}},
        notes=(name,),
        examined=2,
        height=None,
        width=None,
        kinds={name: 2},
        unreadable=(UnreadableFile(split=name, name=name, reason=name),),
        duplicates=(DuplicateGroup(members=pair, exact=True, bits=0),),
        near_duplicates=(),
        **dict.fromkeys(("small", "gray", "blank"), (sample,)),
    )
    sheets = [{"name": name, "total": 2, "image": "data:image/png;base64,"}]
    return pages.dataset_page(report, {name: source}, sheets)


@pytest.mark.parametrize("page", [evaluation, run, inspection, dataset_check])
@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_text(page, name, source):
    reader = read_page(page(name, source))
    scripts = [values.get("type", "") for tag, values in reader.seen if tag == "script"]
    assert scripts == (["application/json", "text/plain", "text/plain", ""] * (page is inspection))
    for tag, values in reader.seen:
        assert not [key for key in values if key.startswith("on")], (tag, values)
    assert name in " ".join(reader.said)
