"""Which sample comes when: a pure function of the seed, so that a run can go on anywhere.

Training reads an endless stream. Epoch e is a permutation of all samples drawn from (seed, e), and
epochs follow each other without a seam: batch s is positions s * B to (s + 1) * B of the stream.
Nothing is dropped and nothing comes twice in an epoch, whatever the batch size; and since the batch
is defined before it is shared out, any number of processes sees the same batches.

Evaluation reads every sample once; processes take whole batches in turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vitrail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """One sample at one time: the key from which all of its randomness is drawn."""

    epoch: int
    index: int
    turn: int = 0  # which of its repetitions in the epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOrder:
    """The batches of a training run, from any step on."""

    samples: int
    batch_size: int  # over all processes
    seed: int = 0
    start_step: int = 0  # the first batch that is wanted
    repeats: int = 1  # times a sample comes in a row, each time augmented anew (Hoffer et al. 2020)
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1 or self.repeats < 1:
            raise ConfigError("there are no samples to train on")
        if self.batch_size % self.world_size:
            raise ConfigError(
                f"batch_size={self.batch_size} does not split over {self.world_size} processes; "
                f"try {round_up(self.batch_size, self.world_size)}"
            )

    def __iter__(self) -> Iterator[list[Place]]:
        share = self.batch_size // self.world_size
        position = self.start_step * self.batch_size + self.rank * share
        epoch, order = -1, np.empty(0, np.int64)
        while True:
            batch = []
            for place in range(position, position + share):
                at, turn = divmod(place, self.repeats)
                if at // self.samples != epoch:
                    epoch = at // self.samples
                    order = epoch_order(self.samples, self.seed, epoch)
                batch.append(Place(epoch, int(order[at % self.samples]), turn))
            yield batch
            position += self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOrder:
    """Every sample once. Processes take whole batches in turn, so that a batch is always the same:
    a matrix product rounds a row otherwise beside other rows."""

    samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1

    def __iter__(self) -> Iterator[list[Place]]:
        for batch in self.batches():
            yield [Place(0, index) for index in batch]

    def __len__(self) -> int:
        return len(self.starts())

    @property
    def mine(self) -> int:
        """Samples of this process."""
        return sum(map(len, self.batches()))

    def batches(self) -> Iterator[range]:
        for start in self.starts():
            yield range(start, min(start + self.batch_size, self.samples))

    def starts(self) -> range:
        size = self.batch_size
        return range(self.rank * size, self.samples, self.world_size * size)


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """The samples of one epoch in the order they come."""
    return np.random.default_rng((seed, epoch)).permutation(samples)


def sample_rng(seed: int, place: Place, attempt: int = 0) -> np.random.Generator:
    """The randomness of one sample at one time, the same in whichever process it is drawn."""
    return np.random.default_rng((seed, place.epoch, place.index, place.turn, attempt))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
