"""`vitrail.train` accepts what the command accepts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tiny_runs import SETTINGS
from vitrail.cli import parse
from vitrail.training import trainer
from vitrail.training.recipes import write_run

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
        ({"batch_size": "64"}, "batch_size='64' must be a whole number"),
        ({"loss": {"kind": "hinge"}}, "loss.kind='hinge' must be one of softmax, sigmoid"),
        ({"seed": None}, "seed=None must be a whole number"),
    ):
        with pytest.raises(vitrail.ConfigError) as failure:
            vitrail.train("pictures", "run", **changes)
        assert str(failure.value).endswith(message)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 9}, "steps=9 cannot be changed when a run is resumed"),
        ({"model": {"depth": 3}}, "model.depth=3 cannot be changed when a run is resumed"),
        ({"optim": {"weight_decay": 0.5}}, "optim.weight_decay=0.5 cannot be changed"),
        ({"loss": {"label_smoothing": 0.1}}, "loss.label_smoothing=0.1 cannot be changed"),
        ({"recipe": "deit-s16"}, "leave the recipe out"),
        ({"start": "second"}, "started from first, not second; leave start out"),
    ],
)
def test_resume_as_another_run_raises(configs, stopped, changes, message):
    with pytest.raises(vitrail.ConfigError) as failure:
        vitrail.train("pictures", stopped, resume=True, **changes)
    assert message in str(failure.value)
    assert not configs
