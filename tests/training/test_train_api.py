"""`vitrail.train` accepts what the command accepts."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tiny_runs import SETTINGS, equal, weights, write_colors
from vitrail.cli import parse
from vitrail.training import trainer
from vitrail.training.config import ModelSettings
from vitrail.training.recipes import FIXED, write_run

RECIPE = "epochs = 3\nbatch_size = 6\n\n[optim]\nwarmup_steps = 10\n"


@pytest.fixture
def configs(monkeypatch):
    """Record the configurations instead of running them."""
    configs = []
    monkeypatch.setattr(trainer, "run", lambda config, callback: configs.append(config))
    return configs


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "birds.toml").write_text(RECIPE, encoding="utf-8")
    return tmp_path / "birds.toml"


@pytest.mark.parametrize(
    ("changes", "args"),
    [
        ({"steps": 7}, ["--steps", "7"]),
        ({"epochs": 2.5}, ["--epochs=2.5"]),
        ({"optim": {"warmup": 0.2}}, ["--optim.warmup", "0.2"]),
        ({"optim": {"warmup_steps": 4}}, ["--optim.warmup_steps", "4"]),
        ({"batch_size": 4, "optim": {"kind": "sgd"}}, ["--batch-size=4", "--optim.kind=sgd"]),
    ],
    ids=lambda changes: " ".join(changes) if isinstance(changes, list) else "",
)
def test_keywords_override_a_recipe_like_options(configs, recipe, changes, args):
    vitrail.train("pictures", "run", recipe=recipe, **changes)
    [config] = configs
    assert config.settings == parse(["train", "pictures", "--recipe", str(recipe), *args]).settings


def test_keywords_and_paths(configs, recipe, tmp_path):
    vitrail.train("pictures", "run", recipe=str(recipe), steps=7, optim={"warmup": 0.2})
    settings = configs[0].settings
    assert (settings.steps, settings.epochs) == (7, None)
    assert (settings.optim.warmup, settings.optim.warmup_steps) == (0.2, None)
    vitrail.train("pictures", "run", recipe=recipe, steps=None)
    assert configs[1].settings.epochs == 3  # None overrides nothing
    vitrail.train(tmp_path / "pictures", tmp_path / "run", start=tmp_path / "model")
    assert configs[2].start == str(tmp_path / "model")
    with pytest.raises(vitrail.ConfigError, match="both set the length of the run"):
        vitrail.train("pictures", "run", steps=7, epochs=2)
    model = vitrail.create("ViT-Mu/4", num_classes=3)
    with pytest.raises(vitrail.ConfigError, match=r"start is a VisionTransformer, .*\.save"):
        vitrail.train("pictures", "run", start=model)


def test_keywords_are_validated_like_recipes(configs):
    vitrail.train("pictures", "run", model="ViT-Ti/16", batch_size=np.int64(4), epochs=2)
    settings = configs[0].settings
    assert settings.model.name == "ViT-Ti/16"
    assert (type(settings.batch_size), type(settings.epochs)) == (int, float)
    for changes, message in (
        (
            {"optim": {"lr": 1e-3}},
            "unknown setting 'optim.lr'; did you mean 'optim.learning_rate'?",
        ),
        ({"lr": 1e-3}, "unknown setting 'lr'; did you mean 'optim.learning_rate'?"),
        ({"ema": 0.99}, "unknown setting 'ema'; did you mean 'average'?"),
        ({"model": {"num_heads": 3}}, "'model.num_heads'; did you mean 'model.heads'?"),
        ({"optim": "adamw"}, "optim='adamw' must be a dict, such as {'kind': …}"),
        ({"optim": Path()}, "optim=PosixPath must be a dict, such as {'kind': …}"),
        ({"batch_size": "64"}, "batch_size='64' must be a whole number"),
        ({"loss": {"kind": "hinge"}}, "loss.kind='hinge' must be one of softmax, sigmoid"),
        ({"seed": None}, "seed=None must be a whole number"),
    ):
        with pytest.raises(vitrail.ConfigError) as failure:
            vitrail.train("pictures", "run", **changes)
        assert str(failure.value).endswith(message)


def test_every_field_of_a_config_is_a_setting():
    configs = (vitrail.VitConfig, vitrail.BitConfig, vitrail.MixerConfig)
    names = {f.name for config in configs for f in fields(config)} - {"num_classes"}
    assert {f.name for f in fields(ModelSettings)} == names | {"name", "init", "head_bias"}


def test_settings_object(configs):
    vitrail.train("pictures", "run", settings=SETTINGS, epochs=2, optim={"kind": "sgd"})
    optim = replace(SETTINGS.optim, kind="sgd")
    assert configs[0].settings == replace(SETTINGS, steps=None, epochs=2.0, optim=optim)
    with pytest.raises(vitrail.ConfigError, match="recipe and settings exclude each other"):
        vitrail.train("pictures", "run", settings=SETTINGS, recipe="deit-s16")
    with pytest.raises(vitrail.ConfigError, match=r"settings is a dict; pass vitrail\.Settings"):
        vitrail.train("pictures", "run", settings={"steps": 7})


def test_opened_datasets(configs, tmp_path):
    data = write_colors(tmp_path / "colors.npz")
    train, test = (vitrail.open_dataset(data, split) for split in ("train", "test"))
    vitrail.train(train, "run")
    vitrail.train(train, "run", dev=0.2)
    vitrail.train({"train": train, "Validation": test}, "run")
    empty = {"train": train, "val": test.subset(np.arange(0))}
    vitrail.train(empty, "run")
    vitrail.train(empty, "run", dev=0.2)
    assert [len(config.splits.train) for config in configs] == [30, 24, 30, 30, 24]
    sizes = [{name: len(x) for name, x in c.splits.held_out.items()} for c in configs]
    assert sizes == [{}, {"val": 6}, {"val": 12}, {}, {"val": 6}]
    with pytest.raises(vitrail.DataError, match="no train split; they have: test"):
        vitrail.train({"test": test}, "run")
    with pytest.raises(vitrail.ConfigError, match=r"data is a ndarray; .* vitrail\.open_dataset"):
        vitrail.train(np.zeros((2, 8, 8, 3)), "run")


@pytest.mark.slow
def test_opened_dataset_trains_and_resumes_like_its_reference(tmp_path):
    class StopAfter(vitrail.Callback):
        def on_step(self, row):
            if row["step"] == 4:
                raise KeyboardInterrupt

    data = write_colors(tmp_path / "colors.npz")
    splits = {split: vitrail.open_dataset(data, split) for split in ("train", "test")}
    vitrail.train(data, tmp_path / "reference", settings=SETTINGS)
    run, changes = tmp_path / "opened", {"save_minutes": 1e-9}
    with pytest.raises(KeyboardInterrupt):
        vitrail.train(splits, run, settings=SETTINGS, callback=StopAfter(), **changes)
    with pytest.raises(vitrail.ConfigError, match=r"was trained on dataset:\w+, not dataset:"):
        vitrail.train(splits["test"], run, resume=True)
    result = vitrail.train(splits, run, resume=True)
    assert equal(weights(tmp_path / "reference"), weights(run))
    assert list(result.outcomes) == ["test"]
    assert f"vitrail evaluate {run} DATA " in (run / "report.html").read_text()


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A run folder with nothing but settings.toml."""
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", SETTINGS, data="pictures", start="first")
    return tmp_path / "run"


def test_resume_with_changed_settings(configs, stopped):
    changes = {"machine": {"micro_batch": 2}, "optim": {"learning_rate": 1e-5}}
    vitrail.train("pictures", stopped, resume=True, **changes)
    [config] = configs
    assert (config.resume, config.start) == (True, "first")
    machine = replace(SETTINGS.machine, micro_batch=2)
    optim = replace(SETTINGS.optim, learning_rate=1e-5)
    assert config.settings == replace(SETTINGS, machine=machine, optim=optim)


def test_every_other_setting_is_fixed_when_a_run_is_resumed():
    changeable = {"minutes", "patience", "until_accuracy"}  # the length of the run
    changeable |= {"machine", "strict", "save_minutes", "retries"}
    assert sorted([*FIXED, "optim", *changeable]) == sorted(
        f.name for f in fields(vitrail.Settings)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 9}, "steps=9 cannot be changed when a run is resumed"),
        ({"model": {"depth": 3}}, "model.depth=3 cannot be changed when a run is resumed"),
        ({"optim": {"weight_decay": 0.5}}, "optim.weight_decay=0.5 cannot be changed"),
        ({"loss": {"label_smoothing": 0.1}}, "loss.label_smoothing=0.1 cannot be changed"),
        ({"balance": 1.0}, "balance=1.0 cannot be changed when a run is resumed"),
        ({"recipe": "deit-s16"}, "leave recipe and settings out"),
        ({"settings": vitrail.Settings()}, "leave recipe and settings out"),
        ({"start": "second"}, "started from first, not second; leave start out"),
    ],
)
def test_resume_as_another_run_raises(configs, stopped, changes, message):
    with pytest.raises(vitrail.ConfigError) as failure:
        vitrail.train("pictures", stopped, resume=True, **changes)
    assert message in str(failure.value)
    assert not configs
