"""Every weight's first value: the one place where that happens.

    stem, representation   LeCun normal              zero bias
    positions, registers   normal, std 0.02 (big_vision: 1 / sqrt(D))
    attention              Xavier uniform, q, k and v apart       zero bias
    MLP                    Xavier uniform            normal bias, std 1e-6
    Mixer's MLPs           LeCun normal              zero bias
    last norm of a unit    zero, so that the unit starts as its shortcut
    class token, head      zero, so that the first prediction is uniform over classes

These are the authors' ("google"). big_vision differs in the positions alone; timm draws nearly
everything from a normal of std 0.02 and leaves the patch embedding to torch. "quick" is for short
training: learned positions start as sines, so that there is something to tell places apart by
from the first step on.
"""

import math
from typing import get_args

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, unknown
from vitrail.models.config import Scheme
from vitrail.models.encoder import Branch, Mlp, SelfAttention, SwiGlu
from vitrail.models.pooling import AttentionPool
from vitrail.models.position import Learned2dPosition, LearnedPosition, RelativePosition, sines
from vitrail.models.resnet import StandardizedConv2d, Unit
from vitrail.models.stems import PatchProjection

Generator = torch.Generator | None

TRUNCATED_STD = 0.87962566103423978  # of a standard normal cut at two standard deviations
SMALL = 0.02
TINY = 1e-6


@torch.no_grad()
def initialize(
    model: nn.Module,
    scheme: Scheme = "google",
    *,
    head_bias: float = 0.0,
    generator: Generator = None,
) -> None:
    """Give every weight of a model its first value.

    `head_bias` is -10 where the authors pre-trained on ImageNet-21k with a sigmoid loss, and
    -6.9 on ImageNet-1k: it says "no" to every class until something is learned.
    """
    if scheme not in get_args(Scheme):
        raise unknown("initialization", scheme, get_args(Scheme))
    if next(model.parameters()).is_meta:
        return  # shapes only: there is nothing to fill
    for name, module in reversed(list(model.named_modules())):  # a parent overrules its parts
        start_part(name, module, generator)
    if scheme == "big_vision":
        for table in position_tables(model):
            nn.init.normal_(table, std=table.shape[-1] ** -0.5, generator=generator)
    if scheme in ("timm", "quick") and not hasattr(model, "encoder"):
        raise ConfigError(f"init={scheme!r} is for Vision Transformers; use 'google' here")
    if scheme == "quick":
        for module in model.modules():
            if isinstance(module, LearnedPosition) and module.table.shape[1] % 4 == 0:
                module.table[module.prefix :] = sines(module.grid, module.table.shape[1])
    if scheme == "timm":
        start_like_timm(model, generator)
    for head in (getattr(model, "head", None), getattr(model, "distillation_head", None)):
        if head is not None:
            if scheme != "timm":
                nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, head_bias)


def start_part(name: str, module: nn.Module, generator: Generator) -> None:
    """The authors' first values for what this module holds."""
    match module:
        case nn.Conv2d() | PatchProjection() | StandardizedConv2d():
            lecun_normal(module.weight, generator)
            if isinstance(module, PatchProjection):
                nn.init.zeros_(module.bias)
        case nn.LayerNorm() | nn.GroupNorm():
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        case nn.Linear() if name == "representation":
            lecun_normal(module.weight, generator)
            nn.init.zeros_(module.bias)
        case Mlp() if name.endswith("_mixing"):
            for layer in (module.fc1, module.fc2):
                lecun_normal(layer.weight, generator)
                nn.init.zeros_(layer.bias)
        case Mlp() | SwiGlu():
            for layer in (module.fc1, module.fc2):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.normal_(layer.bias, std=TINY, generator=generator)
        case SelfAttention():
            start_attention(module.qkv, 3, generator)
            start_attention(module.merge, 1, generator)
        case AttentionPool():
            nn.init.xavier_uniform_(module.probe, generator=generator)
            start_attention(module.query, 1, generator)
            start_attention(module.key_value, 2, generator)
            start_attention(module.merge, 1, generator)
        case Unit():
            nn.init.zeros_(module.norm3.weight)
        case Branch(scale=Tensor() as scale, first_scale=float() as value):
            nn.init.constant_(scale, value)
        case LearnedPosition() | Learned2dPosition() | RelativePosition():
            for table in module.parameters():
                nn.init.normal_(table, std=SMALL, generator=generator)
        case _ if name == "":
            start_tokens(module, generator)


def start_attention(layer: nn.Linear, maps: int, generator: Generator) -> None:
    for part in layer.weight.chunk(maps):  # several maps, not one several times as wide
        nn.init.xavier_uniform_(part, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def start_tokens(model: nn.Module, generator: Generator) -> None:
    for name in ("cls_token", "distillation_token"):
        if (token := getattr(model, name, None)) is not None:
            nn.init.zeros_(token)
    if (registers := getattr(model, "registers", None)) is not None:
        nn.init.normal_(registers, std=SMALL, generator=generator)  # equal ones would stay equal


def start_like_timm(model: nn.Module, generator: Generator) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=SMALL, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, PatchProjection):
            bound = 1 / math.sqrt(module.weight[0].numel())
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, AttentionPool):
            std = module.probe.shape[-1] ** -0.5
            bounds = {"a": -2 * std, "b": 2 * std}
            nn.init.trunc_normal_(module.probe, std=std, **bounds, generator=generator)
    for table in position_tables(model):
        nn.init.trunc_normal_(table, std=SMALL, generator=generator)
    for token, std in (("cls_token", TINY), ("registers", TINY), ("distillation_token", SMALL)):
        if (values := getattr(model, token, None)) is not None:
            nn.init.normal_(values, std=std, generator=generator)


def position_tables(model: nn.Module) -> list[nn.Parameter]:
    kinds = (LearnedPosition, Learned2dPosition, RelativePosition)
    return [p for m in model.modules() if isinstance(m, kinds) for p in m.parameters()]


def lecun_normal(weight: Tensor, generator: Generator) -> None:
    """A normal of variance 1 / inputs, cut at two standard deviations."""
    std = weight[0].numel() ** -0.5 / TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
