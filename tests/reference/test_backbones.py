"""Every supported model type of transformers, timm and Meta loads here, and is written back.

Tiny random models are saved by their own library. Features or logits agree at the native and at
another resolution, and the origin loads what we write without missing or unexpected tensors.
"""

import pytest
import torch
import torch.nn.functional as F
from weights import TOLERANCE, randomize, relative

from vitrail import load, save

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {name: value for name, value in SMALL.items() if name not in ("image_size", "patch_size")}
TEXT |= {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
REGISTERS = {"num_register_tokens": 2}
LABELS = {"num_labels": 5}

# class of transformers, changes of its config, model type that we write
KINDS = {
    "ViT": ("ViTModel", {}, "vit"),
    "ViT classifier": ("ViTForImageClassification", LABELS, "vit"),
    "DeiT": ("DeiTModel", {}, "deit"),
    "DeiT classifier": ("DeiTForImageClassification", LABELS, "deit"),
    "DeiT with teacher": ("DeiTForImageClassificationWithTeacher", LABELS, "deit"),
    "MAE": ("ViTMAEModel", {"mask_ratio": 0.0}, "vit"),
    "MAE with decoder": ("ViTMAEForPreTraining", {"mask_ratio": 0.0}, "vit"),
    "MSN": ("ViTMSNModel", {}, "vit"),
    "MSN classifier": ("ViTMSNForImageClassification", LABELS, "vit"),
    "I-JEPA": ("IJepaModel", {}, "ijepa"),
    "I-JEPA classifier": ("IJepaForImageClassification", LABELS, "ijepa"),
    "DINOv2": ("Dinov2Model", {}, "dinov2"),
    "DINOv2, SwiGLU": ("Dinov2Model", {"use_swiglu_ffn": True}, "dinov2"),
    "DINOv2 classifier": ("Dinov2ForImageClassification", LABELS, "dinov2"),
    "DINOv2 with registers": ("Dinov2WithRegistersModel", REGISTERS, "dinov2_with_registers"),
    "DINOv2 classifier with registers": (
        "Dinov2WithRegistersForImageClassification",
        LABELS | REGISTERS,
        "dinov2_with_registers",
    ),
    "DINOv3": ("DINOv3ViTModel", REGISTERS, "dinov3_vit"),
    "DINOv3, SwiGLU": (
        "DINOv3ViTModel",
        {"use_gated_mlp": True, "hidden_act": "silu"},
        "dinov3_vit",
    ),
    "DINOv3, key bias": ("DINOv3ViTModel", {"key_bias": True, "rope_theta": 50.0}, "dinov3_vit"),
    "CLIP": ("CLIPVisionModel", {}, "clip_vision_model"),
    "CLIP with GELU": (
        "CLIPVisionModel",
        {"hidden_act": "gelu", "num_channels": 1},
        "clip_vision_model",
    ),
    "CLIP with projection": ("CLIPVisionModelWithProjection", {}, "clip_vision_model"),
    "full CLIP": ("CLIPModel", {}, "clip_vision_model"),
    "SigLIP": ("SiglipVisionModel", {}, "siglip_vision_model"),
    "full SigLIP": ("SiglipModel", {}, "siglip_vision_model"),  # and SigLIP 2, fixed resolution
    "SigLIP classifier": ("SiglipForImageClassification", LABELS, "ijepa"),  # the same network
}


def transformers_model(kind):
    """A tiny random model of a class of transformers."""
    name, changes, _ = KINDS[kind]
    family = name.split("For")[0].split("Model")[0]
    if family in ("CLIP", "Siglip"):
        changes = {"vision_config": SMALL, "text_config": TEXT, **changes}
    elif family.startswith("Dinov2"):  # its MLP follows from mlp_ratio
        changes = {**SMALL, "mlp_ratio": 2, **changes}
        del changes["intermediate_size"]
    else:
        changes = {**SMALL, **changes}
    config = getattr(transformers, f"{family}Config")(**changes)
    model = randomize(getattr(transformers, name)(config))
    if family == "DeiT":  # an unread token and its position become a register: an exact sum
        embeddings = getattr(model, "deit", model).embeddings
        for parameter in (embeddings.distillation_token, embeddings.position_embeddings):
            parameter.data = parameter.data.bfloat16().float()
    return model


def exact_rotation(rope):
    """The rotation of DINOv3 in float64.

    transformers computes angles, cosines and sines in float32 for every dtype, so that its own
    float64 features are exact to 1e-8 only.
    """

    def forward(images):
        rows, columns = (side // rope.config.patch_size for side in images.shape[2:])
        sides = [torch.arange(0.5, n, dtype=torch.float64) / n for n in (rows, columns)]
        grid = 2 * torch.cartesian_prod(*sides) - 1  # (h * w, 2): y, x
        exponents = torch.arange(0, 1, 4 / rope.head_dim, dtype=torch.float64)
        angles = 2 * torch.pi * grid[:, :, None] * rope.base**-exponents
        angles = angles.flatten(1, 2).tile(2)
        return angles.cos(), angles.sin()

    return forward


def exact_positions(table, size, *, antialias):
    """DINOv2's position table for another size in float64; transformers interpolates in float32."""
    side = round((table.shape[1] - 1) ** 0.5)
    patches = table[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    grid = [pixels // SMALL["patch_size"] for pixels in size]
    patches = F.interpolate(patches, grid, mode="bicubic", antialias=antialias)
    return torch.cat([table[:, :1], patches.flatten(2).mT], dim=1)


@torch.no_grad()
def their_output(theirs, images, num_classes):
    """Their logits, or the features that correspond to ours."""
    kind = type(theirs).__name__
    options = {"interpolate_pos_encoding": True}
    if "DINOv3" in kind or "Dinov2" in kind:  # always
        options = {}
    if num_classes:
        return theirs(images, **options).logits
    inner = getattr(theirs, "vision_model", getattr(theirs, "vit", theirs))
    answer = inner(images, **options)
    if (pooled := getattr(answer, "pooler_output", None)) is not None:
        return pooled
    tokens = answer.last_hidden_state
    return tokens.mean(dim=1) if "IJepa" in kind else tokens[:, 0]


@torch.no_grad()
def check_equal(ours, theirs):
    """Features or logits agree at the native and another size, in float32 and float64."""
    for dtype in TOLERANCE:
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        rope = getattr(theirs, "rope_embeddings", None)
        if rope is not None and dtype == torch.float64:
            rope.forward = exact_rotation(rope)
        for size in ((32, 32), (48, 48), (24, 24)):
            images = torch.randn(2, ours.config.channels, *size).to(dtype)
            expected = None
            inner = getattr(theirs, theirs.base_model_prefix, theirs)
            if "Dinov2" in type(theirs).__name__ and dtype == torch.float64:
                parameter = inner.embeddings.position_embeddings
                table, antialias = parameter.data, "Registers" in type(theirs).__name__
                parameter.data = exact_positions(table, size, antialias=antialias)
                expected = their_output(theirs, images, ours.config.num_classes)
                parameter.data = table
            if expected is None:
                expected = their_output(theirs, images, ours.config.num_classes)
            assert relative(ours(images), expected) <= TOLERANCE[dtype], (dtype, size)
    ours.float()
    theirs.float()


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_models_round_trip(kind, tmp_path):
    theirs = transformers_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs", log=lambda line: None)
    check_equal(ours, theirs)
    save(ours, tmp_path / "ours", "huggingface")
    written = "AutoModelForImageClassification" if ours.config.num_classes else "AutoModel"
    options = {}
    if ours.config.num_classes == 0 and KINDS[kind][2] in ("vit", "deit", "ijepa"):
        options = {"add_pooling_layer": ours.config.representation > 0}
    again, report = getattr(transformers, written).from_pretrained(
        tmp_path / "ours", output_loading_info=True, **options
    )
    assert not any(report.values()), report
    assert again.config.model_type == KINDS[kind][2]
    check_equal(ours, again.eval())
