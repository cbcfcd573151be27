"""BiT: big_transfer's and big_vision's files (.npz), and those of big_transfer's PyTorch code.

The .npz files are part of Google's format; `normalize` converts big_vision's names to those of
big_transfer. timm's names of the same models are in timm.py.
"""

from collections.abc import Iterator
from functools import partial

import torch

from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.rules import (
    Format,
    Rule,
    Table,
    applicable,
    conv_head,
    jax_layer,
    modules,
    resnet_units,
    same,
    substitute,
    unsupported_numerics,
)
from vitrail.models.config import NUMERICS, BitConfig
from vitrail.models.resnet import ROOT_WIDTH

ROOT = "resnet/root_block/standardized_conv2d"
HEAD = "resnet/head/conv2d"
UNIT_PARTS = ((1, "a"), (2, "b"), (3, "c"))  # of a residual unit, in big_transfer
BIG_VISION_NAMES = (  # big_vision → big_transfer
    (r"^root_block/conv_root/", f"{ROOT}/"),
    (r"^norm-pre-head/", "resnet/group_norm/"),
    (r"^head/", f"{HEAD}/"),
    (r"^(block\d+/unit\d+)/conv_proj/", r"resnet/\1/a/proj/standardized_conv2d/"),
    *(
        (rf"^(block\d+/unit\d+)/conv{i}/", rf"resnet/\1/{part}/standardized_conv2d/")
        for i, part in UNIT_PARTS
    ),
    *((rf"^(block\d+/unit\d+)/gn{i}/", rf"resnet/\1/{part}/group_norm/") for i, part in UNIT_PARTS),
    (r"group_norm/scale$", "group_norm/gamma"),
    (r"group_norm/bias$", "group_norm/beta"),
    (r"/standardized_conv2d_\d+/", "/standardized_conv2d/"),  # some files number their parts
)


def normalize(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Convert the tensors of an .npz to the names and shapes of big_transfer."""
    normalized = {}
    for name, tensor in tensors.items():
        name = substitute(name, BIG_VISION_NAMES)
        if name.endswith(("/gamma", "/beta")):
            tensor = tensor.map(torch.flatten)  # may be (1, 1, 1, C)
        if name == f"{HEAD}/kernel" and len(tensor.shape) == 2:
            tensor = tensor.map(lambda kernel: kernel[None, None])  # dense → 1x1 convolution
        normalized[name] = tensor
    return normalized


def infer_config(checkpoint: Checkpoint, *, root: str, units: str, head: str) -> BitConfig:
    """Infer the config from the convolutions of root and head, and the names of the units."""
    output, channels = (3, 2) if root.endswith("/kernel") else (0, 1)  # axes, of JAX or PyTorch
    shape = checkpoint.shape(root, 4)
    return BitConfig(
        blocks=checkpoint.units(units),
        width_factor=shape[output] // ROOT_WIDTH,
        channels=shape[channels],
        num_classes=checkpoint.size(head, 4, axis=output),
    )


def google_templates(config: BitConfig) -> Iterator[Rule]:
    ours, theirs = "stages.{i}.{j}", "resnet/block{I}/unit{J:02d}"
    norms = {"norm": "resnet/group_norm"}
    yield from jax_layer("root", ROOT)
    for index, part in UNIT_PARTS:
        yield from jax_layer(f"{ours}.conv{index}", f"{theirs}/{part}/standardized_conv2d")
        norms[f"{ours}.norm{index}"] = f"{theirs}/{part}/group_norm"
    yield from jax_layer(f"{ours}.shortcut", f"{theirs}/a/proj/standardized_conv2d")
    for our_norm, their_norm in norms.items():
        yield same(f"{our_norm}.weight", f"{their_norm}/gamma")
        yield same(f"{our_norm}.bias", f"{their_norm}/beta")
    kernel = (f"{HEAD}/kernel",)
    yield Rule("head.weight", kernel, lambda k: k[0, 0].mT, lambda w: (w.mT[None, None],))
    yield same("head.bias", f"{HEAD}/bias")


def pytorch_templates(config: BitConfig) -> Iterator[Rule]:
    ours, theirs = "stages.{i}.{j}", "body.block{I}.unit{J:02d}"
    shortcut = {f"{ours}.shortcut": f"{theirs}.downsample"}
    yield from modules({"root": "root.conv", "norm": "head.gn"} | shortcut)
    yield from resnet_units(ours, theirs, norm="gn")
    yield from conv_head("head.conv")


def pytorch_unsupported(config: BitConfig) -> list[str]:
    features = {
        f"{len(config.blocks)} stages": len(config.blocks) != 4,
        f"channels={config.channels}": config.channels != 3,
        "a model without a head": not config.num_classes,
    }
    return applicable(features) + unsupported_numerics(config, NUMERICS["big_transfer"])


GOOGLE = Table(
    BitConfig,
    lambda tensors: f"{ROOT}/kernel" in tensors,
    partial(
        infer_config,
        root=f"{ROOT}/kernel",
        units=r"resnet/block(\d+)/unit(\d+)/",
        head=f"{HEAD}/kernel",
    ),
    google_templates,
    lambda config: unsupported_numerics(config, NUMERICS["big_transfer"]),
)
PYTORCH = Table(
    BitConfig,
    lambda tensors: {"root.conv.weight", "body.block1.unit01.conv1.weight"} <= tensors.keys(),
    partial(
        infer_config,
        root="root.conv.weight",
        units=r"body\.block(\d+)\.unit(\d+)\.",
        head="head.conv.weight",
    ),
    pytorch_templates,
    pytorch_unsupported,
)
FORMAT = Format("big_vision", (PYTORCH,))
