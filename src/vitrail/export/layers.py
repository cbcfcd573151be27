"""The layers of our models as ONNX operations: dense layers, norms, attention, convolutions.

What is constant once training is over is worked out here and not in the graph: standardized
kernels, the scale of attention scores, LayerScale.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head, h x w cells.
"""

import torch
from torch import Tensor, nn

from vitrail.export.graph import FLOAT, Graph, Value, whole
from vitrail.models.encoder import Branch, Mlp, SwiGlu
from vitrail.models.resnet import StandardizedConv2d

INT8_LEVELS = 64  # of each sign: 7 bits, because older processors add two products in 16 bits


def linear(
    graph: Graph, values: str, weight: Tensor, bias: Tensor | None, *, int8: bool = True
) -> str:
    """values @ weight.T + bias over the last axis; in whole numbers where the graph is int8."""
    product = whole_product if graph.int8 and int8 else float_product
    out = product(graph, values, weight.detach())
    return out if bias is None else graph("Add", out, bias)


def float_product(graph: Graph, values: str, weight: Tensor) -> str:
    return graph("MatMul", values, weight.T)


def whole_product(graph: Graph, values: str, weight: Tensor) -> str:
    """The product of 8-bit numbers: values are rounded to 256 levels between their extremes."""
    rounded, scale, zero = graph.several("DynamicQuantizeLinear", 3, values)
    steps = weight.abs().amax(dim=1).clamp_min(1e-12) / INT8_LEVELS  # (out,)
    levels = (weight / steps[:, None]).round().clamp(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)
    zeros = torch.zeros(len(weight), dtype=torch.int8)
    product = graph("MatMulInteger", rounded, levels.T, zero, zeros)
    return graph("Mul", graph("Cast", product, to=FLOAT), graph("Mul", scale, steps))


def layer_norm(graph: Graph, values: str, norm: nn.LayerNorm) -> str:
    return graph("LayerNormalization", values, norm.weight, norm.bias, epsilon=norm.eps)


def scaled(layer: nn.Linear, branch: Branch | None) -> tuple[Tensor, Tensor]:
    """Weight and bias of a branch's last layer, with the branch's LayerScale worked in."""
    if branch is None or branch.scale is None:
        return layer.weight, layer.bias
    return layer.weight * branch.scale[:, None], layer.bias * branch.scale


def mlp(graph: Graph, values: str, layers: Mlp | SwiGlu, branch: Branch | None = None) -> str:
    hidden = linear(graph, values, layers.fc1.weight, layers.fc1.bias)
    if isinstance(layers, SwiGlu):
        gate, value = graph.several("Split", 2, hidden, axis=-1, num_outputs=2)
        hidden = graph("Mul", graph("Mul", gate, graph("Sigmoid", gate)), value)
    else:
        hidden = graph("Gelu", hidden, approximate="tanh" if layers.gelu == "tanh" else "none")
    return linear(graph, hidden, *scaled(layers.fc2, branch))


def attend(graph: Graph, query: Value, key: str, value: str, bias: str | None = None) -> str:
    """(B, H, M, K), (B, H, K, N), (B, H, N, K) → (B, M, D); queries are scaled already."""
    scores = graph("MatMul", query, key)  # (B, H, M, N)
    if bias is not None:
        scores = graph("Add", scores, bias)
    mixed = graph("MatMul", graph("Softmax", scores, axis=-1), value)  # (B, H, M, K)
    return graph("Reshape", graph("Transpose", mixed, perm=[0, 2, 1, 3]), whole(0, 0, -1))


def in_heads(graph: Graph, values: str, heads: int, *, key: bool = False) -> str:
    """(B, N, D) → (B, H, N, K), or (B, H, K, N) for keys."""
    parts = graph("Reshape", values, whole(0, 0, heads, -1))
    return graph("Transpose", parts, perm=[0, 2, 3, 1] if key else [0, 2, 1, 3])


def convolution(graph: Graph, values: str, weight: Tensor, stride: int, pads: list[int]) -> str:
    """`pads` are up, left, down, right."""
    return graph("Conv", values, weight, strides=[stride, stride], pads=pads)


def standardized(graph: Graph, values: str, conv: StandardizedConv2d) -> str:
    """Its padding is a number if sides are multiples of the stride, as a hybrid's always are."""
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    side = kernel // 2
    pads = [side] * 4
    if conv.same:
        rest = max(0, kernel - stride)
        pads = [rest // 2] * 2 + [rest - rest // 2] * 2
    return convolution(graph, values, conv.standardized_weight(), stride, pads)


def group_norm(graph: Graph, values: str, norm: nn.GroupNorm) -> str:
    groups = norm.num_groups
    rows = graph("Reshape", values, whole(0, groups, -1))  # (B, G, C / G * h * w)
    ones, zeros = torch.ones(groups), torch.zeros(groups)
    normed = graph("InstanceNormalization", rows, ones, zeros, epsilon=norm.eps)
    normed = graph("Reshape", normed, graph("Shape", values))
    scale, shift = (each[:, None, None] for each in (norm.weight, norm.bias))
    return graph("Add", graph("Mul", normed, scale), shift)


def size(graph: Graph, values: str, axis: int) -> str:
    """The number of rows along an axis, a tensor (1,) of whole numbers."""
    return graph("Shape", values, start=axis, end=axis + 1)


def middle(graph: Graph, values: str, start: int, end: int | None = None) -> str:
    """Tokens `start` to `end`."""
    if not start and end is None:
        return values
    last = torch.iinfo(torch.int64).max if end is None else end
    return graph("Slice", values, whole(start), whole(last), whole(1))
