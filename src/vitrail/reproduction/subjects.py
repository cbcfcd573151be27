"""Which models figures 6, 7, 10 and 11 look at, with which pictures, and how that is told."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.load import load
from vitrail.data.sources import judged_split, open_source
from vitrail.data.thumbnails import to_png
from vitrail.evaluation.results import Estimate
from vitrail.inspection import drawing
from vitrail.inspection.attention import study
from vitrail.inspection.findings import Study
from vitrail.inspection.layers import with_attention
from vitrail.inspection.pictures import Picture, from_source, spaced
from vitrail.models.vit import VisionTransformer
from vitrail.reproduction.cells import Cell, Result
from vitrail.reproduction.experiments import Key, Sets
from vitrail.reproduction.models import looked_at
from vitrail.reproduction.structure import Reach, even_distance

VIT, SHORT, HYBRID = "ViT, patch 4", "ViT, patch 4, short", "hybrid"
STUDIED = 128  # pictures that attention is averaged over, as the authors do
AT_ONCE = 32  # of them


def of_names(*names: str) -> Callable[[Sets], dict[Key, Cell]]:
    def cells(sets: Sets) -> dict[Key, Cell]:
        models = looked_at(sets)
        return {(name, models[name].settings.seed): models[name] for name in names}

    return cells


def opened(results: Mapping[Key, Result], name: str) -> VisionTransformer:
    """The model of that name; of several seeds the first."""
    folder = next(result.folder for key, result in results.items() if key[0] == name)
    return with_attention(load(folder).eval(), "figures")


def unseen(model: VisionTransformer, sets: Sets, count: int) -> list[Picture]:
    """Test pictures, evenly spaced, as they are and as the model sees them."""
    source = open_source(sets.pretrain, judged_split(sets.pretrain) or "all")
    return list(from_source(model, source, spaced(len(source), count), {}))


def images_for(model: VisionTransformer, sets: Sets) -> Tensor:
    """What attention is averaged over: (B, C, H, W)."""
    return torch.stack([picture.image for picture in unseen(model, sets, STUDIED)])


def studied(model: VisionTransformer, images: Tensor) -> Study:
    return study(model, images.split(AT_ONCE))


def reach_of(model: VisionTransformer, attention: Study) -> Reach:
    """Among patches alone, each row summing to 1, so that an even head can be held against it."""
    found = attention.distance
    return Reach(
        pixels=found.get("patches, renormalized", found["patches"]),
        even=even_distance(model.config.grid, model.config.stride),
    )


def distance_plot(studies: Iterable[Study], distance: dict[str, np.ndarray]) -> bytes:
    """A dot for each head (L, H) above its layer, in pixels; several models beside each other."""
    deepest = max(studies, key=lambda it: len(it.entropy))
    return to_png(drawing.distance_plot(replace(deepest, distance=distance)))


def within(found: Estimate, *, sign: str = "") -> str:
    """A number with its interval; `sign` "+" if it is a difference."""
    value, low, high = (format(number, f"{sign}.3f") for number in found)
    return f"{value} ({low} to {high})"


def yes(holds: bool) -> str:
    return "yes" if holds else "no"
