"""What every figure is drawn with: the document and its style, text, marks, scales and ticks.

A picture in Markdown runs no script, loads no font and knows nothing of its page, so style and
paper are in the file. Sizes are those of a view box, made for a column of text 720 wide.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from textwrap import wrap

from vitrail.formatting import percent as as_percent
from vitrail.reports.svg import LETTER, log_ticks, ticks, tidy

LINE = 16  # height of a line of text
OWN_TICKS = 7  # different values up to which each has a tick of its own
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# Colors that text can have too: at least 4.5 to 1 against the paper.
LIGHT = ("#1d5bbf", "#c2410c", "#0f766e", "#8b2fc9", "#8a5a06", "#be185d")
DARK = ("#79b0ff", "#fb923c", "#5eead4", "#d8b4fe", "#fde047", "#f9a8d4")
PAPERS = ("#ffffff", "#0d1117")  # GitHub's
SHAPES = (  # about 0, 0; five for six colors, so that thirty lines differ
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",  # a circle
    "M-3.6-3.6h7.2v7.2h-7.2z",  # a square
    "M0-5.2L5.2 0L0 5.2L-5.2 0z",  # a rhomb
    "M0-5L4.8 3.6H-4.8z",  # triangles
    "M0 5L4.8-3.6H-4.8z",
)
STYLE = """
:root { --ink: #1d1d1f; --soft: #57606a; --line: #dfe2e6; --paper: %s; }
%s
@media (prefers-color-scheme: dark) {
:root { --ink: #e6edf3; --soft: #9da7b3; --line: #2b313a; --paper: %s; }
%s
}
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums; fill: var(--soft); }
.paper { fill: var(--paper); }
.ink { fill: var(--ink); }
.head { fill: var(--ink); font-weight: 600; }
.end { fill: currentColor; font-weight: 600; }
.near { font-size: 10.5px; fill: currentColor; paint-order: stroke; stroke: var(--paper);
  stroke-width: 3px; stroke-linejoin: round; }
.grid { stroke: var(--line); fill: none; }
.line { stroke: currentColor; fill: none; stroke-width: 2; stroke-linejoin: round; }
.whisker { stroke: currentColor; fill: none; stroke-width: 1.5; opacity: .75; }
.mark { fill: currentColor; stroke: var(--paper); stroke-width: 1; }
"""

Interval = tuple[float, float | None, float | None]  # a value, and from where to where it may be


@dataclass(frozen=True)
class Scale:
    """Where a value lies between two places; in the middle, if there is one value only."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.low == self.high:
            return (self.start + self.end) / 2
        low, at, high = (math.log(v) if self.log else v for v in (self.low, value, self.high))
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def document(width: float, height: float, title: str, told: str, parts: Iterable[str]) -> str:
    """The file: what the picture is called, what it tells those who cannot see it, and itself."""
    colors = ["\n".join(f".c{n} {{ color: {c}; }}" for n, c in enumerate(p)) for p in (LIGHT, DARK)]
    style = STYLE % (PAPERS[0], colors[0], PAPERS[1], colors[1])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(told)}</desc>",
        f"<style>{style}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
        *parts,
        "</svg>\n",
    ]
    return "\n".join(lines)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    held = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}"{held}>{escape(words)}</text>'


def colored(number: int, parts: Iterable[str]) -> str:
    """Parts in the color of the line or group of this number."""
    return f'<g class="c{number % len(LIGHT)}">{"".join(parts)}</g>'


def shape(number: int, x: float, y: float, hint: str = "") -> str:
    """The mark of the line of this number."""
    told = f"<title>{escape(hint)}</title>" if hint else ""
    path = SHAPES[number % len(SHAPES)]
    return f'<path class="mark" transform="translate({x:.1f} {y:.1f})" d="{path}">{told}</path>'


def fitted(words: str, room: float, letter: float = LETTER) -> list[str]:
    """The words in as many lines as they need."""
    return wrap(words, max(8, int((room - 20) / letter)))


def levels(values: Sequence[Interval], *, percent: bool, count: int = 4) -> list[float]:
    """Round values that enclose these and their intervals."""
    ends = [within(v, percent) for triple in values for v in triple if v is not None]
    low, high = min(ends), max(ends)
    if high - low < 1e-9 * max(1.0, abs(low)):
        room = 0.05 if percent else abs(low) / 10 or 1.0
        low, high = within(low - room, percent), within(high + room, percent)
    return ticks(low, high, count)


def within(value: float, percent: bool) -> float:
    """A share lies between 0 and 1, even if an interval that was computed for it does not."""
    return min(max(value, 0.0), 1.0) if percent else value


def x_ticks(values: Iterable[float], scale: Scale, room: float) -> list[float]:
    """The values themselves if they are few and apart, else round ones up to `room` outside."""
    own = sorted(set(values))
    if len(own) <= OWN_TICKS and apart(own, scale, short):
        return own
    marks = (log_ticks if scale.log else ticks)(own[0], own[-1])
    marks = [m for m in marks if scale.start - room <= scale(m) <= scale.end + room]
    return thinned(marks if len(marks) > 1 else [own[0], own[-1]], scale, short)


def thinned(marks: list[float], scale: Scale, words: Callable[[float], str]) -> list[float]:
    """Every mark, or every second, or third: as many as can be named without touching."""
    every = next(n for n in range(1, len(marks) + 1) if apart(marks[::n], scale, words))
    return marks[::every]


def apart(marks: Sequence[float], scale: Scale, words: Callable[[float], str]) -> bool:
    return all(
        scale(right) - scale(left) > LETTER * (len(words(left)) + len(words(right))) / 2 + 6
        for left, right in pairwise(marks)
    )


def short(value: float) -> str:
    """A number below an axis: 0.5, 64, 1,567, 60k, 300M, 2·10¹⁵."""
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        factor, power = f"{value:.2e}".split("e")
        factor = factor.rstrip("0").rstrip(".")
        times = "" if factor == "1" else f"{factor}·"
        return f"{times}10{str(int(power)).translate(SUPERSCRIPTS)}"
    if 1e3 <= size < 1e4 and value % 100 == 0:
        return f"{value / 1e3:g}k"
    return tidy(value)


def shown(value: float, percent: bool) -> str:
    """A value that was measured."""
    return as_percent(value) if percent else tidy(value)


def level_text(value: float, percent: bool) -> str:
    """A value of a scale."""
    return f"{100 * value:.4g} %" if percent else short(value)
