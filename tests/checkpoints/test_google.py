"""Google's files: golden logits, every layout, broken files."""

import json
import re

import numpy as np
import pytest
import torch
from small_models import FAMILIES, random_model

import vitrail
from vitrail import CheckpointError, create, load, save
from vitrail.checkpoints import bit, google
from vitrail.checkpoints.google import POSITION
from vitrail.checkpoints.rules import write
from vitrail.models.config import pair
from vitrail.models.vit import build

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["vit-token", "vit-prelogits", "vit-gap", "hybrid", "mixer", "bit"]
)
def test_golden_logits_and_config(golden, name):
    model = load(golden / f"{name}.npz").eval()
    arrays = np.load(golden / f"{name}.io.npz")
    images = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2)
    logits = torch.from_numpy(arrays["logits"])
    for dtype in (torch.float32, torch.float64):
        with torch.no_grad():
            ours = model.to(dtype)(images.to(dtype))
        assert (ours - logits).abs().max() < 1e-5 * logits.abs().max()
    stated, config = json.loads((golden / f"{name}.json").read_text()), model.config
    assert sum(p.numel() for p in model.parameters()) == stated["params"]
    assert (config.num_classes, config.channels) == (stated["classes"], stated["channels"])
    if stated["kind"] == "vit":
        names = {"patch_size": "patch", "mlp_width": "mlp"}
        for field in ("image_size", "patch_size", "width", "depth", "heads", "mlp_width"):
            assert getattr(config, field) == stated[names.get(field, field)], field
        assert config.pool == {"token": "cls", "gap": "mean"}[stated["pool"]]
        assert config.representation == (stated["representation"] or 0)
        assert config.resnet_blocks == tuple(stated["resnet_blocks"] or ())


@pytest.fixture
def vit(tiny):
    return random_model(tiny.change(representation=5))


def arrays_of(model):
    tables = {"VitConfig": google.VIT, "BitConfig": bit.GOOGLE, "MixerConfig": google.MIXER}
    rules = tables[type(model.config).__name__].rules(model.config)
    return {name: array.numpy() for name, array in write(model, rules).items()}


def assert_loads(tmp_path, arrays, model):
    np.savez(tmp_path / "model.npz", **arrays)
    loaded = load(tmp_path / "model.npz")
    images = torch.randn(2, model.config.channels, *pair(model.config.image_size))
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


def scanned(arrays):
    """All layers stacked in one array."""
    out = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for name in [name for name in arrays if "encoderblock_0/" in name]:
        layers = [arrays[name.replace("_0/", f"_{i}/", 1)] for i in range(2)]
        out[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    return out


ATTENTION = ("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1")
BEFORE_2021 = (("LayerNorm_1", "LayerNorm_2"), ATTENTION, ("MlpBlock_0", "MlpBlock_3"))
LAYOUTS = {
    "current": dict,
    "before 2021": lambda a: renamed(a, *BEFORE_2021),
    "Transformer/pos_embedding": lambda a: renamed(a, (POSITION, "Transformer/pos_embedding")),
    "pos_embedding": lambda a: renamed(a, (POSITION, "pos_embedding")),
    "scanned": scanned,
    **{
        prefix: lambda a, prefix=prefix: renamed(a, ("^", prefix)) | {"opt/state/step": np.int64(3)}
        for prefix in ("params/", "opt/target/", "params/img/", "target/")
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, vit, layout):
    loaded = assert_loads(tmp_path, LAYOUTS[layout](arrays_of(vit)), vit)
    assert loaded.config == vit.config


def test_bfloat16_stored_as_void(tmp_path, vit):
    vit = vit.bfloat16().float()
    arrays = {
        name: torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view("V2")
        for name, array in arrays_of(vit).items()
    }
    assert_loads(tmp_path, arrays, vit)


def test_position_rows_sincos_and_oblong_patches(tmp_path, vit, tiny):
    arrays = arrays_of(vit)
    arrays["cls"] = arrays["cls"] + arrays[POSITION][:, :1]
    arrays[POSITION] = arrays[POSITION][:, 1:]
    np.savez(tmp_path / "model.npz", **arrays)
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "model.npz")(images), vit(images))
    model = random_model(tiny.change(pool="mean"))
    arrays, table = arrays_of(model), arrays_of(model)[POSITION]
    arrays[POSITION] = np.concatenate([np.ones_like(table[:, :1]), table], axis=1)
    assert_loads(tmp_path, arrays, model)
    for changes in (
        {"position": "sincos-2d", "pool": "mean", "image_size": 224},
        {"patch_size": (4, 8), "image_size": (8, 16)},
    ):
        model = random_model(tiny.change(**changes))
        assert assert_loads(tmp_path, arrays_of(model), model).config == model.config


@pytest.mark.parametrize("name", ["no head", "attention pooling", "gray", "hybrid", "hybrid root"])
def test_families(tmp_path, name):
    model = random_model(FAMILIES[name])
    arrays = {
        name: array[None, None, None] if re.search("gn.*/(scale|bias)", name) else array
        for name, array in arrays_of(model).items()
    }
    assert assert_loads(tmp_path, arrays, model).config == model.config
    assert_loads(tmp_path, renamed(arrays, ("^MAPHead_0/", "")), model)


def test_other_names_of_bit_and_mixer(tmp_path):
    model = random_model(create("BiT-R50x1", blocks=(1, 2), num_classes=3).config)
    conv = "standardized_conv2d"
    assert_loads(tmp_path, renamed(arrays_of(model), (f"{conv}/", f"{conv}_7/")), model)
    arrays = renamed(
        arrays_of(model),
        (f"^resnet/root_block/{conv}", "root_block/conv_root"),
        ("^resnet/group_norm", "norm-pre-head"),
        ("^resnet/head/conv2d", "head"),
        ("^resnet/", ""),
        (f"a/proj/{conv}", "conv_proj"),
        *[(f"{letter}/{conv}", f"conv{i}") for i, letter in enumerate("abc", 1)],
        *[(f"/{letter}/group_norm", f"/gn{i}") for i, letter in enumerate("abc", 1)],
        ("gamma$", "scale"),
        ("beta$", "bias"),
    )
    arrays["head/kernel"] = arrays["head/kernel"][0, 0]
    for name in arrays:
        if "/gn" in name or name.startswith("norm-pre-head"):
            arrays[name] = arrays[name][None, None, None]
    assert_loads(tmp_path, arrays, model)
    model = random_model(create("Mixer-S/16", depth=2, image_size=32, num_classes=3).config)
    arrays = renamed(
        arrays_of(model),
        ("^stem", "embedding"),
        ("^pre_head_layer_norm", "Mixer/encoder_norm"),
        (r"^MixerBlock_(\d+)", r"Mixer/encoderblock_\1"),
        ("LayerNorm_1", "LayerNorm_2"),
        (r"_mixing/Dense_0/(kernel|bias)", r"_mixing_phase_0/\g<1>1"),
        (r"_mixing/Dense_1/(kernel|bias)", r"_mixing_phase_0/\g<1>2"),
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
        ("embedding/kernel", lambda a: a[0, 0, 0], r"is \(8,\), expected 4 non-empty axes"),
        (FC1, lambda a: a[:, :-1], r"_1/MlpBlock_0/Dense_0/kernel is \(8, 15\), expected \(8, 16"),
        (POSITION, lambda _: np.zeros((1, 7, 8), np.float32), "6 patch positions are not a square"),
        ("head/bias", lambda _: np.array(["a", "b", "c"]), "head/bias has dtype <U1"),
        (QUERY, lambda _: np.zeros((8, 3, 2), np.float32), "width=8 does not split into heads=3"),
    ],
)
def test_broken_file_error_names_the_tensor(tmp_path, vit, name, change, message):
    arrays = arrays_of(vit)
    array = arrays.pop(name, None)
    if change is not None:
        arrays[name] = change(array)
    np.savez(tmp_path / "model.npz", **arrays)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path / "model.npz")
    assert "\n" not in str(caught.value)


def test_unreadable_files_raise(tmp_path, vit):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("code from a file was run",))

    for name in ("text.npz", "weights.bin", "weights.txt"):
        (tmp_path / name).write_text("hello")
    (tmp_path / "page.pth").write_text("<html>")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "trap.npz", x=np.array([Trap()], dtype=object))
    np.savez(tmp_path / "whole.npz", **arrays_of(vit))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:-500])
    for name, message in {
        "absent.npz": "file not found",
        "text.npz": "is corrupt or has an unknown format",
        "cut.npz": "is corrupt or has an unknown format",
        "weights.bin": r"weights\.bin",
        "page.pth": "is not a checkpoint of torch: it is not a pickle",
        "weights.txt": "unsupported file suffix",
        "other.npz": "unknown checkpoint format, not Google, timm",
        "trap.npz": "contains pickled Python objects, and loading it could run code",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / name)


def test_names_that_are_no_checkpoint_raise():
    message = r"is an architecture without weights; vitrail.create\('ViT-B/16'\) .* such as hf:"
    with pytest.raises(CheckpointError, match=message):
        vitrail.Predictor("ViT-B/16")
    with pytest.raises(CheckpointError, match=r"file not found: ViT-B/61; .*available: ViT-B/8"):
        load("ViT-B/61")
    for reference in ("", None, 5, "x" * 300):
        with pytest.raises(CheckpointError):
            load(reference)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("ViT-Mu/4", {}), ("Mixer-S/32", {"depth": 1, "width": 8}), ("BiT-R50x1", {"blocks": (1,)})],
)
def test_state_dict_file_of_our_own_model_raises(tmp_path, name, changes):
    model = vitrail.create(name, num_classes=2, **changes)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"vitrail\.create .* load_state_dict, or .*\.save"):
        load(tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"^invalid model reference of type OrderedDict; "):
        load(model.state_dict())


def test_loaded_model_is_in_eval_mode(tmp_path, vit):
    dropping = build(vit.config.change(dropout=0.5, drop_path=0.5), device="cpu")
    dropping.load_state_dict(vit.state_dict())
    save(dropping, tmp_path / "model")
    for model in (load(tmp_path / "model"), load(tmp_path / "model", num_classes=7)):
        assert not any(module.training for module in model.modules())
