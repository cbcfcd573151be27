"""A model's features of a dataset, cached on disk.

The name of the file is a digest of the weights below the head, token merging, the preprocessing,
the images and this version, so nothing needs to be invalidated. (Of more than 2 GiB of images, not
every byte is read: `content_hash` of data/provenance.py.) The folder, ~/.cache/vitrail/features
unless VITRAIL_CACHE is set, may be deleted at any time; if it is not writable, nothing is cached.

Shapes: N images, D features.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail import __version__, distributed
from vitrail.checkpoints.files import write_file
from vitrail.checkpoints.load import backbone_digest
from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.rules import replaced_module
from vitrail.data.datasets import Dataset
from vitrail.data.decode import decode
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.provenance import content_hash
from vitrail.data.storage import cache_folder
from vitrail.errors import CheckpointError, DataError
from vitrail.evaluation.evaluate import collect_outputs, labels_at
from vitrail.models.vit import Model, eval_mode


@dataclass(frozen=True, kw_only=True)
class Features:
    """One vector for each readable image, in the order of the dataset."""

    values: np.ndarray  # float32 (N, D)
    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    indices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # in the dataset
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images
    cached: bool = False  # read from the cache

    def __len__(self) -> int:
        return len(self.labels)


def features_of(
    model: Model,
    source: Dataset,
    *,
    preprocessing: Preprocessing | None = None,
    cache: bool = True,
    batch_size: int = 64,
    **options: Any,
) -> Features:
    """Return `model.features` of every image; `options` are those of `run_inference`."""
    if source.multi_label:
        raise DataError("the images have several labels each; a probe needs one label per image")
    preprocessing = preprocessing or get_metadata(model).preprocessing
    known = cache and not replaced_module(model)  # otherwise weights do not determine the features
    folder, path = cache_folder("features") if known else None, None
    if folder is not None:
        about = {
            "preprocessing": preprocessing.to_dict(),
            "backend": options.get("backend", "torch"),
            "source": content_hash(source),
            "version": __version__,
        }
        path = folder / f"{backbone_digest(model, **about)}.safetensors"
    cached: Features | None = None
    if path is not None:
        with (
            suppress(OSError, ValueError, SafetensorError),
            safe_open(path, framework="np") as file,
        ):
            values, indices = file.get_tensor("values"), file.get_tensor("indices")
            skipped = json.loads((file.metadata() or {}).get("skipped", "{}"))
            missing = np.setdiff1d(np.arange(len(source)), indices) if skipped else ()
            if not (skipped and options.get("strict")) and not any(
                is_readable(source, int(index)) for index in missing
            ):
                about = {"indices": indices, "skipped": skipped, "cached": True}
                labels = labels_at(source, indices)
                cached = Features(values=values, labels=labels, classes=source.classes, **about)
    missed = distributed.all_reduce_any(cached is None)  # on one process, so all must compute
    if cached is not None and not missed:
        return cached
    options |= {"channels": model.config.channels, "device": next(model.parameters()).device}
    with eval_mode(model):
        features = extract(model.features, source, preprocessing, batch_size=batch_size, **options)
    if path is not None and distributed.is_main():
        arrays = {"values": features.values, "indices": features.indices}
        tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
        with suppress(CheckpointError):
            write_file(path, tensors, {"skipped": json.dumps(features.skipped)})
    return features


def is_readable(source: Dataset, index: int) -> bool:
    """Return whether an image can be decoded: one that was skipped may be available again."""
    try:
        data = source[index].data
        return isinstance(data, np.ndarray) or bool(decode(data).size)
    except DataError:
        return False


def pixels_of(source: Dataset, *, channels: int = 3, side: int = 32, **options: Any) -> Features:
    """Return the pixels of small copies as features: a baseline for any model."""
    preprocessing = Preprocessing(size=(side, side), mean=(0.5,) * channels, std=(0.5,) * channels)
    return extract(
        lambda images: images.flatten(1), source, preprocessing, channels=channels, **options
    )


def extract(
    forward: Callable[[Tensor], Tensor],
    source: Dataset,
    preprocessing: Preprocessing,
    batch_size: int = 64,
    **options: Any,
) -> Features:
    options |= {"batch_size": batch_size}
    values, indices, skipped = collect_outputs(forward, source, preprocessing, **options)
    if not np.isfinite(values).all():
        bad = source.name(int(indices[~np.isfinite(values).all(1)][0]))
        raise DataError(f"the model's features of {bad} are not finite; its weights are broken")
    return Features(
        values=values,
        labels=labels_at(source, indices),
        classes=source.classes,
        indices=indices,
        skipped=skipped,
    )
