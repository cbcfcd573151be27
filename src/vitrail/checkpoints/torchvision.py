"""torchvision's VisionTransformer.

Its files are bare state dicts, which do not state the number of heads: it is the default for the
width, or what the user passes.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from vitrail.checkpoints.files import Checkpoint
from vitrail.checkpoints.rules import (
    Format,
    Rule,
    Table,
    applicable,
    infer_heads,
    modules,
    same,
    square_image,
    unsupported_features,
    unsupported_numerics,
    without_batch,
)
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, VitConfig, pair

POSITION = "encoder.pos_embedding"
LAYER = "encoder.layers.encoder_layer_"
OLD_NAMES = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."}  # before 0.13


def normalize(checkpoint: Checkpoint) -> Checkpoint:
    """Rename the tensors of torchvision before 0.13."""
    if not VIT.matches(checkpoint.tensors):
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
        f"non-square {height} x {width} images": height != width,
        f"non-square {patch_height} x {patch_width} patches": patch_height != patch_width,
        f"channels={config.channels} (it uses 3)": config.channels != 3,
        "a model without a head": not config.num_classes,
    }
    numerics = unsupported_numerics(config, NUMERICS["torchvision"])
    return unsupported_features(config) + applicable(features) + numerics


def infer_config(checkpoint: Checkpoint) -> VitConfig:
    tensors = checkpoint.tensors
    if any(re.match(r"conv_proj\.(conv_bn_relu_|conv_last)", name) for name in tensors):
        raise CheckpointError(
            "torchvision's convolutional stem is not supported, only plain patches"
        )
    width, channels, patch_height, patch_width = checkpoint.shape("conv_proj.weight", 4)
    mlp_width, _ = checkpoint.shape(f"{LAYER}0.mlp.0.weight", 2)
    patches = checkpoint.shape(POSITION, 3)[1] - 1
    patch_size = (patch_height, patch_width)
    return VitConfig(
        depth=checkpoint.count(rf"{re.escape(LAYER)}(\d+)\."),
        width=width,
        mlp_width=mlp_width,
        heads=infer_heads(width, checkpoint.settings.get("heads")),
        patch_size=patch_size,
        image_size=square_image(patches, patch_size, "torchvision has square grids only"),
        channels=channels,
        num_classes=checkpoint.size("heads.head.bias"),
        representation=checkpoint.size("heads.pre_logits.bias"),
        numerics=NUMERICS["torchvision"],
    )


MODULES = {
    "stem.projection": "conv_proj",
    "encoder.blocks.{i}.norm1": LAYER + "{i}.ln_1",
    "encoder.blocks.{i}.attention.merge": LAYER + "{i}.self_attention.out_proj",
    "encoder.blocks.{i}.norm2": LAYER + "{i}.ln_2",
    "encoder.blocks.{i}.mlp.fc1": LAYER + "{i}.mlp.0",
    "encoder.blocks.{i}.mlp.fc2": LAYER + "{i}.mlp.3",
    "encoder.norm": "encoder.ln",
    "representation": "heads.pre_logits",
    "head": "heads.head",
}


def templates(config: VitConfig) -> Iterator[Rule]:
    yield from modules(MODULES)
    for kind in ("weight", "bias"):
        qkv = LAYER + "{i}.self_attention.in_proj_" + kind
        yield same(f"encoder.blocks.{{i}}.attention.qkv.{kind}", qkv)
    yield without_batch("cls_token", "class_token")
    yield without_batch("position.table", POSITION)


VIT = Table(
    VitConfig,
    lambda tensors: {POSITION, "class_token"} <= tensors.keys(),
    infer_config,
    templates,
    unsupported,
)
FORMAT = Format("torchvision", (VIT,), normalize)
