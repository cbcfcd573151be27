"""Our own format: a folder that says everything there is to know about a model.

    model.safetensors   the weights, and in the file's header all of config.json
    config.json         architecture, numerics, preprocessing, class names, provenance
    README.md           a model card

Each file is whole or absent. A crash between two of them is noticed, because config.json names the
weights it belongs to; then the header is believed, which was written together with the weights. So
a bundle is always either the old one or the new one. Other files in the folder are left alone.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import __version__
from vitrail.checkpoints.card import GENERATED, model_card
from vitrail.checkpoints.facts import Facts, facts_of
from vitrail.checkpoints.facts import from_dict as facts_from_dict
from vitrail.checkpoints.files import Weights, whole_or_absent, write_file, write_json
from vitrail.checkpoints.rules import Rule, read, saved_tensors
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.build import Model, build
from vitrail.models.config import Config, from_dict, to_dict

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CARD = "README.md"
HEADER = "vitrail-bundle"  # the key of the safetensors header that holds config.json
VERSION = 1
KEYS = ("vitrail", "model", "preprocessing", "class_names", "provenance", "multi_label", "weights")


def save_bundle(model: Model, folder: Path, facts: Facts | None = None) -> None:
    """Write a model and its facts into a folder."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot write a bundle to {folder}: it is a file, not a folder")
    facts = facts_of(model) if facts is None else facts
    check_class_names(facts, model.config)
    tensors = saved_tensors(model)
    config: dict[str, Any] = {
        "vitrail": {"bundle": VERSION, "version": __version__},
        "model": to_dict(model.config),
        **facts.to_dict(),
    }
    config["weights"] = digest(tensors, config)
    write_file(folder / WEIGHTS, tensors, {HEADER: json.dumps(config)})
    write_json(folder / CONFIG, config)
    if may_write_card(folder / CARD):
        name = folder.resolve().name
        with whole_or_absent(folder / CARD) as temporary:
            temporary.write_text(model_card(model.config, facts, name), encoding="utf-8")


def holds_model(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def check_free(
    folder: Path, *, overwrite: bool, instead: str = "name another --out, or say --overwrite"
) -> None:
    """Refuse to put a model in the place of another, unless that is wanted."""
    if holds_model(folder) and not overwrite:
        raise ConfigError(f"{folder} holds a model already; {instead}")


def may_write_card(card: Path) -> bool:
    """There is none yet, or one that we made; what somebody wrote by hand stays."""
    if not card.exists():
        return True
    try:
        return card.read_bytes().startswith(GENERATED.encode())
    except OSError:
        return False


def is_bundle(weights: Weights) -> bool:
    return "vitrail" in weights.settings or HEADER in weights.settings


def read_bundle(weights: Weights, header: dict[str, Any]) -> Model:
    """The model of a bundle; `header` is what stands in the head of its weights."""
    settings, written = weights.settings, None
    if HEADER in header:
        try:
            inner = json.loads(header[HEADER])
        except (ValueError, RecursionError):
            raise CheckpointError("the header of the bundle's weights is broken") from None
        if not isinstance(inner, dict):
            raise CheckpointError("the header of the bundle's weights is broken")
        if settings.get("weights") != inner.get("weights"):
            settings = inner  # config.json is missing, or was not yet written when saving stopped
        written = inner
    elif "weights" in settings:
        written = {key: value for key, value in settings.items() if key in KEYS}
    version = settings.get("vitrail", {})
    version = version.get("bundle") if isinstance(version, dict) else None
    if version != VERSION:
        raise CheckpointError(f"the bundle is of version {version!r}; this vitrail reads {VERSION}")
    if not isinstance(settings.get("model"), dict):
        raise CheckpointError("the bundle's config.json does not describe a model")
    try:
        config, facts = from_dict(settings["model"]), facts_from_dict(settings)
    except ConfigError as error:
        raise CheckpointError(f"the bundle describes no possible model: {error}") from None
    check_class_names(facts, config)
    model = read(weights.entries, rules(config), config)
    if written is not None:
        check_digest(model, written)
    model.facts = facts
    return model


def check_digest(model: Model, written: dict[str, Any]) -> None:
    """Refuse weights in which a bit has changed since they were saved."""
    stated = written.pop("weights", None)
    if digest(model.state_dict(), written) != stated:
        raise CheckpointError("the bundle's weights have changed since they were saved")


def rules(config: Config) -> list[Rule]:
    """Our names are our names."""
    return [Rule(name, (name,)) for name in build(config).state_dict()]


def check_class_names(facts: Facts, config: Config) -> None:
    names = facts.class_names
    for name in names:
        if not isinstance(name, str) or name.encode(errors="replace").decode() != name:
            raise CheckpointError(f"the class name {name!r} cannot be written; give plain text")
    if names and len(names) != config.num_classes:
        raise CheckpointError(
            f"{len(names)} class names do not fit a model of {config.num_classes} classes"
        )


def digest(tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """A fingerprint of weights and description: the same model always has the same."""
    total = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].cpu().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
