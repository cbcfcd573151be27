"""`vitrail recipes`: the training recipes that come along."""

import json
from dataclasses import dataclass
from textwrap import wrap

from vitrail.cli.status import UNMET
from vitrail.training.recipes import recipe_names, summary

INDENT = "    "


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the recipes that `train` and `finetune` can begin with."""

    like: str = ""
    """Only names that contain this; case does not matter."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def run(self) -> int:
        found = {
            name: summary(name) for name in recipe_names() if self.like.lower() in name.lower()
        }
        if self.json:
            print(json.dumps(found, indent=1))
        elif not found:
            print(f"no name contains {self.like!r}; `vitrail recipes` lists all")
        else:
            for name, words in found.items():
                print(
                    name,
                    *wrap(words, 80, initial_indent=INDENT, subsequent_indent=INDENT),
                    sep="\n",
                )
            print("\nvitrail train DATA --recipe NAME; --print-settings shows what is in one")
        return 0 if found else UNMET
