"""Fine-tuning that fits a time budget: how many blocks to train, at which image size.

A pure function of costs, so that it can be tested without a model. The constants come from trials
on dev splits (docs/notebook.md, "Transfer on real weights"). From most to least expensive:

    full        every weight, at the checkpoint's image size: the paper's fine-tuning
    growing     every weight; smaller images first, the checkpoint's size last
    small       every weight, at a smaller image size
    last        the last blocks only; the others are frozen and need no backward pass
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from vitrail.models.build import Model
from vitrail.models.checks import pair
from vitrail.models.config import VitConfig
from vitrail.models.modes import standing_still

FULL_EPOCHS = 12.0  # from here on, full fine-tuning at the checkpoint's size
GROWING_EPOCHS = 2.0  # at the checkpoint's size; from here on, small images first and those last
SMALL_EPOCHS = 1.5  # at a smaller size; the largest size that reaches it is taken
SMALLEST = 4 / 7  # of the checkpoint's image size: 128 of 224 pixels
LAST_BLOCKS = 1 / 3  # of the depth
BACKWARD = 2.0  # forward passes that a backward pass costs
IMAGES = 16  # per timed forward pass
ENDING = 4.0  # seconds for the first steps, saving and the report


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan depends on besides the model."""

    seconds: float  # until the run has to end
    forward: float  # per image, at the checkpoint's image size
    read: float  # seconds per image, to read and decode it
    train: int  # images
    evaluated: int  # images that are evaluated at the end, dev included
    weights: tuple[str, ...] = ()  # the names of the model's parameters


@dataclass(frozen=True, kw_only=True)
class FinetunePlan:
    """How to fine-tune, and why."""

    name: str  # full, growing, small or last
    image_size: int
    image_sizes: tuple[tuple[float, int], ...] = ()  # (share of the run, pixels), if they grow
    frozen_blocks: int = 0  # the first ones, with everything before them
    epochs: float = 0.0  # that fit, about
    reason: str = ""


def plan_finetuning(config: VitConfig, budget: Budget) -> FinetunePlan:
    """The most thorough fine-tuning that fits into the budget."""
    native = pair(config.image_size)[0]
    stride = config.stride[0]
    sizes = [s for s in range(stride, native + 1, stride) if s >= SMALLEST * native]

    def cost(size: int) -> float:
        """Forward passes at the checkpoint's size that one at `size` costs."""
        return work(config, size) / work(config, native)

    def epochs(size: int, trained: float = 1.0, image: float | None = None) -> float:
        """Epochs that fit if a step's images cost `image`, and a share of the blocks is trained."""
        forward = budget.forward * cost(size)
        left = budget.seconds - ENDING - (budget.train + budget.evaluated) * (forward + budget.read)
        each = budget.forward * (cost(size) if image is None else image)
        return left / (budget.train * (each * (1 + BACKWARD * trained) + budget.read))

    small = min(sizes)
    fits = epochs(native)
    if fits >= FULL_EPOCHS:
        return FinetunePlan(
            name="full",
            image_size=native,
            epochs=fits,
            reason=f"about {fits:.1f} epochs fit at {native} pixels",
        )
    growing = epochs(native, image=(cost(small) + cost(native)) / 2)
    if growing >= GROWING_EPOCHS and small < native:
        return FinetunePlan(
            name="growing",
            image_size=native,
            image_sizes=((0.0, small), (0.5, native)),
            epochs=growing,
            reason=f"about {fits:.1f} epochs fit at {native} pixels, {growing:.1f} with "
            f"{small} pixels for the first half",
        )
    for size in reversed(sizes):
        if (fits := epochs(size)) >= SMALL_EPOCHS:
            return FinetunePlan(
                name="small",
                image_size=size,
                epochs=fits,
                reason=f"about {fits:.1f} epochs fit at {size} pixels, "
                f"{epochs(native):.1f} at {native}",
            )
    frozen = config.depth - max(1, round(LAST_BLOCKS * config.depth))
    fits = epochs(small, 1 - frozen / config.depth)
    return FinetunePlan(
        name="last",
        image_size=small,
        frozen_blocks=frozen,
        epochs=fits,
        reason=f"only {max(0.0, epochs(small)):.1f} epochs of full fine-tuning fit at {small} "
        f"pixels, {max(0.0, fits):.1f} of the last {config.depth - frozen} blocks",
    )


def work(config: VitConfig, size: int) -> float:
    """Multiply-adds of the encoder for an image of `size` pixels, up to a constant factor."""
    tokens = (size // config.stride[0]) ** 2 + config.num_prefix
    return tokens * (4 * config.width + 2 * config.mlp_width + 2 * tokens)


@torch.no_grad()
def seconds_per_image(model: Model, device: torch.device) -> float:
    """The time of a forward pass at the model's own image size, per image."""
    config = model.config
    images = torch.zeros(IMAGES, config.channels, *pair(config.image_size), device=device)
    model.to(device)
    with standing_still(model):
        model.features(images[:2])
        begun = time.monotonic()
        model.features(images).sum().item()  # waits for the device
        return (time.monotonic() - begun) / IMAGES


def frozen_patterns(blocks: int, names: Sequence[str]) -> tuple[str, ...]:
    """`optim.freeze` for the first blocks and everything that comes before them."""
    before = ("stem.*", "position.*", "encoder.positions.*", "cls_token", "distillation_token")
    patterns = (*before, "registers", *(f"encoder.blocks.{block}.*" for block in range(blocks)))
    return tuple(p for p in patterns if blocks and any(fnmatchcase(n, p) for n in names))
