"""MLP-Mixer in Google's names; the older layout, `Mixer/encoderblock_0/…`, is turned to today's."""

import math
import re

from torch import Tensor

from vitrail.checkpoints.google_vit import (
    conv,
    count,
    dense,
    is_square,
    last_size,
    mlp_rules,
    norm,
    same,
    shape,
)
from vitrail.checkpoints.rules import Arrays, Rule
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import NUMERICS, MixerConfig

# The older layout's names. Its kernels may have axes of length 1, which `canonical` drops.
OLDER = (
    (r"^embedding/", "stem/"),
    (r"^Mixer/encoder_norm/", "pre_head_layer_norm/"),
    (r"^Mixer/encoderblock_(\d+)/", r"MixerBlock_\1/"),
    (r"/(token|channel)_mixing_phase_\d+/kernel1$", r"/\1_mixing/Dense_0/kernel"),
    (r"/(token|channel)_mixing_phase_\d+/bias1$", r"/\1_mixing/Dense_0/bias"),
    (r"/(token|channel)_mixing_phase_\d+/kernel2$", r"/\1_mixing/Dense_1/kernel"),
    (r"/(token|channel)_mixing_phase_\d+/bias2$", r"/\1_mixing/Dense_1/bias"),
)


def canonical(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of the older layout under today's names."""
    second = {  # the second norm of a block: whatever number it has, it is not 0
        name: re.sub(r"/LayerNorm_[1-9]\d*/", "/LayerNorm_1/", name) for name in arrays
    }
    out = {}
    for name, array in arrays.items():
        name = second[name]
        for pattern, today in OLDER:
            name = re.sub(pattern, today, name)
        out[name] = array.squeeze() if "_mixing/" in name else array
    return out


def describe(arrays: Arrays) -> MixerConfig:
    """The description of a Mixer, from names and shapes alone."""
    down, across, channels, width = shape(arrays, "stem/kernel", 4)
    tokens, tokens_mlp = shape(arrays, "MixerBlock_0/token_mixing/Dense_0/kernel", 2)
    _, channels_mlp = shape(arrays, "MixerBlock_0/channel_mixing/Dense_0/kernel", 2)
    if not is_square(tokens):
        raise CheckpointError(
            f"the Mixer has {tokens} tokens, which make no square grid; "
            "Google's format cannot say how many go into a row"
        )
    side = math.isqrt(tokens)
    try:
        return MixerConfig(
            depth=count(arrays, r"MixerBlock_(\d+)/"),
            width=width,
            tokens_mlp=tokens_mlp,
            channels_mlp=channels_mlp,
            patch_size=(down, across),
            image_size=(side * down, side * across),
            channels=channels,
            num_classes=last_size(arrays, "head/bias"),
            numerics=NUMERICS["google"],
        )
    except ConfigError as error:
        raise CheckpointError(f"the file describes no possible model: {error}") from None


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
