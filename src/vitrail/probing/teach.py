"""Add classes to a model from a few images, without forgetting those it knows.

The head is a ridge probe, and the closed form needs little of the images: for each class their
number, the sum of their features, and rows R with R'R = X'X, which are the features themselves or,
of more than D images, the triangle of their QR decomposition. `ProbeMemory` keeps that beside the
weights as probe.safetensors. Adding or replacing a class then gives the head that all images
together would have given.

Shapes: n images, D features, K classes, M rows.
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail import distributed
from vitrail.checkpoints.bundle import check_class_names, check_overwrite
from vitrail.checkpoints.files import atomic_write
from vitrail.checkpoints.load import backbone_digest, check_reference, load, with_head
from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.save import save
from vitrail.data.datasets import open_dataset
from vitrail.data.folders import open_single_class
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.provenance import PROVENANCE_KEYS, DataProvenance
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evaluation.evaluate import Progress
from vitrail.formatting import comma_list, shell_command
from vitrail.models.vit import Model
from vitrail.probing.features import features_of
from vitrail.probing.fewshot import draw
from vitrail.probing.ridge import BIAS, DEFAULT_L2, L2_GRID, RidgeProbe, fit_moments, fit_path

MEMORY_FILE = "probe.safetensors"
TENSORS = ("counts", "sums", "rows", "owners")
UNCALIBRATED = 1.0  # temperature of a memory to which none could be fitted yet
MAX_BYTES = 2**28  # as large as a model: a thousand classes of 87 images, at 768 features
PER_CLASS = 200  # images of each known class that the memory is built from
ORIGIN = (*PROVENANCE_KEYS, "from", "source", "format")  # provenance keys that stay valid
NOT_REMEMBERED = (
    "too many classes to store their statistics; to teach more, pass --using with their images, "
    "and another --out"
)


@dataclass(frozen=True, kw_only=True)
class ProbeMemory:
    """What a probe was fitted to, sufficient to fit it again."""

    classes: tuple[str, ...]
    counts: Tensor  # int64 (K,) images of each class
    sums: Tensor  # float64 (K, D) of their features
    rows: Tensor  # float32 (M, D)
    owners: Tensor  # int64 (M,) the class of each row
    l2: float
    temperature: float  # scores are divided by it to be logits
    backbone: str  # digest of the weights that made the features

    @classmethod
    def of(
        cls, model: Model, values: np.ndarray, labels: np.ndarray, classes: Sequence[str]
    ) -> "ProbeMemory":
        """Remember features (n, D) and their labels (n,)."""
        rows, owners = torch.from_numpy(values).float(), torch.from_numpy(labels).long()
        sums = torch.zeros(len(classes), rows.shape[1], dtype=torch.float64)
        return cls(
            classes=tuple(classes),
            counts=torch.bincount(owners, minlength=len(classes)),
            sums=sums.index_add_(0, owners, rows.double()),
            rows=rows,
            owners=owners,
            l2=DEFAULT_L2,
            temperature=UNCALIBRATED,
            backbone=features_digest(model),
        )

    def with_class(self, name: str, features: Tensor) -> "ProbeMemory":
        """Add a class, or replace the images of a known one."""
        number = self.classes.index(name) if name in self.classes else len(self.classes)
        others = self.owners != number
        counts, sums = torch.tensor([len(features)]), features.double().sum(0, keepdim=True)
        owners = torch.full((len(features),), number)
        return replace(
            self,
            classes=(*self.classes[:number], name, *self.classes[number + 1 :]),
            counts=torch.cat([self.counts[:number], counts, self.counts[number + 1 :]]),
            sums=torch.cat([self.sums[:number], sums, self.sums[number + 1 :]]),
            rows=torch.cat([self.rows[others], features.float()]),
            owners=torch.cat([self.owners[others], owners]),
        )

    def compressed(self) -> "ProbeMemory":
        """Return the memory with at most D rows per class and the same Gram matrices."""
        width = self.rows.shape[1]
        rows, owners = [], []
        for number, count in enumerate(torch.bincount(self.owners).tolist()):
            class_rows = self.rows[self.owners == number]
            if count > width:
                class_rows = torch.linalg.qr(class_rows.double(), mode="r").R.float()
            rows.append(class_rows)
            owners.append(torch.full((len(class_rows),), number))
        return replace(self, rows=torch.cat(rows), owners=torch.cat(owners))


def features_digest(model: Model) -> str:
    return backbone_digest(model, preprocessing=get_metadata(model).preprocessing.to_dict())


@contextmanager
def saving_memory(memory: ProbeMemory | None, folder: Path) -> Iterator[bool]:
    """Write a memory that replaces the old one if the block, which saves the model, succeeds.

    Nothing changes if either cannot be written. Yields False if it is too large: then the old one
    is deleted. None changes nothing.
    """
    if memory is None:
        yield True
        return
    memory = memory.compressed()
    if memory.rows.nbytes > MAX_BYTES:
        yield False
        (folder / MEMORY_FILE).unlink(missing_ok=True)
        return
    tensors = {name: getattr(memory, name).contiguous() for name in TENSORS}
    about = {
        "classes": list(memory.classes),
        "l2": memory.l2,
        "temperature": memory.temperature,
        "backbone": memory.backbone,
    }
    with atomic_write(folder / MEMORY_FILE) as temporary:
        save_file(tensors, temporary, {"vitrail-probe": json.dumps(about)})
        yield True


def save_memory(memory: ProbeMemory, folder: Path) -> bool:
    """Save a memory in a bundle's folder, in place of another; False if it is too large."""
    with saving_memory(memory, folder) as saved:
        return saved


def load_memory(folder: Path, model: Model) -> ProbeMemory | None:
    """Load the stored probe statistics, if any; raises if the backbone differs."""
    path = folder / MEMORY_FILE
    if not path.is_file():
        return None
    memory = read_memory(path, model)
    if missing := set(get_metadata(model).class_names) - set(memory.classes):
        raise CheckpointError(  # its writer was killed after the model, before the memory
            f"{path} is older than the model in its folder and lacks {min(missing)!r}; delete "
            "it, and teach the classes again"
        )
    return memory


def read_memory(path: Path, model: Model) -> ProbeMemory:
    """Read a memory of a bundle, or of a page of `vitrail export`, which also holds its head."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["vitrail-probe"])
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        memory = ProbeMemory(**tensors, **about | {"classes": tuple(map(str, about["classes"]))})
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if memory.backbone != features_digest(model):
        raise CheckpointError(
            f"{path} was made with other weights than those of the model; teach the classes "
            "again, without this file"
        )
    k, m, width = len(memory.classes), memory.owners.numel(), model.config.num_features
    shapes = [tuple(tensors[name].shape) for name in TENSORS]
    numbers = [memory.l2, memory.temperature]
    if (
        shapes != [(k,), (k, width), (m, width), (m,)]
        or not {*memory.owners.tolist()} <= {*range(k)}
        or not all(isinstance(number, int | float) and number > 0 for number in numbers)
    ):
        raise CheckpointError(f"{path} is corrupt: its values do not fit the model")
    return memory


class HeldOut(NamedTuple):
    """Leave-one-out metrics over all remembered images."""

    accuracy: float
    balanced_accuracy: float  # mean recall of the classes


class TeachResult(NamedTuple):
    """A taught model and how it was made."""

    folder: Path
    classes: tuple[str, ...]  # all classes of the model
    pictures: dict[str, int]  # images of each taught class
    replaced: tuple[str, ...]  # taught classes that it knew before
    accuracy: float | None  # leave-one-out, over all remembered images
    seconds: float
    notes: tuple[str, ...]
    skipped: dict[str, str]
    balanced_accuracy: float | None = None  # leave-one-out too; every class counts the same


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
) -> TeachResult:
    """Teach a model classes from image files or folders; the result is a bundle.

    >>> teach("runs/first", {"thumb": "thumbs/"}, "taught")
    >>> teach("hf:google/vit-base-patch16-224", {"cup": "cups/", "pen": "pens/"}, "desk", only=True)

    A bundle of `vitrail fewshot` or `teach` has a memory and is changed in place without `out`. For
    another model, images of the classes it knows are taken from `using`, or from the data it was
    trained on; `only` drops those classes. `using` may be the probe.safetensors that a page of
    `vitrail export` taught the same model; then `classes` may be empty. `preprocessing` is as in
    `load`; `overwrite` replaces the model in `out`. `progress` is called with the images done and
    their total, in each pass.
    """
    started = time.monotonic()
    from_file = using is not None and Path(using).suffix == ".safetensors"
    if not classes and not from_file:
        raise ConfigError("no classes given; name each with its images, such as thumb=folder")
    check_reference(fspath(model))
    sources = {name: open_single_class(places, name) for name, places in classes.items()}
    # A trained head, or a folder of another library, is never replaced unless asked for: nothing
    # could restore it.
    folder, has_own = Path(model if out is None else out), (Path(model) / MEMORY_FILE).is_file()
    if out is None and not has_own:
        raise ConfigError(
            f"{model} has no {MEMORY_FILE}, and only a bundle with one is changed in place; pass a "
            "folder for the taught model, such as --out taught"
        )
    in_place = has_own and folder.resolve() == Path(model).resolve()
    check_overwrite(folder, overwrite=overwrite or in_place)
    torch_device = distributed.init(device)
    if distributed.is_distributed():
        raise ConfigError("teaching runs in one process; start it without torchrun")
    net = load(model, preprocessing=preprocessing).to(torch_device)
    memory, notes = recall(net, Path(model), using, only=only, progress=progress)
    if get_metadata(net).conformal:
        words = ("calibrate", folder, "DATA", "--out", folder)
        notes.append(
            "the guaranteed error rate of the calibrated model does not hold after teaching; "
            f"calibrate again, with images of all classes: {shell_command(*words)}"
        )
    replaced = tuple(name for name in classes if name in memory.classes)
    notes += [f"{name}: {note}" for name, source in sources.items() for note in source.notes]
    features = {
        name: features_of(net, source, cache=False, progress=progress)
        for name, source in sources.items()
    }
    for name, extracted in features.items():
        memory = memory.with_class(name, torch.from_numpy(extracted.values))
    unrecorded = set(memory.classes) - set(get_metadata(net).class_names) if from_file else ()
    taught, memory, held_out = fit_head(net, memory, taught={*classes, *unrecorded})
    check_class_names(get_metadata(taught), taught.config)
    with saving_memory(memory, folder) as saved:
        save(taught, folder)
    if not saved:
        notes.append(NOT_REMEMBERED)
    return TeachResult(
        folder=folder,
        classes=memory.classes,
        pictures={name: len(extracted) for name, extracted in features.items()},
        replaced=replaced,
        accuracy=held_out and held_out.accuracy,
        balanced_accuracy=held_out and held_out.balanced_accuracy,
        seconds=time.monotonic() - started,
        notes=tuple(notes),
        skipped={name: why for one in features.values() for name, why in one.skipped.items()},
    )


def recall(
    model: Model,
    folder: Path,
    using: str | PathLike[str] | None,
    *,
    only: bool,
    progress: Progress | None = None,
) -> tuple[ProbeMemory, list[str]]:
    """Return a memory of the classes that the model knows, and notes on how it was obtained.

    If the memory is built from `using`, its images are recorded in the model's metadata.
    """
    metadata, width = get_metadata(model), model.config.num_features
    if using is not None and Path(using).suffix == ".safetensors":
        return read_memory(Path(using), model), []
    if only or (using is None and not model.config.num_classes):
        empty = np.zeros((0, width), np.float32), np.zeros(0, np.int64)
        return ProbeMemory.of(model, *empty, ()), []
    if using is None and (memory := load_memory(folder, model)) is not None:
        return memory, []
    provenance = DataProvenance.from_dict(metadata.provenance)
    data = metadata.local_data if using is None else fspath(using)
    try:
        if not data:
            raise DataError("no training data on this machine is recorded")
        # Images that were held out from the model stay held out.
        train = open_dataset(data, "train", splits=provenance.splits_for(data))
        if missing := [name for name in metadata.class_names if name not in train.classes]:
            raise DataError(f"{data} has no images of {comma_list(missing, quoted=True)}")
        if train.multi_label:
            raise DataError(f"{data} has several labels per image")
    except DataError as error:
        raise ConfigError(
            f"the model knows {len(metadata.class_names):,} classes, but has no images of them "
            f"({error}); pass --using with a dataset of them, or --only to drop them"
        ) from None
    names = set(metadata.class_names or train.classes)
    known = [number for number, name in enumerate(train.classes) if name in names]
    per_class = max(2, min(PER_CLASS, MAX_BYTES // (4 * width * len(known))))
    labels = np.asarray(train.labels())
    rows = np.sort(draw(labels, len(train.classes), per_class, seed=0))
    rows = rows[np.isin(labels[rows], known)]
    features = features_of(model, train.subset(rows), progress=progress)
    if using is not None:
        added = DataProvenance.of(data, train)
        both = replace(added, samples=tuple(dict.fromkeys((*added.samples, *provenance.samples))))
        model.metadata = replace(metadata, provenance=dict(metadata.provenance) | both.to_dict())
    note = f"{len(features):,} images of the {len(known):,} known classes come from {data}"
    classes = tuple(train.classes[number] for number in known)
    numbers = np.searchsorted(known, features.labels)  # labels are positions in `train.classes`
    memory = ProbeMemory.of(model, features.values, numbers, classes)
    return memory, [note, "a linear probe replaces the trained head"]


def fit_head(
    model: Model,
    memory: ProbeMemory,
    taught: Collection[str] = (),
    *,
    adjust: bool = True,
) -> tuple[Model, ProbeMemory, HeldOut | None]:
    """Fit a probe to a memory and make it the model's head.

    Returns the model, the memory with the chosen l2 and temperature, and the leave-one-out
    metrics, which are None if images are not remembered individually. The images of `taught`
    classes were passed to `teach`. `adjust` takes the advantage of classes with more images from
    the bias.
    """
    if len(memory.classes) < 2:
        name = ", ".join(memory.classes)
        raise ConfigError(f"{name!r} is the only class; a classifier needs two, so teach another")
    path = None
    if len(memory.rows) == int(memory.counts.sum()):  # every row is the features of one image
        values = sorted({memory.l2, *L2_GRID})
        path = fit_path(memory.rows, memory.owners, len(memory.classes), l2=values)
        probe = path.probes[path.best]
        memory = replace(memory, l2=probe.l2)
        if int(memory.counts.min()) > 1:
            memory = replace(memory, temperature=1 / path.scale)
    else:
        gram = memory.rows.double().mT @ memory.rows.double()
        probe = fit_moments(memory.counts, memory.sums, gram, memory.l2)
    weight, bias = (x / memory.temperature for x in probe.linear())
    prior = class_prior(memory, probe) if adjust else torch.zeros_like(bias)
    headed = with_head(model, weight, bias - prior, memory.classes)
    metadata = get_metadata(headed)
    by_hand = {*taught, *DataProvenance.from_dict(metadata.provenance).taught}
    provenance: dict[str, Any] = {
        key: value for key, value in metadata.provenance.items() if key in ORIGIN
    } | {
        "head": f"ridge probe on {int(memory.counts.sum()):,} images",
        "l2": memory.l2,
        "taught": [name for name in memory.classes if name in by_hand],
    }
    headed.metadata = replace(metadata, provenance=provenance)
    if path is None:
        return headed, memory, None
    # Without a row, its class is rarer; a head that ignores counts is evaluated without that.
    adjusted = adjust and len(memory.counts.unique()) > 1
    scores = path.rebalanced - memory.temperature * prior if adjusted else path.held_out
    correct = (scores.argmax(1) == memory.owners).double()
    recalls = torch.bincount(memory.owners, correct, len(memory.counts)) / memory.counts
    return headed, memory, HeldOut(float(correct.mean()), float(recalls.nanmean()))


def class_prior(memory: ProbeMemory, probe: RidgeProbe) -> Tensor:
    """Return what to subtract from the logits of a probe so that classes are equally likely. (K,)

    How many images of a class are taught says nothing of how frequent it is. Calibrated logits
    contain the log class frequencies (logit adjustment, Menon et al. 2021, arXiv:2007.07314).
    Without a fitted temperature, only the bias that the counts give the scores is known to be the
    prior's. Zero if all classes have as many images, and for classes without any.
    """
    present = memory.counts > 0
    calibrated = int(memory.counts.min()) > 1 and memory.temperature != UNCALIBRATED
    if calibrated:
        prior = memory.counts.double().log()
    else:
        prior = BIAS * probe.weights[-1] / memory.temperature
    return torch.where(present, prior - prior[present].mean(), 0.0)
