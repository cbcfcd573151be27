"""Identity of a dataset: fingerprints, and what a bundle records about its training data."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from vitrail.data.datasets import ALL, Dataset, ImageDataset, LabelSets, Splits, open_dataset
from vitrail.data.storage import same_location
from vitrail.errors import ConfigError, DataError

MAX_HASHED_BYTES = 2**31  # of a dataset whose images are all hashed
HASHED_IMAGES = 64  # that represent a dataset whose file sizes are unknown, or that is larger
UNREADABLE = b"unreadable"  # hashed in place of an image that cannot be read
PROVENANCE_SAMPLES = 32  # a random tenth of the images contains one with probability 29/30


def fingerprint(dataset: Dataset) -> str:
    """Hash classes, names, labels and file sizes; some images where sizes are unknown.

    Times and locations do not count: copies on two machines have the same fingerprint.
    """
    digest = blake2b(digest_size=16)
    labels = dataset.labels()
    ids, ends = (labels.classes, labels.ends) if isinstance(labels, LabelSets) else (labels, [])
    digest.update(json.dumps([list(dataset.classes), len(dataset)]).encode())
    digest.update(np.asarray(ids).astype("<i4").tobytes())
    digest.update(np.asarray(ends).astype("<i8").tobytes())
    for index in range(len(dataset)):
        digest.update(dataset.name(index).encode("utf-8", "surrogateescape") + b"\0")
    sizes = dataset.sizes() if isinstance(dataset, ImageDataset) else None
    if sizes is not None:
        digest.update(sizes.astype("<i8").tobytes())
    else:
        for index in np.linspace(0, len(dataset) - 1, HASHED_IMAGES, dtype=int).tolist():
            digest.update(image_bytes(dataset, index))
    return digest.hexdigest()


def content_hash(dataset: Dataset) -> str:
    """Hash the bytes of every image; above `MAX_HASHED_BYTES`, of some images and all sizes."""
    digest = blake2b(fingerprint(dataset).encode(), digest_size=16)
    sizes = dataset.sizes() if isinstance(dataset, ImageDataset) else None
    hash_all = sizes is None or int(sizes.sum()) <= MAX_HASHED_BYTES
    sampled = np.linspace(0, len(dataset) - 1, HASHED_IMAGES, dtype=int)
    for index in range(len(dataset)) if hash_all else sampled:
        digest.update(image_bytes(dataset, int(index)))
    return digest.hexdigest()


def image_bytes(dataset: Dataset, index: int) -> bytes:
    try:
        data = dataset[index].data
    except (DataError, IndexError):
        return UNREADABLE
    return f"{data.shape}".encode() + data.tobytes() if isinstance(data, np.ndarray) else data


@dataclass(frozen=True, kw_only=True)
class DataProvenance:
    """Training data of a model, as recorded in its bundle.

    A dataset can be moved, copied, packed or extended. Digests of some training images identify it
    nevertheless: a dataset that contains one of these images was trained on.
    """

    data: str = ""  # the reference as passed by the user
    fingerprint: str = ""  # of the training split
    splits: Splits | None = None  # how the dataset was split if it defines no splits
    samples: tuple[str, ...] = ()  # some training images, see `sample_digests`
    taught: tuple[str, ...] = ()  # classes learned from images that are not recorded

    def splits_for(self, data: str | os.PathLike[str]) -> Splits | None:
        """Return how a dataset was split for training; None for any other dataset."""
        if self.splits is None:
            return None
        same = self.is_at(data) or (
            bool(self.samples) and contains_any(open_dataset(data, ALL), self.samples)
        )
        return self.splits if same else None

    def is_at(self, data: str | os.PathLike[str]) -> bool:
        """Return whether a reference points to where the training data was."""
        return bool(self.data) and same_location(self.data, os.fspath(data))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"samples": list(self.samples), "taught": list(self.taught)}

    @classmethod
    def of(cls, data: str, train: ImageDataset) -> "DataProvenance":
        return cls(
            data=data,
            fingerprint=fingerprint(train),
            splits=train.splits,
            samples=sample_digests(train),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DataProvenance":
        """Read the provenance of a bundle; missing or invalid values count as unknown."""
        known: dict[str, Any] = {}
        with suppress(TypeError, ConfigError):
            if isinstance(values.get("splits"), Mapping):
                known["splits"] = Splits(**values["splits"])
        for name in ("data", "fingerprint"):
            if isinstance(values.get(name), str):
                known[name] = values[name]
        for name in ("samples", "taught"):
            if isinstance(values.get(name), list):
                known[name] = tuple(map(str, values[name]))
        return cls(**known)


PROVENANCE_KEYS = tuple(DataProvenance().to_dict())


def sample_digests(dataset: ImageDataset) -> tuple[str, ...]:
    """Return `key digest` of evenly spaced images; unreadable ones are left out."""
    keys = sample_keys(dataset)
    count = min(PROVENANCE_SAMPLES, len(dataset))
    rows = np.linspace(0, len(dataset) - 1, count, dtype=int).tolist()
    digests = {row: image_digest(dataset, row) for row in rows}
    return tuple(f"{keys[row]} {digest}" for row, digest in digests.items() if digest)


def contains_any(dataset: ImageDataset, samples: Iterable[str]) -> bool:
    """Return whether a dataset contains some of the images of `sample_digests`."""
    known: dict[str, set[str]] = {}
    for sample in samples:
        key, _, digest = sample.rpartition(" ")
        known.setdefault(key, set()).add(digest)
    return any(
        image_digest(dataset, row) in known[key]
        for row, key in enumerate(sample_keys(dataset) if known else ())
        if key in known
    )


def sample_keys(dataset: ImageDataset) -> list[str]:
    """Return the key of each image, for looking it up without reading it.

    The file size, which is nearly unique and survives renaming and packing; else the name.
    """
    sizes = dataset.sizes()
    if sizes is not None:
        return list(map(str, sizes.tolist()))
    return [dataset.name(row) for row in range(len(dataset))]


def image_digest(dataset: ImageDataset, row: int) -> str:
    data = image_bytes(dataset, row)
    return "" if data == UNREADABLE else blake2b(data, digest_size=8).hexdigest()
