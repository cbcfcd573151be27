"""A confusion matrix as a picture and in words, and shares as bars; in the manner of `charts`."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from vitrail.evaluation.charts import LETTER, svg
from vitrail.formatting import truncate

CELL = 26  # pixels a side, where numbers are written
READABLE = 30  # classes up to which numbers and names are written
MOST_CLASSES = 100  # beyond, the most confused ones are shown
LONGEST_NAME = 14  # letters
SHADES = 8  # of cells without numbers, which are drawn shade by shade
MOST_TOLD = 200  # cells without numbers that answer hovering
WORST_CLASSES = 30  # bars, where there are more classes
PAIRS = 5  # in words
BESIDE = 14  # classes up to which the matrix fills half the page's width
ROW = 24  # height of a bar with its name


class Bar(NamedTuple):
    """One line of a bar list."""

    name: str
    share: float  # 0 to 1; not a number: no bar
    text: str
    good: bool = True


class Confused(NamedTuple):
    """How often one class was taken for another."""

    truth: int
    predicted: int
    times: int
    share: float  # of the pictures of the true class


def mixed_up(confusion: np.ndarray, names: Sequence[str]) -> str:
    """The confusion matrix, and what it says in words; a small one has the words beside it."""
    note = "Hover over a cell for its classes." if len(confusion) > READABLE else ""
    if len(confusion) > MOST_CLASSES:
        note = f"The {READABLE} classes, of {len(confusion):,}, that are mixed up most."
    note = f'<p class="soft">{note}</p>' if note else ""
    matrix = f'<div class="wide" tabindex="0">{confusion_map(confusion, names)}</div>{note}'
    found, pairs = found_bars(confusion, names), pair_list(confusion, names)
    if len(confusion) <= BESIDE:
        return f'<div class="panels"><div>{matrix}</div><div>{found}{pairs}</div></div>'
    return f'{matrix}<div class="panels"><div>{found}</div><div>{pairs}</div></div>'


def found_bars(confusion: np.ndarray, names: Sequence[str]) -> str:
    """How many of each class are found, worst first."""
    totals, right = confusion.sum(axis=1).tolist(), confusion.diagonal().tolist()
    order = sorted((n for n in range(len(totals)) if totals[n]), key=lambda n: right[n] / totals[n])
    bars = [
        Bar(
            names[n],
            right[n] / totals[n],
            f"{right[n]:,} of {totals[n]:,}",
            good=2 * right[n] >= totals[n],
        )
        for n in order[:WORST_CLASSES]
    ]
    title = "Found of each class"
    if len(order) > WORST_CLASSES:
        title += f", the lowest {WORST_CLASSES} of {len(order):,}"
    return f"<h3>{title}</h3>{bar_list(bars, title)}"


def pair_list(confusion: np.ndarray, names: Sequence[str]) -> str:
    """The classes that are mixed up most often, in words."""
    pairs = "".join(
        f"<li><div><b>{escape(names[pair.truth])}</b> taken for "
        f"<b>{escape(names[pair.predicted])}</b></div>"
        f"<span>{often(pair.times)} · {100 * pair.share:.0f} %</span>"
        for pair in most_confused(confusion, PAIRS)
    )
    return f'<h3>Most often mixed up</h3><ul class="pairs">{pairs}</ul>' if pairs else ""


class Matrix(NamedTuple):
    """Counts (K, K), what share of its row each is, and the classes' names."""

    counts: np.ndarray
    shares: np.ndarray
    names: Sequence[str]

    def told(self, row: int, column: int) -> str:
        """What hovering over a cell shows."""
        count, share = self.counts[row, column], self.shares[row, column]
        took = "known" if row == column else f"taken for {self.names[column]}"
        return escape(f"{self.names[row]} {took}: {often(count)}, {100 * share:.0f} %")


def confusion_map(confusion: np.ndarray, names: Sequence[str]) -> str:
    """Rows are the truth, columns the prediction; a cell is as full as its share of the row."""
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    kept = np.arange(len(confusion))
    if len(confusion) > MOST_CLASSES:
        kept = most_confused_classes(confusion, READABLE)
    part = np.ix_(kept, kept)
    matrix = Matrix(confusion[part], shares[part], [names[number] for number in kept.tolist()])
    return small_map(matrix) if len(kept) > READABLE else written_map(matrix)


def written_map(matrix: Matrix) -> str:
    """Names at the sides, numbers in the cells."""
    short = [truncate(name, LONGEST_NAME) for name in matrix.names]
    flat = max(map(len, short)) <= 3  # names that fit over their columns as they are
    left = 30 + LETTER * max(map(len, short))
    top = 42 if flat else left
    side = CELL * len(short)
    parts = [
        f'<text x="{left + side / 2:.0f}" y="12" text-anchor="middle">predicted</text>',
        f'<text transform="translate(12 {top + side / 2:.0f}) rotate(-90)" text-anchor="middle">'
        "true</text>",
    ]
    for number, (name, whole) in enumerate(zip(short, matrix.names, strict=True)):
        middle = CELL * (number + 0.5)
        text = f"{escape(name)}<title>{escape(whole)}</title></text>"
        over = f'x="{left + middle:.0f}" y="{top - 7:.0f}" text-anchor="middle"'
        turned = f'transform="translate({left + middle + 4:.0f} {top - 7:.0f}) rotate(-90)"'
        parts.append(
            f'<text x="{left - 7:.0f}" y="{top + middle + 4:.0f}" text-anchor="end">{text}'
            f"<text {over if flat else turned}>{text}"
        )
    parts.append(ground(left, top, side))
    for row, column in np.argwhere(matrix.counts).tolist():
        parts.append(written_cell(matrix, row, column, left + CELL * column, top + CELL * row))
    return finished(parts, left + side, top + side, matrix)


def written_cell(matrix: Matrix, row: int, column: int, x: float, y: float) -> str:
    count, share = int(matrix.counts[row, column]), matrix.shares[row, column]
    full = fullness(share, row == column)
    shade = "paper" if full > 0.8 else "mid" if full > 0.55 else "ink"  # what can be read there
    size = 12 if count < 100 else 10.5 if count < 1000 else 9
    number = f"{count}" if count < 10_000 else f"{count // 1000}k"
    return (
        f"<g><title>{matrix.told(row, column)}</title>"
        f'<rect x="{x + 1:.0f}" y="{y + 1:.0f}" width="{CELL - 2}" height="{CELL - 2}" rx="3" '
        f'fill="{color(row == column)}" fill-opacity="{full:.2f}"/>'
        f'<text class="{shade}" x="{x + CELL / 2:.0f}" '
        f'y="{y + CELL / 2 + size / 3:.0f}" font-size="{size}" text-anchor="middle">'
        f"{number}</text></g>"
    )


def small_map(matrix: Matrix) -> str:
    """Cells only; the most confused ones answer hovering."""
    step, top = 8, 20
    side = step * len(matrix.names)
    shades: dict[tuple[bool, int], list[str]] = {}
    for row, column in np.argwhere(matrix.counts).tolist():
        full = fullness(matrix.shares[row, column], row == column)
        cells = shades.setdefault((row == column, math.ceil(full * SHADES)), [])
        cells.append(f"M{top + step * column} {top + step * row}h{step - 1}v{step - 1}h{1 - step}z")
    parts = [
        f'<text x="{top + side / 2:.0f}" y="12" text-anchor="middle">predicted</text>',
        f'<text transform="translate(12 {top + side / 2:.0f}) rotate(-90)" text-anchor="middle">'
        "true</text>",
        ground(top, top, side),
    ]
    for (right, shade), cells in sorted(shades.items()):
        opacity = f'fill="{color(right)}" fill-opacity="{shade / SHADES:.2f}"'
        parts.append(f'<path {opacity} d="{"".join(cells)}"/>')
    for pair in most_confused(matrix.counts, MOST_TOLD):
        parts.append(
            f'<rect class="hit" x="{top + step * pair.predicted}" y="{top + step * pair.truth}" '
            f'width="{step}" height="{step}">'
            f"<title>{matrix.told(pair.truth, pair.predicted)}</title></rect>"
        )
    return finished(parts, top + side, top + side, matrix)


def finished(parts: Sequence[str], right: float, bottom: float, matrix: Matrix) -> str:
    """No wider than is pleasant, and no smaller than can be read: a phone scrolls."""
    style = f"max-width:{max(1.3 * right, 200):.0f}px;min-width:{min(0.75 * right, 600):.0f}px"
    label = f"confusion matrix of {len(matrix.names)} classes"
    return svg(right + 2, bottom + 2, label, parts, style)


def ground(left: float, top: float, side: float) -> str:
    return (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{side}" height="{side}" rx="4" '
        'fill="var(--card)"/>'
    )


def color(right: bool) -> str:
    return "var(--good)" if right else "var(--bad)"


def fullness(share: float, right: bool) -> float:
    """How strongly a cell is colored: right ones in proportion, wrong ones so that few are seen."""
    return 0.12 + 0.88 * share if right else 0.15 + 0.85 * math.sqrt(share)


def most_confused(confusion: np.ndarray, count: int) -> list[Confused]:
    """The pairs of classes that are mixed up most often."""
    wrong = confusion - np.diag(confusion.diagonal())
    totals = confusion.sum(axis=1)
    order = np.argsort(-wrong, axis=None, kind="stable")[:count]
    pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
    return [
        Confused(int(a), int(b), int(wrong[a, b]), float(wrong[a, b] / totals[a]))
        for a, b in pairs
        if wrong[a, b]
    ]


def most_confused_classes(confusion: np.ndarray, count: int) -> np.ndarray:
    """The classes of the pairs most often mixed up, in the order of classes."""
    found: set[int] = set()
    for pair in most_confused(confusion, count * count):
        if len(found | {pair.truth, pair.predicted}) <= count:
            found |= {pair.truth, pair.predicted}
    return np.array(sorted(found) or range(count))


def bar_list(bars: Sequence[Bar], label: str) -> str:
    """A bar for each share, its name before it and its text behind."""
    before = 10 + LETTER * max((min(len(bar.name), LONGEST_NAME) for bar in bars), default=0)
    behind = 8 + LETTER * max((len(bar.text) for bar in bars), default=0)
    length = 360 - before - behind
    parts = []
    for number, bar in enumerate(bars):
        y = ROW * number
        parts.append(
            f"<g><title>{escape(f'{bar.name}: {bar.text}')}</title>"
            f'<text class="ink" x="0" y="{y + 16}">'
            f"{escape(truncate(bar.name, LONGEST_NAME))}</text>"
            f'<rect x="{before:.0f}" y="{y + 7}" width="{length:.0f}" height="10" rx="5" '
            'fill="var(--track)"/>'
        )
        if math.isfinite(bar.share) and bar.share > 0:
            width = max(2, bar.share * length)
            parts.append(
                f'<rect x="{before:.0f}" y="{y + 7}" width="{width:.1f}" height="10" '
                f'rx="{min(5, width / 2):.1f}" fill="{color(bar.good)}"/>'
            )
        parts.append(f'<text x="360" y="{y + 16}" text-anchor="end">{escape(bar.text)}</text></g>')
    return svg(360, ROW * len(bars), label, parts)


def often(times: int) -> str:
    return "once" if times == 1 else f"{times:,} times"
