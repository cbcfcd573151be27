"""Samples → batches, in worker processes or threads.

A batch depends on (seed, step) alone: not on the number of workers, nor on interruptions of the
run. An unreadable image is replaced by another one, always the same, and recorded in
`Loader.skipped`; with `strict` it raises. The thread pools here are shared by training, prediction
and serving.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Lock
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from vitrail.data.datasets import Dataset, Label
from vitrail.data.sampler import EvalSampler, SampleKey, TrainSampler, sample_rng
from vitrail.errors import DataError

T = TypeVar("T")
R = TypeVar("R")
Transform = Callable[[bytes | np.ndarray, np.random.Generator], Tensor]
MAX_REPLACEMENTS = 20  # unreadable images in a row, after which something else is wrong
MAX_WORKERS = 8
MAX_POOL_THREADS = 8  # a CPU quota does not show in the number of cores
SMALL_WORK = 1_000_000  # elements
POOL_START = Lock()


class Batch(NamedTuple):
    """Images as bytes, labels, and indices of the samples."""

    images: Tensor  # uint8 (B, C, H, W)
    labels: Tensor  # int64 (B,), or float (B, K) of 0 and 1 if multi-label
    indices: Tensor  # int64 (B,), in the dataset


class Item(NamedTuple):
    """A transformed sample."""

    image: Tensor | None  # None: unreadable and not replaced
    label: Label
    row: int  # in the dataset
    errors: list[tuple[str, str]]  # names of unreadable images, and why


class ItemBatch(NamedTuple):
    """Collated items, as sent by a worker: one tensor, the rest plain values."""

    images: Tensor  # of the readable ones
    labels: list[Label]
    indices: list[int]
    errors: list[tuple[str, str]]


class Loader:
    """Iterable over batches; `skipped` maps the names of unreadable images to the reason."""

    def __init__(
        self,
        dataset: Dataset,
        transform: Transform,
        sampler: TrainSampler | EvalSampler,
        seed: int = 0,
        workers: int | None = None,  # processes; None: automatic, 0: threads of this process
        strict: bool = False,
        skipped: dict[str, str] | None = None,  # to record into
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.sampler = sampler
        self.seed = seed
        self.workers = workers
        self.strict = strict
        self.skipped = {} if skipped is None else skipped

    def __iter__(self) -> Iterator[Batch]:
        workers = default_workers(self.dataset) if self.workers is None else self.workers
        replace = isinstance(self.sampler, TrainSampler) and not self.strict
        items = ItemDataset(self.dataset, self.transform, self.seed, replace=replace)
        batches = threaded_batches(items, self.sampler)
        if workers:  # DataLoader needs the sampler's length only for its own
            batches = DataLoader(
                items,
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

    def encode(self, labels: list[Label]) -> Tensor:
        """Return class ids (B,), or 0 and 1 (B, K) if the dataset is multi-label."""
        if not self.dataset.multi_label:
            return torch.tensor(labels)
        encoded = torch.zeros(len(labels), len(self.dataset.classes))
        for row, label in enumerate(labels):
            encoded[row, list(label) if isinstance(label, tuple) else [label]] = 1
        return encoded


class ItemDataset(TorchDataset):
    """Reads and transforms samples, in the worker."""

    def __init__(self, dataset: Dataset, transform: Transform, seed: int, *, replace: bool) -> None:
        self.dataset = dataset
        self.transform = transform
        self.seed = seed
        self.replace = replace

    def __getitem__(self, key: SampleKey) -> Item:
        errors = []
        for attempt in range(MAX_REPLACEMENTS):
            rng = sample_rng(self.seed, key, attempt)
            index = key.row if attempt == 0 else int(rng.integers(len(self.dataset)))
            try:
                sample = self.dataset[index]
                return Item(self.transform(sample.data, rng), sample.label, index, errors)
            except DataError as error:
                errors.append((self.dataset.name(index), str(error)))
                if not self.replace:
                    break
        return Item(None, 0, key.row, errors)


def threaded_batches(items: ItemDataset, batches: Iterable[list[SampleKey]]) -> Iterator[ItemBatch]:
    """Load each batch on request, its images in threads; the cores are free in between.

    Pixels in memory are loaded without threads, which would cost more than they save.
    """
    if getattr(items.dataset, "in_memory", False) or available_cores() == 1:
        yield from (collate([items[key] for key in keys]) for keys in batches)
        return
    with reader_pool() as pool:
        yield from map(collate, map_batches(pool, items.__getitem__, batches))


def collate(items: list[Item]) -> ItemBatch:
    readable = [item for item in items if item.image is not None]
    images = [item.image for item in readable if item.image is not None]
    return ItemBatch(
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
