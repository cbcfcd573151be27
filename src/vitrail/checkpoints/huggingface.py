"""transformers' ViT: the table of its names in files, and the description of a model.

DeiT and DINOv2 of transformers are the same table with a few more tensors; they are read, and not
written. All other names and prefixes are turned into these by `huggingface_names.py`; what stands
beside the weights is in `huggingface_config.py` and `huggingface_processor.py`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vitrail.checkpoints import huggingface_names
from vitrail.checkpoints.facts import Facts
from vitrail.checkpoints.files import Weights
from vitrail.checkpoints.huggingface_config import (
    check_settings,
    class_names,
    image_size,
    model_settings,
    number,
    numerics,
)
from vitrail.checkpoints.huggingface_names import (
    DISTILLATION,
    PATCHES,
    POSITION,
    REGISTERS,
    above,
    has_head,
)
from vitrail.checkpoints.huggingface_processor import (
    PROCESSOR,
    processor_settings,
    read_processor,
)
from vitrail.checkpoints.rules import Entries, Rule, first, same, weight_and_bias
from vitrail.checkpoints.shapes import count, last_size, shape, usual_heads
from vitrail.data.preprocessing import preset
from vitrail.errors import CheckpointError
from vitrail.models.config import VitConfig, pair

CONFIG = "config.json"
tidy = huggingface_names.tidy


def recognizes(entries: Entries) -> bool:
    return f"{above(has_head(entries))}{PATCHES}.weight" in entries


def cannot(config: VitConfig) -> list[str]:
    """What of a model transformers' ViT has no words for; all numerics are in config.json."""
    wrong = {
        f"the stem {config.stem!r}": config.stem != "patches",
        f"positions of the kind {config.position!r}": config.position != "learned",
        f"positions placed at {config.position_place!r}": config.position_place != "stem",
        f"the pool {config.pool!r}": config.pool != "cls",
        "a head that reads a representation layer": config.num_classes and config.representation,
        "register tokens": config.registers,
        "a distillation token": config.distillation,
        "LayerScale": config.layer_scale is not None,
        "SwiGLU": config.mlp != "gelu",
    }
    return [what for what, applies in wrong.items() if applies]


def companions(config: VitConfig, facts: Facts) -> dict[str, dict[str, Any]]:
    """The files that `from_pretrained` wants beside the weights."""
    return {
        CONFIG: model_settings(config, facts.class_names),
        PROCESSOR: processor_settings(facts.preprocessing),
    }


def read_facts(settings: Mapping[str, Any], config: VitConfig) -> Facts | None:
    """Preprocessing and class names, if the weights had a config.json or a processor's file."""
    processor = settings.get(PROCESSOR)
    if "model_type" not in settings and processor is None:
        return None
    if isinstance(processor, Mapping):
        how = read_processor(processor, pair(config.image_size), config.channels)
    else:
        how = preset("transformers", pair(config.image_size), config.channels)
    return Facts(preprocessing=how, class_names=class_names(settings, config.num_classes))


def describe(weights: Weights) -> VitConfig:
    """Sizes are read from the shapes, and what shapes cannot say from config.json."""
    entries, settings = weights.entries, weights.settings
    start = above(has_head(entries))
    block = f"{start}encoder.layer.0"
    width, channels, down, across = shape(entries, f"{start}{PATCHES}.weight", 4)
    swiglu = f"{block}.mlp.weights_in.weight" in entries
    inside = shape(entries, f"{block}.{mlp_names(swiglu)[0]}.weight", 2)[0]
    scaled = f"{block}.layer_scale1.lambda1" in entries
    distillation = start + DISTILLATION in entries
    patches = shape(entries, start + POSITION, 3)[1] - 1 - distillation
    heads = settings.get("heads", settings.get("num_attention_heads"))
    config = VitConfig(
        depth=count(entries, rf"{re.escape(start)}encoder\.layer\.(\d+)\."),
        width=width,
        mlp_width=inside // 2 if swiglu else inside,
        heads=usual_heads(width) if heads is None else heads,
        patch_size=(down, across),
        image_size=image_size(settings, patches, (down, across)),
        channels=channels,
        num_classes=shape(entries, "classifier.weight", 2)[0] if has_head(entries) else 0,
        representation=last_size(entries, f"{start}pooler.dense.bias"),
        registers=shape(entries, start + REGISTERS, 3)[1] if start + REGISTERS in entries else 0,
        distillation=distillation,
        layer_scale=number(settings, "layerscale_value", 1.0) if scaled else None,
        qkv_bias=f"{block}.attention.attention.query.bias" in entries,
        mlp="swiglu" if swiglu else "gelu",
        dropout=number(settings, "hidden_dropout_prob", 0.0),
        numerics=numerics(settings, is_dino=scaled),
    )
    check_settings(settings, config)
    check_head(entries, config)
    return config


def check_head(entries: Entries, config: VitConfig) -> None:
    """Refuse DINOv2's classifier, whose input is twice as wide as the model."""
    if config.num_classes and shape(entries, "classifier.weight", 2)[1] == 2 * config.width:
        raise CheckpointError(
            "the classifier reads the class token and the mean of the patches side by side, as "
            "DINOv2's does, and no head here can; a DINOv2 without classifier can be loaded"
        )


def rules(config: VitConfig) -> list[Rule]:
    """Every tensor of ours and where transformers keeps it."""
    start = above(config.num_classes > 0)
    table = [
        *weight_and_bias("stem.projection", start + PATCHES),
        first("cls_token", f"{start}embeddings.cls_token"),
        first("position.table", start + POSITION),
    ]
    if config.distillation:
        table.append(first("distillation_token", start + DISTILLATION))
    if config.registers:
        table.append(first("registers", start + REGISTERS))
    for index in range(config.depth):
        table += block_rules(f"encoder.blocks.{index}", f"{start}encoder.layer.{index}", config)
    table += weight_and_bias("encoder.norm", f"{start}layernorm")
    if config.representation:
        table += weight_and_bias("representation", f"{start}pooler.dense")
    if config.num_classes:
        table += weight_and_bias("head", "classifier")
    if config.num_classes and config.distillation:
        table += weight_and_bias("distillation_head", "distillation_classifier")
    return table


def block_rules(ours: str, theirs: str, config: VitConfig) -> Iterator[Rule]:
    into, out_of = mlp_names(config.mlp == "swiglu")
    yield from weight_and_bias(f"{ours}.norm1", f"{theirs}.layernorm_before")
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        yield side_by_side(f"{ours}.attention.qkv.{kind}", f"{theirs}.attention.attention", kind)
    yield from weight_and_bias(f"{ours}.attention.merge", f"{theirs}.attention.output.dense")
    yield from weight_and_bias(f"{ours}.norm2", f"{theirs}.layernorm_after")
    yield from weight_and_bias(f"{ours}.mlp.fc1", f"{theirs}.{into}")
    yield from weight_and_bias(f"{ours}.mlp.fc2", f"{theirs}.{out_of}")
    if config.layer_scale is not None:
        for branch in (1, 2):
            yield same(f"{ours}.branch{branch}.scale", f"{theirs}.layer_scale{branch}.lambda1")


def mlp_names(swiglu: bool) -> tuple[str, str]:
    """The two layers of an MLP; DINOv2's giant has gated ones."""
    if swiglu:
        return "mlp.weights_in", "mlp.weights_out"
    return "intermediate.dense", "output.dense"


def side_by_side(ours: str, theirs: str, kind: str) -> Rule:
    """Query, key and value, which are three layers there, as one."""
    return Rule(
        ours,
        tuple(f"{theirs}.{part}.{kind}" for part in ("query", "key", "value")),
        lambda *parts: torch.cat(parts),
        lambda whole: whole.chunk(3),
    )
