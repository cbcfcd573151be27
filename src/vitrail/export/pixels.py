"""Preprocessing inside the graph: pixels of any size → what the model takes.

It follows `EvalTransform`: two matrix products resize, rows that would be cut away are not
computed, and values are rounded where torch's kernels for bytes round.

Shapes: B images, C channels, H x W pixels before, h x w after.
"""

import torch

from vitrail.data.preprocessing import Interpolation, Preprocessing
from vitrail.errors import ConfigError
from vitrail.export import layers
from vitrail.export.graph import FLOAT, Graph, Value, real, whole
from vitrail.export.resizing import Filter, Resize, matrix

FILTERS: dict[Interpolation, Filter] = {
    "nearest": "nearest",
    "bilinear": "linear",
    "bicubic": "cubic",
    "lanczos": "lanczos",
    "area": "area",
}


def prepared(graph: Graph, pixels: str, how: Preprocessing) -> str:
    """Bytes (B, H, W, C) → normalized floats (B, C, h, w)."""
    graph.part = "pixels"
    height, width = (layers.size(graph, pixels, axis) for axis in (1, 2))
    tall, wide = resized_to(graph, height, width, how)
    images = graph("Transpose", pixels, perm=[0, 3, 1, 2])
    images = graph("Cast", images, to=FLOAT)  # (B, C, H, W)
    resize = resize_of(how)
    across = rows(graph, width, wide, how.size[1], resize)  # (w, W)
    images = graph("MatMul", images, graph("Transpose", across, perm=[1, 0]))  # (B, C, H, w)
    if resize.antialias:
        images = to_levels(graph, images, up=True)
    down = rows(graph, height, tall, how.size[0], resize)  # (h, H)
    images = to_levels(graph, graph("MatMul", down, images), up=resize.antialias)
    mean, std = (torch.tensor(each)[:, None, None] for each in (how.mean, how.std))
    return graph("Sub", graph("Mul", images, 1 / (255 * std)), mean / std)


def resize_of(how: Preprocessing) -> Resize:
    filter = FILTERS[how.interpolation]
    if filter == "lanczos" and not how.antialias:
        raise ConfigError("lanczos without antialiasing does not exist; use bicubic")
    smooth = filter in ("linear", "cubic", "lanczos")  # torch antialiases no others
    return Resize(filter=filter, antialias=how.antialias and smooth)


def resized_to(graph: Graph, height: str, width: str, how: Preprocessing) -> tuple[Value, Value]:
    """Rows and columns after the resize, before the middle is cut out."""
    target = how.resize_to or how.size
    if how.resize == "direct":
        return whole(target[0]), whole(target[1])
    short = whole(min(target))

    def longer(side: str, other: str) -> str:
        """The short side, or as much more as the picture's shape asks for."""
        return graph("Max", graph("Div", graph("Mul", side, short), other), short)

    return longer(height, width), longer(width, height)


def rows(graph: Graph, old: str, new: Value, kept: int, how: Resize) -> str:
    """The matrix (kept, old) of a resize to `new`, of which the middle is kept.

    Where less than `kept` is there, rows of zeros on both sides make up for it: black.
    """
    difference = graph("Sub", new, whole(kept))
    half = graph("Div", graph("Cast", difference, to=FLOAT), real(2))
    short = graph("Less", half, real(0))
    start = graph("Where", short, graph("Ceil", half), graph("Round", half))
    places = graph("Add", torch.arange(kept, dtype=torch.float32), start)  # (kept,)
    values = matrix(graph, old, new, how, places)
    last = graph("Sub", graph("Cast", new, to=FLOAT), real(1))
    below = graph("GreaterOrEqual", places, real(0))
    inside = graph("And", below, graph("LessOrEqual", places, last))
    inside = graph("Unsqueeze", inside, whole(1))  # (kept, 1)
    return graph("Where", inside, values, real(0))


def to_levels(graph: Graph, images: str, *, up: bool) -> str:
    """Whole numbers from 0 to 255; a half goes up, or to the even neighbor."""
    rounded = graph("Floor", graph("Add", images, real(0.5))) if up else graph("Round", images)
    return graph("Max", graph("Min", rounded, real(255)), real(0))
