"""BiT in the names of big_transfer, `resnet/block1/unit01/a/…`; big_vision's are turned to them."""

import re
from collections.abc import Iterator

import torch

from vitrail.checkpoints.files import Entry, Weights
from vitrail.checkpoints.google_vit import conv
from vitrail.checkpoints.rules import Entries, Rule, same
from vitrail.checkpoints.shapes import count, other_numerics, shape
from vitrail.models.config import NUMERICS, BitConfig
from vitrail.models.resnet import ROOT_WIDTH

ROOT = "resnet/root_block/standardized_conv2d"
# big_vision's names, and what big_transfer calls the same.
BIG_VISION = (
    (r"^root_block/conv_root/", "resnet/root_block/standardized_conv2d/"),
    (r"^norm-pre-head/", "resnet/group_norm/"),
    (r"^head/", "resnet/head/conv2d/"),
    (r"^(block\d+/unit\d+)/conv_proj/", r"resnet/\1/a/proj/standardized_conv2d/"),
    (r"^(block\d+/unit\d+)/conv1/", r"resnet/\1/a/standardized_conv2d/"),
    (r"^(block\d+/unit\d+)/conv2/", r"resnet/\1/b/standardized_conv2d/"),
    (r"^(block\d+/unit\d+)/conv3/", r"resnet/\1/c/standardized_conv2d/"),
    (r"^(block\d+/unit\d+)/gn1/", r"resnet/\1/a/group_norm/"),
    (r"^(block\d+/unit\d+)/gn2/", r"resnet/\1/b/group_norm/"),
    (r"^(block\d+/unit\d+)/gn3/", r"resnet/\1/c/group_norm/"),
    (r"group_norm/scale$", "group_norm/gamma"),
    (r"group_norm/bias$", "group_norm/beta"),
)
NUMBERED = (r"/standardized_conv2d_\d+/", "/standardized_conv2d/")  # some files count their parts


def renamed(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The arrays under big_transfer's names and shapes."""
    out = {}
    for name, entry in entries.items():
        for pattern, ours in (*BIG_VISION, NUMBERED):
            name = re.sub(pattern, ours, name)
        if name.endswith(("/gamma", "/beta")):
            entry = entry.map(torch.flatten)  # may be (1, 1, 1, C)
        if name == "resnet/head/conv2d/kernel" and len(entry.shape) == 2:
            entry = entry.map(
                lambda kernel: kernel[None, None]
            )  # a dense head is a 1x1 convolution
        out[name] = entry
    return out


def recognizes(entries: Entries) -> bool:
    return f"{ROOT}/kernel" in entries


def cannot(config: BitConfig) -> list[str]:
    """What of a model Google's names have no words for."""
    return other_numerics(config, NUMERICS["big_transfer"])


def describe(weights: Weights) -> BitConfig:
    """The description of a BiT, from names and shapes alone."""
    entries = weights.entries
    _, _, channels, width = shape(entries, f"{ROOT}/kernel", 4)
    stages = count(entries, r"resnet/block(\d+)/")
    blocks = [count(entries, rf"resnet/block{stage}/unit(\d+)/") for stage in range(1, stages + 1)]
    classes = shape(entries, "resnet/head/conv2d/kernel", 4)[3] if has_head(entries) else 0
    return BitConfig(
        blocks=tuple(blocks),
        width_factor=width // ROOT_WIDTH,
        channels=channels,
        num_classes=classes,
    )


def rules(config: BitConfig) -> list[Rule]:
    """Every tensor of ours and where big_transfer keeps it."""
    table = [conv("root", ROOT)]
    for stage, units in enumerate(config.blocks):
        for unit in range(units):
            table += unit_rules(
                f"stages.{stage}.{unit}", f"resnet/block{stage + 1}/unit{unit + 1:02d}", unit == 0
            )
    table += norm("norm", "resnet/group_norm")
    if config.num_classes:
        head = "resnet/head/conv2d"
        table += [
            Rule(
                "head.weight",
                (f"{head}/kernel",),
                lambda kernel: kernel[0, 0].mT,
                lambda weight: (weight.mT[None, None],),
            ),
            same("head.bias", f"{head}/bias"),
        ]
    return table


def unit_rules(ours: str, theirs: str, first: bool) -> Iterator[Rule]:
    for index, letter in enumerate("abc", 1):
        yield from norm(f"{ours}.norm{index}", f"{theirs}/{letter}/group_norm")
        yield conv(f"{ours}.conv{index}", f"{theirs}/{letter}/standardized_conv2d")
    if first:
        yield conv(f"{ours}.shortcut", f"{theirs}/a/proj/standardized_conv2d")


def norm(ours: str, theirs: str) -> Iterator[Rule]:
    yield same(f"{ours}.weight", f"{theirs}/gamma")
    yield same(f"{ours}.bias", f"{theirs}/beta")


def has_head(entries: Entries) -> bool:
    return "resnet/head/conv2d/kernel" in entries
