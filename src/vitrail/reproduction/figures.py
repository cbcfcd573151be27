"""Numbers → figures, each an SVG file of its own that is right by day and by night.

chart    lines or points in panels side by side: what is published, and what came out here
dots     a dot and its interval for each row, in columns side by side

What they are drawn with is in svg.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vitrail.formatting import truncate
from vitrail.reports.svg import BOLD, LETTER, spread
from vitrail.reproduction.svg import (
    LINE,
    Scale,
    colored,
    document,
    fitted,
    level_text,
    levels,
    shape,
    short,
    shown,
    text,
    thinned,
    within,
    x_ticks,
)

WIDTH, NARROW = 720, 480  # of two panels or columns side by side, and of one
PLOT = 220  # height of a panel between its first and its last level
EDGE = 14  # room between the frame of a plot and its outermost marks
LONGEST_END = 18  # letters of a name that still stands at the end of its line
AROUND = 6  # how far apart marks of several lines at the same x are drawn, if they have intervals
ROW, APART = 22, 10  # height of a row of dots, and room between groups
LONGEST_ROW = 34  # letters of a row's name; the rest is cut off


Place = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Mark:
    """A point of a line, with an interval of y if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""  # written beside it where there is room


@dataclass(frozen=True)
class Line:
    """Points that belong together, from left to right; one name has one color in all panels."""

    name: str
    marks: Sequence[Mark]
    joined: bool = True


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    log_x: bool = False
    percent: bool = True  # y is a share, shown in percent

    @property
    def marks(self) -> list[Mark]:
        return [mark for line in self.lines for mark in line.marks]


@dataclass(frozen=True)
class Row:
    """A number with its name, and its interval if it has one."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None
    group: str = ""  # rows of a group stand together under its name


@dataclass(frozen=True)
class Plot:
    """The frame of a panel, and where values lie in it."""

    left: float
    right: float
    top: float
    bottom: float
    x: Scale
    y: Scale
    aside: Mapping[str, float]  # how far the marks of each line are moved, to show all intervals

    def places(self, line: Line) -> list[Place]:
        aside = self.aside[line.name]
        return [(self.x(mark.x) + aside, self.y(mark.y)) for mark in line.marks]


def chart(panels: Sequence[Panel]) -> str:
    """Panels side by side, two in a row; names at the ends of lines, or else above all."""
    panels = [known(panel) for panel in panels]
    names = dict.fromkeys(line.name for panel in panels for line in panel.lines)
    numbers = {name: number for number, name in enumerate(names)}
    across = min(2, len(panels))
    width = WIDTH if across > 1 else NARROW
    cell = width / across
    at_ends = all(ends_are_free(panel) for panel in panels)
    parts, y = ([], 0.0) if at_ends else legend(numbers, width)
    for start in range(0, len(panels), across):
        row = panels[start : start + across]
        heads = [heading(panel, cell) for panel in row]
        top = y + LINE * max(map(len, heads)) + 18
        for place, (panel, head) in enumerate(zip(row, heads, strict=True)):
            left = place * cell
            for line, (words, kind) in enumerate(head):
                parts.append(text(left + 10, y + LINE * (line + 1) + 2, words, kind))
            parts += drawn_panel(panel, numbers, left, left + cell, top, at_ends=at_ends)
        y = top + PLOT + 28 + LINE * max(len(fitted(panel.x_label, cell)) for panel in row)
    title = "; ".join(f"{p.title}: {p.y_label} by {p.x_label}" for p in panels)
    return document(width, y, title, " ".join(map(told, panels)), parts)


def known(panel: Panel) -> Panel:
    """The panel without marks that are no numbers, and without lines that have no others."""
    lines = [
        replace(line, marks=[mark for mark in line.marks if math.isfinite(mark.y)])
        for line in panel.lines
    ]
    assert not panel.log_x or all(mark.x > 0 for line in lines for mark in line.marks)
    return replace(panel, lines=[line for line in lines if line.marks])


def told(panel: Panel) -> str:
    """All that is in a panel, in words."""
    lines = [
        f"{line.name}: " + ", ".join(worded(mark, panel.percent) for mark in line.marks)
        for line in panel.lines
    ]
    return f"{panel.title}. {'. '.join(lines) or 'No values'}."


def worded(mark: Mark, percent: bool) -> str:
    """`60k: 85.0 % (84.1 % to 85.9 %)`"""
    label = f"{mark.label} at " if mark.label else ""
    return f"{label}{short(mark.x)}: {with_interval(mark.y, mark.low, mark.high, percent)}"


def with_interval(value: float, low: float | None, high: float | None, percent: bool) -> str:
    if low is None or high is None:
        return shown(value, percent)
    return f"{shown(value, percent)} ({shown(low, percent)} to {shown(high, percent)})"


def ends_are_free(panel: Panel) -> bool:
    """If each line ends at the right, where a short name can follow it."""
    last = max((mark.x for mark in panel.marks), default=0.0)
    return LINE * len(panel.lines) <= PLOT and all(
        line.joined and line.marks[-1].x == last and len(line.name) <= LONGEST_END
        for line in panel.lines
    )


def heading(panel: Panel, room: float) -> list[tuple[str, str]]:
    """Lines of text above a panel, and of which kind they are."""
    title = [(words, "head") for words in fitted(panel.title, room, BOLD)]
    return title + [(words, "") for words in fitted(panel.y_label, room)]


def legend(numbers: Mapping[str, int], width: float) -> tuple[list[str], float]:
    """All names with their marks from left to right, and how high that is."""
    parts, x, y = [], 16.0, 20.0
    for name, number in numbers.items():
        room = 12 + BOLD * len(name)
        if x > 16 and x + room > width:
            x, y = 16.0, y + LINE + 4
        parts.append(colored(number, [shape(number, x, y - 4), text(x + 10, y, name, "end")]))
        x += room + 22
    return parts, y + 10


def drawn_panel(
    panel: Panel,
    numbers: Mapping[str, int],
    left: float,
    right: float,
    top: float,
    *,
    at_ends: bool,
) -> list[str]:
    """A panel below its heading."""
    bottom = top + PLOT
    if not panel.marks:
        return [text((left + right) / 2, top + PLOT / 2, "no values", anchor="middle")]
    marks = levels([(m.y, m.low, m.high) for m in panel.marks], percent=panel.percent)
    left += 18 + LETTER * max(len(level_text(mark, panel.percent)) for mark in marks)
    right -= 16 + (BOLD * max(len(line.name) for line in panel.lines) if at_ends else 0)
    xs = [mark.x for mark in panel.marks]
    x = Scale(min(xs), max(xs), left + EDGE, right - EDGE, panel.log_x)
    y = Scale(marks[0], marks[-1], bottom, top)
    plot = Plot(left, right, top, bottom, x, y, set_aside(panel))
    parts = axes(plot, marks, xs, panel)
    for line in panel.lines:
        parts.append(colored(numbers[line.name], drawn_line(line, numbers[line.name], plot, panel)))
    taken = [box for line in panel.lines for box in boxes(line, plot)]
    for line in panel.lines:
        parts.append(colored(numbers[line.name], labels(line, plot, taken)))
    if at_ends:
        for line, height in zip(panel.lines, end_heights(panel, plot), strict=True):
            words = text(x(max(xs)) + EDGE + 3, height + 4, line.name, "end")
            parts.append(colored(numbers[line.name], [words]))
    return parts


def set_aside(panel: Panel) -> dict[str, float]:
    """How far to the right or left each line is drawn, so that intervals do not hide each other."""
    names = [line.name for line in panel.lines]
    xs = [x for line in panel.lines for x in {mark.x for mark in line.marks}]
    if len(xs) == len(set(xs)) or all(mark.low is None for mark in panel.marks):
        return dict.fromkeys(names, 0.0)
    step = min(AROUND, 1.7 * EDGE / len(names))
    return {name: step * (n - (len(names) - 1) / 2) for n, name in enumerate(names)}


def end_heights(panel: Panel, plot: Plot) -> list[float]:
    """Where the names of lines stand: near their ends, and apart, moved up as far as down."""
    ends = [plot.y(line.marks[-1].y) for line in panel.lines]
    down = spread(ends, LINE, plot.bottom)
    up = spread([-end for end in reversed(ends)], LINE, -plot.top)
    return [(low - high) / 2 for low, high in zip(down, reversed(up), strict=True)]


def axes(plot: Plot, marks: Sequence[float], xs: Sequence[float], panel: Panel) -> list[str]:
    """Level lines with their values at the left; values of x, and what x is, below."""
    parts = []
    for mark in marks:
        y = plot.y(mark)
        parts.append(f'<path class="grid" d="M{plot.left:.1f} {y:.1f}H{plot.right:.1f}"/>')
        parts.append(text(plot.left - 6, y + 4, level_text(mark, panel.percent), anchor="end"))
    for mark in x_ticks(xs, plot.x, EDGE):
        x = plot.x(mark)
        parts.append(f'<path class="grid" d="M{x:.1f} {plot.bottom:.1f}v5"/>')
        parts.append(text(x, plot.bottom + 18, short(mark), anchor="middle"))
    middle = (plot.left + plot.right) / 2
    for number, words in enumerate(fitted(panel.x_label, plot.right - plot.left)):
        y = plot.bottom + 20 + LINE * (number + 1)
        parts.append(text(middle, y, words, anchor="middle"))
    return parts


def drawn_line(line: Line, number: int, plot: Plot, panel: Panel) -> list[str]:
    """The line, whiskers, and a mark at each point that answers hovering."""
    places = plot.places(line)
    parts = []
    if line.joined and len(places) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path class="line" d="M{path}"/>')
    for mark, (x, y) in zip(line.marks, places, strict=True):
        if mark.low is not None and mark.high is not None:
            low, high = (plot.y(within(end, panel.percent)) for end in (mark.low, mark.high))
            caps = f"M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
            parts.append(f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}{caps}"/>')
        parts.append(shape(number, x, y, f"{line.name}, {worded(mark, panel.percent)}"))
    return parts


def boxes(line: Line, plot: Plot) -> list[Box]:
    """What a label must not cover: marks, and the lines between them in small pieces."""
    places = plot.places(line)
    found = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for (x0, y0), (x1, y1) in pairwise(places) if line.joined else ():
        pieces = int(math.hypot(x1 - x0, y1 - y0) / 4) + 1
        for n in range(pieces):
            x, y = x0 + (x1 - x0) * n / pieces, y0 + (y1 - y0) * n / pieces
            found.append((x - 1, y - 1, x + 1, y + 1))
    return found


def labels(line: Line, plot: Plot, taken: list[Box]) -> list[str]:
    """Labels of marks, each at the first place around it that is free, and left out if none is."""
    parts = []
    for mark, (x, y) in zip(line.marks, plot.places(line), strict=True):
        half = 3.3 * len(mark.label) + 1
        beside = [(half + 7, 4), (-half - 7, 4)]
        corners = [(half + 2, -7), (-half - 2, -7), (half + 2, 15), (-half - 2, 15)]
        for across, down in [(0, -8), (0, 16), *beside, *corners] if mark.label else ():
            at, base = x + across, y + down
            box = (at - half, base - 9, at + half, base + 2)
            inside = plot.left < box[0] and box[2] < plot.right + 10 and box[3] < plot.bottom
            if inside and not any(overlap(box, other) for other in taken):
                taken.append(box)
                parts.append(text(at, base, mark.label, "near", "middle"))
                break
    return parts


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def dots(columns: Mapping[str, Sequence[Row]], *, label: str, percent: bool = True) -> str:
    """A line for each row: its name, and in each column a dot, its interval and its value."""
    keys = list(dict.fromkeys((row.group, row.name) for rows in columns.values() for row in rows))
    groups = {group: n for n, group in enumerate(dict.fromkeys(group for group, _ in keys))}
    width = WIDTH if len(columns) > 1 else NARROW
    names = [LETTER * min(len(name), LONGEST_ROW) for _, name in keys]
    left = 14 + max(names + [BOLD * len(group) for group in groups], default=0)
    cell = (width - left) / len(columns)
    heads = [fitted(title, cell, BOLD) for title in columns]
    top = LINE * max(map(len, heads)) + 12
    parts, heights, bottom = row_names(keys, groups, top)
    for place, (head, rows) in enumerate(zip(heads, columns.values(), strict=True)):
        start = left + place * cell
        for line, words in enumerate(head):
            parts.append(text(start + 10, LINE * (line + 1) + 2, words, "head"))
        rows = [row for row in rows if math.isfinite(row.mean)]
        if not rows:
            continue
        marks = levels([(r.mean, r.low, r.high) for r in rows], percent=percent, count=3)
        values = 14 + LETTER * max(len(shown(row.mean, percent)) for row in rows)
        scale = Scale(marks[0], marks[-1], start + 2 * EDGE, start + cell - values - EDGE)
        parts += ruler(scale, marks, top, bottom, label, percent)
        for row in rows:
            y = heights[row.group, row.name]
            parts.append(colored(groups[row.group], drawn_row(row, scale, y, percent)))
            parts.append(text(start + cell - 8, y + 4, shown(row.mean, percent), "ink", "end"))
    spoken = " ".join(f"{name}: {told_rows(rows, percent)}." for name, rows in columns.items())
    return document(width, bottom + 44, f"{label}: {'; '.join(columns)}", spoken, parts)


def row_names(
    keys: Sequence[tuple[str, str]], groups: Mapping[str, int], y: float
) -> tuple[list[str], dict[tuple[str, str], float], float]:
    """Names of rows under those of their groups, how high each row is, and where they end."""
    parts, heights = [], {}
    for group, number in groups.items():
        y += APART if number else 0
        if group:
            parts.append(text(10, y + ROW / 2 + 4, group, "head"))
            y += ROW
        for key in keys:
            if key[0] == group:
                heights[key] = y + ROW / 2
                parts.append(text(10, heights[key] + 4, truncate(key[1], LONGEST_ROW), "ink"))
                y += ROW
    return parts, heights, y + 4


def ruler(
    scale: Scale, marks: list[float], top: float, bottom: float, label: str, percent: bool
) -> list[str]:
    """Upright lines at round values, named below where the names do not touch."""
    parts = [
        f'<path class="grid" d="M{scale(mark):.1f} {top:.1f}V{bottom:.1f}"/>' for mark in marks
    ]
    for mark in thinned(marks, scale, lambda mark: level_text(mark, percent)):
        words = level_text(mark, percent)
        parts.append(text(scale(mark), bottom + 16, words, anchor="middle"))
    middle = (scale.start + scale.end) / 2
    return [*parts, text(middle, bottom + 34, label, anchor="middle")]


def drawn_row(row: Row, scale: Scale, y: float, percent: bool) -> list[str]:
    x = scale(row.mean)
    parts = [f'<path class="grid" d="M{scale.start:.1f} {y:.1f}H{scale.end:.1f}"/>']
    if row.low is not None and row.high is not None:
        low, high = (scale(within(end, percent)) for end in (row.low, row.high))
        caps = f"M{low:.1f} {y - 3:.1f}v6M{high:.1f} {y - 3:.1f}v6"
        parts.append(f'<path class="whisker" d="M{low:.1f} {y:.1f}H{high:.1f}{caps}"/>')
    return [*parts, shape(0, x, y, told_rows([row], percent))]


def told_rows(rows: Sequence[Row], percent: bool) -> str:
    return ", ".join(
        f"{' '.join([row.group, row.name]).strip()} "
        + with_interval(row.mean, row.low, row.high, percent)
        for row in rows
    )
