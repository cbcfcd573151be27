"""Google's files: golden logits, every layout, broken files."""

import json
import re

import numpy as np
import pytest
import torch
from small_models import random_model

import vitrail
from vitrail import CheckpointError, VitConfig, create, load, save
from vitrail.checkpoints import bit as bit_format
from vitrail.checkpoints import google
from vitrail.checkpoints.google import POSITION
from vitrail.checkpoints.rules import write
from vitrail.models.vit import build

pytestmark = pytest.mark.slow

GOLDEN_NAMES = ["vit-token", "vit-prelogits", "vit-gap", "hybrid", "mixer", "bit"]


def golden_case(golden, name):
    model = load(golden / f"{name}.npz").eval()
    arrays = np.load(golden / f"{name}.io.npz")
    images = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2)
    return model, images, torch.from_numpy(arrays["logits"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_logits(golden, name, dtype):
    model, images, logits = golden_case(golden, name)
    with torch.no_grad():
        ours = model.to(dtype)(images.to(dtype))
    assert (ours - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_configs(golden, name):
    model, _, _ = golden_case(golden, name)
    metadata = json.loads((golden / f"{name}.json").read_text())
    config = model.config
    assert sum(p.numel() for p in model.parameters()) == metadata["params"]
    assert config.num_classes == metadata["classes"]
    assert config.channels == metadata["channels"]
    if metadata["kind"] == "vit":
        assert config.image_size == metadata["image_size"]
        assert (config.patch_size, config.width, config.depth) == (
            metadata["patch"],
            metadata["width"],
            metadata["depth"],
        )
        assert (config.heads, config.mlp_width) == (metadata["heads"], metadata["mlp"])
        assert config.pool == {"token": "cls", "gap": "mean"}[metadata["pool"]]
        assert config.representation == (metadata["representation"] or 0)
        assert config.resnet_blocks == tuple(metadata["resnet_blocks"] or ())


@pytest.fixture
def vit(tiny):
    """A small model with random weights."""
    return random_model(tiny.change(representation=5))


def arrays_of(model, family=google.VIT):
    return {name: array.numpy() for name, array in write(model, family.rules(model.config)).items()}


def assert_loads(tmp_path, arrays, model):
    path = tmp_path / "model.npz"
    np.savez(path, **arrays)
    loaded = load(path)
    size = model.config.image_size
    size = (size, size) if isinstance(size, int) else size
    images = torch.randn(2, model.config.channels, *size)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(images), model(images))
    return loaded


def renamed(arrays, *pairs):
    out = {}
    for name, array in arrays.items():
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        out[name] = array
    return out


def test_current_layout(tmp_path, vit):
    loaded = assert_loads(tmp_path, arrays_of(vit), vit)
    assert loaded.config == vit.config


def test_layout_before_2021(tmp_path, vit):
    arrays = renamed(
        arrays_of(vit),
        ("LayerNorm_1", "LayerNorm_2"),
        ("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1"),
        ("MlpBlock_0", "MlpBlock_3"),
    )
    assert_loads(tmp_path, arrays, vit)


@pytest.mark.parametrize("place", ["Transformer/pos_embedding", "pos_embedding"])
def test_position_table_names(tmp_path, vit, place):
    assert_loads(tmp_path, renamed(arrays_of(vit), (POSITION, place)), vit)


@pytest.mark.parametrize("prefix", ["params/", "opt/target/", "params/img/", "target/"])
def test_training_state_prefixes(tmp_path, vit, prefix):
    arrays = {prefix + name: array for name, array in arrays_of(vit).items()}
    arrays["opt/state/step"] = np.int64(3)
    assert_loads(tmp_path, arrays, vit)


def test_scanned_layers(tmp_path, vit):
    arrays = arrays_of(vit)
    scanned = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for name in [name for name in arrays if "encoderblock_0/" in name]:
        layers = [arrays[name.replace("_0/", f"_{i}/", 1)] for i in range(vit.config.depth)]
        scanned[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    assert_loads(tmp_path, scanned, vit)


def test_bfloat16_stored_as_void(tmp_path, vit):
    vit = vit.bfloat16().float()
    arrays = {
        name: torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view("V2")
        for name, array in arrays_of(vit).items()
    }
    assert_loads(tmp_path, arrays, vit)


def test_positions_without_class_row(tmp_path, vit):
    arrays = arrays_of(vit)
    arrays["cls"] = arrays["cls"] + arrays[POSITION][:, :1]
    arrays[POSITION] = arrays[POSITION][:, 1:]
    path = tmp_path / "model.npz"
    np.savez(path, **arrays)
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(load(path)(images), vit(images))


def test_unused_class_row_is_dropped(tmp_path, tiny):
    model = random_model(tiny.change(pool="mean"))
    arrays = arrays_of(model)
    table = arrays[POSITION]
    arrays[POSITION] = np.concatenate([np.ones_like(table[:, :1]), table], axis=1)
    assert_loads(tmp_path, arrays, model)


def test_headless_file(tmp_path, tiny):
    model = random_model(tiny.change(num_classes=0))
    loaded = assert_loads(tmp_path, arrays_of(model), model)
    assert loaded.config.num_classes == 0


@pytest.mark.parametrize("inlined", [False, True])
def test_map_head_with_and_without_prefix(tmp_path, tiny, inlined):
    model = random_model(tiny.change(pool="map"))
    arrays = arrays_of(model)
    if inlined:
        arrays = renamed(arrays, ("^MAPHead_0/", ""))
    assert_loads(tmp_path, arrays, model)


def test_sincos_positions(tmp_path, tiny):
    model = random_model(tiny.change(position="sincos-2d", pool="mean", image_size=224))
    loaded = assert_loads(tmp_path, arrays_of(model), model)
    assert loaded.config.position == "sincos-2d"


def test_gray_images_and_oblong_patches(tmp_path, tiny):
    model = random_model(tiny.change(channels=1, patch_size=(4, 8), image_size=(8, 16)))
    assert assert_loads(tmp_path, arrays_of(model), model).config == model.config


def test_hybrid_with_4d_norms(tmp_path):
    config = VitConfig(
        depth=1,
        width=8,
        mlp_width=8,
        heads=2,
        patch_size=1,
        image_size=32,
        num_classes=3,
        stem="resnet",
        resnet_blocks=(1, 2),
    )
    model = random_model(config)
    arrays = {
        name: array[None, None, None] if re.search("gn.*/(scale|bias)", name) else array
        for name, array in arrays_of(model).items()
    }
    assert assert_loads(tmp_path, arrays, model).config == config


def test_hybrid_without_stages(tmp_path):
    model = random_model(create("R+ViT-Ti/16", depth=1, num_classes=3, image_size=64).config)
    assert assert_loads(tmp_path, arrays_of(model), model).config == model.config


@pytest.fixture
def bit():
    return random_model(create("BiT-R50x1", blocks=(1, 2), num_classes=3, image_size=224).config)


def test_bit_with_numbered_convolutions(tmp_path, bit):
    arrays = renamed(
        arrays_of(bit, bit_format.GOOGLE), ("standardized_conv2d/", "standardized_conv2d_7/")
    )
    assert_loads(tmp_path, arrays, bit)


def test_bit_in_big_vision_names(tmp_path, bit):
    arrays = renamed(
        arrays_of(bit, bit_format.GOOGLE),
        ("^resnet/root_block/standardized_conv2d", "root_block/conv_root"),
        ("^resnet/group_norm", "norm-pre-head"),
        ("^resnet/head/conv2d", "head"),
        ("^resnet/", ""),
        ("a/proj/standardized_conv2d", "conv_proj"),
        *[(f"{letter}/standardized_conv2d", f"conv{i}") for i, letter in enumerate("abc", 1)],
        *[(f"/{letter}/group_norm", f"/gn{i}") for i, letter in enumerate("abc", 1)],
        ("gamma$", "scale"),
        ("beta$", "bias"),
    )
    arrays["head/kernel"] = arrays["head/kernel"][0, 0]
    for name in arrays:
        if "/gn" in name or name.startswith("norm-pre-head"):
            arrays[name] = arrays[name][None, None, None]
    assert_loads(tmp_path, arrays, bit)


def test_mixer_in_old_names(tmp_path):
    model = random_model(create("Mixer-S/16", depth=2, image_size=32, num_classes=3).config)
    arrays = renamed(
        arrays_of(model, google.MIXER),
        ("^stem", "embedding"),
        ("^pre_head_layer_norm", "Mixer/encoder_norm"),
        (r"^MixerBlock_(\d+)", r"Mixer/encoderblock_\1"),
        ("LayerNorm_1", "LayerNorm_2"),
        ("_mixing/Dense_0/kernel", "_mixing_phase_0/kernel1"),
        ("_mixing/Dense_0/bias", "_mixing_phase_0/bias1"),
        ("_mixing/Dense_1/kernel", "_mixing_phase_0/kernel2"),
        ("_mixing/Dense_1/bias", "_mixing_phase_0/bias2"),
    )
    arrays = {n: a[None] if "kernel1" in n else a for n, a in arrays.items()}
    assert_loads(tmp_path, arrays, model)


BLOCK = "Transformer/encoderblock_{}/{}"
QUERY = BLOCK.format(0, "MultiHeadDotProductAttention_0/query/kernel")
FC1 = BLOCK.format(1, "MlpBlock_0/Dense_0/kernel")


@pytest.mark.parametrize(
    ("name", "change", "message"),  # None deletes the array
    [
        (BLOCK.format(1, "LayerNorm_0/scale"), None, "missing tensors: .*_1/LayerNorm_0/scale"),
        (QUERY, None, "missing tensors: .*query/kernel"),
        (BLOCK.format(1, "extra/kernel"), lambda _: np.zeros(3), "unexpected tensors: .*_1/extra"),
        ("head/kernel", lambda a: a[:, :2], r"head/kernel is \(5, 2\), expected \(5, 3\)"),
        (
            "embedding/kernel",
            lambda a: a[0, 0, 0],
            r"embedding/kernel is \(8,\), expected 4 non-empty axes",
        ),
        (
            FC1,
            lambda a: a[:, :-1],
            r"_1/MlpBlock_0/Dense_0/kernel is \(8, 15\), expected \(8, 16\)",
        ),
        (
            POSITION,
            lambda _: np.zeros((1, 7, 8), np.float32),
            "the 6 patch positions are not a square grid",
        ),
        ("head/bias", lambda _: np.array(["a", "b", "c"]), "head/bias has dtype <U1"),
        (
            QUERY,
            lambda _: np.zeros((8, 3, 2), np.float32),
            "invalid model config in the file: width=8 does not split into heads=3",
        ),
    ],
)
def test_broken_file_error_names_the_tensor(tmp_path, vit, name, change, message):
    arrays = arrays_of(vit)
    array = arrays.pop(name, None)
    if change is not None:
        arrays[name] = change(array)
    path = tmp_path / "model.npz"
    np.savez(path, **arrays)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_unreadable_files_raise(tmp_path, vit):
    with pytest.raises(CheckpointError, match="file not found"):
        load(tmp_path / "absent.npz")
    with pytest.raises(CheckpointError, match=r"file not found: ViT-B/61; .*available: ViT-B/8"):
        load("ViT-B/61")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(CheckpointError, match="is corrupt or has an unknown format"):
        load(tmp_path / "text.npz")
    (tmp_path / "weights.bin").write_text("hello")
    with pytest.raises(CheckpointError, match=r"weights\.bin"):
        load(tmp_path / "weights.bin")
    (tmp_path / "weights.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="unsupported file suffix"):
        load(tmp_path / "weights.txt")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(CheckpointError, match="unknown checkpoint format, not Google, timm"):
        load(tmp_path / "other.npz")
    np.savez(tmp_path / "whole.npz", **arrays_of(vit))
    cut = (tmp_path / "whole.npz").read_bytes()[:-500]
    (tmp_path / "cut.npz").write_bytes(cut)
    with pytest.raises(CheckpointError, match="is corrupt or has an unknown format"):
        load(tmp_path / "cut.npz")


def test_pickled_code_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("code from a file was run",))

    np.savez(tmp_path / "trap.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(
        CheckpointError, match="contains pickled Python objects, and loading it could run code"
    ):
        load(tmp_path / "trap.npz")


def test_load_of_an_architecture_name_raises():
    with pytest.raises(CheckpointError) as caught:
        load("ViT-B/16")
    assert str(caught.value) == (
        "'ViT-B/16' is an architecture without weights; vitrail.create('ViT-B/16') builds an "
        "untrained model, trained ones have addresses such as hf:google/vit-base-patch16-224"
    )
    with pytest.raises(CheckpointError, match="is an architecture without weights"):
        vitrail.Predictor("ViT-Mu/4")


def test_loaded_model_is_in_eval_mode(tmp_path, vit):
    dropping = build(vit.config.change(dropout=0.5, drop_path=0.5), device="cpu")
    dropping.load_state_dict(vit.state_dict())
    save(dropping, tmp_path / "model")
    for model in (load(tmp_path / "model"), load(tmp_path / "model", num_classes=7)):
        assert not any(module.training for module in model.modules())
