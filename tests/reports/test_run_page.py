import math
import re
from itertools import pairwise

import numpy as np
import pytest

from page_reader import Reader
from vitrail import DataError
from vitrail.data.datasets import open_dataset
from vitrail.evaluation.results import EvaluationResult, Mistake
from vitrail.reports import pages as module
from vitrail.reports.pages import Report, points, write_report

pytestmark = pytest.mark.slow


def rows(steps=200):
    for step in range(10, steps + 1, 10):
        yield {
            "step": step,
            "epoch": step / 50,
            "loss": 2 / step,
            "learning_rate": 1e-3,
            "grad_norm": 1.0,
            "images_per_second": 900.0,
            "seconds": step / 10,
        }
        if step % 50 == 0:
            yield {"step": step, "epoch": step / 50, "val/accuracy": 0.9, "val/loss": 0.3}


def outcome(source, **more):
    labels = source.labels()
    confusion = np.diag(np.bincount(labels, minlength=10))
    confusion[3, 3] -= 2
    confusion[3, 5] += 2
    wrong = np.flatnonzero(labels == 3)[:2]
    mistakes = [Mistake(int(n), source.name(int(n)), 3, 5, 0.97, 0.01) for n in wrong]
    values = {
        "samples": len(labels),
        "accuracy": 1 - 2 / len(labels),
        "top5": 1.0,
        "loss": 0.1,
        "confusion": confusion,
        "mistakes": tuple(mistakes),
        "skipped": {},
    }
    return EvaluationResult(**values | more)


@pytest.fixture(scope="module")
def source():
    return open_dataset("builtin:sign-digits", "test")


@pytest.fixture
def full(source):
    return Report(
        title="my run",
        facts={"model": "ViT-Pico/8", "data": "signs", "time": "4 min 2 s", "parameters": "2,671"},
        rows=list(rows()),
        choices=["batches of 32: few pictures"],
        outcomes={"test": outcome(source)},
        sources={"test": source},
        class_names=source.classes,
        settings_toml='[model]\nname = "ViT-Pico/8"',
        timings={"training": 200.0, "evaluation": 42.0},
        skipped={"a.jpg": "it is cut off"},
        next_steps=["vitrail convert runs/x", "try `--minutes 9`"],
    )


def changed(report, **more):
    return Report(**{**vars(report), **more})


def written(report, tmp_path):
    write_report(tmp_path / "report.html", report)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_run_page_is_complete_and_self_contained(full, tmp_path):
    text = written(full, tmp_path)
    reader = Reader(text)
    assert all(value.startswith("data:image/") for value in reader.asked)
    assert len(reader.asked) == 2
    assert "http://" not in text
    assert "https://" not in text
    assert "<script" not in text
    assert not re.search(r"url\((?!#)", text)
    assert len(text) < 300_000
    said = " ".join(reader.said)
    for words in (
        *("my run", "99.5\xa0%", "407 of 409 correct", "4 min 2 s", "2,671", "ViT-Pico/8"),
        *("Loss", "Accuracy", "Learning rate", "Images per second", "it is cut off"),
        *("batches of 32", "few pictures", "3 min 20 s", "vitrail convert runs/x", "--minutes 9"),
        *("predicted as", "(97\xa0%)", "[model]"),
    ):
        assert words in said, words
    alts = [values["alt"] for tag, values in reader.seen if tag == "img"]
    assert alts == ["3, predicted as 5"] * 2
    levels = [int(tag[1]) for tag, _ in reader.seen if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert "95\xa0% CI 98.2-99.9\xa0%" in text
    surrogate = changed(full, skipped={"\udcff.jpg": "it is broken"})
    assert "?" in written(surrogate, tmp_path)


def test_minimal_run(full, tmp_path):
    text = written(Report(title="bare", facts={}, rows=[]), tmp_path)
    assert "<h2>" not in text
    Reader(text)
    text = written(changed(full, outcomes={}, sources={}), tmp_path)  # masked patches
    assert "Confusion matrix" not in text
    Reader(text)


def test_multi_label_run(full, source, tmp_path):
    multi_label = outcome(
        source, accuracy=1.0, confusion=None, mistakes=(Mistake(0, "x", (1, 2), 5, 0.9, 0.1),)
    )
    text = written(changed(full, outcomes={"test": multi_label}), tmp_path)
    assert "Confusion matrix" not in text
    assert "<b>1, 2</b>" in text
    assert "95\xa0% CI 99.1-100\xa0%" in text


def test_failed_run_page_leaves_the_old_one(full, tmp_path, monkeypatch):
    old = written(full, tmp_path)

    def interrupt(*args):
        raise KeyboardInterrupt

    with pytest.raises(DataError, match="cannot write"):
        write_report(tmp_path / "report.html" / "report.html", full)
    monkeypatch.setattr(module, "curves", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path / "report.html", full)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == old
    assert len(list(tmp_path.iterdir())) == 1


def test_repeated_steps_replace_earlier_ones():
    again = [{"step": s, "loss": v} for s, v in ((10, 1.0), (20, 9.0), (30, 99.0), (15, 0.9))]
    assert points([*again, {"step": 25, "loss": None}, {"step": 26}], "loss")[:2] == [
        (10, 1.0),
        (15, 0.9),
    ]
    assert math.isnan(points([{"step": 1, "loss": None}], "loss")[0][1])


def test_thousand_classes_and_a_long_run_stay_small(full, source, tmp_path):
    rng = np.random.default_rng(0)
    confusion = rng.poisson(0.05, (1000, 1000)) + np.diag(np.full(1000, 30))
    many = outcome(source, confusion=confusion, mistakes=(), samples=int(confusion.sum()))
    names = [f"a rather long name of class {n}" for n in range(1000)]
    page = changed(
        full, outcomes={"val": many}, class_names=names, rows=list(rows(200_000)), sources={}
    )
    assert len(written(page, tmp_path)) < 400_000
