"""Which samples are for learning, which for choosing, which for judging.

A set that states its splits keeps them. One that does not is divided class by class, in an order
that is a hash of (seed, name): the same on every machine, and a picture that is added later moves
three others of its class at most, those next to where the class is cut.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from vitrail.data.samples import LabelSets, Names
from vitrail.errors import ConfigError

SPLITS = ("train", "val", "test")
ALSO_CALLED = {
    "training": "train",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "testing": "test",
}


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How to divide what is not divided yet; the rest is for training."""

    val: float = 0.1
    """Share of the pictures to choose by."""
    test: float = 0.1
    """Share of the pictures to judge by."""
    seed: int = 0
    """Another seed divides otherwise."""

    def __post_init__(self) -> None:
        if min(self.val, self.test) < 0 or self.val + self.test >= 1:
            raise ConfigError(
                f"val={self.val} and test={self.test} must be shares that leave some for train"
            )

    def __str__(self) -> str:
        train = 1 - self.val - self.test
        return f"{train:.0%} train, {self.val:.0%} val, {self.test:.0%} test by seed {self.seed}"


def canonical(name: str) -> str:
    """`Validation` is `val`; a name of the user's own stays as it is."""
    lower = name.strip().lower()
    lower = ALSO_CALLED.get(lower, lower)
    return lower if lower in SPLITS else name.strip()


def place(split: str, names: tuple[str, ...]) -> int:
    """The number of a split among those that a set states; 0 for what is in none."""
    return names.index(split) if split else 0


def divide(names: Names, labels: np.ndarray | LabelSets, splits: Splits) -> np.ndarray:
    """For each sample its place in `SPLITS`; every class is divided in the same shares."""
    groups = rarest(labels) if isinstance(labels, LabelSets) else labels
    hashes = np.fromiter((chance(splits.seed, name) for name in names), np.uint64, len(names))
    order = np.lexsort((hashes, groups))
    _, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    val, test = share(counts, splits.val), share(counts, splits.test)
    test = np.minimum(test, np.maximum(counts - 1 - val, 0))
    rank = np.arange(len(order)) - np.repeat(starts, counts)
    places = np.where(rank < np.repeat(val, counts), 1, 0)
    places[(rank >= np.repeat(val, counts)) & (rank < np.repeat(val + test, counts))] = 2
    divided = np.zeros(len(order), np.uint8)
    divided[order] = places
    return divided


def representative(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The places of `count` labels, drawn so that each class keeps its share and has one at least.

    Every class is shuffled. Its r-th picture has priority n / sqrt(r (r - 1)), where n is how many
    it has, and those with the highest are taken: Huntington's and Hill's way to give out seats.
    """
    order = rng.permutation(len(labels))
    shuffled = labels[order]
    counts = np.bincount(labels)
    rank = np.empty(len(labels))  # of each within its class, from 0
    starts = np.cumsum(counts) - counts
    by_class = np.argsort(shuffled, kind="stable")
    rank[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    size = counts[shuffled]
    with np.errstate(divide="ignore"):
        priority = size / np.sqrt(rank * (rank + 1))
    return np.sort(order[np.lexsort((-size, -priority))[:count]])


def share(counts: np.ndarray, part: float) -> np.ndarray:
    """The nearest number of pictures, one at least where a class has three."""
    wanted = np.floor(counts * part + 0.5).astype(np.int64)
    least = np.where((counts >= 3) & (part > 0), 1, 0)
    return np.clip(wanted, least, np.maximum(counts - 1, 0))


def rarest(labels: LabelSets) -> np.ndarray:
    """A picture of several classes counts for the rarest of them; -1 for one of none."""
    counts = np.bincount(labels.classes) if len(labels.classes) else np.zeros(1, np.int64)
    return np.array([min(found, key=lambda c: counts[c], default=-1) for found in labels], np.int64)


def chance(seed: int, name: str) -> int:
    text = f"{seed}\0{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
