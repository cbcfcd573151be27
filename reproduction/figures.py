"""All charts, drawn with matplotlib, which is imported on first use."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from vitrail.reports.html import compact_number

COLORS = ("#1d5bbf", "#c2410c", "#0f766e", "#8b2fc9", "#8a5a06", "#be185d", "#4d7c0f", "#475569")
MARKERS = "osD^vPX*"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "vitrail",  # equal figures are equal files
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dfe2e6",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "legend.frameon": False,
}


class Point(NamedTuple):
    """A value between 0 and 1, with its half CI if it has one."""

    x: float
    y: float
    half: float = 0.0


Lines = Mapping[str, Sequence[Point]]  # name → points from left to right


def line_chart(panels: Sequence[tuple[Mapping[str, Any], Lines]]) -> bytes:
    """Return curves with 95 % CIs as SVG; a name has one color and marker in all panels.

    The texts of a panel are `title`, `x_label` and `y_label`; `log_x` and `joined` may be false.
    """
    names = list(dict.fromkeys(name for _, lines in panels for name in lines))
    handles, short = {}, lambda value, _: compact_number(value)
    with new_figure(len(panels), 3.8 * len(panels) + 0.6, 3.6) as (figure, axes):
        for axis, (panel, lines) in zip(axes, panels, strict=True):
            if panel.get("log_x", True):
                axis.set_xscale("log", subs=[2, 5])
                axis.xaxis.set(major_formatter=short, minor_formatter=short)
            for name, points in lines.items():
                number, half = names.index(name), [100 * point.half for point in points]
                handles[name] = axis.errorbar(
                    [point.x for point in points],
                    [100 * point.y for point in points],
                    yerr=half if any(half) else None,
                    color=COLORS[number % len(COLORS)],
                    marker=MARKERS[number % len(MARKERS)],
                    linestyle="-" if panel.get("joined", True) else "none",
                    markersize=5,
                    capsize=3,
                )
            axis.set(
                title=panel["title"], xlabel=panel["x_label"], ylabel=f"{panel['y_label']} (%)"
            )
        columns = min(3 * len(panels), len(names))
        figure.legend([*handles.values()], [*handles], loc="outside upper center", ncols=columns)
        return to_svg(figure)


def dot_chart(columns: Mapping[str, Mapping[str, Point]]) -> bytes:
    """Return values with 95 % CIs as SVG: column title → row name → value."""
    rows = list(dict.fromkeys(name for points in columns.values() for name in points))
    size = (3.6 * len(columns) + 1.4, 0.28 * len(rows) + 1.1)
    with new_figure(len(columns), *size) as (figure, axes):
        for axis, (title, points) in zip(axes, columns.items(), strict=True):
            values, half = ([100 * point[i] for point in points.values()] for i in (1, 2))
            style = {"fmt": "o", "color": COLORS[0], "markersize": 5, "capsize": 3}
            places = [rows.index(name) for name in points]
            axis.errorbar(values, places, xerr=half if any(half) else None, **style)
            axis.set(title=title, xlabel="accuracy (%)", ylim=(len(rows) - 0.5, -0.5))
            axis.set_yticks(range(len(rows)), rows if axis is axes[0] else [""] * len(rows))
        return to_svg(figure)


@contextmanager
def new_figure(columns: int, width: float, height: float) -> Iterator[tuple[Any, Sequence[Any]]]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(1, columns, squeeze=False)[0]


def to_svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
