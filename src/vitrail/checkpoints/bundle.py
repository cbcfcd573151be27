"""The bundle: vitrail's own format, a folder that fully describes a model.

    model.safetensors   weights; the file header contains a copy of config.json
    config.json         architecture, numerics, preprocessing, class names, provenance
    README.md           model card

Weights are float32 or, in half the space, float16; either is loaded as float32, and the digest is
that of the float32 values.

Each file is written atomically. config.json names the weights it belongs to by digest; after a
crash between two files they disagree, and the header, written together with the weights, wins. So
a bundle is always the old one or the new one. Other files in the folder are not touched.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import __version__
from vitrail.checkpoints.files import Checkpoint, atomic_write, write_file, write_json
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.checkpoints.rules import (
    Rule,
    check_layers,
    float32_state_dict,
    meta_state_dict,
    read,
    same,
)
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError, ConfigError
from vitrail.formatting import comma_list
from vitrail.models.config import BitConfig, Config, VitConfig, from_dict, pair, to_dict
from vitrail.models.registry import name_of
from vitrail.models.vit import Model, build

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CARD = "README.md"
HEADER = "vitrail-bundle"  # the key of config.json in the safetensors header
VERSION = 1
KEYS = ("vitrail", "model", "preprocessing", "class_names", "provenance", "multi_label")
KEYS += ("conformal", "weights")
GENERATED = "<!-- made by vitrail; saving again rewrites it unless this line is gone -->"
MAX_CARD_CLASSES = 20
DTYPES = (torch.float32, torch.float16)  # of stored weights


def save_bundle(
    model: Model,
    folder: Path,
    metadata: Metadata | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a model and its metadata into a folder, with weights rounded to `dtype`."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot write a bundle to {folder}: it is a file, not a folder")
    metadata = get_metadata(model) if metadata is None else metadata
    check_class_names(metadata, model.config)
    if dtype not in DTYPES:
        raise CheckpointError(f"a bundle stores float32 or float16 weights, not {dtype}")
    tensors = float32_state_dict(model)
    stored = {name: x.to(dtype) for name, x in tensors.items()}
    for name, x in stored.items():
        if torch.isinf(x).any() and not torch.isinf(tensors[name]).any():
            largest = float(tensors[name].abs().max())
            raise CheckpointError(
                f"{name} has values up to {largest:.3g}, more than float16 can express; store the "
                "weights as float32"
            )
    config: dict[str, Any] = {
        "vitrail": {"bundle": VERSION, "version": __version__},
        "model": to_dict(model.config),
        **metadata.to_dict(),
    }
    config["weights"] = digest({name: x.float() for name, x in stored.items()}, config)
    write_file(folder / WEIGHTS, stored, {HEADER: json.dumps(config)})
    write_json(folder / CONFIG, config)
    if is_generated_card(folder / CARD):
        with atomic_write(folder / CARD) as temporary:
            card = model_card(model.config, metadata, folder.resolve().name, dtype)
            temporary.write_text(card, encoding="utf-8")


def contains_model(folder: Path) -> bool:
    return os.path.exists(folder / CONFIG)  # False for a folder that may not be read


def check_overwrite(
    folder: Path, *, overwrite: bool, hint: str = "choose another --out, or pass --overwrite"
) -> None:
    """Raise if the folder contains a model, unless it may be overwritten."""
    if contains_model(folder) and not overwrite:
        raise ConfigError(f"{folder} already contains a model; {hint}")


def is_generated_card(card: Path) -> bool:
    """Return whether a model card is missing or generated; one written by hand is kept."""
    if not card.exists():
        return True
    try:
        return card.read_bytes().startswith(GENERATED.encode())
    except OSError:
        return False


def read_bundle(checkpoint: Checkpoint, header: dict[str, Any]) -> Model:
    """Load the model of a bundle; `header` is the metadata in the weights file."""
    settings, written = checkpoint.settings, None
    if HEADER in header:
        try:
            written = json.loads(header[HEADER])
        except (ValueError, RecursionError):
            written = None
        if not isinstance(written, dict):
            raise CheckpointError("corrupt bundle: invalid JSON in the header of the weights")
        if settings.get("weights") != written.get("weights"):
            settings = written  # config.json is missing, or older after a crash while saving
    elif "weights" in settings:
        written = {key: value for key, value in settings.items() if key in KEYS}
    writer = settings.get("vitrail")
    writer = writer if isinstance(writer, dict) else {}
    if (version := writer.get("bundle")) != VERSION:
        text = f"unsupported bundle version {version!r}; supported: {VERSION}"
        if "version" in writer:
            text += f"; written by vitrail {writer['version']}: upgrade vitrail"
        raise CheckpointError(text)
    if not isinstance(settings.get("model"), dict):
        raise CheckpointError("corrupt bundle: config.json does not describe a model")
    try:
        config, metadata = from_dict(settings["model"]), Metadata.from_dict(settings)
    except ConfigError as error:
        raise CheckpointError(f"invalid model config in the bundle: {error}") from None
    check_class_names(metadata, config)
    check_layers(config, checkpoint.tensors)
    model = read(checkpoint.tensors, rules(config), config)
    if written is not None:
        expected = written.pop("weights", None)
        if digest(model.state_dict(), written) != expected:
            raise CheckpointError("corrupt bundle: the weights do not match their digest")
    model.metadata = metadata
    return model


def rules(config: Config) -> list[Rule]:
    return [same(name, name) for name in meta_state_dict(config)]


def check_class_names(metadata: Metadata, config: Config) -> None:
    names = metadata.class_names
    for name in names:
        if not isinstance(name, str) or name.encode(errors="replace").decode() != name:
            raise CheckpointError(f"class name {name!r} is not valid text")
    if names and len(names) != config.num_classes:
        raise CheckpointError(
            f"expected {config.num_classes} class names for the model, got {len(names)}"
        )


def digest(tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    total = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].cpu().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def model_card(config: Config, metadata: Metadata, folder: str, dtype: torch.dtype) -> str:
    """Return the README.md of a bundle."""
    height, width = pair(config.image_size)
    numerics = config.numerics
    if isinstance(config, BitConfig):
        numerics_text = f"GroupNorm epsilon {numerics.group_norm_eps:g}"
    else:
        swiglu = isinstance(config, VitConfig) and config.mlp == "swiglu"
        activation = "SwiGLU" if swiglu else f"{numerics.gelu} GELU"
        numerics_text = f"{activation}, LayerNorm epsilon {numerics.norm_eps:g}"
    rows = {
        "architecture": name_of(config),
        "parameters": f"{sum(p.numel() for p in build(config).parameters()):,}",
        "image": f"{height} x {width} pixels, {config.channels} channels",
        "classes": f"{config.num_classes:,}" if config.num_classes else "none (features)",
        "numerics": numerics_text,
        "resize": describe_resize(metadata.preprocessing),
        "normalization": describe_normalization(metadata.preprocessing),
    }
    if dtype != torch.float32:
        rows["weights"] = f"rounded to {str(dtype).removeprefix('torch.')}"
    rows |= {
        key.replace("_", " "): str(value)
        for key, value in metadata.provenance.items()
        if isinstance(value, str | int | float)
    }
    table = "\n".join(f"| {plain(key)} | {plain(value)} |" for key, value in rows.items())
    classes, folder = "", plain(folder)
    if metadata.class_names:
        names = [*map(plain, metadata.class_names)]
        classes = f"\nClasses: {comma_list(names, MAX_CARD_CLASSES)}.\n"
    return f"""{GENERATED}
# {folder}

{name_of(config)}, saved by vitrail.

| | |
|---|---|
{table}

```python
import vitrail

model = vitrail.load("{folder}").eval()
logits = model(images)  # (batch, {config.channels}, {height}, {width}), normalized as above
```
{classes}"""


def plain(text: str) -> str:
    """Return a name as one line of Markdown that is neither HTML nor a cell border."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text.replace("<", "&lt;").replace("|", r"\|")


def describe_normalization(preprocessing: Preprocessing) -> str:
    mean, std = (
        ", ".join(f"{value:g}" for value in values)
        for values in (preprocessing.mean, preprocessing.std)
    )
    return f"mean ({mean}), std ({std})"


def describe_resize(preprocessing: Preprocessing) -> str:
    before = preprocessing.resize_to or preprocessing.size
    target = "{} x {}".format(*before)
    if preprocessing.resize == "short-side":
        square = before[0] == before[1]
        target = f"short side to {before[0]}" if square else f"covering {target}"
    crop = ""
    if preprocessing.resize_to is not None:
        crop = ", center crop {} x {}".format(*preprocessing.size)
    antialias = "" if preprocessing.antialias else ", no antialiasing"
    return f"{target} ({preprocessing.interpolation}{antialias}){crop}"
