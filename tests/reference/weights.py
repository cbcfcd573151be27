"""Random weights, their names in other libraries, and the tolerance of a comparison."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import create
from vitrail.checkpoints.load import table_for
from vitrail.checkpoints.rules import write
from vitrail.models.config import pair
from vitrail.models.vit import Model

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # of the largest logit


def to_peer(model: Model, format: str) -> dict[str, Tensor]:
    """The weights in another library's names, which it then loads strictly."""
    dtype = next(model.parameters()).dtype
    weights = write(model, table_for(model.config, format).rules(model.config))
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


@torch.no_grad()
def randomize(model: Any) -> Any:
    """No weight is zero or one: a swapped, lost or doubled one changes the logits."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            weight.copy_(noise / max(1, weight[0].numel()) ** 0.5)
        else:
            weight.copy_(0.2 * noise + name.endswith(("weight", "scale", "gamma", "lambda1")))
    return model.eval()


def random_model(name: str, **changes: Any) -> Model:
    return randomize(create(name, **changes))


@torch.no_grad()
def difference(
    ours: Model,
    theirs: nn.Module,
    *,
    size: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    call: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__,
) -> float:
    """max |ours - theirs| / max |theirs|, for the outputs of two images of the model's size."""
    shape = (2, ours.config.channels, *(size or pair(ours.config.image_size)))
    images = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = call(theirs.to(dtype).eval(), images)
    return relative(ours.to(dtype)(images), expected)


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
