"""An export compared with its model, before anybody relies on it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.rules import unwrap_model
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import MixerConfig, VitConfig, pair
from vitrail.models.vit import Model, VisionTransformer

TOLERANCE = 1e-4  # of the largest number; the order of summation makes 1e-6
INT8_TOLERANCE = 1.0  # rounding weights moves numbers; pictures tell what it costs (guard.py)
PIXEL_TOLERANCE = 5e-2  # where pictures are resized, and may round to the neighboring level
BIT_STEP = 32  # pixels by which sizes of a BiT differ here; it takes any

Outputs = dict[str, Tensor]  # logits and features


def ready(model: Model) -> Model:
    """The model as it is exported: for answers and not for training, float32, on the CPU."""
    model = unwrap_model(model)
    if getattr(model, "merge", 0):
        raise ConfigError("token merging has no place in an export; set merge to 0 for it")
    if next(model.parameters()).is_meta:
        raise CheckpointError("the model has shapes but no values; nothing can be exported")
    plain = all(p.is_cpu and p.dtype == torch.float32 for p in model.parameters())
    if plain and not model.training:
        return model
    metadata, model = model.metadata, copy.deepcopy(model).to("cpu", torch.float32).eval()
    model.metadata = metadata
    return model


def answers(model: Model, images: Tensor) -> Outputs:
    """What the model itself says: its logits, if it has a head, and features, in one pass."""
    if isinstance(model, VisionTransformer):
        features, logits = model.run_head(*model.run_encoder(*model.prepare_tokens(images)))
    else:
        features = model.features(images)
        logits = None if model.head is None else model.head(features)
    return ({} if logits is None else {"logits": logits}) | {"features": features}


def shapes(model: Model, *, sizes: bool = True) -> Iterator[tuple[int, int, int]]:
    """Batches to compare by: three numbers of images, and three sizes if there are several."""
    config = model.config
    height, width = pair(config.image_size)
    yield 1, height, width
    yield 3, height, width
    if not sizes or isinstance(config, MixerConfig):
        yield 2, height, width
    else:
        down, across = config.stride if isinstance(config, VitConfig) else (BIT_STEP, BIT_STEP)
        yield 2, height + down, max(across, width // 2 // across * across)
        yield 1, max(down, height // 2 // down * down), width + 3 * across


def largest_difference(
    model: Model, run: Callable[[Tensor], Outputs], *, sizes: bool = True
) -> float:
    """Between what `run` and the model make of noise, of the largest number that there is."""
    generator = torch.Generator().manual_seed(0)
    differences = []
    for count, height, width in shapes(model, sizes=sizes):
        images = torch.randn(count, model.config.channels, height, width, generator=generator)
        with torch.inference_mode():
            differences += apart(answers(model, images), run(images))
    return largest(differences)


def apart(expected: Outputs, found: Outputs) -> list[float]:
    """The difference of each output, relative to the largest number."""
    if {key: x.shape for key, x in expected.items()} != {key: x.shape for key, x in found.items()}:
        return [float("inf")]
    return [
        float((found[key] - x).abs().max() / x.abs().max().clamp(min=1e-30))
        for key, x in expected.items()
    ]


def largest(differences: list[float]) -> float:
    return max(differences, key=lambda value: (value != value, value))  # NaN is the largest


def check_same(model: Model, session: Any, tolerance: float = TOLERANCE) -> float:
    """How far a session is from its model; too far is an error."""
    names = [output.name for output in session.get_outputs()]

    def run(images: Tensor) -> Outputs:
        found = session.run(names, {"images": images.numpy()})
        return {name: torch.from_numpy(x) for name, x in zip(names, found, strict=True)}

    return within(tolerance, largest_difference(model, run))


def check_same_pixels(model: Model, session: Any, tolerance: float = TOLERANCE) -> float:
    """The same for a file that prepares pictures itself; `tolerance` is for those that have the
    right size already."""
    how = get_metadata(model).preprocessing
    target = how.resize_to or how.size
    if how.resize == "short-side":
        target = (min(target), min(target))
    transform = EvalTransform(preprocessing=how, channels=model.config.channels)
    names = [output.name for output in session.get_outputs()]
    generator = np.random.default_rng(0)

    def difference(count: int, height: int, width: int) -> float:
        shape = (count, height, width, model.config.channels)
        pixels = generator.integers(0, 256, shape, dtype=np.uint8)
        images = normalize(torch.stack([transform(each) for each in pixels]), how)
        with torch.inference_mode():
            expected = answers(model, images)
        found = session.run(names, {"pixels": pixels})
        outputs = {name: torch.from_numpy(x) for name, x in zip(names, found, strict=True)}
        return largest(apart(expected, outputs))

    height, width = target
    exact = within(tolerance, largest([difference(count, *target) for count in (1, 2, 3)]))
    resized = max(tolerance, PIXEL_TOLERANCE)
    within(resized, difference(2, 2 * height + 7, width + 40))
    within(resized, difference(1, max(1, height // 2 - 3), max(1, width // 3)))
    return exact


def within(tolerance: float, difference: float) -> float:
    if not difference <= tolerance:
        raise CheckpointError(
            f"the export gives other numbers than the model, by {difference:.1e} of the largest; "
            "nothing was written. This is a fault of vitrail, or of a library it uses"
        )
    return difference
