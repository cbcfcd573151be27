"""The adaptation search: data of each candidate, the choice, the time budget, and the result."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_searches import FINE, config_of, named, real_run, without_times, written

import vitrail
from tiny_runs import CLASSES, SETTINGS, Recorder, equal, weights, write_colors, write_folder
from vitrail.cli import main
from vitrail.data.datasets import DatasetIndex, ImageDataset, PackedStrings, open_dataset
from vitrail.data.preprocessing import Augmentation, Mixing
from vitrail.data.provenance import fingerprint
from vitrail.errors import CheckpointError, ConfigError, DataError, TrainingError
from vitrail.models.vit import create
from vitrail.probing.teach import MEMORY_FILE, load_memory
from vitrail.training import adapt
from vitrail.training.adapt import ATTENTION, FULL, LINEAR, PROBE, Candidate, Trial, search
from vitrail.training.auto_config import STRENGTHS
from vitrail.training.checkpoint import has_state
from vitrail.training.config import OptimSettings, RunConfig
from vitrail.training.data_module import (
    DataSplits,
    hold_out_dev,
    limit_test_images,
    subsample,
)
from vitrail.training.optim import all_but_attention_patterns, freeze
from vitrail.training.recipes import read_run
from vitrail.training.trainer import Result

pytestmark = pytest.mark.slow


def test_search_compares_all_candidates_and_ignores_the_test_split(colors, start, tmp_path):
    other, results = dict(np.load(colors)), []
    other["y_test"] = (other["y_test"] + 1) % 3
    other["x_test"] = 255 - other["x_test"]
    np.savez(tmp_path / "other.npz", **other)
    for data in (colors, tmp_path / "other.npz"):
        out, recorder = tmp_path / data.stem, Recorder()
        result = search(config_of(data, out, start), recorder, rate=2e-4)
        results.append([without_times(c) for c in written(out)["rungs"]])
    assert [c.name for c in result.candidates] == [PROBE, LINEAR, ATTENTION, FULL]
    assert all(c.accuracy is not None for c in result.candidates)
    assert result.outcomes.keys() == {"test"}
    stored = written(out)
    assert [c["chosen"] for c in stored["rungs"]].count(True) == 1
    assert stored["results"]["test"]["accuracy"] == result.outcomes["test"].accuracy
    check_result(result, tmp_path / "other.npz")
    assert vitrail.load(out).metadata.class_names == CLASSES
    assert any("held out of train" in line for line in recorder.lines)
    assert results[0] == results[1]
    assert equal(weights(tmp_path / "colors"), weights(tmp_path / "other"))


def test_search_from_scratch_compares_learning_rates_then_augmentation(colors, tmp_path, quick):
    runs = quick({("default-augmentation", 3e-4): 0.5, "strong-augmentation": 0.75})
    options = {"model": SETTINGS.model, "augment": Augmentation(), "mix": Mixing()}
    options["optim"] = OptimSettings(kind="adamw", warmup_steps=0)
    result = search(config_of(colors, tmp_path / "out", "", **options))
    assert [c.name for c in result.candidates] == [*STRENGTHS]
    rates = [config.settings.optim.learning_rate for config in runs.configs]
    assert rates == [1e-3, 3e-4, 3e-3, 3e-4, 3e-4]  # the best is used with other augmentations
    light, strong = (config.settings for config in runs.configs[3:])
    assert (light.augment.padding, light.mix.cutmix) == (1, 0.0)
    assert (strong.augment.policy, strong.mix.cutmix) == ("trivial", None)
    settings = read_run(tmp_path / "out")[0]
    assert (settings.augment.policy, settings.optim.learning_rate) == ("trivial", 3e-4)
    assert result.outcomes.keys() == {"test"}
    options["augment"] = Augmentation(crop="whole")  # the user's, which is not changed
    search(config_of(colors, tmp_path / "given", "", **options))
    assert [config.settings.augment.crop for config in runs.configs[5:]] == ["whole"] * 3


def make_result(*accuracies, **changes) -> adapt.SearchResult:
    names = zip((PROBE, LINEAR, ATTENTION, FULL), accuracies, strict=True)
    result = tuple(Candidate(name=name, accuracy=a, seconds=190.0) for name, a in names)
    options = {"folder": Path("out"), "data": "flowers", "start": "run", "dev": "train"}
    return adapt.SearchResult(**options, images=240, candidates=result, finished=True, **changes)


def test_best_is_chosen_and_the_cheaper_or_usual_in_a_tie():
    cases = [(0.5, 0.5, PROBE), (0.6, 0.6, ATTENTION), (0.6, 0.7, FULL), (0.7, 0.6, ATTENTION)]
    for attention, full, chosen in cases:
        assert make_result(0.5, 0.5, attention, full).chosen.name == chosen
    trials = tuple(Trial(value=rate, accuracy=0.5) for rate in adapt.SGD_RATES)
    assert Candidate(name=FULL, accuracy=0.5, seconds=1.0, trials=trials).value == 0.01


def test_val_is_used_as_dev_beside_test(colors, start, tmp_path, quick):
    whole = dict(np.load(colors))
    whole |= {"x_val": whole["x_test"], "y_val": whole["y_test"]}
    np.savez(colors, **whole)
    runs = quick()
    result = search(config_of(colors, tmp_path / "out", start))
    assert (result.dev, result.images) == ("val", 12)
    assert result.outcomes.keys() == {"val", "test"}
    splits = runs.configs[0].splits
    assert named(splits.train) == named(open_dataset(colors, "train"))
    assert named(splits.held_out["dev"]) == named(open_dataset(colors, "val"))


@pytest.mark.parametrize(("images", "dev_images"), [(1000, 100), (20_000, 400), (100_000, 1000)])
def test_dev_fraction_shrinks_with_dataset_size(images, dev_images):
    names = PackedStrings(f"train/{row}" for row in range(images))
    store, labels = SimpleNamespace(in_memory=True), np.arange(images) % 4
    index = DatasetIndex(names=names, labels=labels, classes=tuple("abcd"), store=store)
    train, _, dev = hold_out_dev(DataSplits(reference="x", train=ImageDataset(index), held_out={}))
    assert len(train) + len(dev) == images
    assert np.bincount(dev.labels()).tolist() == [dev_images // 4] * 4
    assert not set(train.rows) & set(dev.rows)


def test_test_images_are_limited_and_dev_is_not(colors):
    whole = {name: open_dataset(colors, name) for name in ("train", "test")}
    test, train = whole["test"], whole["train"]
    both = DataSplits(reference="x", train=train, held_out={"val": train, "test": test})
    limited = limit_test_images(both, 6).held_out
    assert limited["val"] is train  # dev
    assert len(limited["test"]) == 6 < len(test)
    assert named(limited["test"]) < named(test)
    alone = DataSplits(reference="x", train=train, held_out={"test": test})
    assert len(limit_test_images(alone, 6).held_out["test"]) == 6
    assert limit_test_images(alone, 1000).held_out["test"] is test


@pytest.mark.parametrize(("dev", "images"), [(None, 3), (0.2, 6)])
def test_trials_exclude_dev_and_the_final_run_includes_it(
    colors, start, tmp_path, quick, dev, images
):
    accuracies = {("full-fine-tuning", 2e-4): 0.5, ("full-fine-tuning", 6e-4): 0.75}
    runs = quick(accuracies, probes=0.25)
    result = search(config_of(colors, tmp_path / "out", start, dev=dev))
    assert (result.chosen.name, result.dev, result.images) == (FULL, "train", images)
    train = open_dataset(colors, "train")
    for config in runs.configs:
        learned, held_out = named(config.splits.train), named(config.splits.held_out["dev"])
        assert not learned & held_out
        assert learned | held_out == named(train)
        assert (config.splits.held_out.keys(), len(held_out)) == ({"dev"}, images)
    assert len(runs.configs) == 6
    model = vitrail.load(tmp_path / "out")
    assert model.metadata.provenance["fingerprint"] == fingerprint(train)
    assert "dev accuracy" not in model.metadata.provenance
    assert result.outcomes.keys() == {"test"}
    assert result.outcomes["test"].accuracy == vitrail.evaluate(model, colors).accuracy
    assert (tmp_path / "out" / "report.html").exists()
    settings = read_run(tmp_path / "out")[0]
    assert (settings.optim.learning_rate, settings.dev) == (6e-4, None)  # nor when it is resumed
    probe, *others, full = map(without_times, written(tmp_path / "out")["candidates"])
    known = {"name": PROBE, "accuracy": 0.25, "problem": "", "trials": [], "chosen": False}
    assert probe == known | {"gain": None, "learning_rate": None}
    assert [candidate["gain"] for candidate in (*others, full)] == [0.0, -0.25, 0.5]
    assert (full["chosen"], full["learning_rate"]) == (True, 6e-4)
    trials = [(t["learning_rate"], t["accuracy"], t["steps"]) for t in full["trials"]]
    assert trials == [(2e-4, 0.5, 2), (6e-5, 0.0, 2), (6e-4, 0.75, 2)]


def test_chosen_probe_is_refitted_and_written_before_it_is_evaluated(
    colors, start, tmp_path, quick, monkeypatch
):
    quick(probes=1.0)
    monkeypatch.setattr(adapt, "Evaluator", None)  # fails
    with pytest.raises(TypeError):
        search(config_of(colors, tmp_path / "out", start, dev=0.0))  # 0: the default
    model = vitrail.load(tmp_path / "out")
    memory = load_memory(tmp_path / "out", model)  # so that it can be taught more
    assert int(memory.counts.sum()) == 30
    assert model.metadata.provenance["head"] == "few-shot probe on 30 images"


def test_chosen_linear_head_is_the_bundle(colors, start, tmp_path, quick, monkeypatch):
    quick()
    monkeypatch.setattr(adapt, "accuracy_of", lambda probe, dev: float(hasattr(probe, "bias")))
    result = search(config_of(colors, tmp_path / "out", start))
    assert result.chosen.name == LINEAR
    check_result(result, colors)
    assert not (tmp_path / "out" / MEMORY_FILE).exists()


def test_attention_only_trains_attention_and_head(colors, start, tmp_path, quick):
    quick({"attention": 1.0}, real=True, probes=0.0)
    result = search(config_of(colors, tmp_path / "out", start), rate=2e-4)
    assert result.chosen.name == ATTENTION
    before, after = (vitrail.load(folder).state_dict() for folder in (start, tmp_path / "out"))
    for name in before:
        learned = ".attention." in name or name.startswith("head.")
        assert torch.equal(before[name], after[name]) is not learned, name


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": "map"},
        {"stem": "conv", "layer_scale": 0.1, "position": "relative"},
        {"pool": "cls", "distillation": True},
    ],
)
def test_freeze_patterns_exclude_attention_and_heads(changes):
    model = create("ViT-Mu/4", num_classes=3, **changes)
    freeze(model, all_but_attention_patterns(model))
    for weight, parameter in model.named_parameters():
        learns = ".attention." in weight or weight.startswith(("head.", "distillation_head."))
        assert parameter.requires_grad == learns, weight


def test_model_without_attention_skips_that_candidate(colors, tmp_path, quick):
    quick({"full-fine-tuning": 0.5})
    small = {"width": 16, "tokens_mlp": 8, "channels_mlp": 16, "depth": 2}
    mixer = create("Mixer-S/16", image_size=8, patch_size=4, num_classes=3, **small)
    vitrail.save(mixer, tmp_path / "mixer")
    result = search(config_of(colors, tmp_path / "out", str(tmp_path / "mixer")))
    assert result.candidates[2].accuracy is None
    assert "no attention" in result.candidates[2].problem
    assert result.candidates[3].accuracy == 0.5


def test_learning_rate_grid(colors, start, tmp_path, quick):
    for kind, rates in [
        ("sgd", (0.01, 0.003, 0.03, 0.001)),
        ("adamw", (2e-4, 6e-5, 6e-4)),
        ("lion", (3e-5, 9e-6, 9e-5)),
    ]:
        optim = OptimSettings(kind=kind, learning_rate=rates[0])
        assert adapt.learning_rates(replace(FINE, optim=optim)) == rates
    runs, muon = quick(), OptimSettings(kind="muon", learning_rate=1e-3)
    search(config_of(colors, tmp_path / "out", start, optim=muon), rate=3e-3)
    assert runs.configs[0].settings.optim.muon_learning_rate == pytest.approx(0.06)  # scaled


def test_diverged_trial_is_logged_and_skipped(colors, start, tmp_path):
    recorder = Recorder()
    optim = OptimSettings(kind="sgd", warmup_steps=0, schedule="constant")
    config = config_of(colors, tmp_path / "out", start, optim=optim, steps=4)
    result = search(config, recorder, rate=1e30)
    assert [c.accuracy for c in result.candidates[2:]] == [None, None]
    problem = result.candidates[3].problem
    assert problem.startswith("training diverged at step ")
    assert f"  full fine-tuning, learning rate 1e+30: {problem}" in recorder.lines
    assert result.finished
    assert result.chosen.name in (PROBE, LINEAR)
    assert written(tmp_path / "out")["rungs"][3]["trials"][0]["problem"] == problem


@pytest.mark.parametrize("where", ["trial", "final"])
def test_full_disk_is_not_a_failed_trial(colors, start, tmp_path, quick, monkeypatch, where):
    def fail(config, callback):
        raise CheckpointError("cannot write state: No space left on device")

    runs = quick({"full-fine-tuning": 1.0}, probes=0.0)
    if where == "trial":
        monkeypatch.setattr(adapt, "run", fail)
    else:
        runs.final = fail
    with pytest.raises(CheckpointError, match="No space left"):
        search(config_of(colors, tmp_path / "out", start))


class StopAtStep(Recorder):
    """Sends Ctrl-C at the first step; with `final`, at that of the final run."""

    def __init__(self, final):
        super().__init__()
        self.final = final

    def on_step(self, row):
        if not self.final or "chosen: full fine-tuning" in self.lines:
            signal.raise_signal(signal.SIGINT)


def test_search_stopped_in_a_trial_leaves_nothing(colors, start, tmp_path):
    config = config_of(colors, tmp_path / "out", start)
    with pytest.raises(KeyboardInterrupt):
        search(config, StopAtStep(final=False))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}


def test_search_stopped_in_the_final_run_can_be_resumed(colors, start, tmp_path, quick):
    quick({"full-fine-tuning": 1.0}, probes=0.0)
    out = tmp_path / "out"
    result = search(config_of(colors, out, start), StopAtStep(final=True))
    assert not result.finished
    assert written(out)["finished"] is False
    assert has_state(out)
    assert not (out / "config.json").exists()
    settings, data, origin = read_run(out)
    done = real_run(RunConfig(data=data, out=out, settings=settings, start=origin, resume=True))
    assert (done.finished, done.step) == (True, 2)


def test_overwrite_replaces_an_earlier_search(colors, start, tmp_path, quick):
    out = tmp_path / "out"
    quick(probes=1.0)
    search(config_of(colors, out, start))
    with pytest.raises(ConfigError, match="already has a model"):
        search(config_of(colors, out, start))
    quick({"full-fine-tuning": 1.0}, probes=0.0)
    search(config_of(colors, out, start, overwrite=True))
    assert "head" not in vitrail.load(out).metadata.provenance
    assert not (out / MEMORY_FILE).exists()  # it was of other weights


def record_features(monkeypatch, seconds) -> list[set[str]]:
    """Set the measured seconds per image; return the datasets of the probes."""
    datasets, original = [], adapt.features_of

    def recording(model, source, **options):
        datasets.append(named(source))
        return original(model, source, **options)

    monkeypatch.setattr(adapt, "feature_seconds", lambda *args: seconds)
    monkeypatch.setattr(adapt, "features_of", recording)
    return datasets


def test_probes_and_dev_fit_the_time_budget(colors, start, tmp_path, quick, monkeypatch):
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
    search(config_of(colors, tmp_path / "whole", start))
    assert [len(part) for part in datasets[2:]] == [27, 3]  # without a time budget
    runs, stopped = quick({"attention": 1.0}, probes=0.0), {"step": 1, "seconds": 1.0}
    runs.final = lambda config, callback: Result(folder=config.out, finished=False, **stopped)
    result = search(config_of(colors, tmp_path / "dev", start, minutes=51.5, dev=0.5), recorder)
    assert [len(part) for part in datasets[4:]] == [5, 4]
    assert "dev has 4 of 15 images to fit the time budget" in recorder.lines
    assert result.images == 4
    assert {len(config.splits.held_out["dev"]) for config in runs.configs} == {4}  # for all
    assert {len(config.splits.train) for config in runs.configs} == {15}
    train = open_dataset(colors, "train")
    for count, each in ((0, 1), (12, 4)):  # at least one per class
        assert np.bincount(subsample(train, count).labels()).tolist() == [each] * 3
        assert named(subsample(train, count)) == named(subsample(train, count))
    assert subsample(train, 30) is train


def test_time_is_reserved_for_the_final_evaluation(colors, start, tmp_path, quick, monkeypatch):
    runs, recorder = quick(probes=1.0), Recorder()
    record_features(monkeypatch, 10.0)  # two minutes for the test images
    search(config_of(colors, tmp_path / "out", start, minutes=10.0))
    first, second = (config.settings.minutes for config in runs.configs[:2])
    assert first == pytest.approx(8 / 6, rel=0.1)  # two trials in a third of what is free
    assert second == pytest.approx(8 / 3, rel=0.1)  # the first took no time
    runs.configs.clear()
    result = search(config_of(colors, tmp_path / "short", start, minutes=3.0), recorder)
    message = "note: evaluating the result on 12 images takes about 2 min 0 s, in addition"
    assert any(line.startswith(message) for line in recorder.lines)
    assert result.outcomes["test"].samples == 12
    assert runs.configs[0].settings.minutes == pytest.approx(1, rel=0.1)  # a third, in one trial


def test_time_is_divided_among_trials_and_the_final_run(colors, start, tmp_path, quick):
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


def test_short_budgets_reduce_the_grid_and_skip_candidates(colors, start, tmp_path, quick):
    runs, recorder = quick(), Recorder()
    result = search(config_of(colors, tmp_path / "short", start, minutes=0.25))
    assert result.candidates[2].trials[0].accuracy is not None  # the usual one, with all the time
    assert [trial.problem for trial in result.candidates[2].trials] == ["", *[adapt.NO_TIME] * 2]
    assert runs.configs[0].settings.minutes > 0.05
    runs.configs.clear()
    result = search(config_of(colors, tmp_path / "none", start, minutes=0.01), recorder)
    assert not runs.configs
    assert result.finished
    assert [c.problem for c in result.candidates[2:]] == [adapt.NO_TIME] * 2
    assert f"  attention-only, learning rate 0.0002: {adapt.NO_TIME}" in recorder.lines
    quick({"attention": 1.0}, steps=1)  # a trial of one step is discarded
    result = search(config_of(colors, tmp_path / "out", start, minutes=9.0))
    assert result.candidates[2].accuracy is None
    assert result.candidates[2].problem == adapt.TOO_SHORT


@pytest.mark.parametrize("problem", ["no time left to train on all images", "training diverged"])
def test_best_trial_is_the_result_without_a_final_run(
    colors, start, tmp_path, quick, monkeypatch, problem
):
    class OutOfTime(Recorder):
        def log(self, line):
            super().log(line)
            if line.startswith("chosen") and problem.startswith("no time"):
                monkeypatch.setattr(adapt.Search, "free", lambda self: 0.0)

    def fail(config, callback):
        raise TrainingError(f"{problem}; and more")

    runs, recorder = quick({"attention": 1.0}, real=True, probes=0.0), OutOfTime()
    runs.final = fail
    result = search(config_of(colors, tmp_path / "out", start), recorder, rate=2e-4)
    assert recorder.lines[-1] == f"note: {problem}; the result is the model of the trial"
    check_result(result, colors)


def check_result(result, data) -> None:
    assert result.finished
    assert vitrail.evaluate(str(result.folder), data).accuracy == result.outcomes["test"].accuracy
    assert not (result.folder / adapt.TRIALS).exists()


def test_skipped_files_are_logged_once(start, tmp_path):
    recorder, root = Recorder(), tmp_path / "set"
    write_folder(root / "train", count=4)
    (write_folder(root / "test", count=1) / "red" / "notes.txt").write_text("not an image")
    adapt.open_search(config_of(root, tmp_path, start), recorder, 0.0, None)
    notes = [line for line in recorder.lines if line.startswith("note: ")]
    assert notes == ["note: files that are not images skipped: 1 (.txt 1)"]


def test_unsupported_settings_and_data_raise(colors, start, tmp_path, quick, monkeypatch):
    csv, few = tmp_path / "list.csv", write_colors(tmp_path / "few.npz", train=6)
    csv.write_text("\n".join(["path,label", *(f"{i}.png,red|blue" for i in range(4))]))
    scratch = {"start": "", "model": SETTINGS.model, "minutes": 5, "steps": None}
    quick(steps=1)
    for data, changes, message in [
        (colors, {"objective": "masked-patches"}, "leave out objective='masked-patches'"),
        (colors, {"until_accuracy": 0.9}, "leave out until_accuracy=0.9"),
        (colors, {"patience": 3}, "leave out patience=3"),
        (csv, {"batch_size": None}, "--search needs single-label data"),
        (few, {"batch_size": None}, "6 training images, too few to hold some out"),
        (colors, scratch, "no trial succeeded: only one step"),
    ]:
        with pytest.raises((ConfigError, DataError, TrainingError), match=message):
            search(config_of(data, tmp_path / "out", **{"start": start} | changes))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="there are 2; start it without torchrun"):
        search(config_of(colors, tmp_path / "out", start))


def test_command_prints_the_search_as_json(colors, start, tmp_path, capsys, quick):
    runs, out = quick(), ["--out", str(tmp_path / "out")]
    args = ["finetune", str(colors), "--from", start, "--search"]
    small = ["--batch-size", "6", "--model.image-size", "8"]
    assert main([*args, *out, "--json", "--recipe", "paper-finetune", *small]) == 0
    assert json.loads(capsys.readouterr().out) == written(tmp_path / "out")
    rates = [config.settings.optim.learning_rate for config in runs.configs]
    assert rates == [*adapt.SGD_RATES] * 2
    runs.configs.clear()
    assert main([*args, "--out", str(tmp_path / "one"), "--optim.learning-rate", "0.5"]) == 0
    assert [config.settings.optim.learning_rate for config in runs.configs] == [0.5, 0.5]
    assert "test accuracy " in capsys.readouterr().out
    assert main([*args, *out, "--resume"]) == 2
    assert capsys.readouterr().err.startswith("vitrail: --search cannot be resumed; ")
