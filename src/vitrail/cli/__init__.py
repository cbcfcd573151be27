"""The command `vitrail`: one thin file per verb.

Options are dataclasses and nothing here imports torch until a command runs, so that help
answers at once. A `VitrailError` ends as one line and status 2; a bug keeps its traceback.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import make_dataclass
from inspect import getdoc
from textwrap import fill
from typing import Annotated, Any

import tyro

from vitrail import __version__
from vitrail.cli.check import Check
from vitrail.cli.completion import Completion
from vitrail.cli.convert import Convert
from vitrail.cli.demo import Demo
from vitrail.cli.doctor import Doctor
from vitrail.cli.evaluate import Evaluate
from vitrail.cli.export import Export
from vitrail.cli.fewshot import Fewshot
from vitrail.cli.inspect import Inspect
from vitrail.cli.models import Models
from vitrail.cli.pack import Pack
from vitrail.cli.plan import Plan
from vitrail.cli.predict import Predict
from vitrail.cli.recipes import Recipes
from vitrail.cli.reproduce import Reproduce
from vitrail.cli.serve import Serve
from vitrail.cli.status import REFUSED, STOPPED, UNMET, UnmetError
from vitrail.cli.teach import Teach
from vitrail.cli.text import MANNER, WIDTH, chosen, manner
from vitrail.cli.train import Finetune, Train, Training
from vitrail.cli.vtab import Vtab
from vitrail.cli.welcome import welcome
from vitrail.data.storage import allow_outside
from vitrail.errors import VitrailError, unknown

COMMANDS = {
    "check": Check,
    "completion": Completion,
    "convert": Convert,
    "demo": Demo,
    "doctor": Doctor,
    "evaluate": Evaluate,
    "export": Export,
    "fewshot": Fewshot,
    "finetune": Finetune,
    "inspect": Inspect,
    "models": Models,
    "pack": Pack,
    "plan": Plan,
    "predict": Predict,
    "recipes": Recipes,
    "reproduce": Reproduce,
    "serve": Serve,
    "teach": Teach,
    "train": Train,
    "vtab": Vtab,
}
# The threads of a matrix product wait for each other, turning in a loop so many times before they
# sleep. OpenMP's own number is for a machine of one's own: beside other work it makes everything
# ten times slower. This one costs nothing where nothing else runs. It must be set before torch.
SPIN = "20000"
QUIET, VERBOSE = ("--quiet", "-q"), ("--verbose", "-v")
# What every command takes: the name, how it is given, and what it does.
SWITCHES = {
    "quiet": (QUIET, "Print the result and errors, and nothing else."),
    "verbose": (VERBOSE, "Tell the options that were understood, and where an error comes from."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the status for the shell."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    argv = list(sys.argv[1:] if argv is None else argv)
    quiet, verbose = (any(word in argv for word in words) for words in (QUIET, VERBOSE))
    while argv and argv[0] in (*QUIET, *VERBOSE):  # before the command they mean the same
        del argv[0]
    if argv in (["--version"], ["-V"]):
        print(f"vitrail {__version__}")
        return 0
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(welcome())
        return 0
    if quiet:  # before huggingface_hub is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with manner(quiet=quiet, verbose=verbose):
        return run(argv)


def run(argv: Sequence[str]) -> int:
    """One command with its options, in the manner that was asked for; the status."""
    begun = time.monotonic()
    try:
        command = parse(argv)
        if MANNER.verbose:
            told = "".join(f"\n  {line}" for line in chosen(command))
            print(f"vitrail {__version__}: {argv[0]}{told}", file=sys.stderr)
        with allow_outside(getattr(command, "allow_outside", False)):
            status = command.run()
        sys.stdout.flush()
    except VitrailError as error:
        if MANNER.verbose:
            traceback.print_exc()
        print(f"vitrail: {error}", file=sys.stderr)
        return UNMET if isinstance(error, UnmetError) else REFUSED
    except KeyboardInterrupt:
        print("vitrail: stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # `vitrail models | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if MANNER.verbose:
        print(f"vitrail: {time.monotonic() - begun:.1f} seconds", file=sys.stderr)
    return status or 0


def parse(argv: Sequence[str]) -> Any:
    """The command and its options; one that begins with a recipe has other defaults."""
    name, *options = argv
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS, "`vitrail` tells which there are")
    command = with_switches(COMMANDS[name])
    training = issubclass(command, Training)
    usual: Any = command.beginning(argv) if training else tyro.MISSING_NONPROP
    colors = sys.stdout.isatty() and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    tyro._experimental_options["ansi_codes"] = colors  # tyro itself looks at one of the three
    called = f"vitrail {name}"
    return tyro.cli(command, prog=called, description=about(command), args=options, default=usual)


def about(command: type) -> str:
    """What help says first, in lines that tyro keeps: it joins those that are not indented."""
    parts = (getdoc(command) or "").split("\n\n")
    return "\n\n".join(fill(part, WIDTH, subsequent_indent=" ") for part in parts)


def with_switches(command: type) -> Any:
    """The command with the options that all have, so that help tells them too."""
    extra: list[Any] = []
    for name, (words, help) in SWITCHES.items():
        how = tyro.conf.arg(aliases=words[1:], help=help)
        extra.append((name, Annotated[bool, tyro.conf.FlagCreatePairsOff, how], False))
    made = make_dataclass(command.__name__, extra, bases=(command,), frozen=True, kw_only=True)
    made.__doc__ = command.__doc__
    return made
