"""Every picture of a source once through a model: the one way in which models are looked at.

Several processes take the batches in turn. A batch holds the same pictures however many there are,
so that each gives the very numbers that one process would have found.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vitrail import distributed
from vitrail.data.loader import Batch, Loader
from vitrail.data.order import EvaluationOrder
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.samples import Source
from vitrail.data.transforms import Backend, EvaluationTransform, normalize
from vitrail.errors import ConfigError, DataError

Progress = Callable[[int, int], None]


def look_at_all(
    predict: Callable[[Tensor], Tensor],
    source: Source,
    preprocessing: Preprocessing,
    take: Callable[[Tensor, Batch], None],
    *,
    channels: int,
    batch_size: int,
    workers: int | None = None,
    backend: Backend = "torch",
    strict: bool = False,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> dict[str, str]:
    """Give `take` what `predict` makes of normalized images (B, C, H, W), batch by batch.

    Returns the pictures that could not be read, and why, of all processes; `strict` stops at the
    first. `progress` hears how many of this process's pictures are done.
    """
    if batch_size < 1 or (workers is not None and workers < 0):
        raise ConfigError(
            f"batch_size={batch_size} must be 1 or more, and workers={workers} 0 or more"
        )
    order = EvaluationOrder(
        samples=len(source),
        batch_size=batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    transform = EvaluationTransform(preprocessing=preprocessing, channels=channels, backend=backend)
    loader = Loader(source, transform, order, workers=workers, strict=strict)
    calls, done, problem = 0, 0, None
    with without_gradients(order.world_size):
        try:
            for batch in loader:
                calls += 1
                take(predict(normalize(batch.images.to(device), preprocessing)), batch)
                done += len(batch.indices)
                if progress is not None:
                    progress(done + len(loader.skipped), order.mine)
        except DataError as error:
            problem = error
        if order.world_size > 1:  # the others need this process for their calls
            nothing = torch.zeros(1, channels, *preprocessing.size, device=device)
            for _ in range(calls, len(replace(order, rank=0))):
                predict(nothing)
    for found in distributed.all_gather_object(problem):  # one stops, all stop, for the same reason
        if found is not None:
            raise found
    parts = distributed.all_gather_object(loader.skipped)
    return {name: reason for part in parts for name, reason in part.items()}


def without_gradients(world_size: int) -> AbstractContextManager[None]:
    """Inference mode; not for a model that is spread out, which would keep what it gathers there
    and could not be trained any more."""
    return torch.inference_mode() if world_size == 1 else torch.no_grad()


def none_read(pictures: int, skipped: Mapping[str, str]) -> DataError:
    """What to raise where nothing could be looked at."""
    reason = next((f": {name}: {why}" for name, why in skipped.items()), "")
    return DataError(f"none of {pictures:,} pictures could be read{reason}")


class Outputs:
    """What a model gives for each picture, in the order of the source."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.found = np.zeros(samples, bool)
        self.values: np.ndarray | None = None  # float32 (samples, D), filled where found

    def add(self, outputs: Tensor, batch: Batch) -> None:
        places, rows = batch.indices.numpy(), outputs.float().cpu().numpy()
        if self.values is None:
            self.values = np.zeros((self.samples, rows.shape[1]), np.float32)
        self.values[places], self.found[places] = rows, True

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of all processes, and the places they belong to."""
        if distributed.is_distributed():
            self.receive()
        indices = np.flatnonzero(self.found)
        if self.values is None:
            return np.zeros((0, 0), np.float32), indices
        return (self.values if len(indices) == self.samples else self.values[indices]), indices

    def receive(self) -> None:
        mine = np.flatnonzero(self.found)
        rows = None if self.values is None else self.values[mine]
        for places, values in distributed.all_gather_object((mine, rows)):
            if values is None:
                continue
            if self.values is None:
                self.values = np.zeros((self.samples, values.shape[1]), np.float32)
            self.values[places], self.found[places] = values, True
