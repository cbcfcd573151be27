"""The packaged recipes."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from reproduction.published import DATA
from vitrail.cli import main
from vitrail.models.registry import CONFIGURATIONS, configuration
from vitrail.models.vit import build
from vitrail.training.recipes import (
    PACKAGED,
    grid,
    read_recipe,
    recipe_names,
    settings_from_dict,
    summary,
    to_toml,
)

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"

OWN = ("demo", "builtin-vit-photos")  # results of our own; all others are published

# Tables 3 and 4 of the paper; warmup of the authors' code; the fraction held out for a rate.
RECIPES = {"JFT": "paper-jft", "ImageNet-21k": "paper-imagenet21k", "ImageNet": "paper-imagenet"}
TABLE_3 = {
    f"{RECIPES[row['data']]}-{model.lower().replace('/', '').replace('+', '-')}": (model, row)
    for row in DATA["table3"]["rows"]
    for model in row["models"]
}
TABLE_4 = {"ImageNet": (500, 0.01), "CIFAR-10": (500, 0.02), "CIFAR-100": (500, 0.02)}
TABLE_4 |= {"Pets": (100, 0.1), "Flowers-102": (100, 0.1), "VTAB": (100, 0.0)}
# big_vision's levels for ImageNet-21k: mixup, magnitude of RandAugment.
AUGREG = {"none": (0.0, None), "light1": (0.0, 0), "light2": (0.2, 10), "medium1": (0.2, 15)}
AUGREG |= {"medium2": (0.5, 15), "strong1": (0.5, 20), "strong2": (0.8, 20)}


@pytest.mark.parametrize("name", TABLE_3)
def test_table_3_matches_the_paper(name):
    (model, row), recipe = TABLE_3[name], read_recipe(name)
    scratch = name.startswith("paper-imagenet-")
    assert (recipe.model.name, recipe.model.image_size, recipe.batch_size) == (model, 224, 4096)
    assert (recipe.epochs, recipe.steps) == (max(row["epochs"]), None)
    assert recipe.model.dropout == (None if model.startswith("BiT") else row["dropout"])
    optim = recipe.optim
    assert (optim.kind, optim.betas, optim.warmup_steps) == ("adamw", (0.9, 0.999), 10_000)
    assert (optim.learning_rate, optim.schedule) == (row["learning_rate"], row["decay"])
    assert (optim.weight_decay, optim.clip_norm) == (row["weight_decay"], 1 if scratch else None)
    assert optim.end == (1e-5 if row["decay"] == "linear" else 0)
    assert (recipe.loss.kind, recipe.model.head_bias) == ("sigmoid", -6.9 if scratch else -10)
    if "ViT" in model:
        assert recipe.model.representation == configuration(model).width
    there = {name for name in recipe_names() if name.startswith(tuple(RECIPES.values()))}
    assert there - {*RECIPES.values()} == TABLE_3.keys()


@pytest.mark.parametrize("name", DATA["table4"])
def test_table_4_matches_the_paper(name):
    row, (warmup, dev) = DATA["table4"][name], TABLE_4[name]
    own = f"paper-finetune-{name.lower().removesuffix('-102').replace('-', '')}"
    recipe = read_recipe(own)
    assert (recipe.steps, recipe.batch_size, recipe.dev) == (row["steps"], 512, dev)
    assert (recipe.model.image_size, recipe.average) == (384, 0)
    optim = recipe.optim
    assert (optim.kind, optim.momentum, optim.schedule) == ("sgd", 0.9, "cosine")
    assert (optim.warmup_steps, optim.weight_decay, optim.clip_norm) == (warmup, 0, 1)
    assert grid(own) == row["learning_rates"]
    assert optim.learning_rate in row["learning_rates"]


def test_table_2_uses_averaging_and_512_pixels():
    plain, more = map(read_recipe, ("paper-finetune-imagenet", "paper-finetune-imagenet-512"))
    assert (more.average, more.model.image_size) == (0.9999, 512)
    assert replace(more, average=plain.average, model=plain.model) == plain
    assert grid("paper-finetune-imagenet-512") == grid("paper-finetune-imagenet")


@pytest.mark.parametrize("level", AUGREG)
def test_augreg_levels_match_big_vision(level):
    mixup, magnitude = AUGREG[level]
    recipe = read_recipe(f"augreg-{level}")
    assert (recipe.mix.mixup, recipe.mix.style) == (mixup, "big_vision")
    assert recipe.augment.flavor == "big_vision"
    assert recipe.augment.policy == ("none" if magnitude is None else "randaugment")
    assert recipe.augment.count == 2
    assert magnitude in (None, recipe.augment.magnitude)


@pytest.mark.parametrize(
    ("name", "supports", "mixup"),
    [
        ("small", (100, 200, 300, 400, 500), 0),
        ("medium", (500, 3000, 6000, 9000, 10_000), 0.1),
        ("large", (500, 6000, 12_000, 18_000, 20_000), 0.1),
    ],
)
def test_hyperrule_matches_bit(name, supports, mixup):
    recipe = read_recipe(f"bit-hyperrule-{name}")
    assert recipe.optim.warmup_steps == supports[0]
    assert recipe.steps == supports[-1]
    falls = [stair * recipe.steps for stair in recipe.optim.stairs]
    assert falls == pytest.approx(supports[1:-1])
    assert (recipe.optim.kind, recipe.optim.learning_rate) == ("sgd", 0.003)
    assert (recipe.batch_size, recipe.mix.mixup) == (512, mixup)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_header(name):
    text = (PACKAGED / f"{name}.toml").read_text(encoding="utf-8")
    head = text.partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "#     vitrail " in head
    assert f"--recipe {name}" in head
    assert all(f"\n# {part}" in head for part in ("Cost      ", "Result    "))
    assert summary(name) == head.splitlines()[0][2:]
    if "%" in head.partition("# Result ")[2].partition("Grid")[0] and name not in OWN:
        assert "published" in head


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_builds_its_model_and_sets_its_augmentation(name):
    recipe = read_recipe(name)
    model = recipe.model.name or ("BiT-R50x1" if name.startswith("bit") else "ViT-B/16")
    assert model in CONFIGURATIONS  # spelled as it is listed
    config = configuration(model).change(**recipe.model.changes())
    assert build(config).config == config
    chosen = recipe.augment
    assert None not in (chosen.crop, chosen.flip)
    assert chosen.crop_area is not None or chosen.crop != "inception"
    required = (recipe.mix.mixup, recipe.mix.cutmix, recipe.optim.kind, recipe.batch_size)
    assert None not in required


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_round_trips_and_its_command_parses(name, capsys):
    recipe = read_recipe(name)
    assert settings_from_dict(tomllib.loads(to_toml(recipe))) == recipe
    assert settings_from_dict(tomllib.loads(to_toml(recipe, defaults=False))) == recipe
    text = (PACKAGED / f"{name}.toml").read_text(encoding="utf-8")
    (command,) = (line for line in text.splitlines() if line.startswith("#     vitrail "))
    assert main([*command.split()[2:], "--print-settings"]) == 0
    printed = settings_from_dict(tomllib.loads(capsys.readouterr().out))
    assert printed.batch_size == recipe.batch_size


def test_docs_list_every_recipe():
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in recipe_names() if f"`{name}`" not in text] == []


def test_recipes_do_not_import_torch():
    code = (
        "import sys; from vitrail.training.recipes import read_recipe, to_toml\n"
        "to_toml(read_recipe('deit-s16'))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
