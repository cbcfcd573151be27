"""Experiments that compare trained models: jobs, rules and reports, on made-up results."""

import random
from dataclasses import replace

import pytest

from reproduction import results as module
from reproduction import trained
from reproduction.figures import Point
from reproduction.jobs import PROBE, PROTOCOL, Datasets, Result
from reproduction.report import TEXT
from reproduction.results import Mean, Results, equality_verdict, parts_verdict, pooled_means
from reproduction.runner import EXPERIMENTS, list_jobs
from vitrail.models.registry import configuration

pytestmark = pytest.mark.slow

DATASETS = Datasets("builtin:sign-digits")
MUON = pytest.approx(0.02 / 0.003)  # its learning rate relative to AdamW's
ABOUT = {"accuracy": 0.5, "fewshot": 0.5, "images": 38_400, "test_images": 2500, "seconds": 1.0}
RESULT = Result(folder=None, config=configuration("ViT-Mu/4"), **ABOUT)


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    """Drawing takes most of the time; test_reproduction_report.py does it."""
    for name in ("line_chart", "dot_chart"):
        monkeypatch.setattr(f"reproduction.results.{name}", lambda content: b"<svg/>")


def report(name, accuracy, noise=0.002):
    """Report on runs with the accuracy of their key and a little noise."""
    rng = random.Random(0)
    results = {}
    for key, job in list_jobs(name, DATASETS).items():
        value = accuracy(key) + rng.uniform(-noise, noise)
        results[key] = RESULT._replace(accuracy=value, fewshot=value - 0.05, config=job.config)
    return EXPERIMENTS[name](Results(name, DATASETS, results))


@pytest.mark.parametrize("name", ["figure3", "figure5", "figure8", "heads"])
def test_probed_models_are_compared_by_fewshot_accuracy(name):
    datasets, results = replace(DATASETS, probes=("builtin:sign-digits",)), {}
    for key, job in list_jobs(name, datasets).items():
        settings = job.settings
        assert (settings.optim.kind, settings.batch_size) == ("muon", PROBE["batch"])
        assert settings.optim.muon_learning_rate / settings.optim.learning_rate == MUON
        assert (job.start, job.half) == (None, "")
        fewshot = random.Random(0).random()
        results[key] = RESULT._replace(accuracy=0.1, fewshot=fewshot, config=job.config)
    assert {key[-1] for key in results} == {*range(PROBE["seeds"])}
    if name == "figure3":
        assert max(key[1] for key in results) == 1653  # images of all classes
    result = EXPERIMENTS[name](Results(name, datasets, results))
    assert "closed-form linear probe on 10 images per class of sign-digits" in result.method
    assert f"({PROBE['seeds']} seeds)" in result.method or name == "figure5"
    assert "{" not in result.method + result.result
    assert not any("{" in cell for table in result.tables for cell in table.head)


def test_experiments_share_runs_and_compare_models_of_similar_compute():
    flops = {key[0]: job.flops for key, job in trained.figure4_jobs(DATASETS).items()}
    for ours, theirs in (("ViT M", "BiT S"), ("ViT L", "BiT M")):
        assert 0.4 < flops[ours] / flops[theirs] < 2.5
    base = list_jobs("table8", DATASETS)["learned", "stem", 0]
    assert base == list_jobs("figure5", DATASETS)["ViT", "M", 0]
    assert base == list_jobs("figure8", DATASETS)["base", "", 0]
    assert base == list_jobs("heads", DATASETS)[trained.CLASS_TOKEN, PROTOCOL["rate"], 0]
    assert base == trained.figure4_jobs(DATASETS)["ViT M", 1653, 0]


def test_without_a_target_models_transfer_to_the_other_classes():
    job = trained.transfer_jobs(DATASETS)[trained.PRETRAINED, 32, 0]
    assert (job.half, job.start.half) == ("odd", "even")
    assert job.data == job.start.data == DATASETS.pretrain
    assert job.images == PROTOCOL["fine_images"]
    job = trained.transfer_jobs(Datasets("a.npz", "b.npz"))[trained.PRETRAINED, 32, 0]
    assert (job.half, job.start.half, job.data, job.start.data) == ("", "", "b.npz", "a.npz")


def gains(by_name):
    return lambda key: by_name.get(key[0], 0)


def at_ends(name, models, first, last):
    """Return gains of models with the smallest set, and with larger ones."""
    smallest = min(key[1] for key in list_jobs(name, DATASETS))
    return lambda key: (key[0] in models) * (first if key[1] == smallest else last)


def positions(gain, spread):
    return lambda key: 0 if key[0] == "none" else gain + spread * (key[1] == "shared")


def scaled(depth, width, patch):
    large = {"depth": ("8", depth, 0), "width": ("128", width, -1), "patch": ("4", patch, -1)}

    def gain(key):
        value, effect, otherwise = large.get(key[0], ("", 0, 0))
        return effect * (1 if key[1] == value else otherwise)

    return gain


def resized(gain, larger):
    return lambda key: gain * (key[0] == trained.PRETRAINED) + larger * key[1]


ENDS = {"figure4": ("ViT M", "ViT L"), "figure3": ("ViT L",)}
HOLDS, PART, FAILS, OPEN = "holds", "holds in part", "does not hold", "inconclusive"
RULES = [
    # Positions gain more than their kinds differ.
    ("table8", positions(0.05, 0.01), HOLDS),
    ("table8", positions(0.02, 0.06), PART),
    ("table8", positions(-0.05, 0.01), FAILS),
    # The larger model is worse with few images and better with many: a crossing, not a trend.
    *((name, at_ends(name, models, -0.1, 0.1), HOLDS) for name, models in ENDS.items()),
    *((name, at_ends(name, models, -0.1, -0.05), PART) for name, models in ENDS.items()),
    *((name, at_ends(name, models, 0.05, 0.1), PART) for name, models in ENDS.items()),
    *((name, at_ends(name, models, 0.1, -0.1), FAILS) for name, models in ENDS.items()),
    # ViT beats BiT, and the small hybrid beats ViT.
    ("figure5", gains({"BiT": -0.1, "hybrid": 0.1}), HOLDS),
    ("figure5", gains({"BiT": -0.1, "hybrid": -0.1}), PART),
    ("figure5", gains({"BiT": 0.1, "hybrid": 0.1}), PART),
    ("figure5", gains({"BiT": 0.1, "hybrid": -0.1}), FAILS),
    ("figure5", gains({}), OPEN),
    # Depth beats width, and smaller patches help.
    ("figure8", scaled(0.1, 0.0, 0.1), HOLDS),
    ("figure8", scaled(0.0, 0.1, 0.1), PART),
    ("figure8", scaled(0.1, 0.0, -0.1), PART),
    ("figure8", scaled(0.0, 0.1, -0.1), FAILS),
    # Heads are equally good.
    ("heads", gains({trained.MEAN_POOL: 0.01}), HOLDS),
    ("heads", gains({trained.MEAN_POOL: 0.05}), FAILS),
    ("heads", gains({trained.MEAN_POOL: -0.05}), FAILS),
    # Pre-training helps, and larger images are better.
    ("transfer", resized(0.1, 0.01), HOLDS),
    ("transfer", resized(0.1, -0.01), PART),
    ("transfer", resized(-0.1, 0.01), PART),
    ("transfer", resized(-0.1, -0.01), FAILS),
    ("transfer", resized(0.0, 0.0), OPEN),
    # Masked patches are between scratch and labels.
    ("selfsupervised", gains({trained.LABELS: 0.1, trained.MASKED: 0.05}), HOLDS),
    ("selfsupervised", gains({trained.LABELS: 0.05, trained.MASKED: 0.1}), PART),
    ("selfsupervised", gains({trained.LABELS: 0.1}), PART),
    ("selfsupervised", gains({trained.LABELS: -0.1, trained.MASKED: -0.05}), FAILS),
]


@pytest.mark.parametrize(("name", "gain", "verdict"), RULES)
def test_verdicts_follow_their_rules_and_reports_are_complete(name, gain, verdict):
    result = report(name, lambda key: 0.6 + gain(key))
    assert result.verdict == verdict
    assert (result.name, result.title) == (name, TEXT[name]["title"])
    assert all(len(row) == len(table.head) for table in result.tables for row in table.rows)
    assert [figure.file for figure in result.figures] == [f"{name}.svg"]
    assert "arts of the claim" in result.result or "Rule: " in result.method
    assert "{" not in result.method + result.result
    assert len({key[-1] for key in list_jobs(name, DATASETS)}) >= 2  # seeds


def test_families_are_compared_at_equal_compute():
    one = [Point(1.0, 0.6), Point(4.0, 0.8)]
    same = [Point(1.0, 0.5), Point(4.0, 0.7)]
    assert trained.leads_over(one, same) == pytest.approx([0.1] * 9)
    larger = [Point(2.0, 0.5), Point(4.0, 0.5)]
    assert trained.leads_over(one, larger)[0] == pytest.approx(0.2)


def test_errors_of_differences_slopes_and_averages():
    gap = Mean((0.5, 0.7), 0.9, 0.03) - Mean((0.4, 0.6), 0.9, 0.04)
    assert gap.mean == pytest.approx(0.1)
    assert gap.half == pytest.approx(0.05 / 2**0.5)
    assert gap.signed == "+10.0 ± 3.5"
    line = module.slope([(1e6, Mean((0.5, 0.6), 0.02, 0.01)), (4e6, Mean((0.7, 0.8), 0.02, 0.01))])
    assert line.values == pytest.approx((0.1, 0.1))  # per doubling
    assert line.error == pytest.approx(0.02 / 2**0.5)  # one doubling to either side of the mean
    mean = module.average([Mean((0.5, 0.7), 0.2, 0.1), Mean((0.7, 0.9), 0.2, 0.1)])
    assert mean.values == pytest.approx((0.6, 0.8))
    assert (mean.error, mean.paired) == pytest.approx((0.2 / 2**0.5, 0.1 / 2**0.5))
    assert (-gap).signed == "-10.0 ± 3.5"


def test_deviations_are_pooled_and_common_effects_of_a_seed_cancel():
    values = {("a", 0): 0.5, ("a", 1): 0.6, ("b", 0): 0.7, ("b", 1): 0.8}
    means = pooled_means(values)
    # squares 4 * 0.05**2 over 2 degrees of freedom, t = 4.303
    assert means["a",].error == means["b",].error == pytest.approx(4.303 * 0.005**0.5)
    assert means["a",].text == "55.0 ± 21.5"
    assert (means["b",] - means["a",]).half == pytest.approx(0, abs=1e-9)
    means = pooled_means(values | {("b", 1): 0.7})
    # residuals of 0.025 in all four, one degree of freedom, t = 12.706
    assert means["a",].paired == pytest.approx(12.706 * 0.05)


def test_verdicts_need_whole_intervals():
    up, down, wide = Mean((0.1, 0.1), 0.1), Mean((-0.1, -0.1), 0.1), Mean((0.1, 0.1), 0.2)
    assert parts_verdict([up, up]) == "holds"
    assert parts_verdict([up, wide]) == parts_verdict([up, down]) == "holds in part"
    assert parts_verdict([wide, down]) == "does not hold"
    assert parts_verdict([wide, wide]) == "inconclusive"
    assert equality_verdict(Mean((0.0, 0.0), 0.05), 0.02) == "inconclusive"
    assert equality_verdict(Mean((0.025, 0.025), 0.01), 0.02) == "inconclusive"
    parts = ([True, True], [True, False], [False, False])
    verdicts = ["holds", "holds in part", "does not hold"]
    assert [module.rules_verdict(one) for one in parts] == verdicts
