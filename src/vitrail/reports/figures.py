"""Static plots by matplotlib: one function per plot, in one style.

    figure = reliability_diagram(result.calibration)
    inline_svg(figure)                       for a page: follows the page's colors
    save_figure(figure, folder / "ece")      ece.svg and ece.png

Plots are drawn in the colors of `LIGHT`. In SVG they become CSS variables, so that the same file is
readable in light and dark mode; a PNG is always light. Sizes are in pixels at 72 dpi.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from vitrail.data.storage import atomic_path, write_atomic
from vitrail.evaluation.metrics import COVERAGE, most_confused
from vitrail.evaluation.results import Calibration, SelectiveAccuracy
from vitrail.formatting import percent, truncate

if TYPE_CHECKING:
    from markupsafe import Markup

# The palette of all pages and plots. Colors of LIGHT are distinct: SVGs find them by value.
LIGHT = {
    "ink": "#1d1d1f",
    "paper": "#ffffff",
    "soft": "#6b6b70",
    "line": "#dddddd",
    "card": "#f5f5f4",
    "accent": "#9a3412",
    "good": "#0f766f",
    "bad": "#c2410c",
    "track": "#ecebe9",
    "s0": "#9a3413",
    "s1": "#0f766e",
    "s2": "#4f46e5",
    "s3": "#a16207",
    "s4": "#be185d",
}
DARK = {
    "ink": "#e8e8ea",
    "paper": "#161618",
    "soft": "#a0a0a6",
    "line": "#38383c",
    "card": "#212124",
    "accent": "#fdba74",
    "good": "#2dd4bf",
    "bad": "#fb923c",
    "track": "#2c2c30",
    "s0": "#fdba74",
    "s1": "#5eead4",
    "s2": "#a5b4fc",
    "s3": "#fde68a",
    "s4": "#f9a8d4",
}
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
    "text.parse_math": False,  # class names are text, whatever is in them
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
MIN_BIN_COUNT = 10  # predictions below which a bin of the reliability diagram is pale


@contextmanager
def plot_style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # SVG viewers have the fonts
        yield


def new_figure(width: float, height: float, label: str) -> Any:
    """An empty figure of so many pixels; `label` describes it to screen readers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72))
    figure.set_label(label)
    return figure


def add_axes(figure: Any, left: float, top: float, width: float, height: float) -> Any:
    """Axes at so many pixels from the figure's upper left corner."""
    wide, high = (72 * inches for inches in figure.get_size_inches())
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def confusion_matrix(confusion: np.ndarray, names: Sequence[str]) -> Any:
    """Counts (K, K); rows are labels, columns predictions, colors the share of the row.

    Beyond `MAX_NAMED` classes cells have no numbers, beyond `MAX_DRAWN` only the most confused
    classes are drawn.
    """
    with plot_style():
        from matplotlib.patches import PathPatch, Rectangle
        from matplotlib.path import Path as Outline

        shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
        shown = np.arange(len(confusion))
        if len(confusion) > MAX_DRAWN:
            shown = most_confused_classes(confusion, MAX_NAMED)
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


def most_confused_classes(confusion: np.ndarray, count: int) -> np.ndarray:
    """Classes of the most confused pairs, in the order of classes."""
    chosen: set[int] = set()
    for pair in most_confused(confusion, count * count):
        if len(chosen | {pair.label, pair.predicted}) <= count:
            chosen |= {pair.label, pair.predicted}
    return np.array(sorted(chosen) or range(count))


def cell_tooltip(names: Sequence[str], row: int, column: int, count: int, share: float) -> str:
    predicted = "correct" if row == column else f"predicted as {names[column]}"
    return f"{names[row]} {predicted}: {count:,} ({100 * share:.0f} %)"


def reliability_diagram(calibration: Calibration) -> Any:
    """Accuracy and mean confidence of each bin, their gap, and a histogram of the predictions."""
    with plot_style():
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


def selective_accuracy_curve(
    selective: SelectiveAccuracy, at_80: float, min_coverage: float = 0.0
) -> Any | None:
    """Accuracy over coverage, from `min_coverage` on; None without a finite point."""
    shown = (selective.coverage >= min_coverage) & np.isfinite(selective.accuracy)
    if not shown.any():
        return None
    with plot_style():
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
    start = (
        f'<svg class="figure" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="--width: {width:.0f}px" role="img" aria-label="{escape(figure.get_label())}">'
    )
    return Markup(start + svg_body(figure))


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
    with plot_style(), atomic_path(png) as temporary:
        figure.savefig(temporary, format="png", dpi=PNG_DPI, facecolor=LIGHT["paper"])
    return [svg, png]


def svg_body(figure: Any) -> str:
    """What matplotlib draws, as "…</svg>": with CSS variables, tooltips, and no needless bytes."""
    buffer = io.StringIO()
    with plot_style():
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
        if style := values.get("style"):
            style = re.sub("#[0-9a-f]{6}", lambda m: names.get(m[0], m[0]), style)
            values["style"] = style.replace("font-family: 'DejaVu Sans'; ", "")
        element.attrib = values
        element.tail = None
        if len(element):
            element.text = None
    return "".join(ElementTree.tostring(child, "unicode") for child in drawn) + "</svg>"
