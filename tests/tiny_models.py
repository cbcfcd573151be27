"""Small models that tests of several folders share."""

import torch

from vitrail.models.init import initialize
from vitrail.models.vit import build


def awake(config, seed=0):
    """An initialized model without zero weights, so that every part affects the output."""
    torch.manual_seed(seed)
    model = build(config, device="cpu")
    initialize(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else parameter.data.add_(
            0.1 * torch.randn_like(parameter)
        )
    return model.eval()


def random_model(config):
    """A model whose weights are all drawn from the same normal distribution."""
    torch.manual_seed(0)
    model = build(config, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()
