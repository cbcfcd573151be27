"""Callbacks of a training run, and its metrics log. This file does not import torch."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.data.storage import write_atomic
from vitrail.errors import DataError
from vitrail.training.recipes import METRICS

if TYPE_CHECKING:
    from vitrail.training.loop import StepResult, TrainState

Row = dict[str, Any]

LOGGED_ROWS = 400  # of metrics.jsonl for the steps of a run
SPEED_WINDOW = 20  # steps over which speed is averaged


class Callback:
    """Receives the events of a run; override what you need."""

    def log(self, line: str) -> None:
        """Called with each log line."""

    def on_progress(self, done: int, total: int) -> None:
        """Images processed by a pass before training, such as feature extraction."""

    def on_train_begin(self, step: int, steps: int) -> None:
        """Training starts at `step`; `steps` may still change if there is a time budget."""

    def on_step(self, row: Mapping[str, Any]) -> None:
        """A step was taken: step, steps, epoch, loss, grad_norm, learning_rate, image_size,
        images_per_second, seconds, seconds_left."""

    def on_evaluate(self, row: Mapping[str, Any]) -> None:
        """An evaluation: step, epoch, seconds, and metrics such as val/accuracy."""

    def on_train_end(self) -> None:
        """The last step was taken, or the run was stopped."""


class Watch(Callback):
    """Deprecated alias of `Callback` with the method names of 0.1; removed in 0.3."""

    def __init_subclass__(cls) -> None:
        for old, new in OLD_NAMES.items():
            if old in vars(cls):
                setattr(cls, new, vars(cls)[old])


OLD_NAMES = {"say": "log", "progress": "on_progress", "begin": "on_train_begin"}
OLD_NAMES |= {"step": "on_step", "evaluated": "on_evaluate", "end": "on_train_end"}
for old_name, new_name in OLD_NAMES.items():
    setattr(Watch, old_name, getattr(Callback, new_name))


class TrialCallback(Callback):
    """Forwards the steps of a trial, but not its log, and records when they were taken."""

    def __init__(self, callback: Callback) -> None:
        self.on_train_begin, self.on_train_end = callback.on_train_begin, callback.on_train_end
        self.on_evaluate, self.forward = callback.on_evaluate, callback.on_step
        self.first = self.last = 0.0  # seconds from the start to the end of that step

    def on_step(self, row: Mapping[str, Any]) -> None:
        self.first = self.first or row["seconds"]
        self.last = row["seconds"]
        self.forward(row)


class MetricsLog:
    """Timing and metrics of each step; metrics.jsonl and TensorBoard events if there is a folder.

    Rows after `after_step`, of steps that will be taken again, are dropped from an earlier log.
    """

    def __init__(
        self, folder: Path | None, *, after_step: int = 0, steps: int = 1, tensorboard: bool = True
    ) -> None:
        self.path = None if folder is None else folder / METRICS
        self.tensorboard = tensorboard
        self.events: Any = None
        self.every = max(1, steps // LOGGED_ROWS)
        self.step_seconds = 0.0  # of the last step
        self.total_seconds = 0.0  # of all steps
        self.rewind(after_step)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`, and restart the clock: the next steps are taken again."""
        self.close()
        self.rows: list[Row] = []
        if self.path is not None:
            self.rows = [row for row in read_rows(self.path) if row["step"] <= step]
            write_atomic(self.path, "".join(map(to_line, self.rows)))
            with suppress(ImportError):  # pip install 'vitrail[track]'
                if self.tensorboard:
                    from torch.utils.tensorboard import SummaryWriter

                    # TensorBoard hides earlier events from `purge_step` on.
                    path = str(self.path.with_name("tensorboard"))
                    self.events = SummaryWriter(path, purge_step=step + 1)
        self.losses: list[float] = []  # since the last row that was written
        self.times: list[float] = []
        self.start_step()

    def start_step(self) -> None:
        self.step_started = time.monotonic()

    def end_step(
        self, state: "TrainState", result: "StepResult", *, elapsed: float, epoch: float
    ) -> Row:
        """Return the metrics of the step that was just taken; log some, with the mean loss."""
        now = time.monotonic()
        self.step_seconds, self.step_started = now - self.step_started, now
        self.total_seconds += self.step_seconds
        self.times = [*self.times[1 - SPEED_WINDOW :], self.step_seconds]
        pace = sum(self.times) / len(self.times)
        schedule = state.schedule
        row = {
            "step": state.step,
            "steps": schedule.steps,
            "loss": result.loss,
            "grad_norm": round(result.grad_norm, 6),
            "learning_rate": max(g["lr"] for g in state.optimizers[-1].param_groups),
            "images_per_second": round((schedule.settings.batch_size or 1) / pace, 2),
            "image_size": schedule.image_size(state.step - 1),
            "seconds": round(elapsed, 3),
            "seconds_left": round(pace * (schedule.steps - state.step), 1),
            "epoch": round(epoch, 4),
        }
        self.losses.append(result.loss)
        if state.step % self.every == 0 or state.step >= schedule.steps:
            self.add(row | {"loss": sum(self.losses) / len(self.losses)})
            self.losses.clear()
        return row

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row: it has a step, and metrics."""
        if self.path is None:
            return
        self.rows.append(dict(row))
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(to_line(row))
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from None
        if self.events is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self.events.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


def read_rows(path: Path, key: str = "step") -> list[Row]:
    """Return the rows that have an integer `key`; a line that a crash cut off is skipped."""
    if not path.exists():
        return []
    rows = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get(key), int):
            rows.append(row)
    return rows


def to_line(row: Mapping[str, Any]) -> str:
    finite = {k: v if not isinstance(v, float) or isfinite(v) else None for k, v in row.items()}
    return json.dumps(finite) + "\n"
