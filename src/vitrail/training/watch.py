"""Who wants to know how a run goes: the command's live view, a notebook, a test."""

from collections.abc import Mapping
from typing import Any


class Watch:
    """Told everything, says nothing; a view overrides what it wants to show."""

    def say(self, line: str) -> None:
        """A fact, a choice or a warning, as one line for people."""

    def progress(self, done: int, images: int) -> None:
        """So many of the images of a pass before training, such as feature extraction, are done."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts at a step; `steps` may still change if the run has a time to keep."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A step was taken: step, steps, epoch, loss, grad_norm, learning_rate, image_size,
        images_per_second, seconds, seconds_left."""

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """An evaluation: step, epoch, seconds, and numbers such as val/accuracy."""

    def end(self) -> None:
        """The last step was taken, or the run was stopped."""
