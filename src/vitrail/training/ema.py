"""Exponential moving average of the weights (Polyak & Juditsky 1992).

The paper's best ImageNet numbers use it (decay 0.9999, table 2). The average starts at the
initialization, and its decay is constant.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """After each step: average = decay * average + (1 - decay) * weights.

    `values` are updated in place: checkpoints are written from them and loaded into them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        assert 0 <= decay < 1
        self.decay = decay
        self.parameters = dict(parameters)
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        values, weights = [*self.values.values()], [*self.parameters.values()]
        torch._foreach_lerp_(values, weights, 1 - self.decay)  # pyright: ignore

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside `with`, and its own, bit for bit, after it.

        Values are copied, not swapped by pointer: FSDP gathers weights from its own storage.
        """
        weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            self.write(self.values)
            yield
        finally:
            self.write(weights)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])
