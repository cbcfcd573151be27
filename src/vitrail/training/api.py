"""`vitrail.train`: a training run from Python."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from vitrail.data.files import same_data
from vitrail.errors import ConfigError, unknown
from vitrail.training.folder import read_run
from vitrail.training.recipes import read_recipe
from vitrail.training.run import Result, run
from vitrail.training.settings import Settings
from vitrail.training.setup import Order
from vitrail.training.watch import Watch


def train(
    data: str | PathLike[str],
    out: str | PathLike[str],
    *,
    start: str = "",
    recipe: str = "",
    resume: bool = False,
    watch: Watch | None = None,
    **changes: Any,
) -> Result:
    """Train a model on pictures, or fine-tune `start`, any model reference; the bundle is `out`.

    >>> result = train("pictures", "runs/first", minutes=10)
    >>> result.outcomes["val"].accuracy
    >>> train("pictures", "runs/second", start="hf:google/vit-base-patch16-224", epochs=4)
    >>> train("pictures", "runs/third", model={"name": "ViT-Ti/16"}, optim={"kind": "adamw"})

    `changes` are settings, as in a recipe; what is not given is chosen from the data. `resume`
    goes on with a run that was stopped. `watch` is told how it goes.
    """
    if resume:
        settings, kept, start = read_run(Path(out))
        if not same_data(fspath(data), kept):
            raise ConfigError(f"{out} was trained on {kept}, not {data}; give that to resume")
        if changes or recipe:
            raise ConfigError("a run is resumed with the settings it has; leave the others out")
    else:
        settings = changed(read_recipe(recipe) if recipe else Settings(), changes)
    order = Order(data=fspath(data), out=Path(out), settings=settings, start=start, resume=resume)
    return run(order, watch)


def changed(settings: Any, changes: Mapping[str, Any], prefix: str = "") -> Any:
    """The settings with some of them changed; a dict changes some of a group."""
    known = [f.name for f in fields(settings)]
    values = {}
    for name, value in changes.items():
        if name not in known:
            raise unknown("setting", prefix + name, [prefix + other for other in known])
        now = getattr(settings, name)
        inside = is_dataclass(now) and isinstance(value, Mapping)
        values[name] = changed(now, value, f"{prefix}{name}.") if inside else value
    return replace(settings, **values)
