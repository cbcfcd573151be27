"""What commands write for people beside their results: progress, paragraphs, plain letters."""

import sys
import time
from dataclasses import dataclass, field
from textwrap import wrap

WIDTH = 80
EVERY = 5.0  # seconds between lines of progress; a tenth of it on a terminal


@dataclass
class Progress:
    """How far it is: one line that changes on a terminal, else a new line now and then."""

    what: str = "pictures"
    last: float = field(default_factory=time.monotonic)
    shown: bool = False

    def __call__(self, done: int, total: int | None = None) -> None:
        terminal, now = sys.stderr.isatty(), time.monotonic()
        if now - self.last < (EVERY / 10 if terminal else EVERY):
            return
        self.last, self.shown = now, terminal
        of = "" if total is None else f" of {total:,}"
        line = f"{done:,}{of} {self.what}"
        print(f"\r{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def done(self) -> None:
        if self.shown:
            print(f"\r{' ' * (WIDTH - 1)}\r", end="", file=sys.stderr, flush=True)


def paragraph(text: str, indent: int = 2) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def printable(text: str) -> str:
    """File names may hold anything; a terminal should not."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
