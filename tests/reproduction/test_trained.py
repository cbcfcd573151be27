"""Experiments that compare trained models: jobs, rules and reports, on made-up results."""

import random
from dataclasses import replace

import pytest

from reproduction import trained
from reproduction.jobs import PROBE, PROTOCOL, Datasets, Result, small_model
from reproduction.report import TEXT
from reproduction.results import Results
from reproduction.runner import EXPERIMENTS, list_jobs
from reproduction.stats import (
    Mean,
    average,
    equality_verdict,
    parts_verdict,
    pooled_means,
    rules_verdict,
    slope,
)
from vitrail.cli.reproduce import NAMES
from vitrail.models.config import BitConfig, MixerConfig, VitConfig
from vitrail.models.registry import configuration

pytestmark = pytest.mark.slow

DATASETS = Datasets("builtin:sign-digits")
RESULT = Result(
    folder=None,
    accuracy=0.5,
    fewshot=0.5,
    images=38_400,
    test_images=2500,
    seconds=1.0,
    config=configuration("ViT-Mu/4"),
)
TRAINED = (
    *("table8", "figure3", "figure4", "figure5", "figure8", "heads", "transfer"),
    "selfsupervised",
)


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    """Drawing takes most of the time; test_reproduction_figures.py does it."""
    for name in ("line_chart", "dot_chart"):
        monkeypatch.setattr(f"reproduction.results.{name}", lambda content: b"<svg/>")


def report(name, accuracy, noise=0.002):
    """Report on runs with the accuracy of their key and a little noise."""
    rng = random.Random(0)
    results = {}
    for key, job in list_jobs(name, DATASETS).items():
        value = accuracy(key) + rng.uniform(-noise, noise)
        results[key] = replace(RESULT, accuracy=value, fewshot=value - 0.05, config=job.config)
    return EXPERIMENTS[name](Results(name, DATASETS, results))


def test_all_experiments_of_the_paper_are_there():
    assert tuple(EXPERIMENTS) == NAMES
    assert len(NAMES) == 16


@pytest.mark.parametrize("name", ["figure3", "figure5", "figure8", "heads"])
def test_probed_models_are_compared_by_fewshot_accuracy(name):
    datasets, results = replace(DATASETS, probes=("builtin:sign-digits",)), {}
    for key, job in list_jobs(name, datasets).items():
        assert job.settings.steps == PROBE["steps_factor"] * PROTOCOL["steps"]
        assert job.start is None
        results[key] = replace(RESULT, accuracy=0.1, fewshot=random.Random(0).random())
        results[key] = replace(results[key], config=job.config)
    result = EXPERIMENTS[name](Results(name, datasets, results))
    assert "closed-form linear probe on 10 images per class of sign-digits" in result.method
    assert "{" not in result.method + result.result
    assert not any("{" in cell for table in result.tables for cell in table.head)


@pytest.mark.parametrize("name", TRAINED)
def test_reports_are_complete(name):
    assert len({key[-1] for key in list_jobs(name, DATASETS)}) >= 2
    result = report(name, lambda key: 0.8)
    assert (result.name, result.title) == (name, TEXT[name]["title"])
    assert all(len(row) == len(table.head) for table in result.tables for row in table.rows)
    assert [figure.file for figure in result.figures] == [f"{name}.svg"]
    assert "arts of the claim" in result.result or "Rule: " in result.method
    assert "{" not in result.method + result.result
    assert result.verdict != "holds" or name == "heads"


def test_small_models_belong_to_their_families():
    kinds = {"ViT": VitConfig, "hybrid": VitConfig, "BiT": BitConfig, "Mixer": MixerConfig}
    for family, sizes in trained.FAMILIES.items():
        for size in sizes:
            model = small_model(f"{family} {size}")
            config = configuration(model.name).change(**model.changes())
            assert isinstance(config, kinds[family])
            assert (getattr(config, "stem", "") == "resnet") == (family == "hybrid")


def test_compared_models_have_similar_compute():
    flops = {key[0]: job.flops for key, job in trained.figure4_jobs(DATASETS).items()}
    for ours, theirs in (("ViT M", "BiT S"), ("ViT L", "BiT M")):
        assert 0.4 < flops[ours] / flops[theirs] < 2.5


def test_experiments_share_runs():
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


def test_the_recipe_agrees_with_the_protocol():
    settings = list_jobs("table8", DATASETS)["learned", "stem", 0].settings
    assert (settings.steps, settings.batch_size) == (PROTOCOL["steps"], PROTOCOL["batch"])
    assert settings.optim.learning_rate == PROTOCOL["rate"]


@pytest.mark.parametrize(
    ("gain", "spread", "verdict"),
    [(0.05, 0.01, "holds"), (0.02, 0.06, "holds in part"), (-0.05, 0.01, "does not hold")],
)
def test_table8_holds_if_positions_gain_more_than_their_kinds_differ(gain, spread, verdict):
    def accuracy(key):
        kind, place, _ = key
        return 0.7 + (0 if kind == "none" else gain + (spread if place == "shared" else 0))

    result = report("table8", accuracy)
    assert result.verdict == verdict
    assert ("significant for 7 of 7 (1-D (stem)," in result.result) == (gain > 0)


@pytest.mark.parametrize(
    ("name", "one"), [("figure4", ("ViT M", "ViT L")), ("figure3", ("ViT L",))]
)
@pytest.mark.parametrize(
    ("first", "last", "verdict"),
    [
        (-0.1, 0.1, "holds"),
        (-0.1, -0.05, "holds in part"),
        (0.05, 0.1, "holds in part"),
        (0.1, -0.1, "does not hold"),
    ],
)
def test_a_crossing_is_distinguished_from_a_trend(name, one, first, last, verdict):
    smallest = min(key[1] for key in list_jobs(name, DATASETS))

    def accuracy(key):
        return 0.7 + (key[0] in one) * (first if key[1] == smallest else last)

    assert report(name, accuracy).verdict == verdict


@pytest.mark.parametrize(
    ("bit", "hybrid", "verdict"),
    [
        (-0.1, 0.1, "holds"),
        (-0.1, -0.1, "holds in part"),
        (0.1, 0.1, "holds in part"),
        (0.1, -0.1, "does not hold"),
        (0.0, 0.0, "inconclusive"),
    ],
)
def test_figure5_holds_if_vit_beats_bit_and_the_hybrid_beats_vit(bit, hybrid, verdict):
    gains = {"BiT": bit, "hybrid": hybrid}
    assert report("figure5", lambda key: 0.7 + gains.get(key[0], 0)).verdict == verdict


@pytest.mark.parametrize(
    ("depth", "width", "patch", "verdict"),
    [
        (0.1, 0.0, 0.1, "holds"),
        (0.0, 0.1, 0.1, "holds in part"),
        (0.1, 0.0, -0.1, "holds in part"),
        (0.0, 0.1, -0.1, "does not hold"),
    ],
)
def test_figure8_holds_if_depth_beats_width_and_smaller_patches_help(depth, width, patch, verdict):
    def accuracy(key):
        axis, value, _ = key
        large = {"depth": {"8"}, "width": {"128"}, "patch": {"4"}}.get(axis, set())
        gain = {"depth": depth, "width": width, "patch": patch}.get(axis, 0)
        return 0.7 + gain * (1 if value in large else -1 if axis in ("patch", "width") else 0)

    assert report("figure8", accuracy).verdict == verdict


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [(0.0, "holds"), (0.01, "holds"), (0.05, "does not hold"), (-0.05, "does not hold")],
)
def test_heads_are_equal_if_their_difference_is_small(gain, verdict):
    result = report("heads", lambda key: 0.8 + gain * (key[0] == trained.MEAN_POOL))
    assert result.verdict == verdict


@pytest.mark.parametrize(
    ("gain", "larger", "verdict"),
    [
        (0.1, 0.01, "holds"),
        (0.1, -0.01, "holds in part"),
        (-0.1, 0.01, "holds in part"),
        (-0.1, -0.01, "does not hold"),
        (0.0, 0.0, "inconclusive"),
    ],
)
def test_transfer_holds_if_it_helps_and_larger_images_are_better(gain, larger, verdict):
    def accuracy(key):
        how, size, _ = key
        return 0.5 + gain * (how == trained.PRETRAINED) + larger * size

    assert report("transfer", accuracy).verdict == verdict


@pytest.mark.parametrize(
    ("labels", "masked", "verdict"),
    [
        (0.1, 0.05, "holds"),
        (0.05, 0.1, "holds in part"),
        (0.1, 0.0, "holds in part"),
        (-0.1, -0.05, "does not hold"),
    ],
)
def test_selfsupervision_holds_between_scratch_and_labels(labels, masked, verdict):
    gains = {trained.LABELS: labels, trained.MASKED: masked}
    assert report("selfsupervised", lambda key: 0.5 + gains.get(key[0], 0)).verdict == verdict


def test_families_are_compared_at_equal_compute():
    one = [(1.0, 0.6), (4.0, 0.8)]
    assert trained.leads_over(one, [(1.0, 0.5), (4.0, 0.7)]) == pytest.approx([0.1] * 9)
    assert trained.leads_over(one, [(2.0, 0.5), (4.0, 0.5)])[0] == pytest.approx(0.2)
    assert trained.leads_over(one, [(8.0, 0.5), (16.0, 0.7)]) == []


def test_slope_is_the_gain_per_doubling():
    flat, steep = Mean((0.5, 0.6), 0.02, 0.01), Mean((0.7, 0.8), 0.02, 0.01)
    line = slope([(1e6, flat), (4e6, steep)])
    assert line.values == pytest.approx((0.1, 0.1))
    assert line.error == pytest.approx(0.02 / 2**0.5)  # one doubling to either side of the mean


def test_errors_of_a_difference_are_those_of_pairs():
    gap = Mean((0.5, 0.7), 0.9, 0.03) - Mean((0.4, 0.6), 0.9, 0.04)
    assert gap.mean == pytest.approx(0.1)
    assert gap.half == pytest.approx(0.05 / 2**0.5)
    assert gap.signed == "+10.0 ± 3.5"
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


def test_errors_of_averages_are_smaller():
    mean = average([Mean((0.5, 0.7), 0.2, 0.1), Mean((0.7, 0.9), 0.2, 0.1)])
    assert mean.values == pytest.approx((0.6, 0.8))
    assert (mean.error, mean.paired) == pytest.approx((0.2 / 2**0.5, 0.1 / 2**0.5))


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
    assert [rules_verdict(one) for one in parts] == verdicts
