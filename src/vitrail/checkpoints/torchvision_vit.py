"""torchvision's VisionTransformer: the table of its names, and the description of a model.

Its files are bare state dicts. The number of heads is in none of them: it is the usual one for the
width, or what the user says.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from vitrail.checkpoints.files import Weights
from vitrail.checkpoints.rules import Entries, Rule, first, same, weight_and_bias
from vitrail.checkpoints.shapes import count, last_size, other_numerics, shape, square, usual_heads
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, VitConfig, pair

POSITION = "encoder.pos_embedding"
LAYER = "encoder.layers.encoder_layer_"
EARLY_NAMES = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."}  # before version 0.13
CHANNELS = 3  # the only number their constructor makes


def tidy(weights: Weights) -> Weights:
    """The tensors under today's names."""
    if not recognizes(weights.entries):
        return weights
    entries = {late_name(name): entry for name, entry in weights.entries.items()}
    if len(entries) < len(weights.entries):
        raise CheckpointError("the file holds some tensors twice, under an old and a new name")
    return replace(weights, entries=entries)


def recognizes(entries: Entries) -> bool:
    return POSITION in entries and "class_token" in entries


def cannot(config: VitConfig) -> list[str]:
    """What of a model torchvision has no words for."""
    (height, width), (down, across) = pair(config.image_size), pair(config.patch_size)
    wrong = {
        f"the stem {config.stem!r}": config.stem != "patches",
        f"positions of the kind {config.position!r}": config.position != "learned",
        f"positions placed at {config.position_place!r}": config.position_place != "stem",
        f"the pool {config.pool!r}": config.pool != "cls",
        f"images of {height} x {width} pixels, which are not square": height != width,
        f"patches of {down} x {across} pixels, which are not square": down != across,
        f"{config.channels} input channels (it has {CHANNELS})": config.channels != CHANNELS,
        "a model without a head": not config.num_classes,
        "register tokens": config.registers > 0,
        "a distillation token": config.distillation,
        "LayerScale": config.layer_scale is not None,
        "attention without a qkv bias": not config.qkv_bias,
        "SwiGLU": config.mlp != "gelu",
    }
    return [what for what, applies in wrong.items() if applies] + other_numerics(
        config, NUMERICS["torchvision"]
    )


def describe(weights: Weights) -> VitConfig:
    """The description of a ViT, from names and shapes; heads may be in the settings."""
    entries = weights.entries
    check_stem(entries)
    width, channels, down, across = shape(entries, "conv_proj.weight", 4)
    mlp_width, _ = shape(entries, f"{LAYER}0.mlp.0.weight", 2)
    patches = shape(entries, POSITION, 3)[1] - 1
    heads = weights.settings.get("heads")
    return VitConfig(
        depth=count(entries, rf"{re.escape(LAYER)}(\d+)\."),
        width=width,
        mlp_width=mlp_width,
        heads=usual_heads(width) if heads is None else heads,
        patch_size=(down, across),
        image_size=square(patches, (down, across), "torchvision's grids are square"),
        channels=channels,
        num_classes=last_size(entries, "heads.head.bias"),
        representation=last_size(entries, "heads.pre_logits.bias"),
        numerics=NUMERICS["torchvision"],
    )


def rules(config: VitConfig) -> list[Rule]:
    """Every tensor of ours and where torchvision keeps it."""
    table = [
        *weight_and_bias("stem.projection", "conv_proj"),
        first("cls_token", "class_token"),
        first("position.table", POSITION),
    ]
    for index in range(config.depth):
        table += block_rules(f"encoder.blocks.{index}", f"{LAYER}{index}")
    table += weight_and_bias("encoder.norm", "encoder.ln")
    if config.representation:
        table += weight_and_bias("representation", "heads.pre_logits")
    if config.num_classes:
        table += weight_and_bias("head", "heads.head")
    return table


def block_rules(ours: str, theirs: str) -> Iterator[Rule]:
    attention = f"{theirs}.self_attention"
    yield from weight_and_bias(f"{ours}.norm1", f"{theirs}.ln_1")
    yield same(f"{ours}.attention.qkv.weight", f"{attention}.in_proj_weight")
    yield same(f"{ours}.attention.qkv.bias", f"{attention}.in_proj_bias")
    yield from weight_and_bias(f"{ours}.attention.merge", f"{attention}.out_proj")
    yield from weight_and_bias(f"{ours}.norm2", f"{theirs}.ln_2")
    yield from weight_and_bias(f"{ours}.mlp.fc1", f"{theirs}.mlp.0")
    yield from weight_and_bias(f"{ours}.mlp.fc2", f"{theirs}.mlp.3")


def late_name(name: str) -> str:
    for early, late in EARLY_NAMES.items():
        name = name.replace(early, late)
    return name


def check_stem(entries: Entries) -> None:
    if any(re.match(r"conv_proj\.(conv_bn_relu_|conv_last)", name) for name in entries):
        raise CheckpointError(
            "the model has torchvision's convolutional stem, whose last convolution and batch "
            "norms no stem here has; only its VisionTransformer with plain patches can be read"
        )
