"""BiT as big_transfer's own PyTorch code saves it: `body.block1.unit01.conv1.weight`."""

from vitrail.checkpoints.files import Weights
from vitrail.checkpoints.rules import Entries, Rule, same, weight_and_bias
from vitrail.checkpoints.shapes import count, other_numerics, shape
from vitrail.checkpoints.timm_bit import head_rules, unit_rules
from vitrail.models.config import NUMERICS, BitConfig
from vitrail.models.resnet import ROOT_WIDTH

STAGES = 4  # of every model it can build


def recognizes(entries: Entries) -> bool:
    return {"root.conv.weight", "body.block1.unit01.conv1.weight"} <= entries.keys()


def cannot(config: BitConfig) -> list[str]:
    """What of a model big_transfer's code has no argument for."""
    wrong = {
        f"{len(config.blocks)} stages": len(config.blocks) != STAGES,
        f"{config.channels} channels": config.channels != 3,
        "a model without a head": config.num_classes == 0,
    }
    return [what for what, applies in wrong.items() if applies] + other_numerics(
        config, NUMERICS["big_transfer"]
    )


def describe(weights: Weights) -> BitConfig:
    """The description of a BiT, from names and shapes alone."""
    entries = weights.entries
    width, channels, _, _ = shape(entries, "root.conv.weight", 4)
    stages = range(1, 1 + count(entries, r"body\.block(\d+)\."))
    has_head = "head.conv.weight" in entries
    return BitConfig(
        blocks=tuple(count(entries, rf"body\.block{i}\.unit(\d+)\.") for i in stages),
        width_factor=width // ROOT_WIDTH,
        channels=channels,
        num_classes=shape(entries, "head.conv.weight", 4)[0] if has_head else 0,
        numerics=NUMERICS["big_transfer"],
    )


def rules(config: BitConfig) -> list[Rule]:
    """Every tensor of ours and what big_transfer calls it."""
    table = [same("root.weight", "root.conv.weight")]
    for stage, units in enumerate(config.blocks):
        for unit in range(units):
            there = f"body.block{stage + 1}.unit{unit + 1:02d}"
            ours = f"stages.{stage}.{unit}"
            table += unit_rules(ours, there, unit == 0, norm="gn", shortcut="downsample")
    table += weight_and_bias("norm", "head.gn")
    if config.num_classes:
        table += head_rules("head.conv")
    return table
