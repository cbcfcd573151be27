"""Load a model from any reference: a weights file, a folder, a hub address or a built-in name.

`FORMATS` lists the supported formats. To add one, write a module with a `FORMAT` and list it here.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.checkpoints import (
    bit,
    builtin,
    bundle,
    clip,
    dinov3,
    google,
    hub,
    huggingface,
    timm,
    torchvision,
)
from vitrail.checkpoints.files import (
    INDEX,
    SUFFIXES,
    Checkpoint,
    read_file,
    read_json,
    readable_errors,
    shard_names,
    weight_files,
)
from vitrail.checkpoints.metadata import ASSUMED, Family, Metadata, get_metadata, recognize_family
from vitrail.checkpoints.rules import (
    Format,
    NumericsLoss,
    Table,
    check_layers,
    read,
)
from vitrail.data.preprocessing import PRESETS, Preprocessing, preset
from vitrail.errors import CheckpointError, ConfigError, renamed_keyword, similar_path, unknown
from vitrail.formatting import comma_list
from vitrail.models.config import (
    NUMERICS,
    BitConfig,
    Config,
    MixerConfig,
    Numerics,
    Size,
    VitConfig,
    from_dict,
    pair,
    to_dict,
)
from vitrail.models.lora import add_lora, is_adapted, merge_lora
from vitrail.models.pos_embed import POS_EMBEDS, interpolation_matrix
from vitrail.models.registry import configuration, name_of
from vitrail.models.vit import Model, VisionTransformer, build

Reference = str | PathLike[str]
logger = logging.getLogger(__name__)
Change = tuple[str, str, str]  # made on the user's behalf: part, change, detail
FORMATS = {
    "google": google.FORMAT,
    "huggingface": Format(
        "transformers",
        (huggingface.VIT, clip.TOWER_TABLE, dinov3.TRANSFORMERS),
        lambda checkpoint: dinov3.normalize(clip.normalize(huggingface.normalize(checkpoint))),
        huggingface.read_metadata,
    ),
    "torchvision": torchvision.FORMAT,
    "timm": Format(
        "timm",
        (timm.BIT, timm.MIXER, timm.VIT, dinov3.TIMM),
        lambda checkpoint: dinov3.normalize_timm(timm.normalize(checkpoint)),
        timm.read_metadata,
    ),
    "bit_pytorch": bit.FORMAT,
}
ONE_PREPROCESSING = ("google", "torchvision", "bit_pytorch")  # formats whose models all share one
WRAPPERS = ("module.", "_orig_mod.")  # prefixes of data parallelism and torch.compile
OUR_METADATA = "vitrail-model"  # header key with our config in foreign formats written by vitrail
WITH_CONFIG = ("model.safetensors", "pytorch_model.bin")  # file names that config.json belongs to
HEADS = ("head", "distillation_head")
# Metadata of a model with another head; thresholds of the old one are ignored with a warning.
WITHOUT_HEAD: dict[str, Any] = {"class_names": (), "multi_label": False}
ADAPTER = "vitrail-adapter"  # header key of a LoRA adapter
MAX_GROWTH = 4  # of the number of weights by an adapter, whose header is untrusted
TASK = ("image_size", "channels", "patch_size", "num_classes", "representation", "numerics")
REGULARIZATION = ("dropout", "drop_path", "patch_dropout")  # settings that affect no weight
EXAMPLE = builtin.LARGER
# Fields of configs that 0.1 did not have: they change a digest only if they are not at their
# defaults, so that classes taught with 0.1 stay valid.
NEW_FIELDS = ("attention", "class_token", "key_bias", "norm", "pre_norm", "qk_norm")
NEW_FIELDS += ("rope_theta", "unit")
OUR_TENSORS = {  # one of each family, to recognize a state dict of ours
    "encoder.blocks.0.attention.qkv.weight",
    "blocks.0.token_mixing.fc1.weight",
    "stages.0.0.conv1.weight",
}


@renamed_keyword("tell", "log")
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
    attention: str | None = None,
    preprocessing: str | Preprocessing | None = None,
    adapter: str | PathLike[str] | None = None,
    log: Callable[[str], None] | None = None,
) -> Model:
    """Load a trained model in eval mode; `model.metadata` has its preprocessing and class names.

    >>> model = load("ViT-B_16.npz")  # the format is detected
    >>> model = load("ViT-B_16.npz", num_classes=10, image_size=384)  # adapted to a new task
    >>> model = load("folder")  # a bundle, or a folder saved by timm or transformers
    >>> model = load("builtin:vit-photos", num_classes=10)  # comes with vitrail
    >>> model = load("hf:google/vit-base-patch16-224")  # from the Hugging Face hub
    >>> model = load("hf:google/vit-base-patch16-224", numerics="google")  # as its authors run it

    Args:
        format: overrides the detection of the format.
        heads: number of attention heads, for files that do not state it.
        num_classes, image_size, channels, patch_size: adapt the model to a new task.
        keep_representation: keep the representation layer under a new head.
        numerics: a name in `NUMERICS` or a value; overrides those of the file's library.
        attention: another attention for the same weights, such as one of `register_attention`.
        preprocessing: a preset name or a value; overrides that of the checkpoint. A checkpoint that
            states none gets that of its family, with a warning if the family is unknown.
        adapter: a LoRA adapter of this model, which is merged into the weights.
        log: called with a line for every change. By default they go to the logger of this module:
            as warnings if weights were skipped or the preprocessing is assumed, else as INFO.
    """
    model, _, loading_changes, family = open_reference(reference, format=format, heads=heads)
    if adapter is not None:
        model, family = merge_adapter(model, Path(adapter)), None
    model, numerics_changes = set_numerics(model, numerics)
    model, attention_changes = set_attention(model, attention)
    model, changes = adapt(
        model,
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        patch_size=patch_size,
        keep_representation=keep_representation,
    )
    if changes := [*loading_changes, *numerics_changes, *attention_changes, *changes]:
        emit = log or (logger.warning if loading_changes else logger.info)
        emit(f"{name_of(model.config)} from {reference}")
        for part, change, detail in changes:
            emit(f"  {part:<11} {change:<25} {detail}".rstrip())
    if preprocessing is not None:
        set_preprocessing(model, preprocessing)
    elif notice := preprocessing_notice(model, family, reference):
        (log or (logger.info if family else logger.warning))(notice)
    return model.eval()


def check_reference(reference: str) -> None:
    """Raise the error of loading a reference that cannot exist, without reading or downloading.

    An empty reference stands for random initialization.
    """
    if reference.startswith(hub.PREFIX):
        hub.parse(reference)
    elif reference.startswith(builtin.PREFIX):
        builtin.find(reference)
    elif reference and not os.path.exists(reference):
        open_reference(reference)


def open_reference(
    reference: Reference, *, format: str | None = None, heads: int | None = None
) -> tuple[Model, str, list[Change], Family | None]:
    """Load a model without adapting it.

    Returns the model, its format ("bundle", "google", …), what was skipped or is ambiguous, and the
    family that determined the preprocessing if the checkpoint does not state it.
    """
    text = str(reference) if isinstance(reference, str | PathLike) else ""
    if not text:
        empty = isinstance(reference, str | PathLike)
        given = "''" if empty else f"of type {type(reference).__name__}"
        raise CheckpointError(
            f"invalid model reference {given}; expected a file, a folder or a hub address "
            f"such as {EXAMPLE}"
        )
    if text.startswith(builtin.PREFIX):
        path = builtin.find(text)
    else:
        path = hub.fetch(text) if text.startswith(hub.PREFIX) else Path(reference)
    with readable_errors(path):
        if not path.exists():
            try:
                configuration(text)
            except ConfigError as error:
                hint = f"; expected a file, a folder or a hub address such as {EXAMPLE}"
                if "lists them all" not in str(error):  # similar names
                    hint = f"; {error}"
                hint = similar_path(text) or hint * (path.suffix not in SUFFIXES)
                raise CheckpointError(f"file not found: {text}{hint}") from None
            raise CheckpointError(
                f"{text!r} is an architecture without weights; vitrail.create({text!r}) builds an "
                f"untrained model, trained ones have addresses such as {EXAMPLE}"
            )
        if path.name in WITH_CONFIG and bundle.contains_model(path.parent):
            path = path.parent
        if path.is_dir():
            checkpoint, header = read_folder(path)
        else:
            checkpoint = read_file(path)
            header = checkpoint.settings
    if heads is not None:
        checkpoint.settings["heads"] = heads
    is_bundle = "vitrail" in checkpoint.settings or bundle.HEADER in checkpoint.settings
    if is_bundle and format in (None, "bundle"):
        try:
            return bundle.read_bundle(checkpoint, header), "bundle", [], None
        except CheckpointError as error:
            raise CheckpointError(f"{reference}: {error}") from None
    if format == "bundle":
        raise CheckpointError(f"{reference} is not a bundle: it has no config.json of vitrail")
    model, format, normalized = read_foreign(checkpoint, format)
    family = set_metadata(model, checkpoint, format, text)
    changes = [(name, "skipped", reason) for name, reason in normalized.skipped.items()]
    changes += [(part, "ambiguous", guess) for part, guess in normalized.guesses.items()]
    return model, format, changes, family


def is_name(reference: str) -> bool:
    """Return whether a reference is the name of an architecture, which has no weights."""
    with suppress(ConfigError):
        configuration(reference)
        return not os.path.exists(reference)
    return False


def read_folder(folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Read a folder: the weights with config.json as settings, and the header of the weights."""
    names = weight_files(path.name for path in folder.iterdir())
    if not names:
        expected = ": a bundle's folder or a weights file (a dataset comes after the model)"
        if models := [str(p) for p in sorted(folder.iterdir()) if bundle.contains_model(p)]:
            expected = f", such as {comma_list(models)}"
        raise CheckpointError(f"{folder} contains no weights; expected a model{expected}")
    if len(names) > 1:
        raise CheckpointError(f"{folder} contains {len(names)} weights files; pass the path of one")
    if names == [INDEX]:
        names = shard_names(folder / INDEX)
    parts = [read_file(folder / name) for name in names]
    header = {key: value for part in parts for key, value in part.settings.items()}
    settings = {}
    if bundle.contains_model(folder):
        settings = read_json(folder / bundle.CONFIG)
        header.pop(OUR_METADATA, None)  # config.json wins: it may have been edited
    if (folder / huggingface.PROCESSOR).exists():
        settings[huggingface.PROCESSOR] = read_json(folder / huggingface.PROCESSOR)
    checkpoint = Checkpoint(
        {name: tensor for part in parts for name, tensor in part.tensors.items()},
        header | settings,
        {name: reason for part in parts for name, reason in part.skipped.items()},
        {name: guess for part in parts for name, guess in part.guesses.items()},
        parts[-1].layout,
    )
    return checkpoint, header


def read_foreign(checkpoint: Checkpoint, format: str | None) -> tuple[Model, str, Checkpoint]:
    """Return the model, its format, and the checkpoint in the format's current layout."""
    if format is not None and format not in FORMATS:
        raise unknown("format", format, FORMATS)
    tensors = checkpoint.tensors
    while tensors and all(name.startswith(WRAPPERS) for name in tensors):
        tensors = {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()}
    checkpoint = replace(checkpoint, tensors=tensors)
    for name in FORMATS if format is None else [format]:
        normalized = FORMATS[name].normalize(checkpoint)
        for table in FORMATS[name].tables:
            if table.matches(normalized.tensors):
                ours = read_our_metadata(checkpoint.settings)
                try:
                    config = from_dict(ours["model"]) if ours else table.infer_config(normalized)
                except ConfigError as error:
                    raise CheckpointError(f"invalid model config in the file: {error}") from None
                check_layers(config, normalized.tensors)
                return read(normalized.tensors, table.rules(config), config), name, normalized
    if OUR_TENSORS & tensors.keys():
        raise CheckpointError(
            "this is a bare state dict of a vitrail model, without its configuration; create the "
            "model with vitrail.create and call its load_state_dict, or write it with vitrail.save"
        )
    expected = format or "Google, timm, Hugging Face, torchvision, DeiT, DINO or BiT"
    names = ", ".join(sorted(tensors)[:3]) or "none"
    raise CheckpointError(f"unknown checkpoint format, not {expected}; tensors: {names} …")


def read_our_metadata(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return our config from the header of a foreign format written by vitrail, if present."""
    if OUR_METADATA not in settings:
        return None
    try:
        values = json.loads(settings[OUR_METADATA])
    except (ValueError, TypeError, RecursionError):
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise CheckpointError(f"invalid model description in the file header {OUR_METADATA!r}")
    return values


def table_for(config: Config, format: str) -> Table:
    """Return the table of a format for a model: the first that can express it, or the first."""
    if format not in FORMATS:
        raise unknown("format", format, ["bundle", *FORMATS])
    attention = getattr(config, "attention", getattr(config, "unit", "global"))
    if attention not in ("global", "conv"):
        raise CheckpointError(f"{format} does not support {attention} attention; use bundle")
    tables = {
        name: [table for table in each.tables if isinstance(config, table.family)]
        for name, each in FORMATS.items()
    }
    if not tables[format]:
        vit = "hybrid" if getattr(config, "stem", None) == "resnet" else "ViT"
        family = {BitConfig: "BiT", MixerConfig: "Mixer"}.get(type(config), vit)
        supported = ", ".join(["bundle", *(name for name in tables if tables[name])])
        raise CheckpointError(f"{format} does not support {family} models; use one of {supported}")
    for table in tables[format]:
        if all(isinstance(loss, NumericsLoss) for loss in table.unsupported(config)):
            return table
    return tables[format][0]


def set_metadata(model: Model, checkpoint: Checkpoint, format: str, source: str) -> Family | None:
    """Set the metadata of a foreign checkpoint.

    Returns the family that determined the preprocessing; None if it is stated, assumed, or the same
    for all models of the format.
    """
    name = source if source.startswith(hub.PREFIX) else Path(source).name
    config, family = model.config, None
    size, channels = pair(config.image_size), config.channels
    ours = read_our_metadata(checkpoint.settings)
    if ours is not None and "preprocessing" in ours:
        metadata = Metadata.from_dict(ours)
    else:
        metadata = FORMATS[format].read_metadata(checkpoint.settings, config)
        if metadata is None:
            provenance = {} if format in ONE_PREPROCESSING else ASSUMED
            preprocessing = preset(FORMATS[format].preprocessing, size, channels)
            metadata = Metadata(preprocessing=preprocessing, provenance=provenance)
        if metadata.assumes_preprocessing:
            family = recognize_family(checkpoint, format, Path(name).name)
        if family is not None:
            metadata = metadata.with_preprocessing(preset(family.preset, size, channels))
    names = metadata.class_names if len(metadata.class_names) == config.num_classes else ()
    provenance = dict(metadata.provenance) | {"source": name or source, "format": format}
    model.metadata = replace(metadata, class_names=names, provenance=provenance)
    return family


def preprocessing_notice(model: Model, family: Family | None, source: Reference) -> str:
    """Return a line about preprocessing that the checkpoint does not state, or nothing."""
    if family is not None:
        description = describe_preprocessing(model)
        return f"recognized {family.name} by {family.evidence}; preprocessing: {description}"
    if not get_metadata(model).assumes_preprocessing:
        return ""
    return (
        f"warning: {source} does not state its preprocessing; assuming "
        f"{describe_preprocessing(model)}; to override it, pass --preprocessing (in Python "
        f"preprocessing=): {', '.join(PRESETS)}"
    )


def describe_preprocessing(model: Model) -> str:
    preprocessing = get_metadata(model).preprocessing
    normalization = bundle.describe_normalization(preprocessing)
    return f"{normalization}, resize {bundle.describe_resize(preprocessing)}"


def set_preprocessing(model: Model, preprocessing: str | Preprocessing) -> None:
    """Override a model's preprocessing by a preset name or a value."""
    config, metadata = model.config, get_metadata(model)
    if isinstance(preprocessing, str):
        preprocessing = preset(preprocessing, pair(config.image_size), config.channels)
    if len(preprocessing.mean) != config.channels:
        raise ConfigError(
            f"preprocessing for {len(preprocessing.mean)} channels does not fit a model of "
            f"{config.channels}"
        )
    model.metadata = metadata.with_preprocessing(preprocessing)


# Adapt a model to another task. Weights that still fit are kept; the others are derived from the
# old ones or start at zero. Every change is reported as a `Change`.


@torch.no_grad()
def adapt(
    model: Model, *, keep_representation: bool = False, **fields: Any
) -> tuple[Model, list[Change]]:
    """Return the model adapted to other num_classes, image_size, channels or patch_size, and the
    list of changes. None keeps a field as it is."""
    old = model.config
    fields = {n: x for n, x in fields.items() if x is not None and x != getattr(old, n, None)}
    if "patch_size" in fields and (not isinstance(old, VitConfig) or old.stem != "patches"):
        raise ConfigError("patch_size can only be changed for a ViT with stem='patches'")
    if isinstance(old, VitConfig) and fields.get("num_classes") and not keep_representation:
        fields["representation"] = 0
    new = old.change(**fields)
    if isinstance(new, MixerConfig) and isinstance(old, MixerConfig) and new.grid != old.grid:
        raise ConfigError(
            f"image_size={new.image_size} does not fit a Mixer trained at {old.image_size}: "
            "its token-mixing weights are tied to the grid"
        )
    if new == old:
        return model, []
    state: dict[str, Tensor] = dict(model.state_dict())
    changes = [
        *adapt_kernels(state, old, new),
        *adapt_positions(state, model, new),
        *adapt_head(state, old, new),
    ]
    metadata = adapt_metadata(get_metadata(model), old, new)
    return rebuild(model, new, state, metadata), changes


def set_numerics(model: Model, numerics: str | Numerics | None) -> tuple[Model, list[Change]]:
    """Run the same weights under another library's numerics. None keeps them."""
    old = model.config
    new = old if numerics is None else old.change(numerics=numerics)
    if new == old:
        return model, []
    before, after = (
        next((name for name, known in NUMERICS.items() if known == config.numerics), "custom")
        for config in (old, new)
    )
    changed = rebuild(model, new, model.state_dict(), model.metadata)
    return changed, [("numerics", f"{before} -> {after}", "weights unchanged")]


def set_attention(model: Model, attention: str | None) -> tuple[Model, list[Change]]:
    """Run the same weights with another attention, whose own weights are new. None keeps it."""
    old = model.config
    if attention is None or attention == getattr(old, "attention", None):
        return model, []
    if not isinstance(old, VitConfig):
        raise ConfigError(f"attention={attention!r} needs a Vision Transformer")
    changed = build(old.change(attention=attention), device="cpu")
    missing, unexpected = changed.load_state_dict(model.state_dict(), strict=False, assign=True)
    if unexpected:
        raise CheckpointError(f"attention={attention!r} has no place for {unexpected[0]}")
    changed.metadata = model.metadata
    detail = f"{len(missing)} new tensors, initialized" if missing else "weights unchanged"
    return changed.train(model.training), [("attention", f"{old.attention} -> {attention}", detail)]


def merge_adapter(model: Model, path: Path) -> Model:
    """Return the model with the low-rank updates, head, image size and metadata of an adapter."""
    checkpoint = read_file(path)
    try:
        header = json.loads(checkpoint.settings[ADAPTER])
        config, metadata = from_dict(header["model"]), Metadata.from_dict(header)
        rank, alpha, base = int(header["rank"]), float(header["alpha"]), header["base"]
    except (LookupError, ValueError, TypeError, RecursionError, ConfigError, CheckpointError):
        raise CheckpointError(f"{path} is not a LoRA adapter written by vitrail") from None
    different = CheckpointError(
        f"{path} adapts {name_of(config)} with other weights, not this {name_of(model.config)}; "
        "merge it into the model it was trained on"
    )
    ours, theirs = (
        {key: value for key, value in to_dict(c).items() if key not in (*TASK, *REGULARIZATION)}
        for c in (model.config, config)
    )
    if ours != theirs:
        raise different
    try:
        template = build(config)
        add_lora(template, rank, alpha)
    except (RuntimeError, TypeError, ConfigError):  # sizes or a rank that no file can have
        raise different from None
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, template)]
    if sizes[1] > MAX_GROWTH * sizes[0]:
        raise different
    expected = {n: tuple(x.shape) for n, x in template.state_dict().items() if is_adapted(n)}
    if expected != {name: tensor.shape for name, tensor in checkpoint.tensors.items()}:
        raise different
    model, _ = set_numerics(model, config.numerics)
    fields: dict[str, Any] = {name: getattr(config, name, None) for name in TASK[:4]}
    model, _ = adapt(model, **fields)
    state = dict(model.state_dict())
    same = getattr(model.config, "representation", 0) == getattr(config, "representation", 0)
    if not same or digest_of_base(state, expected) != base:
        raise different
    state |= {name: tensor.read().float() for name, tensor in checkpoint.tensors.items()}
    return rebuild(model, config, merge_lora(state, alpha / rank), metadata)


def digest_of_base(state: Mapping[str, Tensor], names: Iterable[str]) -> str:
    """Return a hash of the matrices that the low-rank updates among `names` are added to."""
    updated = [f"{name.removesuffix('lora_b')}weight" for name in names if name.endswith("lora_b")]
    return bundle.digest({name: state[name] for name in updated}, {})


def backbone_digest(model: Model, **about: Any) -> str:
    """Return a digest of everything that determines a model's features, and of `about`."""
    tensors = {n: x for n, x in model.state_dict().items() if n.split(".")[0] not in HEADS}
    config = to_dict(model.config)
    for name in NEW_FIELDS:
        rest = {key: value for key, value in config.items() if key != name}
        if from_dict(rest) == model.config:
            config = rest
    config["num_classes"] = 0
    if merge := getattr(model, "merge", 0):  # only then: caches without merging stay valid
        config["merge"] = merge
    return bundle.digest(tensors, {"model": config, **about})


@torch.no_grad()
def with_head(model: Model, weight: Tensor, bias: Tensor, class_names: Sequence[str] = ()) -> Model:
    """Return the model with logits = features @ weight.T + bias; weight is (K, D), bias (K,).

    All other weights are shared with `model`, which does not change.
    """
    config = model.config.change(num_classes=len(bias))
    state = {name: x for name, x in model.state_dict().items() if name.split(".")[0] not in HEADS}
    like = next(model.parameters())
    weight, bias = (x.detach().to(like.device, like.dtype) for x in (weight, bias))
    if isinstance(config, VitConfig) and config.distillation:
        # The two heads are averaged: double the first and zero the second.
        state |= {"head.weight": 2 * weight, "head.bias": 2 * bias}
        state["distillation_head.weight"] = torch.zeros_like(weight)
        state["distillation_head.bias"] = torch.zeros_like(bias)
    else:
        state |= {"head.weight": weight, "head.bias": bias}
    metadata = replace(get_metadata(model), **WITHOUT_HEAD | {"class_names": tuple(class_names)})
    return rebuild(model, config, state, metadata)


@torch.no_grad()
def with_temperature(model: Model, temperature: float) -> Model:
    """Return the model with its head divided by a temperature.

    The calibration is then part of the weights and survives every format.
    """
    if model.head is None:
        raise ConfigError("the model has no head, and so no logits to divide by a temperature")
    state = {
        name: x / temperature if name.split(".")[0] in HEADS else x
        for name, x in model.state_dict().items()
    }
    metadata = get_metadata(model)
    total = round(metadata.provenance.get("temperature", 1.0) * temperature, 6)
    metadata = replace(metadata, provenance=dict(metadata.provenance) | {"temperature": total})
    return rebuild(model, model.config, state, metadata)


def rebuild(model: Model, config: Any, state: dict[str, Tensor], metadata: Any) -> Model:
    """Build a model with this state; it shares tensors with `state` and the mode of `model`."""
    rebuilt = build(config)
    rebuilt.load_state_dict(state, assign=True)
    rebuilt.metadata = metadata
    return rebuilt.train(model.training)


def adapt_head(state: dict[str, Tensor], old: Any, new: Any) -> list[Change]:
    changes = []
    if isinstance(old, VitConfig) and old.representation and not new.representation:
        for name in ("representation.weight", "representation.bias"):
            del state[name]
        changes.append(("pre_logits", "dropped", "not used in fine-tuning (section 3.2)"))
    if old.num_classes == new.num_classes:
        return changes
    for head in HEADS:
        for part in ("weight", "bias"):
            state.pop(f"{head}.{part}", None)
        distilled = isinstance(new, VitConfig) and new.distillation
        if new.num_classes and (head == "head" or distilled):
            state[f"{head}.weight"] = torch.zeros(new.num_classes, new.num_features, device="cpu")
            state[f"{head}.bias"] = torch.zeros(new.num_classes, device="cpu")
    detail = (
        "new, initialized to zero" if new.num_classes else "removed: the model returns features"
    )
    return [*changes, ("head", f"{old.num_classes} -> {new.num_classes} classes", detail)]


def adapt_positions(state: dict[str, Tensor], model: Model, new: Any) -> list[Change]:
    if not isinstance(model, VisionTransformer) or model.config.grid == new.grid:
        return []
    detail = "recomputed"
    for name, module in model.named_modules():
        if isinstance(module, tuple(POS_EMBEDS.values())):
            for table, values in cast(Any, module).resized_parameters(new.grid).items():
                state[f"{name}.{table}"] = values.clone()  # it may be a parameter
                detail = f"interpolated ({new.numerics.position_resize})"
    sizes = " -> ".join(f"{height} x {width}" for height, width in (model.config.grid, new.grid))
    return [("positions", sizes, detail)]


def adapt_kernels(state: dict[str, Tensor], old: Any, new: Any) -> list[Change]:
    """Fit the kernels that read the image to other patches and channels.

    Patches are resized by pseudo-inverse (FlexiViT, arXiv:2212.08013): if a patch is resized by
    y = B x, the kernel v for y with <v, B x> = <w, x> is the pseudo-inverse of B's transpose times
    w. Channels are summed, or repeated and rescaled to the same total.
    """
    changes, name = [], first_kernel(state)
    sizes = getattr(old, "patch_size", 0), getattr(new, "patch_size", 0)
    if sizes[0] != sizes[1]:
        weight = state[name].double()  # (D, C, P, P)
        for axis, (before, after) in enumerate(zip(*map(pair, sizes), strict=True), start=2):
            resize = interpolation_matrix(before, after, "flexivit", like=weight)  # (after, before)
            inverse = torch.linalg.pinv(resize.mT)  # (after, before)
            weight = (weight.movedim(axis, -1) @ inverse.mT).movedim(-1, axis)
        state[name] = weight.float().contiguous()
        change = f"{sizes[0]} -> {sizes[1]} pixels"
        changes.append(("patches", change, "resized (pseudo-inverse)"))
    if old.channels != new.channels:
        weight, detail = state[name], "kernels summed"
        if new.channels == 1:
            state[name] = weight.sum(dim=1, keepdim=True)
        else:
            order = torch.arange(new.channels) % old.channels
            state[name] = weight[:, order] * (old.channels / new.channels)
            more = new.channels > old.channels
            detail = "kernels repeated and rescaled" if more else "first channels, rescaled"
        changes.append(("channels", f"{old.channels} -> {new.channels}", detail))
    return changes


def first_kernel(state: dict[str, Tensor]) -> str:
    """Return the name of the convolution that reads the image."""
    layers = ("stem.resnet.root", "stem.layers.0", "root", "stem.projection", "stem")
    return next(f"{layer}.weight" for layer in layers if f"{layer}.weight" in state)


def adapt_metadata(metadata: Metadata, old: Any, new: Any) -> Metadata:
    """Fit the preprocessing to the new size and channels; drop what describes another head."""
    old_size, size = pair(old.image_size), pair(new.image_size)
    preprocessing = metadata.preprocessing
    resize_to = preprocessing.resize_to
    if resize_to is not None:
        resize_to = (resize_to[0] * size[0] // old_size[0], resize_to[1] * size[1] // old_size[1])
    mean, std = preprocessing.mean, preprocessing.std
    if old.channels != new.channels:
        mean = (sum(mean) / len(mean),) * new.channels
        std = (sum(std) / len(std),) * new.channels
    if old.num_classes != new.num_classes:
        metadata = replace(metadata, **WITHOUT_HEAD)
    how = replace(preprocessing, size=size, resize_to=resize_to, mean=mean, std=std)
    return replace(metadata, preprocessing=how)
