"""A training run as one page: how good the model is, how it got there, and where it goes wrong.

    write_report(folder / "report.html", report)

The page asks nothing of the network and runs no script: pictures, charts and style are inside it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from vitrail.data.files import write_whole
from vitrail.data.samples import Source
from vitrail.evaluation.bootstrap import wilson
from vitrail.evaluation.charts import Point, Series, line_chart
from vitrail.evaluation.matrix import Bar, bar_list, mixed_up
from vitrail.evaluation.outcome import MOST_MISTAKES, Outcome
from vitrail.evaluation.parts import (
    following,
    likely,
    mistake_figures,
    prose,
    share,
    tile,
    tiles_and_facts,
    unreadable,
    whole_page,
)
from vitrail.formatting import duration

HEADLINES = ("time", "parameters")  # facts that are shown as large as the accuracy
LOG_FROM = 30  # ratio of the largest loss to the smallest from which on its scale is logarithmic


@dataclass(frozen=True, kw_only=True)
class Report:
    """What there is to tell about a run."""

    title: str
    facts: Mapping[str, str]  # model, parameters, data, time, …
    rows: Sequence[Mapping[str, Any]]  # the lines of metrics.jsonl
    choices: Sequence[str] = ()  # what was chosen automatically, and why
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)  # split → how good it is
    sources: Mapping[str, Source] = field(default_factory=dict)  # for the mistakes' pictures
    class_names: Sequence[str] = ()
    settings_toml: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds by part of the run
    skipped: Mapping[str, str] = field(default_factory=dict)  # unreadable files, and why
    next_steps: Sequence[str] = ()  # commands, or sentences with `commands` in them


def write_report(path: Path, report: Report) -> None:
    """Write the page whole, or leave what was there."""
    write_whole(path, page(report))


def page(report: Report) -> str:
    """The page as text; nothing in it points outside."""
    body = [headline(report), curves(report.rows)]
    for split, outcome in report.outcomes.items():
        body += details(report, split, outcome)
    body += [chosen(report.choices), unreadable(bad_files(report)), times(report.timings)]
    body += [following(report.next_steps), settings(report.settings_toml)]
    return whole_page(report.title, report.facts, body)


def headline(report: Report) -> str:
    """What everybody wants to know first, in large type, and the other facts below."""
    tiles = [accuracy_tile(split, outcome) for split, outcome in report.outcomes.items()]
    large = [name for name in HEADLINES if name in report.facts]
    tiles += [tile(name, escape(report.facts[name])) for name in large]
    others = {name: value for name, value in report.facts.items() if name not in large}
    return tiles_and_facts(tiles, others)


def accuracy_tile(split: str, outcome: Outcome) -> str:
    right = round(outcome.accuracy * outcome.samples)
    below = likely(*wilson(right, outcome.samples))
    below += f"<span>{right:,} of {outcome.samples:,} right</span>"
    below += "" if outcome.top5 is None else f"<span>top 5: {share(outcome.top5)}</span>"
    return tile(f"{split} accuracy", share(outcome.accuracy), below, first=True)


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Loss, accuracy, learning rate and speed over the run."""
    loss = [Series("train", points(rows, "loss"), noisy=True), *of_splits(rows, "loss")]
    low, high = extremes(loss)
    rate = [Series("learning rate", points(rows, "learning_rate"))]
    speed = [Series("images per second", points(rows, "images_per_second"), noisy=True)]
    accuracy = [Series("", ()), *of_splits(rows, "accuracy")]  # colors as in the losses
    drawn = {
        "Loss": line_chart(loss, label="loss", log=low > 0 and high > LOG_FROM * low),
        "Accuracy": line_chart(accuracy, label="accuracy", percent=True),
        "Learning rate": line_chart(rate, label="learning rate"),
        "Images per second": line_chart(speed, label="images per second"),
    }
    panels = [f"<div><h3>{name}</h3>{chart}</div>" for name, chart in drawn.items() if chart]
    return f'<h2>The run</h2><div class="panels">{"".join(panels)}</div>' if panels else ""


def of_splits(rows: Sequence[Mapping[str, Any]], metric: str) -> list[Series]:
    names = dict.fromkeys(key for row in rows for key in row if key.endswith(f"/{metric}"))
    return [Series(name.rpartition("/")[0], points(rows, name)) for name in names]


def points(rows: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Where the rows have the key; of steps that were taken twice, as after a retry, the later."""
    found: list[Point] = []
    for row in rows:
        if key in row:
            while found and found[-1][0] >= row["step"]:
                found.pop()
            value = row[key]
            found.append((row["step"], math.nan if value is None else float(value)))
    return found


def extremes(series: Sequence[Series]) -> tuple[float, float]:
    values = [y for line in series for _, y in line.points if math.isfinite(y)]
    return (min(values), max(values)) if values else (0.0, 0.0)


def details(report: Report, split: str, outcome: Outcome) -> Iterator[str]:
    """Which classes are mixed up, which are missed, and the worst mistakes."""
    if outcome.confusion is not None:
        yield f"<h2>Which classes are mixed up: {escape(split)}</h2>"
        yield mixed_up(outcome.confusion, report.class_names)
    if outcome.mistakes and split in report.sources:
        most = MOST_MISTAKES // len(report.outcomes)  # so many on the page
        worst = outcome.mistakes[: max(most, 6)]
        yield f"<h2>Most confident mistakes: {escape(split)}</h2>"
        yield mistake_figures(worst, report.sources[split], report.class_names)


def chosen(choices: Sequence[str]) -> str:
    """`what: why`, one line each."""
    lines = []
    for choice in choices:
        what, colon, why = choice.partition(": ")
        lines.append(f"<li><b>{prose(what)}</b>: {prose(why)}" if colon else f"<li>{prose(what)}")
    listed = f'<ul class="choices">{"".join(lines)}</ul>'
    return f"<h2>What was chosen, and why</h2>{listed}" if lines else ""


def bad_files(report: Report) -> dict[str, str]:
    """Those that could not be read in training or in an evaluation, and why."""
    bad = dict(report.skipped)
    for outcome in report.outcomes.values():
        bad |= outcome.skipped
    return bad


def times(timings: Mapping[str, float]) -> str:
    whole = sum(timings.values())
    if not whole > 0:
        return ""
    bars = [Bar(name, took / whole, duration(took)) for name, took in timings.items()]
    return f'<h2>Where the time went</h2><div class="narrow">{bar_list(bars, "time")}</div>'


def settings(toml: str) -> str:
    if not toml.strip():
        return ""
    return (
        "<h2>Settings</h2><details><summary>All settings of this run</summary>"
        f'<pre tabindex="0"><code>{escape(toml.strip())}</code></pre></details>'
    )
