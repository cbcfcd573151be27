"""The files of an evaluation agree with its result."""

import csv
import json
import math

import numpy as np
import pytest

from vitrail.evaluation.evaluate import compute_metrics
from vitrail.evaluation.results import EvaluationResult, Predictions
from vitrail.reports import pages
from vitrail.reports.pages import write_evaluation

pytestmark = pytest.mark.slow

FACTS = {"model": "m", "data": "d"}


def result_of(source, logits, labels, loss="softmax") -> EvaluationResult:
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
    paths = list(write_evaluation(folder, result, source, title="t", facts=FACTS))
    assert [path.name for path in paths] == [
        "evaluation.html",
        "evaluation.json",
        "predictions.csv",
    ]
    return rows_of(paths[2])


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_per_image(source, tmp_path):
    result = result_of(source, [[2.0, 0], [2, 0], [0, 3]], [0, 1, 1])
    rows = written(tmp_path, result, source)
    assert [row["picture"] for row in rows] == [source.name(n) for n in (2, 1, 0)]
    assert [row["label"] for row in rows] == ["a", "b", "b"]
    assert [row["predicted"] for row in rows] == ["a", "a", "b"]
    assert [row["right"] for row in rows] == ["1", "0", "1"]
    assert float(rows[0]["confidence"]) == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-6)
    assert json.loads((tmp_path / "evaluation.json").read_text())["accuracy"] == 2 / 3
    assert "<html" in (tmp_path / "evaluation.html").read_text()


@pytest.mark.parametrize(
    ("logits", "labels", "loss", "correct"),
    [
        ([[17.5, 30.0]] * 2, [0, 1], "sigmoid", "01"),  # both are 1.0 in float32
        ([[math.nan, 1.0], [1.0, math.nan], [3.0, 0.0]], [0, 1, 0], "softmax", "001"),
        ([[math.nan] * 2] * 2, [0, 1], "sigmoid", "00"),
        ([[120.0, 150.0]] * 2, [0, 1], "softmax", "01"),
        (
            [[20.0, 30, 0], [9.0, 8, 7], [math.nan] * 3],
            [[0, 1, 1], [0, 0, 0], [1, 0, 0]],
            "sigmoid",
            "100",
        ),
    ],
)
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
    written(tmp_path, result, source)
    old = (tmp_path / "evaluation.html").read_text()

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(pages, "mistake_figures", interrupt)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, result, source)
    assert (tmp_path / "evaluation.html").read_text() == old
