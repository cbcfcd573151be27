"""What exports and engines are called, and what int8 may cost. Free of torch, for options."""

from typing import Literal

Target = Literal["onnx", "torch", "aotinductor"]
OnnxKind = Literal["onnx", "onnx-int8"]
EngineKind = Literal["torch", "onnx", "onnx-int8", "auto"]
MOST_DROP = 0.01  # of the accuracy: one picture in a hundred
