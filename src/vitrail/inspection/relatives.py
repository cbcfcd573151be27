"""How a model sees a data set: which pictures it finds alike, and all of them as a map."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import ImageDataset
from vitrail.data.decode import thumbnail
from vitrail.inspection.findings import Look, Neighbor, Scatter
from vitrail.inspection.layers import at_once
from vitrail.inspection.pictures import Picture, spaced
from vitrail.inspection.tokens import neighbors, scatter
from vitrail.models.vit import Model
from vitrail.probing.features import features_of

ALIKE = 6
SIDE = 96  # pixels of a neighbor's picture
MOST = 5000  # pictures of a set that are looked at


def related(
    model: Model,
    source: ImageDataset,
    shown: Sequence[Picture],
    looks: Sequence[Look],
    tell: Callable[[str, int, int], None],
    unread: dict[str, str],
) -> tuple[Scatter, list[Look], list[str]]:
    """The data set as a map, each look with its nearest neighbors in it, and what to know of it.

    `unread` gets the pictures that cannot be read, and why.
    """
    part = some(source)
    bank = features_of(
        model,
        part,
        batch_size=at_once(model, get_metadata(model).preprocessing.size),
        progress=lambda done, total: tell("features", done, total),
    )
    unread |= bank.skipped
    notes = []
    if len(part) < len(source):
        notes.append(f"map and neighbors are of {len(part):,} of {len(source):,} pictures")
    rows = np.array([part.row(index) for index in bank.indices.tolist()])  # in the collection
    found = []
    for look, picture in zip(looks, shown, strict=True):
        with torch.inference_mode():
            own = model.features(picture.image[None]).float().cpu().numpy()
        itself = None
        if picture.row is not None and source.row(picture.row) in rows:
            itself = np.flatnonzero(rows == source.row(picture.row))
        places, alike = neighbors(own, bank.values, ALIKE, exclude=itself)
        near = tuple(
            Neighbor(
                name=part.name(int(bank.indices[place])),
                label=bank.classes[bank.labels[place]],
                similarity=float(similarity),
                pixels=small(part, int(bank.indices[place])),
            )
            for place, similarity in zip(places[0].tolist(), alike[0].tolist(), strict=True)
        )
        found.append(replace(look, neighbors=near))
    return scatter(bank.values, bank.labels, bank.classes), found, notes


def some(source: ImageDataset) -> ImageDataset:
    """The set, or evenly spaced pictures of a large one."""
    return source if len(source) <= MOST else source.subset(np.array(spaced(len(source), MOST)))


def small(source: ImageDataset, row: int) -> np.ndarray:
    image = thumbnail(source, row, SIDE, enlarge=False)
    return np.zeros((1, 1, 3), np.uint8) if image is None else np.asarray(image)
