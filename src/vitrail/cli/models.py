"""`vitrail models`: the named architectures and their sizes."""

import json
from dataclasses import dataclass
from typing import Any

from vitrail.cli.console import table
from vitrail.cli.options import UNMET
from vitrail.models.config import BitConfig, Config, VitConfig
from vitrail.models.registry import CONFIGURATIONS

COLUMNS = ("name", "parameters", "image_size", "tokens", "depth", "width", "heads")


@dataclass(frozen=True, kw_only=True)
class Models:
    """List the named architectures."""

    like: str = ""
    """Only names that contain this text, ignoring case."""
    json: bool = False
    """Print one JSON list instead of a table."""

    def run(self) -> int:
        rows = [
            describe(name, config)
            for name, config in CONFIGURATIONS.items()
            if self.like.lower() in name.lower()
        ]
        if self.json:
            print(json.dumps(rows, indent=1))
        elif rows:
            cells = [[cell(row.get(column)) for column in COLUMNS] for row in rows]
            head = [column.replace("_", " ") for column in COLUMNS]
            print(*table(cells, "lrrrrrr", head), sep="\n")
            print("\nParameters include a head of 1000 classes, at the image size shown.")
            print('In Python: vitrail.create("ViT-B/16", num_classes=10)')
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


def cell(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
