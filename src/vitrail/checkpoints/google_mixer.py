"""MLP-Mixer in Google's names; the older layout, `Mixer/encoderblock_0/…`, is turned to today's."""

import re

import torch

from vitrail.checkpoints.files import Entry, Weights
from vitrail.checkpoints.google_vit import NO_ROWS, conv, dense, mlp_rules, norm
from vitrail.checkpoints.rules import Entries, Rule, same
from vitrail.checkpoints.shapes import count, last_size, other_numerics, shape, square
from vitrail.models.config import NUMERICS, MixerConfig

# The older layout's names. Its kernels may have axes of length 1, which `renamed` drops.
OLDER = (
    (r"^embedding/", "stem/"),
    (r"^Mixer/encoder_norm/", "pre_head_layer_norm/"),
    (r"^Mixer/encoderblock_(\d+)/", r"MixerBlock_\1/"),
    (r"/(token|channel)_mixing_phase_\d+/kernel1$", r"/\1_mixing/Dense_0/kernel"),
    (r"/(token|channel)_mixing_phase_\d+/bias1$", r"/\1_mixing/Dense_0/bias"),
    (r"/(token|channel)_mixing_phase_\d+/kernel2$", r"/\1_mixing/Dense_1/kernel"),
    (r"/(token|channel)_mixing_phase_\d+/bias2$", r"/\1_mixing/Dense_1/bias"),
)


def renamed(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The arrays of the older layout under today's names."""
    second = {  # the second norm of a block: whatever number it has, it is not 0
        name: re.sub(r"/LayerNorm_[1-9]\d*/", "/LayerNorm_1/", name) for name in entries
    }
    out = {}
    for name, entry in entries.items():
        name = second[name]
        for pattern, today in OLDER:
            name = re.sub(pattern, today, name)
        out[name] = entry.map(torch.squeeze) if "_mixing/" in name else entry
    return out


def recognizes(entries: Entries) -> bool:
    return "stem/kernel" in entries


def cannot(config: MixerConfig) -> list[str]:
    """What of a model Google's names have no words for."""
    height, width = config.grid
    oblong = [f"a grid of {height} x {width}, which is not square"] if height != width else []
    return oblong + other_numerics(config, NUMERICS["google"])


def describe(weights: Weights) -> MixerConfig:
    """The description of a Mixer, from names and shapes alone."""
    entries = weights.entries
    down, across, channels, width = shape(entries, "stem/kernel", 4)
    tokens, tokens_mlp = shape(entries, "MixerBlock_0/token_mixing/Dense_0/kernel", 2)
    _, channels_mlp = shape(entries, "MixerBlock_0/channel_mixing/Dense_0/kernel", 2)
    return MixerConfig(
        depth=count(entries, r"MixerBlock_(\d+)/"),
        width=width,
        tokens_mlp=tokens_mlp,
        channels_mlp=channels_mlp,
        patch_size=(down, across),
        image_size=square(tokens, (down, across), NO_ROWS),
        channels=channels,
        num_classes=last_size(entries, "head/bias"),
        numerics=NUMERICS["google"],
    )


def rules(config: MixerConfig) -> list[Rule]:
    """Every tensor of ours and where Google keeps it."""
    table = [conv("stem", "stem"), same("stem.bias", "stem/bias")]
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}", f"MixerBlock_{index}"
        table += norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
        table += mlp_rules(f"{ours}.token_mixing", f"{theirs}/token_mixing")
        table += norm(f"{ours}.norm2", f"{theirs}/LayerNorm_1")
        table += mlp_rules(f"{ours}.channel_mixing", f"{theirs}/channel_mixing")
    table += norm("norm", "pre_head_layer_norm")
    if config.num_classes:
        table += dense("head", "head")
    return table
