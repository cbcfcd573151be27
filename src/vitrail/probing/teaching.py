"""Classes from a handful of pictures, added to those a model knows without forgetting any.

A class that is added, or put in the place of an old one, gives the head that all pictures together
would have given; `Memory` says how.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import distributed
from vitrail.checkpoints.bundle import check_class_names, check_overwrite
from vitrail.checkpoints.load import load, with_head
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.checkpoints.save import save
from vitrail.data.datasets import ImageDataset, open_dataset
from vitrail.data.folders import open_single_class
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.provenance import PROVENANCE_KEYS, DataProvenance
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.evaluate import Progress
from vitrail.formatting import comma_list
from vitrail.models.vit import Model
from vitrail.probing.features import features_of
from vitrail.probing.memory import (
    MEMORY,
    MOST_BYTES,
    Memory,
    holds_memory,
    load_memory,
    memory_beside,
    nothing,
    remember,
)
from vitrail.probing.ridge import PATH, Probe, fit_moments, fit_path
from vitrail.probing.shots import draw

PER_CLASS = 200  # pictures of each class that a model is reminded of
ORIGIN = (*PROVENANCE_KEYS, "from", "source", "format")  # of the old provenance, what stays true
FORGETFUL = (
    "so many classes cannot be remembered; to teach more, give --using with their pictures, and "
    "another --out"
)


@dataclass(frozen=True, kw_only=True)
class Taught:
    """What became of a lesson."""

    folder: Path
    classes: tuple[str, ...]  # all that the model now knows
    pictures: dict[str, int]  # of each class it was taught
    replaced: tuple[str, ...]  # those it knew before
    accuracy: float | None  # over all remembered pictures, each left out in turn
    seconds: float
    notes: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)


def teach(
    model: str | PathLike[str],
    classes: Mapping[str, str | PathLike[str] | Sequence[str | PathLike[str]]],
    out: str | PathLike[str] | None = None,
    *,
    using: str | PathLike[str] | None = None,
    only: bool = False,
    preprocessing: str | Preprocessing | None = None,
    overwrite: bool = False,
    device: str = "",
    progress: Progress | None = None,
) -> Taught:
    """Teach a model classes by pictures: files or folders for each; the result is a bundle.

    >>> teach("runs/first", {"thumb": "thumbs/"}, "taught")
    >>> teach("hf:google/vit-base-patch16-224", {"cup": "cups/", "pen": "pens/"}, "desk", only=True)

    A bundle of `vitrail fewshot` or `teach` remembers what it has seen; it alone is changed in
    place where `out` is not given. Of another model, pictures of the classes it knows are taken
    from `using`, or from the data it was trained on; `only` leaves those classes behind.
    `preprocessing` is as in `load`; `overwrite` replaces what is in `out`. `progress`
    is called with the number of images done, and of how many, in each pass.
    """
    begun = time.monotonic()
    if not classes:
        raise ConfigError("teach what? Give classes with pictures, such as thumb=folder")
    folder = destination(model, out, overwrite=overwrite)
    place = distributed.init(device)
    if distributed.is_distributed():
        raise ConfigError("teaching is done by one process; start it without torchrun")
    pupil = load(model, preprocessing=preprocessing).to(place)
    sources = {name: open_single_class(places, name) for name, places in classes.items()}
    memory, notes = remembered(pupil, Path(model), using, only=only, progress=progress)
    replaced = tuple(name for name in classes if name in memory.classes)
    notes += [f"{name}: {note}" for name, source in sources.items() for note in source.notes]
    seen = {
        name: features_of(pupil, source, cache=False, progress=progress)
        for name, source in sources.items()
    }
    for name, found in seen.items():
        memory = memory.with_class(name, torch.from_numpy(found.values))
    graduate, memory, accuracy = fitted(pupil, memory, taught=classes)
    check_class_names(get_metadata(graduate), graduate.config)
    with memory_beside(memory, folder) as kept:
        save(graduate, folder)
    notes += [] if kept else [FORGETFUL]
    return Taught(
        folder=folder,
        classes=memory.classes,
        pictures={name: len(found) for name, found in seen.items()},
        replaced=replaced,
        accuracy=accuracy,
        seconds=time.monotonic() - begun,
        notes=tuple(notes),
        skipped={name: why for found in seen.values() for name, why in found.skipped.items()},
    )


def destination(
    model: str | PathLike[str], out: str | PathLike[str] | None, *, overwrite: bool
) -> Path:
    """Where the taught model goes. A head that was trained, or a folder of another library, is
    never replaced unasked: nothing could bring it back."""
    remembers = holds_memory(Path(model))
    if out is not None:
        own = remembers and Path(out).resolve() == Path(model).resolve()
        check_overwrite(Path(out), overwrite=overwrite or own)
        return Path(out)
    if not remembers:
        raise ConfigError(
            f"{model} has no {MEMORY}, and only a bundle that remembers what it has seen is "
            "changed in place; give a folder for the taught model, such as --out taught"
        )
    return Path(model)


def remembered(
    model: Model,
    folder: Path,
    using: str | PathLike[str] | None,
    *,
    only: bool,
    progress: Progress | None = None,
) -> tuple[Memory, list[str]]:
    """What the model has seen of the classes it knows, and what was done to find out.

    Pictures of `using` are learned from, and the model's metadata then say so.
    """
    metadata = get_metadata(model)
    if only or (using is None and not model.config.num_classes):
        return nothing(model), []
    if using is None and (memory := load_memory(folder, model)) is not None:
        return memory, []
    where = (
        fspath(using) if using is not None else DataProvenance.from_dict(metadata.provenance).data
    )
    train = train_of(metadata, where)
    found = features_of(model, some_of(train, model.config.num_features), progress=progress)
    if using is not None:
        model.metadata = learned_too(metadata, where, train)
    note = f"{len(found):,} pictures of the {len(train.classes):,} classes come from {where}"
    memory = remember(model, found.values, found.labels, train.classes)
    return memory, [note, "the head is a probe now, in place of the one that was trained"]


def train_of(metadata: Metadata, reference: str) -> ImageDataset:
    """The training pictures of a set; it must show all classes that a model knows.

    Those that were kept apart from the model stay apart.
    """
    try:
        if not reference:
            raise DataError("its data is not known")
        division = DataProvenance.from_dict(metadata.provenance).splits_for(reference)
        source = open_dataset(reference, "train", splits=division)
        lacking = [name for name in metadata.class_names if name not in source.classes]
        if lacking or source.multi_label:
            lost = f"no pictures of {comma_list(lacking, quoted=True)}"
            raise DataError(f"{reference} has {lost if lacking else 'several labels for each'}")
    except DataError as error:
        raise ConfigError(
            f"the model knows {len(metadata.class_names):,} classes, but not what their pictures "
            f"look like ({error}); give --using with a data set of them, or --only to leave them "
            "behind"
        ) from None
    return source


def some_of(train: ImageDataset, width: int) -> ImageDataset:
    """As many pictures of each class as can be remembered."""
    classes = len(train.classes)
    most = max(2, min(PER_CLASS, MOST_BYTES // (4 * width * classes)))
    return train.subset(np.sort(draw(np.asarray(train.labels()), classes, most, seed=0)))


def learned_too(metadata: Metadata, data: str, train: ImageDataset) -> Metadata:
    """The metadata of a model that has learned from these training pictures as well."""
    before, now = DataProvenance.from_dict(metadata.provenance), DataProvenance.of(data, train)
    both = replace(now, samples=tuple(dict.fromkeys((*now.samples, *before.samples))))
    return replace(metadata, provenance=dict(metadata.provenance) | both.to_dict())


def fitted(
    model: Model, memory: Memory, taught: Collection[str] = ()
) -> tuple[Model, Memory, float | None]:
    """The model with the probe of a memory as its head, the memory with what was chosen, and the
    accuracy over its pictures, each left out in turn; None if not all are known singly.

    `taught` are classes whose pictures were given by hand.
    """
    if len(memory.classes) < 2:
        name = ", ".join(memory.classes)
        raise ConfigError(f"one class, {name!r}, cannot be told from anything; teach two or more")
    if not memory.whole:
        gram = memory.rows.double().mT @ memory.rows.double()
        probe = fit_moments(memory.counts, memory.sums, gram, memory.l2)
        return headed(model, memory, probe, taught), memory, None
    values = sorted({memory.l2, *PATH})
    path = fit_path(memory.rows, memory.owners, len(memory.classes), l2=values)
    probe, accuracy = path.probes[path.best], path.accuracies[path.best]
    memory = replace(memory, l2=probe.l2)
    if int(memory.counts.min()) > 1:
        memory = replace(memory, temperature=1 / path.scale)
    return headed(model, memory, probe, taught), memory, accuracy


def learned(
    model: Model, values: np.ndarray, labels: np.ndarray, classes: Sequence[str]
) -> tuple[Model, Memory]:
    """The model with the best probe of features (n, D) as its head, and what that has seen."""
    return fitted(model, remember(model, values, labels, classes))[:2]


def headed(model: Model, memory: Memory, probe: Probe, taught: Collection[str]) -> Model:
    """The model with a probe as its head: an ordinary model in every way."""
    weight, bias = (x / memory.temperature for x in probe.linear())
    changed = with_head(model, weight, bias, memory.classes)
    metadata = get_metadata(changed)
    by_hand = {*taught, *DataProvenance.from_dict(metadata.provenance).taught}
    told: dict[str, Any] = {
        "head": f"ridge probe on {int(memory.counts.sum()):,} pictures",
        "l2": memory.l2,
        "taught": [name for name in memory.classes if name in by_hand],
    }
    origin = {key: x for key, x in metadata.provenance.items() if key in ORIGIN}
    changed.metadata = replace(metadata, provenance=origin | told)
    return changed
