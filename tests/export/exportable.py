"""Tiny models of every kind, exported once per test process."""

from functools import cache

import torch

from tiny_models import awake
from vitrail import BitConfig, MixerConfig, VitConfig
from vitrail.export.onnx import OnnxGraph, to_onnx
from vitrail.export.session import open_session
from vitrail.export.torch_program import trace
from vitrail.models.config import Numerics

BASE = VitConfig(
    depth=2, width=16, mlp_width=24, heads=2, patch_size=4, image_size=8, num_classes=3
)
WIDE = BASE.change(width=64, mlp_width=256, heads=4)  # int8 weights take most of its file
SMALLEST = BASE.change(depth=1, position="none")  # traced in half the time
RELATIVE = {"position": "relative"}
SHARED, EVERY = {"position_place": "shared"}, {"position_place": "every-layer"}
HYBRID = {"stem": "resnet", "patch_size": 1, "image_size": 32, "numerics": "timm"}
KINDS = {
    "class token": {},
    "mean": {"pool": "mean"},
    "map": {"pool": "map", "registers": 2},
    "registers and mean": {"registers": 3, "pool": "mean"},
    "distillation": {"distillation": True},
    "swiglu": {"mlp": "swiglu"},
    "gray": {"channels": 1, "qkv_bias": False},
    "not square": {"image_size": (8, 24), "patch_size": (4, 8)},
    "no head": {"num_classes": 0},
    "conv stem": {"stem": "conv"},
    "no position": {"position": "none"},
    "1-D, every layer": {**EVERY, "representation": 6},
    "1-D, shared": SHARED,
    "2-D": {"position": "learned-2d", "image_size": (12, 8)},
    "2-D, every layer": {"position": "learned-2d", **EVERY},
    "relative": RELATIVE,
    "relative, shared": {**RELATIVE, **SHARED, "distillation": True},
    "relative, mean": {**RELATIVE, "pool": "mean"},
    "relative, registers": {**RELATIVE, "registers": 2},
    "sincos": {"position": "sincos-2d"},
    "timm's numerics": {"numerics": "timm"},
    "transformers' numerics": {"numerics": "transformers", "image_size": 24},
    "torchvision's numerics": {"numerics": "torchvision"},
    "rotary": {"position": "rotary", "registers": 2, "key_bias": False, "layer_scale": 0.1},
    "pre-norm": {"pre_norm": True, "numerics": Numerics(gelu="quick")},
    "rms norm, qk norm": {"norm": "rmsnorm", "qk_norm": True, "pool": "cls+mean"},
    "axial": {"attention": "axial", "pool": "mean", "image_size": (8, 12)},
    "everything": {"registers": 2, "distillation": True, "layer_scale": 0.1, "mlp": "swiglu"},
    "hybrid": {**HYBRID, "resnet_blocks": (1, 1)},
    "hybrid with a root only": {**HYBRID, "numerics": "google"},
}
SHALLOW = {  # stem, positions at the stem and head do not depend on the depth
    *("gray", "not square", "no head", "conv stem", "no position", "2-D", "sincos", "hybrid"),
    *("timm's numerics", "transformers' numerics", "torchvision's numerics"),
    "hybrid with a root only",
}
CONFIGS = {
    name: BASE.change(**{"depth": 1 if name in SHALLOW else 2, **changes})
    for name, changes in KINDS.items()
} | {
    "BiT": BitConfig(blocks=(1, 1), image_size=32, num_classes=3),
    "AxialResNet": BitConfig(blocks=(1, 1), unit="axial", image_size=32, num_classes=3),
    "Mixer": MixerConfig(
        depth=2, width=16, tokens_mlp=6, channels_mlp=10, patch_size=4, image_size=8, num_classes=3
    ),
}


@cache
def exported(kind, **settings):
    """The file of a model of this kind, which must not be changed."""
    return to_onnx(awake(CONFIGS[kind]), **settings)


def session_of(module, example, dims):
    """A module with one input `x` and outputs 0, 1, …, traced, translated and opened."""
    graph = OnnxGraph()
    shape = [f"axis{axis}" if axis in dims else size for axis, size in enumerate(example.shape)]
    program = trace(module, example, dims)
    outputs = range(len(program.graph_signature.user_outputs))
    graph.translate(program, "x", shape, [str(index) for index in outputs])
    return open_session(graph.serialize({}), 1)


def run(session, inputs):
    return [torch.from_numpy(x) for x in session.run(None, {"x": inputs.numpy()})]
