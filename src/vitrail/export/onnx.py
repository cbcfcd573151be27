"""ONNX: a model's own forward pass, traced by torch.export and translated to ONNX operations.

`OPERATIONS` and the methods of `OnnxGraph` cover the ATen operations that the models use. What
depends on weights alone is computed during the translation, so that standardized kernels and slices
of weights are constants in the file. Batch size, height and width stay symbolic. `Preprocess` is
optional preprocessing in front of the model.
"""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import onnx
import sympy
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import FloorDiv

from vitrail import __version__
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.preprocessing import Interpolation, Preprocessing
from vitrail.errors import ConfigError
from vitrail.export.torch_program import ModelOutputs, describe_model, trace
from vitrail.models.config import MixerConfig, pair
from vitrail.models.registry import name_of
from vitrail.models.resnet import BiT
from vitrail.models.vit import Model

OPSET = 21  # GELU is an operation since 20; onnxruntime 1.23 knows 23
IR_VERSION = 10  # of that opset; older runtimes reject a newer one
MAX_BYTES = 2**31 - 2**20  # of one file: protobuf sizes have 31 bits
INT8_LEVELS = 64  # of each sign: 7 bits, because CPUs without VNNI add two products in 16 bits
FLOAT_MODULES = {"stem", "head", "distillation_head"}  # not quantized: little cost, much accuracy
# onnxruntime moves a padding with zeros into the pooling that follows, where padding never counts;
# in a BiT it does. A padding with another value stays where it is.
ALMOST_ZERO = 1e-30
SHARED_BYTES = 2**16  # equal constants up to this size are stored once
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.uint8: TensorProto.UINT8,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
NO_OPS = {"alias", "clone", "contiguous", "detach", "dropout"}
ELEMENTWISE = {
    **{name: name.capitalize() for name in ("abs", "add", "ceil", "cos", "div", "floor", "mul")},
    **{name: name.capitalize() for name in ("relu", "round", "sin", "sub", "tanh")},
    **{"eq": "Equal", "ge": "GreaterOrEqual", "lt": "Less", "bitwise_and": "And", "__and__": "And"},
}
RESIZE = {  # what torch's kernels do, as attributes of ONNX's Resize
    "upsample_bilinear2d": {"mode": "linear"},
    "upsample_bicubic2d": {"mode": "cubic", "cubic_coeff_a": -0.75},
    "_upsample_bilinear2d_aa": {"mode": "linear", "antialias": 1, "exclude_outside": 1},
    "_upsample_bicubic2d_aa": {
        "mode": "cubic", "cubic_coeff_a": -0.5, "antialias": 1, "exclude_outside": 1
    },
}  # fmt: skip

TAPS = {"nearest": [0.0], "bilinear": [0.0, 1.0], "bicubic": [-1.0, 0.0, 1.0, 2.0]}
SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}  # filters are 0 beyond
BICUBIC = -0.75  # the parameter of torch's bicubic filter
ANTIALIAS_BICUBIC = -0.5  # with antialiasing, as in Pillow


@torch.no_grad()
def to_onnx(model: Model, *, int8: bool = False, preprocessing: bool = False) -> bytes:
    """Return the file: `images` or, with preprocessing, `pixels` to `logits` and `features`.

    images   float32 (batch, C, height, width), normalized
    pixels   uint8 (batch, height, width, C), as decoded from an image file
    """
    config = model.config
    if int8 and isinstance(model, BiT):
        raise ConfigError(
            f"int8 quantizes matrix products, and {name_of(config)} consists of convolutions; "
            "export it as float"
        )
    # Traced at another size than the model's own, so that position embeddings are interpolated.
    height, width = pair(config.image_size)
    axes: dict[int, Any] = {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    shape: tuple[int | str, ...] = ("batch", config.channels, "height", "width")
    preprocess = None
    if preprocessing:
        preprocess = Preprocess(get_metadata(model).preprocessing)
        example = torch.zeros(2, height + 3, width + 2, config.channels, dtype=torch.uint8)
        axes = {1: Dim.DYNAMIC, 2: Dim.DYNAMIC}
        shape = ("batch", "height", "width", config.channels)
    elif not isinstance(config, MixerConfig) and config.stride != (1, 1):
        down, across = config.stride
        example = torch.zeros(2, config.channels, height + 3 * down, width + 2 * across)
        axes = {2: down * Dim("rows"), 3: across * Dim("columns")}
    else:
        example = torch.zeros(2, config.channels, height, width)
        if isinstance(config, MixerConfig):
            axes, shape = {}, ("batch", config.channels, height, width)
    program = trace(ModelOutputs(model, preprocess), example, {0: Dim("batch"), **axes})
    graph = OnnxGraph(int8=int8)
    outputs = ["logits", "features"] if config.num_classes else ["features"]
    graph.translate(program, "pixels" if preprocessing else "images", shape, outputs)
    return graph.serialize(describe_model(model, int8=int8))


class Value:
    """The output of an ONNX operation; `fake` has its shape and dtype."""

    def __init__(self, name: str, fake: Tensor) -> None:
        self.name = name
        self.shape, self.dtype, self.ndim = fake.shape, fake.dtype, fake.ndim


Operand = Value | Tensor | torch.SymInt | float


class OnnxGraph:
    """An ONNX graph to which the operations of a traced program are appended."""

    def __init__(self, *, int8: bool = False) -> None:
        self.int8 = int8
        self.file = onnx.ModelProto(
            ir_version=IR_VERSION, producer_name="vitrail", producer_version=__version__
        )
        self.file.opset_import.append(helper.make_opsetid("", OPSET))
        self.graph = self.file.graph  # modified in place: the weights are in memory once
        self.graph.name = "vitrail"
        self.bytes = 0
        self.module = "model"  # path of the module whose operations are translated
        self.known: dict[Any, Any] = {}  # names of existing constants, sizes and operations
        self.paddings: dict[str, tuple[str, list[int], float]] = {}  # see `pad`

    def translate(
        self,
        program: ExportedProgram,
        name: str,
        shape: Sequence[int | str],
        outputs: Sequence[str],
    ) -> None:
        """Append what a program with one input needs for the outputs of these names."""
        tensors = program.state_dict | program.constants
        parameters = [x.target for x in program.graph_signature.input_specs if x.target is not None]
        (*_, node) = program.graph.find_nodes(op="placeholder")  # parameters, then the input
        value = Value(name, node.meta["val"])
        info = helper.make_tensor_value_info(name, TYPES[value.dtype], shape)
        self.graph.input.append(info)
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):  # a symbol, or a multiple of one
                factor, symbol = size.node.expr.as_coeff_Mul()
                length = self.emit("Shape", name, start=axis, end=axis + 1)
                self.known[symbol] = self.emit("Div", length, int64(int(factor)))
        axes = {str(size): axis for size, axis in zip(value.shape, shape, strict=True)}
        results = self.run(program.graph_module, [*(tensors[x] for x in parameters), value])
        for output, result in zip(outputs, results, strict=True):
            self.graph.node.append(helper.make_node("Identity", [result.name], [output], output))
            sizes = [
                size if isinstance(size, int) else axes.get(str(size)) for size in result.shape
            ]
            info = helper.make_tensor_value_info(output, TYPES[result.dtype], sizes)
            self.graph.output.append(info)
        used = set(outputs)
        for index in reversed(range(len(self.graph.node))):
            node = self.graph.node[index]
            if used.isdisjoint(node.output):
                del self.graph.node[index]
            else:
                used.update(node.input)

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Translate the operations of a traced module; return its outputs."""
        remaining = iter(inputs)
        values: dict[Node, Any] = {}
        outputs: list[Any] = []
        for node in module.graph.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            match node.op:
                case "placeholder":
                    values[node] = next(remaining)
                case "get_attr":
                    values[node] = operator.attrgetter(node.target)(module)
                case "call_function":
                    values[node] = self.call(node, args, kwargs)
                case "output":
                    outputs = list(args[0])
        return outputs

    def call(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Translate one operation, or compute it if it depends on constants alone."""
        target: Any = node.target
        fake: Any = node.meta.get("val")
        if isinstance(fake, torch.SymInt):
            return fake  # `size` turns it into operations where it is used
        if target is operator.getitem:
            return args[0][args[1]]
        name = str(getattr(target, "overloadpacket", target)).removeprefix("aten.")
        if name == "wrap_with_autocast":  # device, dtype, enabled, cache_enabled, module, inputs
            return self.run(args[4], args[5:])
        if not node.users:
            return None  # an assertion about sizes or dtypes
        if name in NO_OPS:
            return args[0]
        if not any(isinstance(x, Value | torch.SymInt) for x in tree_leaves((args, kwargs))):
            return target(*args, **kwargs)
        paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        self.module = (paths[-1] if paths else "").removeprefix("model.") or "model"
        if name in ELEMENTWISE and not kwargs:
            output = self.elementwise(fake, ELEMENTWISE[name], *args)
        elif name in RESIZE:
            output = self.resize(fake, *args, **RESIZE[name])
        elif name in OPERATIONS:
            output = OPERATIONS[name](self, fake, *args, **kwargs)
        elif (translate := getattr(self, name, None)) is not None:
            output = translate(fake, *args, **kwargs)
        else:
            raise ConfigError(
                f"{self.module} uses {target}, which has no translation to ONNX; try --to torch"
            )
        if isinstance(output, list):
            return [Value(*each) for each in zip(output, fake, strict=True)]
        return Value(output, fake) if isinstance(output, str) else output

    # The file: operations, constants, sizes.

    def emit(
        self, operation: str, *inputs: str | Operand, outputs: int = 1, **settings: Any
    ) -> Any:
        """Append an operation; return the name of its output, or a list of names."""
        names = [x if isinstance(x, str) else self.operand(x) for x in inputs]
        key = (operation, *names, str(settings))
        if key not in self.known:
            name = f"{self.module}/{operation}.{len(self.graph.node)}"
            results = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
            self.graph.node.append(helper.make_node(operation, names, results, name, **settings))
            self.known[key] = name if outputs == 1 else results
        return self.known[key]

    def operand(self, value: Operand, dtype: torch.dtype | None = None) -> str:
        """Return the name of a value as `dtype`; a number or tensor becomes a constant."""
        if isinstance(value, torch.SymInt):
            name, current = self.emit("Squeeze", self.size(value.node.expr), int64(0)), torch.int64
        elif isinstance(value, Value):
            name, current = value.name, value.dtype
        else:
            return self.constant(torch.as_tensor(value, dtype=dtype))
        return name if dtype in (None, current) else self.emit("Cast", name, to=TYPES[dtype])

    def constant(self, tensor: Tensor) -> str:
        """Store a tensor in the file and return its name."""
        array = tensor.detach().cpu().contiguous().numpy()
        name = f"{self.module}/constant.{len(self.graph.initializer)}"
        if array.nbytes <= SHARED_BYTES:
            key = (array.dtype.str, array.shape, array.tobytes())
            if self.known.setdefault(key, name) != name:
                return self.known[key]
        self.bytes += array.nbytes
        if self.bytes > MAX_BYTES:
            raise ConfigError(
                "the weights exceed the 2 GiB that one ONNX file can hold; export to int8, or "
                "--to torch"
            )
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def size(self, expression: Any) -> str:
        """Return the name of a size, an int64 tensor (1,), from its sympy expression."""
        if expression.is_Integer:
            return self.constant(int64(int(expression)))
        if expression not in self.known:
            operations = {sympy.Add: "Add", sympy.Mul: "Mul", FloorDiv: "Div"}
            operation = next(
                (op for kind, op in operations.items() if isinstance(expression, kind)), ""
            )
            if not operation:
                raise ConfigError(
                    f"{self.module} uses the size {expression}, which has no translation to ONNX; "
                    "try --to torch"
                )
            parts = [self.size(part) for part in expression.args]
            self.known[expression] = reduce(lambda a, b: self.emit(operation, a, b), parts)
        return self.known[expression]

    def sizes(self, shape: Sequence[Any]) -> str:
        """Return the name of a shape, an int64 tensor; its sizes are int or SymInt."""
        if all(isinstance(size, int) for size in shape):
            return self.constant(int64(*shape))
        parts = [x.node.expr if isinstance(x, torch.SymInt) else sympy.Integer(x) for x in shape]
        return self.emit("Concat", *map(self.size, parts), axis=0)

    def serialize(self, metadata: Mapping[str, Any]) -> bytes:
        """Return the file, with metadata as JSON."""
        texts = {key: json.dumps(value) for key, value in metadata.items()}
        helper.set_model_props(self.file, texts)
        content = self.file.SerializeToString()
        onnx.checker.check_model(content)
        return content

    # ATen operations that take more than a line; the arguments are as in `OPERATIONS`.

    def elementwise(self, out: Tensor, operation: str, *operands: Operand) -> str:
        dtype = out.dtype
        if dtype == torch.bool:  # a comparison has the dtype of its tensors
            dtype = next(x.dtype for x in operands if isinstance(x, Value | Tensor))
        return self.emit(operation, *(self.operand(x, dtype) for x in operands))

    def clamp(self, out: Tensor, x: Operand, low: Any = None, high: Any = None, **_: Any) -> str:
        name = self.operand(x)
        for operation, bound in (("Max", low), ("Min", high)):
            if bound is not None:
                name = self.emit(operation, name, self.operand(bound, out.dtype))
        return name

    def arange(self, out: Tensor, *bounds: Operand, **_: Any) -> str:
        start, end = bounds if len(bounds) == 2 else (0, *bounds)
        numbers = [self.operand(x, torch.int64) for x in (start, end, 1)]
        return self.emit("Cast", self.emit("Range", *numbers), to=TYPES[out.dtype])

    def reshape(self, out: Tensor, x: Value, *_: Any) -> str:
        """Any change of the shape alone: 0 copies a size of the input, -1 is inferred."""
        input_sizes = [str(size) for size in x.shape] + [""] * out.ndim
        shape = [
            size if isinstance(size, int) else 0 if str(size) == before else -1
            for size, before in zip(out.shape, input_sizes, strict=False)
        ]
        target = self.sizes(out.shape) if shape.count(-1) > 1 else self.constant(int64(*shape))
        return self.emit("Reshape", x, target)

    view = flatten = unflatten = reshape

    def transpose(self, out: Tensor, x: Value, a: int = -2, b: int = -1) -> str:
        order = list(range(x.ndim))
        order[a], order[b] = order[b], order[a]
        return self.emit("Transpose", x, perm=order)

    mT = transpose  # noqa: N815

    def slice(self, out: Tensor, x: Value, dim: int = 0, start: Any = 0, end: Any = None) -> Any:
        if str(out.shape) == str(x.shape):
            return x
        return self.emit("Slice", x, self.sizes([start or 0]), self.sizes([end]), int64(dim))

    def einsum(self, out: Tensor, equation: str, operands: list[Any], **_: Any) -> str:
        """A matrix product with weights, transposed or not, in `attend_without_kv`."""
        if equation not in EINSUMS:
            return self.emit("Einsum", *operands, equation=equation)
        x, weight = operands
        transposed = equation[-1] != equation.split("->")[0][-1]
        return self.multiply(x, weight.mT if transposed else weight)

    def linear(self, out: Tensor, x: Value, weight: Tensor, bias: Tensor | None = None) -> str:
        product = self.multiply(x, weight.T)
        return product if bias is None else self.emit("Add", product, bias)

    def multiply(self, x: Value, weight: Tensor) -> str:
        """x @ weight, with one matrix or one per head; in integers where the graph is int8."""
        if not self.int8 or self.module.split(".")[0] in FLOAT_MODULES:
            return self.emit("MatMul", x, weight)
        # Activations are rounded to 256 levels between the smallest and largest of the batch.
        rounded, scale, zero = self.emit("DynamicQuantizeLinear", x, outputs=3)
        largest = weight.abs().amax(dim=-2, keepdim=weight.ndim > 2)  # of each column
        steps = largest.clamp_min(1e-12) / INT8_LEVELS
        levels = (weight / steps).round().clamp(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)
        product = self.emit("MatMulInteger", rounded, levels, zero)
        product = self.emit("Cast", product, to=TensorProto.FLOAT)
        return self.emit("Mul", product, self.emit("Mul", scale, steps))

    def group_norm(
        self, out: Tensor, x: Value, groups: int, weight: Tensor, bias: Tensor, eps: float, *_: Any
    ) -> str:
        rows = self.emit("Reshape", x, int64(0, groups, -1))  # (B, G, C / G * h * w)
        ones, zeros = torch.ones(groups), torch.zeros(groups)
        normed = self.emit("InstanceNormalization", rows, ones, zeros, epsilon=eps)
        normed = self.emit("Reshape", normed, self.emit("Shape", x))
        scaled = self.emit("Mul", normed, weight[:, None, None])
        return self.emit("Add", scaled, bias[:, None, None])

    def scaled_dot_product_attention(
        self, out: Tensor, query: Any, key: Any, value: Any, attn_mask: Any = None, **settings: Any
    ) -> str:
        scale = settings.get("scale") or key.shape[-1] ** -0.5
        query = self.emit("Mul", query, torch.tensor(scale))
        scores = self.emit("MatMul", query, self.mT(out, key))
        if attn_mask is not None:
            scores = self.emit("Add", scores, attn_mask)
        return self.emit("MatMul", self.emit("Softmax", scores, axis=-1), value)

    def pad(
        self, out: Tensor, x: Value, edges: Sequence[int], _: str = "", value: float | None = None
    ) -> str:
        """A constant around an image; `conv2d` and `max_pool2d` include it where possible."""
        left, right, top, bottom = edges
        fill = torch.tensor(value or ALMOST_ZERO)
        name = self.emit("Pad", x, int64(0, 0, top, left, 0, 0, bottom, right), fill)
        self.paddings[name] = (x.name, [top, left, bottom, right], value or 0.0)
        return name

    def unpad(self, x: Value, neutral: float) -> tuple[str, list[int]]:
        """The input of `pad` and its edges, if it pads with a neutral value; else x and zeros."""
        name, pads, value = self.paddings.get(x.name, (x.name, [0] * 4, neutral))
        return (name, pads) if value == neutral else (x.name, [0] * 4)

    def conv2d(
        self,
        out: Tensor,
        x: Value,
        w: Tensor,
        bias: Any = None,
        stride: Any = (1, 1),
        pad: Any = (0, 0),
    ) -> str:
        name, pads = self.unpad(x, 0.0)
        pads = [a + b for a, b in zip(pads, [*pad, *pad], strict=True)]
        parameters = [w] if bias is None else [w, bias]
        return self.emit("Conv", name, *parameters, strides=list(stride), pads=pads)

    def rms_norm(self, out: Tensor, x: Value, _: Any, weight: Tensor, eps: float) -> str:
        squares = self.emit("ReduceMean", self.emit("Mul", x, x), int64(-1), keepdims=1)
        size = self.emit("Sqrt", self.emit("Add", squares, self.operand(eps, out.dtype)))
        return self.emit("Mul", self.emit("Div", x, size), weight)

    def max_pool2d(self, out: Tensor, x: Value, kernel: Any, stride: Any) -> str:
        name, pads = self.unpad(x, -torch.inf)
        settings = {"kernel_shape": list(kernel), "strides": list(stride), "pads": pads}
        return self.emit("MaxPool", name, **settings)

    def resize(
        self, out: Tensor, x: Operand, _: Any, align_corners: bool, *__: Any, **settings: Any
    ) -> str:
        mode = "align_corners" if align_corners else "half_pixel"
        settings["coordinate_transformation_mode"] = mode
        return self.emit("Resize", x, "", "", self.sizes(out.shape), **settings)


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


EINSUMS = ("bhrk,hkd->bhrd", "bhrd,hkd->bhrk")  # that are matrix products, one per head
# ATen operations: functions of the graph, the fake output and the arguments of the operation.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "cat": lambda g, out, parts, dim=0: g.emit("Concat", *parts, axis=dim),
    "chunk": lambda g, out, x, n, dim: g.emit("Split", x, outputs=n, axis=dim, num_outputs=n),
    "embedding": lambda g, out, table, index: g.emit("Gather", table, index, axis=0),
    "expand": lambda g, out, x, *_: g.emit("Expand", x, g.sizes(out.shape)),
    "gather": lambda g, out, x, dim, index: g.emit("GatherElements", x, index, axis=dim),
    "gelu": lambda g, out, x, approximate="none": g.emit("Gelu", x, approximate=approximate),
    "layer_norm": lambda g, out, x, _, weight, bias, eps, *__: g.emit(
        "LayerNormalization", x, weight, bias, epsilon=eps
    ),
    "matmul": lambda g, out, a, b: g.emit("MatMul", a, b),
    "mean": lambda g, out, x, dim: g.emit("ReduceMean", x, int64(*dim), keepdims=0),
    "new_zeros": lambda g, out, x, size, **_: g.constant(torch.zeros(size, dtype=out.dtype)),
    "permute": lambda g, out, x, dims: g.emit("Transpose", x, perm=list(dims)),
    "rsub": lambda g, out, x, other: g.elementwise(out, "Sub", other, x),
    "scalar_tensor": lambda g, out, x, **_: g.operand(x, out.dtype),
    "select": lambda g, out, x, dim, index: g.emit("Gather", x, torch.tensor(index), axis=dim),
    "sigmoid": lambda g, out, x: g.emit("Sigmoid", x),
    "silu": lambda g, out, x: g.emit("Mul", x, g.emit("Sigmoid", x)),
    "softmax": lambda g, out, x, dim, *_: g.emit("Softmax", x, axis=dim),
    "stack": lambda g, out, parts: g.emit(
        "Concat", *(g.emit("Unsqueeze", x, int64(0)) for x in parts), axis=0
    ),
    "sum": lambda g, out, x, dim, keepdim=False: g.emit(
        "ReduceSum", x, int64(*dim), keepdims=int(keepdim)
    ),
    "to": lambda g, out, x, *_, **__: g.operand(x, out.dtype),
    "unsqueeze": lambda g, out, x, dim: g.emit("Unsqueeze", x, int64(dim)),
    "where": lambda g, out, condition, a, b: g.emit(
        "Where", condition, g.operand(a, out.dtype), g.operand(b, out.dtype)
    ),
}


# Preprocessing. `EvalTransform` resizes with torch's kernels for bytes, which ONNX does not have.
# Here a resize is a product with a matrix that is computed from the sizes: the same positions,
# filters and edges, in float64 except for the scale, which torch rounds to float32. Pixels that the
# center crop removes are not computed. B images, C channels, H x W pixels before, h x w after.


class Preprocess(nn.Module):
    """Pixels uint8 (B, H, W, C) of any size to normalized images (B, C, h, w)."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.config = preprocessing
        self.filter: Interpolation = preprocessing.interpolation
        if self.filter == "lanczos" and not preprocessing.antialias:
            raise ConfigError("lanczos is not available without antialiasing; use bicubic")
        self.antialias = preprocessing.antialias and self.filter in SUPPORT  # torch: no others

    def forward(self, pixels: Tensor) -> Tensor:
        config = self.config
        images = pixels.permute(0, 3, 1, 2).float()  # (B, C, H, W)
        height, width = images.shape[2:]
        down, across = config.resize_to or config.size
        rows, columns = float64(down), float64(across)
        if config.resize == "short-side":  # cover both sides
            rows = float64(height * across // width).clamp(min=down)
            columns = float64(width * down // height).clamp(min=across)
        images = images @ self.crop_matrix(width, columns, config.size[1]).mT  # (B, C, H, w)
        if self.antialias:  # torch's kernel for bytes rounds after each axis
            images = (images + 0.5).floor().clamp(0, 255)
        images = self.crop_matrix(height, rows, config.size[0]) @ images  # (B, C, h, w)
        images = ((images + 0.5).floor() if self.antialias else images.round()).clamp(0, 255)
        mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
        return images * (1 / (255 * std)) - mean / std

    def crop_matrix(self, old: int, new: Tensor, size: int) -> Tensor:
        """The float32 matrix (n, old) of a resize to `new` and a center crop to n = `size`.

        If `new` is smaller than `size`, rows of zeros pad both sides with black.
        """
        half = (new - size) / 2
        first = torch.where(half < 0, half.ceil(), half.round())
        positions = (torch.arange(size, dtype=torch.float64) + first)[:, None]  # (n, 1)
        columns = torch.arange(old, dtype=torch.float64)  # (old,)
        scale = (float64(old) / new).float().double()
        shift = 0.0 if self.antialias or self.filter == "nearest" else 0.5
        center = ((positions + 0.5) * scale - shift).float().double()
        if self.filter == "area":  # the mean of all pixels that the new one covers, at least partly
            start = (positions * old / new).floor()
            end = ((positions + 1) * old / new).ceil()
            matrix = ((columns >= start) & (columns < end)).float() / (end - start).float()
        elif self.antialias:  # all pixels under the filter, which grows with the scale
            distance = (columns + 0.5 - center).abs() / scale.clamp(min=1)  # (n, old)
            weights = evaluate_filter(self.filter, distance, ANTIALIAS_BICUBIC)
            matrix = (weights / weights.sum(dim=1, keepdim=True)).float()
        else:  # a few neighbors of each position; beyond the edge, the pixel at the edge is used
            center = center[..., None]  # (n, 1, 1)
            taps = torch.tensor(TAPS[self.filter], dtype=torch.float64)
            neighbors = center.floor() + taps  # (n, 1, taps)
            weights = (neighbors.clamp(0, old - 1) == columns[:, None]).double()  # (n, old, taps)
            if self.filter != "nearest":
                distance = (center - neighbors).abs()
                weights = weights * evaluate_filter(self.filter, distance, BICUBIC)
            matrix = weights.sum(dim=2).float()
        return torch.where((positions >= 0) & (positions < new), matrix, 0.0)


def evaluate_filter(filter: Interpolation, distance: Tensor, a: float) -> Tensor:
    """The filter at a distance >= 0; `a` is the parameter of bicubic filters."""
    d = distance.clamp(max=SUPPORT[filter])
    if filter == "bilinear":
        return 1 - d
    if filter == "lanczos":  # sinc(d) sinc(d / 3)
        angle = torch.pi * d
        return torch.where(d == 0, 1.0, 3 * angle.sin() * (angle / 3).sin() / (angle * angle))
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d < 1, near, far)


def float64(size: int) -> Tensor:
    return torch.scalar_tensor(size, dtype=torch.float64)
