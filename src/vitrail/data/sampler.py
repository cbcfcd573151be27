"""Order of samples, a pure function of the seed: a run can resume at any step.

Training reads an endless stream. Epoch e is a permutation of all samples drawn from (seed, e), and
batch s is positions s * B to (s + 1) * B of the concatenated epochs. No sample is dropped or
repeated within an epoch, whatever the batch size. Since the batch is defined before it is divided
among processes, any number of processes trains on the same batches. With `probabilities`, such as
those of `balanced_probabilities`, an epoch has as many samples, some of them several times.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitrail.errors import ConfigError


class SampleKey(NamedTuple):
    """One use of a sample: the key of all its randomness."""

    epoch: int
    row: int  # in the dataset
    repeat: int = 0  # in repeated augmentation


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
                    uses = earlier_uses(order)
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
        for batch in self.batches():
            yield [SampleKey(0, index) for index in batch]

    def __len__(self) -> int:
        return len(self.batches())

    @property
    def local_samples(self) -> int:
        """Number of samples of this process."""
        return sum(map(len, self.batches()))

    def batches(self) -> list[range]:
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


def earlier_uses(order: np.ndarray) -> np.ndarray:
    """Return for each position how often its sample occurs before it."""
    sorter = order.argsort(kind="stable")
    ordered, uses = order[sorter], np.empty_like(order)
    uses[sorter] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return uses


def balanced_probabilities(class_ids: np.ndarray, balance: float) -> np.ndarray:
    """Return the probability of each sample: classes of n images are drawn as n^(1 - balance)."""
    counts = np.bincount(class_ids)[class_ids]
    weights = counts.astype(np.float64) ** -balance
    return weights / weights.sum()


def sample_rng(seed: int, key: SampleKey, attempt: int = 0) -> np.random.Generator:
    """Return the generator of one use of a sample, the same in every process."""
    return np.random.default_rng((seed, key.epoch, key.row, key.repeat, attempt))
