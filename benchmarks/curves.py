"""Costs over sizes: the exponent of their growth, and small pictures of it side by side.

Every panel shows how many times as much a cost is as at the smallest size, on the same scale, so
that time and memory of all panels can be compared.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitrail.reports.svg import spread
from vitrail.reproduction.svg import LINE, Scale, colored, document, shape, short, text

WIDTH, ACROSS = 720, 4
PLOT = 150  # height of a panel
LEFT, RIGHT = 40, 34  # room for values at the left and exponents at the right of a panel


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
    """Small multiples on doubly logarithmic axes: measured marks and the fitted power."""
    names = list(dict.fromkeys(curve.what for curves in panels.values() for curve in curves))
    factors = [v for curves in panels.values() for curve in curves for v in curve.times_first]
    parts, cell = legend(names), WIDTH / ACROSS
    tall = PLOT + 4 * LINE
    for number, (title, curves) in enumerate(panels.items()):
        left, top = number % ACROSS * cell, 2 * LINE + number // ACROSS * tall
        parts.append(text(left + 8, top + LINE, title, "head"))
        down = Scale(min(factors), max(factors), top + LINE + PLOT, top + LINE + 12, log=True)
        parts += panel(curves, names, left + LEFT, left + cell - RIGHT, down)
    rows = math.ceil(len(panels) / ACROSS)
    told = ". ".join(
        f"{title}: " + ", ".join(f"{curve.what} {curve.exponent:.2f}" for curve in curves)
        for title, curves in panels.items()
    )
    title = "Times as much as at the smallest size; numbers at the right are exponents"
    return document(WIDTH, 2 * LINE + rows * tall, title, f"Exponents. {told}.", parts)


def legend(names: Sequence[str]) -> list[str]:
    """What the marks stand for, and what the numbers are, above all panels."""
    parts, x = [], 14.0
    for number, name in enumerate(names):
        parts.append(colored(number, [shape(number, x, 12), text(x + 9, 16, name, "end")]))
        x += 36 + 7 * len(name)
    words = "times as much as at the smallest size; at the right: exponents"
    return [*parts, text(WIDTH - 10, 16, words, anchor="end")]


def panel(
    curves: Sequence[Curve], names: Sequence[str], left: float, right: float, down: Scale
) -> list[str]:
    sizes = [size for curve in curves for size in curve.sizes]
    across = Scale(min(sizes), max(sizes), left + 6, right - 6, log=True)
    parts = []
    for power in range(math.ceil(math.log10(down.high) + 1e-9)):
        y = down(10**power)
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        parts.append(text(left - 5, y + 4, short(10**power), anchor="end"))
    for size, anchor in ((min(sizes), "start"), (max(sizes), "end")):
        x = left if anchor == "start" else right
        parts.append(text(x, down.start + LINE + 2, short(size), anchor=anchor))
    ends = [down(curve.times_first[-1]) for curve in curves]
    order = sorted(range(len(curves)), key=ends.__getitem__)
    heights = dict(zip(order, spread([ends[n] for n in order], 14, down.start), strict=True))
    for n, curve in enumerate(curves):
        words = text(right + 2, heights[n] + 4, f"{curve.exponent:.2f}", "end")
        drawn = drawn_curve(curve, names.index(curve.what), across, down)
        parts.append(colored(names.index(curve.what), [*drawn, words]))
    return parts


def drawn_curve(curve: Curve, number: int, across: Scale, down: Scale) -> list[str]:
    """Marks where it was measured, and the fitted power over the sizes that it was fitted to."""
    slope, factor = fit(curve.sizes, curve.times_first)
    ends = curve.sizes[len(curve.sizes) // 2], curve.sizes[-1]
    line = "L".join(f"{across(x):.1f} {down(factor * x**slope):.1f}" for x in ends)
    marks = [
        shape(number, across(x), down(y), f"{curve.what} at {short(x)}: {cost:.3g} {curve.unit}")
        for x, y, cost in zip(curve.sizes, curve.times_first, curve.medians, strict=True)
    ]
    return [f'<path class="line" d="M{line}"/>', *marks]
