"""Evaluation on the held-out splits, during and after training."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.evaluate import quick_evaluate, run_inference
from vitrail.evaluation.results import EvaluationResult
from vitrail.training.config import Settings
from vitrail.training.data_module import DataSplits, at_size
from vitrail.training.loop import seed_micro_batch, synchronize
from vitrail.training.optim import EMA

MAX_BATCH = 128
TRIALS = 2
OVERHEAD = 1.3  # of an evaluation over its forward passes: data loading


class Evaluator:
    """Evaluates the objective's model, with the averaged weights if there are any."""

    def __init__(
        self,
        objective: nn.Module,
        ema: EMA | None,
        splits: DataSplits,
        preprocessing: Preprocessing,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.objective, self.ema, self.splits = objective, ema, splits
        self.preprocessing, self.settings, self.device = preprocessing, settings, device
        self.channels = len(preprocessing.mean)
        largest = max(map(len, splits.held_out.values()), default=1)
        self.batch_size = min(MAX_BATCH, max(1, largest))
        self.loader_options: dict[str, Any] = {
            "channels": self.channels,
            "batch_size": self.batch_size,
            "workers": settings.machine.workers,
            "device": device,
        }

    def during_training(self, image_size: int | None = None) -> dict[str, float]:
        """Return the metrics of the split that is evaluated during training, as val/accuracy.

        A model that is still trained at a smaller image size is evaluated at that size.
        """
        if not self.splits.held_out:
            return {}
        name = next(iter(self.splits.held_out))
        if self.settings.until_accuracy is not None:
            name = "val"
        if self.settings.objective == "masked-patches":
            return {f"{name}/loss": self.masked_loss(name)}
        return metrics(name, self.evaluate(name, image_size))

    def final(
        self, known: Mapping[str, EvaluationResult] | None = None
    ) -> tuple[dict[str, EvaluationResult], dict[str, float]]:
        """Return the outcomes and metrics of all splits; those of `known` are not recomputed."""
        held_out = self.splits.held_out
        if self.settings.objective == "masked-patches":
            return {}, {f"{name}/loss": self.masked_loss(name) for name in held_out}
        known = known or {}
        outcomes = {name: known.get(name) or self.evaluate(name) for name in held_out}
        row = {key: x for name, o in outcomes.items() for key, x in metrics(name, o).items()}
        return outcomes, row

    def evaluate(self, split: str, image_size: int | None = None) -> EvaluationResult:
        self.objective.eval()
        with self.ema.applied() if self.ema else nullcontext():
            outcome = quick_evaluate(
                self.objective.logits,  # pyright: ignore[reportArgumentType]
                self.splits.held_out[split],
                at_size(self.preprocessing, image_size),
                loss=self.settings.loss.kind or "softmax",
                **self.loader_options,
            )
        self.objective.train()
        return outcome

    def masked_loss(self, split: str) -> float:
        """Return the mean masked patch loss, with the same masks every time.

        Masks depend on the number of processes: each draws its own, batch by batch.
        """
        total, calls = torch.zeros(2, dtype=torch.float64), count()

        def predict(images: Tensor) -> Tensor:
            seed_micro_batch(0, next(calls), 0)
            return self.objective(images, None)

        def add(loss: Tensor, batch: Batch) -> None:
            total.add_(torch.tensor([float(loss) * len(batch.images), len(batch.images)]))

        self.objective.eval()
        samples = self.splits.held_out[split]
        with self.ema.applied() if self.ema else nullcontext():
            run_inference(predict, samples, self.preprocessing, add, **self.loader_options)
        self.objective.train()
        summed, images = distributed.all_reduce_sum(total).tolist()
        return summed / max(1.0, images)

    def final_cost(self) -> float:
        """Return the cost of `final` in units of `during_training`."""
        sizes = [len(samples) for samples in self.splits.held_out.values()]
        return sum(sizes) / sizes[0] if sizes else 0.0

    def estimate_seconds(self) -> float:
        """Return the expected duration of `during_training`, from a few forward passes."""
        if not self.splits.held_out:
            return 0.0
        size = self.preprocessing.size
        images = torch.zeros(self.batch_size, self.channels, *size, device=self.device)
        times = []
        with torch.no_grad():
            for _ in range(TRIALS):
                started = time.monotonic()
                if self.settings.objective == "masked-patches":
                    self.objective(images, torch.zeros(len(images), device=self.device))
                else:
                    self.objective.logits(images)  # pyright: ignore[reportCallIssue]
                synchronize(self.device)
                times.append(time.monotonic() - started)
        samples = len(next(iter(self.splits.held_out.values()))) / distributed.world_size()
        return OVERHEAD * min(times) * samples / self.batch_size


def metrics(split: str, outcome: EvaluationResult) -> dict[str, float]:
    """Return the metrics of an evaluation by name, such as val/accuracy."""
    row = {f"{split}/accuracy": outcome.accuracy, f"{split}/loss": outcome.loss}
    return row if outcome.top5 is None else row | {f"{split}/top5": outcome.top5}
