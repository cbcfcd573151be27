"""transformers' ViT: config.json, preprocessor_config.json and the weights.

`clip.py` and `dinov3.py` have the tables of its other models.

DeiT, DINOv2 and I-JEPA share its rules; MAE and MSN are read as ViT. transformers 5 has two sets of
names: files keep the old one, `model.state_dict()` returns a new one. `normalize` converts all of
these to the names of ViT in files, `write_names` back to those of the model that is written:

    vit.layers.0.attention.q_proj.weight    new names
    embeddings.…, encoder.…                 models without a classifier have no "vit." prefix
    vit.embeddings.mask_token, decoder.…    masked pre-training: skipped
    deit.…, cls_classifier.…                DeiT
    dinov2.…, …norm1, …mlp.fc1              DINOv2
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.metadata import ASSUMED, Metadata
from vitrail.checkpoints.rules import (
    Rule,
    Table,
    applicable,
    infer_heads,
    join_gates,
    modules,
    same,
    square_image,
    substitute,
    unsupported_features,
    unsupported_reason,
    without_batch,
)
from vitrail.data.preprocessing import Interpolation, Preprocessing, preset
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, Gelu, VitConfig, normalize_size, pair

Settings = Mapping[str, Any]

PROCESSOR = "preprocessor_config.json"
MODEL_TYPES = (
    "vit",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "vit_mae",
    "vit_msn",
    "clip",
    "clip_vision_model",
    "siglip",
    "siglip_vision_model",
    "dinov3_vit",
    "ijepa",
)
TIMM_WRAPPER = "timm_wrapper"  # a timm model saved by transformers, under timm's names

PATCHES = "embeddings.patch_embeddings.projection"
POSITION = "embeddings.position_embeddings"
DISTILLATION = "embeddings.distillation_token"
REGISTERS = "embeddings.register_tokens"
GELU_MLP = ("intermediate.dense", "output.dense")
SWIGLU_MLP = ("mlp.weights_in", "mlp.weights_out")
HEADS = ("classifier.", "distillation_classifier.")
RENAMES = (  # new → old
    (r"^(?:vit|deit|ijepa|dinov2|dinov2_with_registers)\.", ""),
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    (r"\.mlp\.down_proj\.", ".mlp.weights_out."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"^cls_classifier\.", "classifier."),
)
DINO_NAMES = (  # ViT → DINOv2, in files
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"(layer\.\d+)\.intermediate\.dense\.", r"\1.mlp.fc1."),
    (r"(layer\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
)
GATES, GATE_AND_UP = ((".mlp.gate_proj.", ".mlp.up_proj."),), ".mlp.weights_in."  # DINOv2's SwiGLU
SKIPPED = {
    r"(?:\w+\.)?embeddings\.mask_token$": "only used in pre-training",
    r"decoder\.": "pre-training decoder",
}
UNUSED_BY_HEAD = {r"(?:\w+\.)?pooler\.": "not used by transformers' classifier"}

GELUS: dict[str, Gelu] = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_accurate": "tanh",
    "quick_gelu": "quick",
}
HIDDEN_ACT: dict[Gelu, str] = {
    "exact": "gelu",
    "tanh": "gelu_pytorch_tanh",
    "quick": "quick_gelu",
}
DINO_EPS = 1e-6  # DINOv2's default, where ViT's is 1e-12
IN_SHAPES = {  # settings that the shapes determine too: theirs → ours
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "intermediate_size": "mlp_width",
    "num_channels": "channels",
    "patch_size": "patch_size",
    "qkv_bias": "qkv_bias",
}
MAX_NUMBER = 1e30
# Pillow's numbers. 4 is the box filter, our "area", which their tensor-based processors reject.
RESAMPLE: dict[Interpolation, int] = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
FILTERS: dict[int, Interpolation] = {4: "area", **{n: name for name, n in RESAMPLE.items()}}


# Weights.


def normalize(checkpoint: Checkpoint) -> Checkpoint:
    """Convert to the names of ViT in files, without tensors that only pre-training uses."""
    model_type = checkpoint.settings.get("model_type")
    if model_type is not None and model_type not in (*MODEL_TYPES, TIMM_WRAPPER):
        reason = unsupported_reason(str(model_type))
        raise CheckpointError(
            f"unsupported model_type={model_type!r} in config.json{reason and f' ({reason})'}; "
            f"supported: {', '.join(MODEL_TYPES)}"
        )
    if not any(name.endswith(f"{PATCHES}.weight") for name in checkpoint.tensors):
        return checkpoint  # not from transformers
    has_head = {"classifier.weight", "cls_classifier.weight"} & checkpoint.tensors.keys()
    checkpoint = checkpoint.without(SKIPPED | (UNUSED_BY_HEAD if has_head else {}))
    tensors = {substitute(name, RENAMES): tensor for name, tensor in checkpoint.tensors.items()}
    if len(tensors) < len(checkpoint.tensors):
        raise CheckpointError("duplicate tensors under an old and a new name")
    tensors = join_gates(tensors, GATES, GATE_AND_UP)
    token, table = tensors.get(DISTILLATION), tensors.get(POSITION)
    is_table = table is not None and len(table.shape) == 3 and table.shape[1] >= 2
    # DeiT's distillation token without a head becomes a register that includes its position. A
    # position tensor of another shape is left alone: `read` reports it.
    if token and table and is_table and "distillation_classifier.weight" not in tensors:
        del tensors[DISTILLATION]
        tensors[REGISTERS] = LazyTensor(
            token.shape, lambda: token.read().float() + table.read()[:, 1:2].float()
        )
        tensors[POSITION] = table.map(lambda rows: torch.cat([rows[:, :1], rows[:, 2:]], dim=1))
    prefix = "vit." if has_head else ""
    tensors = {
        name if name.startswith(HEADS) else prefix + name: tensor
        for name, tensor in tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


def vit_config(checkpoint: Checkpoint) -> VitConfig:
    """Infer the config from shapes, and from config.json where shapes are ambiguous."""
    tensors, settings = checkpoint.tensors, checkpoint.settings
    has_head = "classifier.weight" in tensors
    prefix = "vit." if has_head else ""
    block = f"{prefix}encoder.layer.0"
    width, channels, *patch = checkpoint.shape(f"{prefix}{PATCHES}.weight", 4)
    swiglu = f"{block}.{SWIGLU_MLP[0]}.weight" in tensors
    fc1, _ = SWIGLU_MLP if swiglu else GELU_MLP
    hidden = checkpoint.shape(f"{block}.{fc1}.weight", 2)[0]
    scaled = f"{block}.layer_scale1.lambda1" in tensors
    distillation = prefix + DISTILLATION in tensors
    registers = checkpoint.size(prefix + REGISTERS, 3, axis=1)
    class_token = f"{prefix}embeddings.cls_token" in tensors  # I-JEPA has none
    patches = checkpoint.shape(prefix + POSITION, 3)[1] - class_token - distillation
    num_classes, pool = checkpoint.size("classifier.weight", 2), "cls" if class_token else "mean"
    if has_head and class_token and checkpoint.shape("classifier.weight", 2)[1] == 2 * width:
        pool = "cls+mean"  # DINOv2's classifier
    default_eps = DINO_EPS if scaled else NUMERICS["transformers"].norm_eps
    eps = number(settings, "layer_norm_eps", default_eps)
    config = VitConfig(
        depth=checkpoint.count(rf"{re.escape(prefix)}encoder\.layer\.(\d+)\."),
        width=width,
        mlp_width=hidden // 2 if swiglu else hidden,
        heads=infer_heads(width, settings.get("heads"), settings.get("num_attention_heads")),
        patch_size=(patch[0], patch[1]),
        image_size=infer_image_size(settings, patches, (patch[0], patch[1])),
        channels=channels,
        num_classes=num_classes,
        pool=pool,
        representation=checkpoint.size(f"{prefix}pooler.dense.bias"),
        registers=registers,
        distillation=distillation,
        layer_scale=number(settings, "layerscale_value", 1.0) if scaled else None,
        qkv_bias=f"{block}.attention.attention.query.bias" in tensors,
        mlp="swiglu" if swiglu else "gelu",
        dropout=number(settings, "hidden_dropout_prob", 0.0),
        numerics=replace(
            NUMERICS["transformers"],
            gelu=read_gelu(settings, "gelu"),
            norm_eps=eps,
            # DINOv2 with registers is interpolated with antialiasing, as in timm
            position_resize="timm" if scaled and registers else "transformers",
        ),
    )
    check_stated(settings, config)
    activation = settings.get("pooler_act", "tanh")
    if config.representation and activation != "tanh":
        raise CheckpointError(
            f"unsupported pooler_act={activation!r} in config.json; supported: tanh"
        )
    return config


def vit_templates(config: VitConfig) -> Iterator[Rule]:
    prefix = "vit." if config.num_classes else ""
    ours, theirs = "encoder.blocks.{i}", prefix + "encoder.layer.{i}"
    fc1, fc2 = SWIGLU_MLP if config.mlp == "swiglu" else GELU_MLP
    names = {
        "stem.projection": prefix + PATCHES,
        f"{ours}.norm1": f"{theirs}.layernorm_before",
        f"{ours}.attention.merge": f"{theirs}.attention.output.dense",
        f"{ours}.norm2": f"{theirs}.layernorm_after",
        f"{ours}.mlp.fc1": f"{theirs}.{fc1}",
        f"{ours}.mlp.fc2": f"{theirs}.{fc2}",
        "encoder.norm": f"{prefix}layernorm",
        "representation": f"{prefix}pooler.dense",
        "head": "classifier",
        "distillation_head": "distillation_classifier",
    }
    yield from modules(names)
    qkv = [f"{theirs}.attention.attention.{part}" for part in ("query", "key", "value")]
    yield from joint(f"{ours}.attention.qkv", qkv)
    for i in (1, 2):
        yield same(f"{ours}.branch{i}.scale", f"{theirs}.layer_scale{i}.lambda1")
    yield without_batch("cls_token", f"{prefix}embeddings.cls_token")
    yield without_batch("distillation_token", prefix + DISTILLATION)
    yield without_batch("registers", prefix + REGISTERS)
    yield without_batch("position.table", prefix + POSITION)


def joint(ours: str, theirs: Sequence[str]) -> Iterator[Rule]:
    """Map separate projections to a joint one."""
    for kind in ("weight", "bias"):
        yield Rule(
            f"{ours}.{kind}",
            tuple(f"{name}.{kind}" for name in theirs),
            lambda *arrays: torch.cat(arrays),
            lambda joined: joined.chunk(len(theirs)),
        )


def model_type(config: VitConfig) -> str:
    """Return the model type that a ViT with learned positions is written as."""
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.registers else "dinov2"
    if config.distillation or config.registers:
        return "deit"
    return "vit" if config.class_token else "ijepa"


def vit_unsupported(config: VitConfig) -> list[str]:
    """All numerics can be expressed: they are in config.json."""
    kind, head = model_type(config), bool(config.num_classes)
    dino, pools = kind.startswith("dinov2"), ("mean",) if kind == "ijepa" else ("cls",)
    features = {
        "a head on a representation layer": config.representation and head,
        f"a representation layer of {kind}": config.representation and kind not in ("vit", "deit"),
        f"{config.registers} registers without LayerScale": kind == "deit" and config.registers > 1,
        "a distillation token without a head": config.distillation and not head,
        "a distillation token with registers": config.distillation and config.registers,
    }
    plain = replace(config, registers=0, distillation=False)
    if dino:
        pools = ("cls+mean",) if head else ("cls",)
        plain = replace(plain, layer_scale=None, mlp="gelu")
        features[f"mlp_width={config.mlp_width} of DINOv2"] = dino_ratio(config) is None
    return applicable(features) + unsupported_features(plain, pools=pools, qkv_bias=False)


def dino_ratio(config: VitConfig) -> int | None:
    """Return the integer from which DINOv2 of transformers computes the width of its MLP."""
    for ratio in range(1, 17):
        hidden = config.width * ratio
        if config.mlp == "swiglu":
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == config.mlp_width:
            return ratio
    return None


def write_names(config: VitConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the names of ViT to those of the model type that is written."""
    kind = model_type(config)
    prefix = f"{kind}." if config.num_classes else ""
    tensors = {re.sub(r"^vit\.", f"{kind}.", name): x for name, x in tensors.items()}
    if config.distillation:
        tensors = {
            re.sub(r"^classifier\.", "cls_classifier.", name): x for name, x in tensors.items()
        }
    elif kind == "deit":  # a register, which has no position
        tensors[prefix + DISTILLATION] = tensors.pop(prefix + REGISTERS)
        table = tensors[prefix + POSITION]
        zeros = torch.zeros(1, 1, config.width)
        tensors[prefix + POSITION] = torch.cat([table[:, :1], zeros, table[:, 1:]], dim=1)
    if kind.startswith("dinov2"):
        tensors = {substitute(name, DINO_NAMES): x for name, x in tensors.items()}
        tensors[f"{prefix}embeddings.mask_token"] = torch.zeros(1, config.width)
    return tensors


# config.json.


def vit_json(config: VitConfig, metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Return the files `from_pretrained` needs. All of ViTConfig is written, so that no
    version-dependent default matters."""
    kind = model_type(config)
    name = {"vit": "ViT", "deit": "DeiT", "ijepa": "IJepa", "dinov2": "Dinov2"}.get(
        kind, "Dinov2WithRegisters"
    )
    suffix = "ForImageClassification" if config.num_classes else "Model"
    settings = common_json(config, metadata) | {
        "architectures": [name + suffix + ("WithTeacher" if config.distillation else "")],
        "model_type": kind,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "qkv_bias": config.qkv_bias,
    }
    if kind.startswith("dinov2"):
        del settings["intermediate_size"]
        settings |= {
            "mlp_ratio": dino_ratio(config),
            "use_swiglu_ffn": config.mlp == "swiglu",
            "layerscale_value": config.layer_scale,
            "drop_path_rate": 0.0,
        }
        settings |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        settings |= {
            "encoder_stride": max(pair(config.patch_size)),
            "pooler_output_size": config.representation or config.width,
            "pooler_act": "tanh",
        }
    return json_files(settings, metadata.preprocessing)


def common_json(config: VitConfig, metadata: Metadata) -> dict[str, Any]:
    """Return the settings that all models of transformers share."""
    names = metadata.class_names or tuple(f"LABEL_{i}" for i in range(config.num_classes))
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": HIDDEN_ACT[config.numerics.gelu],
        "layer_norm_eps": config.numerics.norm_eps,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def infer_image_size(
    settings: Settings, patches: int, patch_size: tuple[int, int]
) -> tuple[int, int]:
    stated = settings.get("image_size")
    if stated is None:
        hint = "for another grid, put a config.json with image_size next to the weights"
        return square_image(patches, patch_size, hint)
    height, width = pair(normalize_size("image_size", stated))
    if (height // patch_size[0]) * (width // patch_size[1]) != patches:
        raise CheckpointError(
            f"config.json mismatch: image_size={stated!r}, the weights have positions for "
            f"{patches} patches of {patch_size[0]} x {patch_size[1]} pixels"
        )
    return height, width


def check_stated(settings: Settings, config: VitConfig) -> None:
    """Reject settings that contradict the shapes of the weights."""
    for theirs, ours in IN_SHAPES.items():
        stated, actual = settings.get(theirs), getattr(config, ours)
        if stated is not None and theirs == "patch_size":
            stated = normalize_size(theirs, stated)
        if stated is not None and stated != actual:
            raise CheckpointError(
                f"config.json mismatch: {theirs}={stated!r}, the weights have {actual!r}"
            )


def read_gelu(settings: Settings, default: str) -> Gelu:
    activation = settings.get("hidden_act", default)
    if not isinstance(activation, str) or activation not in GELUS:
        raise CheckpointError(
            f"unsupported hidden_act={activation!r} in config.json; supported: {', '.join(GELUS)}"
        )
    return GELUS[activation]


def number(settings: Settings, name: str, default: float) -> float:
    value = settings.get(name, default)
    if isinstance(value, int | float) and abs(value) < MAX_NUMBER:  # False for NaN
        return float(value)
    raise CheckpointError(f"{name}={value!r} is not a number")


def read_metadata(settings: Settings, config: VitConfig) -> Metadata | None:
    """Read preprocessing and class names; None if there are no JSON files."""
    processor = settings.get(PROCESSOR)
    if "model_type" not in settings and processor is None:
        return None
    stated, preprocessing = False, preset("transformers", pair(config.image_size), config.channels)
    if isinstance(processor, Mapping):
        preprocessing = read_processor(processor, pair(config.image_size), config.channels)
        stated = "image_mean" in processor or processor.get("do_normalize") is False
    labels, names = settings.get("id2label"), ()
    if isinstance(labels, Mapping) and len(labels) == config.num_classes:
        default = tuple(f"LABEL_{index}" for index in range(config.num_classes))
        names = tuple(str(labels.get(str(index), name)) for index, name in enumerate(default))
        names = () if names == default else names
    provenance = {} if stated else ASSUMED
    return Metadata(preprocessing=preprocessing, class_names=names, provenance=provenance)


# preprocessor_config.json.


def json_files(config_json: dict[str, Any], preprocessing: Preprocessing) -> dict[str, Any]:
    """Return both files, with the closest image processor; `vitrail convert` warns about what
    differs."""
    before = preprocessing.resize_to or preprocessing.size
    resized, cropped = (
        dict(zip(("height", "width"), size, strict=True)) for size in (before, preprocessing.size)
    )
    short = preprocessing.resize == "short-side"
    settings: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": len(preprocessing.mean) == 3,
        "do_resize": True,
        "size": {"shortest_edge": max(before)} if short else resized,
        "resample": RESAMPLE.get(preprocessing.interpolation, RESAMPLE["bilinear"]),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
    if short or preprocessing.resize_to is not None:
        settings |= {"do_center_crop": True, "crop_size": cropped}
    return {"config.json": config_json, PROCESSOR: settings}


def read_processor(values: Settings, image_size: tuple[int, int], channels: int) -> Preprocessing:
    size, short = image_size, False
    if values.get("do_resize", True) and values.get("size") is not None:
        size, short = read_size("size", values["size"])
        kinds = [values.get(name) for name in ("image_processor_type", "feature_extractor_type")]
        if isinstance(values["size"], int) and any(str(kind).startswith("CLIP") for kind in kinds):
            short = True  # CLIP's old files: one number is the short side
    crop = values.get("crop_size") is not None and values.get("do_center_crop", True)
    resample = values.get("resample")
    resample = RESAMPLE["bilinear"] if resample is None else resample
    if not isinstance(resample, int) or resample not in FILTERS:
        raise CheckpointError(f"{PROCESSOR}: unknown filter resample={resample!r}")
    # The processor's mean and std are those of pixels * rescale_factor, ours of pixels / 255.
    factor = number(values, "rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1.0
    scale = 1.0 if math.isclose(255 * factor, 1) else 255 * factor
    if scale <= 0:
        raise CheckpointError(f"{PROCESSOR}: rescale_factor={factor} must be positive")
    statistics = [(0.0,) * channels, (1.0,) * channels]
    for index, name in enumerate(("image_mean", "image_std")):
        if values.get("do_normalize", True):
            stated = values.get(name, 0.5)
            parts = stated if isinstance(stated, list) else [stated]
            numbers = tuple(number({name: part}, name, 0) for part in parts)
            if len(numbers) != channels and len(set(numbers)) != 1:
                raise CheckpointError(
                    f"{PROCESSOR}: {name}={stated!r} does not fit {channels} channels"
                )
            statistics[index] = numbers if len(numbers) == channels else numbers[:1] * channels
    mean, std = (tuple(value / scale for value in numbers) for numbers in statistics)
    return Preprocessing(
        size=read_size("crop_size", values["crop_size"])[0] if crop else size,
        resize="short-side" if short else "direct",
        resize_to=size if short or crop else None,
        interpolation=FILTERS[resample],
        mean=mean,
        std=std,
    )


def read_size(name: str, value: Any) -> tuple[tuple[int, int], bool]:
    """Return height and width, and whether they apply to the short side only."""
    short = isinstance(value, Mapping) and "shortest_edge" in value
    sides: list[Any] = value if isinstance(value, list) else [value, value]
    if isinstance(value, Mapping):
        keys = ("shortest_edge",) * 2 if short else ("height", "width")
        sides = [value.get(key) for key in keys]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(f"{PROCESSOR}: {name}={value!r} is not a height and width")
    return (sides[0], sides[1]), short


VIT = Table(
    VitConfig,
    lambda tensors: any(f"{prefix}{PATCHES}.weight" in tensors for prefix in ("vit.", "")),
    vit_config,
    vit_templates,
    vit_unsupported,
    vit_json,
    write_names,
)
