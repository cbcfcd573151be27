"""Position embeddings as ONNX operations, for a grid that is known only when the graph runs.

The kinds are those of `models/pos_embed.py`. A table is stretched by two matrix products, as there;
the matrices are worked out once and used for every layer.

Shapes: h x w patches, P tokens before them, T = P + h * w, D width, H heads, K channels per head.
"""

import torch
from torch import Tensor, nn

from vitrail.export import layers, resizing
from vitrail.export.graph import FLOAT, Graph, whole
from vitrail.export.resizing import Resize
from vitrail.models.config import ResizeMethod
from vitrail.models.pos_embed import (
    RESIZE_METHODS,
    TEMPERATURE,
    Learned2dPosEmbed,
    LearnedPosEmbed,
    NoPosEmbed,
    RelativePosEmbed,
    SinCos2dPosEmbed,
)


class Positions:
    """What the graph knows about places: the grid of the patches (B, h, w, D), and matrices."""

    def __init__(self, graph: Graph, patches: str) -> None:
        self.graph = graph
        self.rows = layers.size(graph, patches, 1)  # h, a tensor (1,)
        self.columns = layers.size(graph, patches, 2)  # w
        self.matrices: dict[tuple[str, int, ResizeMethod], str] = {}
        self.line: str | None = None  # how many relative offsets there are
        self.chosen: str | None = None  # which of them each pair of tokens has

    def placed(self, tokens: str, module: nn.Module) -> str:
        """Tokens (B, T, D) with their positions."""
        match module:
            case NoPosEmbed():
                return tokens
            case LearnedPosEmbed():
                table, prefix = self.learned(module), module.table[: module.prefix]
            case Learned2dPosEmbed():
                table, prefix = self.learned_2d(module), module.prefix
            case SinCos2dPosEmbed():
                table, prefix = self.sines(module), torch.zeros(module.prefix, module.width)
            case _:
                raise AssertionError(f"{type(module).__name__} has no words in ONNX yet")
        if len(prefix):
            table = self.graph("Concat", prefix, table, axis=0)
        return self.graph("Add", tokens, table)

    def learned(self, module: LearnedPosEmbed) -> str:
        """The table of the patches on this grid: (h * w, D)."""
        graph, (height, width) = self.graph, module.grid
        patches = module.table[module.prefix :].unflatten(0, module.grid)  # (h, w, D)
        down = self.matrix(height, self.rows, module.method)
        across = self.matrix(width, self.columns, module.method)
        tall = graph("MatMul", down, patches.flatten(1))  # (h', w * D)
        tall = graph("Reshape", tall, whole(-1, width, patches.shape[2]))
        return graph("Reshape", graph("MatMul", across, tall), whole(-1, patches.shape[2]))

    def learned_2d(self, module: Learned2dPosEmbed) -> str:
        graph, (height, width) = self.graph, module.grid
        across = graph(
            "MatMul", self.matrix(width, self.columns, module.method), module.columns
        )  # (w', D / 2)
        down = graph("MatMul", self.matrix(height, self.rows, module.method), module.rows)
        return self.crossed(across, down)

    def sines(self, module: SinCos2dPosEmbed) -> str:
        quarter = module.width // 4
        exponents = torch.arange(quarter, dtype=torch.float64) / max(1, quarter - 1)
        waves = TEMPERATURE**-exponents  # (D / 4,)
        return self.crossed(self.wave(self.columns, waves), self.wave(self.rows, waves))

    def wave(self, size: str, waves: Tensor) -> str:
        """Sines and cosines of each place on a line: (n, D / 2)."""
        graph = self.graph
        places = graph("Unsqueeze", resizing.count(graph, size), whole(1))
        angles = graph("Mul", places, waves)  # (n, D / 4)
        both = graph("Concat", graph("Sin", angles), graph("Cos", angles), axis=1)
        return graph("Cast", both, to=FLOAT)

    def crossed(self, across: str, down: str) -> str:
        """Vectors of columns (w, d) and rows (h, d) side by side for each place: (h * w, 2 d)."""
        graph = self.graph
        shape = graph("Concat", self.rows, self.columns, whole(1), axis=0)
        across = graph("Expand", across, shape)  # (h, w, d)
        down = graph("Expand", graph("Unsqueeze", down, whole(1)), shape)
        both = graph("Concat", across, down, axis=2)
        size = graph("Shape", both, start=2, end=3)
        return graph("Reshape", both, graph("Concat", whole(-1), size, axis=0))

    def matrix(self, old: int, new: str, method: ResizeMethod) -> str:
        """The matrix that stretches a line of `old` to `new`; each is in the graph once."""
        key = (new, old, method)
        if key not in self.matrices:
            self.matrices[key] = resizing.matrix(self.graph, whole(old), new, resize_of(method))
        return self.matrices[key]

    def scores(self, query: str, module: nn.Module) -> str:
        """What relative positions add to attention (B, H, M, T) of queries (B, H, M, K)."""
        assert isinstance(module, RelativePosEmbed)
        graph = self.graph
        offsets, prefix = module.table.tensor_split([2 * module.patches - 1])
        keys = self.matrix(len(offsets), self.length(), module.method)
        keys = graph("MatMul", keys, offsets)  # (2 h * w - 1, K)
        if len(prefix):
            keys = graph("Concat", keys, prefix, axis=0)
        scores = graph("MatMul", query, graph("Transpose", keys, perm=[1, 0]))  # (B, H, M, R)
        queries = layers.size(graph, query, 2)
        chosen = graph("Slice", self.offsets(module.prefix), whole(0), queries, whole(0))  # (M, T)
        shape = graph("Concat", graph("Shape", scores, end=3), whole(1), axis=0)
        return graph("GatherElements", scores, graph("Expand", chosen, shape), axis=-1)

    def length(self) -> str:
        """How many offsets there are between patches, 2 h * w - 1: a tensor (1,)."""
        if self.line is None:
            patches = self.graph("Mul", self.rows, self.columns)
            self.line = self.graph("Sub", self.graph("Mul", patches, whole(2)), whole(1))
        return self.line

    def offsets(self, prefix: int) -> str:
        """Which key belongs to each pair of tokens: (T, T). The last three are the prefix's."""
        if self.chosen is not None:
            return self.chosen
        graph, first = self.graph, self.length()
        patches = graph("Mul", self.rows, self.columns)
        total = graph("Squeeze", graph("Add", patches, whole(prefix)), whole(0))
        place = graph("Range", torch.tensor(0), total, torch.tensor(1))
        place = graph("Sub", place, whole(prefix))  # below zero for what is no patch
        here, there = graph("Unsqueeze", place, whole(1)), place
        between = graph("Add", graph("Sub", here, there), graph("Sub", patches, whole(1)))
        no_patch = [graph("Less", each, whole(0)) for each in (here, there)]
        both = graph("Where", no_patch[1], graph("Add", first, whole(2)), first)
        neither = graph("Where", no_patch[1], graph("Add", first, whole(1)), between)
        self.chosen = graph("Where", no_patch[0], both, neither)
        return self.chosen


def resize_of(method: ResizeMethod) -> Resize:
    """What `models/pos_embed.py` asks torch for."""
    how = RESIZE_METHODS[method]
    return Resize(
        filter="linear" if how["mode"] == "bilinear" else "cubic",
        antialias=how.get("antialias", False),
        align_corners=how["align_corners"],
    )
