"""Export a model to files that run without vitrail.

api.py             `export_model`: check the options, write the file, verify it
onnx.py            ONNX: the traced forward pass, translated operation by operation; int8;
                   preprocessing in the graph
torch_program.py   torch.export and AOTInductor
html.py            a page that classifies images in a browser
kernel_program.py  a model as calls of WebAssembly kernels, for that page
browser/           the kernels and the page's JavaScript; the rest is in serving/assets
verify.py          an export compared with its model; the accuracy that int8 costs
session.py         onnxruntime as an inference engine
"""

from typing import Literal

# The command line reads these constants without importing torch.
Target = Literal["onnx", "torch", "aotinductor", "html"]
OnnxKind = Literal["onnx", "onnx-int8"]
EngineKind = Literal["torch", "onnx", "onnx-int8", "auto"]
MAX_DROP = 0.01  # of the accuracy: one image in a hundred
