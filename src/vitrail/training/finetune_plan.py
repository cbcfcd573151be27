"""Fine-tuning that fits a time budget: which weights to train, at which image size.

A pure function of costs, so that it can be tested without a model. The constants come from trials
on dev splits (docs/notebook.md, "Transfer on real weights"). From most to least expensive:

    full       every weight, at the checkpoint's image size: the paper's fine-tuning
    growing    every weight; images of three quarters of the size first, the full size last
    small      the same, at a smaller size than the checkpoint's
    last       the last blocks only, at the smallest size; the others need no backward pass

Crops make objects larger in training than in evaluation, so a model that was trained at a smaller
size is better at the full one than at its own (FixRes, Touvron et al. 2019, arXiv:1906.06423).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from vitrail.models.build import Model, eval_mode
from vitrail.models.config import VitConfig, pair

FULL_EPOCHS = 12.0  # at the checkpoint's size; from here on, nothing is saved
ENOUGH_EPOCHS = 1.5  # the largest image size for which so many fit is taken
TRAIN_SIZE = 3 / 4  # of the image size, for most of the run
FULL_SIZE_FROM = 0.9  # of the run
FEWEST_EPOCHS = 0.4  # of every weight, at the smallest size; below, the last blocks learn more
SMALLEST = 4 / 7  # of the checkpoint's image size: 128 of 224 pixels
LAST_BLOCKS = 1 / 3  # of the depth
BACKWARD = 2.0  # forward passes that a backward pass costs
IMAGES = 16  # per timed forward pass
ENDING = 4.0  # seconds for the first steps, saving and the report
PROBE_SHARE = 0.5  # of the time that evaluation leaves, at most, for the features of the probe
FEWEST_PROBED = 500  # images: fewer make a poor head, whatever they cost


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
    probe_images: int  # training images from which the probe is fitted
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

    def smaller(size: int) -> int:
        """The image size for most of a run that ends at `size`."""
        return max(stride, round(TRAIN_SIZE * size / stride) * stride)

    def probe_images(size: int) -> int:
        """Training images that the probe can afford."""
        image = budget.forward * cost(size) + budget.read
        free = budget.seconds - ENDING - budget.evaluated * image
        return min(budget.train, max(FEWEST_PROBED, int(PROBE_SHARE * free / image)))

    def epochs(size: int, *, trained: float = 1.0, growing: bool = True) -> float:
        """Epochs that fit, if a share of the blocks is trained."""
        forward = budget.forward * cost(size)
        passes = (probe_images(size) + budget.evaluated) * (forward + budget.read)
        if growing:
            first = budget.forward * cost(smaller(size))
            forward = FULL_SIZE_FROM * first + (1 - FULL_SIZE_FROM) * forward
        step = forward * (1 + BACKWARD * trained) + budget.read
        return max(0.0, budget.seconds - ENDING - passes) / (budget.train * step)

    if (fits := epochs(native, growing=False)) >= FULL_EPOCHS:
        reason = f"about {fits:.0f} epochs fit"
        return FinetunePlan(
            name="full",
            image_size=native,
            epochs=fits,
            probe_images=probe_images(native),
            reason=reason,
        )
    small = min(sizes)
    fit = {size: epochs(size) for size in sizes}
    size = max((s for s in sizes if fit[s] >= ENOUGH_EPOCHS), default=small)
    if size > small or fit[size] >= FEWEST_EPOCHS:
        reason = f"about {fit[size]:.1f} epochs fit"
        if size < native:
            reason += f", {fit[native]:.1f} at {native} pixels"
        name = "growing" if size == native else "small"
        frozen = 0
    else:
        name = "last"
        frozen = config.depth - max(1, round(LAST_BLOCKS * config.depth))
        fit[size] = epochs(size, trained=1 - frozen / config.depth)
        reason = f"about {fit[size]:.1f} epochs fit, {epochs(size):.1f} of every weight"
    return FinetunePlan(
        name=name,
        image_size=size,
        image_sizes=((0.0, smaller(size)), (FULL_SIZE_FROM, size)) if smaller(size) < size else (),
        frozen_blocks=frozen,
        epochs=fit[size],
        probe_images=probe_images(size),
        reason=reason,
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
    with eval_mode(model):
        model.features(images[:2])
        begun = time.monotonic()
        model.features(images).sum().item()  # waits for the device
        return (time.monotonic() - begun) / IMAGES


def frozen_patterns(blocks: int, names: Sequence[str]) -> tuple[str, ...]:
    """`optim.freeze` for the first blocks and everything that comes before them."""
    before = ("stem.*", "position.*", "encoder.positions.*", "cls_token", "distillation_token")
    patterns = (*before, "registers", *(f"encoder.blocks.{block}.*" for block in range(blocks)))
    return tuple(p for p in patterns if blocks and any(fnmatchcase(n, p) for n in names))
