"""Small models that tests of several folders look at."""

import torch

from vitrail.models.init import initialize
from vitrail.models.vit import build


def awake(config, seed=0):
    """A model none of whose weights is zero, so that every part has a say."""
    torch.manual_seed(seed)
    model = build(config, device="cpu")
    initialize(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else parameter.data.add_(
            0.1 * torch.randn_like(parameter)
        )
    return model.eval()
