"""Samples → batches, in worker processes or threads, in an order that is known beforehand.

What a batch holds depends on (seed, step) alone: not on the number of workers, nor on how often the
run was stopped. A picture that cannot be read is replaced by another of the same epoch, always the
same one, and remembered with its reason; `strict` stops instead.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.data.order import EvaluationOrder, Place, TrainingOrder, sample_rng
from vitrail.data.samples import Source
from vitrail.data.threads import cores, reading_threads
from vitrail.errors import DataError

Transform = Callable[[bytes | np.ndarray, np.random.Generator], Tensor]
MOST_REPLACEMENTS = 20  # bad pictures in a row after which something else is wrong
MOST_WORKERS = 8


class Batch(NamedTuple):
    """Pictures as bytes, what they show, and which samples they are."""

    images: Tensor  # uint8 (B, C, H, W)
    labels: Tensor  # int64 (B,), or float (B, K) of zeros and ones where several classes apply
    indices: Tensor  # int64 (B,), places in the source


class Item(NamedTuple):
    """What a worker makes of one place."""

    image: Tensor | None  # None: it could not be read, and was not to be replaced
    label: int | tuple[int, ...]
    sample: int  # its place in the source
    bad: list[tuple[str, str]]  # names of pictures that could not be read, and why


class Items(NamedTuple):
    """A batch of items on its way from a worker: one tensor, the rest plain values."""

    images: Tensor  # of those that could be read
    labels: list[int | tuple[int, ...]]
    indices: list[int]
    bad: list[tuple[str, str]]


@dataclass
class Loader:
    """Iterate for batches; `skipped` tells which pictures could not be read, and why."""

    source: Source
    transform: Transform
    order: TrainingOrder | EvaluationOrder
    seed: int = 0
    workers: int | None = None  # processes. None: as many as pay; 0: this one's threads
    strict: bool = False
    skipped: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Batch]:
        workers = usual_workers(self.source) if self.workers is None else self.workers
        replace = isinstance(self.order, TrainingOrder) and not self.strict
        samples = Reading(self.source, self.transform, self.seed, replace=replace)
        batches = in_threads(samples, self.order)
        if workers:  # DataLoader asks for its sampler's length only where somebody asks for its own
            batches = DataLoader(
                samples,
                batch_sampler=self.order,  # pyright: ignore[reportArgumentType]
                num_workers=workers,
                collate_fn=collate,
            )
        try:
            for items in batches:
                batch = self.checked(items)
                if len(batch.indices):
                    yield batch
        except (RuntimeError, ConnectionError, EOFError) as error:  # which one is a matter of luck
            if type(error) is RuntimeError and "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a process that reads pictures died, most likely for want of memory; "
                "try fewer workers"
            ) from None

    def checked(self, items: Items) -> Batch:
        """The batch, once bad pictures are noted or refused."""
        hopeless = isinstance(self.order, TrainingOrder) and not items.indices
        for name, reason in items.bad:
            if self.strict or hopeless:
                raise DataError(f"{name}: {reason}")
            self.skipped[name] = reason
        return Batch(items.images, self.labels_of(items.labels), torch.tensor(items.indices))

    def labels_of(self, labels: list[int | tuple[int, ...]]) -> Tensor:
        if not self.source.multi_label:
            return torch.tensor(labels)
        many = torch.zeros(len(labels), len(self.source.classes))
        for row, label in enumerate(labels):
            many[row, list(label) if isinstance(label, tuple) else [label]] = 1
        return many


class Reading(Dataset):
    """One sample at one time: what a worker does."""

    def __init__(self, source: Source, transform: Transform, seed: int, *, replace: bool) -> None:
        self.source = source
        self.transform = transform
        self.seed = seed
        self.replace = replace

    def __getitem__(self, place: Place) -> Item:
        bad = []
        for attempt in range(MOST_REPLACEMENTS):
            rng = sample_rng(self.seed, place, attempt)
            index = place.index if attempt == 0 else int(rng.integers(len(self.source)))
            try:
                sample = self.source[index]
                return Item(self.transform(sample.data, rng), sample.label, index, bad)
            except DataError as error:
                bad.append((self.source.name(index), str(error)))
                if not self.replace:
                    break
        return Item(None, 0, place.index, bad)


def in_threads(samples: Reading, order: Iterable[list[Place]]) -> Iterator[Items]:
    """Batches one after the other, whenever the next is asked for: the pictures of each in threads.

    Whoever computes on the same cores has them alone meanwhile. What is in memory is so quick to
    fetch that threads would only cost.
    """
    if getattr(samples.source, "in_memory", False) or cores() == 1:
        yield from (collate([samples[place] for place in places]) for places in order)
        return
    with reading_threads() as threads:
        for places in order:
            yield collate(list(threads.map(samples.__getitem__, places)))


def collate(items: list[Item]) -> Items:
    read = [item for item in items if item.image is not None]
    images = [item.image for item in read if item.image is not None]
    return Items(
        torch.stack(images) if images else torch.empty(0, dtype=torch.uint8),
        [item.label for item in read],
        [item.sample for item in read],
        [bad for item in items for bad in item.bad],
    )


def usual_workers(source: Source) -> int:
    """None for pixels in memory, which are quicker than a process; else one for each core."""
    if getattr(source, "in_memory", False):
        return 0
    return min(MOST_WORKERS, cores())
