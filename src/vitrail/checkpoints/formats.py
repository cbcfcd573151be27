"""The formats we read and write, and how a file tells which it is.

A format is a table per family. Adding one is a module with the functions of `Table`, and an entry
of `FORMATS`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vitrail.checkpoints import (
    bit_pytorch,
    google,
    google_bit,
    google_mixer,
    google_vit,
    huggingface,
    timm_bit,
    timm_mixer,
    timm_vit,
    torchvision_vit,
)
from vitrail.checkpoints.facts import Facts
from vitrail.checkpoints.files import Entry, Weights
from vitrail.checkpoints.rules import Entries, Rule, read
from vitrail.errors import CheckpointError, ConfigError, unknown
from vitrail.models.build import Model
from vitrail.models.config import BitConfig, Config, MixerConfig, VitConfig, from_dict

WRAPPERS = ("module.", "_orig_mod.")
OUR_METADATA = "vitrail-model"  # key under which files we write carry the description


@dataclass(frozen=True, slots=True)
class Table:
    """One family in one format."""

    family: type[Config]
    recognizes: Callable[[Entries], bool]  # by names alone
    describe: Callable[[Weights], Config]  # from names, shapes and what is written beside them
    rules: Callable[..., list[Rule]]
    cannot: Callable[..., list[str]]  # what of a model the format has no words for
    companions: Callable[..., dict[str, Any]]  # JSON files that belong beside the weights
    read_facts: Callable[..., Facts | None]  # what such files say


@dataclass(frozen=True, slots=True)
class Format:
    """Somebody's way of storing models."""

    preprocessing: str  # the preset that belongs to it
    tidy: Callable[[Weights], Weights]  # older names and layouts to the tables'
    tables: tuple[Table, ...]


def table(module: Any, family: type[Config]) -> Table:
    """The functions of a module; a format of bare weights has no companions."""
    return Table(
        family,
        module.recognizes,
        module.describe,
        module.rules,
        module.cannot,
        getattr(module, "companions", lambda config, facts: {}),
        getattr(module, "read_facts", lambda settings, config: None),
    )


FORMATS = {
    "google": Format(
        "google",
        google.tidy,
        (
            table(google_bit, BitConfig),
            table(google_mixer, MixerConfig),
            table(google_vit, VitConfig),
        ),
    ),
    "huggingface": Format("transformers", huggingface.tidy, (table(huggingface, VitConfig),)),
    "torchvision": Format(
        "torchvision", torchvision_vit.tidy, (table(torchvision_vit, VitConfig),)
    ),
    "timm": Format(
        "timm",
        timm_vit.tidy,
        (table(timm_bit, BitConfig), table(timm_mixer, MixerConfig), table(timm_vit, VitConfig)),
    ),
    "bit_pytorch": Format("big_vision", lambda weights: weights, (table(bit_pytorch, BitConfig),)),
}


def read_model(weights: Weights, format: str | None) -> tuple[Model, str, Weights]:
    """The model that weights make, their format, and the weights as they were understood."""
    if format is not None and format not in FORMATS:
        raise unknown("format", format, FORMATS)
    weights = replace(weights, entries=unwrapped(weights.entries))
    for name in FORMATS if format is None else [format]:
        tidied = FORMATS[name].tidy(weights)
        for each in FORMATS[name].tables:
            if each.recognizes(tidied.entries):
                config = described(each, tidied)
                model = read(tidied.entries, each.rules(config), config)
                return model, name, tidied
    looked = format or "Google, timm, Hugging Face, torchvision, DeiT, DINO or BiT"
    some = ", ".join(sorted(weights.entries)[:3]) or "nothing"
    raise CheckpointError(f"the weights are in no format of {looked}: the file holds {some} …")


def unwrapped(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries without what torch.compile and data parallelism put before every name."""
    while entries and all(name.startswith(WRAPPERS) for name in entries):
        entries = {name.split(".", 1)[1]: entry for name, entry in entries.items()}
    return entries


def described(each: Table, weights: Weights) -> Config:
    try:
        if (ours := our_metadata(weights.settings)) is not None:
            return from_dict(ours["model"])
        return each.describe(weights)
    except ConfigError as error:
        raise CheckpointError(f"the file describes no possible model: {error}") from None


def our_metadata(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a file in a foreign format that we wrote says of itself, which shapes cannot."""
    if OUR_METADATA not in settings:
        return None
    try:
        values = json.loads(settings[OUR_METADATA])
    except (ValueError, TypeError, RecursionError):
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise CheckpointError(f"the file's header holds no description under {OUR_METADATA!r}")
    return values


def table_for(config: Config, format: str) -> Table:
    """The table that writes a model into a format."""
    if format not in FORMATS:
        raise unknown("format", format, ["bundle", *FORMATS])
    for each in FORMATS[format].tables:
        if isinstance(config, each.family):
            return each
    raise CheckpointError(
        f"{format} has no {family_name(config)}; formats that do: {listed_formats(config)}"
    )


def listed_formats(config: Config) -> str:
    found: Iterable[str] = (
        name
        for name, each in FORMATS.items()
        if any(isinstance(config, one.family) for one in each.tables)
    )
    return ", ".join(["bundle", *found])


def family_name(config: Config) -> str:
    match config:
        case BitConfig():
            return "BiT"
        case MixerConfig():
            return "Mixer"
        case _:
            return "hybrid" if config.stem == "resnet" else "ViT"
