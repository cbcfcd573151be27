"""Recipes: every packaged one is right, and whatever a user writes is read or refused."""

import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given, settings, strategies

from vitrail.cli import main
from vitrail.errors import ConfigError
from vitrail.models.build import build
from vitrail.models.names import CONFIGURATIONS, configuration
from vitrail.training.folder import write_run
from vitrail.training.recipes import (
    KNOWN,
    PACKAGED,
    TABLES,
    grid,
    read_recipe,
    recipe_names,
    settings_from,
    summary,
    to_toml,
)
from vitrail.training.settings import Optim, Settings

DOCS = Path(__file__).parents[2] / "docs"

# Table 3 of the paper. Where it has two numbers of epochs, the recipe has the larger.
#   recipe                         model          epochs  rate   decay     wd    dropout
TABLE_3 = """
    paper-jft-vit-b16              ViT-B/16           7   8e-4   linear    0.1   0
    paper-jft-vit-b32              ViT-B/32           7   8e-4   linear    0.1   0
    paper-jft-vit-l32              ViT-L/32           7   6e-4   linear    0.1   0
    paper-jft-vit-l16              ViT-L/16          14   4e-4   linear    0.1   0
    paper-jft-vit-h14              ViT-H/14          14   3e-4   linear    0.1   0
    paper-jft-bit-r50x1            BiT-R50x1          7   1e-3   linear    0.1   -
    paper-jft-bit-r50x2            BiT-R50x2          7   1e-3   linear    0.1   -
    paper-jft-bit-r101x1           BiT-R101x1         7   8e-4   linear    0.1   -
    paper-jft-bit-r152x1           BiT-R152x1         7   6e-4   linear    0.1   -
    paper-jft-bit-r152x2           BiT-R152x2         7   6e-4   linear    0.1   -
    paper-jft-r50-vit-b16          R50+ViT-B/16       7   8e-4   linear    0.1   0
    paper-jft-r50-vit-b32          R50+ViT-B/32       7   8e-4   linear    0.1   0
    paper-jft-r50-vit-l32          R50+ViT-L/32       7   2e-4   linear    0.1   0
    paper-jft-r50-vit-l16          R50+ViT-L/16      14   4e-4   linear    0.1   0
    paper-imagenet21k-vit-b16      ViT-B/16          90   1e-3   linear    0.03  0.1
    paper-imagenet21k-vit-b32      ViT-B/32          90   1e-3   linear    0.03  0.1
    paper-imagenet21k-vit-l16      ViT-L/16          90   1e-3   linear    0.03  0.1
    paper-imagenet21k-vit-l32      ViT-L/32          90   1e-3   linear    0.03  0.1
    paper-imagenet-vit-b16         ViT-B/16         300   3e-3   cosine    0.3   0.1
    paper-imagenet-vit-b32         ViT-B/32         300   3e-3   cosine    0.3   0.1
    paper-imagenet-vit-l16         ViT-L/16         300   3e-3   cosine    0.3   0.1
    paper-imagenet-vit-l32         ViT-L/32         300   3e-3   cosine    0.3   0.1
"""
# Table 4 of the paper; warm-up of the authors' code; shares kept apart to choose a learning rate.
#   data set    steps  warm-up   dev   grid
TABLE_4 = {
    "imagenet": (20_000, 500, 0.01, [0.003, 0.01, 0.03, 0.06]),
    "cifar10": (10_000, 500, 0.02, [0.001, 0.003, 0.01, 0.03]),
    "cifar100": (10_000, 500, 0.02, [0.001, 0.003, 0.01, 0.03]),
    "pets": (500, 100, 0.1, [0.001, 0.003, 0.01, 0.03]),
    "flowers": (500, 100, 0.1, [0.001, 0.003, 0.01, 0.03]),
    "vtab": (2_500, 100, 0.0, [0.01]),
}
# big_vision's levels for ImageNet-21k: mixup, magnitude of RandAugment.
AUGREG = {
    "none": (0.0, None),
    "light1": (0.0, 0),
    "light2": (0.2, 10),
    "medium1": (0.2, 15),
    "medium2": (0.5, 15),
    "strong1": (0.5, 20),
    "strong2": (0.8, 20),
}


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


@pytest.mark.parametrize("row", rows(TABLE_3), ids=lambda row: row[0])
def test_table_3_is_as_in_the_paper(row):
    name, model, epochs, rate, decay, weight_decay, dropout = row
    recipe = read_recipe(name)
    assert recipe.model.name == model
    assert recipe.epochs == int(epochs)
    assert recipe.steps is None
    assert recipe.batch_size == 4096
    assert recipe.model.image_size == 224
    assert recipe.model.dropout == (None if dropout == "-" else float(dropout))
    optim = recipe.optim
    assert (optim.kind, optim.betas, optim.warmup_steps) == ("adamw", (0.9, 0.999), 10_000)
    assert (optim.learning_rate, optim.schedule) == (float(rate), decay)
    assert optim.weight_decay == float(weight_decay)
    assert optim.clip_norm == (1 if name.startswith("paper-imagenet-") else None)
    assert optim.end == (1e-5 if decay == "linear" else 0)
    assert recipe.loss.kind == "sigmoid"
    assert recipe.model.head_bias == (-6.9 if name.startswith("paper-imagenet-") else -10)
    if "ViT" in model:
        assert recipe.model.representation == configuration(model).width


def test_every_row_of_table_3_has_its_recipe():
    bases = {"paper-jft", "paper-imagenet21k", "paper-imagenet"}
    there = {name for name in recipe_names() if name.startswith(tuple(bases))}
    assert there - bases == {row[0] for row in rows(TABLE_3)}


@pytest.mark.parametrize("name", TABLE_4)
def test_table_4_is_as_in_the_paper(name):
    steps, warmup, dev, rates = TABLE_4[name]
    recipe = read_recipe(f"paper-finetune-{name}")
    assert (recipe.steps, recipe.batch_size, recipe.dev) == (steps, 512, dev)
    assert recipe.model.image_size == 384
    assert recipe.average == 0
    optim = recipe.optim
    assert (optim.kind, optim.momentum, optim.schedule) == ("sgd", 0.9, "cosine")
    assert (optim.warmup_steps, optim.weight_decay, optim.clip_norm) == (warmup, 0, 1)
    assert grid(f"paper-finetune-{name}") == rates
    assert optim.learning_rate in rates


def test_table_2_adds_averaging_and_512_pixels():
    plain, more = map(read_recipe, ("paper-finetune-imagenet", "paper-finetune-imagenet-512"))
    assert (more.average, more.model.image_size) == (0.9999, 512)
    assert replace(more, average=plain.average, model=plain.model) == plain
    assert grid("paper-finetune-imagenet-512") == grid("paper-finetune-imagenet")


@pytest.mark.parametrize("level", AUGREG)
def test_augreg_levels_are_big_vision_s(level):
    mixup, magnitude = AUGREG[level]
    recipe = read_recipe(f"augreg-{level}")
    assert (recipe.mix.mixup, recipe.mix.style) == (mixup, "big_vision")
    assert recipe.augment.flavor == "big_vision"
    assert recipe.augment.policy == ("none" if magnitude is None else "randaugment")
    assert recipe.augment.magnitude == magnitude
    assert recipe.augment.count == (None if magnitude is None else 2)


@pytest.mark.parametrize(
    ("name", "supports", "mixup"),
    [
        ("small", (100, 200, 300, 400, 500), 0),
        ("medium", (500, 3000, 6000, 9000, 10_000), 0.1),
        ("large", (500, 6000, 12_000, 18_000, 20_000), 0.1),
    ],
)
def test_the_hyperrule_is_bit_s(name, supports, mixup):
    recipe = read_recipe(f"bit-hyperrule-{name}")
    assert recipe.optim.warmup_steps == supports[0]
    assert recipe.steps == supports[-1]
    falls = [stair * recipe.steps for stair in recipe.optim.stairs]
    assert falls == pytest.approx(supports[1:-1])
    assert (recipe.optim.kind, recipe.optim.learning_rate) == ("sgd", 0.003)
    assert (recipe.batch_size, recipe.mix.mixup) == (512, mixup)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_tells_what_it_is_how_to_run_it_and_what_it_reaches(name):
    text = (PACKAGED / f"{name}.toml").read_text(encoding="utf-8")
    head = text.partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "#     vitrail " in head
    assert f"--recipe {name}" in head
    assert "\n# Takes     " in head
    assert "\n# Reaches   " in head
    assert summary(name) == head.splitlines()[0][2:]
    assert summary(name).endswith(".")
    assert max(map(len, text.splitlines())) <= 105
    if "%" in head.partition("Reaches")[2].partition("Grid")[0] and name != "demo":  # ours
        assert "published" in head


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_s_model_can_be_built(name):
    wanted = read_recipe(name).model
    model = wanted.name or ("BiT-R50x1" if name.startswith("bit") else "ViT-B/16")
    assert model in CONFIGURATIONS  # spelled as it is listed
    config = configuration(model).change(**wanted.changes())
    assert build(config).config == config


@pytest.mark.parametrize("name", recipe_names())
def test_no_recipe_leaves_variation_to_be_chosen(name):
    recipe = read_recipe(name)
    chosen = recipe.augment
    assert None not in (chosen.crop, chosen.flip, chosen.policy, chosen.erasing)
    assert chosen.crop_area is not None or chosen.crop != "inception"
    if chosen.policy == "randaugment":
        assert None not in (chosen.count, chosen.magnitude, chosen.flavor, chosen.spread)
    assert None not in (recipe.mix.mixup, recipe.mix.cutmix)
    assert recipe.optim.kind is not None
    assert recipe.batch_size is not None


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_being_written_and_read(name):
    recipe = read_recipe(name)
    assert settings_from(tomllib.loads(to_toml(recipe))) == recipe
    assert settings_from(tomllib.loads(to_toml(recipe, defaults=False))) == recipe


@pytest.mark.parametrize("name", recipe_names())
def test_the_command_in_a_recipe_is_one_that_can_be_typed(name, capsys):
    text = (PACKAGED / f"{name}.toml").read_text(encoding="utf-8")
    (command,) = (line for line in text.splitlines() if line.startswith("#     vitrail "))
    assert main([*command.split()[2:], "--print-settings"]) == 0
    printed = settings_from(tomllib.loads(capsys.readouterr().out))
    assert printed.batch_size == read_recipe(name).batch_size


def test_the_documentation_lists_every_recipe():
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in recipe_names() if f"`{name}`" not in text] == []


def test_recipes_are_read_without_torch():
    code = (
        "import sys; from vitrail.training.recipes import read_recipe, to_toml\n"
        "to_toml(read_recipe('deit-s16'))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The user's own files


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(folder: Path, text: str) -> str:
    """What is said about a file my.toml."""
    with pytest.raises(ConfigError) as error:
        read_recipe(written(folder, "my.toml", text))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_own_file_may_extend_a_packaged_recipe_and_another_file(tmp_path):
    written(tmp_path, "base.toml", 'extends = "vit-s16-imagenet"\nseed = 3\nbatch_size = 64\n')
    own = written(tmp_path, "own.toml", 'extends = "base.toml"\nbatch_size = 32\n')
    original = read_recipe("vit-s16-imagenet")
    assert read_recipe(own) == replace(original, seed=3, batch_size=32)


def test_steps_take_the_place_of_epochs_that_are_extended(tmp_path):
    text = 'extends = "deit-s16"\nsteps = 100\n[optim]\nwarmup_steps = 10\n'
    recipe = read_recipe(written(tmp_path, "my.toml", text))
    assert (recipe.epochs, recipe.steps) == (None, 100)
    assert (recipe.optim.warmup_steps, recipe.optim.warmup) == (10, Optim().warmup)
    text = 'extends = "vit-s16-imagenet"\n[optim]\nwarmup = 0.1\n'
    assert read_recipe(written(tmp_path, "my.toml", text)).optim.warmup_steps is None


def test_the_settings_that_a_run_kept_are_a_recipe(tmp_path):
    recipe = read_recipe("deit-s16")
    write_run(tmp_path, recipe, data="pictures", start="")
    assert read_recipe(str(tmp_path / "settings.toml")) == recipe


def test_an_empty_file_is_the_defaults(tmp_path):
    assert read_recipe(written(tmp_path, "my.toml", "")) == Settings()
    assert settings_from({}) == Settings()


def test_a_byte_order_mark_and_windows_lines_are_no_matter(tmp_path):
    (tmp_path / "my.toml").write_bytes(b"\xef\xbb\xbf# Mine.\r\nseed = 1\r\n")
    assert read_recipe(str(tmp_path / "my.toml")).seed == 1
    assert summary(str(tmp_path / "my.toml")) == "Mine."


def test_lists_are_tuples_and_whole_numbers_may_stand_for_others(tmp_path):
    text = """
        epochs = 3
        image_sizes = [[0, 32], [0.5, 64]]
        [optim]
        freeze = ["stem.*"]
        betas = [0, 1]
    """
    recipe = read_recipe(written(tmp_path, "my.toml", text))
    assert recipe.image_sizes == ((0, 32), (0.5, 64))
    assert isinstance(recipe.epochs, float)
    assert recipe.optim.freeze == ("stem.*",)
    assert recipe.optim.betas == (0, 1)


@pytest.mark.parametrize(
    ("text", "name", "meant"),
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
        ('[mix]\nextends = "x"', "mix.extends", "known: mixup, cutmix, chance, style"),
    ],
)
def test_an_unknown_setting_is_refused_with_a_suggestion(tmp_path, text, name, meant):
    said = refusal(tmp_path, text)
    assert said.startswith(f"unknown setting {name!r} in my.toml; ")
    assert said.endswith(meant)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('batch_size = "64"', "batch_size='64' in my.toml must be a whole number"),
        ("batch_size = 64.0", "batch_size=64.0 in my.toml must be a whole number"),
        ("batch_size = true", "batch_size=True in my.toml must be a whole number"),
        ("epochs = true", "epochs=True in my.toml must be a number"),
        ("average = nan", "average=nan in my.toml must be a number"),
        ("epochs = inf", "epochs=inf in my.toml must be a number"),
        ("strict = 1", "strict=1 in my.toml must be true or false"),
        ("preprocessing = 3", "preprocessing=3 in my.toml must be text in quotes"),
        ("optim = 3", "optim=3 in my.toml must be a table, such as [optim]"),
        ("[[optim]]\nkind = 3", "optim=[{'kind': 3}] in my.toml must be a table"),
        ("[batch_size]\na = 1", "batch_size={'a': 1} in my.toml must be a whole number"),
        ('[loss]\nkind = "hinge"', "loss.kind='hinge' in my.toml must be one of softmax, sigmoid"),
        ("[loss]\nkind = 1", "loss.kind=1 in my.toml must be one of softmax, sigmoid"),
        ("[optim]\nbetas = [0.9]", "optim.betas=[0.9] in my.toml must be a list of 2: a number, "),
        ("[optim]\nstairs = 0.5", "optim.stairs=0.5 in my.toml must be a list, each item a number"),
        ("[optim]\nstairs = ['a']", "optim.stairs=['a'] in my.toml must be a list, each"),
        (
            "image_sizes = [0, 32]",
            "image_sizes=[0, 32] in my.toml must be a list, each item a list",
        ),
        ("seed = 2020-01-01", "seed=datetime.date(2020, 1, 1) in my.toml must be a whole number"),
        ("extends = 3", "extends=3 in my.toml must be the name of a recipe"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path, text, said):
    assert refusal(tmp_path, text).startswith(said)


def test_a_number_beyond_all_numbers_is_refused(tmp_path):
    assert "must be a number" in refusal(tmp_path, "epochs = 1" + "0" * 400)


def test_impossible_values_are_refused_with_the_file_s_name(tmp_path):
    said = refusal(tmp_path, "[optim]\nlearning_rate = -1")
    assert "optim.learning_rate=-1.0 must be a positive number (in " in said
    assert "my.toml" in said
    with pytest.raises(ConfigError, match=r"^epochs=-1.0 must be above zero$"):
        settings_from({"epochs": -1})
    with pytest.raises(ConfigError, match=r"^unknown setting 'epoch' in a run; did you mean"):
        settings_from({"epoch": 1}, "a run")


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
def test_a_broken_file_is_refused_with_its_line(tmp_path, text, line):
    said = refusal(tmp_path, text)
    assert said.startswith("my.toml is not a TOML file: ")
    assert line in said


def test_a_file_that_is_no_text_is_refused_with_its_line(tmp_path):
    (tmp_path / "my.toml").write_bytes(b"seed = 1\n# \xff\n")
    with pytest.raises(ConfigError, match=r"^my.toml is not UTF-8 text \(at line 2\)$"):
        read_recipe(str(tmp_path / "my.toml"))


def test_recipes_that_extend_each_other_are_refused(tmp_path):
    written(tmp_path, "other.toml", 'extends = "my.toml"')
    said = refusal(tmp_path, 'extends = "other.toml"')
    assert said.startswith("my.toml extends other.toml extends my.toml: ")
    assert refusal(tmp_path, 'extends = "my.toml"').startswith("my.toml extends my.toml: ")


def test_a_mistake_is_told_of_the_file_it_is_in(tmp_path):
    written(tmp_path, "base.toml", "zebra = 1")
    assert "'zebra' in base.toml" in refusal(tmp_path, 'extends = "base.toml"')


def test_a_recipe_that_does_not_exist_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match="unknown recipe 'diet-s16'; did you mean 'deit-s16'"):
        read_recipe("diet-s16")
    with pytest.raises(
        ConfigError, match=r"own ends in \.toml, and the packaged ones are in .*rec"
    ):
        read_recipe("zebra")
    with pytest.raises(ConfigError, match=r"no recipe file deit-s16\.toml; did you mean the pack"):
        read_recipe("deit-s16.toml")
    with pytest.raises(ConfigError, match="unknown recipe ''"):
        read_recipe("")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        read_recipe(str(tmp_path / "folder.toml"))


def test_a_recipe_without_a_grid_has_none_and_without_a_comment_no_summary(tmp_path):
    assert grid("deit-s16") == []
    assert summary(written(tmp_path, "my.toml", "seed = 1")) == ""


# Writing


def test_settings_are_written_as_a_person_would(tmp_path):
    recipe = settings_from(
        {
            "epochs": 90,
            "batch_size": 4096,
            "preprocessing": 'a "quoted"\n\\path\x7f',
            "model": {"name": "ViT-S/16", "distillation": False, "head_bias": -1e300},
            "optim": {"learning_rate": 1e-4, "warmup_steps": 10_000, "eps": 2.5e-9, "end": 1e-5},
            "augment": {"crop_area": (0.05, 1)},
        }
    )
    assert to_toml(recipe, defaults=False) == (
        "epochs = 90\n"
        "batch_size = 4096\n"
        'preprocessing = "a \\"quoted\\"\\n\\\\path\\u007f"\n'
        "\n[model]\n"
        'name = "ViT-S/16"\n'
        "distillation = false\n"
        "head_bias = -1e300\n"
        "\n[optim]\n"
        "learning_rate = 1e-4\n"
        "warmup_steps = 10_000\n"
        "end = 1e-5\n"
        "eps = 2.5e-9\n"
        "\n[augment]\n"
        "crop_area = [0.05, 1]\n"
    )
    assert "momentum = 0.9\n" in to_toml(recipe)
    assert "\nseed = 0\n" in to_toml(recipe)
    assert settings_from(tomllib.loads(to_toml(recipe))) == recipe


SHARES = strategies.floats(0, 0.99, exclude_max=True)


def anything(kind):
    """Values of a setting's type, in ranges that every setting of it allows."""
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
    """Some settings, at random, as nested plain values."""
    apart = {"epochs", "image_sizes"}  # excludes `steps`; must rise
    names = draw(strategies.sets(strategies.sampled_from(sorted(KNOWN.keys() - apart))))
    values = {}
    for name in names:
        table, _, key = name.rpartition(".")
        (values.setdefault(table, {}) if table else values)[key] = draw(anything(KNOWN[name]))
    if draw(strategies.booleans()):
        starts = draw(strategies.lists(SHARES, unique=True, max_size=3))
        pixels = strategies.integers(1, 512)
        values["image_sizes"] = [[start, draw(pixels)] for start in sorted({0.0, *starts})]
    return values


@settings(deadline=None, max_examples=60)
@given(nested(), strategies.booleans())
def test_whatever_is_written_reads_back_as_it_was(values, defaults):
    one = settings_from(values)
    again = settings_from(tomllib.loads(to_toml(one, defaults=defaults)))
    assert again == one


@settings(deadline=None, max_examples=200)
@given(strategies.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_written_to_the_last_digit(number):
    one = settings_from({"model": {"head_bias": number}})
    assert settings_from(tomllib.loads(to_toml(one))).model.head_bias == number


def test_every_setting_is_known_by_its_full_name():
    for field in fields(Settings):
        if is_dataclass(field.type):
            assert field.name in TABLES
            assert all(f"{field.name}.{inner.name}" in KNOWN for inner in fields(field.type))
        else:
            assert field.name in KNOWN
