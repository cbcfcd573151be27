"""`vitrail.train` takes what the command takes, and means the same."""

from dataclasses import replace
from pathlib import Path

import pytest

import vitrail
from tiny_runs import SETTINGS
from vitrail.cli import parse
from vitrail.training import trainer
from vitrail.training.recipes import write_run

RECIPE = "epochs = 3\nbatch_size = 6\n\n[optim]\nwarmup_steps = 10\n"


@pytest.fixture
def ordered(monkeypatch):
    """The orders that are given; nobody carries them out."""
    orders = []
    monkeypatch.setattr(trainer, "run", lambda order, watch: orders.append(order))
    return orders


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "birds.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 7}, ["--steps", "7"]),
        ({"epochs": 2.5}, ["--epochs=2.5"]),
        ({"optim": {"warmup": 0.2}}, ["--optim.warmup", "0.2"]),
        ({"optim": {"warmup_steps": 4}}, ["--optim.warmup_steps", "4"]),
        ({"batch_size": 4, "optim": {"kind": "sgd"}}, ["--batch-size=4", "--optim.kind=sgd"]),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_keyword_overrules_a_recipe_as_the_option_does(ordered, recipe, changes, words):
    vitrail.train("pictures", "run", recipe=recipe, **changes)
    [order] = ordered
    assert order.settings == parse(["train", "pictures", "--recipe", str(recipe), *words]).settings


def test_steps_and_the_share_of_the_warm_up_take_the_place_of_a_recipe_s(ordered, recipe):
    vitrail.train("pictures", "run", recipe=str(recipe), steps=7, optim={"warmup": 0.2})
    settings = ordered[0].settings
    assert (settings.steps, settings.epochs) == (7, None)
    assert (settings.optim.warmup, settings.optim.warmup_steps) == (0.2, None)


def test_what_is_left_open_by_a_keyword_takes_nothing_back(ordered, recipe):
    vitrail.train("pictures", "run", recipe=recipe, steps=None)
    assert ordered[0].settings.epochs == 3


def test_steps_and_epochs_together_are_refused(ordered):
    with pytest.raises(vitrail.ConfigError, match="both set the length of the run"):
        vitrail.train("pictures", "run", steps=7, epochs=2)


def test_a_model_to_begin_with_may_be_a_path(ordered, tmp_path):
    vitrail.train(tmp_path / "pictures", tmp_path / "run", start=tmp_path / "model")
    assert ordered[0].start == str(tmp_path / "model")


def test_a_model_in_memory_is_refused_with_what_to_do_instead(ordered):
    with pytest.raises(
        vitrail.ConfigError, match=r"start is a VisionTransformer, .* vitrail\.save"
    ):
        vitrail.train("pictures", "run", start=vitrail.create("ViT-Mu/4", num_classes=3))


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A run of which nothing but its settings is left."""
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", SETTINGS, data="pictures", start="first")
    return tmp_path / "run"


def test_a_resumed_run_may_change_how_it_goes_on(ordered, stopped):
    changes = {"machine": {"micro_batch": 2}, "optim": {"learning_rate": 1e-5}}
    vitrail.train("pictures", stopped, resume=True, **changes)
    [order] = ordered
    assert (order.resume, order.start) == (True, "first")
    machine = replace(SETTINGS.machine, micro_batch=2)
    optim = replace(SETTINGS.optim, learning_rate=1e-5)
    assert order.settings == replace(SETTINGS, machine=machine, optim=optim)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"steps": 9}, "steps=9 cannot be changed when a run is resumed"),
        ({"model": {"depth": 3}}, "model.depth=3 cannot be changed when a run is resumed"),
        ({"recipe": "deit-s16"}, "leave the recipe out"),
        ({"start": "second"}, "started from first, not second; leave start out"),
    ],
)
def test_a_resumed_run_may_not_become_another(ordered, stopped, given, refused):
    with pytest.raises(vitrail.ConfigError) as failure:
        vitrail.train("pictures", stopped, resume=True, **given)
    assert refused in str(failure.value)
    assert not ordered
