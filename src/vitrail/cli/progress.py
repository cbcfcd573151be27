"""Progress of a pass over images: how many, how fast, how long it still takes."""

import os
import sys
import time
from collections import deque
from typing import Any, Self

from vitrail.cli.live import PER_SECOND, clock
from vitrail.cli.text import MANNER

EVERY = 30.0  # seconds between lines where there is no terminal
RECENT = 10.0  # seconds that the speed is measured over
BAR = 24  # columns


class Progress:
    """A callback that shows progress on standard error; as a context manager it cleans up.

    A line that changes in place on a terminal, elsewhere a plain line now and then; nothing with
    --quiet. It may be used for several passes in a row: each begins with a smaller number.
    """

    def __init__(self, what: str = "images") -> None:
        self.what = what
        self.view: Any = None
        self.shown = time.monotonic()
        self.marks: deque[tuple[float, int]] = deque()  # when how many were done, lately

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.done()

    def __call__(self, done: int, total: int | None = None) -> None:
        now = time.monotonic()
        if self.marks and done < self.marks[-1][1]:
            self.marks.clear()
        if not self.marks or now - self.marks[-1][0] >= 1 / PER_SECOND:
            self.marks.append((now, done))
        while len(self.marks) > 2 and now - self.marks[1][0] > RECENT:
            self.marks.popleft()
        terminal = self.view is not None or is_terminal()
        if MANNER.quiet or now - self.shown < (1 / PER_SECOND if terminal else EVERY):
            return
        self.shown = now
        words = self.words(done, total, now)
        if terminal:
            self.draw(words, done, total)
        else:
            print(words, file=sys.stderr, flush=True)

    def words(self, done: int, total: int | None, now: float) -> str:
        """`1,216 of 5,000 images, 182 images/s, 0:21 left`; the speed once it is known."""
        words = f"{done:,}{'' if total is None else f' of {total:,}'} {self.what}"
        begun, before = self.marks[0]
        if done == before:
            return words
        speed = (done - before) / (now - begun)
        words += f", {speed:,.0f} images/s" if speed >= 10 else f", {speed:.1f} images/s"
        return words if total is None else f"{words}, {clock((total - done) / speed)} left"

    def draw(self, words: str, done: int, total: int | None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        line = Table.grid(padding=(0, 1))
        if total:
            line.add_row(ProgressBar(total=total, completed=done, width=BAR), words)
        else:
            line.add_row(words)
        if self.view is None:  # standard output is left alone: it may be a pipe
            self.view = Live(
                console=Console(stderr=True, highlight=False),
                auto_refresh=False,
                redirect_stdout=False,
                transient=True,
            )
            self.view.start()
        self.view.update(line, refresh=True)

    def done(self) -> None:
        """Take the line away; another call draws it again."""
        if self.view is not None:
            self.view.stop()
            self.view = None


def is_terminal() -> bool:
    """Whether a line on standard error can be changed in place."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
