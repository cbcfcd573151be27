"""Every picture of a source once, through a model.

    outcome = evaluate(model, source, preprocessing, channels=3, batch_size=64)

Several processes share the pictures out and all get the outcome of the whole.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from vitrail import parallel
from vitrail.data.loader import Loader
from vitrail.data.order import EvaluationOrder
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.samples import Source
from vitrail.data.transforms import Backend, EvaluationTransform, normalize
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.outcome import Loss, Outcome, Tally


def evaluate(
    predict: Callable[[Tensor], Tensor],
    source: Source,
    preprocessing: Preprocessing,
    *,
    channels: int,
    batch_size: int,
    workers: int | None = None,
    backend: Backend = "torch",
    strict: bool = False,
    device: str | torch.device = "cpu",
    loss: Loss = "softmax",
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Send each picture through `predict`, which makes logits (B, K) of images (B, C, H, W).

    `batch_size` is that of one process. A picture that cannot be read is left out and told;
    `strict` stops there. `progress` hears how many of this process's pictures are done.
    """
    order = EvaluationOrder(
        samples=len(source),
        batch_size=batch_size,
        rank=parallel.rank(),
        world_size=parallel.world_size(),
    )
    transform = EvaluationTransform(preprocessing=preprocessing, channels=channels, backend=backend)
    loader = Loader(source, transform, order, workers=workers, strict=strict)
    tally = Tally(len(source.classes), multi_label=source.multi_label, loss=loss)
    mine = len(range(order.rank, order.samples, order.world_size))
    calls, problem = 0, None
    with without_gradients(order.world_size):
        try:
            for batch in loader:
                images = normalize(batch.images.to(device), preprocessing)
                calls += 1
                tally.add(fitting(predict(images), source), batch.labels, batch.indices)
                if progress is not None:
                    progress(int(tally.counts[0]) + len(loader.skipped), mine)
        except DataError as error:
            problem = error
        if order.world_size > 1:  # the others need this process for their calls
            nothing = torch.zeros(1, channels, *preprocessing.size, device=device)
            for _ in range(calls, most_calls(order)):
                fitting(predict(nothing), source)
    for found in parallel.gather_objects(problem):  # one stops, all stop, for the same reason
        if found is not None:
            raise found
    tally.reduce()
    skipped = {}
    for part in parallel.gather_objects(loader.skipped):
        skipped |= part
    return tally.finish(source, skipped)


def without_gradients(world_size: int) -> AbstractContextManager[None]:
    """Inference mode; not for a model that is spread out, which would keep what it gathers there
    and could not be trained any more."""
    return torch.inference_mode() if world_size == 1 else torch.no_grad()


def most_calls(order: EvaluationOrder) -> int:
    """How often every process calls the model: as often as the one with the most batches.

    A model whose weights are spread over the processes needs all of them for each of its calls;
    shares differ by a picture, and a batch of unreadable pictures never comes.
    """
    return len(replace(order, rank=0))


def fitting(logits: Tensor, source: Source) -> Tensor:
    """The logits, if the model tells as many classes apart as the data has."""
    if logits.ndim != 2 or logits.shape[1] != len(source.classes):
        raise ConfigError(
            f"the model gives {tuple(logits.shape[1:])} numbers for a picture and the data has "
            f"{len(source.classes)} classes; they must be the same classes in the same order"
        )
    return logits
