import math
import re
from itertools import pairwise

import numpy as np
import pytest

from page_reader import Reader
from vitrail import DataError
from vitrail.data.storage import write_atomic
from vitrail.evaluation.results import EvaluationResult, Mistake
from vitrail.reports.pages import points, run_page

pytestmark = pytest.mark.slow


FACTS = {"model": "ViT-Pico/8", "data": "signs", "time": "4 min 2 s", "parameters": "2,671"}


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


@pytest.fixture
def full(source):
    return {
        "title": "my run",
        "facts": FACTS,
        "rows": list(rows()),
        "choices": ["batches of 32: few pictures"],
        "outcomes": {"test": outcome(source)},
        "sources": {"test": source},
        "class_names": source.classes,
        "settings": '[model]\nname = "ViT-Pico/8"',
        "timings": {"training": 200.0, "evaluation": 42.0},
        "skipped": {"a.jpg": "it is cut off"},
        "next_steps": ["vitrail convert runs/x", "try `--minutes 9`"],
    }


def test_run_page_is_complete_and_self_contained(full):
    text = run_page(**full)
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


def test_minimal_run(full):
    assert "<h2>" not in run_page(title="bare", facts={}, rows=[])
    text = run_page(**full | {"outcomes": {}, "sources": {}})  # masked patches
    assert "Confusion matrix" not in text
    Reader(text)


def test_page_with_an_undecodable_file_name_is_written(full, tmp_path):
    page, path = run_page(**full | {"skipped": {"\udcff.jpg": "broken"}}), tmp_path / "report.html"
    write_atomic(path, page)
    assert "?.jpg" in path.read_text(encoding="utf-8")
    with pytest.raises(DataError, match="cannot write"):
        write_atomic(path / "report.html", page)


def test_multi_label_run(full, source):
    multi_label = outcome(
        source, accuracy=1.0, confusion=None, mistakes=(Mistake(0, "x", (1, 2), 5, 0.9, 0.1),)
    )
    text = run_page(**full | {"outcomes": {"test": multi_label}})
    assert "Confusion matrix" not in text
    assert "<b>1, 2</b>" in text
    assert "95\xa0% CI 99.1-100\xa0%" in text


def test_repeated_steps_replace_earlier_ones():
    again = [{"step": s, "loss": v} for s, v in ((10, 1.0), (20, 9.0), (30, 99.0), (15, 0.9))]
    assert points([*again, {"step": 25, "loss": None}, {"step": 26}], "loss")[:2] == [
        (10, 1.0),
        (15, 0.9),
    ]
    assert math.isnan(points([{"step": 1, "loss": None}], "loss")[0][1])


def test_thousand_classes_and_a_long_run_stay_small(full, source):
    rng = np.random.default_rng(0)
    confusion = rng.poisson(0.05, (1000, 1000)) + np.diag(np.full(1000, 30))
    many = outcome(source, confusion=confusion, mistakes=(), samples=int(confusion.sum()))
    names = [f"a rather long name of class {n}" for n in range(1000)]
    long = {"outcomes": {"val": many}, "class_names": names, "rows": list(rows(200_000))}
    assert len(run_page(**full | long | {"sources": {}})) < 400_000
