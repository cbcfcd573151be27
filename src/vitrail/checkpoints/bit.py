"""BiT as saved by big_transfer's PyTorch code: `body.block1.unit01.conv1.weight`."""

from collections.abc import Iterator

from vitrail.checkpoints.files import Checkpoint
from vitrail.checkpoints.rules import (
    Format,
    Rule,
    Table,
    applicable,
    count,
    same,
    shape_of,
    size_of,
    unsupported_numerics,
    weight_and_bias,
)
from vitrail.models.config import NUMERICS, BitConfig
from vitrail.models.resnet import ROOT_WIDTH


def unsupported(config: BitConfig) -> list[str]:
    features = {
        f"{len(config.blocks)} stages": len(config.blocks) != 4,
        f"channels={config.channels}": config.channels != 3,
        "a model without a head": not config.num_classes,
    }
    return applicable(features) + unsupported_numerics(config, NUMERICS["big_transfer"])


def infer_config(checkpoint: Checkpoint) -> BitConfig:
    tensors = checkpoint.tensors
    width, channels, _, _ = shape_of(tensors, "root.conv.weight", 4)
    stages = range(1, 1 + count(tensors, r"body\.block(\d+)\."))
    return BitConfig(
        blocks=tuple(count(tensors, rf"body\.block{i}\.unit(\d+)\.") for i in stages),
        width_factor=width // ROOT_WIDTH,
        channels=channels,
        num_classes=size_of(tensors, "head.conv.weight", 4),
        numerics=NUMERICS["big_transfer"],
    )


def rules(config: BitConfig) -> list[Rule]:
    table = [same("root.weight", "root.conv.weight")]
    for stage, units in enumerate(config.blocks):
        for unit in range(units):
            ours, theirs = f"stages.{stage}.{unit}", f"body.block{stage + 1}.unit{unit + 1:02d}"
            table += unit_rules(ours, theirs, norm="gn")
            if unit == 0:
                table.append(same(f"{ours}.shortcut.weight", f"{theirs}.downsample.weight"))
    table += weight_and_bias("norm", "head.gn")
    if config.num_classes:
        table += conv_head_rules("head.conv")
    return table


def unit_rules(ours: str, theirs: str, norm: str = "norm") -> Iterator[Rule]:
    """Rules of a residual unit without its shortcut."""
    for index in (1, 2, 3):
        yield same(f"{ours}.conv{index}.weight", f"{theirs}.conv{index}.weight")
        yield from weight_and_bias(f"{ours}.norm{index}", f"{theirs}.{norm}{index}")


def conv_head_rules(theirs: str) -> Iterator[Rule]:
    """Map a 1x1 convolution (K, C, 1, 1) to a weight (K, C)."""
    yield Rule(
        "head.weight",
        (f"{theirs}.weight",),
        lambda kernel: kernel[:, :, 0, 0],
        lambda weight: (weight[:, :, None, None],),
    )
    yield same("head.bias", f"{theirs}.bias")


BIT = Table(
    BitConfig,
    lambda tensors: {"root.conv.weight", "body.block1.unit01.conv1.weight"} <= tensors.keys(),
    infer_config,
    rules,
    unsupported,
)
FORMAT = Format("big_vision", (BIT,))
