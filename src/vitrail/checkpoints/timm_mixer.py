"""MLP-Mixer in timm's names."""

from typing import Any

from vitrail.checkpoints.facts import Facts
from vitrail.checkpoints.files import Weights
from vitrail.checkpoints.rules import Entries, Rule, weight_and_bias
from vitrail.checkpoints.shapes import count, other_numerics, shape
from vitrail.checkpoints.timm_settings import config_json, image_size, ratio
from vitrail.checkpoints.timm_settings import read_facts as read_facts
from vitrail.checkpoints.timm_vit import mlp_rules
from vitrail.models.config import NUMERICS, MixerConfig, pair

# What a name of timm fixes: no argument changes it.
#    patch  depth  width
NAMES = {
    (32, 8, 512): "mixer_s32_224",
    (16, 8, 512): "mixer_s16_224",
    (32, 12, 768): "mixer_b32_224",
    (16, 12, 768): "mixer_b16_224",
    (32, 24, 1024): "mixer_l32_224",
    (16, 24, 1024): "mixer_l16_224",
}


def recognizes(entries: Entries) -> bool:
    return {"stem.proj.weight", "blocks.0.mlp_tokens.fc1.weight"} <= entries.keys()


def cannot(config: MixerConfig) -> list[str]:
    """What of a model no name and no argument of timm stands for."""
    fixed = (config.patch_size, config.depth, config.width)
    words = "a Mixer of patch size {}, depth {} and width {}".format(*fixed)
    return [words] * (fixed not in NAMES) + other_numerics(config, NUMERICS["timm"])


def describe(weights: Weights) -> MixerConfig:
    """The description of a Mixer, from names, shapes and config.json if there is one."""
    entries = weights.entries
    width, channels, down, across = shape(entries, "stem.proj.weight", 4)
    tokens_mlp, tokens = shape(entries, "blocks.0.mlp_tokens.fc1.weight", 2)
    channels_mlp, _ = shape(entries, "blocks.0.mlp_channels.fc1.weight", 2)
    stride = max(1, down), max(1, across)
    return MixerConfig(
        depth=count(entries, r"blocks\.(\d+)\."),
        width=width,
        tokens_mlp=tokens_mlp,
        channels_mlp=channels_mlp,
        patch_size=(down, across),
        image_size=image_size(tokens, stride, weights.settings),
        channels=channels,
        num_classes=shape(entries, "head.weight", 2)[0] if "head.weight" in entries else 0,
        numerics=NUMERICS["timm"],
    )


def rules(config: MixerConfig) -> list[Rule]:
    """Every tensor of ours and what timm calls it."""
    table = [*weight_and_bias("stem", "stem.proj")]
    for index in range(config.depth):
        block = f"blocks.{index}"
        table += weight_and_bias(f"{block}.norm1", f"{block}.norm1")
        table += mlp_rules(f"{block}.token_mixing", f"{block}.mlp_tokens")
        table += weight_and_bias(f"{block}.norm2", f"{block}.norm2")
        table += mlp_rules(f"{block}.channel_mixing", f"{block}.mlp_channels")
    table += weight_and_bias("norm", "norm")
    if config.num_classes:
        table += weight_and_bias("head", "head")
    return table


def companions(config: MixerConfig, facts: Facts) -> dict[str, dict[str, Any]]:
    """The config.json from which timm builds the model."""
    fixed = (pair(config.patch_size)[0], config.depth, config.width)
    arguments = {
        "img_size": list(pair(config.image_size)),
        "mlp_ratio": [
            ratio(config.tokens_mlp, config.width),
            ratio(config.channels_mlp, config.width),
        ],
    }
    return config_json(
        NAMES.get(fixed, "mixer_b16_224"),
        arguments,
        config,
        facts,
        pool="avg",
        first_conv="stem.proj",
        classifier="head",
    )
