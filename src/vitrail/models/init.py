"""Weight initialization of all models.

    stem, representation    LeCun normal                            zero bias
    positions, registers    normal, std 0.02 (big_vision: 1 / sqrt(D))
    attention               Xavier uniform, q, k and v separately   zero bias
    MLP                     Xavier uniform                          normal bias, std 1e-6
    Mixer's MLPs            LeCun normal                            zero bias
    last norm of a unit     zero, so that a ResNet-v1 unit starts as its shortcut
    class token, head       zero, so that initial predictions are uniform

These are the authors' ("google"). "big_vision" differs in the positions; "timm" draws almost
everything from a normal of std 0.02, and the patch embedding as torch does. "quick" is for short
training: learned positions start as a sin-cos embedding.
"""

import math
from typing import cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError, unknown
from vitrail.models.attention import SelfAttention
from vitrail.models.config import InitScheme
from vitrail.models.encoder import Branch, Mlp, SwiGlu
from vitrail.models.patch_embed import ConvStem, PatchProjection
from vitrail.models.pooling import AttentionPool
from vitrail.models.pos_embed import Learned2dPosEmbed, LearnedPosEmbed, RelativePosEmbed, sincos_2d

Generator = torch.Generator | None

TRUNCATED_STD = 0.87962566103423978  # std of a standard normal truncated to [-2, 2]
SMALL_STD = 0.02
TINY_STD = 1e-6
WHITENING_EPS = 5e-4  # relative to the largest variance, so that noise is not amplified


@torch.no_grad()
def initialize(
    model: nn.Module,
    scheme: InitScheme = "google",
    *,
    head_bias: float = 0.0,
    generator: Generator = None,
) -> None:
    """Initialize all weights of a model in place.

    The authors use a `head_bias` of -10 for pre-training on ImageNet-21k with a sigmoid loss, and
    of -6.9 on ImageNet-1k, so that initial probabilities are low.
    """
    if scheme not in get_args(InitScheme):
        raise unknown("initialization", scheme, get_args(InitScheme))
    if next(model.parameters()).is_meta:
        return
    for name, module in reversed(list(model.named_modules())):  # parents override their children
        init_module(name, module, generator)
    position_kinds = (LearnedPosEmbed, Learned2dPosEmbed, RelativePosEmbed)
    positions = [
        p for m in model.modules() if isinstance(m, position_kinds) for p in m.parameters()
    ]
    if scheme == "big_vision":
        for table in positions:
            nn.init.normal_(table, std=table.shape[-1] ** -0.5, generator=generator)
    if scheme in ("timm", "quick") and not hasattr(model, "encoder"):
        raise ConfigError(f"init={scheme!r} needs a Vision Transformer; use 'google'")
    if scheme == "quick":
        for module in model.modules():
            if isinstance(module, LearnedPosEmbed) and module.table.shape[1] % 4 == 0:
                module.table[module.prefix :] = sincos_2d(module.grid, module.table.shape[1])
    if scheme == "timm":
        init_like_timm(model, positions, generator)
    for head in (getattr(model, "head", None), getattr(model, "distillation_head", None)):
        if head is not None:
            if scheme != "timm":
                nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, head_bias)


def init_module(name: str, module: nn.Module, generator: Generator) -> None:
    """Apply the "google" scheme to the parameters that a module defines."""
    match module:
        case nn.Conv2d() | PatchProjection():
            lecun_normal_(module.weight, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        case nn.LayerNorm() | nn.GroupNorm():
            last_of_unit = name.startswith("stem.resnet.") and name.endswith(".norm3")
            nn.init.constant_(module.weight, 0.0 if last_of_unit else 1.0)
            nn.init.zeros_(module.bias)
        case nn.RMSNorm():
            nn.init.ones_(module.weight)
        case nn.Linear() if name == "representation":
            lecun_normal_(module.weight, generator)
            nn.init.zeros_(module.bias)
        case Mlp() if name.endswith("_mixing"):
            for layer in (module.fc1, module.fc2):
                lecun_normal_(layer.weight, generator)
                nn.init.zeros_(layer.bias)
        case Mlp() | SwiGlu():
            for layer in (module.fc1, module.fc2):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.normal_(layer.bias, std=TINY_STD, generator=generator)
        case SelfAttention():
            init_projection(module.qkv, 3, generator)
            init_projection(module.merge, 1, generator)
            if module.q_bias is not None and module.v_bias is not None:
                nn.init.zeros_(module.q_bias)
                nn.init.zeros_(module.v_bias)
        case AttentionPool():
            nn.init.xavier_uniform_(module.probe, generator=generator)
            init_projection(module.query, 1, generator)
            init_projection(module.key_value, 2, generator)
            init_projection(module.merge, 1, generator)
        case Branch(scale=Tensor() as scale, initial_scale=float() as value):
            nn.init.constant_(scale, value)
        case LearnedPosEmbed() | Learned2dPosEmbed() | RelativePosEmbed():
            for table in module.parameters():
                nn.init.normal_(table, std=SMALL_STD, generator=generator)
        case nn.Module(table=nn.Parameter() as table):  # AxialResNet's relative positions
            nn.init.normal_(table, std=(table.shape[1] // 2) ** -0.5, generator=generator)
        case _ if name == "":  # the model itself
            for token in ("cls_token", "distillation_token"):
                if (parameter := getattr(module, token, None)) is not None:
                    nn.init.zeros_(parameter)
            if (registers := getattr(module, "registers", None)) is not None:
                nn.init.normal_(registers, std=SMALL_STD, generator=generator)  # break symmetry


def init_projection(layer: nn.Linear, parts: int, generator: Generator) -> None:
    """Xavier uniform for each of several projections that share one layer."""
    for part in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(part, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def init_like_timm(model: nn.Module, positions: list[nn.Parameter], generator: Generator) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=SMALL_STD, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, PatchProjection):
            bound = 1 / math.sqrt(module.weight[0].numel())
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, AttentionPool):
            std = module.probe.shape[-1] ** -0.5
            bounds = {"a": -2 * std, "b": 2 * std}
            nn.init.trunc_normal_(module.probe, std=std, **bounds, generator=generator)
    for table in positions:
        nn.init.trunc_normal_(table, std=SMALL_STD, generator=generator)
    stds = {"cls_token": TINY_STD, "registers": TINY_STD, "distillation_token": SMALL_STD}
    for name, std in stds.items():
        if (parameter := getattr(model, name, None)) is not None:
            nn.init.normal_(parameter, std=std, generator=generator)


def lecun_normal_(weight: Tensor, generator: Generator) -> None:
    """Normal of variance 1 / fan_in, truncated at two standard deviations."""
    std = weight[0].numel() ** -0.5 / TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


@torch.no_grad()
def whiten(stem: ConvStem, images: Tensor) -> None:
    """Initialize a stem's first convolution with whitening filters for images (B, C, H, W).

    The filters replace the first ones of the convolution and keep the scale of its weight.
    """
    weight = cast(nn.Conv2d, stem.layers[0]).weight
    filters = whitening_filters(images, len(weight), weight.shape[-1])
    weight[: len(filters)] = filters * (weight.std() / filters.std())


def whitening_filters(images: Tensor, count: int, size: int) -> Tensor:
    """Return up to `count` filters (n, C, size, size) that whiten small patches of the images.

    Neighboring pixels are highly correlated, so random filters mostly see the local mean. These
    are the principal components of patches, scaled to unit variance; each comes with both signs,
    since a ReLU follows. From fast CIFAR-10 training (Page 2018; Jordan 2024, arXiv:2404.00498);
    docs/notebook.md has the measured gain.
    """
    patches = F.unfold(images.double(), size).transpose(1, 2).flatten(0, 1)  # (., C * P * P)
    variances, directions = torch.linalg.eigh(torch.cov(patches.T))  # in ascending order
    floor = WHITENING_EPS * variances[-1] + 1e-12  # constant images have no variance
    filters = (directions / (variances.clamp(min=0) + floor).sqrt()).T
    filters = filters.flip(0)[: count // 2].view(-1, images.shape[1], size, size)
    return torch.cat([filters, -filters]).to(images.dtype)
