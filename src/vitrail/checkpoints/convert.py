"""From one format to another, provably the same model.

The result is written under a temporary name, loaded again, and its logits compared with the
source's on a probe image; only then does it take its place.
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
from vitrail.checkpoints.facts import facts_of
from vitrail.checkpoints.files import SUFFIXES
from vitrail.checkpoints.formats import table_for
from vitrail.checkpoints.huggingface_processor import cannot_prepare
from vitrail.checkpoints.load import (
    Loaded,
    Reference,
    open_reference,
    prepared,
    preprocessing_notice,
    set_preprocessing,
)
from vitrail.checkpoints.save import OLDER, destination_file, losses, refuse, save, table_name
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.models.build import Model
from vitrail.models.config import pair
from vitrail.models.registry import name_of

COUNTED = "encoderblock|MixerBlock|encoder_layer|blocks?|layers?|stages|unit"
TOLERANCE = 1e-6  # of the largest logit; the same weights and numerics give the same logits


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion does, or did."""

    model: str
    source_format: str
    target_format: str
    tensors: list[tuple[list[str], list[str]]]  # their names before and after
    changes: list[str]
    lost: list[str]
    notes: list[str]  # what is not in the result though it belongs to the model
    notice: str = ""  # where the preprocessing comes from, if the source does not state it
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
    """Write the source's model in another format, and check that it is the same model."""
    destination_file(destination, to)  # a wrong one is told before any work is done
    loaded = open_reference(source, format=from_format, heads=heads)
    notice = ""
    if preprocessing is not None:
        set_preprocessing(loaded.model, preprocessing)
    else:
        notice = preprocessing_notice(loaded.model, loaded.family, source)
    lost = losses(loaded.model, to, destination)
    refuse(lost, to, allow_loss)
    planned = Conversion(
        name_of(loaded.model.config),
        loaded.format,
        to,
        tensor_names(loaded, to),
        [f"{change.part}: {change.what} ({change.how})" for change in loaded.changes],
        lost,
        notes_on(loaded, destination, to),
        notice,
    )
    if dry_run:
        return planned
    with beside(destination) as temporary:
        save(loaded.model, temporary, to, allow_loss=allow_loss)
        again, notes = reopened(temporary, to, loaded.model)
        difference = largest_difference(loaded.model, again)
        same = same_weights(loaded.model, again)
        if not same or not (difference <= TOLERANCE or lost):
            raise CheckpointError(
                f"what was written gives other {'logits' if same else 'weights'} "
                f"(by {difference:.1e} of the largest); nothing was left at {destination}"
            )
        put_in_place(temporary, destination)
    return replace(planned, difference=difference, notes=[*planned.notes, *notes])


def reopened(path: Path, format: str, model: Model) -> tuple[Model, list[str]]:
    """The result as anybody would load it; with the number of heads, and a note, where it must."""
    heads = getattr(model.config, "heads", None)
    try:
        again = open_reference(path, format=table_name(format)).model
        if getattr(again.config, "heads", None) == heads:
            return again, []
    except CheckpointError:
        if heads is None:
            raise
    again = open_reference(path, format=table_name(format), heads=heads).model
    return again, [f"such a file does not say how many heads there are: load it with heads={heads}"]


def same_weights(one: Model, other: Model) -> bool:
    """To the last bit."""
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def notes_on(loaded: Loaded, destination: Path, to: str) -> list[str]:
    """What the target has no place for that is not a matter of weights."""
    facts = facts_of(loaded.model)
    folder = destination.suffix not in SUFFIXES
    if to == "huggingface" and folder:
        return [f"{what} becomes the nearest thing" for what in cannot_prepare(facts.preprocessing)]
    if to == "timm" and folder and not facts.preprocessing.antialias:
        return ["timm always antialiases when it resizes; this model's preprocessing does not"]
    if to == "bundle" or destination.suffix not in (".npz", ".pt", ".pth", ".bin", ".ckpt"):
        return []
    notes = [f"preprocessing is not part of such a file: {prepared(loaded.model)}"]
    if facts.class_names:
        notes.append(f"the {len(facts.class_names)} class names are not part of such a file")
    return notes


def tensor_names(loaded: Loaded, to: str) -> list[tuple[list[str], list[str]]]:
    """For each of our tensors, what it is called before and after."""
    config = loaded.model.config
    ours = [rule.ours for rule in bundle.rules(config)]
    before = {rule.ours: list(rule.theirs) for rule in loaded.rules}
    table = bundle if to == "bundle" else table_for(config, table_name(to))
    after = {rule.ours: list(rule.theirs) for rule in table.rules(config)}
    if to == OLDER:
        after = {ours: [google.early_name(n) for n in theirs] for ours, theirs in after.items()}
    return [(before.get(name, [name]), after[name]) for name in ours if name in after]


def summary(tensors: list[tuple[list[str], list[str]]]) -> list[str]:
    """The tensors by kind: one pair of lines for all layers and all parts of a module."""
    kinds: dict[tuple[str, str], list[tuple[str, str]]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for before, after in tensors:
        (here, leaf), (there, other_leaf) = apart(folded(before)), apart(folded(after))
        leaves = kinds.setdefault((here, there), [])
        if (leaf, other_leaf) not in leaves:
            leaves.append((leaf, other_leaf))
        counts[here, there] += 1
    lines = []
    for (here, there), leaves in kinds.items():
        ours, theirs = (folded([*dict.fromkeys(side)]) for side in zip(*leaves, strict=True))
        lines += [f"{counts[here, there]:4d}  {here}{ours}", f"      -> {there}{theirs}"]
    return lines


def folded(names: list[str]) -> str:
    """`layer.*.{query,key,value}.weight` for three names that differ in one word."""
    names = [starred(name) for name in names]
    if len(names) == 1:
        return names[0]
    words = [re.split(r"([./])", name) for name in names]
    if len({len(each) for each in words}) > 1:
        return "{" + ",".join(names) + "}"
    places = zip(*words, strict=True)
    return "".join(at[0] if len(set(at)) == 1 else "{" + ",".join(at) + "}" for at in places)


def apart(name: str) -> tuple[str, str]:
    """A name's module with its separator, and its last word."""
    match = re.fullmatch(r"(.*[./])([^./]+)", name)
    return (match[1], match[2]) if match else ("", name)


def starred(name: str) -> str:
    """A name with the numbers of layers, stages and units as stars; other numbers stay."""
    return re.sub(rf"((?:{COUNTED})[._]?)\d+(?=[./])", r"\1*", name)


@torch.no_grad()
def largest_difference(one: Model, other: Model) -> float:
    """How far apart two models are on a probe image, in logits or in features, relatively."""
    generator = torch.Generator().manual_seed(0)
    height, width = pair(one.config.image_size)
    probe = torch.randn(1, one.config.channels, height, width, generator=generator)
    differences = []
    for look in ("forward", "features"):
        first, second = (getattr(model.eval(), look)(probe) for model in (one, other))
        if first.shape != second.shape:
            return float("inf")
        difference = (first - second).abs().max() / first.abs().max().clamp(min=1e-30)
        differences.append(difference.item())
    return max(differences, key=lambda value: (value != value, value))  # NaN is the largest


@contextmanager
def beside(destination: Path) -> Iterator[Path]:
    """A place for the result next to where it will be, gone afterwards whatever happens."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.")
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error.strerror}") from None
    try:
        yield Path(folder) / destination.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(temporary: Path, destination: Path) -> None:
    """Move a file, or a folder's files, to where they belong."""
    try:
        if temporary.is_file():
            temporary.replace(destination)
            return
        destination.mkdir(exist_ok=True)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name != "model.safetensors"):
            if path.name != bundle.CARD or bundle.may_write_card(destination / path.name):
                os.replace(path, destination / path.name)
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error.strerror}") from None
