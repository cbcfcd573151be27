"""FLOPs of a model and of a whole training run, and the accelerator-days they take.

The convention is that of table 6 of the paper: matrix products and convolutions only, two FLOPs for
a multiply-add, and a backward pass costs two forward passes, because each product has two factors
whose gradients are products again. All tokens are counted in every layer, although the last one
computes only those that the head reads. All keys and values are counted too, because the hooks of
the counter disable the shortcut without them (`is_plain_linear` in `models/attention.py`).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.formatting import GIB
from vitrail.models.config import BitConfig, Config, pair
from vitrail.models.vit import VisionTransformer, build

TRAINING = 3  # cost of a forward and a backward pass, in forward passes
EXA = 1e18
DAY = 86_400  # seconds
UTILIZATION = 0.35  # assumed share of the peak; the paper's own runs reach 0.32 to 0.43


class Cost(NamedTuple):
    """Size of a model and FLOPs per image."""

    parameters: int
    forward: float
    tokens: int | None  # that the encoder reads; a ResNet has none

    @property
    def training(self) -> float:
        """FLOPs of a forward and a backward pass."""
        return TRAINING * self.forward


@cache
def cost_of(config: Config, image_size: int | None = None) -> Cost:
    """Count parameters and FLOPs on the meta device, in half a second at most."""
    if image_size is not None:
        config = config.change(image_size=image_size)
    model = build(config).eval()
    if isinstance(model, VisionTransformer):
        model.head_tokens = None  # the network as published: all tokens to the end
    shape = (1, config.channels, *pair(config.image_size))
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.empty(shape, device="meta"))
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward=float(counter.get_total_flops()),
        tokens=None if isinstance(config, BitConfig) else config.num_tokens,
    )


class Accelerator(NamedTuple):
    """Peak and memory as published by its vendor."""

    name: str
    peak: float  # FLOP/s in bfloat16 (V100: float16), dense
    memory: int  # bytes

    def days(self, flops: float, utilization: float) -> float:
        """Return the days that one device takes; n devices take 1/n of them."""
        return flops / (self.peak * utilization) / DAY


# cloud.google.com/tpu/docs, and the data sheets of NVIDIA and AMD. A TPUv3 chip of two cores has
# 123e12 FLOP/s and 32 GiB; the paper counts cores.
ACCELERATORS = (
    Accelerator("TPUv3 core", 61.5e12, 16 * GIB),
    Accelerator("TPUv4", 275e12, 32 * GIB),
    Accelerator("TPUv5e", 197e12, 16 * GIB),
    Accelerator("TPUv5p", 459e12, 95 * GIB),
    Accelerator("V100", 125e12, 32 * GIB),
    Accelerator("A100", 312e12, 80 * GIB),
    Accelerator("H100", 989e12, 80 * GIB),
    Accelerator("MI300X", 1307e12, 192 * GIB),
)
TPU_V3_CORE = ACCELERATORS[0]


class PublishedRun(NamedTuple):
    """A pre-training run of the paper: core-days of table 2, exaFLOPs of table 6."""

    model: str
    epochs: int
    exaflops: float
    core_days: float  # TPUv3

    @property
    def utilization(self) -> float:
        return self.exaflops * EXA / (self.core_days * DAY * TPU_V3_CORE.peak)


PUBLISHED_RUNS = (PublishedRun("ViT-H/14", 14, 4262, 2500), PublishedRun("ViT-L/16", 14, 1567, 680))
