"""DINOv3 in the names of transformers, timm and Meta (arXiv:2508.10104).

A ViT with rotary positions, registers, LayerScale and no key bias. timm builds it as an EVA model;
its files and Meta's are converted to the names of timm's ViT, which `timm.py` reads:

    storage_tokens                      registers (Meta)
    rope_embed.periods                  its length gives the number of heads (Meta)
    attn.qkv.bias, attn.qkv.bias_mask   becomes attn.q_bias and attn.v_bias, as in timm (Meta)
    mlp.w1, mlp.w2 / mlp.fc1_g, fc1_x   gate and value of SwiGLU, joined (Meta / timm)
    local_cls_norm                      only used in pre-training: skipped (Meta)
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import huggingface, timm
from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.metadata import Metadata
from vitrail.checkpoints.rules import (
    Rule,
    Table,
    applicable,
    infer_heads,
    join_gates,
    modules,
    same,
    unsupported_features,
    unsupported_numerics,
    without_batch,
)
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, VitConfig, normalize_size

PERIODS = "rope_embed.periods"
SKIPPED = {
    r"rope_embed\.periods$": "computed from the number of heads",
    r"blocks\.\d+\.attn\.qkv\.bias_mask$": "the key bias is zero",
    r"local_cls_norm\.": "only used in pre-training",
}
GATES = ((".mlp.w1.", ".mlp.w2."), (".mlp.fc1_g.", ".mlp.fc1_x."))
# transformers
PATCHES = "embeddings.patch_embeddings"
MASK_TOKEN = "embeddings.mask_token"
REGISTERS = "embeddings.register_tokens"  # (1, 0, D) if there are none
LAYER = "layer.{i}"
MLPS = {"gelu": (".mlp.up_proj",), "swiglu": (".mlp.gate_proj", ".mlp.up_proj")}


def normalize_timm(checkpoint: Checkpoint) -> Checkpoint:
    """Convert timm's EVA models and Meta's files to the names of timm's ViT."""
    settings, current = dict(checkpoint.settings), checkpoint.without(SKIPPED)
    if PERIODS in checkpoint.tensors and timm.PATCHES in current.tensors:
        width = checkpoint.shape(timm.PATCHES, 4)[0]
        settings.setdefault("heads", width // (4 * checkpoint.shape(PERIODS, 1)[0]))
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in join_gates(current.tensors, GATES, ".mlp.fc1.").items():
        if name.endswith("attn.qkv.bias") and f"{name}_mask" in checkpoint.tensors:
            for index, part in ((0, "q"), (2, "v")):
                bias = tensor.map(lambda bias, index=index: bias.chunk(3)[index])
                tensors[name.replace("qkv.bias", f"{part}_bias")] = bias
        else:
            tensors["reg_token" if name == "storage_tokens" else name] = tensor
    return replace(current, tensors=tensors, settings=settings)


def eva_names(config: VitConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the names of timm's ViT to those of its EVA models."""
    return {re.sub(r"\.ls(\d)\.gamma$", r".gamma_\1", name): x for name, x in tensors.items()}


def eva_unsupported(config: VitConfig) -> list[str]:
    features = {
        f"position={config.position!r}": config.position != "rotary",
        "a key bias": config.qkv_bias and config.key_bias,
        "qk_norm=True": config.qk_norm,
        "a norm before the encoder": config.pre_norm,
    }
    plain = replace(config, position="none", position_place=None, qk_norm=False, key_bias=True)
    plain = replace(plain, pre_norm=False, numerics=NUMERICS["timm"])
    numerics = replace(NUMERICS["timm"], norm_eps=timm.CLIP_EPS)
    others = timm.vit_unsupported(plain)
    return applicable(features) + others + unsupported_numerics(config, numerics)


def eva_json(config: VitConfig, metadata: Metadata) -> dict[str, dict[str, Any]]:
    arguments = {
        "mlp_ratio": timm.mlp_ratio(config.mlp_width, config.width),
        "swiglu_mlp": config.mlp == "swiglu",
        "swiglu_align_to": 0,  # else gate and value are separate tensors
        "init_values": config.layer_scale,
        "num_reg_tokens": config.registers,
        "rope_temperature": config.rope_theta,
    }
    name = "vit_small_patch16_dinov3"  # all else is in its arguments
    return timm.config_json(name, arguments, config, metadata, "patch_embed.proj", "head")


TIMM = Table(
    VitConfig,
    lambda tensors: False,  # read as timm's ViT
    timm.vit_config,
    timm.vit_templates,
    eva_unsupported,
    eva_json,
    eva_names,
)


# transformers.


def normalize(checkpoint: Checkpoint) -> Checkpoint:
    """Convert the names of `model.state_dict()` to those of files, without the mask token."""
    if f"{PATCHES}.weight" not in checkpoint.tensors:
        return checkpoint
    checkpoint = checkpoint.without({f"{re.escape(MASK_TOKEN)}$": "only used in pre-training"})
    tensors = {re.sub(r"^model\.", "", name): x for name, x in checkpoint.tensors.items()}
    if REGISTERS in tensors and 0 in tensors[REGISTERS].shape:
        del tensors[REGISTERS]
    return replace(checkpoint, tensors=tensors)


def add_tokens(config: VitConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the tensors that `normalize` removes."""
    empty = {} if config.registers else {REGISTERS: torch.zeros(1, 0, config.width)}
    return tensors | empty | {MASK_TOKEN: torch.zeros(1, 1, config.width)}


def vit_config(checkpoint: Checkpoint) -> VitConfig:
    """Infer the config from shapes, and from config.json where shapes are ambiguous."""
    tensors, settings = checkpoint.tensors, checkpoint.settings
    width, channels, *patch = checkpoint.shape(f"{PATCHES}.weight", 4)
    first = LAYER.format(i=0)
    swiglu = f"{first}.mlp.gate_proj.weight" in tensors
    if swiglu and settings.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"unsupported hidden_act={settings['hidden_act']!r} in config.json of a gated MLP; "
            "supported: silu"
        )
    heads = infer_heads(
        width, settings.get("heads"), settings.get("num_attention_heads"), *timm.rotary_heads(width)
    )
    config = VitConfig(
        depth=checkpoint.count(r"layer\.(\d+)\."),
        width=width,
        mlp_width=checkpoint.shape(f"{first}.mlp.up_proj.weight", 2)[0],
        heads=heads,
        patch_size=(patch[0], patch[1]),
        image_size=normalize_size("image_size", settings.get("image_size", timm.DEFAULT_SIZE)),
        channels=channels,
        num_classes=0,
        position="rotary",
        rope_theta=huggingface.number(settings, "rope_theta", 100.0),
        registers=checkpoint.size(REGISTERS, 3, axis=1),
        layer_scale=huggingface.number(settings, "layerscale_value", 1.0),
        qkv_bias=f"{first}.attention.q_proj.bias" in tensors,
        key_bias=f"{first}.attention.k_proj.bias" in tensors,
        mlp="swiglu" if swiglu else "gelu",
        numerics=replace(
            NUMERICS["transformers"],
            gelu="exact" if swiglu else huggingface.read_gelu(settings, "gelu"),
            norm_eps=huggingface.number(settings, "layer_norm_eps", 1e-5),
        ),
    )
    huggingface.check_stated(settings, config)
    return config


def vit_templates(config: VitConfig) -> Iterator[Rule]:
    ours = "encoder.blocks.{i}"
    names = {
        "stem.projection": PATCHES,
        f"{ours}.norm1": f"{LAYER}.norm1",
        f"{ours}.attention.merge": f"{LAYER}.attention.o_proj",
        f"{ours}.norm2": f"{LAYER}.norm2",
        f"{ours}.mlp.fc2": f"{LAYER}.mlp.down_proj",
        "encoder.norm": "norm",
    }
    yield from modules(names)
    qkv = [f"{LAYER}.attention.{part}_proj" for part in "qkv"]
    yield from huggingface.joint(f"{ours}.attention.qkv", qkv)
    for part in "qv":
        yield same(f"{ours}.attention.{part}_bias", f"{LAYER}.attention.{part}_proj.bias")
    yield from huggingface.joint(f"{ours}.mlp.fc1", [LAYER + part for part in MLPS[config.mlp]])
    for i in (1, 2):
        yield same(f"{ours}.branch{i}.scale", f"{LAYER}.layer_scale{i}.lambda1")
    yield without_batch("cls_token", "embeddings.cls_token")
    yield without_batch("registers", REGISTERS)


def vit_unsupported(config: VitConfig) -> list[str]:
    features = {
        f"position={config.position!r}": config.position != "rotary",
        "a DINOv3 without LayerScale": config.layer_scale is None,
        "a DINOv3 with a classifier": config.num_classes,
        "a representation layer": config.representation,
    }
    allowed = replace(
        config,
        position="learned",
        position_place=None,
        registers=0,
        layer_scale=None,
        mlp="gelu",
        key_bias=True,
    )
    return applicable(features) + unsupported_features(allowed, qkv_bias=False)


def vit_json(config: VitConfig, metadata: Metadata) -> dict[str, dict[str, Any]]:
    swiglu, bias = config.mlp == "swiglu", config.qkv_bias
    settings = huggingface.common_json(config, metadata) | {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "use_gated_mlp": swiglu,
        "layerscale_value": config.layer_scale,
        "num_register_tokens": config.registers,
        "rope_theta": config.rope_theta,
        "query_bias": bias,
        "key_bias": bias and config.key_bias,
        "value_bias": bias,
        "proj_bias": True,
        "mlp_bias": True,
    }
    settings |= {"hidden_act": "silu"} if swiglu else {}
    return huggingface.json_files(settings, metadata.preprocessing)


TRANSFORMERS = Table(
    VitConfig,
    lambda tensors: {f"{PATCHES}.weight", "layer.0.norm1.weight"} <= tensors.keys(),
    vit_config,
    vit_templates,
    vit_unsupported,
    vit_json,
    add_tokens,
)
