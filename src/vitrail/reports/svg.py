"""Hand-written SVG: the line chart of a run, which answers hovering, and its axes.

Colors are CSS variables of the page; sizes are those of a view box, so a chart is as wide as its
container. No script: tooltips are <title> elements.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from vitrail.formatting import percent as as_percent

COLORS = 5
MAX_POINTS = 240  # of a line; more are averaged
MAX_TOOLTIPS = 60  # of a line
MIN_SMOOTHED = 40  # points from which on a noisy line is drawn with its running mean
MAX_DOTS = 25  # points up to which each is drawn as a dot
WIDTH, HEIGHT = 360, 216  # a phone's width, where text is not scaled down
TOP, BOTTOM = 10, 28
LETTER, BOLD = 6.8, 7.6  # approximate width of a letter in 12 pixel type

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line: its name, and points (x, y) by rising x. A y that is not finite is a gap."""

    name: str
    points: Sequence[Point]
    noisy: bool = False  # drawn faintly under its running mean

    @property
    def drawn(self) -> Sequence[Point]:
        """The points of the main line."""
        enough = self.noisy and len(self.points) >= MIN_SMOOTHED
        return running_mean(self.points, len(self.points) // 12) if enough else self.points

    @property
    def last(self) -> Point:
        return next(point for point in reversed(self.drawn) if math.isfinite(point[1]))


@dataclass(frozen=True)
class Frame:
    """The coordinate system of a line chart."""

    steps: float  # x runs from 0 to here
    marks: Sequence[float]  # y runs from the first to the last
    left: float  # margin for the tick labels
    right: float  # margin for the last values of the lines
    log: bool

    def x(self, step: float) -> float:
        return self.left + step / self.steps * (WIDTH - self.left - self.right)

    def y(self, value: float) -> float:
        low, at, high = (
            math.log(y) if self.log else y for y in (self.marks[0], value, self.marks[-1])
        )
        return HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def line_chart(
    series: Sequence[Series], *, label: str, percent: bool = False, log: bool = False
) -> str:
    """Lines over steps with their last values at their ends; "" without a finite value."""
    lines = [(number, thinned(line, log)) for number, line in enumerate(series)]
    lines = [(number, line) for number, line in lines if line.points]
    values = [y for _, line in lines for _, y in line.points if math.isfinite(y)]
    if not values:
        return ""
    shown = as_percent if percent else tidy
    many = len(lines) > 1
    ends = [f"{line.name if many else ''} {shown(line.last[1])}".strip() for _, line in lines]
    marks = (log_ticks if log else ticks)(min(values), max(values))
    texts = [f"{100 * mark:.4g} %" if percent else tidy(mark) for mark in marks]
    frame = Frame(
        steps=max(line.points[-1][0] for _, line in lines) or 1,
        marks=marks,
        left=10 + LETTER * max(map(len, texts)),
        right=8 + BOLD * max(map(len, ends)),
        log=log,
    )
    parts = [axes(frame, texts)]
    parts += [curve(line, number, frame) for number, line in lines]
    for _, line in lines:
        parts.append(hits(line, frame, lambda x, y, n=line.name: f"{n}, step {x:,.0f}: {shown(y)}"))
    heights = spread([frame.y(line.last[1]) for _, line in lines], 14, HEIGHT - BOTTOM)
    for (number, line), text, y in zip(lines, ends, heights, strict=True):
        parts.append(
            f'<text class="end" style="fill:var(--s{number % COLORS})" '
            f'x="{frame.x(line.last[0]) + 6:.1f}" y="{y + 4:.1f}">{escape(text)}</text>'
        )
    ends = ", ".join(f"{line.name} ends at {shown(line.last[1])}" for _, line in lines)
    return svg(WIDTH, HEIGHT, f"{label} by step: {ends}", parts)


def axes(frame: Frame, texts: Sequence[str]) -> str:
    """Horizontal grid lines with their values, and steps below."""
    parts = []
    for mark, text in zip(frame.marks, texts, strict=True):
        y = frame.y(mark)
        parts.append(
            f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.x(frame.steps):.1f}"/>'
            f'<text x="{frame.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for mark in ticks(0, frame.steps, 4):
        if mark == round(mark) and mark <= frame.steps and frame.x(mark) < WIDTH - 44:
            parts.append(
                f'<text x="{frame.x(mark):.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
                f"{tidy(mark)}</text>"
            )
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
    return "".join(parts)


def curve(line: Series, number: int, frame: Frame) -> str:
    """The line, interrupted where values are missing; dots where they are few."""
    color = f'stroke="var(--s{number % COLORS})"'
    parts = [f'<path class="line" {color} d="{strokes(line.drawn, frame)}"/>']
    if line.drawn is not line.points:
        faint = strokes(line.points, frame)
        parts.insert(0, f'<path class="line faint" {color} d="{faint}"/>')
    if len(line.points) <= MAX_DOTS:
        for x, y in line.points:
            if math.isfinite(y):
                parts.append(
                    f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6" '
                    f'fill="var(--s{number % COLORS})"/>'
                )
    return "".join(parts)


def strokes(points: Iterable[Point], frame: Frame) -> str:
    """The d of a path. A point between gaps is a dot, by the round line caps."""
    path, pen = [], "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
        path += ["h0"] if pen == "M" else []
        pen = "L"
    return "".join(path)


def hits(
    line: Series, frame: Frame, tooltip: Callable[[float, float], str], most: int = MAX_TOOLTIPS
) -> str:
    """Invisible circles with tooltips, `most` at most."""
    every = -(-len(line.points) // most)
    return "".join(
        f'<circle class="hit" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="7">'
        f"<title>{escape(tooltip(x, y))}</title></circle>"
        for x, y in line.points[::every]
        if math.isfinite(y)
    )


def thinned(line: Series, log: bool) -> Series:
    """At most `MAX_POINTS` points, each the mean of its neighbors; the last is kept."""
    points = [
        (x, y if math.isfinite(y) and (y > 0 or not log) else math.nan) for x, y in line.points
    ]
    if not any(math.isfinite(y) for _, y in points):
        return Series(line.name, ())
    if len(points) > MAX_POINTS:
        groups = np.array_split(np.array(points[:-1]), MAX_POINTS - 1)
        points = [(float(g[:, 0].mean()), float(g[:, 1].mean())) for g in groups] + points[-1:]
    return Series(line.name, points, line.noisy)


def running_mean(points: Sequence[Point], reach: int) -> list[Point]:
    """Centered mean over `reach` points to each side, fewer at the beginning."""
    means = []
    for place, (x, own) in enumerate(points):
        near = min(reach, place)
        values = [y for _, y in points[place - near : place + near + 1] if math.isfinite(y)]
        means.append((x, sum(values) / len(values) if math.isfinite(own) else math.nan))
    return means


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` steps of round values that enclose low and high."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) / 2 or 1.0
        low, high = (0.0, low + room) if low >= 0 else (low - room, 0.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= raw * 0.999)
    first, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, end + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … that enclose low and high; only powers of ten for a wide range."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [times * 10.0**e for e in exponents for times in (1, 2, 5)]
    first = max((n for n, mark in enumerate(marks) if mark <= low), default=0)
    end = next((n for n, mark in enumerate(marks) if mark >= high), len(marks) - 1)
    enclosing = marks[first : max(end, first + 1) + 1]
    if len(enclosing) <= 7:
        return enclosing
    every = -(-len(exponents) // 6)
    return [10.0**e for e in range(exponents[0], exponents[-1] + every, every)]


def spread(heights: Sequence[float], gap: float, most: float) -> list[float]:
    """Move heights at least `gap` apart, none beyond `most`, so that labels do not overlap."""
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    moved = list(heights)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + gap)
    limit = most
    for n in reversed(order):
        moved[n] = min(moved[n], limit)
        limit = moved[n] - gap
    return moved


def tidy(value: float) -> str:
    """Three significant digits: 0.0123, 45.6, 1,230, 12.3k, 3e-5."""
    size = abs(value)
    if size >= 9_999.5:
        unit, sign = (1e6, "M") if size >= 999_500 else (1e3, "k")
        return f"{value / unit:.3g}{sign}"
    if size >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("e-0", "e-")


def svg(width: float, height: float, label: str, parts: Iterable[str], style: str = "") -> str:
    """An SVG element with a label for screen readers."""
    styled = f' style="{style}"' if style else ""
    return (
        f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}"{styled}>{"".join(parts)}</svg>'
    )
