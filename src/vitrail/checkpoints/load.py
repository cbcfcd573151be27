"""A model from any reference: a name, or a file of weights."""

from os import PathLike
from pathlib import Path

from vitrail.checkpoints.google import load_google
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.build import Model, create


def load(reference: str | PathLike[str]) -> Model:
    """The model a reference stands for, with its weights.

    >>> model = load("ViT-B_16.npz")  # a Google checkpoint; nothing else need be said
    >>> model = load("ViT-B/16")      # a name: fresh weights
    """
    path = Path(reference)
    if path.suffix == ".npz":
        return load_google(path)
    if path.exists():
        raise CheckpointError(f"{path} is no .npz file, the only kind this version reads")
    try:
        return create(str(reference))
    except ConfigError as error:
        raise CheckpointError(
            f"there is no file {str(reference)!r}, and as a name: {error}"
        ) from None
