"""What a probe has seen, kept in the bundle so that it can go on learning.

A probe is fitted in closed form, so what it needs of the pictures is little: for each
class how many there were, the sum of their features, and rows R with R'R = X'X, which are the
features themselves or, of more than D pictures, the triangle of their QR decomposition. That is
kept beside the weights as probe.safetensors. A class that is added, or put in the place of an
old one, gives the probe that all pictures together would have given.

Shapes: n pictures, D features, K classes, M rows.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.checkpoints.facts import facts_of
from vitrail.checkpoints.files import write_file
from vitrail.errors import CheckpointError
from vitrail.models.build import Model
from vitrail.probing.features import backbone
from vitrail.probing.ridge import USUAL_L2

MEMORY = "probe.safetensors"
MOST_BYTES = 2**28  # a thousand classes of 90 pictures and 768 features


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
        features = features.float()
        sums = features.double().sum(0)
        if name in self.classes:
            number = self.classes.index(name)
            kept = self.owners != number
            counts, all_sums = self.counts.clone(), self.sums.clone()
            counts[number], all_sums[number] = len(features), sums
            rows, owners, classes = self.rows[kept], self.owners[kept], self.classes
        else:
            number, classes = len(self.classes), (*self.classes, name)
            counts = torch.cat([self.counts, torch.tensor([len(features)])])
            all_sums = torch.cat([self.sums, sums[None]])
            rows, owners = self.rows, self.owners
        short = shortened(features)
        return replace(
            self,
            classes=classes,
            counts=counts,
            sums=all_sums,
            rows=torch.cat([rows, short]),
            owners=torch.cat([owners, torch.full((len(short),), number)]),
        )


def empty(model: Model, l2: float = USUAL_L2) -> Memory:
    """The memory of a probe that has seen nothing yet."""
    width = model.config.num_features
    return Memory(
        classes=(),
        counts=torch.zeros(0, dtype=torch.int64),
        sums=torch.zeros(0, width, dtype=torch.float64),
        rows=torch.zeros(0, width),
        owners=torch.zeros(0, dtype=torch.int64),
        l2=l2,
        temperature=1.0,
        backbone=backbone(model, preprocessing=facts_of(model).preprocessing.to_dict()),
    )


def shortened(features: Tensor) -> Tensor:
    """Rows (at most D, D) whose products with themselves are those of all features (n, D)."""
    if len(features) <= features.shape[1]:
        return features
    return torch.linalg.qr(features.double(), mode="r").R.float()


def save_memory(memory: Memory, folder: Path) -> None:
    """Keep a memory in a bundle's folder, in place of another; not one larger than models are."""
    if memory.rows.nbytes > MOST_BYTES:
        (folder / MEMORY).unlink(missing_ok=True)
        return
    tensors = {name: getattr(memory, name) for name in ("counts", "sums", "rows", "owners")}
    about = {
        "classes": list(memory.classes),
        "l2": memory.l2,
        "temperature": memory.temperature,
        "backbone": memory.backbone,
    }
    write_file(folder / MEMORY, tensors, {"vitrail-probe": json.dumps(about)})


def load_memory(folder: Path, model: Model) -> Memory | None:
    """The memory of a bundle; None if it has none. One of other weights is refused."""
    path = folder / MEMORY
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["vitrail-probe"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        memory = Memory(**tensors, **about | {"classes": tuple(about["classes"])})
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if memory.backbone != empty(model).backbone:
        raise CheckpointError(
            f"{path} remembers features of other weights than the model beside it; delete it, and "
            "teach the classes again"
        )
    return memory
