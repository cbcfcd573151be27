"""Recipes: a training run's settings as a TOML file, in the package or the user's own.

    extends = "paper-jft"      another recipe, whose values hold where this one says nothing
    epochs = 7

    [optim]
    learning_rate = 8e-4

What a file does not mention keeps its default, or is chosen by looking at the data. Whatever is
unknown or of the wrong kind is refused with the name of its file. This file does not import torch.
"""

import json
import re
import sys
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from decimal import Decimal
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitrail.errors import ConfigError, unknown
from vitrail.training.settings import Settings

Values = dict[str, Any]

PACKAGED = files("vitrail") / "recipes"
GRID = re.compile(r"^# Grid +optim\.learning_rate = (.+)$", re.MULTILINE)
# Two ways to say one thing: whoever says it one way takes back what was said the other way.
EITHER_OR = (("epochs", "steps"), ("optim.warmup_steps", "optim.warmup"))
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


@dataclass(frozen=True)
class Recipe:
    """One file as it was read: its text, and its values by full name, such as optim.kind."""

    file: Traversable
    text: str
    extends: str | None
    values: Values


def recipe_names() -> list[str]:
    """The names of the recipes that come with the package."""
    found = (file.name for file in PACKAGED.iterdir())
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def read_recipe(name: str) -> Settings:
    """The settings of a packaged recipe, by its name, or of a file that ends in .toml."""
    values: Values = {}
    for recipe in reversed(family(name)):
        values = merged(values, recipe.values)
    return build(values, f" in {name}")


def settings_from(values: Mapping[str, Any], where: str = "") -> Settings:
    """The settings of nested plain values, as tomllib gives them; `where` is told in errors."""
    place = f" in {where}" if where else ""
    return build(tidy(values, place), place)


def summary(name: str) -> str:
    """What a recipe is, in the words of its first line."""
    first = family(name)[0].text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def grid(name: str) -> list[float]:
    """The learning rates among which the source chose, or none."""
    for recipe in family(name):
        if found := GRID.search(recipe.text):
            return [float(number) for number in found[1].split(",")]
    return []


# Files


def family(name: str) -> list[Recipe]:
    """A recipe, then the one it extends, and so on."""
    chain = [read(find(name))]
    while extends := chain[-1].extends:
        file = find(extends, beside=chain[-1].file)
        if file in [recipe.file for recipe in chain]:
            path = " extends ".join(recipe.file.name for recipe in chain)
            raise ConfigError(f"{path} extends {file.name}: a recipe cannot extend itself")
        chain.append(read(file))
    return chain


def find(name: str, beside: Traversable | None = None) -> Traversable:
    """Where a recipe is: in the package, or at a path, which may be relative to another recipe."""
    if name in (known := recipe_names()):
        return PACKAGED / f"{name}.toml"
    if not name.endswith(".toml"):
        hint = f"a file of your own ends in .toml, and the packaged ones are in {PACKAGED}"
        raise unknown("recipe", name, known, where=hint)
    folder = beside.parent if isinstance(beside, Path) else Path()
    file = (folder / Path(name).expanduser()).resolve()
    if not file.exists():
        named = file.stem in known
        hint = f"; did you mean the packaged recipe {file.stem!r}?" if named else ""
        raise ConfigError(f"there is no recipe file {name}{hint}")
    return file


def read(file: Traversable) -> Recipe:
    """A file's values, each checked and none invented."""
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
        why = str(error).replace("at end of document", last)
        raise ConfigError(f"{file.name} is not a TOML file: {why}") from None
    values.pop("run", None)  # what a run's settings.toml tells beside its settings
    extends = values.pop("extends", None)
    if not isinstance(extends, str | None) or extends == "":
        raise ConfigError(f"extends={extends!r} in {file.name} must be the name of a recipe")
    return Recipe(file, text, extends, tidy(values, f" in {file.name}"))


def merged(base: Values, own: Values) -> Values:
    """`base` with `own` on top."""
    gone = taken_back(own)
    return {name: value for name, value in base.items() if name not in gone} | own


def taken_back(given: Collection[str]) -> set[str]:
    """The names of what is said in the other of two ways than those that are given."""
    pairs = [*EITHER_OR, *(pair[::-1] for pair in EITHER_OR)]
    return {other for name, other in pairs if name in given} - set(given)


def making_way(settings: Settings, given: Collection[str]) -> Settings:
    """The settings without what is about to be said in the other of two ways."""
    usual = Settings()
    for name in taken_back(given):
        table, _, key = name.rpartition(".")
        if not table:
            settings = replace(settings, **{key: getattr(usual, key)})
            continue
        part = replace(getattr(settings, table), **{key: getattr(getattr(usual, table), key)})
        settings = replace(settings, **{table: part})
    return settings


# Values


def tidy(values: Mapping[str, Any], place: str) -> Values:
    """Nested values by their full names, each as its field has it."""
    flat: Values = {}
    for name, value in values.items():
        if name not in TABLES:
            flat[name] = value
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            raise ConfigError(f"{name}={value!r}{place} must be a table, such as [{name}]")
    for name, value in flat.items():
        if name not in KNOWN:
            raise ConfigError(f"unknown setting {name!r}{place}; {likely(name)}")
        try:
            flat[name] = fitted(value, KNOWN[name])
        except TypeError:
            raise ConfigError(f"{name}={value!r}{place} must be {wanted(KNOWN[name])}") from None
    return flat


def build(values: Values, place: str) -> Settings:
    """The settings of values by full names; what cannot go together is refused."""
    parts: dict[str, Values] = {}
    for name, value in values.items():
        table, _, key = name.rpartition(".")
        parts.setdefault(table, {})[key] = value
    plain = parts.pop("", {})
    try:
        return Settings(**plain, **{name: TABLES[name](**parts[name]) for name in parts})
    except ConfigError as error:
        raise ConfigError(f"{error} ({place.strip()})" if place else str(error)) from None


def known_settings() -> dict[str, Any]:
    """Every setting by its full name, and the type it must have where it is given."""
    kinds = {name: kind for name, kind in get_type_hints(Settings).items() if name not in TABLES}
    for table, part in TABLES.items():
        kinds |= {f"{table}.{name}": kind for name, kind in get_type_hints(part).items()}
    return {name: without_none(kind) for name, kind in kinds.items()}


def without_none(kind: Any) -> Any:
    """TOML has no null: a setting is None by being absent."""
    kinds = [part for part in get_args(kind) if part is not NoneType]
    return kinds[0] if NoneType in get_args(kind) else kind


TABLES: dict[str, Any] = {
    name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)
}
KNOWN = known_settings()


def fitted(value: Any, kind: Any) -> Any:
    """A value as its type has it: 1 may stand for 1.0 and a list for a tuple, nothing else."""
    parts = get_args(kind)
    if kind in (bool, int, str) and type(value) is kind:
        return value
    if get_origin(kind) is Literal and value in parts:
        return value
    if kind is float and isinstance(value, int | float) and finite(value):
        return float(value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(fitted(item, part) for item, part in zip(value, kinds, strict=True))
    raise TypeError


def finite(value: float) -> bool:
    """Whether this is a number to train with: not true, nan, infinity, or beyond a float."""
    return not isinstance(value, bool) and abs(value) <= sys.float_info.max


def wanted(kind: Any) -> str:
    """A type in words."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(parts)}"
    if get_origin(kind) is not tuple:
        return KINDS[kind]
    if parts[-1] is Ellipsis:
        return f"a list, each item {wanted(parts[0])}"
    return f"a list of {len(parts)}: {', '.join(map(wanted, parts))}"


def likely(name: str) -> str:
    """The setting that was meant: by its initials, by its spelling in any table; or what exists."""
    table, _, word = name.replace("-", "_").rpartition(".")
    ours = [full for full in KNOWN if full.rpartition(".")[0] == table]
    words = {full.rpartition(".")[2]: full for full in [*KNOWN, *ours]}  # our own table wins
    initials = {"".join(p[0] for p in word.split("_")): word for word in words if "_" in word}
    meant = [initials[word]] if word in initials else get_close_matches(word, words, 1, cutoff=0.7)
    if meant:
        return f"did you mean {words[meant[0]]!r}?"
    if not table and (close := get_close_matches(name, TABLES, 1)):
        return f"did you mean the table [{close[0]}]?"
    here = [full.rpartition(".")[2] for full in ours]
    return f"known: {', '.join(here if table else [*here, *TABLES])}"


# Writing


def to_toml(settings: Settings, *, defaults: bool = True) -> str:
    """A file that reads back as these settings; `defaults=False` leaves out what goes unsaid."""
    parts = [entries(settings, defaults)]
    for name in TABLES:
        if lines := entries(getattr(settings, name), defaults):
            parts.append([f"[{name}]", *lines])
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def entries(part: Any, defaults: bool) -> list[str]:
    """The lines `name = value` of what is not None."""
    values = {f.name: (getattr(part, f.name), f.default) for f in fields(part)}
    return [
        f"{name} = {literal(value)}"
        for name, (value, default) in values.items()
        if value is not None and not is_dataclass(value) and (defaults or value != default)
    ]


def literal(value: Any) -> str:
    """A value as TOML writes it: 10_000, 3e-4, [0.05, 1]."""
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
