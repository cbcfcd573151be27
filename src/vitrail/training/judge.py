"""How good the model is by now: numbers on the pictures it does not learn from."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.outcome import Outcome
from vitrail.evaluation.passes import look_at_all
from vitrail.evaluation.quick import quick_outcome
from vitrail.training.averaging import Average
from vitrail.training.device import synchronize
from vitrail.training.feed import at_size
from vitrail.training.loop import seeded
from vitrail.training.material import Material
from vitrail.training.settings import Settings

LARGEST_BATCH = 128
TRIALS = 2
OVERHEAD = 1.3  # of an evaluation over its forward passes: reading pictures


@dataclass(kw_only=True)
class Judge:
    """Evaluates the objective's model; the running average of its weights, if there is one."""

    material: Material
    objective: nn.Module
    average: Average | None
    preprocessing: Preprocessing
    settings: Settings
    device: torch.device

    def one(self, size: int | None = None) -> dict[str, float]:
        """The numbers of the split that is looked at during training, as val/accuracy.

        A model that still sees smaller pictures is judged by pictures of that size.
        """
        if not self.material.judged:
            return {}
        name = next(iter(self.material.judged))
        if self.settings.until_accuracy is not None:
            name = "val"
        if self.settings.objective == "masked-patches":
            return {f"{name}/loss": self.masked_loss(name)}
        return numbers(name, self.of(name, size))

    def all(
        self, known: Mapping[str, Outcome] | None = None
    ) -> tuple[dict[str, Outcome], dict[str, float]]:
        """What there is to say about every split, at the end; and the numbers of all.

        Splits that are `known` are not evaluated again.
        """
        if self.settings.objective == "masked-patches":
            return {}, {f"{name}/loss": self.masked_loss(name) for name in self.material.judged}
        known = known or {}
        outcomes = {name: known.get(name) or self.of(name) for name in self.material.judged}
        row = {key: x for name, o in outcomes.items() for key, x in numbers(name, o).items()}
        return outcomes, row

    def of(self, split: str, size: int | None = None) -> Outcome:
        self.objective.eval()
        with self.average.applied() if self.average else nullcontext():
            outcome = quick_outcome(
                self.objective.logits,  # pyright: ignore[reportArgumentType]
                self.material.judged[split],
                at_size(self.preprocessing, size),
                loss=self.settings.loss.kind or "softmax",
                **self.how,
            )
        self.objective.train()
        return outcome

    def masked_loss(self, split: str) -> float:
        """The mean loss of filling in patches, the same ones every time it is asked for.

        With another number of processes they are others: each draws its own, batch by batch.
        """
        total, calls = torch.zeros(2, dtype=torch.float64), count()

        def predict(images: Tensor) -> Tensor:
            seeded(0, next(calls), 0)
            return self.objective(images, None)

        def take(loss: Tensor, batch: Batch) -> None:
            total.add_(torch.tensor([float(loss) * len(batch.images), len(batch.images)]))

        self.objective.eval()
        with self.average.applied() if self.average else nullcontext():
            look_at_all(predict, self.material.judged[split], self.preprocessing, take, **self.how)
        self.objective.train()
        summed, pictures = distributed.all_reduce_sum(total).tolist()
        return summed / max(1.0, pictures)

    def share_of_all(self) -> float:
        """Evaluating every split, in units of evaluating the one looked at during training."""
        sizes = [len(samples) for samples in self.material.judged.values()]
        return sum(sizes) / sizes[0] if sizes else 0.0

    def trial(self) -> float:
        """Seconds that an evaluation will take, from a few forward passes."""
        if not self.material.judged:
            return 0.0
        size = self.preprocessing.size
        images = torch.zeros(self.batch_size, self.channels, *size, device=self.device)
        times = []
        with torch.no_grad():
            for _ in range(TRIALS):
                begun = time.monotonic()
                if self.settings.objective == "masked-patches":
                    self.objective(images, torch.zeros(len(images), device=self.device))
                else:
                    self.objective.logits(images)  # pyright: ignore[reportCallIssue]
                synchronize(self.device)
                times.append(time.monotonic() - begun)
        samples = len(next(iter(self.material.judged.values()))) / distributed.world_size()
        return OVERHEAD * min(times) * samples / self.batch_size

    @property
    def how(self) -> dict[str, Any]:
        """What every look at the pictures is told."""
        return {
            "channels": self.channels,
            "batch_size": self.batch_size,
            "workers": self.settings.machine.workers,
            "device": self.device,
        }

    @property
    def channels(self) -> int:
        return len(self.preprocessing.mean)

    @property
    def batch_size(self) -> int:
        largest = max(map(len, self.material.judged.values()), default=1)
        return min(LARGEST_BATCH, max(1, largest))


def numbers(split: str, outcome: Outcome) -> dict[str, float]:
    """The numbers of an evaluation by name, such as val/accuracy."""
    row = {f"{split}/accuracy": outcome.accuracy, f"{split}/loss": outcome.loss}
    return row if outcome.top5 is None else row | {f"{split}/top5": outcome.top5}
