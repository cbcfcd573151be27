"""A trained model from any reference: a file of weights, a folder, or a hub address."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from vitrail.checkpoints import bundle, hub
from vitrail.checkpoints.adapt import Change, adapt, under_numerics
from vitrail.checkpoints.bundle import CONFIG, holds_model
from vitrail.checkpoints.card import normalization_words, resize_words
from vitrail.checkpoints.facts import ASSUMED, PREPROCESSING, Facts, confirmed, facts_of
from vitrail.checkpoints.facts import from_dict as facts_from_dict
from vitrail.checkpoints.families import CERTAIN, Family, recognize, states_preprocessing
from vitrail.checkpoints.files import SUFFIXES, Entry, Weights, clear_errors, read_file, read_json
from vitrail.checkpoints.formats import FORMATS, OUR_METADATA, our_metadata, read_model, table_for
from vitrail.checkpoints.huggingface_processor import PROCESSOR
from vitrail.checkpoints.rules import Rule
from vitrail.data.preprocessing import PRESETS, Preprocessing, preset
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.build import Model
from vitrail.models.config import Numerics, Size, pair
from vitrail.models.registry import configuration, name_of

Reference = str | PathLike[str]
BESIDE_CONFIG = ("model.safetensors", "pytorch_model.bin")  # files that config.json belongs to
EXAMPLE = "hf:google/vit-base-patch16-224"  # an address that is there


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and how it came to be."""

    model: Model
    format: str  # "bundle", "google", …
    rules: list[Rule] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    family: Family | None = None  # that the preprocessing follows from, where it is not stated


def load(
    reference: Reference,
    *,
    format: str | None = None,
    heads: int | None = None,
    num_classes: int | None = None,
    image_size: Size | None = None,
    channels: int | None = None,
    patch_size: Size | None = None,
    keep_representation: bool = False,
    numerics: str | Numerics | None = None,
    preprocessing: str | Preprocessing | None = None,
    tell: Callable[[str], None] | None = None,
) -> Model:
    """The model a reference stands for, with its weights; `model.facts` is what else is known.

    It is ready to answer (`eval` mode); `model.train()` lets it drop what it drops in training.

    >>> model = load("ViT-B_16.npz")  # a Google checkpoint; nothing else need be said
    >>> model = load("ViT-B_16.npz", num_classes=10, image_size=384)  # fitted to a new task
    >>> model = load("folder")  # a bundle of ours, or what timm or transformers saved
    >>> model = load("hf:google/vit-base-patch16-224")  # from a hub
    >>> model = load("hf:google/vit-base-patch16-224", numerics="google")  # as its authors run it

    `format` says what a file is where it cannot be recognized, `heads` how many attention heads a
    model has where a file does not say. `numerics`, a name in `NUMERICS` or a value, takes the
    place of those that the file's library has. `preprocessing`, a name that `preset` knows or a
    value, does the same for how images are prepared; a checkpoint that does not state it is loaded
    with what is usual for its family, and a warning if that is not known. The other arguments fit
    the model to a new task; whatever is changed is told, to standard error unless `tell` says
    otherwise.
    """
    loaded = open_reference(reference, format=format, heads=heads)
    model, numeric = under_numerics(loaded.model, numerics)
    model, changes = adapt(
        model,
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        patch_size=patch_size,
        keep_representation=keep_representation,
    )
    say = tell or (lambda line: print(line, file=sys.stderr))
    if changes := [*loaded.changes, *numeric, *changes]:
        for line in (f"{name_of(model.config)} from {reference}", *map(str, changes)):
            say(line)
    if preprocessing is not None:
        set_preprocessing(model, preprocessing)
    elif notice := preprocessing_notice(model, loaded.family, reference):
        say(notice)
    return model.eval()


def open_reference(
    reference: Reference, *, format: str | None = None, heads: int | None = None
) -> Loaded:
    """The model as it is, and how its format stores it."""
    text = str(reference)
    if not text or not isinstance(reference, str | PathLike):
        raise CheckpointError(f"{reference!r} names no model; give a file, a folder or {EXAMPLE}")
    path = hub.fetch(text) if hub.is_address(text) else Path(reference)
    with clear_errors(path):
        if not path.exists():
            raise nothing_at(text)
        if path.name in BESIDE_CONFIG and holds_model(path.parent):
            path = path.parent  # the settings beside such a file belong to it
        weights, header = read_folder(path) if path.is_dir() else read_single(path)
    if heads is not None:
        weights.settings["heads"] = heads
    if bundle.is_bundle(weights) and format in (None, "bundle"):
        model = bundle.read_bundle(weights, header)
        return Loaded(model, "bundle", bundle.rules(model.config))
    if format == "bundle":
        raise CheckpointError(f"{reference} is no bundle: it has no config.json of vitrail's")
    model, found, tidied = read_model(weights, format)
    family = foreign_facts(model, weights, found, text)
    told = [Change(name, "left out", why) for name, why in tidied.left_out.items()]
    told += [Change(name, "guessed", how) for name, how in tidied.guessed.items()]
    rules = table_for(model.config, found).rules(model.config)
    return Loaded(model, found, rules, told, family)


def nothing_at(text: str) -> CheckpointError:
    """Why there is nothing to load: a name has no weights, and a file may be missing."""
    try:
        configuration(text)
    except ConfigError as error:
        hint = "" if Path(text).suffix in SUFFIXES else f", and as a name: {error}"
        return CheckpointError(f"there is no file {text!r}{hint}")
    return CheckpointError(
        f"{text!r} is a name without weights; vitrail.create({text!r}) makes a fresh model, "
        f"trained ones are at addresses such as {EXAMPLE}"
    )


def is_name(reference: str) -> bool:
    """Whether a reference is the name of a model, which comes without weights."""
    if Path(reference).exists():
        return False
    try:
        configuration(reference)
    except ConfigError:
        return False
    return True


def read_single(path: Path) -> tuple[Weights, dict[str, Any]]:
    weights = read_file(path)
    return weights, weights.settings


def read_folder(folder: Path) -> tuple[Weights, dict[str, Any]]:
    """Weights of a folder with config.json as their settings, and the weights' own header."""
    entries: dict[str, Entry] = {}
    header: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    guessed: dict[str, str] = {}
    layout: tuple[str, ...] = ()
    for path in weight_files(folder):
        weights = read_file(path)
        entries |= weights.entries
        header |= weights.settings
        left_out |= weights.left_out
        guessed |= weights.guessed
        layout = weights.layout
    settings = {}
    if holds_model(folder):
        settings = read_json(folder / CONFIG)
        header.pop(OUR_METADATA, None)  # config.json decides: somebody may have changed it
    if (folder / PROCESSOR).exists():
        settings[PROCESSOR] = read_json(folder / PROCESSOR)
    return Weights(entries, header | settings, left_out, guessed, layout), header


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights: one, or the parts an index names."""
    found = hub.weight_files(path.name for path in folder.iterdir())
    if len(found) != 1:
        what = "no weights" if not found else f"{len(found)} files of weights"
        raise CheckpointError(f"{folder} holds {what}; name the file itself")
    if not found[0].endswith(".index.json"):
        return [folder / found[0]]
    names = hub.shard_names(folder / found[0])
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{folder / found[0]} names files outside its folder")
    return [folder / name for name in names]


def foreign_facts(model: Model, weights: Weights, format: str, source: str) -> Family | None:
    """Give a model the facts of a foreign checkpoint; the family that its preprocessing is of.

    None where the preprocessing is stated, where the format has only one, and where it is assumed.
    """
    name = source if hub.is_address(source) else Path(source).name
    provenance: dict[str, Any] = {"source": name or source, "format": format}
    config, settings, family = model.config, weights.settings, None
    size, channels = pair(config.image_size), config.channels
    ours = our_metadata(settings)
    if ours is not None and "preprocessing" in ours:
        facts = facts_from_dict(ours)
    else:
        facts = table_for(config, format).read_facts(settings, config)
        stated = facts is not None and states_preprocessing(settings, format)
        if facts is None:
            facts = Facts(preprocessing=preset(FORMATS[format].preprocessing, size, channels))
        if not stated and format not in CERTAIN:
            family = recognize(weights, format, Path(name).name)
            if family is None:
                provenance[PREPROCESSING] = ASSUMED
            else:
                facts = replace(facts, preprocessing=preset(family.preset, size, channels))
    names = facts.class_names if len(facts.class_names) == config.num_classes else ()
    model.facts = replace(facts, class_names=names, provenance=dict(facts.provenance) | provenance)
    return family


def preprocessing_notice(model: Model, family: Family | None, source: Reference) -> str:
    """One line about preprocessing that the checkpoint does not state; empty if it does."""
    if family is not None:
        return f"recognized {family.name} by {family.evidence}; preprocessing: {prepared(model)}"
    if facts_of(model).provenance.get(PREPROCESSING) != ASSUMED:
        return ""
    return (
        f"warning: {source} does not state its preprocessing; assuming {prepared(model)}; "
        f"if that is wrong, choose another with --preprocessing (in Python preprocessing=): "
        f"{', '.join(PRESETS)}"
    )


def prepared(model: Model) -> str:
    how = facts_of(model).preprocessing
    return f"{normalization_words(how)}, resize {resize_words(how)}"


def set_preprocessing(model: Model, given: str | Preprocessing) -> None:
    """Take another preprocessing, by name or value, in place of what the checkpoint came with."""
    config, facts = model.config, facts_of(model)
    how = given
    if isinstance(how, str):
        how = preset(how, pair(config.image_size), config.channels)
    if len(how.mean) != config.channels:
        raise ConfigError(
            f"preprocessing for {len(how.mean)} channels does not fit a model of {config.channels}"
        )
    model.facts = replace(facts, preprocessing=how, provenance=confirmed(facts.provenance))
