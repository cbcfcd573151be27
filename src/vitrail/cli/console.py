"""What commands print: log lines, paragraphs, tables, the progress of a pass over images.

Results and errors are printed; everything else goes through `log`, `log_stderr` or `Progress`,
which print nothing with --quiet.
"""

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from textwrap import wrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.evaluation.results import EvaluationResult

WIDTH = 80  # columns of everything that is printed
REFRESH_RATE = 4  # updates per second on a terminal
LOG_INTERVAL = 30.0  # seconds between progress lines where there is no terminal
SPEED_WINDOW = 10.0  # seconds over which the speed is measured
BAR_WIDTH = 24
VERBOSITY = SimpleNamespace(quiet=False, verbose=False)  # of the command that is running


@contextmanager
def verbosity(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Set --quiet and --verbose while a command runs, and print what the library logs."""
    VERBOSITY.quiet, VERBOSITY.verbose = quiet, verbose
    logger, handler = logging.getLogger("vitrail"), ConsoleHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        VERBOSITY.quiet = VERBOSITY.verbose = False
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


class ConsoleHandler(logging.Handler):
    """Prints log records to standard error: warnings as one line, others wrapped."""

    def emit(self, record: logging.LogRecord) -> None:
        text = printable_lines(record.getMessage())
        if record.levelno < logging.WARNING:
            text = "\n".join(map(wrap_line, text.split("\n")))
        print(text, file=sys.stderr, flush=True)


def log(line: str = "") -> None:
    """Print what is being done, or what to do next; nothing with --quiet."""
    if not VERBOSITY.quiet:
        print(printable_lines(line), flush=True)


def log_stderr(line: str) -> None:
    """Log where standard output is reserved for the result."""
    if not VERBOSITY.quiet:
        print(printable_lines(line), file=sys.stderr, flush=True)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(printable(line))


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def note_lines(notes: Iterable[str], skipped: Mapping[str, str] = {}) -> Iterator[str]:
    """The notes of a result, and how many images could not be read."""
    for note in notes:
        yield from paragraph(f"  note: {note}", 4)
    if skipped:
        name, reason = next(iter(skipped.items()))
        several = f"{len(skipped):,} unreadable images, such as"
        images = "1 unreadable image," if len(skipped) == 1 else several
        yield from paragraph(f"  {images} {name}: {reason}", 4)


def printable(text: str) -> str:
    """Replace control characters, which file and class names may contain."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def paragraph(text: str, indent: int = 2) -> list[str]:
    """Wrap a text at 80 columns; lines after the first are indented."""
    return wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def wrap_line(line: str, width: int = WIDTH) -> str:
    """Wrap a log line that is too long, with a hanging indent; words such as paths stay whole."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    lines = wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) or line


def table(
    rows: Iterable[Sequence[str]], align: str, head: Sequence[str] = (), *, indent: int = 0
) -> list[str]:
    """Lay out rows in 80 columns, one letter of `align` per column.

    "l" is left-aligned and shortened if there is no space, "w" is left-aligned and wrapped, "r" is
    right-aligned.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(head))
    for column, letter in enumerate(align):
        justify = "right" if letter == "r" else "left"
        # rich reduces the width of other columns before those of numbers, which have no_wrap.
        grid.add_column(Text(head[column]) if head else "", justify=justify, no_wrap=letter == "r")
    for row in rows:
        cells = zip(row, align, strict=True)
        grid.add_row(
            *(Text(printable(text), no_wrap=a != "w", overflow="ellipsis") for text, a in cells)
        )
    text = StringIO()
    Console(file=text, width=WIDTH - indent, color_system=None, legacy_windows=False).print(grid)
    return [" " * indent + line.rstrip() for line in text.getvalue().splitlines()]


def clock(seconds: float) -> str:
    """`1:05` or `2:10:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def accuracy_line(split: str, result: "EvaluationResult") -> str:
    """`test accuracy 84.7 % (n=367, 95 % CI 80.7-88.1)`"""
    from vitrail.evaluation.metrics import wilson_interval

    line = f"{split} accuracy {percent(result.accuracy)} (n={result.samples:,}"
    if result.samples:
        interval = wilson_interval(round(result.accuracy * result.samples), result.samples)
        low, high = (100 * bound for bound in interval)
        line += f", 95 % CI {low:.1f}-{high:.1f}"
    return f"{line})"


class Progress(AbstractContextManager["Progress"]):
    """A callback that shows the progress of a pass over images on standard error.

    One line that is updated on a terminal, elsewhere a new line every 30 seconds. It may be used
    for several passes in a row: each begins with a smaller number. As a context manager it removes
    the line at the end.
    """

    def __init__(self, what: str = "images") -> None:
        self.what = what
        self.view: Any = None
        self.shown = time.monotonic()
        self.marks: deque[tuple[float, int]] = deque()  # recent (time, images done)

    def __exit__(self, *error: object) -> None:
        self.done()

    def __call__(self, done: int, total: int | None = None, *, what: str = "") -> None:
        now, self.what = time.monotonic(), what or self.what
        if self.marks and done < self.marks[-1][1]:
            self.marks.clear()
        if not self.marks or now - self.marks[-1][0] >= 1 / REFRESH_RATE:
            self.marks.append((now, done))
        while len(self.marks) > 2 and now - self.marks[1][0] > SPEED_WINDOW:
            self.marks.popleft()
        can_update = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        terminal = self.view is not None or can_update
        if VERBOSITY.quiet or now - self.shown < (1 / REFRESH_RATE if terminal else LOG_INTERVAL):
            return
        self.shown = now
        text = self.text(done, total, now)
        if terminal:
            self.draw(text, done, total)
        else:
            print(text, file=sys.stderr, flush=True)

    def text(self, done: int, total: int | None, now: float) -> str:
        """`1,216 of 5,000 images, 182 images/s, 0:21 left`; the speed once it is known."""
        text = f"{done:,}{'' if total is None else f' of {total:,}'} {self.what}"
        begun, before = self.marks[0]
        if done == before:
            return text
        speed = (done - before) / (now - begun)
        text += f", {speed:,.0f} images/s" if speed >= 10 else f", {speed:.1f} images/s"
        return text if total is None else f"{text}, {clock((total - done) / speed)} left"

    def draw(self, text: str, done: int, total: int | None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        line = Table.grid(padding=(0, 1))
        if total:
            line.add_row(ProgressBar(total=total, completed=done, width=BAR_WIDTH), text)
        else:
            line.add_row(text)
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
        """Remove the line; another call draws it again."""
        if self.view is not None:
            self.view.stop()
            self.view = None
