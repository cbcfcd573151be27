"""How good the model is by now: numbers on the pictures it does not learn from."""

import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from vitrail import parallel
from vitrail.data.loader import Loader
from vitrail.data.order import EvaluationOrder
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms import EvaluationTransform, normalize
from vitrail.evaluation.evaluate import evaluate, most_calls
from vitrail.evaluation.outcome import Outcome
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
        if self.settings.objective == "masked-patches":
            return {f"{name}/loss": self.masked_loss(name)}
        return numbers(name, self.of(name, size))

    def all(self) -> tuple[dict[str, Outcome], dict[str, float]]:
        """What there is to say about every split, at the end; and the numbers of all."""
        if self.settings.objective == "masked-patches":
            return {}, {f"{name}/loss": self.masked_loss(name) for name in self.material.judged}
        outcomes = {name: self.of(name) for name in self.material.judged}
        row = {key: x for name, o in outcomes.items() for key, x in numbers(name, o).items()}
        return outcomes, row

    def of(self, split: str, size: int | None = None) -> Outcome:
        self.objective.eval()
        with self.average.applied() if self.average else nullcontext():
            outcome = evaluate(
                self.objective.logits,  # pyright: ignore[reportArgumentType]
                self.material.judged[split],
                at_size(self.preprocessing, size),
                channels=self.channels,
                batch_size=self.batch_size,
                workers=self.settings.machine.workers,
                device=self.device,
                loss=self.settings.loss.kind or "softmax",
            )
        self.objective.train()
        return outcome

    def masked_loss(self, split: str) -> float:
        """The mean loss of filling in patches, which are always the same ones."""
        source = self.material.judged[split]
        transform = EvaluationTransform(preprocessing=self.preprocessing, channels=self.channels)
        order = EvaluationOrder(
            samples=len(source),
            batch_size=self.batch_size,
            rank=parallel.rank(),
            world_size=parallel.world_size(),
        )
        total, calls = torch.zeros(2, dtype=torch.float64), 0
        self.objective.eval()
        with torch.no_grad(), self.average.applied() if self.average else nullcontext():
            for batch in Loader(source, transform, order, workers=self.settings.machine.workers):
                seeded(0, calls, 0)
                calls += 1
                images = normalize(batch.images.to(self.device), self.preprocessing)
                loss = self.objective(images, batch.labels)
                total += torch.tensor([float(loss) * len(images), len(images)])
            if parallel.several():  # the others need this process for their calls
                nothing = torch.zeros(1, self.channels, *transform.preprocessing.size)
                for _ in range(calls, most_calls(order)):
                    self.objective(nothing.to(self.device), None)
        self.objective.train()
        summed, count = parallel.sum_over(total).tolist()
        return summed / max(1.0, count)

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
        samples = len(next(iter(self.material.judged.values()))) / parallel.world_size()
        return OVERHEAD * min(times) * samples / self.batch_size

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
