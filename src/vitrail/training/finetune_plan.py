"""Fine-tuning that fits a time budget: which weights to train, at which image size.

A pure function of costs, so that it can be tested without a model. The constants come from trials
on dev splits (docs/notebook.md, "Transfer on real weights"). From most to least expensive:

    full     every weight, at the checkpoint's image size: the paper's fine-tuning
    small    every weight, at a smaller image size
    last     the last blocks only, at the smallest size; the others need no backward pass
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

ENOUGH_EPOCHS = 1.5  # the largest image size for which so many fit is taken
FEWEST_EPOCHS = 0.4  # of every weight, at the smallest size; below, the last blocks learn more
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

    name: str  # full, small or last
    image_size: int
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

    def epochs(size: int, trained: float = 1.0) -> float:
        """Epochs that fit, if a share of the blocks is trained."""
        forward = budget.forward * cost(size)
        passes = (budget.train + budget.evaluated) * (forward + budget.read)  # probe, evaluation
        step = forward * (1 + BACKWARD * trained) + budget.read
        return max(0.0, budget.seconds - ENDING - passes) / (budget.train * step)

    small = min(sizes)
    fits = {size: epochs(size) for size in sizes}
    size = max((s for s in sizes if fits[s] >= ENOUGH_EPOCHS), default=small)
    reason = f"about {fits[size]:.1f} epochs fit"
    if size < native:
        reason += f", {fits[native]:.1f} at {native} pixels"
    if size > small or fits[size] >= FEWEST_EPOCHS:
        return FinetunePlan(
            name="full" if size == native else "small",
            image_size=size,
            epochs=fits[size],
            reason=reason,
        )
    trained = max(1, round(LAST_BLOCKS * config.depth))
    last = epochs(small, trained / config.depth)
    return FinetunePlan(
        name="last",
        image_size=small,
        frozen_blocks=config.depth - trained,
        epochs=last,
        reason=f"about {last:.1f} epochs fit, {fits[small]:.1f} of every weight",
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
