"""Which family a checkpoint belongs to, where nothing in it states the preprocessing.

Google's, torchvision's and big_transfer's files have names of their own, and one normalization.
timm's names and transformers' are shared by AugReg ([-1, 1]) and DeiT, DINO, MAE (ImageNet
statistics): tensors that only one of them has tell them apart, or how the file is laid out, or
else its name.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vitrail.checkpoints.files import Weights
from vitrail.checkpoints.huggingface_processor import PROCESSOR
from vitrail.checkpoints.timm_settings import pretrained

CERTAIN = ("google", "torchvision", "bit_pytorch")  # formats with one normalization


class Family(NamedTuple):
    """A family of checkpoints, the preset of its preprocessing, and how it was recognized."""

    name: str
    preset: str
    evidence: str


# How a tensor's name ends or goes on, family, preset; the first that applies.
TENSORS = {
    "timm": (
        (r"(?:dist_token|head_dist\.weight)$", "DeiT", "deit"),
        (r"blocks\.\d+\.gamma_1$", "DeiT III", "deit"),
        (r"decoder_embed\.weight$", "MAE", "dino"),
        (r"(?:register_tokens|mask_token)$", "DINOv2", "dino"),
        (r"(?:dino_|ibot_)?head\.(?:mlp\.0|last_layer)\.", "DINO", "dino"),
        (r"patch_embed\.backbone\.", "AugReg hybrid", "timm"),
        (r"attn_pool\.latent$", "SigLIP", "timm"),
        (r"stages\.0\.blocks\.0\.", "BiT", "timm"),
    ),
    "huggingface": (
        (r"distillation_token$|deit\.(?:embed|enc)", "DeiT", "dino"),
        (r"layer_scale1\.lambda1$", "DINOv2", "dino"),
        (r"decoder\.decoder_", "MAE", "dino"),
    ),
}
MODEL_TYPES = {  # of transformers; its "vit" is AugReg or DINO
    "deit": "DeiT",
    "dinov2": "DINOv2",
    "dinov2_with_registers": "DINOv2",
    "vit_mae": "MAE",
    "vit_msn": "MSN",
}
FILE_NAMES = (
    (r"dinov2", "DINOv2", "dino"),
    (r"dino", "DINO", "dino"),  # dino_deitsmall16_pretrain.pth is no DeiT
    (r"mae", "MAE", "dino"),
    (r"deit", "DeiT", "deit"),
    (r"augreg|jx_vit", "AugReg", "timm"),
)


def states_preprocessing(settings: Mapping[str, Any], format: str) -> bool:
    """Whether the settings beside the weights say how images are normalized."""
    if format == "timm":
        return "mean" in pretrained(settings)
    processor = settings.get(PROCESSOR)
    if not isinstance(processor, Mapping):
        return False
    return "image_mean" in processor or processor.get("do_normalize") is False


def recognize(weights: Weights, format: str, file_name: str) -> Family | None:
    """The family by its tensors, its layout or its file name; None where it could be several."""
    entries, layout = weights.entries, weights.layout

    def tensor(pattern: str) -> str | None:
        return next((name for name in entries if re.search(rf"(?:^|\.){pattern}", name)), None)

    for pattern, name, preset in TENSORS.get(format, ()):
        if found := tensor(pattern):
            return Family(name, preset, f"its tensor {found}")
    has_head = tensor(r"head\.weight$") is not None
    scale = tensor(r"ls1\.gamma$")
    if scale and tensor(r"cls_token$") and not (has_head and tensor(r"reg_token$")):
        name, preset = ("DeiT III", "deit") if has_head else ("DINOv2", "dino")
        return Family(name, preset, f"its tensor {scale} and {'a' if has_head else 'no'} head")
    if (kind := str(weights.settings.get("model_type"))) in MODEL_TYPES:
        return Family(MODEL_TYPES[kind], "dino", f"model_type={kind!r} in config.json")
    if format == "timm" and "teacher" in layout:
        return Family("DINO", "dino", "its state dict 'teacher'")
    if format == "timm" and layout == ("model",):
        name, preset = ("DeiT", "deit") if has_head else ("MAE", "dino")
        return Family(name, preset, "its layout {'model': …}")
    for pattern, name, preset in FILE_NAMES:
        if re.search(rf"(?<![a-z])(?:{pattern})", file_name.lower()):
            return Family(name, preset, f"its name {file_name}")
    return None
