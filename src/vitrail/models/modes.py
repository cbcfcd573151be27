"""The mode that a model is in, learning or answering, left as it was found."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def standing_still(model: nn.Module) -> Iterator[None]:
    """Nothing is dropped inside; every part goes back to the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
