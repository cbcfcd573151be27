"""Convert a checkpoint to another format and verify the result.

The result is written to a temporary path and loaded again; it is moved into place only if weights
and logits match the source.
"""

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitrail.checkpoints import bundle, google
from vitrail.checkpoints.files import SUFFIXES
from vitrail.checkpoints.huggingface import unsupported_preprocessing
from vitrail.checkpoints.load import (
    Reference,
    describe_preprocessing,
    open_reference,
    preprocessing_notice,
    set_preprocessing,
    table_for,
)
from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.save import OLDER, check_losses, save, table_name, weights_path
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.models.config import pair
from vitrail.models.registry import name_of
from vitrail.models.vit import Model

NUMBERED = "encoderblock|MixerBlock|encoder_layer|blocks?|layers?|stages|unit"
TOLERANCE = 1e-6  # relative to the largest logit; equal weights and numerics give equal logits


@dataclass(frozen=True, slots=True)
class Conversion:
    """The plan or the result of a conversion."""

    model: str
    source_format: str
    target_format: str
    tensors: list[tuple[list[str], list[str]]]  # names before and after
    changes: list[str]
    lost: list[str]
    notes: list[str]  # what the target cannot store besides weights and numerics
    notice: str = ""  # how the preprocessing was determined, if the source does not state it
    difference: float | None = None  # of the logits, relative to the largest; None: not written


def convert(
    source: Reference,
    destination: Path,
    to: str,
    *,
    from_format: str | None = None,
    heads: int | None = None,
    preprocessing: str | Preprocessing | None = None,
    allow_loss: bool = False,
    dry_run: bool = False,
) -> Conversion:
    """Write the source in another format and verify that it is the same model."""
    weights_path(destination, to)  # reject a wrong destination before any work
    model, source_format, changes, family = open_reference(source, format=from_format, heads=heads)
    notice = ""
    if preprocessing is not None:
        set_preprocessing(model, preprocessing)
    else:
        notice = preprocessing_notice(model, family, source)
    lost = check_losses(model, to, destination, allow_loss)
    before, after = their_names(model, source_format), their_names(model, to)
    conversion = Conversion(
        name_of(model.config),
        source_format,
        to,
        [(before[name], after[name]) for name in before],
        [f"{part}: {change} ({detail})" for part, change, detail in changes],
        lost,
        storage_notes(model, destination, to),
        notice,
    )
    if dry_run:
        return conversion
    with temporary_sibling(destination) as temporary:
        save(model, temporary, to, allow_loss=allow_loss)
        reloaded, notes = reload(temporary, to, model)
        difference = max_difference(model, reloaded)
        first, second = model.state_dict(), reloaded.state_dict()
        same = first.keys() == second.keys() and all(
            torch.equal(first[n], second[n]) for n in first
        )
        if not same or not (difference <= TOLERANCE or lost):
            raise CheckpointError(
                f"verification failed: {'logits' if same else 'weights'} differ "
                f"(logits by {difference:.1e} of the largest); nothing was written to {destination}"
            )
        move_into_place(temporary, destination)
    return replace(conversion, difference=difference, notes=[*conversion.notes, *notes])


def reload(path: Path, format: str, model: Model) -> tuple[Model, list[str]]:
    """Load the result without hints; if it needs the number of heads, return a note."""
    heads = getattr(model.config, "heads", None)
    try:
        reloaded = open_reference(path, format=table_name(format))[0]
        if getattr(reloaded.config, "heads", None) == heads:
            return reloaded, []
    except CheckpointError:
        if heads is None:
            raise
    reloaded = open_reference(path, format=table_name(format), heads=heads)[0]
    return reloaded, [f"the file does not store the number of heads: load it with heads={heads}"]


def storage_notes(model: Model, destination: Path, to: str) -> list[str]:
    """Return what the target cannot store besides weights and numerics."""
    metadata = get_metadata(model)
    folder = destination.suffix not in SUFFIXES
    if to == "huggingface" and folder:
        unsupported = unsupported_preprocessing(metadata.preprocessing)
        return [f"{feature} is replaced by the closest setting" for feature in unsupported]
    if to == "timm" and folder and not metadata.preprocessing.antialias:
        return ["timm always resizes with antialiasing; this model's preprocessing does not"]
    if to == "bundle" or destination.suffix not in (".npz", ".pt", ".pth", ".bin", ".ckpt"):
        return []
    notes = [f"the file does not store the preprocessing: {describe_preprocessing(model)}"]
    if metadata.class_names:
        notes.append(f"the file does not store the {len(metadata.class_names)} class names")
    return notes


def their_names(model: Model, format: str) -> dict[str, list[str]]:
    """Return the names in a format of each of our tensors."""
    table = bundle if format == "bundle" else table_for(model.config, table_name(format))
    names = {rule.ours: list(rule.theirs) for rule in table.rules(model.config)}
    if format == OLDER:
        names = {ours: [google.pre_2021_name(n) for n in theirs] for ours, theirs in names.items()}
    return names


def summarize(tensors: list[tuple[list[str], list[str]]]) -> list[str]:
    """Summarize the renaming: two lines per module, with layers and parameters folded."""
    kinds: dict[tuple[str, str], list[tuple[str, str]]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for before, after in tensors:
        (source, leaf), (target, target_leaf) = (
            split_leaf(fold(names)) for names in (before, after)
        )
        leaves = kinds.setdefault((source, target), [])
        if (leaf, target_leaf) not in leaves:
            leaves.append((leaf, target_leaf))
        counts[source, target] += 1
    lines = []
    for (source, target), leaves in kinds.items():
        old, new = (fold([*dict.fromkeys(side)]) for side in zip(*leaves, strict=True))
        lines += [f"{counts[source, target]:4d}  {source}{old}", f"      -> {target}{new}"]
    return lines


def fold(names: list[str]) -> str:
    """Fold names that differ in one component: `layer.*.{query,key,value}.weight`."""
    names = [star_layers(name) for name in names]
    if len(names) == 1:
        return names[0]
    components = [re.split(r"([./])", name) for name in names]
    if len({len(each) for each in components}) > 1:
        return "{" + ",".join(names) + "}"
    columns = zip(*components, strict=True)
    return "".join(c[0] if len(set(c)) == 1 else "{" + ",".join(c) + "}" for c in columns)


def split_leaf(name: str) -> tuple[str, str]:
    """Split a name into its module, with the separator, and its last component."""
    match = re.fullmatch(r"(.*[./])([^./]+)", name)
    return (match[1], match[2]) if match else ("", name)


def star_layers(name: str) -> str:
    """Replace the numbers of layers, stages and units by stars; other numbers stay."""
    return re.sub(rf"((?:{NUMBERED})[._]?)\d+(?=[./])", r"\1*", name)


@torch.no_grad()
def max_difference(one: Model, other: Model) -> float:
    """Return the maximum relative difference of logits and features on a random image."""
    generator = torch.Generator().manual_seed(0)
    height, width = pair(one.config.image_size)
    image = torch.randn(1, one.config.channels, height, width, generator=generator)
    differences = []
    for method in ("forward", "features"):
        first, second = (getattr(model.eval(), method)(image) for model in (one, other))
        if first.shape != second.shape:
            return float("inf")
        difference = (first - second).abs().max() / first.abs().max().clamp(min=1e-30)
        differences.append(difference.item())
    return max(differences, key=lambda value: (value != value, value))  # NaN is the largest


@contextmanager
def temporary_sibling(destination: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder next to the destination, deleted afterwards."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.")
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error.strerror}") from None
    try:
        yield Path(folder) / destination.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move_into_place(temporary: Path, destination: Path) -> None:
    """Move a file or the files of a folder; the weights first, hand-written cards are kept."""
    try:
        if temporary.is_file():
            temporary.replace(destination)
            return
        destination.mkdir(exist_ok=True)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name != bundle.WEIGHTS):
            if path.name != bundle.CARD or bundle.is_generated_card(destination / path.name):
                os.replace(path, destination / path.name)
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error.strerror}") from None
