"""Stretching a table of vectors from one grid to another.

A resize along one axis is a matrix (new, old), so a resize of a grid is two matrix products,
whatever the method: exact, differentiable, and exportable.
"""

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
    with torch.autocast(table.device.type, enabled=False):
        exact = table.to(at_least_float32(table))
        down = interpolation(table.shape[0], grid[0], method, like=exact)  # (h', h)
        across = interpolation(table.shape[1], grid[1], method, like=exact)  # (w', w)
        rows = (down @ exact.flatten(1)).unflatten(1, table.shape[1:])  # (h', w, D)
        return (across @ rows).to(table.dtype)  # (h', w', D)


def resize_line(table: Tensor, length: int, method: ResizeMethod = "google") -> Tensor:
    """A row of vectors (n, D) at another length (n', D)."""
    with torch.autocast(table.device.type, enabled=False):
        exact = table.to(at_least_float32(table))
        return (interpolation(len(table), length, method, like=exact) @ exact).to(table.dtype)


def at_least_float32(table: Tensor) -> torch.dtype:
    """The type to compute in: a table is resized once, and half precision would show."""
    return torch.promote_types(table.dtype, torch.float32)


def interpolation(old: int, new: int, method: ResizeMethod, *, like: Tensor) -> Tensor:
    """The (new, old) matrix of a resize along one axis, with the dtype and device of `like`.

    It is what the method makes of the unit matrix, stretched along its rows; asking torch itself
    means that it agrees with torch's kernels to the last bit. (Not with one column at a time:
    torch's antialiasing kernel is wrong for pictures that are one pixel wide.)
    """
    unit = torch.eye(old, dtype=like.dtype, device=like.device)
    return F.interpolate(unit[None, None], (new, old), **METHODS[method])[0, 0]
