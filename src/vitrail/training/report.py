"""A training run as one page: how good the model is, how it got there, and where it goes wrong.

    write_report(folder / "report.html", report)

The page asks nothing of the network and runs no script: pictures, charts and style are inside it.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from vitrail.data.files import whole_or_absent
from vitrail.data.samples import Label, Source
from vitrail.data.sheet import PAGE
from vitrail.data.thumbnails import picture_at
from vitrail.evaluation import charts
from vitrail.evaluation.charts import Point, Series, line_chart
from vitrail.evaluation.matrix import Bar, bar_list, mixed_up
from vitrail.evaluation.outcome import Mistake, Outcome

STYLE = """
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10.5rem), 1fr));
  gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--card); border-radius: 8px; padding: .8rem 1rem .9rem; }
.tile b { display: block; font-size: clamp(1.3rem, 4.5vw, 1.9rem); line-height: 1.25;
  overflow-wrap: normal; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; font-weight: 650; }
.tile.first { border-left: 4px solid var(--accent); }
.tile.first b { color: var(--accent); }
.tile span { display: block; color: var(--soft); font-size: .85rem; line-height: 1.4; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 9.5rem), 1fr));
  gap: .6rem 1.25rem; }
.facts dt { color: var(--soft); font-weight: 400; font-size: .85rem; }
.facts dd { color: var(--ink); margin: 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  gap: 1rem 2rem; align-items: start; }
.panels h3 { margin: .75rem 0 .5rem; }
.narrow { max-width: 27rem; }
.wide + .soft { margin-top: .5rem; }
.pairs { list-style: none; margin: 0; padding: 0; }
.pairs li { display: flex; justify-content: space-between; gap: 1rem; padding: .3rem 0;
  border-bottom: 1px solid var(--line); }
.pairs span { color: var(--soft); white-space: nowrap; font-variant-numeric: tabular-nums; }
.mistakes { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.6rem, 1fr));
  gap: 1.1rem .9rem; }
@media (max-width: 30rem) { .mistakes { grid-template-columns: repeat(3, 1fr); gap: .8rem .6rem; } }
.mistakes figure { width: auto; }
.mistakes img { width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--card);
  border-radius: 6px; }
.mistakes b { color: var(--ink); }
.mistakes i { font-style: normal; color: var(--bad); font-weight: 600; }
.choices { padding-left: 1.2rem; } .choices li { margin: .3rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0; }
pre { background: var(--card); border-radius: 6px; padding: .75rem 1rem; overflow-x: auto;
  overflow-wrap: normal; font-size: .85rem; line-height: 1.5; margin: .5rem 0; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .92em; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 3px; }
"""
HEADLINES = ("time", "parameters")  # facts that are shown as large as the accuracy
MISTAKES = 24  # pictures on the page, over all splits
SIDE = 144  # pixels of their longer side
SHOWN = 30  # unreadable files by name; the rest is counted
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
    text = page(report)
    with whole_or_absent(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))


def page(report: Report) -> str:
    """The page as text; nothing in it points outside."""
    body = [headline(report), curves(report.rows)]
    for split, outcome in report.outcomes.items():
        body += details(report, split, outcome)
    body += [chosen(report.choices), unreadable(report), times(report.timings)]
    body += [following(report.next_steps), settings(report.settings_toml)]
    return PAGE.substitute(
        title=escape(report.title),
        facts=escape(subtitle(report.facts)),
        body="\n".join(filter(None, body)),
        more_style=charts.STYLE + STYLE,
    )


def subtitle(facts: Mapping[str, str]) -> str:
    return " on ".join(facts[name] for name in ("model", "data") if name in facts)


def headline(report: Report) -> str:
    """What everybody wants to know first, in large type, and the other facts below."""
    tiles = [accuracy_tile(split, outcome) for split, outcome in report.outcomes.items()]
    for name in HEADLINES:
        if name in report.facts:
            value = escape(report.facts[name])
            tiles.append(f'<div class="tile"><span>{escape(name)}</span><b>{value}</b></div>')
    others = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in report.facts.items()
        if name not in HEADLINES
    )
    found = f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""
    return f'{found}<dl class="facts">{others}</dl>' if others else found


def accuracy_tile(split: str, outcome: Outcome) -> str:
    right = round(outcome.accuracy * outcome.samples)
    low, high = interval(right, outcome.samples)
    top5 = "" if outcome.top5 is None else f"<span>top 5: {share(outcome.top5)}</span>"
    return (
        f'<div class="tile first"><span>{escape(split)} accuracy</span>'
        f"<b>{share(outcome.accuracy)}</b>"
        f'<span title="95 % interval">likely {100 * low:.1f} to {100 * high:.1f}&nbsp;%</span>'
        f"<span>{right:,} of {outcome.samples:,} right</span>{top5}</div>"
    )


def interval(right: int, samples: int) -> tuple[float, float]:
    """Where the accuracy over endless such pictures lies, 19 times of 20 (Wilson 1927)."""
    z, p = 1.96, right / samples
    middle = p + z * z / (2 * samples)
    half = z * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples**2))
    return tuple((middle + sign * half) / (1 + z * z / samples) for sign in (-1, 1))  # type: ignore


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
        most = MISTAKES // len(report.outcomes)
        figures = "".join(
            mistake_figure(mistake, report.sources[split], report.class_names)
            for mistake in outcome.mistakes[: max(most, 6)]
        )
        yield f"<h2>Most confident mistakes: {escape(split)}</h2>"
        yield f'<div class="mistakes">{figures}</div>'


def mistake_figure(mistake: Mistake, source: Source, names: Sequence[str]) -> str:
    truth, predicted = escape(called(mistake.label, names)), escape(names[mistake.predicted])
    small = picture_at(source, mistake.index, SIDE)
    image = f'<img alt="{truth}, taken for {predicted}" src="{small}">' if small else ""
    sure = "" if math.isnan(mistake.confidence) else f" ({100 * mistake.confidence:.0f}&nbsp;%)"
    return (
        f'<figure title="{escape(mistake.name)}">{image}<figcaption><b>{truth}</b><br>'
        f"taken for <i>{predicted}</i>{sure}</figcaption></figure>"
    )


def called(label: Label, names: Sequence[str]) -> str:
    if isinstance(label, tuple):
        return ", ".join(names[number] for number in label) or "none"
    return names[label]


def chosen(choices: Sequence[str]) -> str:
    """`what: why`, one line each."""
    lines = []
    for choice in choices:
        what, colon, why = choice.partition(": ")
        lines.append(f"<li><b>{prose(what)}</b>: {prose(why)}" if colon else f"<li>{prose(what)}")
    listed = f'<ul class="choices">{"".join(lines)}</ul>'
    return f"<h2>What was chosen, and why</h2>{listed}" if lines else ""


def unreadable(report: Report) -> str:
    """Files that could not be read, in training or in an evaluation."""
    bad = dict(report.skipped)
    for outcome in report.outcomes.values():
        bad |= outcome.skipped
    if not bad:
        return ""
    lines = [
        f"<dt>{escape(name)}</dt><dd>{escape(why)}</dd>" for name, why in list(bad.items())[:SHOWN]
    ]
    more = f'<p class="soft">and {len(bad) - SHOWN:,} more</p>' if len(bad) > SHOWN else ""
    title = f"Files that could not be read ({len(bad):,})"
    return f"<h2>{title}</h2><dl>{''.join(lines)}</dl>{more}"


def times(timings: Mapping[str, float]) -> str:
    whole = sum(timings.values())
    if not whole > 0:
        return ""
    bars = [Bar(name, took / whole, duration(took)) for name, took in timings.items()]
    return f'<h2>Where the time went</h2><div class="narrow">{bar_list(bars, "time")}</div>'


def following(steps: Sequence[str]) -> str:
    """Commands stand alone, to be copied; sentences as they are."""
    lines = [
        f"<pre><code>{escape(step)}</code></pre>"
        if step.startswith("vitrail ")
        else f"<p>{prose(step)}</p>"
        for step in steps
    ]
    return f"<h2>What next</h2>{''.join(lines)}" if lines else ""


def settings(toml: str) -> str:
    if not toml.strip():
        return ""
    return (
        "<h2>Settings</h2><details><summary>All settings of this run</summary>"
        f'<pre tabindex="0"><code>{escape(toml.strip())}</code></pre></details>'
    )


def prose(text: str) -> str:
    """Escaped text, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def share(value: float) -> str:
    """98.3 %, and 100 % only where nothing is missing."""
    text = f"{100 * value:.1f}"
    return f"{100 if value == 1 else min(text, '99.9', key=float)}&nbsp;%"


def duration(seconds: float) -> str:
    """`2 min 5 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
