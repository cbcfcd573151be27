"""GELU (Hendrycks & Gimpel 2016), with its tanh approximation as fast as a CPU can have it.

The authors' networks use y = x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3). That
is x s with s = sigmoid(2 u), and a sigmoid costs a third of what a tanh costs. The derivative,
s + y (1 - s) (2 u)', is cheap while s is at hand, so the forward pass makes it and the backward
pass only multiplies: as much memory as remembering x, and nothing is computed twice.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from vitrail.models.config import Gelu
from vitrail.models.kept import watched

LINEAR = 2 * math.sqrt(2 / math.pi)  # 2 u = LINEAR x + CUBIC x^3
CUBIC = LINEAR * 0.044715
CHUNK = 2**18  # values worked on at a time, so that all steps but the first find them in the cache


def gelu(x: Tensor, kind: Gelu, *, reuse: bool = False) -> Tensor:
    """GELU, if `reuse` in the memory of `x`.

    Torch's own operations are used where a compiler or a transform must see a single one, and on
    other devices and types, where they are as good.
    """
    special = (
        watched()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or type(x) is not Tensor
    )
    if special or not x.is_cpu or x.dtype != torch.float32 or not x.is_contiguous():
        return F.gelu(x, approximate="tanh" if kind == "tanh" else "none")
    if kind == "exact":
        return torch.ops.aten.gelu_(x) if reuse else F.gelu(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return TanhGelu.apply(x)
    return tanh_gelu(x, x if reuse else torch.empty_like(x))


def tanh_gelu(x: Tensor, y: Tensor, slope: Tensor | None = None) -> Tensor:
    """Write GELU of `x` into `y`, which may be `x`, and its derivative into `slope`."""
    linear = x.new_tensor(LINEAR)
    s = x.new_empty(min(CHUNK, x.numel()))
    for start in range(0, x.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        x_part, y_part = x.view(-1)[part], y.view(-1)[part]
        s = s[: x_part.numel()]
        torch.addcmul(linear, x_part, x_part, value=CUBIC, out=s).mul_(x_part).sigmoid_()
        if slope is None:
            torch.mul(x_part, s, out=y_part)
            continue
        d = slope.view(-1)[part]
        torch.addcmul(linear, x_part, x_part, value=3 * CUBIC, out=d)  # (2 u)'
        torch.mul(x_part, s, out=y_part)
        d.mul_(y_part).addcmul_(d, s, value=-1).add_(s)
    return y


class TanhGelu(torch.autograd.Function):
    """`tanh_gelu` with gradients; of gradients there are none, and asking for them is an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        slope = torch.empty_like(x)
        ctx.save_for_backward(slope)
        return tanh_gelu(x, torch.empty_like(x), slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slope,) = ctx.saved_tensors
        return grad * slope
