"""An ONNX graph that is written node by node.

`Graph` is what the other files of this folder write into: operations, and the weights they use.
A value is the name of a tensor in the graph; a torch tensor in its place becomes a constant.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from vitrail import __version__
from vitrail.errors import ConfigError

OPSET = 21  # GELU is an operation since 20; onnxruntime 1.23 knows 23
IR_VERSION = 10  # what came with that opset: a newer one is refused by older runtimes
MOST_BYTES = 2**31 - 2**20  # what one file may hold: protobuf counts in 31 bits
FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
SMALL = 64  # bytes up to which equal constants are looked for
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.uint8: TensorProto.UINT8,
    torch.int64: TensorProto.INT64,
}

Value = str | Tensor
Shape = Sequence[int | str]  # a word is a size that is known when the graph runs


class Graph:
    """Operations in the order in which they run, and constants."""

    def __init__(self, *, int8: bool = False) -> None:
        self.int8 = int8  # matrix products with weights are done in whole numbers
        self.part = "model"  # of the model, which operations are called after
        self.file = onnx.ModelProto(
            ir_version=IR_VERSION, producer_name="vitrail", producer_version=__version__
        )
        self.file.opset_import.append(helper.make_opsetid("", OPSET))
        self.drawn = self.file.graph  # written in place: weights are in memory once
        self.drawn.name = "vitrail"
        self.bytes = 0
        self.known: dict[tuple[Any, ...], str] = {}  # small constants, by what they are

    def __call__(self, operation: str, *inputs: Value, **attributes: Any) -> str:
        """Append an operation with one result; its name."""
        return self.several(operation, 1, *inputs, **attributes)[0]

    def several(self, operation: str, results: int, *inputs: Value, **attributes: Any) -> list[str]:
        """Append an operation with several results; their names."""
        name = f"{self.part}/{operation}.{len(self.drawn.node)}"
        names = [name if results == 1 else f"{name}.{index}" for index in range(results)]
        given = [self.constant(value) for value in inputs]
        self.drawn.node.append(helper.make_node(operation, given, names, name, **attributes))
        return names

    def constant(self, value: Value) -> str:
        """The name of a tensor that is part of the file; of a name itself, that name."""
        if isinstance(value, str):
            return value
        array = value.detach().cpu().contiguous().numpy()
        name = f"{self.part}/constant.{len(self.drawn.initializer)}"
        if array.nbytes <= SMALL:
            key = (array.dtype.str, array.shape, array.tobytes())
            if key in self.known:
                return self.known[key]
            self.known[key] = name
        self.bytes += array.nbytes
        if self.bytes > MOST_BYTES:
            raise ConfigError(
                "the weights are more than the 2 GiB that one ONNX file holds; export to int8, "
                "or --to torch"
            )
        self.drawn.initializer.append(numpy_helper.from_array(array, name))
        return name

    def reads(self, name: str, dtype: torch.dtype, shape: Shape) -> str:
        """Declare an input."""
        self.drawn.input.append(helper.make_tensor_value_info(name, TYPES[dtype], shape))
        return name

    def gives(self, name: str, value: str, shape: Shape) -> None:
        """Declare a value to be an output."""
        self.drawn.node.append(helper.make_node("Identity", [value], [name], name))
        self.drawn.output.append(helper.make_tensor_value_info(name, FLOAT, shape))

    def written(self, texts: Mapping[str, str]) -> bytes:
        """The file, with texts beside the graph."""
        helper.set_model_props(self.file, dict(texts))
        content = self.file.SerializeToString()
        onnx.checker.check_model(content)
        return content


def whole(*values: int) -> Tensor:
    """Sizes, axes and places, as operations take them."""
    return torch.tensor(values, dtype=torch.int64)


def real(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
