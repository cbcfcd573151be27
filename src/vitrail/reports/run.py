"""The report of a training run as one page: results, curves, mistakes, settings.

write_report(folder / "report.html", report)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.data.datasets import Dataset
from vitrail.data.storage import write_atomic
from vitrail.evaluation.metrics import wilson_interval
from vitrail.evaluation.results import MAX_MISTAKES, EvaluationResult
from vitrail.formatting import duration, percent
from vitrail.reports.evaluation import confusion_section, mistake_figures
from vitrail.reports.figures import Points, inline_svg, line_chart
from vitrail.reports.html import NBSP, interval, render

HEADLINES = ("time", "parameters")  # facts shown as large as the accuracy
LOG_RATIO = 30  # largest loss to smallest from which on the axis is logarithmic


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything shown on the page of a run."""

    title: str
    facts: Mapping[str, str]  # model, parameters, data, time, …
    rows: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    choices: Sequence[str] = ()  # automatic settings, "what: reason"
    outcomes: Mapping[str, EvaluationResult] = field(default_factory=dict)  # by split
    sources: Mapping[str, Dataset] = field(default_factory=dict)  # for the images of mistakes
    class_names: Sequence[str] = ()
    settings_toml: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds by phase
    skipped: Mapping[str, str] = field(default_factory=dict)  # unreadable files, and why
    next_steps: Sequence[str] = ()  # commands, or sentences with `commands`


def write_report(path: Path, report: Report) -> None:
    """Write the page whole, or leave the old one."""
    write_atomic(path, page(report))


def page(report: Report) -> str:
    headlines = [name for name in HEADLINES if name in report.facts]
    skipped = dict(report.skipped)
    for result in report.outcomes.values():
        skipped |= result.skipped
    total = sum(report.timings.values())
    return render(
        "run.html",
        report.title,
        report.facts,
        tiles=[
            *(accuracy_tile(split, result) for split, result in report.outcomes.items()),
            *(
                {"name": n, "value": report.facts[n], "lines": [], "first": False}
                for n in headlines
            ),
        ],
        other_facts={k: v for k, v in report.facts.items() if k not in headlines},
        curves=dict(curves(report.rows)),
        splits=list(splits(report)),
        choices=[choice.partition(": ")[::2] for choice in report.choices],
        skipped=skipped,
        timings=[
            {"name": name, "share": seconds / total, "text": duration(seconds), "low": False}
            for name, seconds in report.timings.items()
            if total > 0
        ],
        next_steps=report.next_steps,
        settings=report.settings_toml.strip(),
    )


def accuracy_tile(split: str, result: EvaluationResult) -> dict[str, Any]:
    correct = round(result.accuracy * result.samples)
    lines = [f"95 % CI {interval(*wilson_interval(correct, result.samples))}"]
    lines += [f"{correct:,} of {result.samples:,} correct"]
    lines += [] if result.top5 is None else [f"top-5: {percent(result.top5)}"]
    return {
        "name": f"{split} accuracy",
        "value": percent(result.accuracy).replace(" ", NBSP),
        "lines": [line.replace(" %", f"{NBSP}%") for line in lines],
        "first": True,
    }


def curves(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Charts of loss, accuracy, learning rate and throughput by step."""
    loss = {"train": points(rows, "loss"), **by_split(rows, "loss")}
    values = [y for line in loss.values() for _, y in line if math.isfinite(y)] or [0.0]
    log = min(values) > 0 and max(values) > LOG_RATIO * min(values)
    accuracy = {"train": [], **by_split(rows, "accuracy")}  # colors as in the loss
    rate = {"learning rate": points(rows, "learning_rate")}
    speed = {"images per second": points(rows, "images_per_second")}
    charts = {
        "Loss": line_chart(loss, label="loss", noisy=["train"], log=log),
        "Accuracy": line_chart(accuracy, label="accuracy", percentages=True),
        "Learning rate": line_chart(rate, label="learning rate"),
        "Images per second": line_chart(speed, label="images per second", noisy=speed),
    }
    for name, figure in charts.items():
        if figure is not None:
            yield name, inline_svg(figure)


def by_split(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Points]:
    names = dict.fromkeys(key for row in rows for key in row if key.endswith(f"/{metric}"))
    return {name.rpartition("/")[0]: points(rows, name) for name in names}


def points(rows: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Values by step; a step that was repeated, as after a rollback, counts once."""
    series: list[tuple[float, float]] = []
    for row in rows:
        if key in row:
            while series and series[-1][0] >= row["step"]:
                series.pop()
            value = row[key]
            series.append((row["step"], math.nan if value is None else float(value)))
    return series


def splits(report: Report) -> Iterator[dict[str, Any]]:
    """Confusion matrix and mistakes of each split."""
    most = max(MAX_MISTAKES // max(1, len(report.outcomes)), 6)
    for name, result in report.outcomes.items():
        source, mistakes = report.sources.get(name), []
        if source is not None:
            mistakes = mistake_figures(result.mistakes[:most], source, report.class_names)
        confusion = confusion_section(result.confusion, report.class_names)
        yield {"name": name, "confusion": confusion, "mistakes": mistakes}
