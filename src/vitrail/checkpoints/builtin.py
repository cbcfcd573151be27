"""Models that come with the package: `builtin:vit-photos`, which needs no download.

Each is a bundle in builtin/, without a head: features to adapt. `scripts/make_builtin.py` writes
one from a training run. Imports no torch, so that commands can name the models in their help.
"""

from importlib.resources import files
from pathlib import Path

from vitrail.errors import CheckpointError

PREFIX = "builtin:"
NAMES = ("vit-photos",)
DEFAULT = "builtin:vit-photos"  # where commands start if no model is given
LARGER = "hf:google/vit-base-patch16-224"  # what they suggest instead
FOLDER = Path(str(files("vitrail.checkpoints"))) / "builtin"


def references() -> list[str]:
    """Return the models of this installation."""
    return [f"{PREFIX}{name}" for name in NAMES if (FOLDER / name / "model.safetensors").exists()]


def find(reference: str) -> Path:
    """Return the bundle of `builtin:name`."""
    name = reference.removeprefix(PREFIX)
    if name not in NAMES:
        known = ", ".join(f"{PREFIX}{each}" for each in NAMES)
        raise CheckpointError(f"unknown built-in model {reference!r}; available: {known}")
    if reference not in references():
        raise CheckpointError(
            f"{reference} is missing from this installation; install vitrail again, or pass "
            f"another model, such as {LARGER}"
        )
    return FOLDER / name
