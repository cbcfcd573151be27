"""HTML in the name of a class, a file, a split or a model is shown as text on every page."""

import re
from dataclasses import replace

import numpy as np
import pytest
from test_inspection_page import EVERYTHING, SCATTER, STATS, curves, image_of

from page_reader import Reader
from vitrail.data.check import DatasetReport, DuplicateGroup, SampleInfo, UnreadableFile
from vitrail.evaluation.results import ClassMetrics, EvaluationResult, Mistake
from vitrail.inspection.faithfulness import Faithfulness
from vitrail.inspection.representations import Neighbor
from vitrail.reports.inspection import inspection_page
from vitrail.reports.pages import dataset_page, evaluation_page, run_page

NAMES = [
    "<script>alert(1)</script>\"'&",
    "</script></style></svg><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)' \" onclick=\"alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</title><!-- javascript:alert(1)",
]


def result(name, **changes):
    """An evaluation of three classes with mistakes and unreadable files."""
    classes = [f"{n} {name}" for n in range(3)]
    values = {
        "samples": 30,
        "accuracy": 0.8,
        "top5": None,
        "loss": 0.5,
        "confusion": np.array([[4, 6, 0], [0, 10, 0], [0, 0, 10]]),
        "mistakes": (Mistake(0, name, 0, 1, 0.5, 0.1),),
        "skipped": {name: name},
        "classes": tuple(ClassMetrics(c, 10, 0.8, 0.7, 0.75) for c in classes),
        "notes": (f"{name} `{name}`",),
    }
    return EvaluationResult(**values | changes)


def evaluation(name, source):
    facts = {name: name, "model": name, "data": name}
    return evaluation_page(result(name), source, title=name, facts=facts)


def run(name, source):
    return run_page(
        title=name,
        facts={name: name, "model": name, "time": name},
        rows=[{"step": 1, f"{name}/loss": 1.0, f"{name}/accuracy": 0.5, "loss": 1.0}],
        choices=[f"{name}: `{name}`", name],
        outcomes={name: result(name)},
        sources={name: source},
        class_names=[f"{n} {name}" for n in range(10)],
        settings=name,
        timings={name: 1.0},
        skipped={f"x{name}": name},
        next_steps=[f"vitrail {name}", name],
    )


def inspection(name, source):
    values, pixels = np.eye(2, 3), np.zeros((9, 9, 3), np.uint8)
    image = image_of(
        name,
        label=name,
        predictions=((name, 0.5),),
        maps={name: values},
        class_maps={name: {name: values}},
        neighbors=(Neighbor(name, name, 1.0, pixels),),
    )
    hostile = replace(
        EVERYTHING,
        title=name,
        facts={name: name},
        prefix=(name,),
        images=(image,),
        positions={name: EVERYTHING.positions["positions"]},
        attention=STATS._replace(distance={name: np.ones((2, 2))}),
        faithfulness=Faithfulness(curves={name: curves(0.5, 0.5)}, sanity={name: 0.9}, images=1),
        scatter=SCATTER._replace(classes=(name,) * 3, method=name),
        notes=(name,),
    )
    return inspection_page(hostile)


def dataset_check(name, source):
    sample = SampleInfo(split=name, index=0, name=name, labels=(name,))
    other = replace(sample, index=1, labels=("b",))
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
        duplicates=(DuplicateGroup(members=(sample, other), exact=True, bits=0),),
        near_duplicates=(),
        small=(sample,),
        gray=(sample,),
        blank=(sample,),
    )
    sheets = [{"name": name, "total": 2, "image": "data:image/png;base64,"}]
    return dataset_page(report, {name: source}, sheets)


@pytest.mark.parametrize("page", [evaluation, run, inspection, dataset_check])
@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_text(page, name, source):
    text = page(name, source)
    reader = Reader(text)
    scripts = [values.get("type", "") for tag, values in reader.seen if tag == "script"]
    assert scripts == (["application/json", "text/plain", "text/plain", ""] * (page is inspection))
    for tag, values in reader.seen:
        assert not [key for key in values if key.startswith("on")], (tag, values)
    assert all(value.startswith(("data:image/", "#")) for value in reader.asked)
    assert name in " ".join(reader.said)
    assert len(re.findall("<h1>", text)) == 1
