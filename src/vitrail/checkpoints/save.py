"""A model into files: our bundle, or anybody else's format."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from vitrail.checkpoints import google, hub
from vitrail.checkpoints.bundle import check_class_names, save_bundle
from vitrail.checkpoints.facts import Facts, confirmed, facts_of
from vitrail.checkpoints.files import SUFFIXES, write_file, write_json
from vitrail.checkpoints.formats import OUR_METADATA, table_for
from vitrail.checkpoints.rules import unwrapped, write
from vitrail.checkpoints.shapes import NumericLoss, other_numerics
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.models.build import Model
from vitrail.models.config import NUMERICS, to_dict

FOLDERS = ("bundle", "timm", "huggingface")  # formats that are more than a file of weights
OLDER = "google-older"  # vision_transformer's names before 2021


def save(
    model: Model,
    path: str | PathLike[str],
    format: str = "bundle",
    *,
    class_names: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    provenance: Mapping[str, Any] | None = None,
    allow_loss: bool = False,
) -> None:
    """Write a model so that it can be loaded again, here or in another library.

    >>> save(model, "folder", class_names=["cat", "dog"])  # a bundle
    >>> save(model, "ViT-B_16.npz", "google")
    >>> save(model, "folder", "huggingface")

    `provenance` is what the weights come from, such as {"data": fingerprint(source)}: plain values.
    `format` is bundle, google (or google-older), timm, huggingface, torchvision or bit_pytorch;
    weights are written as float32. What the format
    cannot express is an error; `allow_loss` gives up numerics, never weights.
    """
    model = unwrapped(model)
    facts = facts_of(model)
    if isinstance(class_names, str):
        raise CheckpointError(f"class_names={class_names!r} is one word; give a list of names")
    if class_names is not None:
        facts = replace(facts, class_names=tuple(class_names))
    if preprocessing is not None:
        provenance = confirmed(facts.provenance) | dict(provenance or {})
        facts = replace(facts, preprocessing=preprocessing, provenance={})
    if provenance is not None:
        facts = replace(facts, provenance=dict(facts.provenance) | dict(provenance))
    check_class_names(facts, model.config)
    if format == "bundle":
        save_bundle(model, Path(path), facts)
        return
    lost = losses(model, format, Path(path))
    refuse(lost, format, allow_loss)
    write_foreign(model, Path(path), format, facts, exact=not lost)


def refuse(lost: list[str], format: str, allow_loss: bool) -> None:
    """Stop where weights would be lost, or numerics that nobody has given up."""
    weights = [what for what in lost if not isinstance(what, NumericLoss)]
    if weights:
        raise CheckpointError(f"{format} cannot express {'; '.join(weights)}")
    if lost and not allow_loss:
        raise CheckpointError(
            f"{format} cannot express {'; '.join(lost)}; to write the weights all the same, "
            "say --allow-loss (in Python allow_loss=True)"
        )


def losses(model: Model, format: str, path: Path) -> list[str]:
    """What of the model the format has no words for; a bare file has fewer than a folder."""
    if format == "bundle":
        return []
    lost = table_for(model.config, table_name(format)).cannot(model.config)
    if format in FOLDERS and path.suffix in SUFFIXES:
        usual = NUMERICS[{"huggingface": "transformers"}.get(format, format)]
        lost += [what for what in other_numerics(model.config, usual) if what not in lost]
    return lost


def write_foreign(model: Model, path: Path, format: str, facts: Facts, *, exact: bool) -> None:
    """Weights and settings in a foreign format; our description too, where it fits exactly."""
    table = table_for(model.config, table_name(format))
    file = destination_file(path, format)
    tensors = write(model, table.rules(model.config))
    if format == OLDER:
        tensors = {google.early_name(name): tensor for name, tensor in tensors.items()}
    about = {"model": to_dict(model.config), **facts.to_dict()}
    ours = {OUR_METADATA: json.dumps(about)} if exact else {}
    write_file(file, tensors, {"format": "pt"} | ours)
    if file.parent == path:  # a folder: the settings go beside the weights
        for name, values in table.companions(model.config, facts).items():
            write_json(path / name, values)


def destination_file(path: Path, format: str) -> Path:
    """Where the weights go: into the file that is named, or a folder with its settings."""
    if format in FOLDERS and path.exists() and not path.is_dir() and path.suffix not in SUFFIXES:
        raise CheckpointError(f"cannot write to {path}: it is a file, not a folder")
    if format == "bundle":
        if path.is_file():
            raise CheckpointError(f"cannot write a bundle to {path}: it is a file, not a folder")
        return path / "model.safetensors"
    if table_name(format) == "google":
        if path.suffix != ".npz":
            raise CheckpointError(f"a Google checkpoint is a file; try {path}.npz")
        return path
    if path.suffix in SUFFIXES and path.suffix != ".npz":
        return path
    if path.suffix == ".npz":
        raise CheckpointError(f"only Google's files end in .npz; try {path.with_suffix('')}")
    if format not in FOLDERS:
        raise CheckpointError(f"a {format} checkpoint is a file; try {path}.safetensors")
    return path / "model.safetensors"


def table_name(format: str) -> str:
    return "google" if format == OLDER else format


def push(model: Model, name: str, *, private: bool = False) -> str:
    """Put a model on a hub as a bundle; the address to load it from."""
    import tempfile

    repository = hub.destination(name)  # a wrong one is told before anything is written
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / repository.name.split("/")[-1]
        save_bundle(model, bundle)
        return hub.push(bundle, name, private=private)
