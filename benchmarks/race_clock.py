"""The clock of a race, and the referee who stops it to see how good a model is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LOOKS = 3  # at a model, evenly spaced in time; the last is the end
BATCH = 250  # pictures at once when a model is judged


class Clock:
    """Seconds of training; what happens while it is stopped does not count."""

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


class Referee:
    """Tells when the time is over, and keeps the curve of accuracy over seconds of training."""

    def __init__(self, images: Tensor, labels: Tensor, seconds: float) -> None:
        self.images, self.labels = images, labels
        self.seconds = seconds
        self.curve: list[tuple[float, float]] = []
        self.steps = 0
        self.start()

    def start(self) -> None:
        """Now the first step is about to be taken."""
        self.clock = Clock()

    def progress(self) -> float:
        """The share of the time that is used: what schedules go by."""
        return min(1.0, self.clock.elapsed() / self.seconds)

    def goes_on(self, predict: Callable[[Tensor], Tensor]) -> bool:
        """To be asked after each step; looks at the model when it is time to."""
        self.steps += 1
        elapsed = self.clock.elapsed()
        due = min(LOOKS, int(LOOKS * elapsed / self.seconds)) - len(self.curve)
        if due > 0:
            with self.clock.stopped():  # one look counts for all that a long step has missed
                self.curve += due * [(round(elapsed, 3), self.accuracy(predict))]
        return elapsed < self.seconds

    def accuracy(self, predict: Callable[[Tensor], Tensor]) -> float:
        with torch.inference_mode():
            found = torch.cat([predict(part).argmax(1) for part in self.images.split(BATCH)])
        return float((found == self.labels).double().mean())

    def result(self) -> dict[str, object]:
        seconds, accuracy = self.curve[-1]
        return {
            "accuracy": accuracy,
            "seconds": seconds,
            "steps": self.steps,
            "curve": self.curve,
            "judged": len(self.labels),
        }
