"""Tables 1, 2, 5 and 6: reports, and accuracies of given weights next to the published ones."""

import json
from functools import cache
from types import SimpleNamespace

import pytest

from reproduction import tables
from reproduction.jobs import Datasets
from reproduction.published import Accuracy
from reproduction.report import json_value
from reproduction.results import Results
from reproduction.runner import EXPERIMENTS, list_jobs
from reproduction.tables import Measurement, measure_weights
from tiny_models import awake
from tiny_runs import CLASSES, write_colors
from vitrail import save
from vitrail.errors import ConfigError
from vitrail.evaluation.metrics import Estimate

pytestmark = pytest.mark.slow

LARGE = "ViT-L/16 (ImageNet-21k)"


@cache
def report_of(name):
    return EXPERIMENTS[name](Results(name, Datasets("")))


@pytest.mark.parametrize("name", ["table1", "table2", "table5", "table6"])
def test_reports_are_complete(name):
    report = report_of(name)
    assert list_jobs(name, Datasets("")) == {}
    assert "published" in report.claim
    assert "{" not in report.method + report.result
    json.dumps(json_value(report.data), allow_nan=False)
    for table in report.tables:
        assert all(len(row) == len(table.head) for row in table.rows), table.caption
        assert all(isinstance(cell, str) for row in table.rows for cell in row)


def test_parameters_of_table1_and_utilizations_of_table2():
    rows = {row[0]: row for row in report_of("table1").tables[0].rows}
    assert rows["ViT-B/16"][5:9] == ("86 M", "85.8 M", "86.6 M", "without a head")
    assert rows["ViT-L/16"][5:9] == ("307 M", "303.3 M", "304.3 M", "no")
    assert rows["BiT-R50x1"][5:10] == ("-", "23.5 M", "25.5 M", "-", "-")
    assert report_of("table2").verdict == "checked"
    assert "No accuracy was measured" in report_of("table2").result
    shares = {key: share for key, (_, share) in tables.utilizations().items()}
    assert shares["ViT-H/14 (JFT)", 14] == pytest.approx(0.32, abs=0.01)
    assert shares["ViT-L/16 (JFT)", 14] == pytest.approx(0.43, abs=0.01)


def test_weights_may_be_for_one_dataset(tiny, tmp_path):
    bundle, data = str(tmp_path / "bundle"), str(write_colors(tmp_path / "colors.npz"))
    save(awake(tiny), bundle, class_names=CLASSES)
    weights = {f"{LARGE}@Pets": bundle, "ViT-B/16 (JFT)": bundle}
    measurements = measure_weights(weights, {"CIFAR-10": data, "Pets": data}, "table5")
    assert [(m.model, m.data) for m in measurements] == [
        (LARGE, "Pets"),
        ("ViT-B/16 (JFT)", "CIFAR-10"),
        ("ViT-B/16 (JFT)", "Pets"),
    ]
    assert {m.images for m in measurements} == {12}
    assert all(0 <= m.ours.low <= m.ours.value <= m.ours.high <= 100 for m in measurements)
    report = tables.table5(Results("table5", Datasets("")), measurements)
    assert report.tables[-1].rows[0][2] == "94.73"


def test_real_labels_are_measured_with_the_images_of_imagenet(monkeypatch):
    calls = []
    estimates = {"accuracy": Estimate(0.8, 0.7, 0.9), "real_accuracy": Estimate(0.9, 0.8, 1.0)}

    def evaluate(model, data, real=None):
        calls.append((model, data, real))
        return SimpleNamespace(estimates=estimates, samples=10)

    monkeypatch.setattr(tables, "evaluate", evaluate)
    data = {"ImageNet": "images", "ImageNet ReaL": "real.json"}
    measurements = measure_weights({LARGE: "weights"}, data, "table2")
    assert calls == [("weights", "images", "real.json")]
    values = [(m.data, m.ours.value) for m in measurements]
    assert values == [("ImageNet", 80), ("ImageNet ReaL", 90)]


@pytest.mark.parametrize(
    ("weights", "data", "message"),
    [
        ({"ViT-L/16": "w"}, {"ImageNet": "d"}, "ambiguous"),
        ({LARGE: "w"}, {"imagenet": "d"}, "did you mean 'ImageNet'"),
        ({LARGE: "w"}, {}, "needs data, such as"),
        ({LARGE: "w"}, {"VTAB": "d"}, "vitrail vtab"),
        ({LARGE: "w"}, {"ImageNet ReaL": "d"}, "give both"),
        ({f"{LARGE}@Pets": "w"}, {"ImageNet": "d"}, "are for Pets, but --data has: ImageNet"),
    ],
)
def test_impossible_measurements_are_refused(weights, data, message):
    with pytest.raises(ConfigError, match=message):
        measure_weights(weights, data, "table2")


def accuracy(published):
    ours = Estimate(85.0, 84.7, 85.3)
    return Measurement(model="m", data="d", published=published, ours=ours, images=1)


def test_agreement_with_published_numbers_decides_the_verdict():
    assert accuracy(Accuracy(85.3)).agrees
    assert accuracy(Accuracy(85.7, 0.2)).agrees
    assert not accuracy(Accuracy(85.8, 0.2)).agrees
    assert not accuracy(Accuracy(84.6)).agrees
    assert accuracy(Accuracy(84.5, 0.2)).agrees
    verdicts = {(): "checked", (85.0,): "holds", (85.0, 90.0): "holds in part"}
    for published, verdict in (verdicts | {(90.0,): "does not hold"}).items():
        measurements = [accuracy(Accuracy(value)) for value in published]
        assert tables.table2(Results("table2", Datasets("")), measurements).verdict == verdict
