"""Static plots by matplotlib: one function per plot, in one style.

    figure = reliability_diagram(result.calibration)
    inline_svg(figure)                       for a page: follows the page's colors
    save_figure(figure, folder / "ece")      ece.svg and ece.png

Plots are drawn in the colors of `LIGHT`. In SVG they become CSS variables, so that the same file is
readable in light and dark mode; a PNG is always light. Sizes are in pixels at 72 dpi.

Shapes: K classes, L layers, H heads, h x w patches, n tiles or points.
"""

import colorsys
import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from vitrail.data.corruptions import CORRUPTIONS, SEVERITIES
from vitrail.data.storage import write_atomic
from vitrail.evaluation.metrics import COVERAGE, most_confused
from vitrail.evaluation.results import Calibration, SelectiveAccuracy
from vitrail.formatting import percent, truncate
from vitrail.reports.html import DARK, LIGHT, compact_number

if TYPE_CHECKING:
    from markupsafe import Markup

    from vitrail.inspection.representations import Scatter

STYLE: Any = {
    "axes.edgecolor": LIGHT["line"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": LIGHT["soft"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 72,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 1,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # class names are literal text, even with a $ in them
    "xtick.color": LIGHT["soft"],
    "xtick.major.size": 0,
    "ytick.color": LIGHT["soft"],
    "ytick.major.size": 0,
}
PNG_DPI = 144
TOOLTIP = "tooltip:"  # ids that become <title> elements
XLINK = "{http://www.w3.org/1999/xlink}"

CELL = 26  # pixels a side of a confusion matrix's cell with a number
MAX_NAMED = 30  # classes up to which a confusion matrix has names and numbers
MAX_DRAWN = 100  # classes up to which it is drawn in full
MAX_NAME = 14  # letters
SHADES = 8  # of cells without numbers
MAX_TOOLTIPS = 200  # of cells without numbers
MIN_BIN_COUNT = 10  # bins of the reliability diagram with fewer predictions are pale

SERIES_COLORS = 5  # s0 to s4
MAX_POINTS = 240  # of a line; more are averaged
MAX_INTERVALS = 60  # of a line chart's x axis with tooltips
MIN_SMOOTHED = 40  # points from which a noisy line is drawn with its running mean
MAX_DOTS = 25  # points up to which each is drawn as a dot
MAX_LAYER_TICKS = 12
LOG_NORMS = 30  # ratio of token norms from which the axis is logarithmic
MAX_NAMED_CLASSES = 24  # classes up to which a scatter plot has names

Points = Sequence[tuple[float, float]]


@contextmanager
def plot_style() -> Iterator[None]:
    """The style of all plots; also a decorator of the functions that draw."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # SVG viewers have the fonts
        yield


def new_figure(width: float, height: float, label: str) -> Any:
    """An empty figure, its size in pixels; `label` describes it to screen readers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72))
    figure.set_label(label)
    return figure


def add_axes(figure: Any, left: float, top: float, width: float, height: float) -> Any:
    """Axes at a position in pixels from the figure's upper left corner."""
    wide, high = (72 * inches for inches in figure.get_size_inches())
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


@plot_style()
def confusion_matrix(confusion: np.ndarray, names: Sequence[str]) -> Any:
    """Counts (K, K); rows are labels, columns predictions, colors the share of the row.

    Beyond `MAX_NAMED` classes cells have no numbers, beyond `MAX_DRAWN` only the most confused
    classes are drawn.
    """
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path as Outline

    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    shown = np.arange(len(confusion))
    if len(confusion) > MAX_DRAWN:  # the classes of the most confused pairs
        chosen: set[int] = set()
        for pair in most_confused(confusion, MAX_NAMED**2):
            if len(chosen | {pair.label, pair.predicted}) <= MAX_NAMED:
                chosen |= {pair.label, pair.predicted}
        shown = np.array(sorted(chosen) or range(MAX_NAMED))
    counts, shares = confusion[np.ix_(shown, shown)], shares[np.ix_(shown, shown)]
    names = [printable(names[number]) for number in shown.tolist()]
    classes, named = len(shown), len(shown) <= MAX_NAMED
    short = [truncate(name, MAX_NAME) for name in names]
    longest = max(map(len, short))
    cell = CELL if named else 8
    left = 30 + 7 * longest if named else 20
    top = (44 if longest <= 3 else left) if named else 20
    side = cell * classes
    figure = new_figure(left + side + 2, top + side + 2, f"confusion matrix, {classes} classes")
    axes = add_axes(figure, left, top, side, side)
    axes.set(xlim=(0, classes), ylim=(classes, 0), facecolor=LIGHT["card"])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.xaxis.set(label_position="top", ticks_position="top")
    middles = np.arange(classes) + 0.5
    axes.set_xticks(middles if named else [], short if named else None)
    axes.set_yticks(middles if named else [], short if named else None)
    if named and longest > 3:
        axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")

    gap = 1 / cell
    shades: dict[tuple[str, float], list[np.ndarray]] = {}
    for row, column in np.argwhere(counts).tolist():
        share, correct = shares[row, column], row == column
        strength = 0.12 + 0.88 * share if correct else 0.15 + 0.85 * math.sqrt(share)
        color = LIGHT["good" if correct else "bad"]
        x, y, width = column + gap, row + gap, 1 - 2 * gap
        if not named:
            corners = [(x, y), (x + width, y), (x + width, y + width), (x, y + width), (x, y)]
            shade = (color, math.ceil(strength * SHADES) / SHADES)
            shades.setdefault(shade, []).append(np.array(corners))
            continue
        rectangle = Rectangle((x, y), width, width, facecolor=color, alpha=strength, lw=0)
        axes.add_patch(rectangle)
        count = int(counts[row, column])
        text = axes.text(
            *(column + 0.5, row + 0.5, f"{count}" if count < 10_000 else f"{count // 1000}k"),
            color=LIGHT["paper" if strength > 0.7 else "ink"],
            fontsize=11 if count < 100 else 9.5 if count < 1000 else 8,
            fontweight="bold" if correct else "normal",
            ha="center",
            va="center_baseline",
        )
        for artist in (rectangle, text):
            set_tooltip(artist, cell_tooltip(names, row, column, count, share))
    for (color, alpha), cells in sorted(shades.items()):
        outline = Outline.make_compound_path(*(Outline(corners) for corners in cells))
        axes.add_patch(PathPatch(outline, facecolor=color, alpha=alpha, lw=0))
    for pair in [] if named else most_confused(counts, MAX_TOOLTIPS):
        row, column = pair.label, pair.predicted
        target = Rectangle((column, row), 1, 1, facecolor=LIGHT["paper"], alpha=0.01, lw=0)
        set_tooltip(target, cell_tooltip(names, row, column, pair.images, shares[row, column]))
        axes.add_patch(target)
    return figure


def cell_tooltip(names: Sequence[str], row: int, column: int, count: int, share: float) -> str:
    predicted = "correct" if row == column else f"predicted as {names[column]}"
    return f"{names[row]} {predicted}: {count:,} ({100 * share:.0f} %)"


@plot_style()
def reliability_diagram(calibration: Calibration) -> Any:
    """Accuracy and mean confidence of each bin, their gap, and a histogram of the predictions."""
    label = f"reliability diagram: ECE {percent(calibration.ece)}"
    figure = new_figure(360, 388, label)
    axes = add_axes(figure, 56, 8, 284, 284)
    histogram = add_axes(figure, 56, 304, 284, 42)
    ticks = [0, 0.25, 0.5, 0.75, 1]
    percents = [f"{100 * tick:.0f} %" for tick in ticks]
    axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    axes.set_xticks(ticks, [])
    axes.set_yticks(ticks, percents)
    axes.grid(False, axis="x")
    histogram.set(xlim=(0, 1), xlabel="confidence", ylabel="count")
    histogram.set_xticks(ticks, percents)
    histogram.set_yticks([])
    histogram.grid(False)
    known = np.isfinite(calibration.accuracy) & np.isfinite(calibration.confidence)
    for number in np.flatnonzero((calibration.counts > 0) & known).tolist():
        low, high = calibration.edges[number : number + 2].tolist()
        count = int(calibration.counts[number])
        accuracy, mean = calibration.accuracy[number], calibration.confidence[number]
        x, width = (low + high) / 2, (high - low) - 0.005
        fade = 0.35 if count < MIN_BIN_COUNT else 1
        color, alpha = (LIGHT["s2"], 0.5) if accuracy > mean else (LIGHT["bad"], 0.45)
        shared, gap = min(accuracy, mean), abs(accuracy - mean)
        bars = [
            *axes.bar(x, shared, width, color=LIGHT["good"], alpha=0.8 * fade),
            *axes.bar(x, gap, width, bottom=shared, color=color, alpha=alpha * fade),
            *axes.plot([x - width / 2, x + width / 2], [mean] * 2, LIGHT["ink"], alpha=fade),
            *histogram.bar(x, count, width, color=LIGHT["soft"], alpha=0.6),
        ]
        tooltip = (
            f"confidence {100 * low:.0f}-{100 * high:.0f} %, mean {percent(mean)}: "
            f"accuracy {percent(accuracy)} (n={count:,})"
        )
        for bar in bars:
            set_tooltip(bar, tooltip)
    axes.plot([0, 1], [0, 1], color=LIGHT["ink"], lw=1.2, ls=(0, (1, 3)), alpha=0.75)
    return figure


@plot_style()
def selective_accuracy_curve(
    selective: SelectiveAccuracy, at_80: float, min_coverage: float = 0.0
) -> Any | None:
    """Accuracy over coverage, from `min_coverage` on; None without a finite point."""
    shown = (selective.coverage >= min_coverage) & np.isfinite(selective.accuracy)
    if not shown.any():
        return None
    overall = selective.at(1.0)
    label = f"selective accuracy: {percent(at_80)} at 80 % coverage, {percent(overall)} overall"
    figure = new_figure(360, 240, label)
    axes = add_axes(figure, 62, 20, 226, 170)
    axes.plot(selective.coverage[shown], selective.accuracy[shown], color=LIGHT["s1"])
    axes.set(xlim=(0, 1), xlabel="coverage", ylabel="accuracy")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.set_xticks([0.2, 0.4, 0.6, 0.8, 1])
    axes.locator_params(axis="y", nbins=5, steps=[1, 2, 5, 10])
    axes.grid(False, axis="x")
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, 1.0) if high > low else high)
    for coverage, accuracy in ((COVERAGE, at_80), (1.0, overall)):
        if not math.isfinite(accuracy):
            continue
        axes.vlines(coverage, axes.get_ylim()[0], accuracy, LIGHT["soft"], (0, (3, 3)), lw=1)
        (point,) = axes.plot(coverage, accuracy, "o", color=LIGHT["s1"], clip_on=False)
        set_tooltip(point, f"{percent(accuracy)} at {100 * coverage:.0f} % coverage")
        axes.annotate(
            percent(accuracy),
            (coverage, accuracy),
            (7, 6 if coverage < 1 else -4),
            textcoords="offset points",
            color=LIGHT["s1"],
            fontweight="bold",
            annotation_clip=False,
        )
    return figure


@plot_style()
def line_chart(
    series: Mapping[str, Points],
    *,
    label: str,
    noisy: Collection[str] = (),
    percentages: bool = False,
    log: bool = False,
) -> Any | None:
    """Lines over training steps with their last values; None without a finite value.

    A y that is not finite is a gap. An empty series is not drawn and keeps its color; noisy ones
    are drawn with their running mean.
    """
    lines = []
    for number, (name, points) in enumerate(series.items()):
        values = thin(np.array(points, float).reshape(-1, 2), positive=log)
        if np.isfinite(values[:, 1]).any():
            lines.append((printable(name), LIGHT[f"s{number % SERIES_COLORS}"], values))
    if not lines:
        return None
    show = percent if percentages else compact_number
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    main = []
    for name, _, points in lines:
        smooth = points
        if name in noisy and len(points) >= MIN_SMOOTHED:  # centered mean over a sixth
            smooth, reach = points.copy(), len(points) // 12
            for index in np.flatnonzero(np.isfinite(points[:, 1])):
                near = min(reach, index)  # less at both ends; gaps stay
                smooth[index, 1] = np.nanmean(points[index - near : index + near + 1, 1])
        main.append(smooth)
    last = [points[np.isfinite(points[:, 1])][-1] for points in main]
    names = [f"{truncate(name, MAX_NAME)} " if len(lines) > 1 else "" for name, _, _ in lines]
    ends = [name + show(y) for name, (_, y) in zip(names, last, strict=True)]
    described = (f"{name} ends at {show(last[n][1])}" for n, (name, _, _) in enumerate(lines))
    figure = new_figure(360, 216, f"{label} by step: {', '.join(described)}")
    axes = add_axes(figure, 48, 10, 300 - 6.8 * max(map(len, ends)), 166)
    for (_, color, points), smooth in zip(lines, main, strict=True):
        if smooth is not points:
            axes.plot(*points.T, color=color, lw=1, alpha=0.35)
        axes.plot(*smooth.T, color=color)
        finite = np.pad(np.isfinite(smooth[:, 1]), 1)
        alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
        dots = smooth if len(points) <= MAX_DOTS else smooth[alone]
        axes.plot(*dots.T, "o", color=color, ms=5, mew=0, clip_on=False)
    steps = max(points[-1, 0] for _, _, points in lines) or 1
    axes.set(xlim=(0, steps), xlabel="step")
    axes.grid(False, axis="x")
    axes.xaxis.set(
        major_locator=MaxNLocator(4, steps=[1, 2, 5, 10], integer=True),
        major_formatter=lambda value, _: compact_number(value),
    )
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        subs = (1, 2, 5) if high < 500 * low else (1,)
        axes.yaxis.set(major_locator=LogLocator(subs=subs, numticks=7), minor_locator=NullLocator())
    else:
        known = np.concatenate([points[:, 1] for _, _, points in lines])
        low, high = float(np.nanmin(known)), float(np.nanmax(known))
        set_y_limits(axes, 0.0 if percentages and low == high else low, high)
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{100 * value:.4g} %" if percentages else compact_number(value)
    )
    add_end_labels(axes, last, ends, [color for _, color, _ in lines])
    edges = np.linspace(0, steps, 1 + min(MAX_INTERVALS, max(len(line[2]) for line in lines)))
    edges[0] = -1  # step 0 is in the first interval
    for low, high in pairwise(edges):
        inside = {
            name: points[(points[:, 0] > low) & (points[:, 0] <= high)] for name, _, points in lines
        }
        shown = {name: points[-1] for name, points in inside.items() if len(points)}
        values = [f"{name} {show(y)}" for name, (_, y) in shown.items() if math.isfinite(y)]
        if values:
            step = max(x for x, _ in shown.values())
            add_tooltip_band(axes, max(low, 0), high, f"step {step:,.0f}: {', '.join(values)}")
    return figure


def thin(points: np.ndarray, *, positive: bool) -> np.ndarray:
    """Average neighbors to at most `MAX_POINTS` points (n, 2), keeping the last one. Values that
    are not finite, or not above 0 if they must be `positive`, become NaN."""
    wrong = ~np.isfinite(points[:, 1]) | (positive & (points[:, 1] <= 0))
    points = np.where(wrong[:, None] & [False, True], math.nan, points)
    if len(points) <= MAX_POINTS:
        return points
    groups = np.array_split(points[:-1], MAX_POINTS - 1)
    return np.stack([*(group.mean(axis=0) for group in groups), points[-1]])


def add_end_labels(
    axes: Any, ends: Sequence[Sequence[float]], texts: Sequence[str], colors: Sequence[str]
) -> None:
    """Write texts beside the last points (x, y) of lines, at least 14 pixels apart."""
    width, height = (72 * inches for inches in axes.figure.get_size_inches())
    places = [axes.transData.transform((float(x), float(y))) for x, y in ends]
    heights = [float(y) for _, y in places]
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for below, above in pairwise(order):
        heights[above] = max(heights[above], heights[below] + 14)
    limit = height - 8.0
    for number in reversed(order):
        heights[number] = min(heights[number], limit)
        limit = heights[number] - 14
    for (x, _), y, text, color in zip(places, heights, texts, colors, strict=True):
        axes.figure.text(
            (x + 7) / width, y / height, text, color=color, fontweight="bold", va="center_baseline"
        )


def add_tooltip_band(axes: Any, low: float, high: float, text: str) -> None:
    """Show a tooltip anywhere between two x."""
    set_tooltip(axes.axvspan(low, high, color=LIGHT["paper"], alpha=0.01, lw=0), text)


def layer_axes(figure: Any, layers: int, width: float, top: float = 10) -> Any:
    """Axes with layers on the x axis, counted from 0."""
    axes = add_axes(figure, 52, top, width, 172)
    axes.set(xlim=(-0.5, layers - 0.5), xlabel="layer")
    axes.set_xticks(range(0, layers, -(-layers // MAX_LAYER_TICKS)))
    axes.grid(False, axis="x")
    return axes


def set_y_limits(axes: Any, low: float, high: float) -> None:
    """Limit the y axis to the ticks that enclose `low` and `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(0.0, 1.5 * low), max(0.0, 1.5 * high) or float(low == 0)
    axes.locator_params(axis="y", nbins=5, steps=[1, 2, 2.5, 5, 10])
    ticks, rounding = axes.yaxis.get_major_locator().tick_values(low, high), 1e-9 * (high - low)
    axes.set_ylim(ticks[ticks <= low + rounding][-1], ticks[ticks >= high - rounding][0])


@plot_style()
def head_plot(
    values: Mapping[str, np.ndarray],
    label: str,
    *,
    show: Callable[[float], str] = compact_number,
    limits: tuple[float, float] | None = None,
    width: float = 360,
) -> Any | None:
    """One dot per head (L, H) above its layer, and the mean of each layer; several variants side by
    side, in colors with a legend. None without a finite value."""
    if not any(np.isfinite(array).any() for array in values.values()):
        return None
    known = np.concatenate([array.ravel() for array in values.values()])
    low, high = np.nanmin(known), np.nanmax(known)
    title = f"{label} by layer, one dot per head: from {show(low)} to {show(high)}"
    top, layers = 28 if len(values) > 1 else 10, max(map(len, values.values()))
    figure = new_figure(width, 212 + top, title)
    axes = layer_axes(figure, layers, width - 60, top)
    beside = min(0.22, 12 * layers / width)  # of a layer, between two variants
    for number, (name, array) in enumerate(values.items()):
        color = LIGHT[f"s{(number + 1) % SERIES_COLORS}"]
        offset = beside * (number - (len(values) - 1) / 2)
        if len(values) == 1 and array.shape[1] > 1:
            axes.plot(range(len(array)), array.mean(axis=1), color=color, alpha=0.45)
        for layer, head in np.argwhere(np.isfinite(array)).tolist():
            value = float(array[layer, head])
            (dot,) = axes.plot(layer + offset, value, "o", color=color, alpha=0.6, ms=7, mew=0)
            set_tooltip(dot, f"layer {layer}, head {head}: {show(value)}")
        if len(values) > 1:
            axes.plot([], [], "o", color=color, ms=7, mew=0, label=printable(name))
    if len(values) > 1:
        axes.set_ylabel(label)
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=len(values),
            frameon=False,
            borderaxespad=0.2,
            handletextpad=0,
            columnspacing=1.2,
        )
    set_y_limits(axes, *(limits or (min(0.0, float(low)), float(high))))
    axes.yaxis.set_major_formatter(lambda value, _: show(value))
    return figure


@plot_style()
def norm_plot(norms: np.ndarray, others: Mapping[str, np.ndarray]) -> Any:
    """Quantiles (L, 5) of the patch tokens' norms as bands around the median; others as lines."""
    from matplotlib.ticker import LogLocator, NullLocator

    lines = {"patches": norms[:, 2], **others}
    label = f"norms of patch tokens by layer: maximum {compact_number(float(norms.max()))}"
    figure = new_figure(360, 222, label)
    axes = layer_axes(figure, len(norms), 290 - 6.8 * max(map(len, lines)))
    layers = np.arange(len(norms))
    axes.fill_between(layers, norms[:, 0], norms[:, 4], color=LIGHT["s1"], alpha=0.1, lw=0)
    axes.fill_between(layers, norms[:, 1], norms[:, 3], color=LIGHT["s1"], alpha=0.28, lw=0)
    colors = [LIGHT[f"s{(number + 1) % SERIES_COLORS}"] for number in range(len(lines))]
    for line, color in zip(lines.values(), colors, strict=True):
        axes.plot(layers, line, color=color, marker="o", ms=4, mew=0)
    known = np.concatenate([norms.ravel(), *others.values()])
    if known.min() > 0 and known.max() >= LOG_NORMS * known.min():
        axes.set_yscale("log")
        locator = LogLocator(subs=(1, 2, 5), numticks=7)
        axes.yaxis.set(major_locator=locator, minor_locator=NullLocator())
    else:
        set_y_limits(axes, 0.0, float(known.max()))
    axes.yaxis.set_major_formatter(lambda value, _: compact_number(value))
    ends = [(layers[-1], line[-1]) for line in lines.values()]
    add_end_labels(axes, ends, list(lines), colors)
    for layer, row in enumerate(norms):
        least, low, median, high, most = map(compact_number, row.tolist())
        text = f"layer {layer}: patches {least} to {most}, half of them {low} to {high}"
        text += f", median {median}"
        text += "".join(f"; {n} {compact_number(line[layer])}" for n, line in others.items())
        add_tooltip_band(axes, layer - 0.5, layer + 0.5, text)
    return figure


@plot_style()
def faithfulness_plot(
    shares: np.ndarray, curves: Mapping[str, np.ndarray], colors: Mapping[str, str], label: str
) -> Any:
    """Probability over the share of pixels inserted or deleted, one line per method in a color of
    the palette; soft ones are dashed."""
    figure = new_figure(360, 222, f"{label}: {', '.join(curves)}")
    axes = add_axes(figure, 52, 10, 290, 172)
    dashes = iter([(0, (1, 2)), (0, (4, 3))])
    for name, values in curves.items():
        soft = {"ls": next(dashes), "lw": 1.5} if colors[name] == "soft" else {}
        axes.plot(shares, values, color=LIGHT[colors[name]], **soft)
    axes.set(xlim=(0, 1), xlabel="share of the pixels")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    set_y_limits(axes, 0.0, max(float(np.nanmax(values)) for values in curves.values()))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.grid(False, axis="x")
    middles = (shares[1:] + shares[:-1]) / 2
    for number, (low, high) in enumerate(pairwise([0, *middles.tolist(), 1])):
        values = ", ".join(f"{name} {percent(c[number])}" for name, c in curves.items())
        add_tooltip_band(axes, low, high, f"{100 * shares[number]:.0f} % of pixels: {values}")
    return figure


@plot_style()
def corruption_chart(rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, str]) -> Any:
    """Accuracy of each corruption and severity as a table of shaded cells; all `metrics`, by key,
    in tooltips."""
    by_cell = {(row["corruption"], row["severity"]): row for row in rows}
    clean = by_cell["clean", 0]["accuracy"]
    names = {name: name.replace("_", " ") for name in CORRUPTIONS}
    height, width = 22 * len(names), 46 * len(SEVERITIES)
    figure = new_figure(150 + width, height + 44, "accuracy by corruption and severity")
    axes = add_axes(figure, 140, 8, width, height)
    axes.set(xlim=(0.5, 5.5), ylim=(len(names) - 0.5, -0.5), xlabel="severity")
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), names.values())
    for number, name in enumerate(names):
        for severity in SEVERITIES:
            row = by_cell[name, severity]
            lost = min(max(1 - row["accuracy"] / max(clean, 1e-9), 0), 1)
            (cell,) = axes.bar(severity, 0.94, 0.96, number - 0.47, color=LIGHT["bad"])
            cell.set_alpha(0.05 + 0.75 * lost)
            text = ", ".join(f"{metric} {percent(row[key])}" for key, metric in metrics.items())
            set_tooltip(cell, f"{names[name]} {severity}: {text}")
            shown = f"{100 * row['accuracy']:.0f}"
            axes.text(severity, number, shown, ha="center", va="center")
    return figure


@plot_style()
def scatter_plot(scatter: "Scatter") -> Any:
    """Features of a dataset in two dimensions, one color per class, names at their medians.

    No axes: only distances between neighbors have a meaning.
    """
    count = len(scatter.classes)
    label = f"{len(scatter.points):,} images of {count:,} classes in two dimensions"
    figure = new_figure(480, 380, label)
    axes = add_axes(figure, 10, 10, 460, 360)
    axes.set_axis_off()
    axes.margins(0.06)
    size = 6 if len(scatter.points) <= 800 else 4
    for number, name in enumerate(map(printable, scatter.classes)):
        points = scatter.points[scatter.labels == number]
        if not len(points):
            continue
        hue = (number / count, (0.5, 0.42, 0.58)[number % 3], 0.65)  # readable on any paper
        color = LIGHT[f"s{number}"] if count <= SERIES_COLORS else colorsys.hls_to_rgb(*hue)
        (dots,) = axes.plot(*points.T, "o", color=color, ms=size, mew=0, alpha=0.7)
        set_tooltip(dots, f"{name}: {len(points):,}")
        if count <= MAX_NAMED_CLASSES:
            axes.text(
                *np.median(points, axis=0),
                truncate(name, 2 * MAX_NAME),
                ha="center",
                va="center",
                fontweight="bold",
                bbox={"boxstyle": "round,pad=0.2", "fc": LIGHT["paper"], "alpha": 0.8, "lw": 0},
            )
    return figure


def set_tooltip(artist: Any, text: str) -> None:
    """Give an artist a text that SVG viewers show on hovering."""
    artist.set_gid(TOOLTIP + text)


def printable(text: str) -> str:
    """Replace what fonts and XML cannot hold: surrogates and control characters."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def inline_svg(figure: Any) -> "Markup":
    """The figure as an element of a page, in the page's colors."""
    from markupsafe import Markup

    width, height = (72 * inches for inches in figure.get_size_inches())
    return Markup(
        f'<svg class="figure" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="--width: {width:.0f}px" role="img" aria-label="{escape(figure.get_label())}">'
        f"{svg_body(figure)}"
    )


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Write `path`.svg, which follows the viewer's color scheme, and `path`.png."""
    svg, png = path.with_name(f"{path.name}.svg"), path.with_name(f"{path.name}.png")
    width, height = (72 * inches for inches in figure.get_size_inches())
    light, dark = (
        "".join(f"--{name}:{color};" for name, color in colors.items()) for colors in (LIGHT, DARK)
    )
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
        f"<title>{escape(figure.get_label())}</title>"
        f"<style>:root{{{light}background:var(--paper)}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "svg{font-family:system-ui,sans-serif;stroke-linejoin:round}</style>"
    )
    write_atomic(svg, start + svg_body(figure) + "\n")
    write_atomic(png, png_bytes(figure))
    return [svg, png]


@plot_style()
def png_bytes(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DPI, facecolor=LIGHT["paper"])
    return buffer.getvalue()


@plot_style()
def svg_body(figure: Any) -> str:
    """What matplotlib draws, as "…</svg>": with CSS variables, tooltips, and no needless bytes."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    root = ElementTree.fromstring(text)
    drawn = [c for c in root if not c.tag.endswith("metadata") and c.find("{*}style") is None]
    names = {color: f"var(--{name})" for name, color in LIGHT.items()}
    for element in (element for child in drawn for element in child.iter()):
        element.tag = element.tag.rpartition("}")[2]
        values = {key.replace(XLINK, "xlink:"): x for key, x in element.attrib.items()}
        name = values.pop("id", "")
        if name.startswith(TOOLTIP):
            title = ElementTree.Element("title")
            title.text = name.removeprefix(TOOLTIP)
            element.insert(0, title)
        elif name in used:
            values["id"] = name
        for key in ("d", "x", "y", "transform"):
            if key in values:
                values[key] = re.sub(r"(?<=\.\d\d)\d+", "", " ".join(values[key].split()))
        if values.get("transform", "").startswith("rotate(-0 "):
            del values["transform"]
        if style := values.get("style"):
            style = re.sub("#[0-9a-f]{6}", lambda m: names.get(m[0], m[0]), style)
            style = style.replace("font-family: 'DejaVu Sans'; ", "")
            values["style"] = re.sub("image-rendering:[a-z-]+;?", "", style)  # scale smoothly
        element.attrib = values
        element.tail = None
        if len(element):
            element.text = None
    return "".join(ElementTree.tostring(child, "unicode") for child in drawn) + "</svg>"
