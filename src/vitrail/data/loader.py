"""Samples → batches: the order of samples, and loading in worker processes or threads.

The order is a pure function of the seed, so that a run can resume at any step. Training reads an
endless stream: epoch e is a permutation of all samples drawn from (seed, e), and batch s is
positions s * B to (s + 1) * B of the concatenated epochs. No sample is dropped or repeated within
an epoch; with `probabilities`, such as those of `balanced_probabilities`, an epoch has the same
length, but some samples occur several times and others not at all. The batch is defined before it
is divided among processes, so any number of processes trains on the same batches, with any number
of workers.

An unreadable image is replaced by another one, always the same, and recorded in `Loader.skipped`;
with `strict` it raises. The thread pools are shared by training, prediction and serving.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, Lock
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from vitrail.data.datasets import Dataset, Label
from vitrail.errors import ConfigError, DataError

T = TypeVar("T")
R = TypeVar("R")
Transform = Callable[[bytes | np.ndarray, np.random.Generator], Tensor]
MAX_REPLACEMENTS = 20  # unreadable images in a row; more means that something else is wrong
MAX_WORKERS = 8
MAX_POOL_THREADS = 8  # a CPU quota does not show in the number of cores
SMALL_WORK = 1_000_000  # elements
POOL_START = Lock()


class SampleKey(NamedTuple):
    """One use of a sample: the key of all its randomness."""

    epoch: int
    row: int  # in the dataset
    repeat: int = 0  # in repeated augmentation

    def rng(self, seed: int, attempt: int = 0) -> np.random.Generator:
        """Return the generator of this use, the same in every process."""
        return np.random.default_rng((seed, self.epoch, self.row, self.repeat, attempt))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSampler:
    """Batches of a training run, from any step."""

    samples: int
    batch_size: int  # over all processes
    seed: int = 0
    start_step: int = 0
    repeats: int = 1  # repeated augmentation: uses of a sample in a row (Hoffer et al. 2020)
    probabilities: np.ndarray | None = None  # of each sample; None: each once per epoch
    views: int = 0  # distinct random augmentations of a sample; 0: a new one for each use
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1 or self.repeats < 1:
            raise ConfigError("the training set is empty")
        if self.batch_size % self.world_size:
            nearest = -(-self.batch_size // self.world_size) * self.world_size
            raise ConfigError(
                f"batch_size={self.batch_size} is not divisible by {self.world_size} processes; "
                f"try {nearest}"
            )

    def __iter__(self) -> Iterator[list[SampleKey]]:
        per_process = self.batch_size // self.world_size
        position = self.start_step * self.batch_size + self.rank * per_process
        epoch, order, uses = -1, np.empty(0, np.int64), np.empty(0, np.int64)
        while True:
            batch = []
            for number in range(position, position + per_process):
                sample, repeat = divmod(number, self.repeats)
                if sample // self.samples != epoch:
                    epoch = sample // self.samples
                    order = epoch_order(self.samples, self.seed, epoch, self.probabilities)
                    # how often the sample at each position occurs before it
                    sorter = order.argsort(kind="stable")
                    ordered, uses = order[sorter], np.empty_like(order)
                    uses[sorter] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
                row, use = int(order[sample % self.samples]), int(uses[sample % self.samples])
                key = SampleKey(epoch, row, use * self.repeats + repeat)
                if self.views:
                    key = SampleKey((epoch + key.repeat) % self.views, row)
                batch.append(key)
            yield batch
            position += self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSampler:
    """Every sample once. Processes take whole batches in turn, so that the batches do not depend on
    their number: rounding in a matrix product depends on the other rows of the batch."""

    samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return ([SampleKey(0, row) for row in rows] for rows in self.batches())

    def batches(self) -> list[range]:
        """Return the rows of each batch of this process."""
        size, samples = self.batch_size, self.samples
        starts = range(self.rank * size, samples, self.world_size * size)
        return [range(start, min(start + size, samples)) for start in starts]


def epoch_order(
    samples: int, seed: int, epoch: int, probabilities: np.ndarray | None = None
) -> np.ndarray:
    """Return the samples of one epoch: a permutation, or a shuffled draw.

    A sample of probability p is drawn floor(p * samples) times or once more (systematic sampling).
    """
    rng = np.random.default_rng((seed, epoch))
    if probabilities is None:
        return rng.permutation(samples)
    positions = (np.arange(samples) + rng.random()) / samples
    edges = np.cumsum(probabilities)
    rows = np.searchsorted(edges / edges[-1], positions, side="right").clip(max=len(edges) - 1)
    return rng.permutation(rows)


def balanced_probabilities(class_ids: np.ndarray, balance: float) -> np.ndarray:
    """Return the probability of each sample: classes of n images are drawn as n^(1 - balance)."""
    counts = np.bincount(class_ids)[class_ids]
    weights = counts.astype(np.float64) ** -balance
    return weights / weights.sum()


class Batch(NamedTuple):
    """Images as bytes, labels, and indices of the samples."""

    images: Tensor  # uint8 (B, C, H, W)
    labels: Tensor  # int64 (B,), or float (B, K) of 0 and 1 if multi-label
    indices: Tensor  # int64 (B,), in the dataset


class Item(NamedTuple):
    image: Tensor | None  # None: unreadable and not replaced
    label: Label
    row: int  # in the dataset
    errors: list[tuple[str, str]]  # names of unreadable images, and why


# What a worker sends: the readable images as one tensor, their labels and rows, all errors.
ItemBatch = tuple[Tensor, list[Label], list[int], list[tuple[str, str]]]


@dataclass(eq=False)
class Loader(TorchDataset):
    """Iterable over batches; for the workers, a map-style dataset of items."""

    dataset: Dataset
    transform: Transform
    sampler: TrainSampler | EvalSampler
    seed: int = 0
    workers: int | None = None  # processes; None: automatic, 0: threads of this process
    strict: bool = False
    skipped: dict[str, str] = field(default_factory=dict)  # names of unreadable images, and why

    def __iter__(self) -> Iterator[Batch]:
        workers = default_workers(self.dataset) if self.workers is None else self.workers
        batches = threaded_batches(self)
        if workers:  # DataLoader needs the sampler's length only for its own
            batches = DataLoader(
                self,
                batch_sampler=self.sampler,  # pyright: ignore[reportArgumentType]
                num_workers=workers,
                collate_fn=collate,
            )
        try:
            for images, labels, indices, errors in batches:
                failed = isinstance(self.sampler, TrainSampler) and not indices
                for name, reason in errors:
                    if self.strict or failed:
                        raise DataError(f"{name}: {reason}")
                    self.skipped[name] = reason
                if indices:
                    yield Batch(images, self.encode(labels), torch.tensor(indices))
        except (RuntimeError, ConnectionError, EOFError) as error:  # which one is a race
            if type(error) is RuntimeError and "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a data loading worker was killed, most likely out of memory; use fewer workers"
            ) from None

    def __getitem__(self, key: SampleKey) -> Item:
        """Read and transform a sample; in training, another one if it is unreadable."""
        errors = []
        for attempt in range(MAX_REPLACEMENTS):
            rng = key.rng(self.seed, attempt)
            index = key.row if attempt == 0 else int(rng.integers(len(self.dataset)))
            try:
                sample = self.dataset[index]
                return Item(self.transform(sample.data, rng), sample.label, index, errors)
            except DataError as error:
                errors.append((self.dataset.name(index), str(error)))
                if self.strict or isinstance(self.sampler, EvalSampler):
                    break
        return Item(None, 0, key.row, errors)

    def encode(self, labels: list[Label]) -> Tensor:
        """Return class ids (B,), or 0 and 1 (B, K) if the dataset is multi-label."""
        if not self.dataset.multi_label:
            return torch.tensor(labels)
        encoded = torch.zeros(len(labels), len(self.dataset.classes))
        for row, label in enumerate(labels):
            encoded[row, list(label) if isinstance(label, tuple) else [label]] = 1
        return encoded


def threaded_batches(loader: Loader) -> Iterator[ItemBatch]:
    """Load each batch on request, its images in threads; the cores are free in between.

    Pixels in memory are loaded without threads, which would cost more than they save.
    """
    if getattr(loader.dataset, "in_memory", False) or available_cores() == 1:
        yield from (collate([loader[key] for key in keys]) for keys in loader.sampler)
        return
    with reader_pool() as pool:
        yield from map(collate, map_batches(pool, loader.__getitem__, loader.sampler))


def collate(items: list[Item]) -> ItemBatch:
    readable = [item for item in items if item.image is not None]
    images = [item.image for item in readable if item.image is not None]
    return (
        torch.stack(images) if images else torch.empty(0, dtype=torch.uint8),
        [item.label for item in readable],
        [item.row for item in readable],
        [error for item in items for error in item.errors],
    )


def default_workers(dataset: Dataset) -> int:
    """Return 0 for pixels in memory, else one process per core."""
    if getattr(dataset, "in_memory", False):
        return 0
    return min(MAX_WORKERS, available_cores())


# Threads. Decoding, resizing and matrix products release the GIL, so that threads share the work
# without the cost of processes.


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def torch_threads_for(elements: int) -> Iterator[None]:
    """Use one torch thread for small work, else the current number.

    Small work is done before threads have synchronized; and a thread that has helped spins for
    milliseconds on a core that another thread needs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if elements <= SMALL_WORK else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def reader_pool() -> ThreadPoolExecutor:
    """Start one thread per core, each with a single torch thread."""
    return start_pool(min(available_cores(), MAX_POOL_THREADS), torch_threads=1, name="reader")


def map_batches(
    pool: ThreadPoolExecutor, function: Callable[[T], R], batches: Iterable[Iterable[T]]
) -> Iterator[list[R]]:
    """Apply `function` to the items of each batch, on request, in the threads of `pool`.

    The next batch is requested before the results of the current one are returned: batches that
    start reading when they are requested are read one batch ahead.
    """
    remaining = iter(batches)
    batch = next(remaining, None)
    while batch is not None:
        results = list(pool.map(function, batch))
        batch = next(remaining, None)
        yield results


def start_pool(count: int, *, torch_threads: int, name: str) -> ThreadPoolExecutor:
    """Start a pool in which each thread has its own number of torch threads.

    `set_num_threads` in a thread also changes the default of all threads started later. So all are
    started here, one pool at a time, and the default is restored.
    """
    started = Barrier(count + 1)

    def initialize() -> None:
        torch.set_num_threads(torch_threads)
        torch.get_num_threads()  # a thread adopts the number on its first query
        started.wait()

    with POOL_START:
        default = torch.get_num_threads()
        pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=initialize)
        try:
            for _ in range(count):
                pool.submit(int)
            started.wait()
        except BaseException:  # no more threads available: those that exist must not wait
            started.abort()
            raise
        finally:
            torch.set_num_threads(default)
    return pool
