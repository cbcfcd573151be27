"""A model's features of a data set, computed once: kept on disk by model and data.

The name of the file is a digest of the weights below the head, how many tokens are merged, the
preprocessing, the pictures and this version, so other weights or pictures have another name. (Of
more than 2 GiB of pictures, not every byte is looked at: `content_hash` of data/provenance.py.) The
folder, ~/.cache/vitrail/features unless VITRAIL_CACHE says otherwise, may be deleted at any time.
Where nothing can be written there, nothing is kept.

Shapes: N pictures, D features.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail import __version__, distributed
from vitrail.checkpoints.bundle import digest
from vitrail.checkpoints.files import write_file
from vitrail.checkpoints.load import HEADS
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import Dataset
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.provenance import content_hash
from vitrail.data.storage import cache_folder
from vitrail.errors import CheckpointError, DataError
from vitrail.evaluation.evaluate import Outputs, labels_at, run_inference
from vitrail.evaluation.results import no_readable_images
from vitrail.models.config import to_dict
from vitrail.models.vit import Model, eval_mode


@dataclass(frozen=True, kw_only=True)
class Features:
    """One vector for each picture that could be read, in the order of the source."""

    values: np.ndarray  # float32 (N, D)
    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    indices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # in the source
    skipped: dict[str, str] = field(default_factory=dict)  # pictures that could not be read
    cached: bool = False  # they were found on disk

    def __len__(self) -> int:
        return len(self.labels)


def features_of(
    model: Model,
    source: Dataset,
    *,
    preprocessing: Preprocessing | None = None,
    cache: bool = True,
    batch_size: int = 64,
    **how: Any,
) -> Features:
    """`model.features` of every picture; `how` is what `run_inference` takes beside."""
    if source.multi_label:
        raise DataError("the pictures have several labels each, and a probe takes one for each")
    prepare = preprocessing or get_metadata(model).preprocessing
    path = kept_at(model, source, prepare, how) if cache else None
    kept = None if path is None else read_kept(path)
    found = None if distributed.all_reduce_any(kept is None) else kept
    if found is None:
        how |= {"channels": model.config.channels, "device": next(model.parameters()).device}
        with eval_mode(model):
            found = looked_at(model.features, source, prepare, batch_size, how)
        if path is not None and distributed.is_main() and not found[2]:
            with suppress(CheckpointError):
                keep(path, *found[:2])
    values, indices, skipped = found
    return Features(
        values=values,
        labels=labels_at(source, indices),
        classes=source.classes,
        indices=indices,
        skipped=skipped,
        cached=found is kept,
    )


def pixels_of(source: Dataset, *, channels: int = 3, side: int = 32, **how: Any) -> Features:
    """The pixels of small copies as features: what any model should be better than."""
    prepare = Preprocessing(size=(side, side), mean=(0.5,) * channels, std=(0.5,) * channels)
    values, indices, skipped = looked_at(
        lambda images: images.flatten(1), source, prepare, 64, how | {"channels": channels}
    )
    labels = labels_at(source, indices)
    return Features(values=values, labels=labels, classes=source.classes, skipped=skipped)


def looked_at(
    features: Callable[[Tensor], Tensor],
    source: Dataset,
    prepare: Preprocessing,
    batch_size: int,
    how: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """Vectors (N, D), the places in the source that they belong to, and unreadable pictures."""
    outputs = Outputs(len(source))
    skipped = run_inference(features, source, prepare, outputs.add, batch_size=batch_size, **how)
    values, indices = outputs.finish()
    if not len(indices):
        raise no_readable_images(len(source), skipped)
    if not np.isfinite(values).all():
        bad = source.name(int(indices[~np.isfinite(values).all(1)][0]))
        raise DataError(f"the model's features of {bad} are no numbers; its weights are broken")
    return values, indices, skipped


def kept_at(
    model: Model, source: Dataset, prepare: Preprocessing, how: dict[str, Any]
) -> Path | None:
    """Where features are kept; None on a machine without a place for such things."""
    if (folder := cache_folder("features")) is None:
        return None
    about = {"preprocessing": prepare.to_dict(), "backend": how.get("backend", "torch")}
    key = backbone(model, **about, source=content_hash(source), version=__version__)
    return folder / f"{key}.safetensors"


def backbone(model: Model, **about: Any) -> str:
    """A digest of everything that makes a model's features, and of what else is named."""
    tensors = {n: x for n, x in model.state_dict().items() if n.split(".")[0] not in HEADS}
    description = to_dict(model.config) | {"num_classes": 0}
    if merge := getattr(model, "merge", 0):  # only then: what was kept without stays valid
        description["merge"] = merge
    return digest(tensors, {"model": description, **about})


def keep(path: Path, values: np.ndarray, indices: np.ndarray) -> None:
    tensors = {"values": torch.from_numpy(values), "indices": torch.from_numpy(indices)}
    write_file(path, tensors, None)


def read_kept(path: Path) -> tuple[np.ndarray, np.ndarray, dict[str, str]] | None:
    """What was kept, of pictures that could all be read; None if there is nothing that is whole."""
    try:
        with safe_open(path, framework="np") as file:
            return file.get_tensor("values"), file.get_tensor("indices"), {}
    except (OSError, ValueError, SafetensorError):
        return None
