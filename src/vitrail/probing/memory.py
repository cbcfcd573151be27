"""What a probe has seen, kept in the bundle so that it can go on learning.

A probe is fitted in closed form, so what it needs of the pictures is little: for each
class how many there were, the sum of their features, and rows R with R'R = X'X, which are the
features themselves or, of more than D pictures, the triangle of their QR decomposition. That is
kept beside the weights as probe.safetensors. A class that is added, or put in the place of an
old one, gives the probe that all pictures together would have given.

Shapes: n pictures, D features, K classes, M rows.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.checkpoints.files import atomic_write
from vitrail.checkpoints.metadata import get_metadata
from vitrail.errors import CheckpointError
from vitrail.models.vit import Model
from vitrail.probing.features import backbone
from vitrail.probing.ridge import USUAL_L2

MEMORY = "probe.safetensors"
MOST_BYTES = 2**28  # as large as a model: a thousand classes of 87 pictures, at 768 features


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a probe has seen, enough to fit it again."""

    classes: tuple[str, ...]
    counts: Tensor  # int64 (K,) pictures of each class
    sums: Tensor  # float64 (K, D) of their features
    rows: Tensor  # float32 (M, D)
    owners: Tensor  # int64 (M,) the class of each row
    l2: float
    temperature: float  # by which the scores are divided to be logits
    backbone: str  # digest of the weights that made the features

    @property
    def whole(self) -> bool:
        """Every row is a picture's features, so pictures can be left out one by one."""
        return len(self.rows) == int(self.counts.sum())

    def with_class(self, name: str, features: Tensor) -> "Memory":
        """With one more class, or another set of pictures for one there is."""
        number = self.classes.index(name) if name in self.classes else len(self.classes)
        kept = self.owners != number
        counts, sums = torch.tensor([len(features)]), features.double().sum(0, keepdim=True)
        owners = torch.full((len(features),), number)
        return replace(
            self,
            classes=(*self.classes[:number], name, *self.classes[number + 1 :]),
            counts=torch.cat([self.counts[:number], counts, self.counts[number + 1 :]]),
            sums=torch.cat([self.sums[:number], sums, self.sums[number + 1 :]]),
            rows=torch.cat([self.rows[kept], features.float()]),
            owners=torch.cat([self.owners[kept], owners]),
        )


def remember(
    model: Model, values: np.ndarray, labels: np.ndarray, classes: Sequence[str]
) -> Memory:
    """The memory of features (n, D) and their labels (n,)."""
    rows, owners = torch.from_numpy(values).float(), torch.from_numpy(labels).long()
    sums = torch.zeros(len(classes), rows.shape[1], dtype=torch.float64)
    return Memory(
        classes=tuple(classes),
        counts=torch.bincount(owners, minlength=len(classes)),
        sums=sums.index_add_(0, owners, rows.double()),
        rows=rows,
        owners=owners,
        l2=USUAL_L2,
        temperature=1.0,
        backbone=made_by(model),
    )


def nothing(model: Model) -> Memory:
    """The memory of a probe that has seen no picture yet."""
    none = np.zeros((0, model.config.num_features), np.float32)
    return remember(model, none, np.zeros(0, np.int64), ())


def made_by(model: Model) -> str:
    """A digest of what makes a model's features."""
    return backbone(model, preprocessing=get_metadata(model).preprocessing.to_dict())


def shortened(memory: Memory) -> Memory:
    """The same with at most D rows of each class, which stand for all its pictures."""
    width = memory.rows.shape[1]
    rows, owners = [], []
    for number, count in enumerate(torch.bincount(memory.owners).tolist()):
        own = memory.rows[memory.owners == number]
        if count > width:
            own = torch.linalg.qr(own.double(), mode="r").R.float()
        rows.append(own)
        owners.append(torch.full((len(own),), number))
    return replace(memory, rows=torch.cat(rows), owners=torch.cat(owners))


@contextmanager
def memory_beside(memory: Memory, folder: Path) -> Iterator[bool]:
    """Write a memory, and put it in the place of the old one if the block saves its model.

    Nothing changes where either cannot be written. False: it is too large, and the old one goes.
    """
    memory = shortened(memory)
    if memory.rows.nbytes > MOST_BYTES:
        yield False
        (folder / MEMORY).unlink(missing_ok=True)
        return
    tensors = {n: getattr(memory, n).contiguous() for n in ("counts", "sums", "rows", "owners")}
    about = {
        "classes": list(memory.classes),
        "l2": memory.l2,
        "temperature": memory.temperature,
        "backbone": memory.backbone,
    }
    with atomic_write(folder / MEMORY) as temporary:
        save_file(tensors, temporary, {"vitrail-probe": json.dumps(about)})
        yield True


def save_memory(memory: Memory, folder: Path) -> bool:
    """Keep a memory in a bundle's folder, in place of another; False if it is too large."""
    with memory_beside(memory, folder) as kept:
        return kept


def holds_memory(folder: Path) -> bool:
    return (folder / MEMORY).is_file()


def load_memory(folder: Path, model: Model) -> Memory | None:
    """The memory of a bundle; None if it has none. One of other weights is refused."""
    path = folder / MEMORY
    if not holds_memory(folder):
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["vitrail-probe"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        memory = Memory(**tensors, **about | {"classes": tuple(about["classes"])})
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if memory.backbone != made_by(model):
        raise CheckpointError(
            f"{path} remembers features of other weights than the model beside it; delete it, and "
            "teach the classes again"
        )
    if lost := set(get_metadata(model).class_names) - set(memory.classes):
        raise CheckpointError(  # its writer was killed after the model, before the memory
            f"{path} is older than the model beside it and knows nothing of {min(lost)!r}; delete "
            "it, and teach the classes again"
        )
    return memory
