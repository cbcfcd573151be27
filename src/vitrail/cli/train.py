"""`vitrail train` and `vitrail finetune`: pictures → a bundle."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import tyro

from vitrail.cli.arguments import DataOptions, DataReference
from vitrail.cli.status import STOPPED
from vitrail.cli.text import MANNER, accuracy_line
from vitrail.data.storage import same_location
from vitrail.errors import ConfigError
from vitrail.formatting import duration
from vitrail.training.config import RunConfig, Settings
from vitrail.training.recipes import (
    ALTERNATIVES,
    check_same_run,
    drop_alternatives,
    is_run,
    new_run_folder,
    read_recipe,
    read_run,
    to_toml,
)

if TYPE_CHECKING:
    from vitrail.training.trainer import Result

BEGUN = time.monotonic()  # a time budget includes the time that importing takes


@dataclass(frozen=True, kw_only=True)
class Training(DataOptions):
    """What both commands take."""

    data: DataReference = ""
    """A folder of class folders, a list, .tar or .npz files, builtin:sign-digits or another."""
    out: Path | None = None
    """The run's folder; without it, a new one in runs/."""
    recipe: str = ""
    """Settings to begin with: one that `vitrail recipes` lists, or a .toml file."""
    overwrite: bool = False
    """Replace the run that --out holds."""
    resume: bool = False
    """Go on with the run in --out that was stopped."""
    print_settings: bool = False
    """Print the settings as a recipe, and train nothing."""
    json: bool = False
    """Print one JSON object when done; progress goes to standard error."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)

    @classmethod
    def beginning(cls, argv: Sequence[str]) -> Self:
        """What the options change: defaults, a recipe, or the run that is to be resumed."""
        recipe, out = option(argv, "--recipe"), option(argv, "--out")
        if "--resume" in argv and out is not None and is_run(Path(out)):
            settings, data, start = read_run(Path(out))
            return cls(settings=settings, data=data, **cls.beginning_with(start))
        settings = read_recipe(recipe) if recipe else Settings()
        words = {word.partition("=")[0].replace("_", "-") for word in argv}
        either = [name for pair in ALTERNATIVES for name in pair]
        given = [name for name in either if f"--{name}".replace("_", "-") in words]
        return cls(settings=drop_alternatives(settings, given))  # options overrule the recipe

    @classmethod
    def beginning_with(cls, start: str) -> dict[str, Any]:
        return {}

    def run(self) -> int:
        if self.print_settings:
            print(to_toml(self.settings), end="")
            return 0
        if self.resume:
            self.check_resume()
        if not self.data:
            raise ConfigError(
                "which pictures? Give a folder of class folders, or builtin:sign-digits"
            )
        config = self.run_config()
        from vitrail.training.memory import configure_malloc

        if self.settings.machine.parts != 1:
            configure_malloc()
        return 0 if self.go(config) else STOPPED

    def go(self, config: RunConfig) -> bool:
        """Train and tell; whether it came to its end."""
        from vitrail.cli.live import Live
        from vitrail.training.trainer import run

        with Live(aside=self.json) as live:
            result = run(config, live, started=BEGUN)
        self.tell(result)
        return result.finished

    def run_config(self) -> RunConfig:
        if self.out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("several processes must know the run's folder; give --out")
        return RunConfig(
            data=self.data,
            out=self.out or new_run_folder(self.data),
            settings=self.settings,
            start=self.start,
            resume=self.resume,
            overwrite=self.overwrite,
        )

    @property
    def start(self) -> str:
        return ""

    def check_resume(self) -> None:
        """Options may change how a run goes on, but not what it is."""
        if self.out is None:
            raise ConfigError("which run? --resume needs --out with the run's folder")
        before, data, start = read_run(self.out)
        if not same_location(data, self.data):
            raise ConfigError(
                f"{self.out} was trained on {data}, not {self.data}; leave the data out to resume"
            )
        if start != self.start:
            verb = "finetune" if start else "train"
            raise ConfigError(f"{self.out} is a run of `vitrail {verb}`; resume it with that")
        check_same_run(before, self.settings)

    def tell(self, result: "Result") -> None:
        if self.json:
            print(json.dumps(as_json(result), indent=1))
            return
        for line in words(result, self):
            print(line)


@dataclass(frozen=True, kw_only=True)
class Train(Training):
    """Train a model from scratch; with no options, everything is chosen from the data."""


@dataclass(frozen=True, kw_only=True)
class Finetune(Training):
    """Fit a trained model to your pictures: any bundle, file, or hub address."""

    origin: Annotated[str, tyro.conf.arg(name="from")] = ""
    """The model to begin with: a bundle, a file of weights, or hf:owner/name."""
    ladder: bool = False
    """Try a probe, a linear head, attention-only and full fine-tuning, with several learning rates,
    on pictures kept apart; the best is the result. Stopped before its last run, it starts over."""

    @classmethod
    def beginning_with(cls, start: str) -> dict[str, Any]:
        return {"origin": start}

    def run(self) -> int:
        if self.ladder and self.resume:
            raise ConfigError("--ladder begins anew and --resume goes on; leave one of them out")
        return super().run()

    def go(self, config: RunConfig) -> bool:
        if not self.ladder:
            return super().go(config)
        from vitrail.cli.ladder import run_ladder

        rate = self.settings.optim.learning_rate
        if self.recipe and rate == read_recipe(self.recipe).optim.learning_rate:
            rate = None  # nobody asked for this one alone
        return run_ladder(config, rate=rate, started=BEGUN, as_json=self.json)

    @property
    def start(self) -> str:
        if not self.origin:
            raise ConfigError(
                "fine-tune which model? Give --from with a bundle, a file of weights, or "
                "hf:owner/name; `vitrail train` begins with fresh weights"
            )
        return self.origin


def option(argv: Sequence[str], name: str) -> str | None:
    """The value of an option, before all of them are parsed."""
    for place, word in enumerate(argv):
        if word == name and place + 1 < len(argv):
            return argv[place + 1]
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return None


def as_json(result: "Result") -> dict[str, Any]:
    return {
        "folder": str(result.folder),
        "finished": result.finished,
        "step": result.step,
        "seconds": round(result.seconds, 1),
        "results": {split: outcome.to_dict() for split, outcome in result.outcomes.items()},
    }


def words(result: "Result", command: Training) -> list[str]:
    """What became of it, and what to type next."""
    if not result.finished:
        verb = "finetune" if command.start else "train"
        return [
            f"stopped after step {result.step:,}; nothing is lost. To go on:",
            f"  vitrail {verb} --resume --out {result.folder}",
        ]
    lines = [accuracy_line(split, outcome) for split, outcome in result.outcomes.items()]
    lines.append(f"done in {duration(result.seconds)}: {result.folder}")
    if MANNER.quiet:
        return lines
    return [
        *lines,
        "",
        "Next:",
        f"  open {result.folder / 'report.html'} in a browser: curves, mistakes, settings",
        f"  vitrail evaluate {result.folder} {command.data}    how sure it may be of itself",
        f"  vitrail inspect {result.folder}    what it looks at",
        f'  vitrail.load("{result.folder}") in Python',
    ]
