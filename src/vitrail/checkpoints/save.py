"""Save a model as a bundle or in another library's format."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from vitrail.checkpoints import google, hub
from vitrail.checkpoints.bundle import check_class_names, save_bundle
from vitrail.checkpoints.files import SUFFIXES, write_file, write_json
from vitrail.checkpoints.load import OUR_METADATA, table_for
from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.rules import NumericsLoss, unsupported_numerics, unwrap_model, write
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, to_dict
from vitrail.models.vit import Model

FOLDERS = ("bundle", "timm", "huggingface")  # formats with settings next to the weights
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
    """Save a model so that vitrail or another library can load it. Weights become float32.

    >>> save(model, "folder", class_names=["cat", "dog"])  # a bundle
    >>> save(model, "ViT-B_16.npz", "google")
    >>> save(model, "folder", "huggingface")

    Args:
        format: bundle, google, google-older, timm, huggingface, torchvision or bit_pytorch.
        provenance: JSON values to record, such as {"data": fingerprint(source)}.
        allow_loss: write the weights although the format cannot express the model's numerics.
            Any other unsupported feature is an error.
    """
    model, destination = unwrap_model(model), Path(path)
    metadata = get_metadata(model)
    if isinstance(class_names, str):
        raise CheckpointError(f"class_names={class_names!r} is a string; expected a list of names")
    if class_names is not None:
        metadata = replace(metadata, class_names=tuple(class_names))
    if preprocessing is not None:
        stated = metadata.stated_provenance()
        metadata = replace(metadata, preprocessing=preprocessing, provenance=stated)
    if provenance is not None:
        metadata = replace(metadata, provenance=dict(metadata.provenance) | dict(provenance))
    check_class_names(metadata, model.config)
    if format == "bundle":
        save_bundle(model, destination, metadata)
        return
    losses = check_losses(model, format, destination, allow_loss)
    table = table_for(model.config, table_name(format))
    file = weights_path(destination, format)
    tensors = write(model, table.rules(model.config))
    if format == OLDER:
        tensors = {google.pre_2021_name(name): tensor for name, tensor in tensors.items()}
    header = {"format": "pt"}
    if not losses:  # our config is exact only if nothing is lost
        values = {"model": to_dict(model.config), **metadata.to_dict()}
        header[OUR_METADATA] = json.dumps(values)
    write_file(file, tensors, header)
    if file.parent == destination:
        for name, values in table.json_files(model.config, metadata).items():
            write_json(destination / name, values)


def list_losses(model: Model, format: str, path: Path) -> list[str]:
    """Return the features of a model that the format cannot express at this path."""
    if format == "bundle":
        return []
    losses = table_for(model.config, table_name(format)).unsupported(model.config)
    if format in FOLDERS and path.suffix in SUFFIXES:  # without config.json
        numerics = NUMERICS[{"huggingface": "transformers"}.get(format, format)]
        more = unsupported_numerics(model.config, numerics)
        losses += [loss for loss in more if loss not in losses]
    return losses


def check_losses(model: Model, format: str, path: Path, allow_loss: bool) -> list[str]:
    """Raise if weights would be lost, or numerics without `allow_loss`; return the losses."""
    losses = list_losses(model, format, path)
    if weights := [loss for loss in losses if not isinstance(loss, NumericsLoss)]:
        raise CheckpointError(f"{format} cannot express {'; '.join(weights)}")
    if losses and not allow_loss:
        raise CheckpointError(
            f"{format} cannot express {'; '.join(losses)}; to write the weights anyway, pass "
            "--allow-loss (in Python allow_loss=True)"
        )
    return losses


def weights_path(path: Path, format: str) -> Path:
    """Return where the weights go: the file itself, or model.safetensors in a folder."""
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
    if path.suffix == ".npz":
        raise CheckpointError(f".npz is Google's format only; try {path.with_suffix('')}")
    if path.suffix in SUFFIXES:
        return path
    if format not in FOLDERS:
        raise CheckpointError(f"a {format} checkpoint is a file; try {path}.safetensors")
    return path / "model.safetensors"


def table_name(format: str) -> str:
    return "google" if format == OLDER else format


def push(model: Model, name: str, *, private: bool = False) -> str:
    """Upload a model to the hub as a bundle; return its address."""
    repository, _ = hub.parse(name, destination=True)  # before anything is written
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / repository.split("/")[-1]
        save_bundle(model, bundle)
        return hub.push(bundle, name, private=private)
