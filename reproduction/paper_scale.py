"""`--scale full`: the paper's own runs (paper_runs.toml), checked without data or memory.

Every model is built on the meta device with its objective and optimizer; its parameters, tokens,
steps and FLOPs are counted; and the command that would run it is written.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from reproduction.report import TEXT, Report, Table
from reproduction.tables import trunk_cost
from vitrail.errors import ConfigError
from vitrail.models.config import Config, VitConfig
from vitrail.models.registry import configuration
from vitrail.models.vit import build
from vitrail.planning.flops import ACCELERATORS, DAY, EXA, TRAINING, UTILIZATION
from vitrail.training.config import Settings
from vitrail.training.objectives import make_objective
from vitrail.training.optim import make_optimizers
from vitrail.training.recipes import grid, read_recipe
from vitrail.training.schedules import Schedule

DATA: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("paper_runs.toml").read_text(encoding="utf-8")
)
DEVICES = 8
A100 = next(one for one in ACCELERATORS if one.name == "A100")
LARGEST_RATE = 0.06  # of fine-tuning on ImageNet, for ResNets and hybrids only (appendix B.1.1)


@dataclass(frozen=True)
class PaperRun:
    """One run of the paper: a recipe with changes, on a dataset."""

    label: str
    recipe: str
    settings: Settings  # the recipe's, changed
    data: str  # folder
    images: float
    classes: int
    start: "PaperRun | None" = None  # whose model is fine-tuned
    note: str = ""

    @property
    def steps(self) -> int:
        assert self.settings.batch_size is not None
        epochs = self.settings.epochs or 0.0
        return self.settings.steps or round(epochs * self.images / self.settings.batch_size)

    @property
    def folder(self) -> str:
        return "runs/" + re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")

    @property
    def config(self) -> Config:
        """The model; one that is fine-tuned gets a new linear head."""
        classes = self.classes if self.settings.objective == "classify" else 0
        changes: dict[str, Any] = {**self.settings.model.changes(), "num_classes": classes}
        if self.start is None:
            assert self.settings.model.name is not None
            return configuration(self.settings.model.name).change(**changes)
        if isinstance(self.start.config, VitConfig):
            changes["representation"] = 0
        return self.start.config.change(**changes)


def runs_of(name: str) -> list[PaperRun]:
    """Return the paper's runs of an experiment; none where nothing is trained."""
    return [read_run(label) for label in DATA["experiments"].get(name, ())]


@cache
def read_run(label: str) -> PaperRun:
    values = dict(DATA["runs"][label])
    recipe, note = values.pop("recipe"), DATA["notes"].get(values.pop("note", ""), "")
    dataset = DATA["datasets"][values.pop("data", "JFT")]
    images = values.pop("images", dataset["images"])
    start = read_run(values.pop("from")) if "from" in values else None
    if start is not None:
        pure = start.label.startswith("ViT")
        rates = ", ".join(f"{rate:g}" for rate in grid(recipe) if rate < LARGEST_RATE or not pure)
        note = f"the paper chose the learning rate among {rates}; then --dev 0"
    settings = read_recipe(recipe)
    if "steps" in values:
        values["epochs"] = None
    for group in ("model", "optim"):
        changes = {key: None if x == "unset" else x for key, x in values.pop(group, {}).items()}
        values[group] = replace(getattr(settings, group), **changes)
    settings = replace(settings, **values)
    data = dataset["folder"] + (f"-{images / 1e6:.0f}m" if images < dataset["images"] else "")
    return PaperRun(label, recipe, settings, data, images, dataset["classes"], start, note)


def check_run(run: PaperRun, devices: int = DEVICES) -> tuple[int, float]:
    """Build a run without memory; return its trainable parameters and exaFLOPs."""
    batch, config = run.settings.batch_size, run.config
    assert batch is not None
    if batch % devices:
        raise ConfigError(f"batch_size={batch} is not divisible by {devices} devices")
    Schedule(settings=run.settings, length=run.steps).lr_factor(0)  # checks the warmup
    head = config.num_features * config.num_classes
    if isinstance(config, VitConfig):
        head += config.width * config.representation
    forward = trunk_cost(config).forward + 2 * head  # without the head of masked patches
    return trainable(config, run.settings), TRAINING * forward * run.steps * batch / EXA


@cache
def trainable(config: Config, settings: Settings) -> int:
    """Return the trainable parameters of the model and its objective."""
    objective = make_objective(build(config), settings)
    named = [(name.removeprefix("model."), p) for name, p in objective.named_parameters()]
    make_optimizers(named, settings.optim, getattr(config, "depth", 0))
    return sum(p.numel() for _, p in named if p.requires_grad)


def command(run: PaperRun, devices: int = DEVICES) -> list[str]:
    """Return the command for a machine with so many accelerators."""
    verb = ["train", run.data]
    if run.start is not None:
        verb = ["finetune", run.data, "--from", run.start.folder]
    options = changed_options(run.settings, read_recipe(run.recipe))
    launch = ["torchrun", f"--nproc-per-node={devices}", "-m", "vitrail"]
    return [*launch, *verb, "--recipe", run.recipe, *options, "--out", run.folder]


def changed_options(settings: Any, recipe: Any, prefix: str = "") -> Iterator[str]:
    """Yield the options that turn a recipe's settings into these."""
    for field in fields(settings):
        value, before = getattr(settings, field.name), getattr(recipe, field.name)
        name = f"{prefix}{field.name.replace('_', '-')}"
        if is_dataclass(value):
            yield from changed_options(value, before, f"{name}.")
        elif value != before and not (value is None and name in ("epochs", "steps")):
            yield f"--{name}"  # of epochs and steps, the one that is given resets the other
            for one in value if isinstance(value, tuple) else (value,):
                yield f"{one:g}" if isinstance(one, float) else str(one)


def full_report(name: str) -> Report:
    """Build the paper's own runs of an experiment without memory."""
    runs, rows = runs_of(name), []
    notes = list(dict.fromkeys(run.note for run in runs if run.note))
    for run in runs:
        parameters, exaflops = check_run(run)
        days = exaflops * EXA / (DEVICES * A100.peak * UTILIZATION * DAY)
        tokens = run.config.num_tokens if isinstance(run.config, VitConfig) else "-"
        cost = [f"{x:,.1f}" if x >= 0.1 else f"{x:.2g}" for x in (exaflops, days)]
        note = f"({notes.index(run.note) + 1})" if run.note else ""
        size = (f"{parameters / 1e6:,.1f} M", str(tokens), f"{run.steps:,}")
        rows.append((run.label, *size, *cost, note))
    caption = (
        f"The paper's own runs; days on {DEVICES} accelerators of {A100.peak / 1e12:.0f} TFLOP/s "
        f"(A100, published peak) at an assumed utilization of {100 * UTILIZATION:.0f} %."
    )
    caption += "".join(f" ({number}) {note}." for number, note in enumerate(notes, 1))
    head = ("run", "parameters", "tokens", "steps", "exaFLOPs", "days", "note")
    commands = [(run.label, shlex.join(command(run))) for run in runs]
    tables = [Table(caption, head, rows), Table("Commands", ("run", "command"), commands)]
    built = "All models, objectives and optimizers can be built; the commands run them."
    return Report(
        name=name,
        title=TEXT[name]["title"],
        claim=TEXT[name]["claim"],
        method="The paper's own settings were built on the meta device.",
        result=built if runs else "Nothing is trained in this experiment.",
        verdict="checked",
        tables=tables if runs else (),
    )
