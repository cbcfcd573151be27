"""Recipes: the settings of a training run as a TOML file, in the package or the user's own.

    extends = "paper-jft"      another recipe, whose values apply where this one sets nothing
    epochs = 7

    [optim]
    learning_rate = 8e-4

Settings that a file leaves out keep their default, or are chosen from the data. Unknown names and
wrong types are errors that name the file. A run's folder has its settings in the same format:

    model.safetensors, config.json, README.md   the bundle
    adapter.safetensors                         with LoRA, what was trained
    settings.toml                               the settings, the data and the initialization
    metrics.jsonl, report.html                  training curves, and the final report
    state/                                      the resumable state, until the run is finished

This file does not import torch.
"""

import json
import math
import re
import shutil
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitrail.data.storage import atomic_path
from vitrail.errors import ALIASES, ConfigError, unknown
from vitrail.models.config import REGISTERED
from vitrail.training.config import Settings

Values = dict[str, Any]

PACKAGED = files("vitrail") / "recipes"
GRID = re.compile(r"^# Grid +optim\.learning_rate = (.+)$", re.MULTILINE)
# Two settings for the same thing: setting one of them resets the other.
ALTERNATIVES = (("epochs", "steps"), ("optim.warmup_steps", "optim.warmup"))
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}

SETTINGS, METRICS, REPORT = "settings.toml", "metrics.jsonl", "report.html"
ADAPTER = "adapter.safetensors"
BUNDLE = ("model.safetensors", "config.json", "README.md", ADAPTER)
PROBE_FILES = ("probe.safetensors", "probe_head.safetensors", "ladder.json")
# Settings that the weights and the order of the data depend on: a resumed run cannot change them.
FIXED = ("model", "batch_size", "seed", "repeats", "objective", "image_sizes", "mix", "augment")
FIXED += ("average", "dev", "masked", "epochs", "steps", "evaluate_every", "loss", "preprocessing")
FIXED += ("head_init", "lora", "lora_alpha", "balance")
CHANGEABLE_OPTIM = ("learning_rate", "muon_learning_rate", "clip_norm")


def recipe_names() -> list[str]:
    names = (file.name for file in PACKAGED.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read_recipe(name: str) -> Settings:
    """Return the settings of a packaged recipe, by name, or of a .toml file."""
    values: Values = {}
    for _, recipe_values in reversed(inheritance_chain(name)):
        overridden = alternatives_of(recipe_values)
        values = {k: v for k, v in values.items() if k not in overridden} | recipe_values
    return settings_from_dict(values, name)


def settings_from_dict(values: Mapping[str, Any], source: str = "") -> Settings:
    """Return the settings of plain values, nested or by full name; `source` is named in errors."""
    where, tables = f" in {source}" if source else "", dict[str, Values]()
    for name, value in flatten(values, where).items():
        table, _, key = name.rpartition(".")
        tables.setdefault(table, {})[key] = value
    top_level = tables.pop("", {})
    try:
        return Settings(**top_level, **{name: TABLES[name](**tables[name]) for name in tables})
    except ConfigError as error:
        raise ConfigError(f"{error} (in {source})" if source else str(error)) from None


def summary(name: str) -> str:
    """Return the first line of a recipe's header comment."""
    first = inheritance_chain(name)[0][0].partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def grid(name: str) -> list[float]:
    """Return the learning rates that the recipe's source searched over, if it lists them."""
    for text, _ in inheritance_chain(name):
        if match := GRID.search(text):
            return [float(number) for number in match[1].split(",")]
    return []


def combine(recipe: str, settings: Settings | None, changes: Mapping[str, Any]) -> Settings:
    """Return the settings of a recipe, or `settings`, with changes."""
    if settings is not None and not isinstance(settings, Settings):
        kind = type(settings).__name__
        raise ConfigError(f"settings is a {kind}; pass vitrail.Settings(…), or keywords")
    if recipe and settings is not None:
        raise ConfigError("recipe and settings exclude each other; pass one of them, and keywords")
    settings = read_recipe(recipe) if recipe else settings or Settings()
    names = [name for name, value in changes.items() if value is not None]
    for name, value in changes.items():
        nested = value if isinstance(value, Mapping) else {}
        names += [f"{name}.{key}" for key, inner in nested.items() if inner is not None]
    return override(drop_alternatives(settings, names), changes)


def drop_alternatives(settings: Settings, names: Collection[str]) -> Settings:
    """Reset the settings whose alternatives (steps vs. epochs) are about to be set."""
    for name in alternatives_of(names):
        table, _, key = name.rpartition(".")
        default = getattr(getattr(Settings(), table) if table else Settings(), key)
        settings = override(settings, {table: {key: default}} if table else {key: default})
    return settings


def override(settings: Any, changes: Mapping[str, Any], table: str = "") -> Any:
    """Return the settings with some of them changed; a dict changes fields of a table.

    `model` may be the name of a model. Values are checked as those of a recipe are; None resets a
    setting that may be left open.
    """
    known, values = [f.name for f in fields(settings)], {}
    for key, value in changes.items():
        name = f"{table}.{key}" if table else key
        if key not in known:
            raise ConfigError(f"unknown setting {name!r}; {suggestion(name)}")
        if name not in TABLES:
            optional = NoneType in get_args(get_type_hints(type(settings))[key])
            values[key] = None if value is None and optional else checked(name, value)
        elif isinstance(value, TABLES[name]):
            values[key] = value
        elif isinstance(value, Mapping):
            values[key] = override(getattr(settings, name), value, name)
        elif name == "model" and isinstance(value, str):
            values[key] = override(settings.model, {"name": value}, name)
        else:
            field = fields(TABLES[name])[0].name
            given = repr(value) if isinstance(value, str | int | float) else type(value).__name__
            raise ConfigError(f"{name}={given} must be a dict, such as {{{field!r}: …}}")
    return replace(settings, **values)


def alternatives_of(names: Collection[str]) -> set[str]:
    """Return the settings that are overridden by setting `names`."""
    pairs = [*ALTERNATIVES, *(pair[::-1] for pair in ALTERNATIVES)]
    return {other for name, other in pairs if name in names} - set(names)


# Recipe files


def inheritance_chain(name: str) -> list[tuple[str, Values]]:
    """Return the text and the values, by full name, of a recipe and of each one it extends."""
    files, chain = [find(name)], []
    while True:
        file = files[-1]
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the recipe {file}: {error.strerror}") from None
        try:
            text = data.decode("utf-8-sig")
            values = tomllib.loads(text)
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{file.name} is not UTF-8 text (at line {line})") from None
        except (ValueError, RecursionError) as error:
            last = f"at line {len(data.splitlines())}, the last"
            reason = str(error).replace("at end of document", last)
            raise ConfigError(f"{file.name} is not a TOML file: {reason}") from None
        values.pop("run", None)  # a run's settings.toml has this table beside its settings
        extends = values.pop("extends", None)
        if not isinstance(extends, str | None) or extends == "":
            raise ConfigError(f"extends={extends!r} in {file.name} must be the name of a recipe")
        chain.append((text, flatten(values, f" in {file.name}")))
        if extends is None:
            return chain
        files.append(find(extends, relative_to=file))
        if files[-1] in files[:-1]:
            path = " extends ".join(file.name for file in files)
            raise ConfigError(f"{path}: a recipe cannot extend itself")


def find(name: str, relative_to: Traversable | None = None) -> Traversable:
    """Return the file of a recipe: in the package, or at a path relative to another recipe."""
    if name in (known := recipe_names()):
        return PACKAGED / f"{name}.toml"
    if not name.endswith(".toml"):
        hint = "`vitrail recipes` lists the packaged ones, and a file of your own ends in .toml"
        raise unknown("recipe", name, known, where=hint)
    folder = relative_to.parent if isinstance(relative_to, Path) else Path()
    file = (folder / Path(name).expanduser()).resolve()
    if not file.exists():
        packaged = file.stem in known
        hint = f"; did you mean the packaged recipe {file.stem!r}?" if packaged else ""
        raise ConfigError(f"recipe file not found: {name}{hint}")
    return file


def flatten(values: Mapping[str, Any], where: str) -> Values:
    """Return nested values by full name, each checked against the type of its field."""
    flat: Values = {}
    for name, value in values.items():
        if name not in TABLES:
            flat[name] = value
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            raise ConfigError(f"{name}={value!r}{where} must be a table, such as [{name}]")
    for name, value in flat.items():
        if name not in FIELD_TYPES:
            raise ConfigError(f"unknown setting {name!r}{where}; {suggestion(name)}")
        flat[name] = checked(name, value, where)
    return flat


def checked(name: str, value: Any, where: str = "") -> Any:
    """Return the value of a setting in the type of its field."""
    if isinstance(value, str) and value in REGISTERED.get(name.removeprefix("model."), ()):
        return value
    try:
        return convert(value, FIELD_TYPES[name])
    except TypeError:
        expected = type_name(FIELD_TYPES[name])
        raise ConfigError(f"{name}={value!r}{where} must be {expected}") from None


TABLES: dict[str, Any] = {
    name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)
}
# The type of every setting by full name; TOML has no null, so None is left out.
FIELD_TYPES: dict[str, Any] = {}
for table, settings_class in {"": Settings, **TABLES}.items():
    for name, kind in get_type_hints(settings_class).items():
        if name not in TABLES:
            options = [part for part in get_args(kind) if part is not NoneType]
            optional = NoneType in get_args(kind)
            FIELD_TYPES[f"{table}.{name}" if table else name] = options[0] if optional else kind


def convert(value: Any, kind: Any) -> Any:
    """Check a value against its type: 1 is accepted for 1.0, a list for a tuple, and numpy's
    numbers for Python's."""
    args = get_args(kind)
    if kind in (bool, str) and type(value) is kind:
        return value
    if kind is str and isinstance(value, PathLike):
        return fspath(value)
    if get_origin(kind) is Literal and isinstance(value, str) and value in args:
        return value
    if kind is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if kind is float and isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(value):
                return float(value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            return tuple(convert(item, part) for item, part in zip(value, kinds, strict=True))
    raise TypeError


def type_name(kind: Any) -> str:
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(args)}"
    if get_origin(kind) is not tuple:
        return TYPE_NAMES[kind]
    if args[-1] is Ellipsis:
        return f"a list, each item {type_name(args[0])}"
    return f"a list of {len(args)}: {', '.join(map(type_name, args))}"


def suggestion(name: str) -> str:
    """Return the setting that was likely meant, or those that exist."""
    if close := closest(name):
        return f"did you mean {close!r}?"
    table, _, _ = name.rpartition(".")
    if not table and (tables := get_close_matches(name, TABLES, 1)):
        return f"did you mean the table [{tables[0]}]?"
    keys = [full.rpartition(".")[2] for full in FIELD_TYPES if full.rpartition(".")[0] == table]
    return f"known: {', '.join(keys if table else [*keys, *TABLES])}"


def closest(name: str) -> str | None:
    """Return the setting that was likely meant: by another library's name, initials or spelling."""
    table, _, word = name.replace("-", "_").rpartition(".")
    word = ALIASES.get(word, word)
    same_table = [full for full in FIELD_TYPES if full.rpartition(".")[0] == table]
    words = {full.rpartition(".")[2]: full for full in [*FIELD_TYPES, *same_table]}
    initials = {"".join(p[0] for p in word.split("_")): word for word in words if "_" in word}
    close = [initials[word]] if word in initials else get_close_matches(word, words, 1, cutoff=0.7)
    return words[close[0]] if close else None


def to_toml(settings: Settings, *, defaults: bool = True) -> str:
    """Return TOML that reads back as these settings; `defaults=False` omits default values."""
    parts = []
    for table in ("", *TABLES):
        part = getattr(settings, table) if table else settings
        lines = [f"[{table}]"] if table else []
        for f in fields(part):
            value = getattr(part, f.name)
            if value is None or is_dataclass(value) or (not defaults and value == f.default):
                continue
            lines.append(f"{f.name} = {literal(value)}")
        if len(lines) > bool(table):
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def literal(value: Any) -> str:
    """Return a value in TOML syntax: 10_000, 3e-4, [0.05, 1]."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return f"[{', '.join(map(literal, value))}]"
        case float() if value.is_integer() and abs(value) < 1e15:
            return literal(int(value))
        case float() if "e" in repr(value) or abs(value) < 1e-3:
            digits, exponent = f"{Decimal(repr(value)).normalize():e}".split("e")
            return f"{digits}e{int(exponent)}"
        case int() if abs(value) >= 10_000:
            return f"{value:_}"
    return repr(value)


# Run folders


def write_run(
    folder: Path,
    settings: Settings,
    *,
    data: str,
    start: str,
    processes: int = 1,
    micro_batch: int | None = None,
) -> None:
    """Write settings.toml: the settings, the data reference and the initialization.

    The chosen micro-batch size is recorded outside the settings, so that another machine that uses
    the file as a recipe chooses one for its own memory.
    """
    run: dict[str, str | int] = {"data": data, "from": start}
    if micro_batch is not None:
        run |= {"processes": processes, "micro_batch": micro_batch}
    lines = [f"{name} = {literal(value)}\n" for name, value in run.items()]
    with atomic_path(folder / SETTINGS) as temporary:
        temporary.write_text(f"{to_toml(settings)}\n[run]\n{''.join(lines)}", encoding="utf-8")


def read_run(folder: Path) -> tuple[Settings, str, str]:
    """Return settings, data reference and initialization, as `write_run` wrote them."""
    path = folder / SETTINGS
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        run = values.pop("run")
        return settings_from_dict(values), str(run["data"]), str(run["from"])
    except FileNotFoundError:
        raise ConfigError(
            f"no run to resume in {folder}: it has no {SETTINGS}; leave --resume out"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def check_same_run(before: Settings, now: Settings) -> None:
    """Raise if a resumed run has settings that would make it a different run."""
    changeable = {name: getattr(now.optim, name) for name in CHANGEABLE_OPTIM}
    before = replace(before, optim=replace(before.optim, **changeable))
    for name in (*FIXED, "optim"):
        old, new = getattr(before, name), getattr(now, name)
        if old == new:
            continue
        if is_dataclass(old):
            names = [f.name for f in fields(old)]
            key = next(key for key in names if getattr(old, key) != getattr(new, key))
            name, new = f"{name}.{key}", getattr(new, key)
        raise ConfigError(
            f"{name}={new!r} cannot be changed when a run is resumed; leave it out, or start "
            "another run"
        )


def is_run(folder: Path) -> bool:
    return (folder / SETTINGS).exists()


def new_run_folder(data: str) -> Path:
    """Return runs/flowers, or runs/flowers-2 if that exists."""
    stem = Path(data.rpartition(":")[2]).name.split(".")[0] or "pictures"
    number, folder = 1, Path("runs") / stem
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{stem}-{number}"
    return folder


def clear_run(folder: Path) -> None:
    """Delete what a run has written, and nothing else."""
    for name in (*BUNDLE, *PROBE_FILES, SETTINGS, METRICS, REPORT):
        (folder / name).unlink(missing_ok=True)
    for name in ("state", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
