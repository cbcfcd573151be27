"""Model metadata: preprocessing, class names and provenance, stored with the weights.

`model.metadata` of a loaded model; `save` writes it into a bundle. A checkpoint that does not state
its preprocessing gets that of its family. timm's and transformers' names are shared by AugReg (mean
0.5) and DeiT, DINO and MAE (ImageNet mean); `recognize_family` distinguishes them by tensors that
only one of them has, by the layout of the file, or by the file name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vitrail.checkpoints.files import Checkpoint
from vitrail.data.preprocessing import Preprocessing, preset
from vitrail.data.preprocessing import from_dict as preprocessing_from_dict
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models.config import pair
from vitrail.models.vit import Model

if TYPE_CHECKING:
    from vitrail.data.transforms import ImageInput

# Provenance entry of a model whose checkpoint does not state its preprocessing.
ASSUMED = {"preprocessing": "assumed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """Preprocessing, class names and provenance of a model."""

    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()  # in the order of the logits; empty if unknown
    provenance: Mapping[str, Any] = field(default_factory=dict)
    multi_label: bool = False  # independent sigmoid per class instead of a softmax
    conformal: Mapping[str, Any] = field(default_factory=dict)  # of evaluation/conformal.py

    def names(self, num_classes: int) -> tuple[str, ...]:
        """Return the class names, or the class indices if there are none."""
        return self.class_names or tuple(map(str, range(num_classes)))

    def prepare(self, images: "ImageInput | Sequence[ImageInput]") -> Tensor:
        """Preprocess one image or a list into a normalized batch (B, C, H, W).

        >>> logits = model(model.metadata.prepare("cat.jpg"))

        An image is a path, encoded bytes, a Pillow image, or uint8 pixels (H, W) or (H, W, C).
        """
        from vitrail.data.transforms import (
            EvalTransform,
            as_sequence,
            input_name,
            normalize,
            read_image,
        )

        channels = len(self.preprocessing.mean)
        transform = EvalTransform(preprocessing=self.preprocessing, channels=channels)
        batch = []
        for index, image in enumerate(as_sequence(images)[0]):
            try:
                batch.append(transform(read_image(image, channels)))
            except DataError as error:
                raise DataError(f"{input_name(image, index)}: {error}") from None
        empty = torch.empty(0, channels, *self.preprocessing.size)
        return normalize(torch.stack(batch) if batch else empty, self.preprocessing)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Apply softmax, or sigmoid if the model is multi-label, to logits (B, K)."""
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=1)

    @property
    def assumes_preprocessing(self) -> bool:
        """Whether the preprocessing is a guess, because the checkpoint does not state it."""
        return self.provenance.get("preprocessing") == ASSUMED["preprocessing"]

    @property
    def local_data(self) -> str:
        """The training data if it is on this machine. A model may name any URL: none is opened."""
        data = self.provenance.get("data")
        if not isinstance(data, str) or "://" in data or data.startswith("hf:"):
            return ""
        return data

    def with_preprocessing(self, preprocessing: Preprocessing) -> "Metadata":
        """Return a copy with preprocessing that is stated, not assumed."""
        stated = {key: value for key, value in self.provenance.items() if key not in ASSUMED}
        return replace(self, preprocessing=preprocessing, provenance=stated)

    def to_dict(self) -> dict[str, Any]:
        return {
            "preprocessing": self.preprocessing.to_dict(),
            "class_names": list(self.class_names),
            "provenance": dict(self.provenance),
            **({"multi_label": True} if self.multi_label else {}),
            **({"conformal": dict(self.conformal)} if self.conformal else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Metadata":
        """Undo `to_dict`; other keys are ignored."""
        stated = {"class_names": [], "provenance": {}, "multi_label": False, "conformal": {}}
        stated |= {name: values[name] for name in stated if name in values}
        kinds = (list, Mapping, bool, Mapping)
        valid = all(map(isinstance, stated.values(), kinds))
        if not valid or not isinstance(preprocessing := values.get("preprocessing"), Mapping):
            raise CheckpointError(
                "invalid preprocessing, class_names or provenance in the metadata"
            )
        stated["class_names"] = tuple(map(str, stated["class_names"]))
        return cls(preprocessing=preprocessing_from_dict(preprocessing), **stated)


def get_metadata(model: Model) -> Metadata:
    """Return a model's metadata; the paper's preprocessing for a model that has none."""
    if not hasattr(model, "metadata"):  # by attribute, because torch.compile wraps models
        raise ConfigError(
            f"{type(model).__name__} is not a model of vitrail; pass one from vitrail.create or "
            "vitrail.load, or a reference to one"
        )
    if isinstance(model.metadata, Metadata):
        return model.metadata
    config = model.config
    return Metadata(preprocessing=preset("google", pair(config.image_size), config.channels))


class Family(NamedTuple):
    """A family of checkpoints, its preprocessing preset, and what it was recognized by."""

    name: str
    preset: str
    evidence: str


# Regular expressions for tensor names → family, preset; the first match wins.
TENSORS = {
    "timm": (
        (r"(?:dist_token|head_dist\.weight)$", "DeiT", "deit"),
        (r"blocks\.\d+\.gamma_1$", "DeiT III", "deit"),
        (r"decoder_embed\.weight$", "MAE", "dino"),
        (r"(?:storage_tokens|attn\.q_bias|rope_embed\.periods)$", "DINOv3", "dino"),
        (r"(?:register_tokens|mask_token)$", "DINOv2", "dino"),
        (r"(?:dino_|ibot_)?head\.(?:mlp\.0|last_layer)\.", "DINO", "dino"),
        (r"patch_embed\.backbone\.", "AugReg hybrid", "timm"),
        (r"attn_pool\.latent$", "SigLIP", "timm"),
        (r"norm_pre\.weight$", "CLIP", "clip"),
        (r"stages\.0\.blocks\.0\.", "BiT", "timm"),
    ),
    "huggingface": (
        (r"distillation_token$|deit\.(?:embed|enc)", "DeiT", "dino"),
        (r"layer_scale1\.lambda1$", "DINOv2", "dino"),
        (r"decoder\.decoder_", "MAE", "dino"),
        (r"pre_layrnorm\.weight$", "CLIP", "clip"),
        (r"head\.probe$", "SigLIP", "transformers"),
    ),
}
MODEL_TYPES = {  # of transformers; its "vit" may be AugReg or DINO
    "dinov3_vit": "DINOv3",
    "ijepa": "I-JEPA",
    "deit": "DeiT",
    "dinov2": "DINOv2",
    "dinov2_with_registers": "DINOv2",
    "vit_mae": "MAE",
    "vit_msn": "MSN",
}
FILE_NAMES = (
    (r"dinov2", "DINOv2", "dino"),
    (r"dino", "DINO", "dino"),  # before deit: dino_deitsmall16_pretrain.pth
    (r"mae", "MAE", "dino"),
    (r"deit", "DeiT", "deit"),
    (r"augreg|jx_vit", "AugReg", "timm"),
)


def recognize_family(checkpoint: Checkpoint, format: str, file_name: str) -> Family | None:
    """Recognize the family by tensors, layout or file name; None if it is ambiguous."""

    def tensor(pattern: str) -> str | None:
        pattern = rf"(?:^|\.){pattern}"
        return next((name for name in checkpoint.tensors if re.search(pattern, name)), None)

    for pattern, name, preset_name in TENSORS.get(format, ()):
        if match := tensor(pattern):
            return Family(name, preset_name, f"its tensor {match}")
    has_head = tensor(r"head\.weight$") is not None
    scale = tensor(r"ls1\.gamma$")
    if scale and tensor(r"cls_token$") and not (has_head and tensor(r"reg_token$")):
        name, preset_name = ("DeiT III", "deit") if has_head else ("DINOv2", "dino")
        return Family(name, preset_name, f"its tensor {scale} and {'a' if has_head else 'no'} head")
    model_type = str(checkpoint.settings.get("model_type"))
    if model_type in MODEL_TYPES:
        evidence = f"model_type={model_type!r} in config.json"
        return Family(MODEL_TYPES[model_type], "dino", evidence)
    if format == "timm" and "teacher" in checkpoint.layout:
        return Family("DINO", "dino", "its state dict 'teacher'")
    if format == "timm" and checkpoint.layout == ("model",):
        name, preset_name = ("DeiT", "deit") if has_head else ("MAE", "dino")
        return Family(name, preset_name, "its layout {'model': …}")
    for pattern, name, preset_name in FILE_NAMES:
        if re.search(rf"(?<![a-z])(?:{pattern})", file_name.lower()):
            return Family(name, preset_name, f"its name {file_name}")
    return None
