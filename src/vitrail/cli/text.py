"""What commands write for people beside their results: paragraphs, plain letters.

What is no result goes through `tell`, `aside` or `Progress` (progress.py), which keep still when a
command is called with --quiet. Results and errors are printed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.evaluation.results import EvaluationResult

WIDTH = 80
SECRET = "token"  # the option that nobody else should read


@dataclass
class Manner:
    """How much is told: the switches of all commands."""

    quiet: bool = False
    verbose: bool = False


MANNER = Manner()  # of the command that is running


@contextmanager
def manner(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """For as long as a command runs."""
    MANNER.quiet, MANNER.verbose = quiet, verbose
    try:
        yield
    finally:
        MANNER.quiet = MANNER.verbose = False


def tell(line: str = "") -> None:
    """Say what is going on, or what to do next; not with --quiet."""
    if not MANNER.quiet:
        print(line, flush=True)


def aside(line: str) -> None:
    """The same where standard output belongs to the result."""
    if not MANNER.quiet:
        print(line, file=sys.stderr, flush=True)


def chosen(options: Any, prefix: str = "") -> Iterator[str]:
    """`settings.optim.learning_rate = 0.001`: the options that are not what they usually are."""
    for one in fields(options):
        value, name = getattr(options, one.name), f"{prefix}{one.name}"
        usual = one.default_factory() if one.default_factory is not MISSING else one.default
        if is_dataclass(value):
            yield from chosen(value, f"{name}.")
        elif value != usual and not hasattr(MANNER, one.name):
            yield f"{name} = {'...' if one.name == SECRET else repr(value)}"


def paragraph(text: str, indent: int = 2) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def printable(text: str) -> str:
    """File names may hold anything; a terminal should not."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def accuracy_line(split: str, result: "EvaluationResult") -> str:
    """`test accuracy 84.7 % (n=367, 95 % CI 80.7-88.1)`"""
    from vitrail.evaluation.bootstrap import wilson_interval

    line = f"{split} accuracy {percent(result.accuracy)} (n={result.samples:,}"
    if result.samples:
        interval = wilson_interval(round(result.accuracy * result.samples), result.samples)
        low, high = (100 * bound for bound in interval)
        line += f", 95 % CI {low:.1f}-{high:.1f}"
    return f"{line})"
