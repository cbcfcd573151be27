"""`vitrail models`: every name, and how large what it stands for is."""

import json
from dataclasses import dataclass
from typing import Any

from vitrail.cli.status import UNMET
from vitrail.models.config import BitConfig, Config, VitConfig
from vitrail.models.registry import CONFIGURATIONS


@dataclass(frozen=True, kw_only=True)
class Models:
    """List the models that have a name."""

    like: str = ""
    """Only names that contain this; case does not matter."""
    json: bool = False
    """Print one JSON list instead of a table."""

    def run(self) -> int:
        found = {
            name: config
            for name, config in CONFIGURATIONS.items()
            if self.like.lower() in name.lower()
        }
        rows = [row(name, config) for name, config in found.items()]
        if self.json:
            print(json.dumps(rows, indent=1))
        elif rows:
            print_table(rows)
        else:
            print(f"no name contains {self.like!r}; `vitrail models` lists all")
        return 0 if rows else UNMET


def row(name: str, config: Config) -> dict[str, Any]:
    from vitrail.models.vit import build

    size = config.image_size
    facts: dict[str, Any] = {
        "name": name,
        "parameters": sum(p.numel() for p in build(config).parameters()),
        "image_size": size,
    }
    if isinstance(config, BitConfig):
        return facts | {"depth": sum(config.blocks), "width": config.num_features}
    facts |= {"depth": config.depth, "width": config.width, "tokens": config.num_tokens}
    return facts | ({"heads": config.heads} if isinstance(config, VitConfig) else {})


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = ("name", "parameters", "image_size", "tokens", "depth", "width", "heads")
    cells = [[column.replace("_", " ") for column in columns]]
    cells += [[cell(facts.get(column)) for column in columns] for facts in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *numbers in cells:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        print("   ".join([name.ljust(widths[0]), *aligned]).rstrip())
    print('\nIn Python: vitrail.create("ViT-B/16", num_classes=10)')
    print("Parameters are counted with a head of 1000 classes, at the image size shown.")


def cell(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
