"""A run from settings to bundle: what it leaves behind, what it refuses, what it says."""

import itertools
import json
import tomllib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import CLASSES, SETTINGS, TINY, Notebook, tiny_run, write_colors
from vitrail.errors import CheckpointError, ConfigError, DataError, TrainingError, VitrailError
from vitrail.models.registry import configuration
from vitrail.training import pace
from vitrail.training.budget import ENDING, Budget
from vitrail.training.device import choose_precision
from vitrail.training.folder import read_run
from vitrail.training.recipes import read_recipe
from vitrail.training.records import read_rows
from vitrail.training.settings import (
    LossSettings,
    MachineSettings,
    MaskedSettings,
    MixSettings,
    ModelSettings,
    Optim,
)
from vitrail.training.setup import Order, set_up
from vitrail.training.watch import Watch


@pytest.fixture
def colors(tmp_path):
    return write_colors(tmp_path / "colors.npz")


def weights(folder) -> dict[str, torch.Tensor]:
    return vitrail.load(folder).state_dict()


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_run_leaves_a_bundle_that_knows_what_it_was_taught(colors, tmp_path):
    result = tiny_run(colors, tmp_path / "run", steps=60)
    model = vitrail.load(tmp_path / "run")
    assert model.metadata.class_names == CLASSES
    assert model.metadata.provenance["data"] == str(colors)
    assert model.metadata.provenance["test accuracy"] == result.outcomes["test"].accuracy
    assert result.finished
    assert result.outcomes["test"].samples == 12
    assert result.outcomes["test"].accuracy > 0.9  # three colors are easy
    files = {path.name for path in (tmp_path / "run").iterdir()}
    bundle = {"model.safetensors", "config.json", "README.md"}
    run = {"settings.toml", "metrics.jsonl", "report.html", ".lock"}
    assert files - {"tensorboard"} == bundle | run  # events, where TensorBoard is installed


def test_the_settings_of_a_run_are_complete_and_can_be_read_again(colors, tmp_path):
    tiny_run(colors, tmp_path / "run", batch_size=None, optim=Optim())
    settings, data, start = read_run(tmp_path / "run")
    assert (data, start) == (str(colors), "")
    assert settings.batch_size
    assert settings.optim.kind
    assert settings.optim.learning_rate
    assert settings.model.channels == 3


def test_metrics_have_every_step_of_a_short_run_and_every_evaluation(colors, tmp_path):
    tiny_run(colors, tmp_path / "run", steps=10, evaluate_every=1.0)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 11))
    assert [row["step"] for row in rows if "test/accuracy" in row] == [5, 10]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(colors, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny_run(colors, tmp_path / name, seed=seed)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert same(a, b)
    assert not same(a, c)


def test_accumulation_equals_the_large_batch(colors, tmp_path):
    optim = Optim(kind="sgd", learning_rate=0.1, clip_norm=1.0)
    tiny_run(colors, tmp_path / "whole", optim=optim)
    tiny_run(colors, tmp_path / "parts", optim=optim, machine=MachineSettings(micro_batch=2))
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({}, False),
        ({"mix": MixSettings(cutmix=1.0, after=0.0)}, True),
        ({"model": replace(TINY, dropout=0.2)}, True),
        ({"model": replace(TINY, drop_path=0.5)}, True),
        ({"model": replace(TINY, patch_dropout=0.5)}, True),
        ({"objective": "masked-patches"}, True),
    ],
    ids=["nothing", "cutmix", "dropout", "stochastic depth", "patch dropout", "masks"],
)
def test_what_is_drawn_for_a_part_depends_on_how_a_batch_is_divided(
    colors, tmp_path, changes, drawn
):
    changes = {"optim": Optim(kind="sgd", learning_rate=0.1), "steps": 4} | changes
    tiny_run(colors, tmp_path / "whole", **changes)
    tiny_run(colors, tmp_path / "parts", machine=MachineSettings(micro_batch=2), **changes)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    distance = max(float((whole[name] - parts[name]).abs().max()) for name in whole)
    assert distance > 1e-3 if drawn else distance < 1e-5


def test_a_run_tells_how_its_batches_were_divided_and_leaves_that_open(
    colors, tmp_path, monkeypatch
):
    monkeypatch.setattr("vitrail.training.setup.free_bytes", lambda device: 0)
    tiny_run(colors, tmp_path / "run")
    path = tmp_path / "run" / "settings.toml"
    told = tomllib.loads(path.read_text())["run"]
    assert told == {"data": str(colors), "from": "", "processes": 1, "micro_batch": 1}
    assert read_run(tmp_path / "run")[0].machine.micro_batch is None
    assert read_recipe(str(path)).machine.micro_batch is None


def test_a_time_budget_ends_on_time_and_says_what_it_planned(colors, tmp_path, monkeypatch):
    ticks = itertools.count(step=0.01)  # each look at the clock is a hundredth of a second later
    monkeypatch.setattr("time.monotonic", lambda: next(ticks))
    monkeypatch.setattr(pace, "Budget", partial(Budget, clock=lambda: next(ticks)))
    book = Notebook()
    result = tiny_run(colors, tmp_path / "run", watch=book, steps=None, minutes=0.15)
    assert any("0.15 minutes are enough for about" in line for line in book.lines)
    assert 9 - ENDING - 1 < result.seconds <= 9  # what is kept for the ending takes no time here
    assert book.rows[-1]["learning_rate"] < 0.2 * max(row["learning_rate"] for row in book.rows)


def test_training_stops_once_the_accuracy_is_reached(colors, tmp_path):
    goal, book = {"until_accuracy": 0.6, "dev": 0.2}, Notebook()
    result = tiny_run(colors, tmp_path / "run", steps=400, evaluate_every=1.0, watch=book, **goal)
    assert result.finished
    assert result.step < 400
    assert result.outcomes["val"].accuracy >= 0.6
    assert not any("test/accuracy" in row for row in book.verdicts[:-1])  # only in the end
    assert any("chosen by val" in line for line in book.lines)
    assert "chosen by val" in (tmp_path / "run" / "report.html").read_text()


def test_the_test_pictures_do_not_decide_when_to_stop(colors, tmp_path):
    words = refusal(colors, tmp_path / "run", until_accuracy=0.6)
    assert f"until_accuracy=0.6 needs a split val, which {colors} lacks" in words
    assert "test is not to choose by; --dev 0.1 keeps" in words
    arrays = dict(np.load(colors))
    np.savez(tmp_path / "one.npz", x=arrays["x_train"], y=arrays["y_train"])
    words = refusal(tmp_path / "one.npz", tmp_path / "run", until_accuracy=0.6, dev=0.0)
    assert "lacks; --dev 0.1 keeps" in words


def test_pictures_may_grow_during_a_run(colors, tmp_path):
    book = Notebook()
    tiny_run(colors, tmp_path / "run", watch=book, image_sizes=((0.0, 4), (0.5, 8)))
    assert [row["image_size"] for row in book.rows] == [4] * 4 + [8] * 4


def test_the_average_of_the_weights_is_the_result(colors, tmp_path):
    tiny_run(colors, tmp_path / "plain")
    tiny_run(colors, tmp_path / "averaged", average=0.9)
    assert not same(weights(tmp_path / "plain"), weights(tmp_path / "averaged"))


def test_frozen_weights_stay_what_they_were(colors, tmp_path):
    tiny_run(colors, tmp_path / "start", steps=2)
    frozen = replace(SETTINGS.optim, freeze=("stem.*", "encoder.*"))
    tiny_run(
        colors,
        tmp_path / "next",
        start=str(tmp_path / "start"),
        model=ModelSettings(),
        optim=frozen,
    )
    before, after = weights(tmp_path / "start"), weights(tmp_path / "next")
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert "head" in changed
    assert not changed & {"stem", "encoder"}


def test_fine_tuning_begins_with_the_weights_it_is_given(colors, tmp_path):
    tiny_run(colors, tmp_path / "start", steps=60)
    book = Notebook()
    tiny_run(
        colors,
        tmp_path / "next",
        start=str(tmp_path / "start"),
        model=ModelSettings(image_size=12),
        watch=book,
        steps=3,
    )
    assert any("2 x 2 -> 3 x 3" in line for line in book.lines)
    assert vitrail.load(tmp_path / "next").config.image_size == 12
    assert book.rows[0]["loss"] < 1.0  # a fresh model would begin at log 3


def test_masked_patches_need_no_classes_and_can_be_fine_tuned_from(colors, tmp_path):
    book = Notebook()
    tiny_run(
        colors,
        tmp_path / "masked",
        objective="masked-patches",
        masked=MaskedSettings(predict="pixels"),
        watch=book,
        steps=30,
        evaluate_every=2.0,
    )
    assert vitrail.load(tmp_path / "masked").config.num_classes == 0
    assert "test/loss" in book.verdicts[0]
    result = tiny_run(
        colors, tmp_path / "tuned", start=str(tmp_path / "masked"), model=ModelSettings()
    )
    assert result.outcomes["test"].samples == 12


def test_a_student_learns_from_a_teacher(colors, tmp_path):
    tiny_run(colors, tmp_path / "teacher", steps=40)
    loss = LossSettings(teacher=str(tmp_path / "teacher"), teacher_weight=1.0, teaching="soft")
    result = tiny_run(colors, tmp_path / "student", steps=60, loss=loss)
    assert result.outcomes["test"].accuracy > 0.8


def test_labels_of_several_classes_are_learned_by_a_sigmoid(tmp_path):
    rows = ["file,labels,split"]
    from PIL import Image

    rng = np.random.default_rng(0)
    for index in range(20):
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(tmp_path / f"{index}.png")
        rows.append(
            f"{index}.png,{'a|b' if index % 2 else 'b'},{'train' if index < 16 else 'test'}"
        )
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    book = Notebook()
    result = tiny_run(tmp_path, tmp_path / "run", watch=book)
    assert any("sigmoid loss" in line for line in book.lines)
    assert result.outcomes["test"].confusion is None


def test_an_exploding_loss_names_step_layer_and_pictures_and_keeps_the_state(colors, tmp_path):
    with pytest.raises(vitrail.TrainingError) as failure:
        tiny_run(colors, tmp_path / "run", optim=Optim(kind="sgd", learning_rate=1e30), steps=30)
    assert not isinstance(failure.value, CheckpointError)  # nothing is wrong with a file
    words = str(failure.value)
    assert "training failed at step" in words
    assert "the first bad value is in" in words
    assert "train/" in words
    assert (tmp_path / "run" / "state").exists()
    assert "\n" not in words


def test_an_exploded_run_is_resumed_from_its_last_good_state_at_a_smaller_rate(colors, tmp_path):
    def optim(rate):
        return Optim(kind="sgd", learning_rate=rate, warmup_steps=0)

    with pytest.raises(TrainingError, match="resume with a smaller"):
        tiny_run(colors, tmp_path / "run", optim=optim(1e30))
    assert tiny_run(colors, tmp_path / "run", optim=optim(1e-2), resume=True).finished
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values())


def test_after_an_explosion_a_run_can_go_on_at_half_the_rate(colors, tmp_path):
    book = Notebook()
    optim = Optim(kind="sgd", learning_rate=1e20, warmup_steps=0, momentum=0.0)
    with pytest.raises(TrainingError):
        tiny_run(colors, tmp_path / "run", optim=optim, retries=2, steps=30, watch=book)
    assert any("at 0.5 of the learning rate" in line for line in book.lines)
    assert any("at 0.25 of the learning rate" in line for line in book.lines)


def test_a_run_that_went_back_after_an_explosion_comes_to_its_end(colors, tmp_path, monkeypatch):
    from vitrail.training.objectives import Classification

    calls, forward = [], Classification.forward

    def explode_once(self, images, targets):
        calls.append(len(images))
        return forward(self, images, targets) * (torch.nan if len(calls) == 4 else 1.0)

    monkeypatch.setattr(Classification, "forward", explode_once)
    book = Notebook()
    result = tiny_run(colors, tmp_path / "run", retries=1, watch=book)
    assert result.finished
    assert any("at step 3 " in line and "back to step 0" in line for line in book.lines)
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values())


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
def test_bfloat16_is_chosen_where_it_is_faster(instructions, model, expected, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {instructions: True})
    config = configuration(model)
    assert choose_precision("auto", torch.device("cpu"), config)[0] == expected


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_products_of_lower_precision_learn_too(colors, tmp_path, precision):
    result = tiny_run(
        colors, tmp_path / "run", steps=40, machine=MachineSettings(precision=precision)
    )
    assert result.outcomes["test"].accuracy > 0.6
    assert {t.dtype for t in weights(tmp_path / "run").values()} == {torch.float32}


@pytest.mark.parametrize("name", ["Mixer-S/32", "BiT-R50x1"])
def test_every_family_can_be_trained(colors, tmp_path, name):
    model = ModelSettings(name=name, image_size=32)
    result = tiny_run(colors, tmp_path / "run", model=model, steps=2, batch_size=2)
    assert result.outcomes["test"].samples == 12


def test_a_run_that_is_overwritten_goes_only_once_the_new_one_can_begin(colors, tmp_path):
    tiny_run(colors, tmp_path / "run", seed=1)
    before = weights(tmp_path / "run")
    with pytest.raises(DataError):
        tiny_run(tmp_path / "typo", tmp_path / "run", overwrite=True)
    assert same(weights(tmp_path / "run"), before)
    tiny_run(colors, tmp_path / "run", seed=2, overwrite=True)
    assert not same(weights(tmp_path / "run"), before)


def test_a_run_can_replace_the_model_it_is_fine_tuned_from(colors, tmp_path):
    tiny_run(colors, tmp_path / "run", steps=40)
    start = str(tmp_path / "run")
    tuned = tiny_run(
        colors, tmp_path / "run", start=start, overwrite=True, model=ModelSettings(), steps=2
    )
    assert tuned.finished


def test_without_a_dev_split_everything_is_for_training(tmp_path):
    data = write_colors(tmp_path / "colors.npz")
    arrays = dict(np.load(data))
    np.savez(tmp_path / "one.npz", x=arrays["x_train"], y=arrays["y_train"])
    book = Notebook()
    tiny_run(tmp_path / "one.npz", tmp_path / "run", dev=0.0, watch=book)
    assert any("30 pictures" in line for line in book.lines)


def refusal(*args, **settings) -> str:
    with pytest.raises(VitrailError) as refused:
        tiny_run(*args, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_folder_with_a_model_is_not_written_over(colors, tmp_path):
    tiny_run(colors, tmp_path / "run")
    assert "holds a model already; name another --out" in refusal(colors, tmp_path / "run")
    assert "is finished" in refusal(colors, tmp_path / "run", resume=True)


def test_one_class_is_refused(tmp_path):
    data = write_colors(tmp_path / "one.npz", classes=1)
    assert "one class, 'red'; telling apart needs two" in refusal(data, tmp_path / "run")


def test_what_could_never_happen_is_refused(colors, tmp_path):
    words = refusal(colors, tmp_path / "a", objective="masked-patches", until_accuracy=0.9)
    assert "until_accuracy=0.9 needs classes" in words
    words = refusal(colors, tmp_path / "b", model=replace(TINY, distillation=True, pool="cls"))
    assert "name one with loss.teacher" in words


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty" in refusal(tmp_path / "empty", tmp_path / "run")


def test_a_batch_larger_than_the_data_is_refused(colors, tmp_path):
    words = refusal(colors, tmp_path / "run", batch_size=64)
    assert words == "batch_size=64 is more than the 30 training pictures; try 7"


def test_an_image_size_that_is_no_multiple_of_the_patch_is_refused(colors, tmp_path):
    words = refusal(colors, tmp_path / "run", model=replace(TINY, image_size=10))
    assert "not a whole number of 4-pixel patches; try" in words


def test_a_warm_up_longer_than_the_run_is_refused(colors, tmp_path):
    words = refusal(colors, tmp_path / "run", optim=replace(SETTINGS.optim, warmup_steps=100))
    assert "optim.warmup_steps=100 leaves nothing of steps=8" in words


def test_a_file_that_is_no_model_is_refused(colors, tmp_path):
    np.savez(tmp_path / "other.npz", weight=np.zeros(3))
    with pytest.raises((CheckpointError, ConfigError)):
        tiny_run(colors, tmp_path / "run", start=str(tmp_path / "other.npz"), model=ModelSettings())
    with pytest.raises(CheckpointError, match="is an architecture without weights"):
        tiny_run(colors, tmp_path / "run", start="ViT-B/16", model=ModelSettings())


def test_a_model_that_was_loaded_drops_in_training_what_it_is_to_drop(colors, tmp_path):
    tiny_run(colors, tmp_path / "first", model=replace(TINY, dropout=0.5))
    settings = replace(SETTINGS, model=ModelSettings())
    order = Order(data=str(colors), out=tmp_path, settings=settings, start=str(tmp_path / "first"))
    objective = set_up(order, Watch(), torch.device("cpu")).state.objective
    assert all(module.training for module in objective.modules())
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(objective.logits(images), objective.logits(images))


def test_a_model_is_fine_tuned_under_the_numerics_that_are_asked_for(colors, tmp_path):
    tiny_run(colors, tmp_path / "first", model=replace(TINY, numerics="timm"))
    start, book = str(tmp_path / "first"), Notebook()
    asked = ModelSettings(numerics="google")
    tiny_run(colors, tmp_path / "tuned", start=start, model=asked, watch=book)
    assert any(line.startswith("  numerics    timm -> google") for line in book.lines)
    assert vitrail.load(start).config.numerics == vitrail.NUMERICS["timm"]
    assert vitrail.load(tmp_path / "tuned").config.numerics == vitrail.NUMERICS["google"]


def test_a_class_that_val_lacks_is_noted_and_one_that_train_lacks_refused(tmp_path):
    from PIL import Image

    def make(root, *folders):
        for folder in folders:
            (root / folder).mkdir(parents=True)
            for number in range(3):
                color = tuple(np.random.default_rng(number).integers(0, 255, 3).tolist())
                Image.new("RGB", (8, 8), color).save(root / folder / f"{number}.png")
        return root

    book = Notebook()
    noted = make(tmp_path / "a", "train/cat", "train/dog", "val/cat")
    tiny_run(noted, tmp_path / "run", watch=book, batch_size=2)
    assert any("val has no picture of 'dog'" in line and "--dev" in line for line in book.lines)
    refused = make(tmp_path / "b", "train/cat", "train/dog", "val/cat", "val/cow")
    words = refusal(refused, tmp_path / "other", batch_size=2)
    assert "train has no picture of 'cow'" in words


def test_broken_pictures_are_replaced_and_named_and_strict_stops(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 4)):
        for kind in ("a", "b"):
            folder = tmp_path / "set" / split / kind
            folder.mkdir(parents=True)
            for n in range(count):
                Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(folder / f"{n}.png")
    (tmp_path / "set" / "train" / "a" / "0.png").write_bytes(b"no picture")
    tiny_run(tmp_path / "set", tmp_path / "run", steps=20)
    assert "a/0.png" in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(DataError, match=r"a/0\.png"):
        tiny_run(tmp_path / "set", tmp_path / "strict", steps=20, strict=True)


def test_results_are_plain_values(colors, tmp_path):
    result = tiny_run(colors, tmp_path / "run")
    assert json.dumps(result.outcomes["test"].to_dict())
