"""`vitrail reproduce`: the paper's tables and figures, here and now."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitrail.cli.arguments import DataOptions
from vitrail.cli.live import clock
from vitrail.cli.text import MANNER, WIDTH, aside, printable, tell
from vitrail.errors import ConfigError, unknown
from vitrail.formatting import percent
from vitrail.reproduction.names import ALL, NAMES

if TYPE_CHECKING:
    from vitrail.reproduction.cells import Cell, Result
    from vitrail.reproduction.report import Report

BUILTIN = "builtin:sign-digits"


@dataclass(frozen=True, kw_only=True)
class Reproduce(DataOptions):
    """Repeat an experiment of the paper at the scale of a laptop, or check it at its own.

    table1, table2, table5, table6: published numbers, and what can be checked of them. figure3,
    figure4, figure5, figure8, heads, table8, transfer, selfsupervised: many small runs, at most a
    quarter of an hour each. figure6, figure7, figure10, figure11: a look into models so trained.
    all: everything, one after the other. What is stopped goes on when asked again.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """table1, figure3, heads, ... or all."""
    scale: Literal["laptop", "full"] = "laptop"
    """full: the paper's own runs, built without memory; with what they need and their commands."""
    data: tuple[str, ...] = (BUILTIN,)
    """What is pre-trained on, such as a .npz of Fashion-MNIST. With --weights: NAME=DATA, such as
    CIFAR-10=cifar/."""
    target: str = ""
    """What that is carried over to: figure3, transfer, selfsupervised. Without it, models learn
    every other class of the data and are carried over to the other half."""
    weights: tuple[str, ...] = ()
    """table2, table5: NAME=MODEL, such as ViT-H/14=model.npz, to be judged on --data."""
    out: Path = Path("runs/reproduction")
    """The folder of reports and of the runs behind them; what it holds is not run again."""
    docs: Path | None = None
    """Write the reports that the folder holds as one page, reproduction.md, into this folder."""
    workers: int | None = None
    """Runs at the same time, each on its share of the cores: one for each core if not given."""
    json: bool = False
    """Print one JSON object for each experiment; progress goes to standard error."""

    def run(self) -> None:
        if self.name not in (*NAMES, ALL):
            raise unknown("experiment", self.name, (*NAMES, ALL))
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers} runs nothing; give 1 or more")
        if self.weights and self.scale == "full":
            raise ConfigError("--weights are judged as they are; leave --scale out")
        if self.docs is not None and (self.weights or self.scale == "full"):
            raise ConfigError("--docs makes a page of what was run here; leave it out")
        if self.weights and self.data == (BUILTIN,):
            raise ConfigError("--weights need pictures; give --data NAME=DATA: CIFAR-10=cifar/")
        from vitrail.data.loader import available_cores
        from vitrail.reproduction import catalog

        if self.weights:
            weights = dict(pair(word, "weights ViT-H/14=model.npz") for word in self.weights)
            data = dict(pair(word, "data CIFAR-10=cifar/") for word in self.data)
            self.show(catalog.with_weights(self.name, weights, data))
            return
        if self.scale == "full":
            for name in catalog.names_of(self.name):
                self.show(catalog.full_scale(name))
            return
        lab = catalog.Lab(
            sets=catalog.Sets(only(self.data), self.target),
            folder=self.out,
            workers=self.workers or available_cores(),
            tell=self.tell,
            progress=Left(),
        )
        for name in catalog.names_of(self.name):
            report = lab.carry_out(name)
            self.show(report)
            if not self.json:
                print(f"\ndone: {self.out / name / 'report.md'}")
        if self.docs is not None:
            written = catalog.write_docs(lab.written(), self.docs)
            print(f"done: {written}", file=sys.stderr if self.json else sys.stdout)

    def show(self, report: "Report") -> None:
        from vitrail.reproduction.page import plain, words

        if self.json:
            values = {key: value for key, value in vars(report).items() if key != "pictures"}
            print(json.dumps(plain(values | {"tables": [vars(t) for t in report.tables]})))
            return
        for line in words(report, WIDTH):
            print(line)

    def tell(self, name: str, cell: "Cell", result: "Result") -> None:
        found = f"5-shot {percent(result.fewshot)}"
        if result.accuracy is not None:
            found = f"test {percent(result.accuracy)}, {found}"
        line = f"  {printable(name)}: {found}, {result.seconds:.0f} s"
        (aside if self.json else tell)(line)


class Left:
    """How many runs are done and how long the others take: one line that changes on a terminal."""

    def __init__(self) -> None:
        self.told: Any = None

    def __call__(self, done: int, total: int, seconds: float) -> None:
        if MANNER.quiet:
            return
        line = f"{done} of {total} runs done"
        if done < total:
            line += f", about {clock(seconds)} left"
        if sys.stderr.isatty():
            print(f"\r{line:<{WIDTH - 1}}\r", end="", file=sys.stderr, flush=True)
        elif (done, total) != self.told:
            self.told = (done, total)
            print(line, file=sys.stderr, flush=True)


def only(data: tuple[str, ...]) -> str:
    if len(data) != 1:
        raise ConfigError(f"--data {' '.join(data)}: one set is pre-trained on; give one")
    return data[0]


def pair(word: str, example: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"{word} is no NAME=VALUE, such as --{example}")
    return name, value
