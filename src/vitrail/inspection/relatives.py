"""How a model sees a whole data set: which pictures it finds alike, and all of them as a map."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from vitrail.data.samples import Source
from vitrail.data.thumbnails import thumbnail
from vitrail.inspection.findings import Look, Neighbor, Scatter
from vitrail.inspection.pictures import Picture
from vitrail.inspection.tokens import neighbors, scatter
from vitrail.models.build import Model
from vitrail.probing.features import features_of

ALIKE = 6
SIDE = 96  # pixels of a neighbor's picture


def related(
    model: Model,
    source: Source,
    shown: Sequence[Picture],
    looks: Sequence[Look],
    tell: Callable[[str, int, int], None],
) -> tuple[Scatter, list[Look]]:
    """The data set as a map, and each look with its nearest neighbors in the set."""
    bank = features_of(model, source, progress=lambda done, total: tell("features", done, total))
    points = scatter(bank.values, bank.labels, bank.classes)
    if not shown:
        return points, list(looks)
    with torch.inference_mode():
        own = [model.features(picture.image[None])[0].cpu().numpy() for picture in shown]
    names = [source.name(index) for index in bank.indices.tolist()]
    found = []
    for look, row in zip(looks, own, strict=True):
        itself = np.array([names.index(look.name)]) if look.name in names else None
        places, alike = neighbors(row[None], bank.values, ALIKE, exclude=itself)
        near = tuple(
            Neighbor(
                name=names[place],
                label=bank.classes[bank.labels[place]],
                similarity=float(similarity),
                pixels=small(source, int(bank.indices[place])),
            )
            for place, similarity in zip(places[0].tolist(), alike[0].tolist(), strict=True)
        )
        found.append(replace(look, neighbors=near))
    return points, found


def small(source: Source, row: int) -> np.ndarray:
    image = thumbnail(source, row, SIDE, enlarge=False)
    return np.zeros((1, 1, 3), np.uint8) if image is None else np.asarray(image)
