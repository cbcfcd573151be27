"""`vitrail recipes`: the built-in training recipes."""

import json
from dataclasses import dataclass
from textwrap import indent, wrap

from vitrail.cli.console import WIDTH
from vitrail.cli.options import UNMET, Json
from vitrail.training.recipes import recipe_names, summary


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the recipes for `vitrail train` and `vitrail finetune`."""

    like: str = ""
    """Only names that contain this text, ignoring case."""
    json: Json = False

    def run(self) -> int:
        summaries = {
            name: summary(name) for name in recipe_names() if self.like.lower() in name.lower()
        }
        if self.json:
            print(json.dumps(summaries, indent=1))
        elif not summaries:
            print(f"no name contains {self.like!r}; `vitrail recipes` lists all")
        else:
            for name, text in summaries.items():
                print(name, indent("\n".join(wrap(text, WIDTH - 4)), "    "), sep="\n")
            print("\nUse one with: vitrail train DATA --recipe NAME")
            print("Show its settings with: vitrail train --recipe NAME --print-settings")
        return 0 if summaries else UNMET
