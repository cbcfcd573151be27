"""Random weights, their names in timm, transformers and torchvision, and what "the same" means.

Each `to_x` renames every tensor of a model of ours. The peer then loads the result strictly, so
that a tensor left over on either side is an error.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import create
from vitrail.models.vit import Model

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # of the largest logit
Checkpoint = dict[str, Tensor]

# Ours → theirs, as regular expressions that are tried in this order.
TIMM = {
    r"^stem\.resnet\.root": "patch_embed.backbone.stem.conv",
    r"^stem\.resnet\.norm": "patch_embed.backbone.stem.norm",
    r"^stem\.resnet\.stages": "patch_embed.backbone.stages",
    r"(backbone\.stages\.\d+)\.": r"\1.blocks.",
    r"shortcut\.0": "downsample.conv",
    r"shortcut\.1": "downsample.norm",
    r"^stem\.projection": "patch_embed.proj",
    r"^registers": "reg_token",
    r"^distillation_token": "dist_token",
    r"^distillation_head": "head_dist",
    r"^position\.table": "pos_embed",
    r"^encoder\.": "",
    r"attention\.qkv": "attn.qkv",
    r"attention\.merge": "attn.proj",
    r"branch(\d)\.scale": r"ls\1.gamma",
    r"^pool\.probe": "attn_pool.latent",
    r"^pool\.query": "attn_pool.q",
    r"^pool\.key_value": "attn_pool.kv",
    r"^pool\.merge": "attn_pool.proj",
    r"^pool\.": "attn_pool.",
}
TIMM_BIT = {
    r"^root": "stem.conv",
    r"^(stages\.\d+)\.": r"\1.blocks.",
    r"shortcut": "downsample.conv",
    r"^head": "head.fc",
}
TIMM_MIXER = {
    r"^stem": "stem.proj",
    r"token_mixing": "mlp_tokens",
    r"channel_mixing": "mlp_channels",
}
TRANSFORMERS = {  # the names in files, which every release reads
    r"^stem\.projection": "vit.embeddings.patch_embeddings.projection",
    r"^cls_token": "vit.embeddings.cls_token",
    r"^position\.table": "vit.embeddings.position_embeddings",
    r"^encoder\.norm": "vit.layernorm",
    r"^encoder\.blocks": "vit.encoder.layer",
    r"attention\.merge": "attention.output.dense",
    r"norm1": "layernorm_before",
    r"norm2": "layernorm_after",
    r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
    r"^representation": "vit.pooler.dense",
    r"^head": "classifier",
}
TORCHVISION = {
    r"^stem\.projection": "conv_proj",
    r"^cls_token": "class_token",
    r"^position\.table": "encoder.pos_embedding",
    r"^encoder\.norm": "encoder.ln",
    r"^encoder\.blocks\.": "encoder.layers.encoder_layer_",
    r"attention\.qkv\.": "self_attention.in_proj_",
    r"attention\.merge": "self_attention.out_proj",
    r"norm(\d)": r"ln_\1",
    r"mlp\.fc1": "mlp.0",
    r"mlp\.fc2": "mlp.3",
    r"^representation": "heads.pre_logits",
    r"^head\.": "heads.head.",
}
TOKENS = ("cls_token", "distillation_token", "registers", "position.table", "pool.probe")


def to_timm(model: Model) -> Checkpoint:
    return renamed(batched(model), TIMM)


def to_timm_bit(model: Model) -> Checkpoint:
    weights = renamed(model.state_dict(), TIMM_BIT)
    weights["head.fc.weight"] = weights["head.fc.weight"][:, :, None, None]  # a 1x1 convolution
    return weights


def to_timm_mixer(model: Model) -> Checkpoint:
    return renamed(model.state_dict(), TIMM_MIXER)


def to_transformers(model: Model) -> Checkpoint:
    weights = renamed(batched(model), TRANSFORMERS)
    for name in [name for name in weights if "attention.qkv" in name]:
        parts = zip(("query", "key", "value"), weights.pop(name).chunk(3), strict=True)
        for part, value in parts:
            weights[name.replace("qkv", f"attention.{part}")] = value
    return weights


def to_torchvision(model: Model) -> Checkpoint:
    return renamed(batched(model), TORCHVISION)


def batched(model: Model) -> Checkpoint:
    """Our weights, with the leading axis of length one that peers give to tokens and positions."""
    return {
        name: value[None] if name in TOKENS else value for name, value in model.state_dict().items()
    }


def renamed(weights: Checkpoint, table: dict[str, str]) -> Checkpoint:
    names = {}
    for name, value in weights.items():
        for ours, theirs in table.items():
            name = re.sub(ours, theirs, name)
        names[name] = value
    return names


@torch.no_grad()
def random_model(name: str, **changes: Any) -> Model:
    """A model in which no weight is zero or one: a swapped, lost or doubled one would be seen."""
    model = create(name, **changes).eval()
    generator = torch.Generator().manual_seed(0)
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            weight.copy_(noise / weight[0].numel() ** 0.5)
        else:
            weight.copy_(0.2 * noise + key.endswith(("weight", "scale")))
    return model


@torch.no_grad()
def difference(
    ours: nn.Module,
    theirs: nn.Module,
    *,
    size: tuple[int, int] = (224, 224),
    dtype: torch.dtype = torch.float32,
    call: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__,
) -> float:
    """max |ours - theirs| / max |theirs|, for the outputs of two random images."""
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = call(theirs.to(dtype).eval(), images)
    return relative(ours.to(dtype)(images), expected)


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
