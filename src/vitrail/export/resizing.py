"""A resize along one axis as a matrix (new, old) that is worked out in the graph.

It follows torch's kernels: the same places, the same filters, the same edges. Sizes are tensors
(1,) of whole numbers, known when the graph runs. Everything is computed in double precision but
the scale, which torch rounds to single precision: so the places are the same to the last bit.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrail.export.graph import DOUBLE, FLOAT, Graph, Value, whole

Filter = Literal["linear", "cubic", "lanczos", "nearest", "area"]
SUPPORT = {"linear": 1.0, "cubic": 2.0, "lanczos": 3.0}  # a filter is 0 beyond
TAPS = {"nearest": [0.0], "linear": [0.0, 1.0], "cubic": [-1.0, 0.0, 1.0, 2.0]}
SLOPE = -0.75  # of torch's cubic filter
ANTIALIAS_SLOPE = -0.5  # the same with antialiasing, as in Pillow


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Which pixels count for a new one, and how much."""

    filter: Filter
    antialias: bool = False  # the filter grows with what it shrinks
    align_corners: bool = False  # the outermost pixels stay where they are


def matrix(graph: Graph, old: Value, new: Value, how: Resize, places: Value | None = None) -> str:
    """The float matrix (new, old); or its rows at some places (n,) of the new line."""
    columns = count(graph, old)  # (old,)
    places = count(graph, new) if places is None else graph("Cast", places, to=DOUBLE)
    places = graph("Unsqueeze", places, whole(1))  # (n, 1)
    old, new = graph("Cast", old, to=DOUBLE), graph("Cast", new, to=DOUBLE)
    if how.filter == "area":
        values = shares(graph, places, columns, old, new)
    elif how.antialias and how.filter != "nearest":
        scale = rounded(graph, graph("Div", old, new))
        center = rounded(graph, graph("Mul", graph("Add", places, exact(0.5)), scale))
        values = window(graph, center, columns, scale, how.filter)
    else:
        center = centers(graph, places, old, new, how)
        values = taps(graph, center, columns, old, how.filter)
    return graph("Cast", values, to=FLOAT)


def centers(graph: Graph, places: str, old: str, new: str, how: Resize) -> str:
    """Where on the old line the new pixels (n, 1) are."""
    if how.align_corners:
        steps = graph("Max", graph("Sub", new, exact(1)), exact(1))
        scale = rounded(graph, graph("Div", graph("Sub", old, exact(1)), steps))
        return rounded(graph, graph("Mul", places, scale))
    scale = rounded(graph, graph("Div", old, new))
    center = graph("Mul", graph("Add", places, exact(0.5)), scale)
    if how.filter != "nearest":
        center = graph("Sub", center, exact(0.5))
    return rounded(graph, center)


def taps(graph: Graph, center: str, columns: str, old: str, filter: Filter) -> str:
    """A few neighbors of each place (n, 1); beyond the edge, the pixel at the edge counts."""
    center = graph("Unsqueeze", center, whole(2))  # (n, 1, 1)
    nearby = torch.tensor(TAPS[filter], dtype=torch.float64)
    neighbors = graph("Add", graph("Floor", center), nearby)  # (n, 1, taps)
    inside = graph("Max", graph("Min", neighbors, graph("Sub", old, exact(1))), exact(0))
    same = graph("Equal", inside, graph("Unsqueeze", columns, whole(1)))  # (n, old, taps)
    counted = graph("Cast", same, to=DOUBLE)
    if filter != "nearest":
        distance = graph("Abs", graph("Sub", center, neighbors))
        counted = graph("Mul", counted, weight(graph, distance, filter, SLOPE))
    return graph("ReduceSum", counted, whole(2), keepdims=0)  # (n, old)


def window(graph: Graph, center: str, columns: str, scale: str, filter: Filter) -> str:
    """All pixels under the filter, which is as wide as a new pixel; their weights sum to 1."""
    distance = graph("Sub", graph("Add", columns, exact(0.5)), center)  # (n, old)
    distance = graph("Abs", graph("Div", distance, graph("Max", scale, exact(1))))
    weights = weight(graph, distance, filter, ANTIALIAS_SLOPE)
    return graph("Div", weights, graph("ReduceSum", weights, whole(1), keepdims=1))


def shares(graph: Graph, places: str, columns: str, old: str, new: str) -> str:
    """The mean of all pixels that a new one covers, wholly or in part."""
    start = graph("Floor", graph("Div", graph("Mul", places, old), new))  # (n, 1)
    after = graph("Div", graph("Mul", graph("Add", places, exact(1)), old), new)
    end = graph("Ceil", after)
    from_start = graph("GreaterOrEqual", columns, start)
    covered = graph("And", from_start, graph("Less", columns, end))  # (n, old)
    return graph("Div", graph("Cast", covered, to=DOUBLE), graph("Sub", end, start))


def weight(graph: Graph, distance: str, filter: Filter, slope: float) -> str:
    """The value of a filter at a distance; `slope` is what cubic filters differ in."""
    d = graph("Min", distance, exact(SUPPORT[filter]))
    if filter == "linear":
        return graph("Sub", exact(1), d)
    if filter == "lanczos":
        return graph("Mul", sinc(graph, d), sinc(graph, graph("Div", d, exact(3))))
    near = polynomial(graph, d, slope + 2, -slope - 3, 0, 1)
    far = polynomial(graph, d, slope, -5 * slope, 8 * slope, -4 * slope)
    return graph("Where", graph("Less", d, exact(1)), near, far)


def polynomial(graph: Graph, x: str, first: float, *others: float) -> str:
    """Its value at x; coefficients from the highest power down."""
    value: Value = exact(first)
    for coefficient in others:
        value = graph("Add", graph("Mul", value, x), exact(coefficient))
    assert isinstance(value, str)
    return value


def sinc(graph: Graph, x: str) -> str:
    turn = graph("Mul", x, exact(torch.pi))
    share = graph("Div", graph("Sin", turn), turn)
    return graph("Where", graph("Equal", x, exact(0)), exact(1), share)


def count(graph: Graph, size: Value) -> str:
    """0, 1, … size - 1, in double precision."""
    number = graph("Squeeze", size, whole(0))
    return graph("Cast", graph("Range", torch.tensor(0), number, torch.tensor(1)), to=DOUBLE)


def rounded(graph: Graph, values: str) -> str:
    """To single precision, as torch has it, and back."""
    return graph("Cast", graph("Cast", values, to=FLOAT), to=DOUBLE)


def exact(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
