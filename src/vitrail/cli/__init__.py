"""The command `vitrail`: one thin file per verb.

Options are dataclasses and nothing here imports torch until a command runs, so that help
answers at once. A `VitrailError` ends as one line and status 2; a bug keeps its traceback.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro

from vitrail import __version__
from vitrail.cli.check import Check
from vitrail.cli.convert import Convert
from vitrail.cli.demo import Demo
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
from vitrail.cli.teach import Teach
from vitrail.cli.train import Finetune, Train, Training
from vitrail.cli.vtab import Vtab
from vitrail.errors import VitrailError

COMMANDS = {
    "check": Check,
    "convert": Convert,
    "demo": Demo,
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
DESCRIPTION = "Vision Transformers, faithful to the paper. `vitrail --version` tells the version."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the status for the shell."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) in (["--version"], ["-V"]):
        print(f"vitrail {__version__}")
        return 0
    try:
        command = tyro.cli(
            Union[*(named(name, argv) for name in COMMANDS)],  # type: ignore[arg-type]
            prog="vitrail",
            description=DESCRIPTION,
            args=argv or ["--help"],
        )
        status = command.run()
        sys.stdout.flush()
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vitrail: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `vitrail models | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status or 0


def named(name: str, argv: Sequence[str]) -> Any:
    """A command for tyro; one that begins with a recipe has other defaults."""
    command = COMMANDS[name]
    if argv and argv[0] == name and issubclass(command, Training):
        return Annotated[command, tyro.conf.subcommand(name, default=command.beginning(argv))]
    return Annotated[command, tyro.conf.subcommand(name)]
