"""Create models from names and configurations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vitrail.models.config import BitConfig, Config, InitScheme, MixerConfig, VitConfig
from vitrail.models.init import initialize
from vitrail.models.mixer import MlpMixer
from vitrail.models.registry import configuration
from vitrail.models.resnet import BiT
from vitrail.models.vit import VisionTransformer

Model = VisionTransformer | BiT | MlpMixer


def create(
    name: str,
    *,
    init: InitScheme = "google",
    head_bias: float = 0.0,
    generator: torch.Generator | None = None,
    **changes: Any,
) -> Model:
    """Create a randomly initialized model by name; `changes` override fields of its config.

    >>> model = create("ViT-B/16", num_classes=10, image_size=384)
    """
    config = configuration(name)
    model = build(
        config.change(**changes) if changes else config, device=torch.get_default_device()
    )
    initialize(model, init, head_bias=head_bias, generator=generator)
    return model


def build(config: Config, *, device: torch.device | str = "meta") -> Model:
    """Create the modules of a config with uninitialized weights, by default on `meta`."""
    with torch.device("meta"):
        match config:
            case VitConfig():
                model = VisionTransformer(config)
            case BitConfig():
                model = BiT(config)
            case MixerConfig():
                model = MlpMixer(config)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and restore the mode of every submodule on exit."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
