"""`vitrail models` and `vitrail recipes`: the named architectures, and the training recipes."""

import json
from dataclasses import dataclass
from textwrap import indent, wrap
from typing import Any

from vitrail.checkpoints import builtin
from vitrail.cli.console import WIDTH, print_json, table
from vitrail.cli.options import UNMET, Command, Json
from vitrail.models.config import BitConfig, Config, VitConfig, from_dict
from vitrail.models.registry import CONFIGURATIONS
from vitrail.training.recipes import recipe_names, summary

COLUMNS = ("name", "parameters", "image_size", "tokens", "depth", "width", "heads")


@dataclass(frozen=True, kw_only=True)
class Models(Command):
    """List the named architectures, and the trained models that come with vitrail."""

    like: str = ""
    """Only names that contain this text, ignoring case."""
    json: bool = False
    """Print one JSON list instead of a table."""

    def run(self) -> int:
        files = {name: builtin.find(name) / "config.json" for name in builtin.references()}
        trained: dict[str, Config] = {
            name: from_dict(json.loads(file.read_text())["model"]) for name, file in files.items()
        }
        rows = [
            describe(name, config)
            for name, config in (CONFIGURATIONS | trained).items()
            if self.like.lower() in name.lower()
        ]
        if self.json:
            print_json(rows)
        elif rows:
            values = [[row.get(column) for column in COLUMNS] for row in rows]
            cells = [
                ["" if x is None else f"{x:,}" if isinstance(x, int) else str(x) for x in row]
                for row in values
            ]
            head = [column.replace("_", " ") for column in COLUMNS]
            print(*table(cells, "lrrrrrr", head), sep="\n")
            print("\nParameters include a head of 1000 classes, at the image size shown.")
            print('In Python: vitrail.create("ViT-B/16", num_classes=10)')
            if any(row["name"] in trained for row in rows):
                print(f"\nPre-trained {builtin.PREFIX} models ship with vitrail and have no head:")
                print(f'vitrail.load("{builtin.DEFAULT}", num_classes=10)')
        else:
            print(f"no name contains {self.like!r}; `vitrail models` lists all")
        return 0 if rows else UNMET


def describe(name: str, config: Config) -> dict[str, Any]:
    from vitrail.models.vit import build

    row: dict[str, Any] = {
        "name": name,
        "parameters": sum(p.numel() for p in build(config).parameters()),
        "image_size": config.image_size,
    }
    if isinstance(config, BitConfig):
        return row | {"depth": sum(config.blocks), "width": config.num_features}
    row |= {"depth": config.depth, "width": config.width, "tokens": config.num_tokens}
    return row | ({"heads": config.heads} if isinstance(config, VitConfig) else {})


@dataclass(frozen=True, kw_only=True)
class Recipes(Command):
    """List the recipes for `vitrail train` and `vitrail finetune`."""

    like: str = ""
    """Only names that contain this text, ignoring case."""
    json: Json = False

    def run(self) -> int:
        summaries = {
            name: summary(name) for name in recipe_names() if self.like.lower() in name.lower()
        }
        if self.json:
            print_json(summaries)
        elif not summaries:
            print(f"no name contains {self.like!r}; `vitrail recipes` lists all")
        else:
            for name, text in summaries.items():
                print(name, indent("\n".join(wrap(text, WIDTH - 4)), "    "), sep="\n")
            print("\nUse one with: vitrail train DATA --recipe NAME")
            print("Show its settings with: vitrail train --recipe NAME --print-settings")
        return 0 if summaries else UNMET
