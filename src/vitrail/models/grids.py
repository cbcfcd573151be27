"""Stretching a table of vectors from one grid to another, and keeping the result.

A resize along one axis is a matrix (new, old), so a resize of a grid is two matrix products,
whatever the method: exact, differentiable, and exportable.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.config import ResizeMethod

# google is scipy.ndimage.zoom(order=1), which keeps the corners where they are. The other three
# are what each library does when a loaded model meets another image size; bilinear is timm's
# loader of Google files, flexivit what big_vision's FlexiViT does.
METHODS: dict[ResizeMethod, dict[str, Any]] = {
    "google": {"mode": "bilinear", "align_corners": True},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "transformers": {"mode": "bicubic", "align_corners": False},
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "bilinear": {"mode": "bilinear", "align_corners": False},
    "flexivit": {"mode": "bilinear", "align_corners": False, "antialias": True},
}


def resize_grid(table: Tensor, grid: tuple[int, int], method: ResizeMethod = "google") -> Tensor:
    """A table of vectors (h, w, D) on another grid (h', w')."""
    height, width = grid
    down = interpolation(table.shape[0], height, method, like=table)  # (h', h)
    across = interpolation(table.shape[1], width, method, like=table)  # (w', w)
    rows = (down @ table.flatten(1)).unflatten(1, table.shape[1:])  # (h', w, D)
    return across @ rows  # (h', w', D)


def resize_line(table: Tensor, length: int, method: ResizeMethod = "google") -> Tensor:
    """A row of vectors (n, D) at another length (n', D)."""
    return interpolation(len(table), length, method, like=table) @ table


def interpolation(old: int, new: int, method: ResizeMethod, *, like: Tensor) -> Tensor:
    """The (new, old) matrix of a resize along one axis, with the dtype and device of `like`.

    It is what the method makes of the unit matrix, stretched along its rows; asking torch itself
    means that it agrees with torch's kernels to the last bit. (Not with one column at a time:
    torch's antialiasing kernel is wrong for pictures that are one pixel wide.)
    """
    unit = torch.eye(old, dtype=like.dtype, device=like.device)
    return F.interpolate(unit[None, None], (new, old), **METHODS[method])[0, 0]


class Kept:
    """Remembers the last value made from a parameter, for as long as the parameter is unchanged.

    Nothing is kept while gradients flow through the parameter (each step needs its own graph) or
    while a compiler looks on (it must see the computation, not its result).
    """

    def __init__(self) -> None:
        self.key: Hashable = None
        self.source: Tensor | None = None
        self.value: Tensor | None = None

    def get(self, source: Tensor | None, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, or what it gave last time if `source` and `key` are the same."""
        if torch.compiler.is_compiling():
            return make()
        if source is not None:
            if source.is_inference() or (torch.is_grad_enabled() and source.requires_grad):
                return make()
            key = (key, source._version, source.dtype, source.device)
        if self.value is None or self.source is not source or self.key != key:
            with torch.inference_mode(False), torch.no_grad():  # usable in any later mode
                self.key, self.source, self.value = key, source, make()
        return self.value
