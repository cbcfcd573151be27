"""ViT and hybrid in Google's names: the table, and the description read from the shapes.

Shapes: D width, H heads, K channels per head, M inside the MLP, P patch, I and O channels in
and out. JAX multiplies from the right, so kernels are (in, out) and convolutions (P, P, I, O).
"""

from collections.abc import Iterator

import torch

from vitrail.checkpoints.files import Entry, Weights
from vitrail.checkpoints.rules import Entries, Rule, first, same
from vitrail.checkpoints.shapes import count, is_square, last_size, other_numerics, shape, square
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, VitConfig, resnet_stride
from vitrail.models.resnet import ROOT_WIDTH

POSITION = "Transformer/posembed_input/pos_embedding"
BLOCK = "Transformer/encoderblock_0"
ATTENTION = "MultiHeadDotProductAttention_0"
NO_ROWS = "Google's format cannot say how many go into a row"
UNKNOWN_SIZE = 224  # a model with fixed positions does not say for which size it was trained


def rules(config: VitConfig) -> list[Rule]:
    """Every tensor of ours and where Google keeps it."""
    table = [conv("stem.projection", "embedding"), same("stem.projection.bias", "embedding/bias")]
    if config.stem == "resnet":
        table += resnet_rules(config)
    if config.pool == "cls":
        table.append(first("cls_token", "cls"))
    if config.position == "learned":
        table.append(first("position.table", POSITION))
    for index in range(config.depth):
        table += block_rules(
            f"encoder.blocks.{index}", f"Transformer/encoderblock_{index}", config.heads
        )
    table += norm("encoder.norm", "Transformer/encoder_norm")
    if config.pool == "map":
        table += map_rules(config.heads)
    if config.representation:
        table += dense("representation", "pre_logits")
    if config.num_classes:
        table += dense("head", "head")
    return table


def recognizes(entries: Entries) -> bool:
    return "embedding/kernel" in entries


def cannot(config: VitConfig) -> list[str]:
    """What of a model Google's names have no words for."""
    height, width = config.grid
    wrong = {
        f"positions of the kind {config.position!r}": config.position
        not in ("learned", "sincos-2d"),
        f"positions placed at {config.position_place!r}": config.position_place != "stem",
        f"a grid of {height} x {width}, which is not square": height != width
        and config.position == "learned",
        f"an image size of {config.image_size} with fixed positions": config.position == "sincos-2d"
        and config.image_size != UNKNOWN_SIZE,
        f"the stem {config.stem!r}": config.stem == "conv",
        "register tokens": config.registers > 0,
        "a distillation token": config.distillation,
        "LayerScale": config.layer_scale is not None,
        "attention without a qkv bias": not config.qkv_bias,
        "SwiGLU": config.mlp != "gelu",
    }
    return [what for what, applies in wrong.items() if applies] + other_numerics(
        config, NUMERICS["google"]
    )


def describe(weights: Weights) -> VitConfig:
    """The description of a ViT or hybrid, from names and shapes alone."""
    entries = weights.entries
    down, across, _, width = shape(entries, "embedding/kernel", 4)
    _, heads, _ = shape(entries, f"{BLOCK}/{ATTENTION}/query/kernel", 3)
    _, mlp_width = shape(entries, f"{BLOCK}/MlpBlock_0/Dense_0/kernel", 2)
    hybrid = "conv_root/kernel" in entries
    root = "conv_root/kernel" if hybrid else "embedding/kernel"
    _, _, channels, root_width = shape(entries, root, 4)
    blocks = resnet_blocks(entries) if hybrid else ()
    shrink = resnet_stride(blocks) if hybrid else 1
    return VitConfig(
        depth=count(entries, r"Transformer/encoderblock_(\d+)/"),
        width=width,
        mlp_width=mlp_width,
        heads=heads,
        patch_size=(down, across),
        image_size=image_size(entries, (down * shrink, across * shrink)),
        channels=channels,
        num_classes=last_size(entries, "head/bias"),
        stem="resnet" if hybrid else "patches",
        resnet_blocks=blocks,
        resnet_width=root_width // ROOT_WIDTH if hybrid else 1,
        position="learned" if POSITION in entries else "sincos-2d",
        pool="cls" if "cls" in entries else "map" if "MAPHead_0/probe" in entries else "mean",
        representation=last_size(entries, "pre_logits/bias"),
        numerics=NUMERICS["google"],
    )


def with_class_row(entries: Entries) -> Entry:
    """The position table with a row for the class token if there is one, and without if not.

    vision_transformer adds positions to the class token too. big_vision does not, which is a row
    of zeros; its models without a class token may still carry the row of an older one.
    """
    table = entries[POSITION]
    if len(table.shape) != 3:
        raise CheckpointError(f"pos_embedding is {table.shape}, not (1, tokens, width)")
    rows = table.shape[1]
    if "cls" in entries and is_square(rows):
        return table.map(lambda rows: torch.cat([torch.zeros_like(rows[:, :1]), rows], dim=1))
    if "cls" not in entries and is_square(rows - 1):
        return table.map(lambda rows: rows[:, 1:])
    return table


def image_size(entries: Entries, stride: tuple[int, int]) -> tuple[int, int]:
    """The pixels the position table was made for."""
    if POSITION not in entries:
        sides = [max(1, UNKNOWN_SIZE // step) * step for step in stride]
        return sides[0], sides[1]
    patches = entries[POSITION].shape[1] - ("cls" in entries)
    return square(patches, stride, NO_ROWS)


def resnet_blocks(entries: Entries) -> tuple[int, ...]:
    """Units of each stage."""
    stages = count(entries, r"block(\d+)/unit\d+/")
    return tuple(count(entries, rf"block{stage}/unit(\d+)/") for stage in range(1, stages + 1))


def resnet_rules(config: VitConfig) -> Iterator[Rule]:
    ours = "stem.resnet"
    yield conv(f"{ours}.root", "conv_root")
    yield from norm(f"{ours}.norm", "gn_root")
    for stage, units in enumerate(config.resnet_blocks):
        for unit in range(units):
            here, there = f"{ours}.stages.{stage}.{unit}", f"block{stage + 1}/unit{unit + 1}"
            for index in (1, 2, 3):
                yield conv(f"{here}.conv{index}", f"{there}/conv{index}")
                yield from norm(f"{here}.norm{index}", f"{there}/gn{index}")
            if unit == 0:  # every stage begins with a change of width
                yield conv(f"{here}.shortcut.0", f"{there}/conv_proj")
                yield from norm(f"{here}.shortcut.1", f"{there}/gn_proj")


def block_rules(ours: str, theirs: str, heads: int) -> Iterator[Rule]:
    attention = f"{theirs}/{ATTENTION}"
    yield from norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
    yield from into_heads(
        f"{ours}.attention.qkv",
        [f"{attention}/{part}" for part in ("query", "key", "value")],
        heads,
    )
    yield from out_of_heads(f"{ours}.attention.merge", f"{attention}/out", heads)
    yield from norm(f"{ours}.norm2", f"{theirs}/LayerNorm_1")
    yield from mlp_rules(f"{ours}.mlp", f"{theirs}/MlpBlock_0")


def map_rules(heads: int) -> Iterator[Rule]:
    attention = f"MAPHead_0/{ATTENTION}"
    yield first("pool.probe", "MAPHead_0/probe")
    yield from into_heads("pool.query", [f"{attention}/query"], heads)
    yield from into_heads("pool.key_value", [f"{attention}/key", f"{attention}/value"], heads)
    yield from out_of_heads("pool.merge", f"{attention}/out", heads)
    yield from norm("pool.norm", "MAPHead_0/LayerNorm_0")
    yield from mlp_rules("pool.mlp", "MAPHead_0/MlpBlock_0")


def mlp_rules(ours: str, theirs: str) -> Iterator[Rule]:
    yield from dense(f"{ours}.fc1", f"{theirs}/Dense_0")
    yield from dense(f"{ours}.fc2", f"{theirs}/Dense_1")


def into_heads(ours: str, theirs: list[str], heads: int) -> Iterator[Rule]:
    """Kernels (D, H, K) side by side in one weight (maps * D, D)."""
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


def out_of_heads(ours: str, theirs: str, heads: int) -> Iterator[Rule]:
    """A kernel (H, K, D) as a weight (D, D)."""
    yield Rule(
        f"{ours}.weight",
        (f"{theirs}/kernel",),
        lambda kernel: kernel.flatten(0, 1).mT,
        lambda weight: (weight.mT.unflatten(0, (heads, -1)),),
    )
    yield same(f"{ours}.bias", f"{theirs}/bias")


def dense(ours: str, theirs: str) -> Iterator[Rule]:
    """A kernel (in, out) as a weight (out, in)."""
    yield Rule(f"{ours}.weight", (f"{theirs}/kernel",), lambda k: k.mT, lambda w: (w.mT,))
    yield same(f"{ours}.bias", f"{theirs}/bias")


def norm(ours: str, theirs: str) -> Iterator[Rule]:
    yield same(f"{ours}.weight", f"{theirs}/scale")
    yield same(f"{ours}.bias", f"{theirs}/bias")


def conv(ours: str, theirs: str) -> Rule:
    """A kernel (P, P, I, O) as a weight (O, I, P, P)."""
    return Rule(
        f"{ours}.weight",
        (f"{theirs}/kernel",),
        lambda kernel: kernel.permute(3, 2, 0, 1),
        lambda weight: (weight.permute(2, 3, 1, 0),),
    )
