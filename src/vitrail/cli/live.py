"""How a run looks in a terminal while it goes on; plain lines where there is none."""

import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from math import isfinite
from textwrap import wrap
from types import TracebackType
from typing import Any, Self

from vitrail.cli.text import MANNER
from vitrail.formatting import percent
from vitrail.training.callbacks import Callback

EVERY = 10.0  # seconds between plain lines, growing with the run
LONGEST_EVERY = 300.0
PER_SECOND = 4  # times that the view changes
MOST = 2000  # losses that are remembered; older ones as means of two, of four, …
BARS = "▁▂▃▄▅▆▇█"
CURVE = 40  # columns of the curve of losses


class Live(Callback):
    """A bar and a few numbers that change in place; `aside`, on standard error.

    Where there is no terminal it is lines without control codes; rich honors NO_COLOR. With
    --quiet there is nothing to see.
    """

    def __init__(self, *, aside: bool = False) -> None:
        from rich.console import Console

        self.console = Console(stderr=aside, highlight=False, quiet=MANNER.quiet)
        able = self.console.file.isatty() and not self.console.is_dumb_terminal
        self.terminal = able and not MANNER.quiet
        self.view: Any = None
        self.reading: Any = None  # the progress of feature extraction
        self.losses: list[float] = []
        self.verdicts: list[Mapping[str, Any]] = []
        self.row: Mapping[str, Any] = {}
        self.begun = self.told = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.on_train_end()

    def log(self, line: str) -> None:
        self.console.print(self.hanging(line), markup=False, soft_wrap=not self.terminal)

    def hanging(self, line: str) -> str:
        """On a terminal, what does not fit on a line goes on below it, two letters further in."""
        if not self.terminal:
            return line
        inner = " " * (len(line) - len(line.lstrip()) + 2)
        return "\n".join(wrap(line, self.console.width, subsequent_indent=inner)) or line

    def on_progress(self, done: int, total: int) -> None:
        from vitrail.cli.progress import Progress

        if self.reading is None:
            self.reading = Progress()
        self.reading(done, total)
        if done >= total:
            self.reading.done()

    def on_train_begin(self, step: int, steps: int) -> None:
        if self.terminal:
            from rich.live import Live as View

            self.view = View(self.draw(), console=self.console, refresh_per_second=PER_SECOND)
            self.view.start()

    def on_step(self, row: Mapping[str, Any]) -> None:
        self.row = row
        self.losses = shortened([*self.losses, row["loss"]])
        now = time.monotonic()
        if self.view is not None:
            if now - self.told >= 1 / PER_SECOND:
                self.told = now
                self.view.update(self.draw())
            return
        wait = min(LONGEST_EVERY, max(EVERY, (now - self.begun) / 20))
        if now - self.told >= wait or row["step"] == 1:
            self.told = now
            self.console.print(plain(row), markup=False, soft_wrap=True)

    def on_evaluate(self, row: Mapping[str, Any]) -> None:
        self.verdicts.append(row)
        if self.view is not None:
            self.view.update(self.draw())
        else:
            self.console.print(f"  {verdict(row)}", markup=False, soft_wrap=True)

    def on_train_end(self) -> None:
        if self.reading is not None:
            self.reading.done()
        if self.view is not None:
            self.view.update(self.draw())
            self.view.stop()
            self.view = None
        sys.stdout.flush()

    def draw(self) -> Any:
        """The bar, the numbers, the curve."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = self.row
        if not row:
            return Text("the first step …", style="dim")
        share = row["step"] / row["steps"]
        head = Table.grid(padding=(0, 1), expand=False)
        head.add_row(
            ProgressBar(total=1.0, completed=share, width=CURVE),
            Text(f"{share:4.0%}", style="bold"),
            Text(f"{clock(row['seconds_left'])} left", style="dim"),
        )
        table = Table.grid(padding=(0, 2))
        table.add_row(head)
        numbers = f"loss {row['loss']:.3f}   rate {row['learning_rate']:.1e}"
        speed = f"{row['images_per_second']:,.0f} pictures/s   {row['image_size']} px"
        table.add_row(Text(f"{numbers}   {speed}   step {row['step']:,} of {row['steps']:,}"))
        table.add_row(Text(f"{curve(self.losses)}  loss", style="cyan"))
        if self.verdicts:
            table.add_row(Text(verdict(self.verdicts[-1]), style="green"))
        return table


def plain(row: Mapping[str, Any]) -> str:
    """One line for a log."""
    return (
        f"step {row['step']:>6,} of {row['steps']:,}  loss {row['loss']:.3f}  "
        f"rate {row['learning_rate']:.1e}  {row['images_per_second']:,.0f} pictures/s  "
        f"{clock(row['seconds_left'])} left"
    )


def verdict(row: Mapping[str, Any]) -> str:
    """`val accuracy 91.2 %, loss 0.301, epoch 12.0`"""
    words = []
    for key, value in row.items():
        split, _, what = key.partition("/")
        if what == "accuracy":
            words.append(f"{split} accuracy {percent(value)}")
        elif what == "loss":
            words.append(f"{'' if words else split + ' '}loss {value:.3f}")
    return f"{', '.join(words)}, epoch {row['epoch']:.1f}"


def curve(values: list[float], columns: int = CURVE) -> str:
    """A row of bars, the means of equal stretches."""
    values = [value for value in values if isfinite(value)]
    if not values:
        return ""
    cells = min(columns, len(values))
    cuts = [len(values) * i // cells for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def shortened(values: list[float]) -> list[float]:
    """The same course in half as many values, once there are many."""
    if len(values) < MOST:
        return values
    return [(a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=False)]


def clock(seconds: float) -> str:
    """`1:05` or `2:10:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
