"""The MLP of a transformer block, and GELU (Hendrycks & Gimpel 2016) with a fast CPU path.

The tanh approximation, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), equals x s
with s = sigmoid(2 u), and a sigmoid takes a third of the time of a tanh. Its derivative,
s + y (1 - s) (2 u)', is cheap while s is in cache, so the forward pass computes it and the backward
pass is a single multiplication; saving it takes as much memory as saving x.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from vitrail.models.config import Gelu, MlpKind, Numerics
from vitrail.models.memory import can_overwrite, is_tracing

LINEAR = 2 * math.sqrt(2 / math.pi)  # 2 u = LINEAR x + CUBIC x^3
CUBIC = LINEAR * 0.044715
CHUNK = 2**18  # elements processed at a time, so that intermediate values stay in cache


class Mlp(nn.Module):
    """Two dense layers with a GELU in between, applied to each token."""

    def __init__(self, width: int, hidden: int, numerics: Numerics, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.gelu: Gelu = numerics.gelu

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.fc1(tokens)
        hidden = gelu(hidden, self.gelu, inplace=can_overwrite(hidden, self.fc1))
        return self.fc2(self.dropout(hidden))


class SwiGlu(nn.Module):
    """Gated MLP (Shazeer 2020), as in DINOv2's ViT-g: the first half of fc1 is the gate."""

    def __init__(self, width: int, hidden: int, numerics: Numerics, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, value = self.fc1(tokens).chunk(2, dim=-1)
        return self.fc2(self.dropout(F.silu(gate) * value))


MLPS: dict[MlpKind, type[Mlp] | type[SwiGlu]] = {"gelu": Mlp, "swiglu": SwiGlu}


def gelu(x: Tensor, kind: Gelu, *, inplace: bool = False) -> Tensor:
    """GELU, computed in place where possible if `inplace`.

    Falls back to torch's operator for tracing and function transforms, which need a single
    operation, and for other devices and dtypes, where it is as fast.
    """
    transformed = (
        is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or type(x) is not Tensor
    )
    if transformed or not x.is_cpu or x.dtype != torch.float32 or not x.is_contiguous():
        return F.gelu(x, approximate="tanh" if kind == "tanh" else "none")
    if kind == "exact":
        return torch.ops.aten.gelu_(x) if inplace else F.gelu(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return TanhGelu.apply(x)
    return tanh_gelu(x, x if inplace else torch.empty_like(x))


def tanh_gelu(x: Tensor, y: Tensor, slope: Tensor | None = None) -> Tensor:
    """Write GELU of `x` into `y`, which may be `x`, and its derivative into `slope`."""
    linear = x.new_tensor(LINEAR)
    s = x.new_empty(min(CHUNK, x.numel()))
    for start in range(0, x.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        x_chunk, y_chunk = x.view(-1)[chunk], y.view(-1)[chunk]
        s = s[: x_chunk.numel()]
        torch.addcmul(linear, x_chunk, x_chunk, value=CUBIC, out=s).mul_(x_chunk).sigmoid_()
        if slope is None:
            torch.mul(x_chunk, s, out=y_chunk)
            continue
        d = slope.view(-1)[chunk]
        torch.addcmul(linear, x_chunk, x_chunk, value=3 * CUBIC, out=d)  # (2 u)'
        torch.mul(x_chunk, s, out=y_chunk)
        d.mul_(y_chunk).addcmul_(d, s, value=-1).add_(s)
    return y


class TanhGelu(torch.autograd.Function):
    """`tanh_gelu` with a first derivative; differentiating twice raises an error."""

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
