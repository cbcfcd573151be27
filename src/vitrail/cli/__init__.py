"""The command `vitrail`: one thin file per command, or per pair of small ones.

options.py has the options that commands share, console.py what they print with, live.py the view of
a training run. Options are dataclasses, and nothing here imports torch until a command runs, so
that help is fast. A `VitrailError` ends as one line and status 2; a bug keeps its traceback.
"""

import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from io import TextIOWrapper
from typing import Any

import tyro

from vitrail import __version__
from vitrail.cli.calibrate import Calibrate
from vitrail.cli.compare import Compare
from vitrail.cli.completion import Completion
from vitrail.cli.console import VERBOSITY, printable, verbosity
from vitrail.cli.dataset import Check, Pack
from vitrail.cli.doctor import Doctor
from vitrail.cli.evaluate import Evaluate
from vitrail.cli.export import Convert, Export
from vitrail.cli.fewshot import Fewshot, Teach
from vitrail.cli.inspect import Inspect
from vitrail.cli.listing import Models, Recipes
from vitrail.cli.options import REFUSED, STOPPED, UNMET, UnmetError, parse_options
from vitrail.cli.plan import Plan
from vitrail.cli.predict import Predict, Serve
from vitrail.cli.reproduce import Reproduce
from vitrail.cli.train import Demo, Finetune, Train
from vitrail.cli.vtab import Vtab
from vitrail.data.storage import allow_outside
from vitrail.errors import VitrailError, renamed, unknown

GROUPS: dict[str, dict[str, tuple[type, str]]] = {
    "Data": {
        "check": (Check, "find unreadable files, duplicates and leaks in a dataset"),
        "pack": (Pack, "write a dataset as .tar shards"),
    },
    "Training": {
        "demo": (Demo, "train a small model on a built-in dataset"),
        "train": (Train, "train a model from scratch"),
        "finetune": (Finetune, "fine-tune a pre-trained model"),
        "fewshot": (Fewshot, "fit a classifier to a few images per class"),
        "teach": (Teach, "add a class from a few images"),
        "models": (Models, "list the models"),
        "recipes": (Recipes, "list the training recipes"),
        "plan": (Plan, "estimate FLOPs, memory and time of a training run"),
    },
    "Evaluation": {
        "evaluate": (Evaluate, "accuracy, calibration, per-class metrics, mistakes"),
        "calibrate": (Calibrate, "calibrate for a target error rate (conformal prediction)"),
        "compare": (Compare, "compare two models on the same images"),
        "inspect": (Inspect, "attention, filters, position embeddings, explanations"),
        "vtab": (Vtab, "transfer to many small tasks (VTAB-1k protocol)"),
        "reproduce": (Reproduce, "tables and figures of the paper at laptop scale"),
    },
    "Deployment": {
        "predict": (Predict, "classify images"),
        "serve": (Serve, "serve models over HTTP, with a web page"),
        "export": (Export, "export to ONNX, torch.export or HTML"),
        "convert": (Convert, "convert between checkpoint formats"),
    },
    "Setup": {
        "doctor": (Doctor, "report hardware, packages, speed and problems"),
        "completion": (Completion, "set up shell completion"),
    },
}
COMMANDS = {name: entry[0] for group in GROUPS.values() for name, entry in group.items()}
WELCOME = f"""\
vitrail {__version__}: Vision Transformers, from a folder of images to a model that is
trained, evaluated, explained and deployed.

Get started
  vitrail demo                           train a small model in 3 minutes
  vitrail finetune images/ --minutes 5   your photos: one subfolder per class
  vitrail predict runs/images cat.jpg    classify an image
"""
EPILOG = """
vitrail COMMAND --help lists the options of a command. Every command has --quiet
and --verbose; most have --json."""
# Spellings of 0.1, which are not in the help.
OLD_OPTIONS = {
    "--ladder": "--search",
    "--no-ladder": "--no-search",
    "--max-pictures": "--max-images",
}
# OpenMP threads spin this often before they sleep. The default assumes an idle machine and makes
# everything ten times slower on a busy one; this value costs nothing on an idle one. It must be set
# before torch is imported.
SPIN = "20000"
QUIET, VERBOSE = ("--quiet", "-q"), ("--verbose", "-v")
SWITCHES = ("quiet", "verbose")  # options of every command
MAX_WORDS = 6  # of a path that was not quoted
SECRET_OPTION = "token"  # the option whose value is never printed


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")  # file names may be any bytes
    quiet, verbose = (any(word in argv for word in words) for words in (QUIET, VERBOSE))
    while argv and argv[0] in (*QUIET, *VERBOSE):  # they may come before the command
        del argv[0]
    if argv in (["--version"], ["-V"]):
        print(f"vitrail {__version__}")
        return 0
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(WELCOME)
        for group, commands in GROUPS.items():
            for number, (name, (_, summary)) in enumerate(commands.items()):
                print(f"{'' if number else group:12}{name:12}{summary}")
        print(EPILOG)
        return 0
    if quiet:  # before huggingface_hub is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with verbosity(quiet=quiet, verbose=verbose):
        return run(argv)


def run(argv: Sequence[str]) -> int:
    """Parse and run one command; return its exit status."""
    started = time.monotonic()
    try:
        command = parse(argv)
        if VERBOSITY.verbose:
            options = "".join(f"\n  {line}" for line in changed_options(command))
            print(f"vitrail {__version__}: {argv[0]}{options}", file=sys.stderr)
        with allow_outside(getattr(command, "allow_outside", False)):
            status = command.run()
        sys.stdout.flush()
    except VitrailError as error:
        if VERBOSITY.verbose:
            traceback.print_exc()
        counts = range(2, min(len(argv), MAX_WORDS) + 1)  # of arguments that may be one path
        joined = (" ".join(argv[i : i + n]) for n in counts for i in range(len(argv) - n + 1))
        path = next(filter(os.path.exists, joined), None)
        hint = f"; quote a path with spaces: {printable(shlex.quote(path))}" if path else ""
        print(f"vitrail: {printable(str(error))}{hint}", file=sys.stderr)
        return UNMET if isinstance(error, UnmetError) else REFUSED
    except KeyboardInterrupt:
        print("vitrail: interrupted", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # `vitrail models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if distributed := sys.modules.get("vitrail.distributed"):  # which imports torch
            distributed.shutdown()
    if VERBOSITY.verbose:
        print(f"vitrail: {time.monotonic() - started:.1f} seconds", file=sys.stderr)
    return status or 0


def parse(argv: Sequence[str]) -> Any:
    """Return the command with its options; defaults come from a recipe or a run, if given."""
    name, *options = argv
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS, "`vitrail --help` lists all commands")
    for number, word in enumerate(options):
        option, equals, value = word.partition("=")
        if option in OLD_OPTIONS:
            options[number] = f"{OLD_OPTIONS[option]}{equals}{value}"
            if not VERBOSITY.quiet:
                print(f"vitrail: {renamed(option, OLD_OPTIONS[option])}", file=sys.stderr)
    command = COMMANDS[name]
    default: Any = tyro.MISSING_NONPROP
    if issubclass(command, Train):
        default = command.defaults(options)
    colors = sys.stdout.isatty() and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    tyro._experimental_options["ansi_codes"] = colors  # tyro itself checks one of the three
    return parse_options(command, options, prog=f"vitrail {name}", default=default)


def changed_options(options: Any, prefix: str = "") -> Iterator[str]:
    """Yield `settings.optim.learning_rate = 0.001` for options that differ from their default."""
    for field in fields(options):
        value, name = getattr(options, field.name), f"{prefix}{field.name}"
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if is_dataclass(value):
            yield from changed_options(value, f"{name}.")
        elif value != default and field.name not in SWITCHES:
            yield f"{name} = {'...' if field.name == SECRET_OPTION else repr(value)}"
