"""Every error a user can cause, and the warnings for names of 0.1.

    VitrailError
    ├── ConfigError       a setting is impossible, or does not exist
    ├── DataError         an image, label file or archive cannot be used
    ├── CheckpointError   weights do not fit the model they are loaded into
    └── TrainingError     training diverged and cannot continue

The command line prints these as one line; a bug in our own code keeps its traceback.
A message says what was given, why it cannot work, and what would. Names of 0.1 work for one more
release, with a DeprecationWarning.
"""

import os
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

ALIASES = {  # settings by their names in other libraries, for suggestions
    "lr": "learning_rate",
    "wd": "weight_decay",
    "ema": "average",
    "num_heads": "heads",
    "embed_dim": "width",
    "in_chans": "channels",
}

MAX_ENTRIES = 10_000  # of a folder that are searched for a similar name

P = ParamSpec("P")
R = TypeVar("R")


class VitrailError(Exception):
    """Base class of all errors that a user can fix."""


class ConfigError(VitrailError):
    """A setting is impossible, or does not exist."""


class DataError(VitrailError):
    """An image, label file or archive cannot be used."""


class CheckpointError(VitrailError):
    """Weights do not fit the model they are loaded into."""


class TrainingError(VitrailError):
    """Training diverged and cannot continue."""


def unknown(kind: str, name: object, known: Iterable[str], where: str = "") -> ConfigError:
    """`unknown model 'B/61'; did you mean 'B/16'?`, or the known names, or where to find them."""
    known = list(known)
    by_lower = {item.lower(): item for item in known}
    word = str(name).lower()
    close = get_close_matches(ALIASES.get(word, word), by_lower, n=1, cutoff=0.7)
    alternatives = where or f"known: {', '.join(known)}"
    hint = f"did you mean {by_lower[close[0]]!r}?" if close else alternatives
    return ConfigError(f"unknown {kind} {name!r}; {hint}")


def similar_path(path: str) -> str:
    """Return `; did you mean 'my photos'?` if beside a missing path is one of a similar name."""
    folder, name = os.path.split(path.rstrip("/"))
    try:
        names = {entry.lower(): entry for entry in os.listdir(folder or ".")[:MAX_ENTRIES]}
    except (OSError, ValueError):  # no folder either
        return ""
    close = get_close_matches(name.lower(), names, n=1, cutoff=0.7)
    return f"; did you mean {os.path.join(folder, names[close[0]])!r}?" if close else ""


def renamed(old: str, new: str) -> str:
    return f"{old} is now {new}; the old name will be removed in 0.3"


def warn_renamed(old: str, new: str) -> None:
    warnings.warn(renamed(old, new), DeprecationWarning, stacklevel=3)


def renamed_attribute(old: str, new: str) -> Any:
    """A property that forwards to an attribute's new name."""

    def access(self: object, *value: object) -> Any:
        warn_renamed(f".{old}", f".{new}")
        return setattr(self, new, *value) if value else getattr(self, new)

    return property(access, access)


def renamed_keyword(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions that had a keyword of another name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            if old in keywords:
                warn_renamed(f"{old}=", f"{new}=")
                keywords[new] = keywords.pop(old)
            return function(*args, **keywords)

        return call

    return decorate
