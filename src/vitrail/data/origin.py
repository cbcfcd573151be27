"""What a model has learned from: kept with its weights, and known again when it is met.

A place can be spelled in many ways, and a set be moved, copied, packed or added to. So some of the
training pictures speak for all of them: a digest of each is kept, and a set that holds such a
picture is one that the model has learned from.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from os import PathLike, fspath
from typing import Any

import numpy as np

from vitrail.data.files import same_data
from vitrail.data.samples import Samples
from vitrail.data.sources import ALL, UNREADABLE, fingerprint, open_source, picture_bytes
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError

SPEAKERS = 32  # what holds a tenth of the training pictures holds one of these 29 times of 30


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a model has learned from, as far as its bundle tells."""

    data: str = ""  # the reference, as it was given
    fingerprint: str = ""  # of all training pictures
    splits: Splits | None = None  # how the set was divided, where it does not say so itself
    samples: tuple[str, ...] = ()  # some of the training pictures, as `digests` tells them
    taught: tuple[str, ...] = ()  # classes learned from pictures of which nothing is kept

    def division(self, data: str | PathLike[str]) -> Splits | None:
        """How a set was divided when the model learned from it; None for any other set."""
        if self.splits is None:
            return None
        known = self.is_at(data) or (
            bool(self.samples) and holds_some(open_source(data, ALL), self.samples)
        )
        return self.splits if known else None

    def is_at(self, data: str | PathLike[str]) -> bool:
        """Whether this is where the training pictures were."""
        return bool(self.data) and same_data(self.data, fspath(data))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the provenance of a bundle."""
        return {
            "data": self.data,
            "fingerprint": self.fingerprint,
            "splits": None if self.splits is None else asdict(self.splits),
            "samples": list(self.samples),
            "taught": list(self.taught),
        }


KEPT = tuple(Origin().to_dict())  # the keys of a provenance that are about this


def origin_of(data: str, train: Samples) -> Origin:
    """What to keep about the training pictures of a set."""
    return Origin(
        data=data,
        fingerprint=fingerprint(train),
        splits=train.splits,
        samples=digests(train),
    )


def from_provenance(values: Mapping[str, Any]) -> Origin:
    """What a bundle tells; what is missing or odd counts as not known."""
    splits = values.get("splits")
    try:
        rule = Splits(**splits) if isinstance(splits, Mapping) else None
    except (TypeError, ConfigError):
        rule = None

    def text(name: str) -> str:
        return found if isinstance(found := values.get(name), str) else ""

    def texts(name: str) -> tuple[str, ...]:
        return tuple(map(str, found)) if isinstance(found := values.get(name), list) else ()

    return Origin(
        data=text("data"),
        fingerprint=text("fingerprint"),
        splits=rule,
        samples=texts("samples"),
        taught=texts("taught"),
    )


def digests(source: Samples) -> tuple[str, ...]:
    """Some pictures, evenly spread: each by what it is looked up by, and by its bytes."""
    keys = list(keys_of(source))
    rows = np.linspace(0, len(source) - 1, min(SPEAKERS, len(source)), dtype=int).tolist()
    found = {row: digest(source, row) for row in rows}
    return tuple(f"{keys[row]} {digest}" for row, digest in found.items() if digest)


def holds_some(source: Samples, samples: Iterable[str]) -> bool:
    """Whether some of the pictures that `digests` told are in a source."""
    known: dict[str, set[str]] = {}
    for sample in samples:
        key, _, found = sample.rpartition(" ")
        known.setdefault(key, set()).add(found)
    return any(
        digest(source, row) in known[key]
        for row, key in enumerate(keys_of(source) if known else ())
        if key in known
    )


def keys_of(source: Samples) -> Iterator[str]:
    """What pictures are looked up by without being read: their sizes, which hardly two share and
    which stay when they are renamed or packed; their names, where sizes are not known."""
    sizes = source.sizes()
    if sizes is not None:
        return map(str, sizes.tolist())
    return (source.name(row) for row in range(len(source)))


def digest(source: Samples, row: int) -> str:
    """A text for the bytes of a picture; empty if it cannot be read."""
    data = picture_bytes(source, row)
    return "" if data == UNREADABLE else blake2b(data, digest_size=8).hexdigest()
