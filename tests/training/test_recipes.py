"""The packaged recipes."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

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
# Table 4 of the paper; warmup of the authors' code; fractions held out to choose a learning rate.
#   dataset     steps  warmup    dev   grid
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
def test_table_3_matches_the_paper(row):
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


def test_every_row_of_table_3_has_a_recipe():
    bases = {"paper-jft", "paper-imagenet21k", "paper-imagenet"}
    there = {name for name in recipe_names() if name.startswith(tuple(bases))}
    assert there - bases == {row[0] for row in rows(TABLE_3)}


@pytest.mark.parametrize("name", TABLE_4)
def test_table_4_matches_the_paper(name):
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
    assert "\n# Cost      " in head
    assert "\n# Result    " in head
    assert summary(name) == head.splitlines()[0][2:]
    assert summary(name).endswith(".")
    assert max(map(len, text.splitlines())) <= 105
    if "%" in head.partition("# Result ")[2].partition("Grid")[0] and name != "demo":  # ours
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
    assert None not in (recipe.mix.mixup, recipe.mix.cutmix)
    assert recipe.optim.kind is not None
    assert recipe.batch_size is not None


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
