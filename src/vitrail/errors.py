"""Every error a user can cause, and how each is worded.

    VitrailError
    ├── ConfigError       a setting is impossible, or does not exist
    ├── DataError         an image, label file or archive cannot be used
    ├── CheckpointError   weights do not fit the model they are loaded into
    └── TrainingError     training broke off; what it had reached by then is kept

The command line prints these as one line; a bug in our own code keeps its traceback.
A message says what was given, why it cannot work, and what would.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class VitrailError(Exception):
    """Anything the person at the keyboard can mend."""


class ConfigError(VitrailError):
    """A setting is impossible, or does not exist."""


class DataError(VitrailError):
    """An image, label file or archive cannot be used."""


class CheckpointError(VitrailError):
    """Weights do not fit the model they are loaded into."""


class TrainingError(VitrailError):
    """Training diverged, or was ended from outside; what it had reached by then is kept."""


def unknown(kind: str, name: object, known: Iterable[str], where: str = "") -> ConfigError:
    """`unknown model 'B/61'; did you mean 'B/16'?`, or what exists, or where that is told."""
    known = list(known)
    by_lower = {item.lower(): item for item in known}
    close = get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.7)
    everything = where or f"known: {', '.join(known)}"
    hint = f"did you mean {by_lower[close[0]]!r}?" if close else everything
    return ConfigError(f"unknown {kind} {name!r}; {hint}")
