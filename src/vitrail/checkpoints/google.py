"""Google's .npz files: google-research/vision_transformer, big_vision and big_transfer.

The same weights exist in several layouts. `normalize` converts all of them to the current one, so
that each model family needs one table:

    params/…, opt/target/…, params/img/…       training states; other arrays are skipped
    Transformer/encoderblock/…                 scanned: all layers stacked in one array
    MultiHeadDotProductAttention_1, MlpBlock_3 numbering of a block's parts before 2021
    Transformer/posembed_input/pos_embedding, Transformer/pos_embedding, pos_embedding
    N + 1 or N position rows                   with or without one for the class token
    probe, MlpBlock_0, …                       MAP head without a prefix
    root_block/…, block1/unit01/conv1/…        BiT in big_vision
    Mixer/encoderblock_0/…                     older MLP-Mixer

Shapes: D width, H heads, K channels per head, P patch, I and O input and output channels. JAX
multiplies from the right: kernels are (in, out), convolutions (P, P, I, O).
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.rules import (
    Format,
    Rule,
    Table,
    Tensors,
    applicable,
    count,
    is_square,
    same,
    shape_of,
    size_of,
    square_image,
    unsupported_numerics,
    without_batch,
)
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, BitConfig, MixerConfig, VitConfig, resnet_stride
from vitrail.models.resnet import ROOT_WIDTH

PREFIXES = ("params/img/", "params/", "opt/target/img/", "opt/target/", "target/", "")
MAX_LAYERS = 1000  # of a scanned file; more is a mistake or an attack
SCANNED = "Transformer/encoderblock/"
POSITION = "Transformer/posembed_input/pos_embedding"
MAP_PARTS = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")
PRE_2021_NAMES = {
    "/MultiHeadDotProductAttention_1/": "/MultiHeadDotProductAttention_0/",
    "/LayerNorm_2/": "/LayerNorm_1/",
    "/MlpBlock_3/": "/MlpBlock_0/",
}
BIG_VISION_BIT_NAMES = (  # big_vision → big_transfer
    (r"^root_block/conv_root/", "resnet/root_block/standardized_conv2d/"),
    (r"^norm-pre-head/", "resnet/group_norm/"),
    (r"^head/", "resnet/head/conv2d/"),
    (r"^(block\d+/unit\d+)/conv_proj/", r"resnet/\1/a/proj/standardized_conv2d/"),
    (r"^(block\d+/unit\d+)/conv1/", r"resnet/\1/a/standardized_conv2d/"),
    (r"^(block\d+/unit\d+)/conv2/", r"resnet/\1/b/standardized_conv2d/"),
    (r"^(block\d+/unit\d+)/conv3/", r"resnet/\1/c/standardized_conv2d/"),
    (r"^(block\d+/unit\d+)/gn1/", r"resnet/\1/a/group_norm/"),
    (r"^(block\d+/unit\d+)/gn2/", r"resnet/\1/b/group_norm/"),
    (r"^(block\d+/unit\d+)/gn3/", r"resnet/\1/c/group_norm/"),
    (r"group_norm/scale$", "group_norm/gamma"),
    (r"group_norm/bias$", "group_norm/beta"),
    (r"/standardized_conv2d_\d+/", "/standardized_conv2d/"),  # some files number their parts
)
OLD_MIXER_NAMES = (
    (r"/LayerNorm_[1-9]\d*/", "/LayerNorm_1/"),
    (r"^embedding/", "stem/"),
    (r"^Mixer/encoder_norm/", "pre_head_layer_norm/"),
    (r"^Mixer/encoderblock_(\d+)/", r"MixerBlock_\1/"),
    (r"/(token|channel)_mixing_phase_\d+/(kernel|bias)1$", r"/\1_mixing/Dense_0/\2"),
    (r"/(token|channel)_mixing_phase_\d+/(kernel|bias)2$", r"/\1_mixing/Dense_1/\2"),
)
SQUARE_ONLY = "Google's format does not store the aspect ratio of the grid"
DEFAULT_SIZE = 224  # files with fixed positions do not state the image size


def normalize(checkpoint: Checkpoint) -> Checkpoint:
    """Convert any of Google's layouts to the current one of vision_transformer."""
    if not any(name.endswith("/kernel") for name in checkpoint.tensors):
        return checkpoint  # not Google's
    prefix = next(p for p in PREFIXES if any(name.startswith(p) for name in checkpoint.tensors))
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    skipped = dict(checkpoint.skipped)
    if others := len(checkpoint.tensors) - len(tensors):
        skipped["other"] = f"{others} arrays outside the prefix {prefix}"
    if any(name.startswith(("resnet/", "root_block/")) for name in tensors):
        tensors = normalize_bit(tensors)
    elif any(name.startswith("Mixer/") for name in tensors):
        tensors = {substitute(name, OLD_MIXER_NAMES): t for name, t in tensors.items()}
        tensors = {  # the old kernels may have axes of length 1
            name: tensor.map(torch.squeeze) if "_mixing/" in name else tensor
            for name, tensor in tensors.items()
        }
    else:
        tensors = normalize_vit(tensors)
    return replace(checkpoint, tensors=tensors, skipped=skipped)


def substitute(name: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def pre_2021_name(name: str) -> str:
    for old, new in PRE_2021_NAMES.items():
        name = re.sub(rf"(encoderblock_\d+){new}", rf"\1{old}", name)
    return name


# Rules shared by the families.


def dense(ours: str, theirs: str) -> Iterator[Rule]:
    """Map a kernel (in, out) to a weight (out, in)."""
    yield Rule(f"{ours}.weight", (f"{theirs}/kernel",), lambda k: k.mT, lambda w: (w.mT,))
    yield same(f"{ours}.bias", f"{theirs}/bias")


def norm(ours: str, theirs: str) -> Iterator[Rule]:
    yield same(f"{ours}.weight", f"{theirs}/scale")
    yield same(f"{ours}.bias", f"{theirs}/bias")


def conv(ours: str, theirs: str) -> Rule:
    """Map a kernel (P, P, I, O) to a weight (O, I, P, P)."""
    return Rule(
        f"{ours}.weight",
        (f"{theirs}/kernel",),
        lambda kernel: kernel.permute(3, 2, 0, 1),
        lambda weight: (weight.permute(2, 3, 1, 0),),
    )


def mlp(ours: str, theirs: str) -> Iterator[Rule]:
    yield from dense(f"{ours}.fc1", f"{theirs}/Dense_0")
    yield from dense(f"{ours}.fc2", f"{theirs}/Dense_1")


def split_heads(ours: str, theirs: list[str], heads: int) -> Iterator[Rule]:
    """Concatenate kernels (D, H, K), such as query, key and value, into one weight (n * D, D)."""
    yield Rule(
        f"{ours}.weight",
        tuple(f"{name}/kernel" for name in theirs),
        lambda *kernels: torch.cat([kernel.flatten(1).mT for kernel in kernels]),
        lambda weight: tuple(
            part.mT.unflatten(1, (heads, -1)) for part in weight.chunk(len(theirs))
        ),
    )
    yield Rule(
        f"{ours}.bias",
        tuple(f"{name}/bias" for name in theirs),
        lambda *biases: torch.cat([bias.flatten() for bias in biases]),
        lambda bias: tuple(part.unflatten(0, (heads, -1)) for part in bias.chunk(len(theirs))),
    )


def merge_heads(ours: str, theirs: str, heads: int) -> Iterator[Rule]:
    """Map a kernel (H, K, D) to a weight (D, D)."""
    yield Rule(
        f"{ours}.weight",
        (f"{theirs}/kernel",),
        lambda kernel: kernel.flatten(0, 1).mT,
        lambda weight: (weight.mT.unflatten(0, (heads, -1)),),
    )
    yield same(f"{ours}.bias", f"{theirs}/bias")


# ViT and hybrid.


def normalize_vit(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    tensors = unstack_layers(tensors)
    if any("/MultiHeadDotProductAttention_1/" in name for name in tensors):
        old_names = tuple(PRE_2021_NAMES.items())
        tensors = {substitute(name, old_names): tensor for name, tensor in tensors.items()}
    for name in ("Transformer/pos_embedding", "pos_embedding"):
        if name in tensors:
            tensors[POSITION] = tensors.pop(name)
    if POSITION in tensors:
        tensors[POSITION] = match_class_row(tensors)
    if "probe" in tensors:
        tensors = {
            f"MAPHead_0/{name}" if name.startswith(MAP_PARTS) else name: tensor
            for name, tensor in tensors.items()
        }
    return {
        name: tensor.map(torch.flatten) if re.search(r"gn\w+/(scale|bias)$", name) else tensor
        for name, tensor in tensors.items()  # GroupNorm's may be (1, 1, 1, C)
    }


def unstack_layers(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Split arrays that stack all layers (scanned models) into one per layer."""
    unstacked = {}
    for name, tensor in tensors.items():
        if not name.startswith(SCANNED):
            unstacked[name] = tensor
            continue
        layers = tensor.shape[0] if tensor.shape else 0
        if not 0 < layers <= MAX_LAYERS:
            raise CheckpointError(
                f"shape mismatch: {name} is {tensor.shape}, expected 1 to {MAX_LAYERS} layers"
            )
        for index in range(layers):
            layer = tensor.map(lambda stacked, index=index: stacked[index])
            unstacked[f"Transformer/encoderblock_{index}/{name.removeprefix(SCANNED)}"] = layer
    return unstacked


def match_class_row(tensors: Tensors) -> LazyTensor:
    """Return the position table with a row for the class token exactly if there is one.

    vision_transformer adds a position to the class token. big_vision does not, which equals a row
    of zeros; its models without class token may contain the row of an older one.
    """
    table = tensors[POSITION]
    if len(table.shape) != 3:
        raise CheckpointError(
            f"shape mismatch: pos_embedding is {table.shape}, expected (1, tokens, width)"
        )
    rows = table.shape[1]
    if "cls" in tensors and is_square(rows):
        return table.map(lambda rows: torch.cat([torch.zeros_like(rows[:, :1]), rows], dim=1))
    if "cls" not in tensors and is_square(rows - 1):
        return table.map(lambda rows: rows[:, 1:])
    return table


def vit_unsupported(config: VitConfig) -> list[str]:
    height, width = config.grid
    learned = config.position == "learned"
    features = {
        f"position={config.position!r}": config.position not in ("learned", "sincos-2d"),
        f"position_place={config.position_place!r}": config.position_place != "stem",
        f"a non-square {height} x {width} grid": height != width and learned,
        f"image_size={config.image_size} with fixed positions": config.position == "sincos-2d"
        and config.image_size != DEFAULT_SIZE,
        f"stem={config.stem!r}": config.stem == "conv",
        "register tokens": config.registers,
        "a distillation token": config.distillation,
        "LayerScale": config.layer_scale is not None,
        "qkv_bias=False": not config.qkv_bias,
        "SwiGLU": config.mlp != "gelu",
    }
    return applicable(features) + unsupported_numerics(config, NUMERICS["google"])


def vit_config(checkpoint: Checkpoint) -> VitConfig:
    tensors, block = checkpoint.tensors, "Transformer/encoderblock_0"
    patch_height, patch_width, _, width = shape_of(tensors, "embedding/kernel", 4)
    query = f"{block}/MultiHeadDotProductAttention_0/query/kernel"
    _, heads, _ = shape_of(tensors, query, 3)
    _, mlp_width = shape_of(tensors, f"{block}/MlpBlock_0/Dense_0/kernel", 2)
    hybrid = "conv_root/kernel" in tensors
    root = "conv_root/kernel" if hybrid else "embedding/kernel"
    _, _, channels, root_width = shape_of(tensors, root, 4)
    blocks = ()
    if hybrid:
        stages = range(1, 1 + count(tensors, r"block(\d+)/unit\d+/"))
        blocks = tuple(count(tensors, rf"block{stage}/unit(\d+)/") for stage in stages)
    shrink = resnet_stride(blocks) if hybrid else 1
    stride = patch_height * shrink, patch_width * shrink
    if POSITION in tensors:
        patches = tensors[POSITION].shape[1] - ("cls" in tensors)
        image_size = square_image(patches, stride, SQUARE_ONLY)
    else:
        rows, columns = (max(1, DEFAULT_SIZE // step) for step in stride)
        image_size = rows * stride[0], columns * stride[1]
    return VitConfig(
        depth=count(tensors, r"Transformer/encoderblock_(\d+)/"),
        width=width,
        mlp_width=mlp_width,
        heads=heads,
        patch_size=(patch_height, patch_width),
        image_size=image_size,
        channels=channels,
        num_classes=size_of(tensors, "head/bias"),
        stem="resnet" if hybrid else "patches",
        resnet_blocks=blocks,
        resnet_width=root_width // ROOT_WIDTH if hybrid else 1,
        position="learned" if POSITION in tensors else "sincos-2d",
        pool="cls" if "cls" in tensors else "map" if "MAPHead_0/probe" in tensors else "mean",
        representation=size_of(tensors, "pre_logits/bias"),
        numerics=NUMERICS["google"],
    )


def vit_rules(config: VitConfig) -> list[Rule]:
    table = [conv("stem.projection", "embedding"), same("stem.projection.bias", "embedding/bias")]
    if config.stem == "resnet":
        table += resnet_rules(config)
    if config.pool == "cls":
        table.append(without_batch("cls_token", "cls"))
    if config.position == "learned":
        table.append(without_batch("position.table", POSITION))
    for index in range(config.depth):
        ours, theirs = f"encoder.blocks.{index}", f"Transformer/encoderblock_{index}"
        attention = f"{theirs}/MultiHeadDotProductAttention_0"
        qkv = [f"{attention}/{part}" for part in ("query", "key", "value")]
        table += norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
        table += split_heads(f"{ours}.attention.qkv", qkv, config.heads)
        table += merge_heads(f"{ours}.attention.merge", f"{attention}/out", config.heads)
        table += norm(f"{ours}.norm2", f"{theirs}/LayerNorm_1")
        table += mlp(f"{ours}.mlp", f"{theirs}/MlpBlock_0")
    table += norm("encoder.norm", "Transformer/encoder_norm")
    if config.pool == "map":
        attention = "MAPHead_0/MultiHeadDotProductAttention_0"
        key_value = [f"{attention}/key", f"{attention}/value"]
        table.append(without_batch("pool.probe", "MAPHead_0/probe"))
        table += split_heads("pool.query", [f"{attention}/query"], config.heads)
        table += split_heads("pool.key_value", key_value, config.heads)
        table += merge_heads("pool.merge", f"{attention}/out", config.heads)
        table += norm("pool.norm", "MAPHead_0/LayerNorm_0")
        table += mlp("pool.mlp", "MAPHead_0/MlpBlock_0")
    if config.representation:
        table += dense("representation", "pre_logits")
    if config.num_classes:
        table += dense("head", "head")
    return table


def resnet_rules(config: VitConfig) -> Iterator[Rule]:
    yield conv("stem.resnet.root", "conv_root")
    yield from norm("stem.resnet.norm", "gn_root")
    for stage, units in enumerate(config.resnet_blocks):
        for unit in range(units):
            ours = f"stem.resnet.stages.{stage}.{unit}"
            theirs = f"block{stage + 1}/unit{unit + 1}"
            for index in (1, 2, 3):
                yield conv(f"{ours}.conv{index}", f"{theirs}/conv{index}")
                yield from norm(f"{ours}.norm{index}", f"{theirs}/gn{index}")
            if unit == 0:  # the first unit of a stage changes the width
                yield conv(f"{ours}.shortcut.0", f"{theirs}/conv_proj")
                yield from norm(f"{ours}.shortcut.1", f"{theirs}/gn_proj")


# BiT, in the names of big_transfer.

BIT_ROOT = "resnet/root_block/standardized_conv2d"
BIT_HEAD = "resnet/head/conv2d"


def normalize_bit(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    normalized = {}
    for name, tensor in tensors.items():
        name = substitute(name, BIG_VISION_BIT_NAMES)
        if name.endswith(("/gamma", "/beta")):
            tensor = tensor.map(torch.flatten)  # may be (1, 1, 1, C)
        if name == f"{BIT_HEAD}/kernel" and len(tensor.shape) == 2:
            tensor = tensor.map(lambda kernel: kernel[None, None])  # dense → 1x1 convolution
        normalized[name] = tensor
    return normalized


def bit_config(checkpoint: Checkpoint) -> BitConfig:
    tensors = checkpoint.tensors
    _, _, channels, width = shape_of(tensors, f"{BIT_ROOT}/kernel", 4)
    stages = range(1, 1 + count(tensors, r"resnet/block(\d+)/"))
    return BitConfig(
        blocks=tuple(count(tensors, rf"resnet/block{stage}/unit(\d+)/") for stage in stages),
        width_factor=width // ROOT_WIDTH,
        channels=channels,
        num_classes=size_of(tensors, f"{BIT_HEAD}/kernel", 4, axis=3),
    )


def bit_rules(config: BitConfig) -> list[Rule]:
    def group_norm(ours: str, theirs: str) -> list[Rule]:
        return [same(f"{ours}.weight", f"{theirs}/gamma"), same(f"{ours}.bias", f"{theirs}/beta")]

    table = [conv("root", BIT_ROOT)]
    for stage, units in enumerate(config.blocks):
        for unit in range(units):
            ours = f"stages.{stage}.{unit}"
            theirs = f"resnet/block{stage + 1}/unit{unit + 1:02d}"
            for index, letter in enumerate("abc", 1):
                table += group_norm(f"{ours}.norm{index}", f"{theirs}/{letter}/group_norm")
                table.append(conv(f"{ours}.conv{index}", f"{theirs}/{letter}/standardized_conv2d"))
            if unit == 0:
                table.append(conv(f"{ours}.shortcut", f"{theirs}/a/proj/standardized_conv2d"))
    table += group_norm("norm", "resnet/group_norm")
    if config.num_classes:
        kernel = (f"{BIT_HEAD}/kernel",)
        table += [
            Rule("head.weight", kernel, lambda k: k[0, 0].mT, lambda w: (w.mT[None, None],)),
            same("head.bias", f"{BIT_HEAD}/bias"),
        ]
    return table


# MLP-Mixer.


def mixer_unsupported(config: MixerConfig) -> list[str]:
    height, width = config.grid
    non_square = [f"a non-square {height} x {width} grid"] if height != width else []
    return non_square + unsupported_numerics(config, NUMERICS["google"])


def mixer_config(checkpoint: Checkpoint) -> MixerConfig:
    tensors = checkpoint.tensors
    patch_height, patch_width, channels, width = shape_of(tensors, "stem/kernel", 4)
    patches, tokens_mlp = shape_of(tensors, "MixerBlock_0/token_mixing/Dense_0/kernel", 2)
    _, channels_mlp = shape_of(tensors, "MixerBlock_0/channel_mixing/Dense_0/kernel", 2)
    return MixerConfig(
        depth=count(tensors, r"MixerBlock_(\d+)/"),
        width=width,
        tokens_mlp=tokens_mlp,
        channels_mlp=channels_mlp,
        patch_size=(patch_height, patch_width),
        image_size=square_image(patches, (patch_height, patch_width), SQUARE_ONLY),
        channels=channels,
        num_classes=size_of(tensors, "head/bias"),
        numerics=NUMERICS["google"],
    )


def mixer_rules(config: MixerConfig) -> list[Rule]:
    table = [conv("stem", "stem"), same("stem.bias", "stem/bias")]
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}", f"MixerBlock_{index}"
        table += norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
        table += mlp(f"{ours}.token_mixing", f"{theirs}/token_mixing")
        table += norm(f"{ours}.norm2", f"{theirs}/LayerNorm_1")
        table += mlp(f"{ours}.channel_mixing", f"{theirs}/channel_mixing")
    table += norm("norm", "pre_head_layer_norm")
    if config.num_classes:
        table += dense("head", "head")
    return table


VIT = Table(
    VitConfig,
    matches=lambda tensors: "embedding/kernel" in tensors,
    infer_config=vit_config,
    rules=vit_rules,
    unsupported=vit_unsupported,
)
BIT = Table(
    BitConfig,
    matches=lambda tensors: f"{BIT_ROOT}/kernel" in tensors,
    infer_config=bit_config,
    rules=bit_rules,
    unsupported=lambda config: unsupported_numerics(config, NUMERICS["big_transfer"]),
)
MIXER = Table(
    MixerConfig,
    matches=lambda tensors: "stem/kernel" in tensors,
    infer_config=mixer_config,
    rules=mixer_rules,
    unsupported=mixer_unsupported,
)
FORMAT = Format("google", (BIT, MIXER, VIT), normalize)
