"""Every supported model type of transformers, timm and Meta loads here, and is written back."""

import re

import pytest
import torch
import torch.nn.functional as F
from weights import TOLERANCE, randomize, relative

from tiny_runs import equal, write_folder
from vitrail import CheckpointError, load, save
from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.load import read_foreign
from vitrail.checkpoints.rules import substitute
from vitrail.cli import main

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT["intermediate_size"] = 48
SMALL = TEXT | {"image_size": 32, "patch_size": 8}
REGISTERS, REGISTERS4 = {"num_register_tokens": 2}, {"num_register_tokens": 4}
LABELS = {"num_labels": 5}
GATED, GELU = {"use_gated_mlp": True, "hidden_act": "silu"}, {"hidden_act": "gelu"}

# class of transformers, changes of its config, model type that we write
KINDS = {
    "ViT": ("ViTModel", {}, "vit"),
    "ViT, small pooler": ("ViTModel", {"pooler_output_size": 20}, "vit"),
    "ViT, masked": ("ViTForMaskedImageModeling", {}, "vit"),
    **{
        f"ViT classifier{name}": ("ViTForImageClassification", LABELS | changes, "vit")
        for name, changes in {
            "": {},
            ", no qkv bias": {"qkv_bias": False},
            ", tanh": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-6},
            ", fast tanh": {"hidden_act": "gelu_fast"},
            ", gray": {"num_channels": 1},
            ", not square": {"image_size": (16, 24)},
            ", oblong patches": {"image_size": (16, 24), "patch_size": (4, 8)},
            ", one class": {"num_labels": 1},
            ", two classes": {"num_labels": 2},
            ", eight heads": {"num_attention_heads": 8},
        }.items()
    },
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
    "DINOv2 with registers, SwiGLU": (
        "Dinov2WithRegistersModel",
        REGISTERS4 | {"use_swiglu_ffn": True},
        "dinov2_with_registers",
    ),
    "DINOv3": ("DINOv3ViTModel", REGISTERS, "dinov3_vit"),
    "DINOv3, SwiGLU": ("DINOv3ViTModel", GATED, "dinov3_vit"),
    "DINOv3, key bias": ("DINOv3ViTModel", {"key_bias": True, "rope_theta": 50.0}, "dinov3_vit"),
    "CLIP": ("CLIPVisionModel", {}, "clip_vision_model"),
    "CLIP with GELU": ("CLIPVisionModel", GELU | {"num_channels": 1}, "clip_vision_model"),
    "CLIP with projection": ("CLIPVisionModelWithProjection", {}, "clip_vision_model"),
    "full CLIP": ("CLIPModel", {}, "clip_vision_model"),
    "SigLIP": ("SiglipVisionModel", {}, "siglip_vision_model"),
    "full SigLIP": ("SiglipModel", {}, "siglip_vision_model"),  # and SigLIP 2, fixed resolution
    "SigLIP classifier": ("SiglipForImageClassification", LABELS, "ijepa"),  # the same network
}


def transformers_model(kind):
    name, changes, _ = KINDS[kind]
    family = name.split("For")[0].split("Model")[0]
    if family in ("CLIP", "Siglip"):
        text = TEXT | {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        changes = {"vision_config": SMALL, "text_config": text, **changes}
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


# transformers and timm compute the rotation of DINOv3, timm and transformers' DINOv2 interpolated
# positions in float32 for every dtype, so that their own float64 outputs are exact to 1e-8 only.
# These compute in float64 instead.


def exact_coordinates(rows, columns, **_):
    """The centers of patches from -1 to 1: (h * w, 2), y and x."""
    sides = [torch.arange(0.5, n, dtype=torch.float64) / n for n in (rows, columns)]
    return 2 * torch.cartesian_prod(*sides) - 1


def exact_rotation(rope):
    def forward(images):
        grid = exact_coordinates(*(side // rope.config.patch_size for side in images.shape[2:]))
        exponents = torch.arange(0, 1, 4 / rope.head_dim, dtype=torch.float64)
        angles = 2 * torch.pi * grid[:, :, None] * rope.base**-exponents
        angles = angles.flatten(1, 2).tile(2)
        return angles.cos(), angles.sin()

    return forward


def exact_positions(table, size, *, antialias):
    side = round((table.shape[1] - 1) ** 0.5)
    patches = table[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    grid = [pixels // SMALL["patch_size"] for pixels in size]
    patches = F.interpolate(patches, grid, mode="bicubic", antialias=antialias)
    return torch.cat([table[:, :1], patches.flatten(2).mT], dim=1)


@torch.no_grad()
def their_output(theirs, images, num_classes):
    """Their logits, or the features that correspond to ours."""
    kind = type(theirs).__name__
    options = {"interpolate_pos_encoding": images.shape[2] == images.shape[3]}
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
    """Features or logits agree at the native and other sizes, in float32 and float64."""
    sizes = [(32, 32), (48, 48), (24, 24)]
    if isinstance(ours.config.image_size, tuple):
        sizes = [ours.config.image_size]  # theirs cannot interpolate oblong grids
    for dtype in TOLERANCE:
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        rope = getattr(theirs, "rope_embeddings", None)
        if rope is not None and dtype == torch.float64:
            rope.forward = exact_rotation(rope)
        for size in sizes:
            images = torch.randn(2, ours.config.channels, *size).to(dtype)
            with pytest.MonkeyPatch.context() as patch:
                if "Dinov2" in type(theirs).__name__ and dtype == torch.float64:
                    inner = getattr(theirs, theirs.base_model_prefix, theirs)
                    parameter, registers = inner.embeddings.position_embeddings, "Registers"
                    antialias = registers in type(theirs).__name__
                    table = exact_positions(parameter.data, size, antialias=antialias)
                    patch.setattr(parameter, "data", table)
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
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "theirs" / "pytorch_model.bin")  # has other names
    for folder in ("ours", "theirs"):
        reread = load(tmp_path / folder, log=lambda line: None)
        assert reread.config == ours.config
        assert equal(reread.state_dict(), ours.state_dict())
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


def save_timm(name, arguments, folder):
    theirs = randomize(timm.create_model(name, **arguments))
    timm.models.save_for_hf(theirs, folder, model_args=arguments)
    return theirs


TIMM = {
    "CLIP": ("vit_base_patch16_clip_224", {}),
    "CLIP, quick GELU": ("vit_base_patch32_clip_quickgelu_224", {"num_classes": 0}),
    "SigLIP": ("vit_base_patch16_siglip_224", {}),
    "SigLIP 2": ("vit_so400m_patch16_siglip_256", {"num_classes": 0}),
    "SigLIP, mean": ("vit_base_patch16_siglip_gap_224", {}),
    "DINOv3": ("vit_small_patch16_dinov3_qkvb", {}),
    "DINOv3, class token": ("vit_small_patch16_dinov3", {"global_pool": "token", "num_classes": 0}),
    "DINOv3, SwiGLU": ("vit_small_plus_patch16_dinov3_qkvb", {"num_classes": 0}),
    "class token, mean": ("vit_base_patch16_224", {"global_pool": "avg", "fc_norm": False}),
    "qk norm": ("vit_base_patch16_224", {"qk_norm": True}),
}


@pytest.mark.parametrize("kind", TIMM)
@torch.no_grad()
def test_timm_models_round_trip(kind, tmp_path):
    name, changes = TIMM[kind]
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    arguments = {"num_classes": 5, "mlp_ratio": 2, "dynamic_img_size": True, **sizes, **changes}
    theirs = save_timm(name, arguments, tmp_path / "theirs")
    ours = load(tmp_path / "theirs", log=lambda line: None)
    assert ours.config.num_classes == arguments["num_classes"]
    save(ours, tmp_path / "ours", "timm")
    again = timm.create_model(
        f"local-dir:{tmp_path / 'ours'}", pretrained=True, dynamic_img_size=True
    ).eval()
    for dtype in TOLERANCE:
        for model in (theirs, again):
            model.to(dtype)
            if hasattr(model, "rope"):
                model.rope.periods = model.rope._compute_periods(dtype=dtype)
        for size in ((32, 32), (48, 48), (24, 24)):
            images = torch.randn(2, 3, *size).to(dtype)
            found = ours.to(dtype)(images)
            with pytest.MonkeyPatch.context() as patch:
                if dtype == torch.float64:
                    patch.setattr(torch.Tensor, "float", lambda x: x)  # before interpolation
                    module = "timm.layers.pos_embed_sincos.make_coords_dinov3"
                    patch.setattr(module, exact_coordinates)
                outputs = [model(images) for model in (theirs, again)]
            for expected in outputs:
                assert relative(found, expected) <= TOLERANCE[dtype], (dtype, size)


# Meta's names: dinov2/models/vision_transformer.py and dinov3/models/vision_transformer.py.
LAYERS = r"(?:model\.|encoder\.)?layers?\."


def meta_names(theirs):
    """The weights of a DINOv2 or DINOv3 of transformers under the names of Meta's files."""
    state, names = {}, dict(theirs.state_dict())
    dinov3, gated = "DINOv3" in type(theirs).__name__, any("gate_proj" in x for x in names)
    renames = [
        (r"^embeddings\.patch_embeddings\.(?:projection\.)?", "patch_embed.proj."),
        (r"^embeddings\.position_embeddings", "pos_embed"),
        (r"^embeddings\.register_tokens", "storage_tokens" if dinov3 else "register_tokens"),
        (r"^embeddings\.", ""),
        (rf"^{LAYERS}", "blocks."),
        (r"\.attention\.o_proj\.", ".attn.proj."),
        (r"\.layer_scale(\d)\.lambda1", r".ls\1.gamma"),
        (r"^layernorm\.", "norm."),
        (r"\.mlp\.gate_proj\.", ".mlp.w1."),
        (r"\.mlp\.up_proj\.", ".mlp.w2." if gated else ".mlp.fc1."),
        (r"\.mlp\.down_proj\.", ".mlp.w3." if gated else ".mlp.fc2."),
    ]
    width = theirs.config.hidden_size
    for name, tensor in names.items():
        if match := re.search(rf"^{LAYERS}(\d+)\.attention\.q_proj\.(\w+)$", name):
            zeros = torch.zeros(width)  # DINOv3's keys have no bias
            parts = [names.get(name.replace("q_proj", f"{x}_proj"), zeros) for x in "qkv"]
            state[f"blocks.{match[1]}.attn.qkv.{match[2]}"] = torch.cat(parts)
            if dinov3 and match[2] == "bias":
                mask = torch.cat([torch.ones(width), torch.zeros(width), torch.ones(width)])
                state[f"blocks.{match[1]}.attn.qkv.bias_mask"] = mask
        elif not re.search(r"\.attention\.[kv]_proj\.", name):
            state[substitute(name, renames)] = tensor
    state = {name: tensor for name, tensor in state.items() if tensor.numel()}  # no registers
    if dinov3:
        exponents = torch.arange(0, 1, 4 * theirs.config.num_attention_heads / width)
        state["rope_embed.periods"] = theirs.config.rope_theta**exponents
        state["mask_token"] = state["mask_token"][0]  # (1, D)
        state |= {f"local_cls_norm.{kind}": torch.ones(width) for kind in ("weight", "bias")}
    return state


@pytest.mark.parametrize(
    "kind", ["DINOv2", "DINOv2 with registers", "DINOv2, SwiGLU", "DINOv3", "DINOv3, SwiGLU"]
)
def test_files_of_meta_match_transformers(kind, tmp_path):
    theirs = transformers_model(kind)
    state = meta_names(theirs)
    if kind == "DINOv2, SwiGLU":  # w12 joins both
        for i in range(2):
            for part in ("weight", "bias"):
                gate, up = (state.pop(f"blocks.{i}.mlp.{name}.{part}") for name in ("w1", "w2"))
                state[f"blocks.{i}.mlp.w12.{part}"] = torch.cat([gate, up])
    chunked = [  # DINOv2's published files have all blocks in chunk 0
        {re.sub(r"^blocks\.", f"blocks.{chunk}.", name): x for name, x in state.items()}
        for chunk in (() if "DINOv3" in kind else (0, 3))
    ]
    for number, tensors in enumerate([state, *chunked]):
        torch.save(tensors, tmp_path / f"{number}.pth")
        lines = []
        ours = load(tmp_path / f"{number}.pth", heads=4, log=lines.append)
        assert f"recognized {kind.split()[0].strip(',')}" in lines[-1]
        for dtype in TOLERANCE:
            images = torch.randn(2, 3, 32, 32).to(dtype)
            rope = getattr(theirs.to(dtype), "rope_embeddings", None)
            if rope is not None and dtype == torch.float64:
                rope.forward = exact_rotation(rope)
            with torch.no_grad():
                expected = their_output(theirs, images, 0)
                assert relative(ours.to(dtype)(images), expected) <= TOLERANCE[dtype]
        theirs.float()


def test_separate_norm_of_dinov3s_class_token_is_rejected(tmp_path):
    state = meta_names(transformers_model("DINOv3"))
    state |= {"cls_norm.weight": torch.ones(32), "cls_norm.bias": torch.ones(32)}
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=r"unexpected tensors: cls_norm\.bias"):
        load(tmp_path / "model.pth")


# Published image towers, built on the meta device by their library and read here.
def sizes_of(row):
    """The configuration of transformers: width, depth, MLP width, heads, image and patch size."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    sizes = dict(zip((*names, "image_size", "patch_size"), row, strict=True))
    return {name: size for name, size in sizes.items() if size}


# fmt: off
PUBLISHED = [  # class of transformers, sizes, other settings, name in timm, parameters
    ("Dinov2", (384, 12, 0, 6, 518, 14), {}, "vit_small_patch14_dinov2", 22_056_192),
    ("Dinov2", (768, 12, 0, 12, 518, 14), {}, "vit_base_patch14_dinov2", 86_579_712),
    ("Dinov2", (1024, 24, 0, 16, 518, 14), {}, "vit_large_patch14_dinov2", 304_367_616),
    ("Dinov2", (1536, 40, 0, 24, 518, 14), {"use_swiglu_ffn": True}, "vit_giant_patch14_dinov2",
     1_136_479_232),
    ("DINOv3ViT", (384, 12, 1536, 6, 0, 0), {}, "vit_small_patch16_dinov3_qkvb", 21_596_160),
    ("DINOv3ViT", (384, 12, 1536, 6, 0, 0), GATED, "vit_small_plus_patch16_dinov3_qkvb",
     28_692_480),
    ("DINOv3ViT", (768, 12, 3072, 12, 0, 0), {}, "vit_base_patch16_dinov3_qkvb", 85_659_648),
    ("DINOv3ViT", (1024, 24, 4096, 16, 0, 0), {}, "vit_large_patch16_dinov3_qkvb", 303_128_576),
    ("DINOv3ViT", (1280, 32, 5120, 20, 0, 0), GATED, "vit_huge_plus_patch16_dinov3_qkvb",
     840_591_360),
    ("SiglipVision", (768, 12, 3072, 12, 224, 16), {}, "vit_base_patch16_siglip_224", 92_884_224),
    ("SiglipVision", (1024, 24, 4096, 16, 256, 16), {}, "vit_large_patch16_siglip_256",
     315_956_224),
    ("SiglipVision", (1152, 27, 4304, 16, 224, 14), {}, "vit_so400m_patch14_siglip_224",
     427_680_704),
    ("CLIPVision", (768, 12, 3072, 12, 224, 32), {}, "vit_base_patch32_clip_quickgelu_224",
     87_456_000),
    ("CLIPVision", (768, 12, 3072, 12, 224, 16), {}, "vit_base_patch16_clip_quickgelu_224",
     85_799_424),
    ("CLIPVision", (1024, 24, 4096, 16, 224, 14), {}, "vit_large_patch14_clip_quickgelu_224",
     303_179_776),
]
# fmt: on


def read_on_meta(theirs, settings, format):
    """Read a model of theirs on the meta device; return our parameters."""
    tensors = {
        name: LazyTensor(tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in theirs.state_dict().items()
    }
    model, _, _ = read_foreign(Checkpoint(tensors, settings), format)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[3])
def test_parameters_of_published_models_equal_those_of_their_libraries(row):
    kind, sizes, changes, timm_name, expected = row
    changes = sizes_of(sizes) | changes | (REGISTERS4 if "v3" in kind else {})
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")(**changes)
        theirs = getattr(transformers, f"{kind}Model")(config)
        assert read_on_meta(theirs, config.to_dict(), "huggingface") == expected
        settings = {"architecture": timm_name}
        if "dino" in timm_name:
            settings["model_args"] = {"global_pool": "token"}
        theirs = timm.create_model(timm_name, num_classes=0)
        assert read_on_meta(theirs, settings, "timm") == expected


UNSUPPORTED = {  # class of transformers: config, what the error says
    "SwinModel": ({"image_size": 32, "embed_dim": 12, "depths": [1], "num_heads": [2]}, "windowed"),
    "HieraModel": ({"embed_dim": 16, "depths": [1] * 4, "num_heads": [1] * 4}, "hierarchical"),
    "SamVisionModel": ({**TEXT, "image_size": 64, "output_channels": 8}, "windowed"),
    "VitDetModel": ({**TEXT, "image_size": 64}, "windowed"),
    "Siglip2VisionModel": ({**TEXT, "num_patches": 16}, "NaFlex.*fixed resolution"),
}
ONE_BLOCK = {"depth": 1, "embed_dim": 32, "num_heads": 2}
SWIN = {"embed_dim": 24, "depths": (1,) * 4, "num_heads": (1,) * 4}
HIERA = {"embed_dim": 16, "stages": (1,) * 4}
SAM = ONE_BLOCK | {"num_classes": 0, "use_rel_pos": True}
UNSUPPORTED_TIMM = {  # name in timm: its sizes, what the error says of a folder and of weights
    "swin_tiny_patch4_window7_224": (SWIN, "windowed", "unknown checkpoint format"),
    "hiera_tiny_224": (HIERA, "hierarchical", "several widths"),
    "mvitv2_tiny": ({}, "hierarchical", None),
    "pvt_v2_b0": ({}, "hierarchical", None),
    "samvit_base_patch16": (SAM, "windowed", "relative positions"),
    "naflexvit_base_patch16_siglip": (ONE_BLOCK, "NaFlex.*fixed resolution", None),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_models_of_transformers_get_one_line(kind, tmp_path):
    changes, reason = UNSUPPORTED[kind]
    config = getattr(transformers, f"{kind.removesuffix('Model')}Config")(**changes)
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    one_line_error(tmp_path, f"unsupported model_type.*{reason}")


def one_line_error(path, message):
    with pytest.raises(CheckpointError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", UNSUPPORTED_TIMM)
def test_unsupported_models_of_timm_get_one_line(name, tmp_path):
    small, reason, reason_for_weights = UNSUPPORTED_TIMM[name]
    theirs = timm.create_model(name, **small)
    timm.models.save_for_hf(theirs, tmp_path / "folder", model_args=small)
    one_line_error(tmp_path / "folder", f"timm model {name}.*{reason}")
    if reason_for_weights:
        torch.save(theirs.state_dict(), tmp_path / "model.pth")
        one_line_error(tmp_path / "model.pth", reason_for_weights)


@pytest.mark.parametrize("kind", ["DINOv3", "SigLIP", "CLIP"])
def test_commands_work_with_recent_backbones(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    transformers_model(kind).save_pretrained(tmp_path / "base")
    data, base, run = write_folder(tmp_path / "data", count=6), tmp_path / "base", tmp_path / "run"
    options = ["--steps", "2", "--batch-size", "4", "--model.image-size", "48", "--lora", "2"]
    commands = [
        ["fewshot", base, data, "--shots", "2"],
        ["finetune", data, "--from", base, *options, "--out", run],
        ["inspect", run, data / "red" / "0.png", "--out", tmp_path / "inside"],
        ["export", run, "--out", tmp_path / "model.onnx"],
        ["plan", base, "--no-probe", "--classes", "3"],
    ]
    for command in commands:
        assert main([*map(str, command)]) == 0, command
    tuned, merged = load(run), load(base, adapter=run / "adapter.safetensors")
    assert all(torch.equal(merged.state_dict()[n], x) for n, x in tuned.state_dict().items())
    for maps in tuned.attention_maps(torch.randn(2, 3, 32, 64)):  # neither its own size nor square
        torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
