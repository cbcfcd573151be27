"""A running average of the weights, which is often better than any weights it is made of.

Polyak & Juditsky 1992; the paper's best ImageNet numbers use it (decay 0.9999, table 2). The
average begins at the first weights and its decay is the same from the first step to the last.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """After each step: average = decay * average + (1 - decay) * weights.

    `values` are tensors of its own, changed in place: what is saved, and loaded into.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        assert 0 <= decay < 1
        self.decay = decay
        self.parameters = dict(parameters)
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now; one operation for all of them."""
        values, weights = [*self.values.values()], [*self.parameters.values()]
        torch._foreach_lerp_(values, weights, 1 - self.decay)  # pyright: ignore

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside `with`, and its own, to the bit, after it.

        Values are copied, not swapped by pointer: a model that is split over processes gathers
        its weights from memory that would not notice.
        """
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            self.write(self.values)
            yield
        finally:
            self.write(own)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])
