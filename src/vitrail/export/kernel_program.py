"""A model as a list of calls of the WebAssembly kernels in browser/kernels.c.

The forward pass is traced for one preprocessed image and translated to ONNX as in
`onnx.py`, so that every size is a constant. Each ONNX operation then becomes one call, or none if
it only changes the shape, and every tensor gets an address: constants first, then activations,
which share memory where their lifetimes do not overlap. Weights are stored as float16 or int8 and
computed in float32; the ONNX file with the same rounded weights is what verification runs.
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import NodeProto, helper, numpy_helper

from vitrail.checkpoints.metadata import get_metadata
from vitrail.errors import ConfigError
from vitrail.export.onnx import FLOAT_MODULES, OnnxGraph
from vitrail.export.torch_program import ModelOutputs, describe_model, trace
from vitrail.models.vit import Model

BASE = 2**17  # address of the first tensor, after the kernels' stack
ALIGN = 64  # bytes
PANEL = 8  # of kernels.c: columns that a matrix product packs
MAX_BYTES = 2**31  # of memory; browsers allow 4 GiB, phones less
MAX_ATTENTION_BYTES = 2**27  # of attention maps that are kept for the page
MIN_INT8 = 2**12  # elements of a matrix that is worth rounding to 8 bits
UNARY = {"Gelu": 0, "tanh": 1, "Sigmoid": 2, "Tanh": 3, "Relu": 4}  # numbers as in kernels.c
BINARY = {"Add": 0, "Sub": 1, "Mul": 2, "Div": 3}
ALIASES = {"Reshape", "Unsqueeze", "Squeeze", "Identity", "Shape"}  # no call


class Address(NamedTuple):
    """The place of a tensor's elements; `offset` counts elements."""

    name: str
    offset: int = 0


class KernelProgram(NamedTuple):
    onnx: bytes  # the same computation with the same weights
    calls: list[list[Any]]  # [kernel, argument, ...], addresses in bytes
    constants: list[list[Any]]  # [address, elements, type, position in weights, columns of int8]
    weights: bytes
    tensors: dict[str, list[int]]  # address and shape of the input, the outputs and attention maps
    memory: int  # bytes


def compile_model(model: Model, *, int8: bool = False) -> KernelProgram:
    """Translate a model of the form that `verify.prepare_model` returns."""
    shape = (1, model.config.channels, *get_metadata(model).preprocessing.size)
    graph = OnnxGraph()
    names = ["logits", "features"] if model.config.num_classes else ["features"]
    program = trace(ModelOutputs(model), torch.zeros(shape), {})
    graph.translate(program, "images", shape, names)
    packed = pack_weights(graph.graph, int8=int8)
    content = graph.serialize(describe_model(model, int8=int8))
    compiler = Compiler(onnx.shape_inference.infer_shapes(graph.file, data_prop=True).graph)
    for node in compiler.graph.node:
        compiler.translate(node)
    return compiler.finish(content, packed, names)


def pack_weights(graph: onnx.GraphProto, *, int8: bool) -> dict[str, list[bytes]]:
    """Round the float constants of a graph in place; return their bytes, by type, as stored.

    Tensors are float16 where that is in range, int8 with a scale per column in dense layers of the
    encoder, and float32 otherwise. Scalars stay exact: one is `ALMOST_ZERO` of onnx.py.
    """
    used = {name for node in graph.node for name in node.input}
    dense = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    packed: dict[str, list[bytes]] = {}
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if tensor.name not in used or array.dtype != np.float32:
            continue
        module = tensor.name.split("/")[0].split(".")[0]
        is_dense = tensor.name in dense and array.ndim == 2 and array.size >= MIN_INT8
        if int8 and is_dense and module not in FLOAT_MODULES:
            scales = np.maximum(np.abs(array).max(axis=0), 1e-12) / np.float32(127)
            levels = np.rint(array / scales).astype(np.int8)
            packed[tensor.name] = [levels.tobytes(), scales.tobytes()]
            array = levels * scales
        elif array.size > 1 and np.abs(array).max() < np.finfo(np.float16).max:
            packed[tensor.name] = [array.astype(np.float16).tobytes()]
            array = array.astype(np.float16).astype(np.float32)
        else:
            packed[tensor.name] = [array.tobytes()]
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return packed


class Compiler:
    """Calls of kernels for the operations of a graph whose shapes are all known."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.shapes = {x.name: tuple(x.dims) for x in graph.initializer}
        for info in (*graph.value_info, *graph.input, *graph.output):
            dims = info.type.tensor_type.shape.dim
            self.shapes[info.name] = tuple(dim.dim_value for dim in dims)
        self.arrays = {x.name: x for x in graph.initializer}
        self.indices: dict[str, bytes] = {}  # constants made here, float32
        self.aliases: dict[str, str] = {}  # tensors in the memory of another
        self.calls: list[list[Any]] = []
        self.attention: dict[str, str] = {}  # name in the page -> tensor

    def finish(
        self, content: bytes, packed: dict[str, list[bytes]], outputs: Sequence[str]
    ) -> KernelProgram:
        """Give every tensor an address."""
        addresses: dict[str, int] = {}
        constants, weights, end = [], [], BASE
        position = 0
        used = {x.name for call in self.calls for x in call if isinstance(x, Address)}
        for name in [*packed, *self.indices]:
            if name not in used:
                continue
            parts = packed.get(name) or [self.indices[name]]
            count = math.prod(self.shapes[name])
            kind = "int8" if len(parts) == 2 else {2: "f16", 4: "f32"}[len(parts[0]) // count]
            addresses[name] = end
            end += align(4 * count)
            constants.append([addresses[name], count, kind, position, self.shapes[name][-1:]])
            stored = [part.ljust(align(len(part), 4), b"\0") for part in parts]
            weights += stored
            position += sum(map(len, stored))
        kept = {"images": "images", **{name: name for name in outputs}, **self.attention}
        end = self.plan(addresses, end, {self.root(name) for name in kept.values()})
        if end > MAX_BYTES:
            raise ConfigError(
                f"the model needs {end / 2**30:.1f} GiB of memory in a browser, above the limit of "
                f"{MAX_BYTES // 2**30} GiB; use a smaller model, or --to onnx"
            )
        calls = [
            [addresses[x.name] + 4 * x.offset if isinstance(x, Address) else x for x in call]
            for call in self.calls
        ]
        tensors = {
            key: [addresses[self.root(name)], *self.shapes[name]] for key, name in kept.items()
        }
        return KernelProgram(content, calls, constants, b"".join(weights), tensors, end)

    def plan(self, addresses: dict[str, int], start: int, kept: set[str]) -> int:
        """Place activations, the largest first; return the end of the memory."""
        lifetimes: dict[str, tuple[int, int]] = {"images": (0, len(self.calls))}
        for time, call in enumerate(self.calls):
            for x in call:
                if isinstance(x, Address) and x.name not in addresses:
                    first, _ = lifetimes.get(x.name, (time, time))
                    lifetimes[x.name] = (first, len(self.calls) if x.name in kept else time)
        placed: list[tuple[int, int, int, int]] = []  # first and last call, start, end
        sizes = {name: align(4 * math.prod(self.shapes[name])) for name in lifetimes}
        for name in sorted(lifetimes, key=lambda name: -sizes[name]):
            first, last = lifetimes[name]
            low = start
            for _, _, begin, end in sorted(
                (x for x in placed if x[0] <= last and first <= x[1]), key=lambda x: x[2]
            ):
                if begin - low >= sizes[name]:
                    break
                low = max(low, end)
            addresses[name] = low
            placed.append((first, last, low, low + sizes[name]))
        return max(end for *_, end in placed)

    def root(self, name: str) -> str:
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def call(self, kernel: str, *arguments: Any) -> None:
        """Append a call; names of tensors become addresses."""
        call: list[Any] = [kernel]
        for x in arguments:
            name, offset = x if isinstance(x, Address) else (x, 0)
            call.append(Address(self.root(name), offset) if isinstance(name, str) else x)
        self.calls.append(call)

    def constant(self, name: str) -> np.ndarray:
        return numpy_helper.to_array(self.arrays[name])

    def new(self, shape: Sequence[int]) -> str:
        """Name a temporary tensor."""
        name = f"temporary {len(self.shapes)}"
        self.shapes[name] = tuple(shape)
        return name

    def translate(self, node: NodeProto) -> None:
        settings = {x.name: helper.get_attribute_value(x) for x in node.attribute}
        out, inputs, kind = node.output[0], list(node.input), node.op_type
        if kind in ALIASES:
            self.aliases[out] = inputs[0]
        elif kind in BINARY:
            shape = self.shapes[out]
            expanded = [torch.empty(self.shapes[x], device="meta").expand(shape) for x in inputs]
            strides = [x.stride() for x in expanded]
            dims, (a, b) = merge_axes(shape, strides, rank=4)
            self.call("binary", BINARY[kind], out, *inputs, *dims, *a, *b)
        elif kind in UNARY:
            number = UNARY["tanh"] if settings.get("approximate") == b"tanh" else UNARY[kind]
            self.call("unary", number, out, inputs[0], math.prod(self.shapes[out]))
        elif (method := getattr(self, kind.lower(), None)) is not None:
            method(node, settings, out, *inputs)
        else:
            raise ConfigError(f"the page has no kernel for {kind}; try --to onnx")

    def copy(self, out: Address, x: Address, shape: Sequence[int], *strides: Sequence[int]) -> None:
        """Copy elements; `strides` are of the output and of x."""
        dims, (to, of) = merge_axes(shape, strides, rank=5)
        self.call("copy", out, x, *dims, *to, *of)

    def transpose(self, node: Any, settings: Any, out: str, x: str) -> None:
        strides = row_major(self.shapes[x])
        shape = self.shapes[out]
        moved = [strides[axis] for axis in settings["perm"]]
        self.copy(Address(out), Address(x), shape, row_major(shape), moved)

    def expand(self, node: Any, settings: Any, out: str, x: str, _: str) -> None:
        shape = self.shapes[out]
        repeated = torch.empty(self.shapes[x], device="meta").expand(shape)
        self.copy(Address(out), Address(x), shape, row_major(shape), repeated.stride())

    def part(self, out: str, x: str, axis: int, start: int) -> None:
        """A contiguous range along an axis."""
        shape, strides = self.shapes[x], row_major(self.shapes[x])
        kept = list(shape)
        kept[axis] = math.prod(self.shapes[out]) * shape[axis] // math.prod(shape)
        where = Address(x, start % shape[axis] * strides[axis])
        self.copy(Address(out), where, kept, row_major(kept), strides)

    def slice(self, node: Any, settings: Any, out: str, x: str, *range: str) -> None:
        (start,), _, (axis,) = map(self.constant, range)
        self.part(out, x, int(axis), int(start))

    def gather(self, node: Any, settings: Any, out: str, x: str, index: str) -> None:
        self.part(out, x, settings["axis"], int(self.constant(index)))

    def split(self, node: NodeProto, settings: Any, out: str, x: str) -> None:
        start = 0
        for output in node.output:
            self.part(output, x, settings["axis"], start)
            start += self.shapes[output][settings["axis"]]

    def concat(self, node: Any, settings: Any, out: str, *parts: str) -> None:
        strides, start = row_major(self.shapes[out]), 0
        for x in parts:
            where = Address(out, start * strides[settings["axis"]])
            self.copy(where, Address(x), self.shapes[x], strides, row_major(self.shapes[x]))
            start += self.shapes[x][settings["axis"]]

    def pad(self, node: Any, settings: Any, out: str, x: str, pads: str, value: str) -> None:
        strides, before = row_major(self.shapes[out]), self.constant(pads)
        self.call("fill", out, math.prod(self.shapes[out]), float(self.constant(value)))
        offset = sum(int(n) * stride for n, stride in zip(before, strides, strict=False))
        shape = self.shapes[x]
        self.copy(Address(out, offset), Address(x), shape, strides, row_major(shape))

    def gatherelements(self, node: Any, settings: Any, out: str, x: str, index: str) -> None:
        *leading, rows, count = self.shapes[index]
        name = f"{index} as float"
        values = np.broadcast_to(self.constant(index), (*leading, rows, count))
        self.shapes[name] = (rows, count)
        self.indices[name] = values.reshape(-1, rows, count)[0].astype(np.float32).tobytes()
        width = self.shapes[x][-1]
        self.call("gather", out, x, name, math.prod(leading), rows, width, count)

    def reducesum(self, node: NodeProto, settings: Any, out: str, x: str, axes: str) -> None:
        shape = self.shapes[x]
        over = sorted(int(axis) % len(shape) for axis in self.constant(axes))
        assert all(b == a + 1 for a, b in pairwise(over))
        outer, size, inner = (
            math.prod(part)
            for part in (shape[: over[0]], shape[over[0] : over[-1] + 1], shape[over[-1] + 1 :])
        )
        scale = 1 / size if node.op_type == "ReduceMean" else 1.0
        self.call("reduce", out, x, outer, size, inner, scale)

    reducemean = reducesum

    def softmax(self, node: NodeProto, settings: Any, out: str, x: str) -> None:
        *rows, width = self.shapes[x]
        self.call("softmax", out, x, math.prod(rows), width)
        if rows[0] > 1:  # lines of axial attention, not maps of the image
            return
        kept = sum(math.prod(self.shapes[name]) for name in self.attention.values())
        if 4 * (kept + math.prod(self.shapes[out])) <= MAX_ATTENTION_BYTES:
            layer = re.match(r"encoder\.blocks\.(\d+)", node.name)
            self.attention[f"layer {layer[1]}" if layer else "pool"] = out

    def layernormalization(
        self, node: NodeProto, settings: Any, out: str, x: str, *parameters: str
    ) -> None:
        *rows, width = self.shapes[x]
        # The instance norm of `group_norm` has ones and zeros: addresses 0.
        affine = parameters if node.op_type == "LayerNormalization" else (0, 0)
        self.call("layer_norm", out, x, *affine, math.prod(rows), width, settings["epsilon"])

    instancenormalization = layernormalization

    def matmul(self, node: Any, settings: Any, out: str, a: str, b: str) -> None:
        *a_batch, m, k = self.shapes[a]
        *b_batch, _, n = self.shapes[b]
        batches, b_batches = math.prod(a_batch), math.prod(b_batch)
        if b_batches == 1:
            batches, m = 1, batches * m
        assert batches in (1, b_batches) or b_batches == 1
        strides = (m * k if batches > 1 else 0, k * n if b_batches > 1 else 0)
        scratch = self.new([PANEL * k])
        count = max(batches, b_batches)
        self.call("matmul", out, a, b, scratch, count, m, k, n, *strides)

    def conv(self, node: Any, settings: Any, out: str, x: str, weight: str, *bias: str) -> None:
        channels, rows, columns = self.shapes[out][1:]
        (_, c, high, wide), (*_, kernel_h, kernel_w) = self.shapes[x], self.shapes[weight]
        top, left, *_ = settings.get("pads", [0, 0])
        k, n = c * kernel_h * kernel_w, rows * columns
        unrolled = self.new([k, n])
        window = (kernel_h, kernel_w, *settings["strides"], top, left, rows, columns)
        self.call("im2col", unrolled, x, c, high, wide, *window)
        product = self.new(self.shapes[out]) if bias else out
        scratch = self.new([PANEL * k])
        self.call("matmul", product, weight, unrolled, scratch, 1, channels, k, n, 0, 0)
        if bias:
            dims = (1, 1, channels, n)
            self.call("binary", 0, out, product, bias[0], *dims, 0, 0, n, 1, 0, 0, 1, 0)

    def maxpool(self, node: Any, settings: Any, out: str, x: str) -> None:
        _, c, high, wide = self.shapes[x]
        top, left, *_ = settings["pads"]
        window = (*settings["kernel_shape"], *settings["strides"], top, left, *self.shapes[out][2:])
        self.call("max_pool", out, x, c, high, wide, *window)


def align(size: int, to: int = ALIGN) -> int:
    return -(-size // to) * to


def row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def merge_axes(
    shape: Sequence[int], strides: Sequence[Sequence[int]], *, rank: int
) -> tuple[list[int], list[list[int]]]:
    """Merge neighboring axes that every tensor steps through evenly; return exactly `rank`."""
    merged: list[list[int]] = []  # size, strides
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(a == b * size for a, b in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = [merged[-1][0] * size, *steps]
        else:
            merged.append([size, *steps])
    if len(merged) > rank:
        raise NotImplementedError(f"shape {tuple(shape)} has more than {rank} axes")
    padded = [[1] + [0] * len(strides)] * (rank - len(merged)) + merged
    dims, *columns = (list(column) for column in zip(*padded, strict=True))
    return dims, columns
