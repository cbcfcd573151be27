"""transformers' CLIP and SigLIP image towers, alone or inside a model with a text tower.

CLIP has a class token and a norm before the encoder; SigLIP (1 and 2 at a fixed resolution) has an
attention pooling head. `normalize` converts all files to the names of the published ones:

    vision_model.encoder.layers.0.…     the image tower; its own files may have no prefix
    text_model.…, logit_scale, …        skipped, like the projections to the joint space
    vision_model.head.attention.in_proj_weight    split into query and key_value
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import huggingface
from vitrail.checkpoints.files import Checkpoint
from vitrail.checkpoints.metadata import Metadata
from vitrail.checkpoints.rules import (
    Rule,
    Table,
    applicable,
    infer_heads,
    modules,
    same,
    unsupported_features,
    without_batch,
)
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, VitConfig

TOWER = "vision_model."
PATCHES = "embeddings.patch_embedding"
POSITION = f"{TOWER}embeddings.position_embedding.weight"
LAYER = TOWER + "encoder.layers.{i}"
POOL = f"{TOWER}head."
IN_PROJ = f"{POOL}attention.in_proj_"
QUERY, KEY_VALUE = f"{POOL}attention.query.", f"{POOL}attention.key_value."
SKIPPED = {
    r"text_model\.": "the text tower",
    r"text_projection\.": "the text tower",
    r"visual_projection\.": "maps features to the space of the text tower",
    r"logit_(?:scale|bias)$": "compares images with texts",
    r"(?:vision_model\.)?embeddings\.position_ids$": "indices of positions",
}
DEFAULT_HEADS = 12  # of transformers, for a config.json that does not state it


def normalize(checkpoint: Checkpoint) -> Checkpoint:
    """Convert to the names of published files, keeping only the image tower."""
    if not any(name.endswith(f"{PATCHES}.weight") for name in checkpoint.tensors):
        return checkpoint
    unused = {r"vision_model\.head\.": "not used by transformers' classifier"}
    checkpoint = checkpoint.without(
        SKIPPED | unused if "classifier.weight" in checkpoint.tensors else SKIPPED
    )
    tensors = {
        name if name.startswith((TOWER, "classifier.")) else TOWER + name: tensor
        for name, tensor in checkpoint.tensors.items()
    }
    for kind in ("weight", "bias"):
        joint = tensors.get(IN_PROJ + kind)
        if joint is not None and joint.shape and joint.shape[0] % 3 == 0:
            width = joint.shape[0] // 3
            tensors[QUERY + kind] = joint.map(lambda array, width=width: array[:width])
            tensors[KEY_VALUE + kind] = joint.map(lambda array, width=width: array[width:])
            del tensors[IN_PROJ + kind]
    return replace(checkpoint, tensors=tensors)


def join_projections(config: VitConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo the split of `normalize`."""
    for kind in ("weight", "bias"):
        if QUERY + kind in tensors:
            parts = [tensors.pop(QUERY + kind), tensors.pop(KEY_VALUE + kind)]
            tensors[IN_PROJ + kind] = torch.cat(parts)
    return tensors


def tower_config(checkpoint: Checkpoint) -> VitConfig:
    """Infer the config from shapes, and from config.json where shapes are ambiguous."""
    tensors, settings = checkpoint.tensors, checkpoint.settings
    if isinstance(tower := settings.get("vision_config"), Mapping):  # of a model with a text tower
        settings = {**settings, **tower}
    width, channels, *patch = checkpoint.shape(f"{TOWER}{PATCHES}.weight", 4)
    clip, has_head = f"{TOWER}pre_layrnorm.weight" in tensors, "classifier.weight" in tensors
    if clip and has_head:
        raise CheckpointError(
            "unsupported CLIPForImageClassification: its classifier reads patches before the final "
            "norm; a CLIP image tower without classifier can be loaded"
        )
    pool = "cls" if clip else "map" if f"{POOL}probe" in tensors else "mean"
    gelu = huggingface.read_gelu(settings, "quick_gelu" if clip else "gelu_pytorch_tanh")
    eps = huggingface.number(settings, "layer_norm_eps", 1e-5 if clip else 1e-6)
    default_heads = DEFAULT_HEADS if "model_type" in settings else None
    heads = infer_heads(
        width, settings.get("heads"), settings.get("num_attention_heads"), default_heads
    )
    config = VitConfig(
        depth=checkpoint.count(rf"{re.escape(TOWER)}encoder\.layers\.(\d+)\."),
        width=width,
        mlp_width=checkpoint.shape(f"{LAYER.format(i=0)}.mlp.fc1.weight", 2)[0],
        heads=heads,
        patch_size=(patch[0], patch[1]),
        image_size=huggingface.infer_image_size(
            settings, checkpoint.shape(POSITION, 2)[0] - clip, (patch[0], patch[1])
        ),
        channels=channels,
        num_classes=checkpoint.size("classifier.weight", 2),
        pool=pool,
        pre_norm=clip,
        numerics=replace(NUMERICS["transformers"], gelu=gelu, norm_eps=eps),
    )
    huggingface.check_stated(settings, config)
    return config


def tower_templates(config: VitConfig) -> Iterator[Rule]:
    ours = "encoder.blocks.{i}"
    names = {
        "stem.projection": TOWER + PATCHES,
        "encoder.pre_norm": f"{TOWER}pre_layrnorm",  # the spelling of transformers
        f"{ours}.norm1": f"{LAYER}.layer_norm1",
        f"{ours}.attention.merge": f"{LAYER}.self_attn.out_proj",
        f"{ours}.norm2": f"{LAYER}.layer_norm2",
        f"{ours}.mlp.fc1": f"{LAYER}.mlp.fc1",
        f"{ours}.mlp.fc2": f"{LAYER}.mlp.fc2",
        "encoder.norm": f"{TOWER}post_layernorm",
        "pool.query": QUERY.removesuffix("."),
        "pool.key_value": KEY_VALUE.removesuffix("."),
        "pool.merge": f"{POOL}attention.out_proj",
        "pool.norm": f"{POOL}layernorm",
        "pool.mlp.fc1": f"{POOL}mlp.fc1",
        "pool.mlp.fc2": f"{POOL}mlp.fc2",
        "head": "classifier",
    }
    yield from modules(names)
    qkv = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"]
    yield from huggingface.joint(f"{ours}.attention.qkv", qkv)
    token = (f"{TOWER}embeddings.class_embedding",)
    yield Rule("cls_token", token, lambda array: array[None], lambda tensor: (tensor[0],))
    yield same("position.table", POSITION)
    yield without_batch("pool.probe", f"{POOL}probe")


def tower_unsupported(config: VitConfig) -> list[str]:
    clip, head = config.pre_norm, bool(config.num_classes)
    square = isinstance(config.image_size, int) and isinstance(config.patch_size, int)
    features = {
        "a classifier on a CLIP tower": clip and head,
        "a classifier on attention pooling": head and config.pool == "map",
        "mean pooling without a classifier": not head and config.pool == "mean",
        "a representation layer": config.representation,
        "non-square images or patches": not square,
    }
    pools = ("cls",) if clip else ("map", "mean")
    return unsupported_features(config, pools=pools, pre_norm=clip) + applicable(features)


def tower_json(config: VitConfig, metadata: Metadata) -> dict[str, dict[str, Any]]:
    kind, kind_name = ("clip", "CLIP") if config.pre_norm else ("siglip", "Siglip")
    tower = huggingface.common_json(config, metadata)
    labels = {name: tower.pop(name) for name in ("id2label", "label2id")}
    tower |= {"model_type": f"{kind}_vision_model", "attention_dropout": 0.0}
    settings: dict[str, Any] = {"architectures": [f"{kind_name}VisionModel"], **tower}
    if config.num_classes:
        settings = labels | {
            "architectures": ["SiglipForImageClassification"],
            "model_type": "siglip",
            "vision_config": tower | {"vision_use_head": False},
        }
    return huggingface.json_files(settings, metadata.preprocessing)


TOWER_TABLE = Table(
    VitConfig,
    lambda tensors: f"{TOWER}{PATCHES}.weight" in tensors,
    tower_config,
    tower_templates,
    tower_unsupported,
    tower_json,
    join_projections,
)
