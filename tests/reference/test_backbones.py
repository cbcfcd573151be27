"""CLIP, SigLIP and DINOv3 models of transformers and timm load here and vice versa."""

import pytest
import torch
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


def transformers_model(kind):
    """A tiny random model of a class of transformers."""
    name, changes = KINDS[kind]
    family = name.split("For")[0].split("Model")[0]
    if family in ("CLIP", "Siglip"):
        changes = {"vision_config": SMALL, "text_config": TEXT, **changes}
    else:
        changes = {**SMALL, **changes}
    config = getattr(transformers, f"{family}Config")(**changes)
    return randomize(getattr(transformers, name)(config))


KINDS = {
    "CLIP": ("CLIPVisionModel", {}),
    "CLIP with GELU": ("CLIPVisionModel", {"hidden_act": "gelu", "num_channels": 1}),
    "CLIP with projection": ("CLIPVisionModelWithProjection", {}),
    "full CLIP": ("CLIPModel", {}),
    "SigLIP": ("SiglipVisionModel", {}),
    "full SigLIP": ("SiglipModel", {}),
    "DINOv3": ("DINOv3ViTModel", {"num_register_tokens": 2}),
    "DINOv3, SwiGLU": ("DINOv3ViTModel", {"use_gated_mlp": True, "hidden_act": "silu"}),
    "DINOv3, key bias": ("DINOv3ViTModel", {"key_bias": True, "rope_theta": 50.0}),
    "I-JEPA": ("IJepaModel", {}),
    "I-JEPA classifier": ("IJepaForImageClassification", {"num_labels": 5}),
    "SigLIP classifier": ("SiglipForImageClassification", {"num_labels": 5}),
}


def exact_rotation(rope):
    """The rotation of DINOv3 in float64; transformers computes it in float32 for every dtype."""

    def forward(images):
        rows, columns = (side // rope.config.patch_size for side in images.shape[2:])
        sides = [torch.arange(0.5, n, dtype=torch.float64) / n for n in (rows, columns)]
        grid = 2 * torch.cartesian_prod(*sides) - 1  # (h * w, 2): y, x
        exponents = torch.arange(0, 1, 4 / rope.head_dim, dtype=torch.float64)
        angles = 2 * torch.pi * grid[:, :, None] * rope.base**-exponents
        angles = angles.flatten(1, 2).tile(2)
        return angles.cos(), angles.sin()

    return forward


@torch.no_grad()
def check_equal(ours, theirs, sizes=(32, 64)):
    """Features or logits agree at several sizes, in float32 and float64."""
    vision = getattr(theirs, "vision_model", theirs)
    for dtype, size in [(torch.float32, sizes[0]), *((torch.float64, size) for size in sizes)]:
        images = torch.randn(2, ours.config.channels, size, size).to(dtype)
        options = {"interpolate_pos_encoding": True} if size != ours.config.image_size else {}
        if hasattr(theirs, "rope_embeddings"):
            options = {}
            if dtype == torch.float64:
                theirs.rope_embeddings.forward = exact_rotation(theirs.rope_embeddings)
        if ours.config.num_classes:
            expected = theirs.to(dtype)(images, **options).logits
        else:
            answer = vision.to(dtype)(images, **options)
            expected = getattr(answer, "pooler_output", None)
            if expected is None:  # I-JEPA
                expected = answer.last_hidden_state.mean(dim=1)
        assert relative(ours.to(dtype)(images), expected) <= TOLERANCE[dtype]
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
    again, report = getattr(transformers, written).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    check_equal(ours, again.eval())


TIMM = {
    "CLIP": ("vit_base_patch16_clip_224", {}),
    "CLIP, quick GELU": ("vit_base_patch32_clip_quickgelu_224", {"num_classes": 0}),
    "SigLIP": ("vit_base_patch16_siglip_224", {}),
    "SigLIP 2": ("vit_so400m_patch16_siglip_256", {"num_classes": 0}),
    "DINOv3": ("vit_small_patch16_dinov3_qkvb", {}),
    "DINOv3, class token": ("vit_small_patch16_dinov3", {"global_pool": "token", "num_classes": 0}),
    "DINOv3, SwiGLU": ("vit_small_plus_patch16_dinov3_qkvb", {"num_classes": 0}),
    "class token, mean": ("vit_base_patch16_224", {"global_pool": "avg", "fc_norm": False}),
    "qk norm": ("vit_base_patch16_224", {"qk_norm": True}),
}


@pytest.mark.parametrize("kind", TIMM)
def test_timm_models_round_trip(kind, tmp_path):
    name, changes = TIMM[kind]
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    arguments = {"num_classes": 5, "mlp_ratio": 2, **sizes, **changes}
    theirs = randomize(timm.create_model(name, **arguments))
    num_classes = arguments.pop("num_classes")
    timm.models.save_for_hf(theirs, tmp_path / "theirs", model_args=arguments)
    ours = load(tmp_path / "theirs", log=lambda line: None)
    assert ours.config.num_classes == num_classes
    save(ours, tmp_path / "ours", "timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    for dtype in TOLERANCE:
        images = torch.randn(2, 3, 32, 32).to(dtype)
        for model in (theirs, again):
            if hasattr(model, "rope"):
                model.to(dtype).rope.periods = model.rope._compute_periods(dtype=dtype)
        with torch.no_grad():
            expected = theirs.to(dtype)(images)
            assert relative(ours.to(dtype)(images), expected) <= TOLERANCE[dtype]
            assert relative(again.to(dtype)(images), expected) <= TOLERANCE[dtype]
