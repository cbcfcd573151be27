"""Google's files: the authors' logits, every layout they ever used, and every way to be broken."""

import json
import re

import numpy as np
import pytest
import torch

import vitrail
from vitrail import CheckpointError, VitConfig, create, load, save
from vitrail.checkpoints import google_bit, google_mixer, google_vit
from vitrail.checkpoints.google_vit import POSITION
from vitrail.checkpoints.rules import write
from vitrail.models.build import build
from vitrail.models.init import initialize

GOLDEN_NAMES = ["vit-token", "vit-prelogits", "vit-gap", "hybrid", "mixer", "bit"]


def golden_case(golden, name):
    model = load(golden / f"{name}.npz").eval()
    arrays = np.load(golden / f"{name}.io.npz")
    images = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2)
    return model, images, torch.from_numpy(arrays["logits"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_logits_are_the_authors(golden, name, dtype):
    model, images, logits = golden_case(golden, name)
    with torch.no_grad():
        ours = model.to(dtype)(images.to(dtype))
    assert (ours - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_the_description_is_read_from_names_and_shapes(golden, name):
    model, _, _ = golden_case(golden, name)
    facts = json.loads((golden / f"{name}.json").read_text())
    config = model.config
    assert sum(p.numel() for p in model.parameters()) == facts["params"]
    assert config.num_classes == facts["classes"]
    assert config.channels == facts["channels"]
    if facts["kind"] == "vit":
        assert config.image_size == facts["image_size"]
        assert (config.patch_size, config.width, config.depth) == (
            facts["patch"],
            facts["width"],
            facts["depth"],
        )
        assert (config.heads, config.mlp_width) == (facts["heads"], facts["mlp"])
        assert config.pool == {"token": "cls", "gap": "mean"}[facts["pool"]]
        assert config.representation == (facts["representation"] or 0)
        assert config.resnet_blocks == tuple(facts["resnet_blocks"] or ())


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_writing_undoes_reading(golden, name):
    model, _, _ = golden_case(golden, name)
    family = {"mixer": google_mixer, "bit": google_bit}.get(name, google_vit)
    written = write(model, family.rules(model.config))
    original = dict(np.load(golden / f"{name}.npz"))
    assert written.keys() == original.keys()
    for key, array in original.items():
        assert np.array_equal(written[key].numpy(), array), key


@pytest.fixture
def vit(tiny):
    """A small model none of whose weights is zero, in Google's names."""
    return awake(tiny.change(representation=5))


def awake(config):
    torch.manual_seed(0)
    model = build(config, device="cpu")
    initialize(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def arrays_of(model, family=google_vit):
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


def test_the_layout_of_today(tmp_path, vit):
    loaded = assert_loads(tmp_path, arrays_of(vit), vit)
    assert loaded.config == vit.config


def test_the_layout_before_linen(tmp_path, vit):
    arrays = renamed(
        arrays_of(vit),
        ("LayerNorm_1", "LayerNorm_2"),
        ("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1"),
        ("MlpBlock_0", "MlpBlock_3"),
    )
    assert_loads(tmp_path, arrays, vit)


@pytest.mark.parametrize("place", ["Transformer/pos_embedding", "pos_embedding"])
def test_positions_in_other_places(tmp_path, vit, place):
    assert_loads(tmp_path, renamed(arrays_of(vit), (POSITION, place)), vit)


@pytest.mark.parametrize("prefix", ["params/", "opt/target/", "params/img/", "target/"])
def test_training_states(tmp_path, vit, prefix):
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


def test_positions_that_spare_the_class_token(tmp_path, vit):
    arrays = arrays_of(vit)
    arrays["cls"] = arrays["cls"] + arrays[POSITION][:, :1]
    arrays[POSITION] = arrays[POSITION][:, 1:]
    path = tmp_path / "model.npz"
    np.savez(path, **arrays)
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(load(path)(images), vit(images))


def test_a_row_for_a_class_token_that_is_gone(tmp_path, tiny):
    model = awake(tiny.change(pool="mean"))
    arrays = arrays_of(model)
    table = arrays[POSITION]
    arrays[POSITION] = np.concatenate([np.ones_like(table[:, :1]), table], axis=1)
    assert_loads(tmp_path, arrays, model)


def test_a_file_without_a_head(tmp_path, tiny):
    model = awake(tiny.change(num_classes=0))
    loaded = assert_loads(tmp_path, arrays_of(model), model)
    assert loaded.config.num_classes == 0


@pytest.mark.parametrize("inlined", [False, True])
def test_the_attention_pool_by_name_or_inlined(tmp_path, tiny, inlined):
    model = awake(tiny.change(pool="map"))
    arrays = arrays_of(model)
    if inlined:
        arrays = renamed(arrays, ("^MAPHead_0/", ""))
    assert_loads(tmp_path, arrays, model)


def test_fixed_sines_are_not_in_the_file(tmp_path, tiny):
    model = awake(tiny.change(position="sincos-2d", pool="mean", image_size=224))
    loaded = assert_loads(tmp_path, arrays_of(model), model)
    assert loaded.config.position == "sincos-2d"


def test_gray_pictures_and_oblong_patches(tmp_path, tiny):
    model = awake(tiny.change(channels=1, patch_size=(4, 8), image_size=(8, 16)))
    assert assert_loads(tmp_path, arrays_of(model), model).config == model.config


def test_hybrids_with_padded_norms(tmp_path):
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
    model = awake(config)
    arrays = {
        name: array[None, None, None] if re.search("gn.*/(scale|bias)", name) else array
        for name, array in arrays_of(model).items()
    }
    assert assert_loads(tmp_path, arrays, model).config == config


def test_the_root_alone_is_a_hybrid_too(tmp_path):
    model = awake(create("R+ViT-Ti/16", depth=1, num_classes=3, image_size=64).config)
    assert assert_loads(tmp_path, arrays_of(model), model).config == model.config


@pytest.fixture
def bit():
    return awake(create("BiT-R50x1", blocks=(1, 2), num_classes=3, image_size=224).config)


def test_bit_with_numbered_convolutions(tmp_path, bit):
    arrays = renamed(arrays_of(bit, google_bit), ("standardized_conv2d/", "standardized_conv2d_7/"))
    assert_loads(tmp_path, arrays, bit)


def test_bit_in_big_visions_names(tmp_path, bit):
    arrays = renamed(
        arrays_of(bit, google_bit),
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


def test_mixer_in_its_older_names(tmp_path):
    model = awake(create("Mixer-S/16", depth=2, image_size=32, num_classes=3).config)
    arrays = renamed(
        arrays_of(model, google_mixer),
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


def broken(arrays, change):
    """One way to break a file, and the line that answers it."""
    match change:
        case "missing":
            del arrays["Transformer/encoderblock_1/LayerNorm_0/scale"]
        case "missing query":
            del arrays["Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"]
        case "left over":
            arrays["Transformer/encoderblock_1/extra/kernel"] = np.zeros(3)
        case "wrong shape":
            arrays["head/kernel"] = np.zeros((5, 4), np.float32)
        case "wrong axes":
            arrays["embedding/kernel"] = np.zeros(8, np.float32)
        case "wrong layer":
            name = "Transformer/encoderblock_1/MlpBlock_0/Dense_0/kernel"
            arrays[name] = arrays[name][:, :-1]
        case "no square":
            arrays[POSITION] = np.zeros((1, 7, 8), np.float32)
        case "words":
            arrays["head/bias"] = np.array(["a", "b", "c"])
        case "heads":
            name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
            arrays[name] = np.zeros((8, 3, 2), np.float32)
    return arrays


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "the file has no Transformer/encoderblock_1/LayerNorm_0/scale, which"),
        ("missing query", "the file has no .*query/kernel, which the model needs"),
        ("left over", "the model has no place for Transformer/encoderblock_1/extra/kernel"),
        ("wrong shape", r"head/kernel is \(5, 4\); the rest of the file asks for \(5, 3\)"),
        ("wrong axes", r"embedding/kernel is \(8,\); it should have 4 axes"),
        ("wrong layer", r"encoderblock_1/MlpBlock_0/Dense_0/kernel is \(8, 15\); .* \(8, 16\)"),
        ("no square", "6 patches, which make no square grid"),
        ("words", "head/bias holds <U1 values"),
        ("heads", "no possible model: width=8 does not split into heads=3"),
    ],
)
def test_a_broken_file_is_one_line_that_names_the_tensor(tmp_path, vit, change, message):
    path = tmp_path / "model.npz"
    np.savez(path, **broken(arrays_of(vit), change))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path, vit):
    with pytest.raises(CheckpointError, match="there is no file"):
        load(tmp_path / "absent.npz")
    with pytest.raises(CheckpointError, match=r"there is no file 'ViT-B/61'.*there is ViT-B/8"):
        load("ViT-B/61")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(CheckpointError, match="is broken or of another kind"):
        load(tmp_path / "text.npz")
    (tmp_path / "weights.bin").write_text("hello")
    with pytest.raises(CheckpointError, match=r"weights\.bin"):
        load(tmp_path / "weights.bin")
    (tmp_path / "weights.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="has no ending that weights have"):
        load(tmp_path / "weights.txt")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(CheckpointError, match="in no format of Google, timm"):
        load(tmp_path / "other.npz")
    np.savez(tmp_path / "whole.npz", **arrays_of(vit))
    cut = (tmp_path / "whole.npz").read_bytes()[:-500]
    (tmp_path / "cut.npz").write_bytes(cut)
    with pytest.raises(CheckpointError, match="is broken or of another kind"):
        load(tmp_path / "cut.npz")


def test_code_in_a_file_is_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("code from a file was run",))

    np.savez(tmp_path / "trap.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(
        CheckpointError, match="holds Python objects, and loading it could run code"
    ):
        load(tmp_path / "trap.npz")


def test_a_name_is_no_trained_model():
    with pytest.raises(CheckpointError) as caught:
        load("ViT-B/16")
    assert str(caught.value) == (
        "'ViT-B/16' is a name without weights; vitrail.create('ViT-B/16') makes a fresh model, "
        "trained ones are at addresses such as hf:google/vit-base-patch16-224"
    )
    with pytest.raises(CheckpointError, match="is a name without weights"):
        vitrail.Predictor("ViT-Mu/4")


def test_a_model_that_is_loaded_is_ready_to_answer(tmp_path, vit):
    dropping = build(vit.config.change(dropout=0.5, drop_path=0.5), device="cpu")
    dropping.load_state_dict(vit.state_dict())
    save(dropping, tmp_path / "model")
    for model in (load(tmp_path / "model"), load(tmp_path / "model", num_classes=7)):
        assert not any(module.training for module in model.modules())
