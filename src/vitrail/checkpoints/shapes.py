"""Reading a description from names and shapes: what the tables of all formats have in common."""

import math
import re

from vitrail.checkpoints.rules import Entries
from vitrail.errors import CheckpointError
from vitrail.models.config import BitConfig, Config, MixerConfig, Numerics, VitConfig
from vitrail.models.registry import SIZES

USUAL_HEAD_WIDTH = 64
SMALLEST_USUAL_WIDTH = 191  # below Ti, sizes are our own and nobody else's


def shape(entries: Entries, name: str, axes: int) -> tuple[int, ...]:
    """The shape of an array the description is read from."""
    if name not in entries:
        raise CheckpointError(f"the file has no {name}, which the model needs")
    sizes = entries[name].shape
    if len(sizes) != axes or 0 in sizes:
        raise CheckpointError(f"{name} is {sizes}; it should have {axes} axes, none of them empty")
    return sizes


def last_size(entries: Entries, name: str) -> int:
    """How many channels a bias has; 0 if there is none."""
    return shape(entries, name, 1)[0] if name in entries else 0


def count(entries: Entries, pattern: str) -> int:
    """How many different numbers stand where the pattern has its group."""
    return len({match[1] for name in entries if (match := re.match(pattern, name))})


def is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def square(patches: int, stride: tuple[int, int], hint: str) -> tuple[int, int]:
    """The pixels of a square of so many patches, which are `stride` pixels apart."""
    if not is_square(patches):
        raise CheckpointError(
            f"the file is made for {patches} patches, which make no square grid; {hint}"
        )
    side = math.isqrt(patches)
    return side * stride[0], side * stride[1]


def usual_heads(width: int) -> int:
    """How many heads a ViT of this width has in every library, where a file does not say."""
    for _, known_width, _, heads in SIZES.values():
        if width == known_width and width > SMALLEST_USUAL_WIDTH:
            return heads
    if width % USUAL_HEAD_WIDTH:
        raise CheckpointError(
            f"the file does not say how many heads the model has, and its width {width} is not "
            f"a multiple of {USUAL_HEAD_WIDTH}; say it with heads=…"
        )
    return width // USUAL_HEAD_WIDTH


class NumericLoss(str):
    """A loss in how the weights are computed with; without one of this kind, weights are lost."""

    __slots__ = ()


def other_numerics(config: Config, theirs: Numerics) -> list[str]:
    """Numerics of a model that a library with these fixed ones would not compute.

    How positions are resized is left out: it does not matter at the model's own size.
    """
    ours = config.numerics
    names = []
    if not isinstance(config, BitConfig):
        names.append("norm_eps")
    if isinstance(config, MixerConfig) or (isinstance(config, VitConfig) and config.mlp == "gelu"):
        names.append("gelu")
    if isinstance(config, BitConfig) or (isinstance(config, VitConfig) and config.stem == "resnet"):
        names += ["group_norm_eps", "conv_eps", "conv_eps_inside_root"]
    return [
        NumericLoss(f"{name}={getattr(ours, name)!r} (it computes with {getattr(theirs, name)!r})")
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]
