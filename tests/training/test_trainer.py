"""Training runs from settings to bundle."""

import itertools
import json
import shutil
import tomllib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import (
    CLASSES,
    SETTINGS,
    TINY,
    Recorder,
    equal,
    tiny_run,
    weights,
    write_colors,
    write_folder,
)
from vitrail.cli import main
from vitrail.data.preprocessing import Mixing
from vitrail.errors import CheckpointError, ConfigError, DataError, TrainingError, VitrailError
from vitrail.models.registry import configuration
from vitrail.training import budget as budgets
from vitrail.training import checkpoint
from vitrail.training.auto_config import choose_precision
from vitrail.training.budget import END_SECONDS, TimeBudget
from vitrail.training.callbacks import Callback, read_rows
from vitrail.training.checkpoint import GRADIENTS
from vitrail.training.config import (
    LossSettings,
    MachineSettings,
    MaskedSettings,
    ModelSettings,
    OptimSettings,
    RunConfig,
)
from vitrail.training.loop import Evaluator
from vitrail.training.objectives import Classification
from vitrail.training.recipes import METRICS, read_recipe, read_run
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.slow


def test_run_writes_a_complete_bundle(colors, tmp_path, charts):
    result = tiny_run(colors, tmp_path / "run", steps=60, evaluate_every=6.0, optim=OptimSettings())
    model = vitrail.load(tmp_path / "run")
    assert model.metadata.class_names == CLASSES
    assert model.metadata.provenance["data"] == str(colors)
    assert model.metadata.provenance["test accuracy"] == result.outcomes["test"].accuracy
    assert result.finished
    assert result.outcomes["test"].samples == 12
    assert result.outcomes["test"].accuracy > 0.9  # three colors are easy
    assert json.dumps(result.outcomes["test"].to_dict())
    files = {path.name for path in (tmp_path / "run").iterdir()}
    bundle = {"model.safetensors", "config.json", "README.md"}
    run = {"settings.toml", "metrics.jsonl", "report.html", ".lock"}
    assert files - {"tensorboard"} == bundle | run  # events, where TensorBoard is installed
    report = (tmp_path / "run" / "report.html").read_text()
    assert all(f"<h2>{title}" in report for title in ("Training curves", "Confusion matrix: test"))
    settings, data, start = read_run(tmp_path / "run")
    assert (data, start, settings.model.channels) == (str(colors), "", 3)
    assert None not in (settings.optim.kind, settings.optim.learning_rate)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 61))
    assert [row["step"] for row in rows if "test/accuracy" in row] == [30, 60]


def test_seed_and_average_determine_the_weights(colors, tmp_path):
    for name, seed, average in (("a", 1, 0.0), ("b", 1, 0.0), ("c", 2, 0.0), ("d", 1, 0.9)):
        tiny_run(colors, tmp_path / name, seed=seed, average=average)
    a, b, c, d = (weights(tmp_path / name) for name in "abcd")
    assert equal(a, b)
    assert not equal(a, c)
    assert not equal(a, d)


def test_run_leaves_no_trace_in_the_process(colors, tmp_path):
    class Careless(Callback):
        def on_step(self, row):
            np.random.seed(0)
            torch.set_num_threads(threads + 1)

    def state():
        return np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before, threads = state(), torch.get_num_threads()
    tiny_run(colors, tmp_path / "run", steps=2, callback=Careless())
    assert (state(), torch.get_num_threads()) == (before, threads)


def test_evaluation_returns_to_training_mode_after_an_error():
    evaluator = object.__new__(Evaluator)
    evaluator.objective, evaluator.ema = torch.nn.Linear(1, 1), None
    try:
        with evaluator.evaluating():
            assert not evaluator.objective.training
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert evaluator.objective.training


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({}, False),
        ({"mix": Mixing(cutmix=1.0, after=0.0)}, True),
        ({"model": replace(TINY, dropout=0.2)}, True),
        ({"model": replace(TINY, drop_path=0.5)}, True),
        ({"model": replace(TINY, patch_dropout=0.5)}, True),
        ({"objective": "masked-patches"}, True),
    ],
    ids=["nothing", "cutmix", "dropout", "stochastic depth", "patch dropout", "masks"],
)
def test_random_draws_depend_on_the_micro_batch(colors, tmp_path, changes, drawn):
    optim = OptimSettings(kind="sgd", learning_rate=0.1, clip_norm=None if drawn else 1.0)
    changes = {"optim": optim, "steps": 4 if drawn else 8} | changes
    tiny_run(colors, tmp_path / "whole", **changes)
    tiny_run(colors, tmp_path / "parts", machine=MachineSettings(micro_batch=2), **changes)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    distance = max(float((whole[name] - parts[name]).abs().max()) for name in whole)
    assert distance > 1e-3 if drawn else distance < 1e-6


def test_micro_batch_is_recorded_but_not_a_setting(colors, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.training.auto_config.free_bytes", lambda device: 0)
    tiny_run(colors, tmp_path / "run")
    path = tmp_path / "run" / "settings.toml"
    run = tomllib.loads(path.read_text())["run"]
    assert run == {"data": str(colors), "from": "", "processes": 1, "micro_batch": 1}
    assert read_run(tmp_path / "run")[0].machine.micro_batch is None
    assert read_recipe(str(path)).machine.micro_batch is None


def test_time_budget_ends_on_time(colors, tmp_path, monkeypatch):
    ticks = itertools.count(step=0.01)  # each call advances the clock by 10 ms
    monkeypatch.setattr("time.monotonic", lambda: next(ticks))
    monkeypatch.setattr(budgets, "TimeBudget", partial(TimeBudget, clock=lambda: next(ticks)))
    recorder = Recorder()
    result = tiny_run(colors, tmp_path / "run", callback=recorder, steps=None, minutes=0.2)
    assert any("time budget of 0.2 min: about" in line for line in recorder.lines)
    assert 12 - END_SECONDS - 1 < result.seconds <= 12  # the ending takes no time here
    rates = [row["learning_rate"] for row in recorder.rows]
    assert rates[-1] < 0.2 * max(rates)


def test_early_stopping_at_target_accuracy(colors, tmp_path, charts):
    goal, recorder = {"until_accuracy": 0.6, "dev": 0.2}, Recorder()
    goal |= {"steps": 400, "evaluate_every": 1.0}
    result = tiny_run(colors, tmp_path / "run", callback=recorder, **goal)
    assert result.finished
    assert result.step < 400
    assert result.outcomes["val"].accuracy >= 0.6
    assert not any("test/accuracy" in row for row in recorder.evaluations[:-1])  # only in the end
    assert any("early stopping at 60.0 % val accuracy" in line for line in recorder.lines)
    assert "early stopping at 60.0 % val accuracy" in (tmp_path / "run" / "report.html").read_text()


def test_early_stopping_needs_a_val_split(colors, tmp_path):
    arrays = dict(np.load(colors))
    np.savez(tmp_path / "one.npz", x=arrays["x_train"], y=arrays["y_train"])
    for name, value in (("until_accuracy", 0.6), ("patience", 2)):
        message = error_of(colors, tmp_path / "run", **{name: value})
        assert f"{name}={value} needs a val split, which {colors} does not have" in message
        assert "test must not be used for model selection; --dev 0.1 holds" in message
        message = error_of(tmp_path / "one.npz", tmp_path / "run", dev=0.0, **{name: value})
        assert "does not have; --dev 0.1 holds" in message
    recorder = Recorder()  # without a target it trains on everything
    tiny_run(tmp_path / "one.npz", tmp_path / "run", dev=0.0, callback=recorder)
    assert any("30 training images" in line for line in recorder.lines)


def test_finetuning_starts_from_the_given_weights(colors, tmp_path):
    tiny_run(colors, tmp_path / "start", steps=60)
    recorder, start = Recorder(), {"start": str(tmp_path / "start")}
    model = ModelSettings(image_size=12)
    tiny_run(colors, tmp_path / "next", **start, model=model, callback=recorder, steps=3)
    assert any("2 x 2 -> 3 x 3" in line for line in recorder.lines)
    assert vitrail.load(tmp_path / "next").config.image_size == 12
    assert recorder.rows[0]["loss"] < 1.0  # a fresh model would begin at log 3
    frozen = replace(SETTINGS.optim, freeze=("stem.*", "encoder.*"))
    tiny_run(colors, tmp_path / "frozen", **start, model=ModelSettings(), optim=frozen)
    before, after = weights(tmp_path / "start"), weights(tmp_path / "frozen")
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert "head" in changed
    assert not changed & {"stem", "encoder"}


def test_masked_pretraining_then_finetuning(colors, tmp_path, charts):
    recorder = Recorder()
    masked = {"objective": "masked-patches", "masked": MaskedSettings(predict="pixels")}
    tiny_run(colors, tmp_path / "masked", **masked, callback=recorder, evaluate_every=1.0)
    assert vitrail.load(tmp_path / "masked").config.num_classes == 0
    assert "test/loss" in recorder.evaluations[0]
    start = str(tmp_path / "masked")
    result = tiny_run(colors, tmp_path / "tuned", start=start, model=ModelSettings())
    assert result.outcomes["test"].samples == 12


def test_distillation_run(colors, tmp_path):
    tiny_run(colors, tmp_path / "teacher", steps=40)
    loss = LossSettings(teacher=str(tmp_path / "teacher"), teacher_weight=1.0, teaching="soft")
    result = tiny_run(colors, tmp_path / "student", steps=60, loss=loss)
    assert result.outcomes["test"].accuracy > 0.8


def test_multi_label_run(tmp_path, charts):
    write_folder(tmp_path)
    rows = ["file,labels,split"]
    for index in range(20):
        labels, split = "a|b" if index % 2 else "b", "train" if index < 16 else "test"
        rows.append(f"{CLASSES[index // 10]}/{index % 10}.png,{labels},{split}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    recorder = Recorder()
    result = tiny_run(tmp_path / "labels.csv", tmp_path / "run", callback=recorder)
    assert any("sigmoid loss" in line for line in recorder.lines)
    assert result.outcomes["test"].confusion is None


def test_divergence_names_step_layer_and_images(colors, tmp_path, charts):
    def optim(rate):
        return OptimSettings(kind="sgd", learning_rate=rate, warmup_steps=0)

    with pytest.raises(TrainingError, match="resume with a smaller") as failure:
        tiny_run(colors, tmp_path / "run", optim=optim(1e30))
    assert not isinstance(failure.value, CheckpointError)  # nothing is wrong with a file
    for part in ("training diverged at step", "first non-finite value: ", "train/"):
        assert part in str(failure.value)
    assert "\n" not in str(failure.value)
    assert (tmp_path / "run" / "state").exists()
    assert tiny_run(colors, tmp_path / "run", optim=optim(1e-2), resume=True).finished
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values())


def test_divergence_is_found_in_any_micro_batch(colors, tmp_path, monkeypatch):
    images = []

    def first_nonfinite(objective, batch, targets):
        images.append(batch)
        return "the images" if len(images) == 3 else GRADIENTS

    monkeypatch.setattr(checkpoint, "first_nonfinite", first_nonfinite)
    options = {"optim": OptimSettings(kind="sgd", learning_rate=1e30, warmup_steps=0)}
    with pytest.raises(TrainingError, match="first non-finite value: the images"):
        tiny_run(colors, tmp_path / "run", machine=MachineSettings(micro_batch=2), **options)
    assert [len(batch) for batch in images] == [2, 2, 2]
    assert not torch.equal(images[0], images[1])


def test_retries_halve_the_learning_rate_until_the_run_finishes(
    colors, tmp_path, monkeypatch, charts
):
    recorder = Recorder()
    optim = OptimSettings(kind="sgd", learning_rate=1e20, warmup_steps=0, momentum=0.0)
    with pytest.raises(TrainingError):
        tiny_run(colors, tmp_path / "run", optim=optim, retries=2, steps=30, callback=recorder)
    for scale in (0.5, 0.25):
        assert any(f"with learning rate x {scale}" in line for line in recorder.lines)
    calls, forward = [], Classification.forward

    def explode_once(self, images, targets):
        calls.append(len(images))
        return forward(self, images, targets) * (torch.nan if len(calls) == 4 else 1.0)

    monkeypatch.setattr(Classification, "forward", explode_once)
    recorder = Recorder()
    assert tiny_run(colors, tmp_path / "other", retries=1, callback=recorder).finished
    assert any("at step 3 " in line and "rolled back to step 0" in line for line in recorder.lines)
    steps = [row["step"] for row in read_rows(tmp_path / "other" / METRICS) if "loss" in row]
    assert steps == list(range(1, SETTINGS.steps + 1))
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "other").values())


@pytest.mark.parametrize(
    ("instructions", "model", "expected"),
    [
        ("amx_bf16", "ViT-Ti/16", torch.bfloat16),
        ("avx512_bf16", "ViT-Ti/16", torch.float32),
        ("avx512_bf16", "ViT-S/16", torch.bfloat16),
        ("avx512_bf16", "BiT-R50x1", torch.float32),
        ("avx2", "ViT-S/16", torch.float32),
    ],
)
def test_choose_precision_on_cpu(instructions, model, expected, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {instructions: True})
    config = configuration(model)
    assert choose_precision("auto", torch.device("cpu"), config)[0] == expected


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_training(colors, tmp_path, charts, precision):
    options = {"machine": MachineSettings(precision=precision), "steps": 40}
    recorder = Recorder()
    sizes = ((0.0, 4), (0.5, 8))  # progressive resizing
    result = tiny_run(colors, tmp_path / "run", callback=recorder, image_sizes=sizes, **options)
    assert [row["image_size"] for row in recorder.rows] == [4] * 20 + [8] * 20
    assert result.outcomes["test"].accuracy > 0.6
    assert {t.dtype for t in weights(tmp_path / "run").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("Mixer-S/32", {"depth": 1, "width": 16, "tokens_mlp": 8, "channels_mlp": 16}),
        ("BiT-R50x1", {"blocks": (1, 1)}),
    ],
)
def test_other_model_families(colors, tmp_path, name, small):
    model = ModelSettings(name=name, image_size=32, **small)
    result = tiny_run(colors, tmp_path / "run", model=model, steps=2, batch_size=2)
    assert result.outcomes["test"].samples == 12


def test_overwrite_happens_after_the_new_run_is_built(colors, tmp_path):
    tiny_run(colors, tmp_path / "run", seed=1)
    before = weights(tmp_path / "run")
    with pytest.raises(DataError):
        tiny_run(tmp_path / "typo", tmp_path / "run", overwrite=True)
    assert equal(weights(tmp_path / "run"), before)
    start = str(tmp_path / "run")  # which is overwritten
    options = {"start": start, "model": ModelSettings(), "overwrite": True}
    assert tiny_run(colors, tmp_path / "run", **options).finished
    assert not equal(weights(tmp_path / "run"), before)
    assert "already has a model; choose another --out" in error_of(colors, tmp_path / "run")
    assert "is finished" in error_of(colors, tmp_path / "run", resume=True)


def error_of(*args, **settings) -> str:
    with pytest.raises(VitrailError) as error:
        tiny_run(*args, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": "masked-patches", "until_accuracy": 0.9},
            "until_accuracy=0.9 needs classes",
        ),
        ({"model": replace(TINY, distillation=True, pool="cls")}, "set loss.teacher"),
        ({"batch_size": 64}, "batch_size=64 is more than the 30 training images; try 7"),
        ({"model": replace(TINY, image_size=10)}, "not a whole number of 4-pixel patches; try"),
        ({"optim": OptimSettings(warmup_steps=100)}, "warmup_steps=100 is not less than steps=8"),
    ],
)
def test_impossible_settings_raise(colors, tmp_path, changes, message):
    assert message in error_of(colors, tmp_path / "run", **changes)


def test_unsuitable_data_and_start_raise(colors, tmp_path):
    data = write_colors(tmp_path / "one.npz", classes=1)
    assert "one class, 'red'; classification needs two" in error_of(data, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert "empty" in error_of(tmp_path / "empty", tmp_path / "run")
    np.savez(tmp_path / "other.npz", weight=np.zeros(3))
    with pytest.raises((CheckpointError, ConfigError)):
        tiny_run(colors, tmp_path / "run", start=str(tmp_path / "other.npz"), model=ModelSettings())
    with pytest.raises(CheckpointError, match="is an architecture without weights"):
        tiny_run(colors, tmp_path / "run", start="ViT-B/16", model=ModelSettings())


def test_loaded_model_is_in_train_mode(colors, tmp_path):
    tiny_run(colors, tmp_path / "first", model=replace(TINY, dropout=0.5))
    settings = replace(SETTINGS, model=ModelSettings())
    start = str(tmp_path / "first")
    config = RunConfig(data=str(colors), out=tmp_path, settings=settings, start=start)
    objective = Trainer(config, Callback(), torch.device("cpu")).state.objective
    assert all(module.training for module in objective.modules())
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(objective.logits(images), objective.logits(images))


def test_missing_classes_are_noted_or_raise(tmp_path):
    images = write_folder(tmp_path / "images", count=3)

    def make(root, *folders):
        for folder in folders:
            shutil.copytree(images / "red", root / folder)
        return root

    recorder = Recorder()
    noted = make(tmp_path / "a", "train/cat", "train/dog", "val/cat")
    tiny_run(noted, tmp_path / "run", callback=recorder, batch_size=2)
    assert any("val has no image of 'dog'" in line and "--dev" in line for line in recorder.lines)
    make(noted, "test/cat")
    tiny_run(noted, tmp_path / "both", callback=(recorder := Recorder()), batch_size=2)
    (note,) = (line for line in recorder.lines if "no image of" in line)
    assert "val and test have no image of 'dog': results do not cover it" in note
    invalid = make(tmp_path / "b", "train/cat", "train/dog", "val/cat", "val/cow")
    message = error_of(invalid, tmp_path / "other", batch_size=2)
    assert "train has no image of 'cow'" in message


def test_broken_images_are_skipped_unless_strict(tmp_path):
    write_folder(tmp_path / "set")
    for name in ("0.png", "1.png", "2.png"):  # one of them at least is in train
        (tmp_path / "set" / "red" / name).write_bytes(b"no picture")
    tiny_run(tmp_path / "set", tmp_path / "run", steps=20)
    assert "red/" in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(DataError, match=r"red/\d\.png"):
        tiny_run(tmp_path / "set", tmp_path / "strict", steps=20, strict=True)


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_unreadable_images_are_named_once_in_the_terminal(command, start, tmp_path, capsys):
    write_folder(tmp_path / "set" / "train", count=4)
    write_folder(tmp_path / "set" / "test", count=2)
    options = ["--steps=12", "--batch-size=4", "--machine.workers=0"]
    options += [f"--from={start}"] if command == "finetune" else ["--model.name=ViT-Mu/4"]

    def notes(name):
        """Return what follows `note:`; the probe, the training and the evaluation skip images."""
        run = [command, str(tmp_path / "set"), f"--out={tmp_path / name}", *options]
        assert main(run) == 0
        lines = capsys.readouterr().out.replace("\n  ", " ").splitlines()  # undo the wrapping
        return [line for line in lines if "could not be read" in line]

    (tmp_path / "set" / "test" / "red" / "0.png").write_bytes(b"no image")
    (line,) = notes("one")
    assert line.startswith("note: 1 of 18 images could not be read and was skipped: test/red/0.png")
    assert line.endswith(")")
    for name in ("1.png", "2.png", "bad\x1b[31m\r\nname.png"):
        (tmp_path / "set" / "train" / "blue" / name).write_bytes(b"no image")
    (line,) = notes("several")
    assert line.startswith("note: 4 of 19 images could not be read and were skipped: ")
    assert line.endswith(") and 1 more")
    assert line.isprintable()


@pytest.mark.parametrize("search", [(), ("--search",)])
@pytest.mark.parametrize(
    "reference", ["gone/model.npz", "builtin:vit-photo", "hf:a/b/c", "ViT-B/61", "ViT-B/16"]
)
def test_reference_is_checked_before_the_data_is_read(reference, search, tmp_path, capsys):
    with pytest.raises(VitrailError) as expected:
        vitrail.load(reference)
    out = tmp_path / "run"
    options = ["--from", reference, "--out", str(out), *search]
    assert main(["finetune", str(tmp_path / "no data"), *options]) == 2
    assert capsys.readouterr().err == f"vitrail: {expected.value}\n"
    assert not out.exists()
