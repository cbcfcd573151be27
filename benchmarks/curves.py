"""Costs over sizes: the exponent of their growth, and charts of it side by side.

Every panel shows the cost relative to that of the smallest size, on the same scale, so that time
and memory of all panels can be compared.
"""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ACROSS = 4  # panels
COLORS = ("#1d5bbf", "#c2410c", "#0f766e", "#8b2fc9")


@dataclass(frozen=True)
class Curve:
    """What one kind of cost was at each size, in each round."""

    what: str
    sizes: Sequence[float]
    rounds: Sequence[Sequence[float]]  # a list over sizes for each round
    unit: str

    @property
    def medians(self) -> list[float]:
        return [statistics.median(costs) for costs in zip(*self.rounds, strict=True)]

    @property
    def times_first(self) -> list[float]:
        return [cost / self.medians[0] for cost in self.medians]

    @property
    def exponent(self) -> float:
        return exponent(self.sizes, self.medians)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost over log size, by least squares, over the larger half of the sizes."""
    return fit(sizes, costs)[0]


def fit(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Exponent and factor of the power that fits the larger half of the sizes best."""
    half = len(sizes) // 2
    x, y = ([math.log(value) for value in values[half:]] for values in (sizes, costs))
    slope, intercept = statistics.linear_regression(x, y)
    return slope, math.exp(intercept)


def drawing(panels: Mapping[str, Sequence[Curve]]) -> str:
    """Return small multiples on log-log axes as SVG: measurements and the fitted power."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(curve.what for curves in panels.values() for curve in curves))
    rows = math.ceil(len(panels) / ACROSS)
    style = {"svg.fonttype": "none", "svg.hashsalt": "vitrail", "font.size": 8, "axes.grid": True}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(2.4 * ACROSS, 2.2 * rows + 0.5), layout="constrained")
        axes = figure.subplots(rows, ACROSS, squeeze=False, sharey=True).flat
        handles = {}
        for axis, (title, curves) in zip(axes, panels.items(), strict=False):
            for curve in curves:
                number = names.index(curve.what)
                marks = {"color": COLORS[number % len(COLORS)], "marker": "osD^"[number % 4]}
                (handles[curve.what],) = axis.loglog(
                    curve.sizes, curve.times_first, linestyle="none", markersize=4, **marks
                )
                slope, factor = fit(curve.sizes, curve.times_first)
                ends = [curve.sizes[len(curve.sizes) // 2], curve.sizes[-1]]
                axis.loglog(ends, [factor * x**slope for x in ends], color=marks["color"])
            exponents = ", ".join(f"{curve.exponent:.2f}" for curve in curves)
            axis.set_title(f"{title}\nexponents {exponents}")
        for axis in list(axes)[len(panels) :]:
            axis.set_axis_off()
        figure.supylabel("cost relative to the smallest size")
        figure.legend([*handles.values()], [*handles], loc="outside upper center", ncols=len(names))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
