"""The user's own recipes: reading, errors, and round trips."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given, settings, strategies

from vitrail.errors import ConfigError
from vitrail.training.config import OptimSettings, Settings
from vitrail.training.recipes import (
    FIELD_TYPES,
    grid,
    read_recipe,
    settings_from_dict,
    summary,
    to_toml,
    write_run,
)


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(folder: Path, text: str) -> str:
    """Return the error message for a file my.toml."""
    with pytest.raises(ConfigError) as error:
        read_recipe(written(folder, "my.toml", text))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_recipes_extend_packaged_and_own_files(tmp_path):
    written(tmp_path, "base.toml", 'extends = "vit-s16-imagenet"\nseed = 3\nbatch_size = 64\n')
    own = written(tmp_path, "own.toml", 'extends = "base.toml"\nbatch_size = 32\n')
    original = read_recipe("vit-s16-imagenet")
    assert read_recipe(own) == replace(original, seed=3, batch_size=32)


def test_steps_override_inherited_epochs(tmp_path):
    text = 'extends = "deit-s16"\nsteps = 100\n[optim]\nwarmup_steps = 10\n'
    recipe = read_recipe(written(tmp_path, "my.toml", text))
    assert (recipe.epochs, recipe.steps) == (None, 100)
    assert (recipe.optim.warmup_steps, recipe.optim.warmup) == (10, OptimSettings().warmup)
    text = 'extends = "vit-s16-imagenet"\n[optim]\nwarmup = 0.1\n'
    assert read_recipe(written(tmp_path, "my.toml", text)).optim.warmup_steps is None


def test_settings_of_a_run_are_a_recipe(tmp_path):
    recipe = read_recipe("deit-s16")
    write_run(tmp_path, recipe, data="pictures", start="")
    assert read_recipe(str(tmp_path / "settings.toml")) == recipe
    assert read_recipe(written(tmp_path, "my.toml", "")) == settings_from_dict({}) == Settings()
    (tmp_path / "my.toml").write_bytes(b"\xef\xbb\xbf# Mine.\r\nseed = 1\r\n")
    assert read_recipe(str(tmp_path / "my.toml")).seed == 1
    assert summary(str(tmp_path / "my.toml")) == "Mine."
    assert summary(written(tmp_path, "my.toml", "seed = 1")) == ""
    assert grid("deit-s16") == []


def test_value_conversion(tmp_path):
    text = "epochs = 3\nimage_sizes = [[0, 32], [0.5, 64]]\n"
    text += '[optim]\nfreeze = ["stem.*"]\nbetas = [0, 1]'
    recipe = read_recipe(written(tmp_path, "my.toml", text))
    assert recipe.image_sizes == ((0, 32), (0.5, 64))
    assert isinstance(recipe.epochs, float)
    assert recipe.optim.freeze == ("stem.*",)
    assert recipe.optim.betas == (0, 1)


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        ("[optim]\nlr = 1", "optim.lr", "did you mean 'optim.learning_rate'?"),
        ("[optim]\nwd = 1", "optim.wd", "did you mean 'optim.weight_decay'?"),
        ("[optim]\nlearning_rte = 1", "optim.learning_rte", "did you mean 'optim.learning_rate'?"),
        ("[optim]\nlearning-rate = 1", "optim.learning-rate", "'optim.learning_rate'?"),
        ("learning_rate = 1", "learning_rate", "did you mean 'optim.learning_rate'?"),
        ("[optim]\nkinds = 1", "optim.kinds", "did you mean 'optim.kind'?"),
        ("[loss]\nkinds = 1", "loss.kinds", "did you mean 'loss.kind'?"),
        ("batchsize = 1", "batchsize", "did you mean 'batch_size'?"),
        ("[optimizer]\nkind = 1", "optimizer", "did you mean the table [optim]?"),
        ("[masked]\nzebra = 1", "masked.zebra", "known: share, predict"),
        ('[mix]\nextends = "x"', "mix.extends", "known: mixup, cutmix, chance, style, after"),
    ],
)
def test_unknown_setting_suggests(tmp_path, text, name, hint):
    message = error_of(tmp_path, text)
    assert message.startswith(f"unknown setting {name!r} in my.toml; ")
    assert message.endswith(hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('batch_size = "64"', "batch_size='64' in my.toml must be a whole number"),
        ("batch_size = 64.0", "batch_size=64.0 in my.toml must be a whole number"),
        ("batch_size = true", "batch_size=True in my.toml must be a whole number"),
        ("epochs = true", "epochs=True in my.toml must be a number"),
        ("average = nan", "average=nan in my.toml must be a number"),
        ("epochs = inf", "epochs=inf in my.toml must be a number"),
        ("epochs = 1" + "0" * 400, "epochs=1" + "0" * 400 + " in my.toml must be a number"),
        ("strict = 1", "strict=1 in my.toml must be true or false"),
        ("preprocessing = 3", "preprocessing=3 in my.toml must be a string"),
        ("optim = 3", "optim=3 in my.toml must be a table, such as [optim]"),
        ("[[optim]]\nkind = 3", "optim=[{'kind': 3}] in my.toml must be a table"),
        ("[batch_size]\na = 1", "batch_size={'a': 1} in my.toml must be a whole number"),
        ('[loss]\nkind = "hinge"', "loss.kind='hinge' in my.toml must be one of softmax, sigmoid"),
        ("[loss]\nkind = 1", "loss.kind=1 in my.toml must be one of softmax, sigmoid"),
        ("[optim]\nbetas = [0.9]", "optim.betas=[0.9] in my.toml must be a list of 2: a number, "),
        ("[optim]\nstairs = 0.5", "optim.stairs=0.5 in my.toml must be a list, each item a number"),
        ("[optim]\nstairs = ['a']", "optim.stairs=['a'] in my.toml must be a list, each"),
        ("image_sizes = [0, 32]", "image_sizes=[0, 32] in my.toml must be a list, each item a"),
        ("seed = 2020-01-01", "seed=datetime.date(2020, 1, 1) in my.toml must be a whole number"),
        ("extends = 3", "extends=3 in my.toml must be the name of a recipe"),
    ],
)
def test_wrong_type_raises(tmp_path, text, message):
    assert error_of(tmp_path, text).startswith(message)


def test_invalid_values_name_the_file(tmp_path):
    message = error_of(tmp_path, "[optim]\nlearning_rate = -1")
    assert "optim.learning_rate=-1.0 must be a positive number (in " in message
    assert "my.toml" in message
    with pytest.raises(ConfigError, match=r"^epochs=-1.0 must be above zero$"):
        settings_from_dict({"epochs": -1})
    with pytest.raises(ConfigError, match=r"^unknown setting 'epoch' in a run; did you mean"):
        settings_from_dict({"epoch": 1}, "a run")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed = 1\nepochs = = 2", "at line 2"),
        ("seed = 1\nseed = 2", "at line 2"),
        ("seed = 1\n\nepochs", "at line 3"),
        ('seed = 1\npreprocessing = "goo', "at line 2"),
        ("[optim\n", "at line 1"),
        ("a = " + "[" * 5000, "is not a TOML file"),
        ("seed = 1" + "0" * 5000, "is not a TOML file"),
    ],
)
def test_syntax_error_names_the_line(tmp_path, text, line):
    message = error_of(tmp_path, text)
    assert message.startswith("my.toml is not a TOML file: ")
    assert line in message


def test_errors_in_extended_and_other_files(tmp_path):
    (tmp_path / "my.toml").write_bytes(b"seed = 1\n# \xff\n")
    with pytest.raises(ConfigError, match=r"^my.toml is not UTF-8 text \(at line 2\)$"):
        read_recipe(str(tmp_path / "my.toml"))
    written(tmp_path, "other.toml", 'extends = "my.toml"')
    message = error_of(tmp_path, 'extends = "other.toml"')
    assert message.startswith("my.toml extends other.toml extends my.toml: ")
    assert error_of(tmp_path, 'extends = "my.toml"').startswith("my.toml extends my.toml: ")
    written(tmp_path, "base.toml", "zebra = 1")
    assert "'zebra' in base.toml" in error_of(tmp_path, 'extends = "base.toml"')


def test_missing_recipe_suggests(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    for name, message in [
        ("diet-s16", "unknown recipe 'diet-s16'; did you mean 'deit-s16'"),
        ("zebra", r"`vitrail recipes` lists the packaged ones, and .* own ends in \.toml"),
        ("deit-s16.toml", r"recipe file not found: deit-s16\.toml; did you mean the pack"),
        ("", "unknown recipe ''"),
        (str(tmp_path / "folder.toml"), "cannot read the recipe"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_recipe(name)


def test_toml_is_readable(tmp_path):
    optim = {"learning_rate": 1e-4, "warmup_steps": 10_000, "eps": 2.5e-9, "end": 1e-5}
    model = {"name": "ViT-S/16", "distillation": False, "head_bias": -1e300}
    values = {"epochs": 90, "batch_size": 4096, "preprocessing": 'a "quoted"\n\\path\x7f'}
    recipe = settings_from_dict(
        values | {"model": model, "optim": optim, "augment": {"crop_area": (0.05, 1)}}
    )
    assert to_toml(recipe, defaults=False).splitlines() == [
        *("epochs = 90", "batch_size = 4096", r'preprocessing = "a \"quoted\"\n\\path\u007f"'),
        *("", "[model]", 'name = "ViT-S/16"', "distillation = false", "head_bias = -1e300"),
        *("", "[optim]", "learning_rate = 1e-4", "warmup_steps = 10_000", "end = 1e-5"),
        *("eps = 2.5e-9", "", "[augment]", "crop_area = [0.05, 1]"),
    ]
    assert "momentum = 0.9\n" in to_toml(recipe)
    assert "\nseed = 0\n" in to_toml(recipe)
    assert settings_from_dict(tomllib.loads(to_toml(recipe))) == recipe


SHARES = strategies.floats(0, 0.99, exclude_max=True)


def anything(kind):
    """Values of a type, in ranges that every setting of it allows."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return strategies.sampled_from(parts)
    if get_origin(kind) is tuple and parts[-1] is Ellipsis:
        return strategies.lists(anything(parts[0]), max_size=3).map(tuple)
    if get_origin(kind) is tuple:
        return strategies.tuples(*map(anything, parts))
    return {
        bool: strategies.booleans(),
        int: strategies.integers(1, 10**12),
        float: strategies.floats(0, 1, exclude_min=True, exclude_max=True),
        str: strategies.text(strategies.characters(exclude_categories=["Cs"])),
    }[kind]


@strategies.composite
def nested(draw):
    """Random settings as nested plain values."""
    apart = {"epochs", "image_sizes"}  # excludes `steps`; must rise
    names = draw(strategies.sets(strategies.sampled_from(sorted(FIELD_TYPES.keys() - apart))))
    values = {}
    for name in names:
        table, _, key = name.rpartition(".")
        (values.setdefault(table, {}) if table else values)[key] = draw(anything(FIELD_TYPES[name]))
    if area := values.get("augment", {}).get("crop_area"):
        values["augment"]["crop_area"] = sorted(area)
    if values.get("mix", {}).get("style") == "big_vision":
        values["mix"].pop("cutmix", None)
    if draw(strategies.booleans()):
        starts = draw(strategies.lists(SHARES, unique=True, max_size=3))
        pixels = strategies.integers(1, 512)
        values["image_sizes"] = [[start, draw(pixels)] for start in sorted({0.0, *starts})]
    return values


@settings(deadline=None, max_examples=100)
@given(nested(), strategies.booleans(), strategies.floats(allow_nan=False, allow_infinity=False))
def test_random_settings_round_trip(values, defaults, number):
    values.setdefault("model", {})["head_bias"] = number  # any float, exactly
    one = settings_from_dict(values)
    again = settings_from_dict(tomllib.loads(to_toml(one, defaults=defaults)))
    assert again == one
