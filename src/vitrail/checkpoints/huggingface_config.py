"""config.json of transformers: what it says of a ViT, and the one we write."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.checkpoints.shapes import square
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, Gelu, Numerics, Size, VitConfig, normalize_size, pair

Settings = Mapping[str, Any]

MODEL_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn")
TIMM = "timm_wrapper"  # a model of timm that transformers has saved, under timm's names
GELUS: dict[str, Gelu] = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_accurate": "tanh",
}
HIDDEN_ACT: dict[Gelu, str] = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}
DINO_EPS = 1e-6  # DINOv2's default, where ViT's is 1e-12
IN_SHAPES = {  # what the shapes of the weights say too; theirs → ours
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "intermediate_size": "mlp_width",
    "num_channels": "channels",
    "patch_size": "patch_size",
    "qkv_bias": "qkv_bias",
}
LARGEST = 1e30  # of a number that can be meant


def model_settings(config: VitConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """config.json: all of ViTConfig, so that no default of another version matters."""
    kind = "ViTForImageClassification" if config.num_classes else "ViTModel"
    names = names or tuple(f"LABEL_{index}" for index in range(config.num_classes))
    return {
        "architectures": [kind],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": HIDDEN_ACT[config.numerics.gelu],
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "layer_norm_eps": config.numerics.norm_eps,
        "image_size": one_or_two(config.image_size),
        "patch_size": one_or_two(config.patch_size),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
        "encoder_stride": max(pair(config.patch_size)),
        "pooler_output_size": config.representation or config.width,
        "pooler_act": "tanh",
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def check_model_type(settings: Settings) -> None:
    """Refuse another model by its name."""
    kind = settings.get("model_type")
    if kind is not None and kind not in (*MODEL_TYPES, TIMM):
        raise CheckpointError(
            f"config.json says model_type={kind!r}; of transformers' models, "
            f"{', '.join(MODEL_TYPES)} can be read here"
        )


def check_settings(settings: Settings, config: VitConfig) -> None:
    """Refuse a config.json that belongs to other weights, or asks for what no model here does."""
    for theirs, ours in IN_SHAPES.items():
        said, found = settings.get(theirs), getattr(config, ours)
        if said is not None and theirs == "patch_size":
            said = normalize_size(theirs, said)
        if said is not None and said != found:
            raise CheckpointError(f"config.json says {theirs}={said!r}; the weights say {found!r}")
    act = settings.get("pooler_act", "tanh")
    if config.representation and act != "tanh":
        raise CheckpointError(
            f"config.json says pooler_act={act!r}; a representation layer here ends in tanh"
        )


def image_size(settings: Settings, patches: int, patch_size: tuple[int, int]) -> tuple[int, int]:
    """The pixels the position table was made for."""
    down, across = patch_size
    if (said := settings.get("image_size")) is not None:
        height, width = pair(normalize_size("image_size", said))
        if (height // down) * (width // across) != patches:
            raise CheckpointError(
                f"config.json says image_size={said!r}; the weights have positions for {patches} "
                f"patches of {down} x {across} pixels"
            )
        return height, width
    hint = "only the config.json that belongs to the weights can say how many go into a row"
    return square(patches, patch_size, hint)


def numerics(settings: Settings, *, is_dino: bool) -> Numerics:
    """transformers' numerics with the GELU and the epsilon that are asked for."""
    usual = NUMERICS["transformers"]
    act = settings.get("hidden_act", "gelu")
    if not isinstance(act, str) or act not in GELUS:
        raise CheckpointError(
            f"config.json says hidden_act={act!r}; models here have one of {', '.join(GELUS)}"
        )
    eps = number(settings, "layer_norm_eps", DINO_EPS if is_dino else usual.norm_eps)
    return replace(usual, gelu=GELUS[act], norm_eps=eps)


def class_names(settings: Settings, classes: int) -> tuple[str, ...]:
    """The names in the order of the logits; LABEL_0 and so on are names that nobody gave."""
    labels = settings.get("id2label")
    if not isinstance(labels, Mapping) or len(labels) != classes:
        return ()
    unnamed = tuple(f"LABEL_{index}" for index in range(classes))
    names = tuple(str(labels.get(str(index), unnamed[index])) for index in range(classes))
    return () if names == unnamed else names


def number(settings: Settings, name: str, default: float) -> float:
    value = settings.get(name, default)
    if isinstance(value, int | float) and abs(value) < LARGEST:  # not so for NaN
        return float(value)
    raise CheckpointError(f"the settings say {name}={value!r}, which is no number")


def one_or_two(size: Size) -> int | list[int]:
    """A size as JSON has it."""
    return size if isinstance(size, int) else list(size)
