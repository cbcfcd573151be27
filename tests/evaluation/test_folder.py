"""What an evaluation writes agrees with what it found."""

import csv
import json
import math

import numpy as np
import pytest
import torch

from vitrail.data.datasets import open_dataset
from vitrail.evaluation.assess import assess
from vitrail.evaluation.findings import Findings, Predictions
from vitrail.evaluation.folder import write_folder
from vitrail.evaluation.outcome import Tally

FACTS = {"model": "m", "data": "d"}


@pytest.fixture(scope="module")
def source():
    return open_dataset("builtin:sign-digits", "test")


def findings_of(source, logits, labels, loss="softmax") -> Findings:
    logits, labels = np.asarray(logits, np.float32), np.asarray(labels)
    places = np.arange(len(logits))[::-1].copy()
    several = labels.ndim == 2
    tally = Tally(logits.shape[1], multi_label=several, loss=loss)
    tally.add(*map(torch.from_numpy, (logits, labels, places)))
    predictions = Predictions(
        classes=tuple("abcdefgh"[: logits.shape[1]]),
        logits=logits,
        labels=labels,
        indices=places,
        loss="sigmoid" if several else loss,
    )
    return assess(predictions, tally.finish(source, {}))


def written(folder, findings, source):
    paths = list(write_folder(folder, findings, source, title="t", facts=FACTS))
    assert [path.name for path in paths] == [
        "evaluation.html",
        "evaluation.json",
        "predictions.csv",
    ]
    return rows_of(paths[2])


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_picture_has_a_line(source, tmp_path):
    findings = findings_of(source, [[2.0, 0], [2, 0], [0, 3]], [0, 1, 1])
    rows = written(tmp_path, findings, source)
    assert [row["picture"] for row in rows] == [source.name(n) for n in (2, 1, 0)]
    assert [row["label"] for row in rows] == ["a", "b", "b"]
    assert [row["predicted"] for row in rows] == ["a", "a", "b"]
    assert [row["right"] for row in rows] == ["1", "0", "1"]
    assert float(rows[0]["confidence"]) == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-6)
    assert json.loads((tmp_path / "evaluation.json").read_text())["accuracy"] == 2 / 3
    assert "<html" in (tmp_path / "evaluation.html").read_text()


@pytest.mark.parametrize(
    ("logits", "labels", "loss", "right"),
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
def test_the_right_lines_are_those_that_the_accuracy_counts(
    logits, labels, loss, right, source, tmp_path
):
    findings = findings_of(source, logits, labels, loss)
    rows = written(tmp_path, findings, source)
    assert "".join(row["right"] for row in rows) == right
    assert right.count("1") / len(right) == findings.accuracy
    for row in rows:
        assert (row["predicted"] in row["label"].split("|")) == (row["right"] == "1")


def test_several_labels_stand_side_by_side(source, tmp_path):
    findings = findings_of(source, [[1.0, 2, 3], [1, 2, 3]], [[1, 0, 1], [0, 0, 0]])
    rows = written(tmp_path, findings, source)
    assert [row["label"] for row in rows] == ["a|c", ""]


def test_many_pictures_have_a_line_each(source, tmp_path):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(400, 8)), rng.integers(8, size=400)
    findings = findings_of(source, logits, labels)
    rows = written(tmp_path, findings, source)
    assert len(rows) == 400
    assert sum(row["right"] == "1" for row in rows) / 400 == findings.accuracy


def test_the_page_of_a_run_stays_as_it_is(source, tmp_path):
    (tmp_path / "report.html").write_text("the run's own")
    written(tmp_path, findings_of(source, [[2.0, 0], [0, 3]], [0, 1]), source)
    assert (tmp_path / "report.html").read_text() == "the run's own"
