"""Options that several commands share, exit statuses, and how tyro presents options in help."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import getdoc
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructTypeInfo,
)

from vitrail.checkpoints import builtin
from vitrail.cli.console import WIDTH, log_stderr, paragraph
from vitrail.data.preprocessing import Preset as PresetName
from vitrail.errors import ALIASES, ConfigError, DataError
from vitrail.export import EngineKind

if TYPE_CHECKING:
    from vitrail.prediction.predictor import Predictor

# Exit statuses; docs/commands.md has the table.
UNMET = 1  # the command ran, and the requested condition does not hold
REFUSED = 2  # nothing was done: one line on standard error says why, and what would work
STOPPED = 130  # Ctrl-C, or SIGTERM while training

DATA_HELP = (
    "A folder with one subfolder per class, a CSV list, .tar or .npz files, hf:owner/name, or "
    "builtin:sign-digits."
)
LAST = (  # options of several commands, which help lists last
    *("preprocessing", "engine", "merge", "data", "max_drop", "device"),
    *("allow_outside", "json", "quiet", "verbose"),
)
PRESET_HELP = "Override the model's preprocessing."
MODEL_HELP = "A bundle, a weights file, hf:owner/name, or builtin:vit-photos."
RUNNABLE_HELP = (
    "A bundle, a weights file, hf:owner/name, builtin:vit-photos, or an exported .onnx file."
)
ModelReference = Annotated[
    tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help=MODEL_HELP)
]
OptionalModel = Annotated[
    tyro.conf.Positional[str],
    tyro.conf.arg(metavar="[MODEL]", help=f"{MODEL_HELP[:-1]}, which is the default."),
]
RunnableModel = Annotated[
    tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help=RUNNABLE_HELP)
]
DataReference = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA", help=DATA_HELP)]
FileToWrite = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
FolderToWrite = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
Preset = Annotated[PresetName | None, tyro.conf.arg(help=PRESET_HELP)]
Device = Annotated[str, tyro.conf.arg(help="cpu, cuda or mps (default: the best available).")]
Json = Annotated[bool, tyro.conf.arg(help="Print one JSON object instead of text.")]
INT8_DATA_HELP = "int8: labeled dataset to measure the accuracy on (default: the training data)."
Int8Data = Annotated[str | None, tyro.conf.arg(help=INT8_DATA_HELP)]
MAX_DROP_HELP = "int8: largest accepted drop in accuracy, as a fraction."
MaxDrop = Annotated[float, tyro.conf.arg(help=MAX_DROP_HELP)]
BatchSize = Annotated[int, tyro.conf.arg(help="Images per batch.")]
Workers = Annotated[int | None, tyro.conf.arg(help="Data loading processes.")]
Overwrite = Annotated[bool, tyro.conf.arg(help="Replace the model in --out.")]


class UnmetError(DataError):
    """The command ran, and the requested condition does not hold: one line, status 1."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Options of every command."""

    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(aliases=("-q",))] = False
    """Print only results and errors."""
    verbose: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(aliases=("-v",))] = False
    """Print the parsed options, and errors with tracebacks."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(Command):
    """Options of commands that read datasets."""

    allow_outside: bool = False
    """Read listed files outside the list's own folder; only for lists you trust."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(DataOptions):
    """Options of commands that run a model in an inference engine."""

    preprocessing: Preset = None
    engine: EngineKind | None = None
    """Inference engine (default: torch); auto benchmarks for two seconds and takes the fastest."""
    merge: int = 0
    """Tokens merged per layer of a Vision Transformer (ToMe): faster, slightly less accurate;
    torch only."""
    device: Device = ""

    def open_predictor(
        self, model: str, *, data: str | None, max_drop: float, log: Any
    ) -> "Predictor":
        """Load a model for inference; `data` and `max_drop` limit what int8 may cost."""
        from vitrail.prediction.engines import AccuracyGuard
        from vitrail.prediction.predictor import Predictor

        guard = AccuracyGuard(data=data, max_drop=max_drop)
        chosen = options_of(self, "merge", "preprocessing", "device")
        return Predictor(model, engine=self.engine or "", guard=guard, log=log, **chosen)


def default_model(usage: str, *, log: Callable[[str], None] = log_stderr) -> str:
    """Return the built-in model, and log that it is used; `usage` is how to select another, {}."""
    if os.environ.get("RANK", "0") == "0":
        text = (
            f"starting from {builtin.DEFAULT}, which comes with vitrail; a larger model needs a "
            "download and more time, but is usually more accurate: "
        )
        for line in paragraph(text + usage.format(builtin.LARGER)):
            log(line)
    return builtin.DEFAULT


def options_of(command: object, *names: str) -> dict[str, Any]:
    """Return some options of a command as keyword arguments of the same names."""
    return {name: getattr(command, name) for name in names}


def parse_options(command: type, argv: list[str], *, prog: str, default: Any) -> Any:
    """Parse the options of one command. --help prints and exits; an error is a `ConfigError`."""
    errors = StringIO()
    # tyro joins lines of a description that are not indented.
    paragraphs = (getdoc(command) or "").split("\n\n")
    description = "\n\n".join(fill(text, WIDTH, subsequent_indent=" ") for text in paragraphs)
    try:
        with redirect_stderr(errors):
            return tyro.cli(
                command,
                prog=prog,
                description=description,
                args=argv,
                default=default,
                registry=HelpRegistry(),
            )
    except SystemExit as end:
        if end.code in (None, 0):
            raise
        settings = any(f.name == "settings" for f in fields(command))
        message = one_line(errors.getvalue(), argv, settings=settings)
        if message.startswith("unexpected argument") and hasattr(command, "origin"):
            message += "; pass a pre-trained model with --from"
        more = "" if message.endswith("?") else f"; see {prog} --help"
        raise ConfigError(message + more) from None


def one_line(box: str, argv: Sequence[str] = (), *, settings: bool = False) -> str:
    """Return the message of tyro's error box as one line: `--steps abc: expected INT`.

    The box has a title, then sections: the message, suggestions or the help of the option.
    `settings`: the command's options include those of training.
    """
    plain = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯]", "", box)
    inner = plain.partition("\n")[2].lstrip("─- \n")  # without the title
    section = re.split(r"[─-]{8}", inner)[0]
    message = " ".join(section.split())
    if message.startswith("Missing from"):
        names = r"^ +(--[\w.-]+(?: {[^}]+})?|[A-Z][A-Z=|]+)"  # an option with its choices
        return "missing " + ", ".join(re.findall(names, re.sub(r",\s+", ",", section), re.M))
    if wrong := re.match(r"Unrecognized options: ([^, ]+)", message):
        if not wrong[1].startswith("-"):
            rest = message[wrong.start(1) :]
            word = max(filter(rest.startswith, argv), key=len, default=wrong[1])  # with spaces
            return f"unexpected argument {word!r}"
        found = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", inner)
        similar = found[1] if found else None
        name = wrong[1].removeprefix("--").replace("-", "_")
        if settings and (similar is None or name.rpartition(".")[2] in ALIASES):
            from vitrail.training.recipes import closest

            if close := closest(name):
                similar = f"--{close.replace('_', '-')}"
        return f"unknown option {wrong[1]}" + (f"; did you mean {similar}?" if similar else "")
    if wrong := re.match(r"Missing value for argument '(\S+)'", message):
        return f"{wrong[1]} needs a value"
    if wrong := re.match(r"Error parsing (\S+): .*?(?:\['(.*?)'\]|'(.*?)')", message):
        option, value = wrong[1], (wrong[2] or wrong[3]).replace("'", "").replace(",", "")
        expected = re.search(rf"^ *{re.escape(option)} (\S.*?) *$", inner, re.M)
        return f"{option} {value}: expected {expected[1] if expected else 'another value'}"
    if wrong := re.match(r"invalid choice '(.*)' for argument '(.*)'.*\((.*)\)", message):
        choices = wrong[3].replace("'", "").removesuffix(", None").removesuffix(",")
        return f"{wrong[2]} {wrong[1]}: expected one of {choices}"
    return message[:1].lower() + message[1:].rstrip(".")


class HelpRegistry(ConstructorRegistry):
    """tyro's rules, with help that hides None and empty defaults.

    `--minutes FLOAT` instead of `--minutes {None}|FLOAT … (default: None)`. The value None is still
    accepted: it resets a setting of a recipe.
    """

    def __init__(self) -> None:
        super().__init__()
        self.delegating = False  # to tyro's own rule for the same type
        self.struct_rule(self.hide_empty_defaults)
        self.primitive_rule(self.hide_none)

    def hide_empty_defaults(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        spec = self.delegate(self.get_struct_spec, info)
        if not isinstance(spec, StructConstructorSpec):
            return None
        empty = ("None", "", "''", "False")
        hint = tyro.conf.arg(help_behavior_hint=lambda x: "" if x in empty else f"(default: {x})")
        order = {name: number for number, name in enumerate(LAST)}
        fields = []
        for field in sorted(spec.fields, key=lambda field: order.get(field.name, -1)):
            help = field.helptext
            help = partial(one_paragraph, help) if callable(help) else help
            fields.append(replace(field, type=Annotated[field.type, hint], helptext=help))
        return replace(spec, fields=tuple(fields))

    def hide_none(self, info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        spec = self.delegate(self.get_primitive_spec, info)
        if not isinstance(spec, PrimitiveConstructorSpec) or "{None" not in spec.metavar:
            return None
        metavar = spec.metavar.replace("{None}|", "").replace("{None,", "{")
        metavar = re.sub(r"^\{(\[.*\]|[A-Z ]+)\}$", r"\1", metavar)
        listed = re.search(r"\{(.*?)\}", metavar)  # in order, unlike tyro's; also of a sequence
        choices = spec.choices and listed and (*listed[1].split(","), "None")
        return replace(spec, metavar=metavar, choices=choices)

    def delegate(self, rule: Any, info: Any) -> Any:
        if self.delegating:
            return None
        self.delegating = True
        try:
            return rule(info)
        finally:
            self.delegating = False


def one_paragraph(help: Callable[[], str | None]) -> str | None:
    """Join the lines of a docstring."""
    text = help()
    return text and " ".join(text.split())
