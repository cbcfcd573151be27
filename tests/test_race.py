"""The time-to-accuracy benchmark: its bookkeeping, and one short run of every library."""

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tiny_runs import write_colors
from vitrail import VitConfig
from vitrail.models.registry import configuration
from vitrail.planning.flops import cost_of

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # it is on no package's path

import race
import race_clock
import race_models as models
import race_report
import race_sets
import race_variants
import result_cache
import runners
from race_report import Best, Entry

pytestmark = pytest.mark.slow

TINY = VitConfig(
    depth=1, width=16, mlp_width=32, heads=2, patch_size=4, image_size=8, num_classes=3
)


def entry(name, *runs):
    """Each run is a curve: a list of (seconds, accuracy)."""
    constant = {"steps": 10, "parameters": 1000, "gflops": 0.02}
    results = [
        {"accuracy": curve[-1][1], "seconds": curve[-1][0], "curve": curve, **constant}
        for curve in runs
    ]
    return Entry(name, "settings", results)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(result_cache, "FOLDER", tmp_path / ".bench")
    return tmp_path / ".bench"


def test_results_are_made_once_and_failed_runs_leave_nothing(bench):
    made = []
    for key in ("a/b, 1e-3: c", "a/b, 1e-3: c", "a b", "a-b"):
        result_cache.cached(key, lambda: {"n": made.append(1) or len(made)})
    assert len(made) == 3
    result_cache.forget()
    with pytest.raises(TypeError):
        result_cache.cached("key", lambda: {"n": object()})  # no JSON
    with pytest.raises(ZeroDivisionError):
        result_cache.cached("key", lambda: {"n": 1 / 0})
    assert not bench.exists() or not os.listdir(bench)
    assert result_cache.cached("key", lambda: {"n": 2}) == {"n": 2}


def test_speedup_is_measured_at_equal_accuracy():
    peers = [
        entry("timm", [(30, 0.5), (60, 0.6)], [(30, 0.7), (60, 0.8)]),  # 0.6, 0.7 in the mean
        entry("other", [(30, 0.72), (60, 0.6)]),  # best on the way
    ]
    best = race_report.best_of(peers)
    assert best == Best("other", 30, 0.72)
    ours = [entry("vitrail", [(60, 0.9)]), entry("vitrail", [(20, 0.72)])]
    assert race_report.times_quicker(ours, best) == 30 / 20
    ours += [entry("vitrail", [(10, 0.75)], [(10, 0.68)])]  # 0.715 is less
    assert race_report.times_quicker(ours, best) == 30 / 20
    peers, ours = [entry("timm", [(90, 0.8)])], [entry("vitrail", [(90, 0.799)])]
    assert race_report.times_quicker(ours, race_report.best_of(peers)) is None
    assert "not reached" in race_report.conclusion("set", ours, peers)[0]
    table = race_variants.VARIANTS
    for best in race_variants.BEST.values():
        assert set(best) == set(table)
        assert all(variant in table[contender] for contender, variant in best.items())


def test_evaluations_are_evenly_spaced_and_not_timed():
    time, looks = SimpleNamespace(now=0.0), race_clock.EVALUATIONS
    clock = race_clock.AccuracyClock(torch.zeros(2, 1), torch.tensor([0, 1]), seconds=looks)
    clock.clock = race_clock.Clock(lambda: time.now)

    def predict(images):
        time.now += 100
        return torch.tensor([[1.0, 0.0]]).expand(len(images), 2)

    steps, time.now = 1, 0.5
    while clock.keep_training(predict):
        steps, time.now = steps + 1, time.now + 0.5
    assert steps == 2 * looks
    assert clock.curve == [(float(second), 0.5) for second in range(1, looks + 1)]


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return str(write_colors(tmp_path_factory.mktemp("race") / "colors.npz", train=60, test=30))


QUICK = race_variants.Variant(rate=1e-2, batch=16, crop=(0.5, 1.0), jitter=None)
CONTENDERS = {
    "timm": QUICK,
    "timm, deit": replace(race_variants.DEIT, rate=1e-2, batch=16),
    "transformers": QUICK,
    "vit-pytorch": QUICK,
}


@pytest.mark.reference
@pytest.mark.filterwarnings("default")  # of the peers
@pytest.mark.parametrize("recipe", CONTENDERS)
def test_every_library_learns_colors_within_its_budget(colors, recipe, monkeypatch):
    runners.make_torchvision_importable()
    peer = recipe.partition(",")[0]
    pytest.importorskip({"transformers": "accelerate"}.get(peer, peer.replace("-", "_")))
    ticks = itertools.count()  # each look at the clock is a hundredth of a second later
    clock = (lambda: next(ticks) / 100,)
    monkeypatch.setattr(race_clock.Clock.__init__, "__defaults__", clock)
    task = runners.Task(data=colors, config=TINY, variant=CONTENDERS[recipe], seconds=4, seed=0)
    result = runners.run_peer(peer, task)
    assert len(result["curve"]) == race_clock.EVALUATIONS
    assert result["seconds"] >= 4
    assert result["accuracy"] > 0.6  # a third by chance
    assert json.loads(json.dumps(result))["parameters"] > 1000


def test_vitrail_runs_within_its_budget(colors):
    result = runners.run_vitrail(colors, seconds=1.0, seed=0)
    assert 0 < result["seconds"] < 30  # a busy machine ends later than it planned
    assert result["steps"] > 0
    assert 0 <= result["accuracy"] <= 1


@pytest.mark.reference
def test_models_of_all_libraries_have_equal_flops():
    runners.make_torchvision_importable()
    pytest.importorskip("vit_pytorch")
    ours = configuration("ViT-Femto/4").change(
        num_classes=10, channels=1, image_size=28, stem="conv", pool="mean"
    )
    config = models.with_equal_flops(ours)
    makers = (models.timm_model, models.transformers_model, models.vit_pytorch_model)
    sizes = [models.size_of(make(config), config)["gflops"] for make in makers]
    assert max(sizes) == pytest.approx(min(sizes), rel=1e-3)
    assert sizes[0] == pytest.approx(cost_of(config).forward / 1e9, rel=1e-3)
    assert sizes[0] == pytest.approx(cost_of(ours).forward / 1e9, rel=0.02)


def test_missing_data_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(tmp_path))
    words = race.report().splitlines()
    assert words[0] == "## Time to accuracy"
    assert "cifar10_10k.npz" in words[2]
    assert len([line for line in words if line]) == 2


def test_interrupted_benchmark_resumes(bench, tmp_path, monkeypatch):
    ran = []

    def run_process(what, options):
        ran.append(what)
        if len(ran) == 5:
            raise KeyboardInterrupt
        seconds = float(options[options.index("--seconds") + 1])
        points = [(seconds * part / 3, 0.3 * part) for part in (1, 2, 3)]
        return entry("any", points).runs[0]

    monkeypatch.setattr(race, "run_process", run_process)
    monkeypatch.setattr(race, "FIGURE", tmp_path / "docs" / "race.svg")
    monkeypatch.setattr(race, "missing", lambda names: "")
    with pytest.raises(KeyboardInterrupt):
        race.report()
    text = race.report()
    assert len(ran) == 1 + len(set(ran))  # only the one that was cut off ran twice
    for course in race_sets.DATASETS.values():
        claim = f"To the peers' best accuracy, {course.title}: {max(race.SHARES)}.0 times as fast"
        assert f"**{claim}" in text
    assert "<svg" in (tmp_path / "docs" / "race.svg").read_text()
