"""`vitrail.train`: a training run from Python."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from vitrail.data.storage import same_location
from vitrail.errors import ConfigError, unknown
from vitrail.training.folder import check_same_run, read_run
from vitrail.training.recipes import making_way, read_recipe
from vitrail.training.run import Result, run
from vitrail.training.settings import Settings
from vitrail.training.setup import Order
from vitrail.training.watch import Watch


def train(
    data: str | PathLike[str],
    out: str | PathLike[str],
    *,
    start: str | PathLike[str] = "",
    recipe: str | PathLike[str] = "",
    resume: bool = False,
    watch: Watch | None = None,
    **changes: Any,
) -> Result:
    """Train a model on pictures, or fine-tune `start`, any model reference; the bundle is `out`.

    >>> result = train("pictures", "runs/first", minutes=10)
    >>> result.outcomes["val"].accuracy
    >>> train("pictures", "runs/second", start="hf:google/vit-base-patch16-224", epochs=4)
    >>> train("pictures", "runs/third", model={"name": "ViT-Ti/16"}, optim={"kind": "adamw"})

    `changes` are settings, which overrule those of `recipe`; what is not given is chosen from the
    data. `resume` goes on with a run that was stopped, and `changes` may then change how, not what
    it is. `watch` is told how it goes.
    """
    if not isinstance(start, str | PathLike):
        raise ConfigError(
            f"start is a {type(start).__name__}, which a resumed run could not find again; "
            "keep it with vitrail.save, and give that folder"
        )
    start, recipe = fspath(start), fspath(recipe)
    if resume and recipe:
        raise ConfigError("a run is resumed with the settings it has; leave the recipe out")
    if resume:
        settings, start = resumed(Path(out), fspath(data), start, changes)
    else:
        settings = read_recipe(recipe) if recipe else Settings()
        settings = changed(making_way(settings, names_in(changes)), changes)
    order = Order(data=fspath(data), out=Path(out), settings=settings, start=start, resume=resume)
    return run(order, watch)


def resumed(out: Path, data: str, start: str, changes: Mapping[str, Any]) -> tuple[Settings, str]:
    """How a run goes on, and the model it began with; refused where it would be another run."""
    before, kept, began = read_run(out)
    if not same_location(data, kept):
        raise ConfigError(f"{out} was trained on {kept}, not {data}; give that to resume")
    if start and not same_location(start, began):
        with_what = began or "fresh weights"
        raise ConfigError(f"{out} began with {with_what}, not {start}; leave start out to resume")
    settings = changed(before, changes)
    check_same_run(before, settings)
    return settings, began


def names_in(changes: Mapping[str, Any]) -> list[str]:
    """The full names of what is given, such as optim.kind."""
    names = []
    for name, value in changes.items():
        inside = value if isinstance(value, Mapping) else {}
        names += [f"{name}.{key}" for key, inner in inside.items() if inner is not None]
        names += [name] * (value is not None)
    return names


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
