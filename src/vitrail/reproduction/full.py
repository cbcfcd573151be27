"""`--scale full`: the paper's own settings, checked without a picture, memory or time.

Every model is built on the meta device with what it learns by and the optimizer that moves it; its
parameters, tokens, steps and operations are counted; and the command that would run it is written.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from vitrail.errors import ConfigError
from vitrail.models.build import build
from vitrail.models.config import Config, VitConfig
from vitrail.models.registry import configuration
from vitrail.planning.accelerators import ACCELERATORS, DAY, UTILIZATION
from vitrail.planning.cost import EXA, TRAINING
from vitrail.reproduction.orders import Order
from vitrail.reproduction.paper_runs import ORDERS
from vitrail.reproduction.report import Table
from vitrail.reproduction.sizes import millions, trunk
from vitrail.training.config import Settings
from vitrail.training.objectives import make_objective
from vitrail.training.optim import make_optimizers
from vitrail.training.recipes import read_recipe
from vitrail.training.schedules import Schedule

DEVICES = 8
A100 = next(one for one in ACCELERATORS if one.name == "A100")


@dataclass(frozen=True, kw_only=True)
class Built:
    """An order whose model was built, and what it would take."""

    order: Order
    parameters: int  # that learn
    tokens: int | None  # that the encoder reads; a ResNet has none
    steps: int
    exaflops: float
    days: float  # on DEVICES accelerators
    command: list[str]  # words of a shell


def orders(name: str) -> list[Order]:
    """The paper's own runs of an experiment; none where nothing is trained."""
    return ORDERS[name]() if name in ORDERS else []


def check(name: str, devices: int = DEVICES) -> list[Built]:
    """Build every run of an experiment without memory; what cannot be built is an error."""
    return [built(order, devices) for order in orders(name)]


def built(order: Order, devices: int = DEVICES) -> Built:
    config, batch = config_of(order), order.settings.batch_size
    assert batch is not None
    if batch % devices:
        raise ConfigError(f"batch_size={batch} does not split over {devices} devices")
    Schedule(settings=order.settings, length=order.steps).lr_factor(0)  # the warmup fits
    exaflops = TRAINING * operations(config) * order.steps * batch / EXA
    return Built(
        order=order,
        parameters=learning(config, order.settings),
        tokens=None if not isinstance(config, VitConfig) else config.num_tokens,
        steps=order.steps,
        exaflops=exaflops,
        days=exaflops * EXA / (devices * A100.peak * UTILIZATION * DAY),
        command=command(order, devices),
    )


def config_of(order: Order) -> Config:
    """The model of a run: by its name, or the one that is fine-tuned, with a new head."""
    settings = order.settings
    classes = order.classes if settings.objective == "classify" else 0
    changes: dict[str, Any] = {**settings.model.changes(), "num_classes": classes}
    if order.start is None:
        assert settings.model.name is not None
        return configuration(settings.model.name).change(**changes)
    before = config_of(order.start)
    if isinstance(before, VitConfig):
        changes["representation"] = 0  # the whole head gives way to one linear layer
    return before.change(**changes)


@cache
def learning(config: Config, settings: Settings) -> int:
    """Parameters that learn, of the model and whatever its objective adds."""
    objective = make_objective(build(config), settings)
    named = [(name.removeprefix("model."), p) for name, p in objective.named_parameters()]
    make_optimizers(named, settings.optim, getattr(config, "depth", 0))
    return sum(p.numel() for _, p in named if p.requires_grad)


def operations(config: Config) -> float:
    """Of a picture's forward pass with its head; masked patches' small head is left out."""
    head = config.num_features * config.num_classes
    if isinstance(config, VitConfig):
        head += config.width * config.representation
    return trunk(config).forward + 2 * head


# Commands


def command(order: Order, devices: int = DEVICES) -> list[str]:
    """What to type on a machine with so many accelerators."""
    launch = ["torchrun", f"--nproc-per-node={devices}", "-m", "vitrail"]
    verb = ["train", order.data]
    if order.start is not None:
        verb = ["finetune", order.data, "--from", order.start.folder]
    options = differences(order.settings, read_recipe(order.recipe))
    return [*launch, *verb, "--recipe", order.recipe, *options, "--out", order.folder]


def differences(settings: Any, recipe: Any, prefix: str = "") -> Iterator[str]:
    """The options that turn a recipe's settings into these."""
    for field in fields(settings):
        value, before = getattr(settings, field.name), getattr(recipe, field.name)
        name = f"{prefix}{field.name.replace('_', '-')}"
        if is_dataclass(value):
            yield from differences(value, before, f"{name}.")
        elif value != before and not (value is None and name in ("epochs", "steps")):
            yield f"--{name}"  # of epochs and steps the one that is given takes the other back
            yield from map(word, value if isinstance(value, tuple) else (value,))


def word(value: Any) -> str:
    """A value as it is typed: 7 for 7.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def tables(name: str) -> list[Table]:
    """The runs of an experiment and the commands that would do them, to be read; [] for none."""
    found = check(name)
    if not found:
        return []
    notes = list(dict.fromkeys(one.order.note for one in found if one.order.note))
    explained = "".join(f" ({number}) {note}." for number, note in enumerate(notes, 1))
    return [
        Table(
            caption=(
                f"The paper's own runs, built without memory; days on {DEVICES} accelerators of "
                f"{A100.peak / 1e12:.0f} TFLOP/s (A100, published peak) at an assumed "
                f"{100 * UTILIZATION:.0f} % of it.{explained}"
            ),
            head=("run", "parameters", "tokens", "steps", "exaFLOPs", "days", "note"),
            rows=[
                (
                    one.order.label,
                    millions(one.parameters),
                    str(one.tokens or "-"),
                    f"{one.steps:,}",
                    f"{one.exaflops:,.1f}" if one.exaflops >= 0.1 else f"{one.exaflops:.2g}",
                    f"{one.days:,.1f}" if one.days >= 0.1 else f"{one.days:.2g}",
                    f"({notes.index(one.order.note) + 1})" if one.order.note else "",
                )
                for one in found
            ],
        ),
        Table(
            caption="Their commands",
            head=("run", "command"),
            rows=[(one.order.label, shlex.join(one.command)) for one in found],
        ),
    ]
