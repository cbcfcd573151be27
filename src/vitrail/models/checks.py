"""Checks that `config.py` is made of: each refuses a value in one sentence.

Nothing here knows a model; `config.py` says which field must pass which check.
"""

import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from vitrail.errors import ConfigError, unknown

Size = int | tuple[int, int]  # pixels: a square's side, or (height, width)


def pair(size: Size) -> tuple[int, int]:
    """(height, width) of a size that may be one number."""
    return (size, size) if isinstance(size, int) else size


def check_known(values: Mapping[str, Any], cls: type) -> None:
    names = [f.name for f in fields(cls)]
    for name in values:
        if name not in names:
            raise unknown("setting", name, names)


def tidy_size(name: str, size: Any) -> Size:
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    sides = tuple(whole_number(side) or 0 for side in sides)
    if len(sides) != 2 or min(sides) < 1:
        raise ConfigError(f"{name}={size!r} must be a positive number, or (height, width)")
    return sides[0] if sides[0] == sides[1] else (sides[0], sides[1])


def check_choices(config: Any, **choices: Any) -> None:
    for name, kind in choices.items():
        if not any(getattr(config, name) == choice for choice in get_args(kind)):
            raise unknown(name, getattr(config, name), get_args(kind))


def check_counts(config: Any, *names: str, least: int = 1) -> None:
    for name in names:
        value = whole_number(getattr(config, name))
        if value is None or value < least:
            given = getattr(config, name)
            raise ConfigError(f"{name}={given!r} must be a whole number, at least {least}")
        object.__setattr__(config, name, value)


def check_flags(config: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}={getattr(config, name)!r} must be True or False")


def whole_number(value: Any) -> int | None:
    """A plain int of anything that counts, numpy's integers too; None of everything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_chances(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(f"{name}={value!r} is a chance: at least 0 and below 1")


def check_grid(image_size: Size, stride: tuple[int, int]) -> None:
    """Refuse an image that is not a whole number of patches, and name the nearest one that is."""
    sides, wanted = pair(image_size), stride
    if any(side % step for side, step in zip(sides, wanted, strict=True)):
        near = [max(1, round(s / step)) * step for s, step in zip(sides, wanted, strict=True)]
        step = wanted[0] if wanted[0] == wanted[1] else f"{wanted[0]}x{wanted[1]}"
        raise ConfigError(
            f"image_size={image_size} is not a whole number of {step}-pixel patches; "
            f"try image_size={tidy_size('image_size', near)}"
        )
