"""How large models are and how much work, counted without memory; and how that is written."""

from vitrail.models.build import build
from vitrail.models.config import Config, VitConfig
from vitrail.models.registry import configuration
from vitrail.planning.cost import EXA, Cost, cost_of, training_flops


def headless(config: Config) -> Config:
    """The model up to its features: what its pictures cost does not depend on any classes."""
    if isinstance(config, VitConfig):
        return config.change(num_classes=0, representation=0, dropout=0.0)
    return config.change(num_classes=0)


def trunk(model: str | Config, image_size: int | None = None) -> Cost:
    """Parameters, operations and tokens of a model without its head."""
    config = configuration(model) if isinstance(model, str) else model
    return cost_of(headless(config), image_size)


def parameters(config: Config) -> int:
    return sum(weight.numel() for weight in build(config).parameters())


def exaflops(model: str, images: float, epochs: float) -> float:
    """Of a whole pre-training at 224 pixels, the head left out."""
    return training_flops(headless(configuration(model)), images * epochs) / EXA


def millions(count: float) -> str:
    return f"{count / 1e6:,.1f} M"


def giga(operations: float) -> str:
    return f"{operations / 1e9:,.1f}"


def signed(share: float) -> str:
    """`+2.0 %`: a deviation."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # no -0.0
