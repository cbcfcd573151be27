"""How much work a picture is: floating-point operations of matrix products and convolutions.

The convention is that of table 6 of the paper. A multiply-add is two operations; element-wise work
(norms, activations, softmax, weight standardization) is not counted; the backward pass is two
forward passes, because each product has two factors whose gradients are products again. All tokens
are counted in every layer, although vitrail computes in the last one only those that are read, and
so are all keys and values: the counter adds hooks (`is_plain_linear` in `models/memory.py`).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.models.config import BitConfig, Config, pair
from vitrail.models.vit import VisionTransformer, build

TRAINING = 3  # forward passes that a forward and a backward pass make up
EXA = 1e18


@dataclass(frozen=True)
class Cost:
    """What one picture costs."""

    parameters: int
    forward: float  # operations of a forward pass, two for each multiply-add
    tokens: int | None  # that the encoder reads; a ResNet has none

    @property
    def training(self) -> float:
        """Operations of a forward and a backward pass."""
        return TRAINING * self.forward


def cost_of(config: Config, image_size: int | None = None) -> Cost:
    """Counted on a model without memory, in half a second at most."""
    return counted(config if image_size is None else config.change(image_size=image_size))


def training_flops(config: Config, images: float) -> float:
    """Operations of learning from so many pictures, each as often as it is seen."""
    return images * cost_of(config).training


@cache
def counted(config: Config) -> Cost:
    model = build(config).eval()
    if isinstance(model, VisionTransformer):
        model.head_tokens = None  # the network as it is published: all tokens to the end
    shape = (1, config.channels, *pair(config.image_size))
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.empty(shape, device="meta"))
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward=float(counter.get_total_flops()),
        tokens=None if isinstance(config, BitConfig) else config.num_tokens,
    )
