"""The adaptation search: data of each candidate, the choice, and the result."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_searches import FINE, config_of, named, real_run, without_times, written

import vitrail
from tiny_runs import CLASSES, Recorder, write_colors
from vitrail.cli import main
from vitrail.cli.train import search_report
from vitrail.data.datasets import DatasetIndex, ImageDataset, PackedStrings, open_dataset
from vitrail.data.provenance import fingerprint
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models.vit import create
from vitrail.probing.teach import MEMORY_FILE, load_memory
from vitrail.training import adapt
from vitrail.training.adapt import (
    ATTENTION,
    FULL,
    LINEAR,
    PROBE,
    AdaptationSearch,
    Candidate,
    SearchResult,
    Trial,
    search,
)
from vitrail.training.checkpoint import has_state
from vitrail.training.config import OptimSettings, RunConfig
from vitrail.training.data_module import DataSplits, hold_out_dev
from vitrail.training.optim import freeze
from vitrail.training.recipes import read_run

pytestmark = pytest.mark.slow

# End to end


def test_search_compares_all_candidates_and_writes_the_best(colors, start, tmp_path):
    out, recorder = tmp_path / "out", Recorder()
    result = search(config_of(colors, out, start), recorder)
    assert [c.name for c in result.candidates] == [PROBE, LINEAR, ATTENTION, FULL]
    assert all(c.accuracy is not None for c in result.candidates)
    assert result.finished
    assert result.outcomes.keys() == {"test"}
    stored = written(out)
    assert [c["chosen"] for c in stored["rungs"]].count(True) == 1
    assert stored["results"]["test"]["accuracy"] == result.outcomes["test"].accuracy
    assert vitrail.evaluate(str(out), colors).accuracy == result.outcomes["test"].accuracy
    assert vitrail.load(out).metadata.class_names == CLASSES
    assert not (out / "trials").exists()
    assert any("held out of train" in line for line in recorder.lines)


def test_result_file_lists_every_trial(colors, start, tmp_path, quick):
    quick({("attention", 2e-4): 0.5, ("attention", 6e-4): 0.75}, probes=0.6)
    search(config_of(colors, tmp_path / "out", start))
    probe, linear, attention, full = map(without_times, written(tmp_path / "out")["rungs"])
    assert probe == {
        "name": PROBE,
        "accuracy": 0.6,
        "gain": None,
        "chosen": False,
        "learning_rate": None,
        "problem": "",
        "trials": [],
    }
    assert linear["gain"] == 0.0
    assert attention["chosen"]
    assert attention["gain"] == pytest.approx(0.15)
    assert attention["learning_rate"] == 6e-4
    assert [(t["learning_rate"], t["accuracy"]) for t in attention["trials"]] == [
        (2e-4, 0.5),
        (6e-5, 0.0),
        (6e-4, 0.75),
    ]
    assert full["gain"] == -0.75


# Choice


@pytest.mark.parametrize(
    ("attention", "full", "chosen"),
    [(0.5, 0.5, PROBE), (0.6, 0.6, ATTENTION), (0.6, 0.7, FULL), (0.7, 0.6, ATTENTION)],
)
def test_best_candidate_is_chosen_and_the_cheaper_in_a_tie(attention, full, chosen):
    accuracies = zip((PROBE, LINEAR, ATTENTION, FULL), (0.5, 0.5, attention, full), strict=True)
    assert make_result(*accuracies).chosen.name == chosen


def test_usual_learning_rate_wins_a_tie():
    trials = tuple(Trial(learning_rate=rate, accuracy=0.5) for rate in adapt.SGD_RATES)
    assert Candidate(name=FULL, accuracy=0.5, seconds=1.0, trials=trials).learning_rate == 0.01


def test_test_split_does_not_affect_the_choice(colors, start, tmp_path):
    other = dict(np.load(colors))
    other["y_test"] = (other["y_test"] + 1) % 3
    other["x_test"] = 255 - other["x_test"]
    np.savez(tmp_path / "other.npz", **other)
    result = []
    for data in (colors, tmp_path / "other.npz"):
        search(config_of(data, tmp_path / data.stem, start))
        result.append([without_times(c) for c in written(tmp_path / data.stem)["rungs"]])
    assert result[0] == result[1]
    one, two = (vitrail.load(tmp_path / name).state_dict() for name in ("colors", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)


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
    class Nowhere:
        in_memory = True

    labels = np.arange(images) % 4
    names = PackedStrings(f"train/{row}" for row in range(images))
    index = DatasetIndex(names=names, labels=labels, classes=tuple("abcd"), store=Nowhere())
    train, _, dev = hold_out_dev(DataSplits(reference="x", train=ImageDataset(index), held_out={}))
    assert len(dev) == dev_images
    assert len(train) + len(dev) == images
    assert np.bincount(dev.labels()).tolist() == [dev_images // 4] * 4
    assert not set(train.rows) & set(dev.rows)


def test_explicit_dev_fraction_does_not_affect_the_final_run(colors, start, tmp_path, quick):
    runs = quick({"full-fine-tuning": 1.0}, probes=0.0)
    result = search(config_of(colors, tmp_path / "out", start, dev=0.2))
    assert (result.dev, result.images) == ("train", 6)
    assert len(runs.configs[0].splits.train) == 24
    assert result.outcomes.keys() == {"test"}
    train = fingerprint(open_dataset(colors, "train"))
    assert vitrail.load(tmp_path / "out").metadata.provenance["fingerprint"] == train
    assert read_run(tmp_path / "out")[0].dev is None  # nor when it is resumed


def test_zero_dev_fraction_uses_the_default(colors, start, tmp_path, quick):
    quick()
    assert search(config_of(colors, tmp_path / "out", start, dev=0.0)).images == 3


def test_too_few_images_for_dev_raise(colors, start, tmp_path):
    few = write_colors(colors, train=6)
    with pytest.raises(DataError, match="6 training images, too few to hold some out"):
        search(config_of(few, tmp_path / "out", start, batch_size=None))


# Data


def test_trials_exclude_dev_and_the_final_run_includes_it(colors, start, tmp_path, quick):
    runs = quick({"full-fine-tuning": 1.0}, real=True, probes=0.0)
    result = search(config_of(colors, tmp_path / "out", start))
    assert result.chosen.name == FULL
    train = open_dataset(colors, "train")
    for config in runs.configs:
        learned, dev = named(config.splits.train), named(config.splits.held_out["dev"])
        assert not learned & dev
        assert learned | dev == named(train)
        assert config.splits.held_out.keys() == {"dev"}
    assert len(runs.configs) == 6
    model = vitrail.load(tmp_path / "out")
    assert model.metadata.provenance["fingerprint"] == fingerprint(train)
    assert "dev accuracy" not in model.metadata.provenance
    assert result.outcomes["test"].accuracy == vitrail.evaluate(model, colors).accuracy
    assert (tmp_path / "out" / "report.html").exists()
    assert read_run(tmp_path / "out")[0].optim.learning_rate == 2e-4


def test_chosen_probe_is_refitted_to_all_training_images(colors, start, tmp_path, quick):
    quick(probes=1.0)
    search(config_of(colors, tmp_path / "out", start))
    model = vitrail.load(tmp_path / "out")
    memory = load_memory(tmp_path / "out", model)
    assert memory is not None  # so that it can be taught more
    assert int(memory.counts.sum()) == 30
    assert model.metadata.provenance["head"] == "few-shot probe on 30 images"


def test_chosen_linear_head_is_the_bundle(colors, start, tmp_path, quick, monkeypatch):
    quick()
    monkeypatch.setattr(adapt, "accuracy_of", lambda probe, dev: float(hasattr(probe, "bias")))
    result = search(config_of(colors, tmp_path / "out", start))
    assert result.chosen.name == LINEAR
    assert vitrail.evaluate(str(tmp_path / "out"), colors).accuracy == (
        result.outcomes["test"].accuracy
    )
    assert not (tmp_path / "out" / MEMORY_FILE).exists()


def test_attention_only_trains_attention_and_head(colors, start, tmp_path, quick):
    quick({"attention": 1.0}, real=True, probes=0.0)
    result = search(config_of(colors, tmp_path / "out", start))
    assert result.chosen.name == ATTENTION
    before, after = (vitrail.load(folder).state_dict() for folder in (start, tmp_path / "out"))
    for name in before:
        learned = ".attention." in name or name.startswith("head.")
        assert torch.equal(before[name], after[name]) is not learned, name


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-Mu/4", {}),
        ("ViT-Mu/4", {"pool": "map"}),
        ("ViT-Mu/4", {"stem": "conv", "layer_scale": 0.1, "position": "relative"}),
        ("ViT-Mu/4", {"pool": "cls", "distillation": True}),
    ],
)
def test_freeze_patterns_exclude_attention_and_heads(name, changes):
    model = create(name, num_classes=3, **changes)
    patterns = adapt.frozen_patterns(ATTENTION, model)
    freeze(model, patterns)
    for weight, parameter in model.named_parameters():
        learns = ".attention." in weight or weight.startswith(("head.", "distillation_head."))
        assert parameter.requires_grad == learns, weight
    assert len(patterns) < 12  # they are for people to read


def test_model_without_attention_skips_that_candidate(colors, tmp_path, quick):
    quick({"full-fine-tuning": 0.5})
    small = {"width": 16, "tokens_mlp": 8, "channels_mlp": 16, "depth": 2}
    mixer = create("Mixer-S/16", image_size=8, patch_size=4, num_classes=3, **small)
    vitrail.save(mixer, tmp_path / "mixer")
    recorder = Recorder()
    result = search(config_of(colors, tmp_path / "out", str(tmp_path / "mixer")), recorder)
    attention = result.candidates[2]
    assert attention.accuracy is None
    assert "no attention" in attention.problem
    assert result.candidates[3].accuracy == 0.5


# Learning rates


@pytest.mark.parametrize(
    ("optim", "rates"),
    [
        (OptimSettings(kind="sgd", learning_rate=0.01), (0.01, 0.003, 0.03, 0.001)),
        (OptimSettings(kind="adamw", learning_rate=2e-4), (2e-4, 6e-5, 6e-4)),
        (OptimSettings(kind="lion", learning_rate=3e-5), (3e-5, 9e-6, 9e-5)),
    ],
)
def test_learning_rate_grid(optim, rates):
    assert adapt.learning_rates(optim) == rates


def test_muon_learning_rate_is_scaled_with_the_grid():
    settings = replace(FINE, optim=OptimSettings(kind="muon", learning_rate=1e-3))
    optim = adapt.with_rate(settings, 3e-3, (), float("inf")).optim
    assert optim.muon_learning_rate == pytest.approx(0.06)


def test_diverged_trial_is_logged_and_skipped(colors, start, tmp_path):
    recorder = Recorder()
    optim = OptimSettings(kind="sgd", warmup_steps=0, schedule="constant")
    config = config_of(colors, tmp_path / "out", start, optim=optim, steps=4)
    result = search(config, recorder, rate=1e30)
    assert [c.accuracy for c in result.candidates[2:]] == [None, None]
    assert result.candidates[3].problem.startswith("training diverged at step ")
    assert any(
        line.startswith("  full fine-tuning, learning rate 1e+30: train") for line in recorder.lines
    )
    assert result.finished
    assert result.chosen.name in (PROBE, LINEAR)
    assert (
        written(tmp_path / "out")["rungs"][3]["trials"][0]["problem"]
        == result.candidates[3].problem
    )


@pytest.mark.parametrize("where", ["trial", "final"])
def test_full_disk_is_not_treated_as_a_failed_trial(
    colors, start, tmp_path, quick, monkeypatch, where
):
    def fail(config, callback):
        raise CheckpointError("cannot write state: No space left on device")

    runs = quick({"full-fine-tuning": 1.0}, probes=0.0)
    if where == "trial":
        monkeypatch.setattr(adapt, "run", fail)
    else:
        runs.final = fail
    with pytest.raises(CheckpointError, match="No space left"):
        search(config_of(colors, tmp_path / "out", start))


# Stopping


def test_search_stopped_in_a_trial_leaves_nothing(colors, start, tmp_path, quick):
    class StopAtStep(Recorder):
        def on_step(self, row):
            signal.raise_signal(signal.SIGINT)

    config = config_of(colors, tmp_path / "out", start)
    with pytest.raises(KeyboardInterrupt):
        search(config, StopAtStep())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}
    quick()
    assert search(config).finished  # starts over


def test_search_stopped_in_the_final_run_can_be_resumed(colors, start, tmp_path, quick):
    class StopAtStep(Recorder):
        def on_step(self, row):
            if "chosen: full fine-tuning" in self.lines and row["step"] == 1:
                signal.raise_signal(signal.SIGINT)

    quick({"full-fine-tuning": 1.0}, probes=0.0)
    out = tmp_path / "out"
    result = search(config_of(colors, out, start), StopAtStep())
    assert not result.finished
    assert written(out)["finished"] is False
    assert has_state(out)
    assert not (out / "config.json").exists()
    settings, data, origin = read_run(out)
    done = real_run(RunConfig(data=data, out=out, settings=settings, start=origin, resume=True))
    assert done.finished
    assert done.step == 2


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


def test_other_files_in_the_trials_folder_are_kept(colors, start, tmp_path):
    mine = tmp_path / "out" / "trials" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    search(config_of(colors, tmp_path / "out", start))
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


# Errors and output


def test_skipped_files_of_held_out_splits_are_logged(start, tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 1)):
        for name in CLASSES:
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "set" / "test" / "red" / "notes.txt").write_text("not a picture")
    recorder = Recorder()
    config = config_of(tmp_path / "set", tmp_path, start)
    AdaptationSearch(config, recorder, torch.device("cpu"), 0.0, None)
    message = [line for line in recorder.lines if line.startswith("note: ")]
    assert message == ["note: files that are not images skipped: 1 (.txt 1)"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "masked-patches"}, "the search compares classifiers"),
        ({"until_accuracy": 0.9}, "until_accuracy stops a run early"),
    ],
)
def test_unsupported_settings_raise(colors, start, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        search(config_of(colors, tmp_path / "out", start, **changes))


def test_multiple_processes_raise(colors, start, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="one process, and there are 2; start it without torchrun"
    ):
        search(config_of(colors, tmp_path / "out", start))


def test_multi_label_data_raises(start, tmp_path):
    path = tmp_path / "list.csv"
    path.write_text("\n".join(["path,label", *(f"{i}.png,red|blue" for i in range(4))]))
    with pytest.raises(DataError, match="several labels each, and probes need one"):
        search(config_of(path, tmp_path / "out", start, batch_size=None))


def make_result(*accuracies, **changes) -> SearchResult:
    result = tuple(
        Candidate(name=name, accuracy=accuracy, seconds=190.0) for name, accuracy in accuracies
    )
    options = {"folder": Path("out"), "data": "flowers", "start": "run", "dev": "train"}
    return SearchResult(**options, images=240, candidates=result, finished=True, **changes)


def test_report_shows_the_gain_of_each_candidate():
    accuracies = ((PROBE, 0.912), (LINEAR, 0.908), (ATTENTION, 0.94), (FULL, 0.936))
    lines = list(search_report(make_result(*accuracies)))
    assert max(map(len, lines)) <= 80
    message = " ".join(line.strip() for line in lines)
    assert "attention-only    94.0 %  +2.8  3 min 10 s" in "\n".join(lines)
    assert "full fine-tuning  93.6 %  -0.4  3 min 10 s" in "\n".join(lines)
    assert "chosen: attention-only (94.0 % on dev: 240 images, held out from train)" in message


def test_command_prints_the_search_as_json(colors, start, tmp_path, capsys, quick):
    runs = quick()
    args = ["finetune", str(colors), "--from", start, "--search", "--out", str(tmp_path / "out")]
    small = ["--batch-size", "6", "--model.image-size", "8"]
    assert main([*args, "--json", "--recipe", "paper-finetune", *small]) == 0
    message = json.loads(capsys.readouterr().out)
    assert message == written(tmp_path / "out")
    rates = [config.settings.optim.learning_rate for config in runs.configs]
    assert rates == [*adapt.SGD_RATES] * 2  # the recipe's is the middle of them


def test_explicit_learning_rate_replaces_the_grid(colors, start, tmp_path, capsys, quick):
    runs = quick()
    args = ["finetune", str(colors), "--from", start, "--search", "--out", str(tmp_path / "out")]
    assert main([*args, "--optim.learning-rate", "0.5"]) == 0
    assert [config.settings.optim.learning_rate for config in runs.configs] == [0.5, 0.5]
    printed = capsys.readouterr().out
    assert "attention-only" in printed
    assert "test accuracy " in printed


def test_search_cannot_be_resumed(colors, start, tmp_path, capsys):
    args = ["finetune", str(colors), "--from", start, "--search", "--resume"]
    assert main([*args, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("vitrail: --search cannot be resumed; ")
