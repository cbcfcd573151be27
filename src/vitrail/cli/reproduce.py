"""`vitrail reproduce`: the experiments in the `reproduction/` folder of a checkout."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import vitrail
from vitrail.cli import console
from vitrail.cli.console import VERBOSITY, WIDTH, clock, paragraph, printable, table
from vitrail.cli.options import DataOptions
from vitrail.errors import ConfigError, unknown
from vitrail.formatting import percent

BUILTIN = "builtin:sign-digits"
ALL = "all"
NAMES = (  # in the order of the paper
    *("table1", "table2", "figure3", "figure4", "figure5", "table5", "table6", "figure6"),
    *("figure7", "transfer", "selfsupervised", "figure8", "heads", "table8", "figure10"),
    "figure11",
)
PROBED = ("figure3", "figure5", "figure8", "heads", "figure11")
CHECKOUT = Path(vitrail.__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Reproduce(DataOptions):
    """Reproduce an experiment of the paper at laptop scale, or check it at the paper's scale.

    table1, table2, table5, table6: published numbers, compared with computed ones. figure3,
    figure4, figure5, figure8, heads, table8, transfer, selfsupervised: many small training runs, at
    most 15 minutes each. figure6, figure7, figure10, figure11: inspection of such models. all:
    everything in turn. Interrupted experiments resume. Needs a checkout of the repository.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """table1, figure3, heads, ... or all."""
    scale: Literal["laptop", "full"] = "laptop"
    """full: build the paper's own models on the meta device; print their cost and commands."""
    data: tuple[str, ...] = (BUILTIN,)
    """Pre-training dataset, such as a .npz of Fashion-MNIST. With --weights: NAME=DATA, such as
    CIFAR-10=cifar/."""
    target: str = ""
    """Target dataset of figure3, transfer and selfsupervised. Without it, models are pre-trained on
    every other class of the data and transferred to the remaining classes."""
    probe: tuple[str, ...] = ()
    """figure3, figure5, figure8, heads, figure11: compare models by closed-form probes on these
    datasets, such as flowers5_160.tar, in place of the data's own test images."""
    weights: tuple[str, ...] = ()
    """table2, table5: NAME=MODEL, such as ViT-H/14=model.npz, to be evaluated on --data."""
    out: Path = Path("runs/reproduction")
    """Folder of the reports and of their training runs; finished runs are reused."""
    docs: Path | None = None
    """Write the reports as sections of README.md in this folder; other sections are kept."""
    workers: int | None = None
    """Parallel training runs, which share the cores. Default: one per core."""
    json: bool = False
    """Print one JSON object per experiment; progress goes to standard error."""

    def run(self) -> None:
        if self.name not in (*NAMES, ALL):
            raise unknown("experiment", self.name, (*NAMES, ALL))
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be 1 or more")
        if self.weights and self.scale == "full":
            raise ConfigError("--weights cannot be combined with --scale full")
        if self.docs is not None and (self.weights or self.scale == "full"):
            raise ConfigError("--docs cannot be combined with --weights or --scale full")
        if self.weights and self.data == (BUILTIN,):
            raise ConfigError("--weights needs --data NAME=DATA, such as CIFAR-10=cifar/")
        if self.weights and self.name not in ("table2", "table5"):
            raise ConfigError(f"--weights works with table2 and table5, not with {self.name}")
        if not (CHECKOUT / "reproduction" / "__init__.py").exists():
            raise ConfigError(
                "the experiments are not part of the installed package; run `vitrail reproduce` "
                "from a checkout (pip install -e .), which has them in its reproduction/ folder"
            )
        if str(CHECKOUT) not in sys.path:
            sys.path.append(str(CHECKOUT))
        from reproduction import paper_scale, tables
        from reproduction.jobs import Datasets
        from reproduction.report import write_docs
        from reproduction.results import Results
        from reproduction.runner import Runner

        names = NAMES if self.name == ALL else (self.name,)
        if self.probe and not {*names} <= {*PROBED}:
            raise ConfigError(f"--probe works with {', '.join(PROBED)}, not with {self.name}")
        if self.weights:
            weights = dict(pair(word, "weights ViT-H/14=model.npz") for word in self.weights)
            data = dict(pair(word, "data CIFAR-10=cifar/") for word in self.data)
            measurements = tables.measure_weights(weights, data, self.name)
            make_report = getattr(tables, self.name)
            self.show(make_report(Results(self.name, Datasets("")), measurements))
            return
        if self.scale == "full":
            for name in names:
                self.show(paper_scale.full_report(name))
            return
        if len(self.data) != 1:
            raise ConfigError(f"--data {' '.join(self.data)}: give one pre-training dataset")
        runner = Runner(
            self.out, self.workers, on_result=self.on_result, on_progress=ProgressLine()
        )
        reports = []
        for name in names:
            reports.append(runner.run(name, Datasets(self.data[0], self.target, self.probe)))
            self.show(reports[-1])
            if not self.json:
                print(f"\nwrote {self.out / name / 'report.md'}")
        if self.docs is not None:
            page = write_docs(reports, self.docs)
            print(f"wrote {page}", file=sys.stderr if self.json else sys.stdout)

    def show(self, report: Any) -> None:
        from reproduction.report import heading, numeric_columns, to_dict

        if self.json:
            print(json.dumps(to_dict(report)))
            return
        for block in (heading(report), f"Paper: {report.claim}", f"Method: {report.method}"):
            print(*paragraph(block), sep="\n")
        for content in report.tables:
            print("", *paragraph(content.caption), "", sep="\n")
            right = numeric_columns(content.rows, len(content.head))
            align = "".join("r" if is_number else "w" for is_number in right)
            print(*table(content.rows, align, content.head), sep="\n")
        print("", *paragraph(f"Result: {report.result}"), sep="\n")
        print(f"Verdict: {report.verdict}")

    def on_result(self, name: str, result: Any) -> None:
        text = f"few-shot {percent(result.fewshot)}"
        if result.accuracy is not None:
            text = f"test {percent(result.accuracy)}, {text}"
        line = f"  {printable(name)}: {text}, {result.seconds:.0f} s"
        (console.log_stderr if self.json else console.log)(line)


class ProgressLine:
    """Finished runs and the remaining time: one line, which is updated on a terminal."""

    last: tuple[int, int] | None = None  # runs done and all runs, as last printed

    def __call__(self, done: int, total: int, seconds: float) -> None:
        if VERBOSITY.quiet:
            return
        line = f"{done} of {total} runs finished"
        if done < total:
            line += f", about {clock(seconds)} left"
        if sys.stderr.isatty():
            print(f"\r{line:<{WIDTH - 1}}\r", end="", file=sys.stderr, flush=True)
        elif (done, total) != self.last:
            self.last = (done, total)
            print(line, file=sys.stderr, flush=True)


def pair(word: str, example: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"{word} is not NAME=VALUE, such as --{example}")
    return name, value
