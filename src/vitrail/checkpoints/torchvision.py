"""torchvision's VisionTransformer.

Its files are bare state dicts, which do not state the number of heads: it is the default for the
width, or what the user passes.
"""

import re
from dataclasses import replace

from vitrail.checkpoints.files import Checkpoint
from vitrail.checkpoints.rules import (
    Format,
    Rule,
    Table,
    Tensors,
    applicable,
    count,
    default_heads,
    same,
    shape_of,
    size_of,
    square_image,
    unsupported_numerics,
    weight_and_bias,
    without_batch,
)
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, VitConfig, pair

POSITION = "encoder.pos_embedding"
LAYER = "encoder.layers.encoder_layer_"
OLD_NAMES = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."}  # before 0.13


def matches(tensors: Tensors) -> bool:
    return POSITION in tensors and "class_token" in tensors


def normalize(checkpoint: Checkpoint) -> Checkpoint:
    """Rename the tensors of torchvision before 0.13."""
    if not matches(checkpoint.tensors):
        return checkpoint
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        for old, new in OLD_NAMES.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    if len(tensors) < len(checkpoint.tensors):
        raise CheckpointError("duplicate tensors under an old and a new name")
    return replace(checkpoint, tensors=tensors)


def unsupported(config: VitConfig) -> list[str]:
    (height, width), (patch_height, patch_width) = map(pair, (config.image_size, config.patch_size))
    features = {
        f"stem={config.stem!r}": config.stem != "patches",
        f"position={config.position!r}": config.position != "learned",
        f"position_place={config.position_place!r}": config.position_place != "stem",
        f"pool={config.pool!r}": config.pool != "cls",
        f"non-square {height} x {width} images": height != width,
        f"non-square {patch_height} x {patch_width} patches": patch_height != patch_width,
        f"channels={config.channels} (it uses 3)": config.channels != 3,
        "a model without a head": not config.num_classes,
        "register tokens": config.registers,
        "a distillation token": config.distillation,
        "LayerScale": config.layer_scale is not None,
        "qkv_bias=False": not config.qkv_bias,
        "SwiGLU": config.mlp != "gelu",
    }
    return applicable(features) + unsupported_numerics(config, NUMERICS["torchvision"])


def infer_config(checkpoint: Checkpoint) -> VitConfig:
    tensors = checkpoint.tensors
    if any(re.match(r"conv_proj\.(conv_bn_relu_|conv_last)", name) for name in tensors):
        raise CheckpointError(
            "torchvision's convolutional stem is not supported, only plain patches"
        )
    width, channels, patch_height, patch_width = shape_of(tensors, "conv_proj.weight", 4)
    mlp_width, _ = shape_of(tensors, f"{LAYER}0.mlp.0.weight", 2)
    patches = shape_of(tensors, POSITION, 3)[1] - 1
    heads = checkpoint.settings.get("heads")
    patch_size = (patch_height, patch_width)
    return VitConfig(
        depth=count(tensors, rf"{re.escape(LAYER)}(\d+)\."),
        width=width,
        mlp_width=mlp_width,
        heads=default_heads(width) if heads is None else heads,
        patch_size=patch_size,
        image_size=square_image(patches, patch_size, "torchvision has square grids only"),
        channels=channels,
        num_classes=size_of(tensors, "heads.head.bias"),
        representation=size_of(tensors, "heads.pre_logits.bias"),
        numerics=NUMERICS["torchvision"],
    )


def rules(config: VitConfig) -> list[Rule]:
    table = [
        *weight_and_bias("stem.projection", "conv_proj"),
        without_batch("cls_token", "class_token"),
        without_batch("position.table", POSITION),
    ]
    for index in range(config.depth):
        ours, theirs = f"encoder.blocks.{index}", f"{LAYER}{index}"
        table += weight_and_bias(f"{ours}.norm1", f"{theirs}.ln_1")
        for kind in ("weight", "bias"):
            qkv = f"{theirs}.self_attention.in_proj_{kind}"
            table.append(same(f"{ours}.attention.qkv.{kind}", qkv))
        table += weight_and_bias(f"{ours}.attention.merge", f"{theirs}.self_attention.out_proj")
        table += weight_and_bias(f"{ours}.norm2", f"{theirs}.ln_2")
        table += weight_and_bias(f"{ours}.mlp.fc1", f"{theirs}.mlp.0")
        table += weight_and_bias(f"{ours}.mlp.fc2", f"{theirs}.mlp.3")
    table += weight_and_bias("encoder.norm", "encoder.ln")
    if config.representation:
        table += weight_and_bias("representation", "heads.pre_logits")
    if config.num_classes:
        table += weight_and_bias("head", "heads.head")
    return table


VIT = Table(VitConfig, matches, infer_config, rules, unsupported)
FORMAT = Format("torchvision", (VIT,), normalize)
