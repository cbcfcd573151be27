"""ViT and hybrid in timm's names, which DeiT, DeiT-III, DINO and DINOv2 share.

A name timm builds models by, and the arguments it takes, decide what can be written.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.facts import Facts
from vitrail.checkpoints.rules import Entries, Rule, first, same, weight_and_bias
from vitrail.checkpoints.shapes import other_numerics
from vitrail.checkpoints.timm_names import BACKBONE, PATCHES
from vitrail.checkpoints.timm_names import tidy as tidy
from vitrail.checkpoints.timm_settings import config_json, ratio
from vitrail.checkpoints.timm_settings import read_facts as read_facts
from vitrail.checkpoints.timm_shapes import ACTIVATIONS, FIRST_SCALE, POOLS
from vitrail.checkpoints.timm_shapes import describe as describe
from vitrail.models.config import NUMERICS, Gelu, VitConfig, pair

# The ResNets that some name of timm begins with; no argument changes them.
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def rules(config: VitConfig) -> list[Rule]:
    """Every tensor of ours and what timm calls it."""
    table = [*weight_and_bias("stem.projection", "patch_embed.proj")]
    if config.stem == "resnet":
        table += resnet_rules(config)
    if config.pool == "cls":
        table.append(first("cls_token", "cls_token"))
    if config.distillation:
        table.append(first("distillation_token", "dist_token"))
    if config.registers:
        table.append(first("registers", "reg_token"))
    if config.position == "learned":
        table.append(position(config))
    for index in range(config.depth):
        table += block_rules(config, f"encoder.blocks.{index}", f"blocks.{index}")
    table += weight_and_bias("encoder.norm", "norm")
    if config.pool == "map":
        table += map_rules()
    if config.representation:
        table += weight_and_bias("representation", "pre_logits.fc")  # timm's before 2022
    if config.num_classes:
        table += weight_and_bias("head", "head")
    if config.num_classes and config.distillation:
        table += weight_and_bias("distillation_head", "head_dist")
    return table


def recognizes(entries: Entries) -> bool:
    return PATCHES in entries and any(name.startswith("blocks.") for name in entries)


def cannot(config: VitConfig) -> list[str]:
    """What of a model no name and no argument of timm stands for."""
    distilled, swiglu = config.distillation, config.mlp == "swiglu"
    hybrid = config.stem == "resnet"
    wrong = {
        f"positions of the kind {config.position!r}": config.position not in ("learned", "none"),
        f"positions placed at {config.position_place!r}": config.position_place != "stem",
        f"the stem {config.stem!r}": config.stem == "conv",
        f"a ResNet of {config.resnet_blocks} units": hybrid and config.resnet_blocks not in HYBRIDS,
        f"a ResNet {config.resnet_width} times as wide": hybrid and config.resnet_width != 1,
        "a representation layer": config.representation > 0,
        "a distillation token behind a ResNet": distilled and hybrid,
        "a distillation token with registers": distilled and config.registers > 0,
        "a distillation token without positions": distilled and config.position == "none",
        "a distillation token without a head": distilled and not config.num_classes,
        "a distillation token with SwiGLU": distilled and swiglu,
        "SwiGLU behind a ResNet": swiglu and hybrid,
        "SwiGLU with attention pooling": swiglu and config.pool == "map",
    }
    theirs = replace(NUMERICS["timm"], gelu=config.numerics.gelu)  # an argument says which GELU
    return [what for what, applies in wrong.items() if applies] + other_numerics(config, theirs)


def companions(config: VitConfig, facts: Facts) -> dict[str, dict[str, Any]]:
    """The config.json from which timm builds the model: a name, and all that differs from it."""
    swiglu = config.mlp == "swiglu"
    names: dict[Gelu, str] = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    arguments = {
        "img_size": list(pair(config.image_size)),
        "patch_size": list(pair(config.patch_size)),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio(config.mlp_width * (1 + swiglu), config.width),  # counts both halves
        "qkv_bias": config.qkv_bias,
        "init_values": 0.0 if config.layer_scale is None else config.layer_scale or FIRST_SCALE,
        "pos_embed": "none" if config.position == "none" else "learn",
        "reg_tokens": config.registers,
        "class_token": config.pool == "cls",
        "global_pool": POOLS[config.pool],
        "fc_norm": False,
        "act_layer": "silu" if swiglu else names[config.numerics.gelu],
    }
    return config_json(
        timm_name(config),
        arguments,
        config,
        facts,
        pool=POOLS[config.pool],
        first_conv=f"{resnet_root(config)}conv" if config.stem == "resnet" else "patch_embed.proj",
        classifier=["head", "head_dist"] if config.distillation else "head",
    )


def timm_name(config: VitConfig) -> str:
    """The architecture whose arguments can be changed into any other of its kind."""
    if config.stem == "resnet":
        return HYBRIDS.get(config.resnet_blocks, HYBRIDS[3, 4, 9])
    if config.mlp == "swiglu":
        return "vit_giant_patch14_dinov2"
    return "deit_base_distilled_patch16_224" if config.distillation else "vit_base_patch16_224"


def position(config: VitConfig) -> Rule:
    """timm has a row for each register, where we have none: zeros, which `tidy` sees to."""
    start, stop = config.num_class_tokens, config.num_prefix

    def unpack(table: Tensor) -> tuple[Tensor]:
        zeros = table.new_zeros(config.registers, config.width)
        return (torch.cat([table[:start], zeros, table[start:]])[None],)

    return Rule(
        "position.table",
        ("pos_embed",),
        lambda table: torch.cat([table[0, :start], table[0, stop:]]),
        unpack,
    )


def resnet_rules(config: VitConfig) -> Iterator[Rule]:
    ours, root = "stem.resnet", resnet_root(config)
    yield same(f"{ours}.root.weight", f"{root}conv.weight")
    yield from weight_and_bias(f"{ours}.norm", f"{root}norm")
    for stage, units in enumerate(config.resnet_blocks):
        for unit in range(units):
            here, there = f"{ours}.stages.{stage}.{unit}", f"{BACKBONE}stages.{stage}.blocks.{unit}"
            for index in (1, 2, 3):
                yield same(f"{here}.conv{index}.weight", f"{there}.conv{index}.weight")
                yield from weight_and_bias(f"{here}.norm{index}", f"{there}.norm{index}")
            if unit == 0:  # every stage begins with a change of width
                yield same(f"{here}.shortcut.0.weight", f"{there}.downsample.conv.weight")
                yield from weight_and_bias(f"{here}.shortcut.1", f"{there}.downsample.norm")


def resnet_root(config: VitConfig) -> str:
    """Where the first convolution is: with stages after it, it is called a stem."""
    return f"{BACKBONE}stem." if config.resnet_blocks else BACKBONE


def block_rules(config: VitConfig, ours: str, theirs: str) -> Iterator[Rule]:
    yield from weight_and_bias(f"{ours}.norm1", f"{theirs}.norm1")
    yield same(f"{ours}.attention.qkv.weight", f"{theirs}.attn.qkv.weight")
    if config.qkv_bias:
        yield same(f"{ours}.attention.qkv.bias", f"{theirs}.attn.qkv.bias")
    yield from weight_and_bias(f"{ours}.attention.merge", f"{theirs}.attn.proj")
    yield from weight_and_bias(f"{ours}.norm2", f"{theirs}.norm2")
    yield from mlp_rules(f"{ours}.mlp", f"{theirs}.mlp")
    if config.layer_scale is not None:
        yield same(f"{ours}.branch1.scale", f"{theirs}.ls1.gamma")
        yield same(f"{ours}.branch2.scale", f"{theirs}.ls2.gamma")


def map_rules() -> Iterator[Rule]:
    yield first("pool.probe", "attn_pool.latent")
    for ours, theirs in (("query", "q"), ("key_value", "kv"), ("merge", "proj"), ("norm", "norm")):
        yield from weight_and_bias(f"pool.{ours}", f"attn_pool.{theirs}")
    yield from mlp_rules("pool.mlp", "attn_pool.mlp")


def mlp_rules(ours: str, theirs: str) -> Iterator[Rule]:
    yield from weight_and_bias(f"{ours}.fc1", f"{theirs}.fc1")
    yield from weight_and_bias(f"{ours}.fc2", f"{theirs}.fc2")
