"""timm checkpoints: ViT and hybrid, BiT (ResNetV2) and MLP-Mixer, with config.json.

CLIP and SigLIP image towers are among timm's ViTs. DeiT, DeiT III, DINO, DINOv2 and MAE use timm's
names with variations, which `normalize` removes:

    module., backbone., model., _orig_mod.   wrappers: data parallel, DINO, Lightning, torch.compile
    head.mlp.…, head.last_layer.…            DINO's projection head: skipped, like mask_token
    decoder_blocks.…, decoder_embed.…        MAE's decoder: skipped
    blocks.<chunk>.<i>.…                     DINOv2 with chunked blocks
    register_tokens, mlp.w12, mlp.w3         DINOv2
    blocks.<i>.gamma_1                       DeiT III

The position table has a row per token (timm), per patch (DeiT III, timm's DINOv2 with registers),
or for class token and patches (DINOv2). It is converted to the first; missing rows become zeros.

config.json, if there is one:

    architecture     a name known to timm; `model_args` override its arguments
    global_pool      "token", "avg" or "map"
    pretrained_cfg   preprocessing and class names

Shapes: T tokens before the patches, R of them registers, N patches, D width.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.metadata import ASSUMED, Metadata
from vitrail.checkpoints.rules import (
    Rule,
    Table,
    applicable,
    conv_head,
    infer_heads,
    is_square,
    modules,
    resnet_units,
    same,
    square_image,
    substitute,
    unsupported_numerics,
    unsupported_reason,
    without_batch,
)
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import (
    NUMERICS,
    BitConfig,
    Config,
    Gelu,
    MixerConfig,
    Pool,
    VitConfig,
    pair,
    resnet_stride,
)
from vitrail.models.resnet import EXPANSION, ROOT_WIDTH

WRAPPERS = r"^(?:(?:module|model|backbone|_orig_mod)\.)+"
VARIANT_NAMES = (
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
    (r"^(blocks\.\d+)\.gamma_(\d)$", r"\1.ls\2.gamma"),
    (r"^register_tokens$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)
SKIPPED = {
    r"mask_token$": "only used in pre-training",
    r"decoder_(?:embed|blocks|norm|pred|pos_embed)": "MAE's pre-training decoder",
    r"(?:head|dino_head|ibot_head)\.(?:mlp|last_layer)\.": "DINO's pre-training head",
}
PATCHES = "patch_embed.proj.weight"
BACKBONE = "patch_embed.backbone."  # the ResNet of a hybrid
BACKBONE_UNIT = r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\."
OURS = "vitrail"  # prefix of the metadata keys in files written by vitrail

DEFAULT_SIZE = 224  # if neither positions nor settings state the image size
LAYER_SCALE_INIT = 1e-5  # as in DINOv2; it cannot be read from trained weights
ACTIVATIONS: dict[str, Gelu] = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
CLIP_EPS = 1e-5  # of models with a norm before the encoder or rotary positions
POOLS: dict[Pool, str] = {"cls": "token", "mean": "avg", "map": "map"}
# Architectures whose heads or GELU differ from the defaults for their width.
HEADS = {
    "vit_base_patch16_gap": 16,
    "vit_giantopt": 16,
    "test_vit": 2,
}
TANH_GELU = (
    "vit_base_patch32_siglip_",
    "vit_so400m_patch16_siglip_",
    "vit_giantopt_",
    "vit_large_patch16_siglip_512",
    "vit_large_patch16_siglip_gap_512",
)
# Architectures with settings that no argument can change.
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
BITS = {  # blocks, or the first of them → architecture, its width factor
    blocks[:stages]: (name, factor)  # timm builds a stage per entry of `channels`
    for blocks, name, factor in (
        ((3, 8, 36, 3), "resnetv2_152x2_bit", 2),
        ((3, 4, 23, 3), "resnetv2_101x1_bit", 1),
        ((3, 4, 6, 3), "resnetv2_50x1_bit", 1),  # the last wins
    )
    for stages in range(1, 5)
}
MIXERS = {  # patch size, depth, width → architecture
    (patch, depth, width): f"mixer_{size}{patch}_224"
    for size, depth, width in (("s", 8, 512), ("b", 12, 768), ("l", 24, 1024))
    for patch in (16, 32)
}
PROVENANCE_KEYS = ("license", "origin_url")
# Resampling filters without an exact counterpart map to the nearest one; "random" draws from
# bilinear and bicubic.
INTERPOLATIONS = {"box": "area", "hamming": "bilinear", "random": "bilinear"}


# Names and layouts of timm's relatives.


def normalize(checkpoint: Checkpoint) -> Checkpoint:
    """Convert to timm's current names, without tensors that only pre-training uses."""
    name = parse_settings(checkpoint.settings).architecture
    if (reason := unsupported_reason(name)) and not name.startswith("resnetv2_"):
        raise CheckpointError(
            f"unsupported timm model {name} ({reason}); supported: ViT, DeiT, hybrids, CLIP, "
            "SigLIP, DINO, resnetv2_*_bit and mixer"
        )
    names = {name: re.sub(WRAPPERS, "", name) for name in checkpoint.tensors}
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}  # stripping would merge two tensors
    tensors = {name: checkpoint.tensors[original] for original, name in names.items()}
    kept, tensors = replace(checkpoint, tensors=tensors).without(SKIPPED), {}
    for name, tensor in kept.tensors.items():
        current = substitute(name, VARIANT_NAMES)
        # If two tensors get the same name, the second keeps its old one: `read` reports it.
        tensors[name if current in tensors else current] = tensor
    normalized = replace(kept, tensors=tensors)
    ours = any(key.startswith(OURS) for key in checkpoint.settings)
    if ours or not {PATCHES, "pos_embed"} <= tensors.keys():
        return normalized
    return complete_position_table(normalized)


def complete_position_table(checkpoint: Checkpoint) -> Checkpoint:
    """Give every token a row in the position table."""
    tensors = checkpoint.tensors
    table, registers = tensors["pos_embed"], tensors.get("reg_token")
    if len(table.shape) != 3 or (registers is not None and len(registers.shape) != 3):
        return checkpoint  # `read` reports the shape
    start = ("cls_token" in tensors) + ("dist_token" in tensors)
    stop = start + (registers.shape[1] if registers is not None else 0)
    stride, sizes = token_stride(checkpoint), parse_settings(checkpoint.settings).image_sizes
    grids = {(height // stride[0]) * (width // stride[1]) for height, width in sizes}
    candidates = [  # numbers of rows before the patches such that the rest forms a grid
        rows
        for is_grid in (grids.__contains__, is_square)
        for rows in (stop, start, 0)
        if is_grid(table.shape[1] - rows)
    ]
    rows = candidates[0] if candidates else stop

    def with_zeros(table: Tensor, start: int, stop: int, count: int) -> Tensor:
        """Replace the rows from `start` to `stop` of a table (1, T + N, D) by rows of zeros."""
        zeros = table.new_zeros(table.shape[0], count, table.shape[2])
        return torch.cat([table[:, :start], zeros, table[:, stop:]], dim=1)

    if rows < stop:
        completed = table.map(lambda table: with_zeros(table, rows, rows, stop - rows))
        guess = {"positions": f"all {table.shape[1]} rows are assumed to be patch positions"}
        guesses = checkpoint.guesses | ({} if grids else guess)
        return replace(checkpoint, tensors=tensors | {"pos_embed": completed}, guesses=guesses)
    if registers is None:
        return checkpoint
    # Registers with positions: our registers have none, so add the two.
    sums = LazyTensor(
        registers.shape, lambda: registers.read().float() + table.read()[:, start:stop].float()
    )
    rest = table.map(lambda table: with_zeros(table, start, stop, stop - start))
    return replace(checkpoint, tensors=tensors | {"reg_token": sums, "pos_embed": rest})


def token_stride(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the distance between neighboring tokens in pixels."""
    _, _, height, width = checkpoint.shape(PATCHES, 4)
    is_hybrid = any(name.startswith(BACKBONE) for name in checkpoint.tensors)
    shrink = resnet_stride(checkpoint.units(BACKBONE_UNIT)) if is_hybrid else 1
    return height * shrink, width * shrink


# config.json.


class TimmSettings(NamedTuple):
    """The parts of config.json that describe the model; empty if absent or invalid."""

    architecture: str
    model_args: Mapping[str, Any]
    pretrained_cfg: Mapping[str, Any]
    image_sizes: list[tuple[int, int]]  # most specific first
    pool: str | None


def parse_settings(settings: Mapping[str, Any]) -> TimmSettings:
    name, args = settings.get("architecture"), settings.get("model_args")
    cfg = settings.get(
        "pretrained_cfg", settings if "architecture" in settings else {}
    )  # old: flat
    args, cfg = (values if isinstance(values, Mapping) else {} for values in (args, cfg))
    size, input_size = args.get("img_size"), cfg.get("input_size")
    candidates = [(size, size) if isinstance(size, int) else size]
    if isinstance(input_size, Sequence):
        candidates.append(input_size[1:])  # (C, H, W)
    sizes = [
        (sides[0], sides[1])
        for sides in candidates
        if isinstance(sides, Sequence)
        and len(sides) == 2
        and all(isinstance(side, int) and side > 0 for side in sides)
    ]
    pools = [section.get("global_pool") for section in (args, settings, cfg)]
    pool = next((pool for pool in pools if isinstance(pool, str)), None)
    name = name.split(".")[0] if isinstance(name, str) else ""
    return TimmSettings(name, args, cfg, sizes, pool)


def infer_image_size(
    patches: int | None, stride: tuple[int, int], settings: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the image size with this many patches: from the settings, or a square.

    None: the weights do not depend on it.
    """
    sizes = parse_settings(settings).image_sizes
    if patches is None:
        sizes = [*sizes, (DEFAULT_SIZE, DEFAULT_SIZE)]
    for height, width in sizes:  # timm ignores an incomplete patch
        rows, columns = height // stride[0], width // stride[1]
        if patches is None:
            rows, columns = max(1, rows), max(1, columns)
        if patches in (None, rows * columns):
            return rows * stride[0], columns * stride[1]
    hint = "for another grid, set model_args.img_size in a config.json next to the weights"
    return square_image(patches or 0, stride, hint)


def mlp_ratio(hidden: int, width: int) -> float:
    """Return the ratio from which timm computes exactly `hidden`, rounding down."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def config_json(
    name: str,
    arguments: dict[str, Any],
    config: Config,
    metadata: Metadata,
    first_conv: str,
    classifier: str | list[str],
) -> dict[str, dict[str, Any]]:
    """Return the config.json from which timm builds `name` with these arguments, and those that
    all its ViTs share."""
    preprocessing = metadata.preprocessing
    interpolation = preprocessing.interpolation
    if isinstance(config, VitConfig):
        arguments = {
            "img_size": list(pair(config.image_size)),
            "patch_size": list(pair(config.patch_size)),
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.heads,
            "qkv_bias": config.qkv_bias,
            "class_token": bool(config.class_token),
            "global_pool": POOLS[config.pool],
            **arguments,
        }
    settings: dict[str, Any] = {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.num_features,
        "global_pool": POOLS[config.pool] if isinstance(config, VitConfig) else "avg",
        "model_args": {"in_chans": config.channels, **arguments},
        "pretrained_cfg": {
            "input_size": [config.channels, *pair(config.image_size)],
            "fixed_input_size": not isinstance(config, BitConfig),
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "interpolation": "box" if interpolation == "area" else interpolation,
            "crop_pct": crop_pct(preprocessing.resize_to or preprocessing.size, preprocessing.size),
            "crop_mode": "center" if preprocessing.resize == "short-side" else "squash",
            "num_classes": config.num_classes,
            # None: else timm would convert kernels as if they were for 3 channels
            "first_conv": first_conv if config.channels == 3 else None,
            "classifier": classifier,
            **{k: metadata.provenance[k] for k in PROVENANCE_KEYS if k in metadata.provenance},
        },
    }
    if metadata.class_names:
        settings["label_names"] = list(metadata.class_names)
    return {"config.json": settings}


def crop_pct(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the shortest number from which timm, rounding down, resizes to `before`."""
    largest = min(cut / whole for cut, whole in zip(after, before, strict=True))
    for share in (round(largest, digits) for digits in range(1, 17)):
        if share and before == (math.floor(after[0] / share), math.floor(after[1] / share)):
            return share
    return math.nextafter(largest, 0)


def read_metadata(settings: Mapping[str, Any], config: Config) -> Metadata | None:
    """Read preprocessing and class names; None if absent or for other channels.

    Absent parts of the preprocessing are the defaults of timm's evaluation transform.
    """
    cfg = parse_settings(settings).pretrained_cfg
    if not cfg:
        return None
    size = pair(config.image_size)
    mode, name = cfg.get("crop_mode", "center"), cfg.get("interpolation", "bicubic")
    try:
        if mode not in ("center", "squash"):
            raise ConfigError(f"unknown crop_mode {mode!r}; known: center, squash")
        share = float(cfg.get("crop_pct") or 0.875)
        before = math.floor(size[0] / share), math.floor(size[1] / share)
        preprocessing = Preprocessing(
            size=size,
            resize="short-side" if mode == "center" else "direct",
            resize_to=None if mode == "squash" and before == size else before,  # no crop
            interpolation=INTERPOLATIONS.get(name, name),  # pyright: ignore[reportArgumentType]: checked there
            mean=tuple(map(float, cfg.get("mean", IMAGENET_MEAN))),
            std=tuple(map(float, cfg.get("std", IMAGENET_STD))),
        )
    except (TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"invalid preprocessing in config.json: {error}") from None
    if len(preprocessing.mean) != config.channels:
        return None
    names = settings.get("label_names") or cfg.get("label_names") or cfg.get("labels") or ()
    if isinstance(names, Mapping):  # from index to name
        names = [names[i] for i in sorted(names, key=lambda key: (len(str(key)), str(key)))]
    provenance = {key: cfg[key] for key in PROVENANCE_KEYS if isinstance(cfg.get(key), str)}
    return Metadata(
        preprocessing=preprocessing,
        class_names=tuple(map(str, names)) if isinstance(names, Sequence) else (),
        provenance=provenance | ({} if "mean" in cfg else ASSUMED),
    )


# ViT and hybrid.


def vit_config(checkpoint: Checkpoint) -> VitConfig:
    """Infer the config from names and shapes, and from config.json where shapes are ambiguous."""
    tensors, settings = checkpoint.tensors, checkpoint.settings
    name, args, _, _, stated_pool = parse_settings(settings)
    reject_unknown_vits(checkpoint)
    width, _, patch_height, patch_width = checkpoint.shape(PATCHES, 4)
    hybrid = any(name.startswith(BACKBONE) for name in tensors)
    roots = [f"{BACKBONE}{name}conv.weight" for name in ("stem.", "")] if hybrid else [PATCHES]
    root = next((name for name in roots if name in tensors), roots[0])
    root_width, channels, _, _ = checkpoint.shape(root, 4)
    hidden, _ = checkpoint.shape("blocks.0.mlp.fc1.weight", 2)
    _, mlp_width = checkpoint.shape("blocks.0.mlp.fc2.weight", 2)
    swiglu = hidden == 2 * mlp_width
    patches = None
    if "pos_embed" in tensors:
        tokens = ("cls_token", "dist_token", "reg_token")
        prefix = sum(checkpoint.size(name, 3, axis=1) for name in tokens)
        patches = checkpoint.shape("pos_embed", 3)[1] - prefix
    known_heads = [n for prefix, n in HEADS.items() if f"{name}_".startswith(f"{prefix}_")]
    layer_scale = args.get("init_values")
    if not isinstance(layer_scale, float) or layer_scale <= 0:
        layer_scale = LAYER_SCALE_INIT
    default = "silu" if swiglu else "gelu_tanh" if name.startswith(TANH_GELU) else "gelu"
    default = "quick_gelu" if "_quickgelu" in name else default
    activation = args.get("act_layer") or default
    gelus: dict[str, Gelu] = {"silu": NUMERICS["timm"].gelu} if swiglu else ACTIVATIONS
    if not isinstance(activation, str) or activation not in gelus:
        raise CheckpointError(
            f"unsupported timm model: act_layer={activation!r}; supported: {', '.join(gelus)}"
        )
    class_token = "cls_token" in tensors
    pool: Pool = "cls" if class_token and stated_pool != "avg" else "mean"
    pre_norm, q_bias = "norm_pre.weight" in tensors, "blocks.0.attn.q_bias" in tensors
    qkv_bias = "blocks.0.attn.qkv.bias" in tensors
    # A ViT without position table is a DINOv3 by its name, or by tensors if it has none.
    layout = {"reg_token", "blocks.0.ls1.gamma"} <= tensors.keys() and not (qkv_bias or name)
    rotary = patches is None and ("dinov3" in name or q_bias or layout)
    if rotary:
        known_heads += rotary_heads(width)
    numerics = replace(NUMERICS["timm"], gelu=gelus[activation])
    return VitConfig(
        depth=checkpoint.count(r"blocks\.(\d+)\."),
        width=width,
        mlp_width=mlp_width,
        heads=infer_heads(width, settings.get("heads"), args.get("num_heads"), *known_heads),
        patch_size=(patch_height, patch_width),
        image_size=infer_image_size(patches, token_stride(checkpoint), settings),
        channels=channels,
        num_classes=checkpoint.size("head.weight", 2),
        stem="resnet" if hybrid else "patches",
        resnet_blocks=checkpoint.units(BACKBONE_UNIT),
        resnet_width=root_width // ROOT_WIDTH if hybrid else 1,
        position="learned" if "pos_embed" in tensors else "rotary" if rotary else "none",
        pool="map" if "attn_pool.latent" in tensors else pool,
        class_token=class_token,
        representation=checkpoint.size("pre_logits.fc.weight", 2),
        registers=checkpoint.size("reg_token", 3, axis=1),
        distillation="dist_token" in tensors,
        layer_scale=layer_scale if "blocks.0.ls1.gamma" in tensors else None,
        qkv_bias=qkv_bias or q_bias,
        key_bias=not q_bias,
        qk_norm="blocks.0.attn.q_norm.weight" in tensors,
        mlp="swiglu" if swiglu else "gelu",
        pre_norm=pre_norm,
        numerics=replace(numerics, norm_eps=CLIP_EPS) if pre_norm or rotary else numerics,
    )


def rotary_heads(width: int) -> list[int]:
    """The number of heads of DINOv3: 64 channels per head, 128 in the 7B model."""
    channels = 128 if width == 4096 else 64
    return [] if width % channels else [width // channels]


def reject_unknown_vits(checkpoint: Checkpoint) -> None:
    """Raise for timm models that no vitrail model can represent."""
    names = checkpoint.tensors.keys()
    _, args, _, _, pool = parse_settings(checkpoint.settings)
    pre_norm = "norm_pre.weight" in names
    tensors = checkpoint.tensors.items()
    widths = {tensor.shape for name, tensor in tensors if re.match(r"blocks\.\d+\.norm1\.w", name)}
    features = {
        "blocks of several widths (a hierarchical model)": len(widths) > 1,
        "decomposed relative positions (SAM)": "blocks.0.attn.rel_pos_h" in names,
        "no bias in patch_embed.proj": "patch_embed.proj.bias" not in names and not pre_norm,
        "a bias in patch_embed.proj before norm_pre": "patch_embed.proj.bias" in names and pre_norm,
        "RMSNorm": "norm.weight" in names and "norm.bias" not in names,
        "a norm after average pooling (fc_norm); only fc_norm=False is supported": "fc_norm.weight"
        in names,
        f"global_pool={pool!r}": pool not in (None, "", *POOLS.values()),
        "pool_include_prefix=True": args.get("pool_include_prefix")
        and {"reg_token", "cls_token"} & names,
        "both a class token and attention pooling": {"cls_token", "attn_pool.latent"} <= names,
    }
    for feature in applicable(features):
        raise CheckpointError(f"unsupported timm model: {feature}")


VIT_MODULES = {
    "stem.projection": "patch_embed.proj",
    "encoder.pre_norm": "norm_pre",
    "encoder.blocks.{i}.norm1": "blocks.{i}.norm1",
    "encoder.blocks.{i}.attention.qkv": "blocks.{i}.attn.qkv",
    "encoder.blocks.{i}.attention.merge": "blocks.{i}.attn.proj",
    "encoder.blocks.{i}.attention.q_norm": "blocks.{i}.attn.q_norm",
    "encoder.blocks.{i}.attention.k_norm": "blocks.{i}.attn.k_norm",
    "encoder.blocks.{i}.norm2": "blocks.{i}.norm2",
    "encoder.blocks.{i}.mlp.fc1": "blocks.{i}.mlp.fc1",
    "encoder.blocks.{i}.mlp.fc2": "blocks.{i}.mlp.fc2",
    "encoder.norm": "norm",
    "pool.query": "attn_pool.q",
    "pool.key_value": "attn_pool.kv",
    "pool.merge": "attn_pool.proj",
    "pool.norm": "attn_pool.norm",
    "pool.mlp.fc1": "attn_pool.mlp.fc1",
    "pool.mlp.fc2": "attn_pool.mlp.fc2",
    "representation": "pre_logits.fc",  # timm before 2022
    "head": "head",
    "distillation_head": "head_dist",
}


def vit_templates(config: VitConfig) -> Iterator[Rule]:
    yield from modules(VIT_MODULES)
    for i in (1, 2):
        yield same(f"encoder.blocks.{{i}}.branch{i}.scale", f"blocks.{{i}}.ls{i}.gamma")
    yield without_batch("cls_token", "cls_token")
    yield without_batch("distillation_token", "dist_token")
    yield without_batch("registers", "reg_token")
    yield without_batch("pool.probe", "attn_pool.latent")
    for part in "qv":  # DINOv3
        name = f"attn.{part}_bias"
        yield same(f"encoder.blocks.{{i}}.attention.{part}_bias", f"blocks.{{i}}.{name}")
    start, stop = config.num_class_tokens, config.num_prefix

    def with_zeros(table: Tensor) -> Tensor:
        """Insert the registers, which have no position in our table."""
        if not config.registers:
            return table  # torch.cat on meta imports torch._dynamo, which takes seconds
        zeros = table.new_zeros(config.registers, config.width)
        return torch.cat([table[:start], zeros, table[start:]])

    yield Rule(
        "position.table",
        ("pos_embed",),
        lambda table: torch.cat([table[0, :start], table[0, stop:]]),
        lambda table: (with_zeros(table)[None],),
    )
    root = f"{BACKBONE}stem." if config.resnet_blocks else BACKBONE
    yield from modules({"stem.resnet.root": f"{root}conv", "stem.resnet.norm": f"{root}norm"})
    ours, theirs = "stem.resnet.stages.{i}.{j}", BACKBONE + "stages.{i}.blocks.{j}"
    yield from resnet_units(ours, theirs)
    shortcut = f"{theirs}.downsample"
    yield from modules({f"{ours}.shortcut.0": f"{shortcut}.conv"})
    yield from modules({f"{ours}.shortcut.1": f"{shortcut}.norm"})


def vit_unsupported(config: VitConfig) -> list[str]:
    distilled, swiglu = config.distillation, config.mlp == "swiglu"
    hybrid = config.stem == "resnet"
    features = {
        f"position={config.position!r}": config.position not in ("learned", "none"),
        f"position_place={config.position_place!r}": config.position_place != "stem",
        f"stem={config.stem!r}": config.stem == "conv",
        f"resnet_blocks={config.resnet_blocks}": hybrid and config.resnet_blocks not in HYBRIDS,
        f"resnet_width={config.resnet_width}": hybrid and config.resnet_width != 1,
        "a representation layer": config.representation,
        "a hybrid with a distillation token": distilled and hybrid,
        "a distillation token with registers": distilled and config.registers,
        "a distillation token without positions": distilled and config.position == "none",
        "a distillation token without a head": distilled and not config.num_classes,
        "a distillation token with SwiGLU": distilled and swiglu,
        "a hybrid with SwiGLU": swiglu and hybrid,
        "SwiGLU with attention pooling": swiglu and config.pool == "map",
        "SwiGLU with a norm before the encoder": swiglu and config.pre_norm,
        "a distillation token with a norm before the encoder": distilled and config.pre_norm,
        "a class token with attention pooling": config.class_token and config.pool == "map",
        f"pool={config.pool!r}": config.pool not in POOLS,
        f"norm={config.norm!r}": config.norm != "layernorm",
        "key_bias=False": config.qkv_bias and not config.key_bias,
    }
    numerics = replace(NUMERICS["timm"], gelu=config.numerics.gelu)  # act_layer selects the GELU
    if config.pre_norm:
        numerics = replace(numerics, norm_eps=CLIP_EPS)
    return applicable(features) + unsupported_numerics(config, numerics)


def vit_json(config: VitConfig, metadata: Metadata) -> dict[str, dict[str, Any]]:
    swiglu, hybrid, scale = config.mlp == "swiglu", config.stem == "resnet", config.layer_scale
    name, first_conv = "vit_base_patch16_224", "patch_embed.proj"  # all else is in its arguments
    if hybrid:
        name = HYBRIDS.get(config.resnet_blocks, HYBRIDS[3, 4, 9])
        first_conv = f"{BACKBONE}stem.conv" if config.resnet_blocks else f"{BACKBONE}conv"
    elif swiglu:
        name = "vit_giant_patch14_dinov2"
    elif config.distillation:
        name = "deit_base_distilled_patch16_224"
    elif config.pre_norm:
        name = "vit_base_patch16_clip_224"
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    arguments = {
        "mlp_ratio": mlp_ratio(config.mlp_width * (1 + swiglu), config.width),  # both halves
        "init_values": 0.0 if scale is None else scale or LAYER_SCALE_INIT,
        "pos_embed": "none" if config.position == "none" else "learn",
        "reg_tokens": config.registers,
        "fc_norm": False,
        "act_layer": "silu" if swiglu else activations[config.numerics.gelu],
    }
    if config.pre_norm or config.qk_norm:
        arguments |= {"pre_norm": config.pre_norm, "qk_norm": config.qk_norm}
    classifier = ["head", "head_dist"] if config.distillation else "head"
    return config_json(name, arguments, config, metadata, first_conv, classifier)


# BiT: ResNetV2, whose head is a 1x1 convolution.


def bit_config(checkpoint: Checkpoint) -> BitConfig:
    width, channels, _, _ = checkpoint.shape("stem.conv.weight", 4)
    return BitConfig(
        blocks=checkpoint.units(r"stages\.(\d+)\.blocks\.(\d+)\."),
        width_factor=width // ROOT_WIDTH,
        image_size=infer_image_size(None, (1, 1), checkpoint.settings),
        channels=channels,
        num_classes=checkpoint.size("head.fc.weight", 4),
        numerics=NUMERICS["timm"],
    )


def bit_templates(config: BitConfig) -> Iterator[Rule]:
    ours, theirs = "stages.{i}.{j}", "stages.{i}.blocks.{j}"
    names = {"root": "stem.conv", "norm": "norm", f"{ours}.shortcut": f"{theirs}.downsample.conv"}
    yield from modules(names)
    yield from resnet_units(ours, theirs)
    yield from conv_head("head.fc")


def bit_unsupported(config: BitConfig) -> list[str]:
    depth = [] if config.blocks in BITS else [f"blocks={config.blocks}"]
    return depth + unsupported_numerics(config, NUMERICS["timm"])


def bit_json(config: BitConfig, metadata: Metadata) -> dict[str, dict[str, Any]]:
    name, factor = BITS.get(config.blocks, BITS[3, 4, 6, 3])
    width = ROOT_WIDTH * config.width_factor // factor
    channels = [EXPANSION * width * 2**stage for stage in range(len(config.blocks))]
    arguments = {"stem_chs": width, "channels": channels}
    return config_json(name, arguments, config, metadata, "stem.conv", "head.fc")


# MLP-Mixer.


def mixer_config(checkpoint: Checkpoint) -> MixerConfig:
    width, channels, patch_height, patch_width = checkpoint.shape("stem.proj.weight", 4)
    tokens_mlp, patches = checkpoint.shape("blocks.0.mlp_tokens.fc1.weight", 2)
    channels_mlp, _ = checkpoint.shape("blocks.0.mlp_channels.fc1.weight", 2)
    return MixerConfig(
        depth=checkpoint.count(r"blocks\.(\d+)\."),
        width=width,
        tokens_mlp=tokens_mlp,
        channels_mlp=channels_mlp,
        patch_size=(patch_height, patch_width),
        image_size=infer_image_size(patches, (patch_height, patch_width), checkpoint.settings),
        channels=channels,
        num_classes=checkpoint.size("head.weight", 2),
        numerics=NUMERICS["timm"],
    )


MIXER_MODULES = {
    "stem": "stem.proj",
    "blocks.{i}.norm1": "blocks.{i}.norm1",
    "blocks.{i}.token_mixing.fc1": "blocks.{i}.mlp_tokens.fc1",
    "blocks.{i}.token_mixing.fc2": "blocks.{i}.mlp_tokens.fc2",
    "blocks.{i}.norm2": "blocks.{i}.norm2",
    "blocks.{i}.channel_mixing.fc1": "blocks.{i}.mlp_channels.fc1",
    "blocks.{i}.channel_mixing.fc2": "blocks.{i}.mlp_channels.fc2",
    "norm": "norm",
    "head": "head",
}


def mixer_unsupported(config: MixerConfig) -> list[str]:
    fixed = (config.patch_size, config.depth, config.width)
    size = "a Mixer with patch_size={}, depth={}, width={}".format(*fixed)
    return [size] * (fixed not in MIXERS) + unsupported_numerics(config, NUMERICS["timm"])


def mixer_json(config: MixerConfig, metadata: Metadata) -> dict[str, dict[str, Any]]:
    fixed = (pair(config.patch_size)[0], config.depth, config.width)
    hidden = (config.tokens_mlp, config.channels_mlp)
    arguments = {
        "img_size": list(pair(config.image_size)),
        "mlp_ratio": [mlp_ratio(size, config.width) for size in hidden],
    }
    name = MIXERS.get(fixed, "mixer_b16_224")
    return config_json(name, arguments, config, metadata, "stem.proj", "head")


VIT = Table(
    VitConfig,
    lambda tensors: PATCHES in tensors and any(name.startswith("blocks.") for name in tensors),
    vit_config,
    vit_templates,
    vit_unsupported,
    vit_json,
)
BIT = Table(
    BitConfig,
    lambda tensors: {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= tensors.keys(),
    bit_config,
    bit_templates,
    bit_unsupported,
    bit_json,
)
MIXER = Table(
    MixerConfig,
    lambda tensors: {"stem.proj.weight", "blocks.0.mlp_tokens.fc1.weight"} <= tensors.keys(),
    mixer_config,
    lambda config: modules(MIXER_MODULES),
    mixer_unsupported,
    mixer_json,
)
