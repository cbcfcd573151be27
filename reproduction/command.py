"""What `vitrail reproduce` does; its options are in `vitrail/cli/reproduce.py`."""

import json
import sys
from typing import Any

from reproduction import paper_scale, tables
from reproduction.jobs import Datasets
from reproduction.report import Report, heading, numeric_columns, to_dict, write_docs
from reproduction.results import Results
from reproduction.runner import Runner
from vitrail.cli.console import (
    VERBOSITY,
    WIDTH,
    clock,
    log,
    log_stderr,
    paragraph,
    printable,
    table,
)
from vitrail.cli.reproduce import ALL, NAMES, Reproduce
from vitrail.errors import ConfigError
from vitrail.formatting import percent


def run(options: Reproduce) -> None:
    names = NAMES if options.name == ALL else (options.name,)
    if options.weights:
        weights = dict(pair(word, "weights ViT-H/14=model.npz") for word in options.weights)
        data = dict(pair(word, "data CIFAR-10=cifar/") for word in options.data)
        measurements = tables.measure_weights(weights, data, options.name)
        make_report = getattr(tables, options.name)
        show(make_report(Results(options.name, Datasets("")), measurements), as_json=options.json)
        return
    if options.scale == "full":
        for name in names:
            show(paper_scale.full_report(name), as_json=options.json)
        return
    if len(options.data) != 1:
        raise ConfigError(f"--data {' '.join(options.data)}: give one pre-training dataset")

    def on_result(name: str, result: Any) -> None:
        text = f"few-shot {percent(result.fewshot)}"
        if result.accuracy is not None:
            text = f"test {percent(result.accuracy)}, {text}"
        line = f"  {printable(name)}: {text}, {result.seconds:.0f} s"
        (log_stderr if options.json else log)(line)

    runner = Runner(options.out, options.workers, on_result=on_result, on_progress=ProgressLine())
    reports = []
    for name in names:
        reports.append(runner.run(name, Datasets(options.data[0], options.target, options.probe)))
        show(reports[-1], as_json=options.json)
        if not options.json:
            print(f"\nwrote {options.out / name / 'report.md'}")
    if options.docs is not None:
        page = write_docs(reports, options.docs)
        print(f"wrote {page}", file=sys.stderr if options.json else sys.stdout)


def show(report: Report, *, as_json: bool) -> None:
    if as_json:
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
