"""Save a model as a bundle or in another library's format; convert and verify checkpoints."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints import bundle, hub
from vitrail.checkpoints.files import SUFFIXES, read_json, write_file, write_json
from vitrail.checkpoints.google import PRE_2021_NAMES
from vitrail.checkpoints.load import (
    ADAPTER,
    FORMATS,
    ONE_PREPROCESSING,
    OUR_METADATA,
    Reference,
    adapt,
    describe_preprocessing,
    digest_of_base,
    merge_adapter,
    open_reference,
    preprocessing_notice,
    set_preprocessing,
    table_for,
)
from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.rules import (
    NumericsLoss,
    Rule,
    substitute,
    unsupported_numerics,
    unwrap_model,
    write,
)
from vitrail.data.preprocessing import Preprocessing, preset
from vitrail.data.transforms import Backend, EvalTransform, normalize
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import NUMERICS, pair, to_dict
from vitrail.models.lora import is_adapted
from vitrail.models.registry import name_of
from vitrail.models.vit import Model

FOLDERS = ("bundle", "timm", "huggingface")  # formats with settings next to the weights
OLDER = "google-older"  # vision_transformer's names before 2021
NUMBERED = "encoderblock|MixerBlock|encoder_layer|blocks?|layers?|stages|unit"
LIBRARIES = {"google": "vision_transformer", "huggingface": "transformers"}  # others: the format
ROUNDING = 1.5  # of 255 levels; the resize kernels of the libraries round differently
HALF_NOTE = "the weights are rounded to float16"
HALF_TOLERANCE = 5e-2  # the same for weights rounded to float16; usually below 2e-3
TOLERANCE = 1e-6  # relative to the largest logit; equal weights and numerics give equal logits


def save(
    model: Model,
    path: str | PathLike[str],
    format: str = "bundle",
    *,
    class_names: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    provenance: Mapping[str, Any] | None = None,
    allow_loss: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Save a model so that vitrail or another library can load it.

    >>> save(model, "folder", class_names=["cat", "dog"])  # a bundle
    >>> save(model, "folder", dtype=torch.float16)  # half as large
    >>> save(model, "ViT-B_16.npz", "google")
    >>> save(model, "folder", "huggingface")

    Args:
        format: bundle, google, google-older, timm, huggingface, torchvision or bit_pytorch.
        provenance: JSON values to record, such as {"data": fingerprint(source)}.
        allow_loss: write the weights although the format cannot express the model's numerics.
            Any other unsupported feature is an error.
        dtype: float32, or float16 for a bundle, which rounds the weights; both load as float32.
    """
    model, destination = unwrap_model(model), Path(path)
    metadata = get_metadata(model)
    if isinstance(class_names, str):
        raise CheckpointError(f"class_names={class_names!r} is a string; expected a list of names")
    if class_names is not None:
        metadata = replace(metadata, class_names=tuple(class_names))
    if preprocessing is not None:
        metadata = metadata.with_preprocessing(preprocessing)
    if provenance is not None:
        metadata = replace(metadata, provenance=dict(metadata.provenance) | dict(provenance))
    bundle.check_class_names(metadata, model.config)
    if format == "bundle":
        bundle.save_bundle(model, destination, metadata, dtype=dtype)
        return
    if dtype != torch.float32:
        raise CheckpointError(f"{format} is written as float32; only a bundle can be {dtype}")
    losses = check_losses(model, format, destination, allow_loss)
    table = table_for(model.config, table_name(format))
    file = weights_path(destination, format)
    tensors = table.finish(model.config, write(model, rules_for(model, format)))
    header = {"format": "pt"}
    if not losses:  # our config is exact only if nothing is lost
        values = {"model": to_dict(model.config), **metadata.to_dict()}
        header[OUR_METADATA] = json.dumps(values)
    write_file(file, tensors, header)
    if file.parent == destination:
        for name, values in table.json_files(model.config, metadata).items():
            write_json(destination / name, values)


def save_adapter(
    path: Path,
    state: Mapping[str, Tensor],
    model: Model,
    rank: int,
    alpha: float,
    provenance: Mapping[str, Any],
) -> None:
    """Write the low-rank updates and heads in `state`, with config and metadata of `model`."""
    values = replace(get_metadata(model), provenance=provenance).to_dict()
    header = {"rank": rank, "alpha": alpha, "base": digest_of_base(state, state)}
    header |= {"model": to_dict(model.config), **values}
    tensors = {name: x for name, x in state.items() if is_adapted(name)}
    write_file(path, tensors, {ADAPTER: json.dumps(header)})


def list_losses(model: Model, format: str, path: Path) -> list[str]:
    """Return the features of a model that the format cannot express at this path."""
    if format == "bundle":
        return []
    losses = table_for(model.config, table_name(format)).unsupported(model.config)
    if format in FOLDERS and path.suffix in SUFFIXES:  # without config.json
        numerics = NUMERICS[LIBRARIES.get(format, format)]
        more = unsupported_numerics(model.config, numerics)
        losses += [loss for loss in more if loss not in losses]
    return losses


def check_losses(model: Model, format: str, path: Path, allow_loss: bool) -> list[str]:
    """Raise if weights would be lost, or numerics without `allow_loss`; return the losses."""
    losses = list_losses(model, format, path)
    if weights := [loss for loss in losses if not isinstance(loss, NumericsLoss)]:
        reason = f"{format} cannot express {'; '.join(weights)}"
        raise CheckpointError(f"{reason}; use --to bundle, or `vitrail export` for ONNX")
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
        path = Path(folder) / repository.split("/")[-1]
        bundle.save_bundle(model, path)
        return hub.push(path, name, private=private)


# Conversion: the result is written to a temporary path and loaded again; it is moved into place
# only if weights and logits match the source.


class Conversion(NamedTuple):
    """The plan or the result of a conversion."""

    model: str
    source_format: str
    target_format: str
    tensors: list[tuple[list[str], list[str]]]  # names before and after
    changes: list[str]
    lost: list[str]
    notes: list[str]  # what the target cannot store besides weights and numerics
    warnings: list[str]  # how the preprocessing differs from that of the source or of the target
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
    adapter: Path | None = None,
    drop_head: bool = False,
    half: bool = False,
    allow_loss: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
) -> Conversion:
    """Write the source in another format and verify that it is the same model.

    `adapter` is a LoRA adapter that is merged into the source first. `drop_head` leaves a model of
    features. `half` rounds the weights of a bundle to float16; the difference is that of rounding.
    `overwrite` replaces a bundle at the destination, or the source.
    """
    file = weights_path(destination, to)  # reject a wrong destination before any work
    if not overwrite:
        check_replaced(source, destination, file)
    if half and to != "bundle":
        raise CheckpointError(f"--half stores a bundle as float16; --to {to} is always float32")
    model, source_format, changes, family = open_reference(source, format=from_format, heads=heads)
    if adapter is not None:
        model, family = merge_adapter(model, adapter), None
        changes.append(("LoRA", "merged", str(adapter)))
    if drop_head:
        model, dropped = adapt(model, num_classes=0)
        changes += dropped
    notice, stated, warnings = "", get_metadata(model), []
    if preprocessing is not None:
        set_preprocessing(model, preprocessing)
        if not stated.assumes_preprocessing:
            warnings += compare_preprocessing(model, stated.preprocessing, str(source), "states")
    else:
        notice = preprocessing_notice(model, family, source)
    if (theirs := target_preprocessing(model, destination, to)) is not None:
        library = LIBRARIES.get(table_name(to), to)
        warnings += compare_preprocessing(model, theirs, library, "preprocesses with")
    lost = check_losses(model, to, destination, allow_loss)
    before, after = (
        {rule.ours: list(rule.theirs) for rule in rules_for(model, format)}
        for format in (source_format, to)
    )
    notes = [HALF_NOTE] * half
    if to != "bundle" and destination.suffix in (".npz", ".pt", ".pth", ".bin", ".ckpt"):
        notes.append(f"the file does not store the preprocessing: {describe_preprocessing(model)}")
        if names := get_metadata(model).class_names:
            notes.append(f"the file does not store the {len(names)} class names")
    conversion = Conversion(
        name_of(model.config),
        source_format,
        to,
        [(before[name], after[name]) for name in before],
        [f"{part}: {change} ({detail})" for part, change, detail in changes],
        lost,
        notes,
        warnings,
        notice,
    )
    if dry_run:
        return conversion
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=destination.parent, prefix=f".{destination.name}.", ignore_cleanup_errors=True
        ) as folder:
            temporary = Path(folder) / destination.name
            dtype = torch.float16 if half else torch.float32
            save(model, temporary, to, allow_loss=allow_loss, dtype=dtype)
            reloaded, heads_note = reload(temporary, to, model)
            difference = max_difference(model, reloaded)
            first, second = model.state_dict(), reloaded.state_dict()
            same = first.keys() == second.keys() and all(
                torch.equal(first[n].to(dtype).float(), second[n]) for n in first
            )
            tolerance = HALF_TOLERANCE if half else TOLERANCE
            if not same or not (difference <= tolerance or lost):
                raise CheckpointError(
                    f"verification failed: {'logits' if same else 'weights'} differ (logits by "
                    f"{difference:.1e} of the largest); nothing was written to {destination}"
                )
            if temporary.is_file():
                temporary.replace(destination)
                files = []
            else:  # the weights first; hand-written cards are kept
                destination.mkdir(exist_ok=True)
                files = sorted(temporary.iterdir(), key=lambda path: path.name != bundle.WEIGHTS)
            for path in files:
                if path.name != bundle.CARD or bundle.is_generated_card(destination / path.name):
                    path.replace(destination / path.name)
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error.strerror}") from None
    return conversion._replace(difference=difference, notes=[*notes, *heads_note])


def check_replaced(source: Reference, destination: Path, file: Path) -> None:
    """Raise if weights written to `file` replace the source or a bundle."""
    given, hint = realpath(source), "choose another destination, or pass --overwrite"
    hint = f"{hint} (in Python overwrite=True)"
    within = file.exists() and given in (realpath(file), realpath(file.parent))
    if within or given == realpath(destination):
        raise ConfigError(f"{destination} would replace the source; {hint}")
    if file.name == bundle.WEIGHTS and bundle.contains_model(file.parent):
        with suppress(CheckpointError):  # not a bundle
            if "vitrail" in read_json(file.parent / bundle.CONFIG):
                raise ConfigError(f"{file.parent} already contains a model; {hint}")


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


def target_preprocessing(model: Model, destination: Path, to: str) -> Preprocessing | None:
    """Return the target library's preprocessing: that of its JSON files, or its fixed one."""
    config, name = model.config, table_name(to)
    if name in ONE_PREPROCESSING:
        return preset(FORMATS[name].preprocessing, pair(config.image_size), config.channels)
    if to == "bundle" or destination.suffix in SUFFIXES:
        return None
    files = table_for(config, to).json_files(config, get_metadata(model))
    stated = FORMATS[to].read_metadata(files["config.json"] | files, config)
    return None if stated is None else stated.preprocessing


def compare_preprocessing(model: Model, theirs: Preprocessing, owner: str, verb: str) -> list[str]:
    """Return a line about what differs in preprocessing, measured on a test image, or nothing."""
    ours, channels = get_metadata(model).preprocessing, model.config.channels
    image = zone_plate(3 * ours.size[0], 4 * ours.size[1], channels)
    backend: Backend = "pillow" if owner == "timm" else "torch"
    first = EvalTransform(preprocessing=ours, channels=channels)(image)
    second = EvalTransform(preprocessing=theirs, channels=channels, backend=backend)(image)
    difference = normalize(first[None], ours) - normalize(second[None], theirs)
    levels = 255 * torch.tensor(ours.std)[:, None, None] * difference
    if (most := float(levels.abs().max())) <= ROUNDING:
        return []
    parts = [
        f"{of(theirs)}, not {of(ours)}"
        for of in (bundle.describe_resize, bundle.describe_normalization)
        if of(theirs) != of(ours)
    ]
    what = "; ".join(parts) or f"a different {ours.interpolation} filter"
    return [f"{owner} {verb} {what}: pixels differ by up to {most:.0f} of 255"]


def zone_plate(height: int, width: int, channels: int) -> np.ndarray:
    """Return an image (H, W, C) of waves of all lengths, on which no two filters agree."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin((x**2 + y**2) / (width + 50 * c)) for c in range(channels)]
    return np.rint(127.5 + 127.5 * np.stack(waves, axis=2)).astype(np.uint8)


def rules_for(model: Model, format: str) -> list[Rule]:
    """Return the rules that write a model in a format, with the names of its version."""
    if format == "bundle":
        return bundle.rules(model.config)
    rules = table_for(model.config, table_name(format)).rules(model.config)
    if format == OLDER:
        renames = [(rf"(encoderblock_\d+){n}", rf"\1{o}") for o, n in PRE_2021_NAMES.items()]
        rules = [
            rule._replace(theirs=tuple(substitute(name, renames) for name in rule.theirs))
            for rule in rules
        ]
    return rules


def summarize(tensors: list[tuple[list[str], list[str]]]) -> list[str]:
    """Summarize the renaming: two lines per module, with layers and parameters folded."""
    kinds: dict[tuple[str, str], list[tuple[str, str]]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for before, after in tensors:
        # the module, with its separator, and the last component
        parts = [re.split(r"([^./]+)$", fold(names))[:2] for names in (before, after)]
        modules, leaf = (parts[0][0], parts[1][0]), (parts[0][1], parts[1][1])
        leaves = kinds.setdefault(modules, [])
        if leaf not in leaves:
            leaves.append(leaf)
        counts[modules] += 1
    lines = []
    for (source, target), leaves in kinds.items():
        old, new = (fold([*dict.fromkeys(side)]) for side in zip(*leaves, strict=True))
        lines += [f"{counts[source, target]:4d}  {source}{old}", f"      -> {target}{new}"]
    return lines


def fold(names: list[str]) -> str:
    """Fold names that differ in one component: `layer.*.{query,key,value}.weight`.

    The numbers of layers, stages and units become stars; other numbers stay.
    """
    names = [re.sub(rf"((?:{NUMBERED})[._]?)\d+(?=[./])", r"\1*", name) for name in names]
    if len(names) == 1:
        return names[0]
    components = [re.split(r"([./])", name) for name in names]
    if len({len(each) for each in components}) > 1:
        return "{" + ",".join(names) + "}"
    columns = zip(*components, strict=True)
    return "".join(c[0] if len(set(c)) == 1 else "{" + ",".join(c) + "}" for c in columns)


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
