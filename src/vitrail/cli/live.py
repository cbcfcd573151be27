"""The view of a training run in a terminal, and plain lines where there is none."""

import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from math import isfinite
from typing import Any

from vitrail.cli.console import (
    REFRESH_RATE,
    VERBOSITY,
    WIDTH,
    Progress,
    clock,
    printable,
    wrap_line,
)
from vitrail.formatting import percent
from vitrail.training.callbacks import Callback

MIN_INTERVAL, MAX_INTERVAL = 10.0, 300.0  # seconds between plain lines, growing with the run
MAX_LOSSES = 2000  # kept for the curve; above it, pairs are averaged
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40


class Live(Callback, AbstractContextManager["Live"]):
    """A progress bar and metrics that are updated in place, on standard error with `stderr`.

    Without a terminal it prints lines without control codes; rich honors NO_COLOR. With --quiet
    it prints nothing.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        from rich.console import Console

        self.console = Console(stderr=stderr, highlight=False, quiet=VERBOSITY.quiet)
        can_update = self.console.file.isatty() and not self.console.is_dumb_terminal
        self.terminal = can_update and not VERBOSITY.quiet
        self.view: Any = None
        self.reading: Progress | None = None  # the progress of feature extraction
        self.begun = self.shown = time.monotonic()
        self.losses: list[float] = []
        self.evaluation: Mapping[str, Any] = {}
        self.row: Mapping[str, Any] = {}

    def __exit__(self, *error: object) -> None:
        self.on_train_end()

    def log(self, line: str) -> None:
        line = wrap_line(printable(line), self.console.width if self.terminal else WIDTH)
        self.console.print(line, markup=False, soft_wrap=not self.terminal)

    def on_progress(self, done: int, total: int) -> None:
        if self.reading is None:
            self.reading = Progress()
        self.reading(done, total)
        if done >= total:
            self.reading.done()

    def on_train_begin(self, step: int, steps: int) -> None:
        self.losses, self.evaluation, self.row = [], {}, {}
        if self.terminal:
            from rich.live import Live as View

            self.view = View(self.draw(), console=self.console, refresh_per_second=REFRESH_RATE)
            self.view.start()

    def on_step(self, row: Mapping[str, Any]) -> None:
        self.row = row
        self.losses.append(row["loss"])
        if len(self.losses) >= MAX_LOSSES:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=False)
            self.losses = [(a + b) / 2 for a, b in pairs]
        now = time.monotonic()
        if self.view is not None:
            if now - self.shown >= 1 / REFRESH_RATE:
                self.shown = now
                self.view.update(self.draw())
            return
        interval = min(MAX_INTERVAL, max(MIN_INTERVAL, (now - self.begun) / 20))
        if now - self.shown >= interval or row["step"] == 1:
            self.shown = now
            self.console.print(step_line(row), markup=False, soft_wrap=True)

    def on_evaluate(self, row: Mapping[str, Any]) -> None:
        self.evaluation = row
        if self.view is not None:
            self.view.update(self.draw())
        else:
            line = wrap_line(f"  {evaluation_line(row)}")
            self.console.print(line, markup=False, soft_wrap=True)

    def on_train_end(self) -> None:
        if self.reading is not None:
            self.reading.done()
        if self.view is not None:
            self.view.update(self.draw())
            self.view.stop()
            self.view = None
        sys.stdout.flush()

    def draw(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = self.row
        if not row:
            return Text("waiting for the first step …", style="dim")
        share = row["step"] / row["steps"]
        head = Table.grid(padding=(0, 1), expand=False)
        head.add_row(
            ProgressBar(total=1.0, completed=share, width=CURVE_WIDTH),
            Text(f"{share:4.0%}", style="bold"),
            Text(f"{clock(row['seconds_left'])} left", style="dim"),
        )
        grid = Table.grid(padding=(0, 2))
        grid.add_row(head)
        metrics = f"loss {row['loss']:.3f}   lr {row['learning_rate']:.1e}"
        speed = f"{row['images_per_second']:,.0f} images/s   {row['image_size']} px"
        grid.add_row(Text(f"{metrics}   {speed}   step {row['step']:,} of {row['steps']:,}"))
        grid.add_row(Text(f"{curve(self.losses)}  loss", style="cyan"))
        if self.evaluation:
            grid.add_row(Text(evaluation_line(self.evaluation), style="green"))
        return grid


def step_line(row: Mapping[str, Any]) -> str:
    """`step    120 of 1,000  loss 1.234  lr 3.0e-04  256 images/s  1:05 left`"""
    return (
        f"step {row['step']:>6,} of {row['steps']:,}  loss {row['loss']:.3f}  "
        f"lr {row['learning_rate']:.1e}  {row['images_per_second']:,.0f} images/s  "
        f"{clock(row['seconds_left'])} left"
    )


def evaluation_line(row: Mapping[str, Any]) -> str:
    """`val accuracy 91.2 %, loss 0.301, epoch 12.0`"""
    parts = []
    for key, value in row.items():
        split, _, metric = key.partition("/")
        if metric == "accuracy":
            parts.append(f"{split} accuracy {percent(value)}")
        elif metric == "loss":
            parts.append(f"{'' if parts else split + ' '}loss {value:.3f}")
    return f"{', '.join(parts)}, epoch {row['epoch']:.1f}"


def curve(values: list[float], columns: int = CURVE_WIDTH) -> str:
    """Draw means over equal parts of the values as a row of bars."""
    values = [value for value in values if isfinite(value)]
    if not values:
        return ""
    cells = min(columns, len(values))
    cuts = [len(values) * i // cells for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
