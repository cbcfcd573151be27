"""Time budgets of the adaptation search."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_searches import config_of, named, real_run

import vitrail
from tiny_runs import Recorder
from vitrail.data.datasets import open_dataset
from vitrail.errors import TrainingError
from vitrail.probing.teach import load_memory
from vitrail.training import adapt, auto_config
from vitrail.training.adapt import AdaptationSearch, search
from vitrail.training.callbacks import Callback
from vitrail.training.config import MachineSettings
from vitrail.training.data_module import subsample
from vitrail.training.trainer import Result

pytestmark = pytest.mark.slow


def record_features(monkeypatch, seconds) -> list[set[str]]:
    """Set the measured seconds per image; return the datasets of the probes."""
    datasets, original = [], adapt.features_of

    def recording(model, source, **options):
        datasets.append(named(source))
        return original(model, source, **options)

    monkeypatch.setattr(AdaptationSearch, "seconds_per_image", lambda self: seconds)
    monkeypatch.setattr(adapt, "features_of", recording)
    return datasets


def test_probe_images_fit_the_time_budget(colors, start, tmp_path, quick, monkeypatch):
    quick(probes=1.0)
    datasets, recorder = record_features(monkeypatch, 60.0), Recorder()
    result = search(config_of(colors, tmp_path / "out", start, minutes=71.5), recorder)
    part, dev = datasets
    assert (len(part), len(dev)) == (11, 3)  # a quarter of what 12 test images leave
    assert not part & dev
    assert "probes use 11 of 27 images to fit the time budget" in recorder.lines
    assert result.images == 3
    provenance = vitrail.load(tmp_path / "out").metadata.provenance
    assert provenance["head"] == "few-shot probe on 14 images"
    assert not any("in addition" in line for line in recorder.lines)


def test_dev_is_subsampled_to_fit_the_time_budget(colors, start, tmp_path, quick, monkeypatch):
    runs, recorder = quick({"attention": 1.0}, probes=0.0), Recorder()
    datasets = record_features(monkeypatch, 60.0)
    stopped = {"step": 1, "seconds": 1.0, "finished": False}
    runs.final = lambda config, callback: Result(folder=config.out, **stopped)
    config = config_of(colors, tmp_path / "out", start, minutes=51.5, dev=0.5)
    result = search(config, recorder)
    assert [len(part) for part in datasets] == [5, 4]
    assert "dev has 4 of 15 images to fit the time budget" in recorder.lines
    assert result.images == 4
    assert {len(config.splits.held_out["dev"]) for config in runs.configs} == {
        4
    }  # the same for all
    assert {len(config.splits.train) for config in runs.configs} == {15}


def test_without_a_time_budget_all_images_are_used(colors, start, tmp_path, quick, monkeypatch):
    quick(probes=1.0)
    datasets = record_features(monkeypatch, None)
    search(config_of(colors, tmp_path / "out", start))
    assert [len(part) for part in datasets] == [27, 3]


def test_subsample_is_deterministic_and_stratified(colors):
    train = open_dataset(colors, "train")
    some = subsample(train, 12)
    assert np.bincount(some.labels()).tolist() == [4, 4, 4]
    assert named(some) == named(subsample(train, 12))
    assert np.bincount(subsample(train, 0).labels()).tolist() == [1, 1, 1]
    assert subsample(train, 30) is train


def test_time_is_reserved_for_the_final_evaluation(colors, start, tmp_path, quick, monkeypatch):
    runs = quick(probes=1.0)
    record_features(monkeypatch, 10.0)  # two minutes for the test images
    search(config_of(colors, tmp_path / "out", start, minutes=10.0))
    first, second = (config.settings.minutes for config in runs.configs[:2])
    assert first == pytest.approx(8 / 6, rel=0.1)  # two trials in a third of what is free
    assert second == pytest.approx(8 / 3, rel=0.1)  # the first took no time


def test_long_final_evaluation_is_logged_and_added(colors, start, tmp_path, quick, monkeypatch):
    runs, recorder = quick(probes=1.0), Recorder()
    record_features(monkeypatch, 10.0)
    result = search(config_of(colors, tmp_path / "out", start, minutes=3.0), recorder)
    message = "note: evaluating the result on 12 images takes about 2 min 0 s, in addition"
    assert any(line.startswith(message) for line in recorder.lines)
    assert result.outcomes["test"].samples == 12
    assert runs.configs[0].settings.minutes == pytest.approx(1, rel=0.1)  # a third, in one trial


def test_bundle_is_written_before_it_is_evaluated(colors, start, tmp_path, quick, monkeypatch):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    quick(probes=1.0)
    monkeypatch.setattr(adapt, "quick_evaluate", stopped)
    with pytest.raises(KeyboardInterrupt):
        search(config_of(colors, tmp_path / "out", start))
    model = vitrail.load(tmp_path / "out")
    assert model.metadata.provenance["head"] == "few-shot probe on 30 images"
    assert load_memory(tmp_path / "out", model) is not None


class Time:
    """A clock that only the test advances."""

    now = 0.0

    @classmethod
    def monotonic(cls):
        return cls.now


def test_forward_pass_is_timed_after_warmup(start, monkeypatch):
    model, calls = vitrail.load(start), []
    features = model.features

    def slow(images):
        Time.now += 100.0 if not calls else 2.0 * len(images)
        calls.append(len(images))
        return features(images)

    monkeypatch.setattr(model, "features", slow)
    monkeypatch.setattr(auto_config, "time", Time)
    assert auto_config.seconds_per_image(model, torch.device("cpu")) == 2.0
    assert calls == [2, auto_config.TIMED_IMAGES]


def test_cost_of_features_includes_loading(colors, start, tmp_path, monkeypatch):
    def slow(model, samples, **options):
        Time.now += 5.0 * len(samples)

    machine = MachineSettings(workers=3)
    config = config_of(colors, tmp_path, start, machine=machine)
    searching = AdaptationSearch(config, Callback(), torch.device("cpu"), 0.0, 0.5)
    monkeypatch.setattr(adapt, "seconds_per_image", lambda model, device: 2.0)
    monkeypatch.setattr(adapt, "features_of", slow)
    monkeypatch.setattr(adapt, "time", Time)
    assert searching.seconds_per_image() == pytest.approx(2.0 + 3.0 / 3)


def test_time_is_divided_among_trials_and_the_final_run(
    colors, start, tmp_path, quick, monkeypatch
):
    runs, last = quick({"full-fine-tuning": 1.0}, probes=0.0), []

    def one_step(config, callback):
        last.append(config.settings)
        short = replace(config.settings, minutes=None, steps=1)
        return real_run(replace(config, settings=short), callback)

    runs.final = one_step
    search(config_of(colors, tmp_path / "out", start, minutes=9.0))
    minutes = [config.settings.minutes for config in runs.configs]
    assert minutes[:3] == pytest.approx([1, 1.5, 3], abs=0.1)  # what one leaves, others have
    assert minutes[3:] == pytest.approx([2, 3, 6], abs=0.1)
    assert last[0].minutes == pytest.approx(9, abs=0.1)
    assert (last[0].steps, last[0].epochs) == (None, None)


def test_short_budget_reduces_the_grid(colors, start, tmp_path, quick):
    runs = quick()
    result = search(config_of(colors, tmp_path / "out", start, minutes=0.25))
    assert result.candidates[2].trials[0].accuracy is not None  # the usual one, with all the time
    assert [trial.problem for trial in result.candidates[2].trials] == ["", *[adapt.NO_TIME] * 2]
    assert runs.configs[0].settings.minutes > 0.05


def test_candidates_without_time_are_logged_and_skipped(colors, start, tmp_path, quick):
    runs, recorder = quick(), Recorder()
    result = search(config_of(colors, tmp_path / "out", start, minutes=0.01), recorder)
    assert not runs.configs
    assert result.finished
    assert [c.problem for c in result.candidates[2:]] == [adapt.NO_TIME] * 2
    assert f"  attention-only, learning rate 0.0002: {adapt.NO_TIME}" in recorder.lines


def test_trial_of_one_step_is_discarded(colors, start, tmp_path, quick):
    quick({"attention": 1.0}, steps=1)
    result = search(config_of(colors, tmp_path / "out", start, minutes=9.0))
    assert result.candidates[2].accuracy is None
    assert result.candidates[2].problem == adapt.TOO_SHORT


def test_best_trial_is_the_result_if_no_time_is_left(colors, start, tmp_path, quick, monkeypatch):
    class OutOfTime(Recorder):
        def log(self, line):
            super().log(line)
            if line.startswith("chosen"):
                monkeypatch.setattr(AdaptationSearch, "free", lambda self: 0.0)

    quick({"attention": 1.0}, real=True, probes=0.0)
    recorder = OutOfTime()
    result = search(config_of(colors, tmp_path / "out", start), recorder)
    assert recorder.lines[-1].startswith("note: no time left to train on all images")
    check_result(result, colors)


def test_best_trial_is_the_result_if_the_final_run_fails(
    colors, start, tmp_path, quick, monkeypatch
):
    def fail(config, callback):
        raise TrainingError("training diverged at step 1; and more")

    runs = quick({"attention": 1.0}, real=True, probes=0.0)
    runs.final = fail
    recorder = Recorder()
    result = search(config_of(colors, tmp_path / "out", start), recorder)
    assert recorder.lines[-1].startswith(
        "note: training diverged at step 1; the result is the model"
    )
    check_result(result, colors)


def check_result(result, data) -> None:
    assert result.finished
    assert vitrail.evaluate(str(result.folder), data).accuracy == result.outcomes["test"].accuracy
    assert not (result.folder / "trials").exists()
