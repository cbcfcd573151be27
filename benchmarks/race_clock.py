"""Training time without evaluation, and the accuracy over it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

EVALUATIONS = 3  # per run, evenly spaced in time; the last is at the end
BATCH = 250  # images per batch of the evaluation


class Clock:
    """Seconds of training, not counting the time while it is stopped."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.begun = now()

    def elapsed(self) -> float:
        return self.now() - self.begun

    @contextmanager
    def stopped(self) -> Iterator[None]:
        stop = self.now()
        yield
        self.begun += self.now() - stop


class AccuracyClock:
    """Ends a run on time and records accuracy over seconds of training."""

    def __init__(self, images: Tensor, labels: Tensor, seconds: float) -> None:
        self.images, self.labels = images, labels
        self.seconds = seconds
        self.curve: list[tuple[float, float]] = []
        self.steps = 0
        self.start()

    def start(self) -> None:
        """Start the clock right before the first step."""
        self.clock = Clock()

    def progress(self) -> float:
        """Return the fraction of the time used, for schedules."""
        return min(1.0, self.clock.elapsed() / self.seconds)

    def keep_training(self, predict: Callable[[Tensor], Tensor]) -> bool:
        """Return whether time is left after a step; evaluate the model when due."""
        self.steps += 1
        elapsed = self.clock.elapsed()
        due = min(EVALUATIONS, int(EVALUATIONS * elapsed / self.seconds)) - len(self.curve)
        if due > 0:
            with self.clock.stopped():  # one evaluation counts for all that a long step missed
                self.curve += due * [(round(elapsed, 3), self.accuracy(predict))]
        return elapsed < self.seconds

    def accuracy(self, predict: Callable[[Tensor], Tensor]) -> float:
        with torch.inference_mode():
            predicted = torch.cat([predict(part).argmax(1) for part in self.images.split(BATCH)])
        return float((predicted == self.labels).double().mean())

    def result(self) -> dict[str, object]:
        seconds, accuracy = self.curve[-1]
        return {
            "accuracy": accuracy,
            "seconds": seconds,
            "steps": self.steps,
            "curve": self.curve,
            "judged": len(self.labels),
        }
