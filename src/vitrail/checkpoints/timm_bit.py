"""BiT in timm's names: ResNetV2, whose head is a convolution of one pixel."""

from collections.abc import Iterator
from typing import Any

from vitrail.checkpoints.facts import Facts
from vitrail.checkpoints.files import Weights
from vitrail.checkpoints.rules import Entries, Rule, same, weight_and_bias
from vitrail.checkpoints.shapes import count, other_numerics, shape
from vitrail.checkpoints.timm_settings import config_json, usual_size
from vitrail.checkpoints.timm_settings import read_facts as read_facts
from vitrail.models.config import NUMERICS, BitConfig
from vitrail.models.resnet import EXPANSION, ROOT_WIDTH

# A name of timm fixes the depth and how much wider than its argument `channels` the model is.
NAMES = {
    (3, 4, 6, 3): ("resnetv2_50x1_bit", 1),
    (3, 4, 23, 3): ("resnetv2_101x1_bit", 1),
    (3, 8, 36, 3): ("resnetv2_152x2_bit", 2),
}


def recognizes(entries: Entries) -> bool:
    return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= entries.keys()


def cannot(config: BitConfig) -> list[str]:
    """What of a model no name and no argument of timm stands for."""
    depth = [] if timm_name(config) else [f"a BiT of {config.blocks} units"]
    return depth + other_numerics(config, NUMERICS["timm"])


def describe(weights: Weights) -> BitConfig:
    """The description of a BiT, from names and shapes; the usual size from config.json."""
    entries = weights.entries
    width, channels, _, _ = shape(entries, "stem.conv.weight", 4)
    stages = count(entries, r"stages\.(\d+)\.")
    return BitConfig(
        blocks=tuple(count(entries, rf"stages\.{i}\.blocks\.(\d+)\.") for i in range(stages)),
        width_factor=width // ROOT_WIDTH,
        image_size=usual_size((1, 1), weights.settings),
        channels=channels,
        num_classes=shape(entries, "head.fc.weight", 4)[0] if "head.fc.weight" in entries else 0,
        numerics=NUMERICS["timm"],
    )


def rules(config: BitConfig) -> list[Rule]:
    """Every tensor of ours and what timm calls it."""
    table = [same("root.weight", "stem.conv.weight")]
    for stage, units in enumerate(config.blocks):
        for unit in range(units):
            table += unit_rules(
                f"stages.{stage}.{unit}", f"stages.{stage}.blocks.{unit}", unit == 0
            )
    table += weight_and_bias("norm", "norm")
    if config.num_classes:
        table += head_rules("head.fc")
    return table


def unit_rules(
    ours: str, theirs: str, first: bool, *, norm: str = "norm", shortcut: str = "downsample.conv"
) -> Iterator[Rule]:
    """What one unit holds; big_transfer's own code has other words for two of its parts."""
    for index in (1, 2, 3):
        yield from weight_and_bias(f"{ours}.norm{index}", f"{theirs}.{norm}{index}")
        yield same(f"{ours}.conv{index}.weight", f"{theirs}.conv{index}.weight")
    if first:
        yield same(f"{ours}.shortcut.weight", f"{theirs}.{shortcut}.weight")


def head_rules(theirs: str) -> Iterator[Rule]:
    """A convolution (K, C, 1, 1) as a weight (K, C)."""
    yield Rule(
        "head.weight",
        (f"{theirs}.weight",),
        lambda kernel: kernel[:, :, 0, 0],
        lambda weight: (weight[:, :, None, None],),
    )
    yield same("head.bias", f"{theirs}.bias")


def companions(config: BitConfig, facts: Facts) -> dict[str, dict[str, Any]]:
    """The config.json from which timm builds the model."""
    name, factor = timm_name(config) or NAMES[3, 4, 6, 3]
    width = ROOT_WIDTH * config.width_factor // factor
    arguments = {
        "stem_chs": width,
        "channels": [EXPANSION * width * 2**stage for stage in range(len(config.blocks))],
    }
    return config_json(
        name,
        arguments,
        config,
        facts,
        pool="avg",
        first_conv="stem.conv",
        classifier="head.fc",
        fixed_size=False,
    )


def timm_name(config: BitConfig) -> tuple[str, int] | None:
    """The name whose first stages are the model's: timm makes as many as there are `channels`."""
    stages = len(config.blocks)
    return next((named for deep, named in NAMES.items() if deep[:stages] == config.blocks), None)
