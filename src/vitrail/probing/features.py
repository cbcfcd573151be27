"""A model's features of a data set, computed once: kept on disk by model and data.

The name of the file is a digest of the weights below the head, the preprocessing and the data's
fingerprint. Nothing goes stale: other weights or other pictures have another name. The folder,
~/.cache/vitrail/features unless VITRAIL_CACHE says otherwise, may be deleted at any time.

Shapes: N pictures, D features.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail import parallel
from vitrail.checkpoints.adapt import HEADS
from vitrail.checkpoints.bundle import digest
from vitrail.checkpoints.facts import facts_of
from vitrail.checkpoints.files import write_file
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.samples import Source
from vitrail.data.sources import fingerprint
from vitrail.errors import DataError
from vitrail.evaluation.api import labels_at
from vitrail.evaluation.passes import Outputs, look_at_all
from vitrail.models.build import Model
from vitrail.models.config import to_dict


@dataclass(frozen=True, kw_only=True)
class Features:
    """One vector for each picture that could be read, in the order of the source."""

    values: np.ndarray  # float32 (N, D)
    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # pictures that could not be read
    cached: bool = False  # they were found on disk

    def __len__(self) -> int:
        return len(self.labels)


def features_of(
    model: Model,
    source: Source,
    *,
    preprocessing: Preprocessing | None = None,
    cache: bool = True,
    batch_size: int = 64,
    **how: Any,
) -> Features:
    """`model.features` of every picture; `how` is what `look_at_all` takes beside."""
    if source.multi_label:
        raise DataError("the pictures have several labels each, and a probe takes one for each")
    prepare = preprocessing or facts_of(model).preprocessing
    path = cache_folder() / f"{cache_key(model, source, prepare, how)}.safetensors"
    kept = read_kept(path) if cache and parallel.from_first(path.exists()) else None
    if kept is None:
        model.eval()
        how |= {"channels": model.config.channels, "device": next(model.parameters()).device}
        values, indices, skipped = looked_at(model.features, source, prepare, batch_size, how)
        if cache and parallel.is_first():
            tensors = {"values": torch.from_numpy(values), "indices": torch.from_numpy(indices)}
            write_file(path, tensors, {"skipped": json.dumps(skipped)})
    else:
        values, indices, skipped = kept
    return Features(
        values=values,
        labels=labels_at(source, indices),
        classes=source.classes,
        skipped=skipped,
        cached=kept is not None,
    )


def pixels_of(source: Source, *, channels: int = 3, side: int = 32, **how: Any) -> Features:
    """The pixels of small copies as features: what any model should be better than."""
    prepare = Preprocessing(size=(side, side), mean=(0.5,) * channels, std=(0.5,) * channels)
    values, indices, skipped = looked_at(
        lambda images: images.flatten(1), source, prepare, 64, how | {"channels": channels}
    )
    labels = labels_at(source, indices)
    return Features(values=values, labels=labels, classes=source.classes, skipped=skipped)


def looked_at(
    features: Callable[[Tensor], Tensor],
    source: Source,
    prepare: Preprocessing,
    batch_size: int,
    how: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """Vectors (N, D), the places in the source that they belong to, and unreadable pictures."""
    outputs = Outputs(len(source))
    skipped = look_at_all(features, source, prepare, outputs.add, batch_size=batch_size, **how)
    values, indices = outputs.finish()
    if not len(indices):
        reason = next((f": {name}: {why}" for name, why in skipped.items()), "")
        raise DataError(f"none of {len(source)} pictures could be read{reason}")
    if not np.isfinite(values).all():
        bad = source.name(int(indices[~np.isfinite(values).all(1)][0]))
        raise DataError(f"the model's features of {bad} are no numbers; its weights are broken")
    return values, indices, skipped


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("VITRAIL_CACHE") or Path(home) / "vitrail") / "features"


def cache_key(model: Model, source: Source, prepare: Preprocessing, how: dict[str, Any]) -> str:
    about = {"preprocessing": prepare.to_dict(), "backend": how.get("backend", "torch")}
    return backbone(model, **about, source=fingerprint(source))


def backbone(model: Model, **about: Any) -> str:
    """A digest of everything that makes a model's features, and of what else is named."""
    tensors = {n: x for n, x in model.state_dict().items() if n.split(".")[0] not in HEADS}
    description = to_dict(model.config) | {"num_classes": 0}
    return digest(tensors, {"model": description, **about})


def read_kept(path: Path) -> tuple[np.ndarray, np.ndarray, dict[str, str]] | None:
    """What was kept; None if it cannot be read, and is to be computed again."""
    try:
        with safe_open(path, framework="np") as file:
            skipped = json.loads(file.metadata()["skipped"])
            return file.get_tensor("values"), file.get_tensor("indices"), skipped
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None
