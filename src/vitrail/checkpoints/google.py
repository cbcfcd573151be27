"""Google's files: vision_transformer, big_vision and big_transfer (.npz).

The same weights exist in several layouts. `normalize` converts all of them to the current one, so
that each model family needs one table:

    params/…, opt/target/…, params/img/…       training states; other arrays are skipped
    Transformer/encoderblock/…                 scanned: all layers stacked in one array
    MultiHeadDotProductAttention_1, MlpBlock_3 numbering of a block's parts before 2021
    Transformer/posembed_input/pos_embedding, Transformer/pos_embedding, pos_embedding
    N + 1 or N position rows                   with or without one for the class token
    probe, MlpBlock_0, …                       MAP head without a prefix
    root_block/…, block1/unit01/conv1/…        BiT in big_vision (bit.py)
    Mixer/encoderblock_0/…                     older MLP-Mixer

Shapes: D width, H heads, K channels per head, P patch, I and O input and output channels. JAX
multiplies from the right: kernels are (in, out), convolutions (P, P, I, O).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from vitrail.checkpoints import bit
from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.rules import (
    Format,
    Rule,
    Table,
    applicable,
    is_square,
    jax_layer,
    same,
    square_image,
    substitute,
    unsupported_features,
    unsupported_numerics,
    without_batch,
)
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, MixerConfig, VitConfig, resnet_stride
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
        tensors = bit.normalize(tensors)
    elif any(name.startswith("Mixer/") for name in tensors):
        tensors = {  # the old kernels may have axes of length 1
            substitute(name, OLD_MIXER_NAMES): t.map(torch.squeeze) if "_mixing" in name else t
            for name, t in tensors.items()
        }
    else:
        tensors = normalize_vit(tensors)
    return replace(checkpoint, tensors=tensors, skipped=skipped)


# Rules shared by the families.


def norm(ours: str, theirs: str) -> Iterator[Rule]:
    yield same(f"{ours}.weight", f"{theirs}/scale")
    yield same(f"{ours}.bias", f"{theirs}/bias")


def mlp(ours: str, theirs: str) -> Iterator[Rule]:
    yield from jax_layer(f"{ours}.fc1", f"{theirs}/Dense_0")
    yield from jax_layer(f"{ours}.fc2", f"{theirs}/Dense_1")


def heads(ours: str, theirs: str, count: int) -> Iterator[Rule]:
    """Map the projections of multi-head attention.

    Kernels (D, H, K) and biases (H, K) of query, key and value are joined into weights (n * D, D)
    and biases (n * D,); `out`, after attention, is a kernel (H, K, D).
    """
    joined = {"qkv": ("query", "key", "value"), "query": ("query",), "key_value": ("key", "value")}
    kinds = {"weight": "kernel", "bias": "bias"}
    for (name, parts), (kind, their_kind) in product(joined.items(), kinds.items()):
        yield Rule(
            f"{ours}.{name}.{kind}",
            tuple(f"{theirs}/{part}/{their_kind}" for part in parts),
            lambda *arrays: torch.cat([array.flatten(-2).t() for array in arrays]),
            lambda tensor, parts=parts: tuple(
                part.t().unflatten(-1, (count, -1)) for part in tensor.chunk(len(parts))
            ),
        )
    yield Rule(
        f"{ours}.merge.weight",
        (f"{theirs}/out/kernel",),
        lambda kernel: kernel.flatten(0, 1).mT,
        lambda weight: (weight.mT.unflatten(0, (count, -1)),),
    )
    yield same(f"{ours}.merge.bias", f"{theirs}/out/bias")


# ViT and hybrid.


def normalize_vit(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    scanned = {name: tensor for name, tensor in tensors.items() if name.startswith(SCANNED)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in scanned}
    for name, tensor in scanned.items():  # all layers are stacked in one array
        layers = tensor.shape[0] if tensor.shape else 0
        if not 0 < layers <= MAX_LAYERS:
            raise CheckpointError(
                f"shape mismatch: {name} is {tensor.shape}, expected 1 to {MAX_LAYERS} layers"
            )
        for index in range(layers):
            layer = tensor.map(lambda stacked, index=index: stacked[index])
            tensors[f"Transformer/encoderblock_{index}/{name.removeprefix(SCANNED)}"] = layer
    if any("/MultiHeadDotProductAttention_1/" in name for name in tensors):
        tensors = {substitute(name, PRE_2021_NAMES.items()): t for name, t in tensors.items()}
    for name in ("Transformer/pos_embedding", "pos_embedding"):
        if name in tensors:
            tensors[POSITION] = tensors.pop(name)
    if POSITION in tensors:
        # A row for the class token exactly if there is one. vision_transformer adds a position to
        # it; big_vision does not, which equals a row of zeros, and its models without class token
        # may contain the row of an older one.
        table = tensors[POSITION]
        if len(table.shape) != 3:
            raise CheckpointError(
                f"shape mismatch: pos_embedding is {table.shape}, expected (1, tokens, width)"
            )
        if "cls" in tensors and is_square(table.shape[1]):
            tensors[POSITION] = table.map(
                lambda rows: torch.cat([torch.zeros_like(rows[:, :1]), rows], dim=1)
            )
        elif "cls" not in tensors and is_square(table.shape[1] - 1):
            tensors[POSITION] = table.map(lambda rows: rows[:, 1:])
    if "probe" in tensors:
        tensors = {
            f"MAPHead_0/{name}" if name.startswith(MAP_PARTS) else name: tensor
            for name, tensor in tensors.items()
        }
    return {
        name: tensor.map(torch.flatten) if re.search(r"gn\w+/(scale|bias)$", name) else tensor
        for name, tensor in tensors.items()  # GroupNorm's may be (1, 1, 1, C)
    }


def vit_unsupported(config: VitConfig) -> list[str]:
    height, width = config.grid
    features = {
        f"a non-square {height} x {width} grid": height != width and config.position == "learned",
        f"image_size={config.image_size} with fixed positions": config.position == "sincos-2d"
        and config.image_size != DEFAULT_SIZE,
    }
    return [
        *unsupported_features(
            config,
            stems=("patches", "resnet"),
            positions=("learned", "sincos-2d"),
            pools=("cls", "mean", "map"),
        ),
        *applicable(features),
        *unsupported_numerics(config, NUMERICS["google"]),
    ]


def vit_config(checkpoint: Checkpoint) -> VitConfig:
    tensors, block = checkpoint.tensors, "Transformer/encoderblock_0"
    patch_height, patch_width, _, width = checkpoint.shape("embedding/kernel", 4)
    query = f"{block}/MultiHeadDotProductAttention_0/query/kernel"
    _, heads, _ = checkpoint.shape(query, 3)
    _, mlp_width = checkpoint.shape(f"{block}/MlpBlock_0/Dense_0/kernel", 2)
    hybrid = "conv_root/kernel" in tensors
    root = "conv_root/kernel" if hybrid else "embedding/kernel"
    _, _, channels, root_width = checkpoint.shape(root, 4)
    blocks = checkpoint.units(r"block(\d+)/unit(\d+)/") if hybrid else ()
    shrink = resnet_stride(blocks) if hybrid else 1
    stride = patch_height * shrink, patch_width * shrink
    if POSITION in tensors:
        patches = tensors[POSITION].shape[1] - ("cls" in tensors)
        image_size = square_image(patches, stride, SQUARE_ONLY)
    else:
        rows, columns = (max(1, DEFAULT_SIZE // step) for step in stride)
        image_size = rows * stride[0], columns * stride[1]
    return VitConfig(
        depth=checkpoint.count(r"Transformer/encoderblock_(\d+)/"),
        width=width,
        mlp_width=mlp_width,
        heads=heads,
        patch_size=(patch_height, patch_width),
        image_size=image_size,
        channels=channels,
        num_classes=checkpoint.size("head/bias"),
        stem="resnet" if hybrid else "patches",
        resnet_blocks=blocks,
        resnet_width=root_width // ROOT_WIDTH if hybrid else 1,
        position="learned" if POSITION in tensors else "sincos-2d",
        pool="cls" if "cls" in tensors else "map" if "MAPHead_0/probe" in tensors else "mean",
        representation=checkpoint.size("pre_logits/bias"),
        numerics=NUMERICS["google"],
    )


def vit_templates(config: VitConfig) -> Iterator[Rule]:
    block, attention = "Transformer/encoderblock_{i}", "MultiHeadDotProductAttention_0"
    yield from jax_layer("stem.projection", "embedding")
    yield without_batch("cls_token", "cls")
    yield without_batch("position.table", POSITION)
    yield from norm("encoder.blocks.{i}.norm1", f"{block}/LayerNorm_0")
    yield from heads("encoder.blocks.{i}.attention", f"{block}/{attention}", config.heads)
    yield from norm("encoder.blocks.{i}.norm2", f"{block}/LayerNorm_1")
    yield from mlp("encoder.blocks.{i}.mlp", f"{block}/MlpBlock_0")
    yield from norm("encoder.norm", "Transformer/encoder_norm")
    yield without_batch("pool.probe", "MAPHead_0/probe")
    yield from heads("pool", f"MAPHead_0/{attention}", config.heads)
    yield from norm("pool.norm", "MAPHead_0/LayerNorm_0")
    yield from mlp("pool.mlp", "MAPHead_0/MlpBlock_0")
    yield from jax_layer("representation", "pre_logits")
    yield from jax_layer("head", "head")
    yield from jax_layer("stem.resnet.root", "conv_root")
    yield from norm("stem.resnet.norm", "gn_root")
    ours, theirs = "stem.resnet.stages.{i}.{j}", "block{I}/unit{J}"
    for index in (1, 2, 3):
        yield from jax_layer(f"{ours}.conv{index}", f"{theirs}/conv{index}")
        yield from norm(f"{ours}.norm{index}", f"{theirs}/gn{index}")
    yield from jax_layer(f"{ours}.shortcut.0", f"{theirs}/conv_proj")
    yield from norm(f"{ours}.shortcut.1", f"{theirs}/gn_proj")


# MLP-Mixer.


def mixer_unsupported(config: MixerConfig) -> list[str]:
    height, width = config.grid
    grid = {f"a non-square {height} x {width} grid": height != width}
    return applicable(grid) + unsupported_numerics(config, NUMERICS["google"])


def mixer_config(checkpoint: Checkpoint) -> MixerConfig:
    patch_height, patch_width, channels, width = checkpoint.shape("stem/kernel", 4)
    patches, tokens_mlp = checkpoint.shape("MixerBlock_0/token_mixing/Dense_0/kernel", 2)
    _, channels_mlp = checkpoint.shape("MixerBlock_0/channel_mixing/Dense_0/kernel", 2)
    return MixerConfig(
        depth=checkpoint.count(r"MixerBlock_(\d+)/"),
        width=width,
        tokens_mlp=tokens_mlp,
        channels_mlp=channels_mlp,
        patch_size=(patch_height, patch_width),
        image_size=square_image(patches, (patch_height, patch_width), SQUARE_ONLY),
        channels=channels,
        num_classes=checkpoint.size("head/bias"),
        numerics=NUMERICS["google"],
    )


def mixer_templates(config: MixerConfig) -> Iterator[Rule]:
    ours, theirs = "blocks.{i}", "MixerBlock_{i}"
    yield from jax_layer("stem", "stem")
    yield from norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
    yield from mlp(f"{ours}.token_mixing", f"{theirs}/token_mixing")
    yield from norm(f"{ours}.norm2", f"{theirs}/LayerNorm_1")
    yield from mlp(f"{ours}.channel_mixing", f"{theirs}/channel_mixing")
    yield from norm("norm", "pre_head_layer_norm")
    yield from jax_layer("head", "head")


VIT = Table(
    VitConfig, lambda t: "embedding/kernel" in t, vit_config, vit_templates, vit_unsupported
)
MIXER = Table(
    MixerConfig, lambda t: "stem/kernel" in t, mixer_config, mixer_templates, mixer_unsupported
)
FORMAT = Format("google", (bit.GOOGLE, MIXER, VIT), normalize)
