import json
import re

import numpy as np
import pytest
from small_models import FAMILIES, VIT, random_model, same_weights
from torch import nn

from vitrail import CheckpointError, ConfigError, load, save
from vitrail.checkpoints import save as saving
from vitrail.checkpoints.save import convert
from vitrail.cli import main
from vitrail.data.preprocessing import preset

pytestmark = pytest.mark.slow


@pytest.fixture
def npz(tmp_path):
    save(random_model(VIT), tmp_path / "model.npz", "google")
    return tmp_path / "model.npz"


def test_convert_command_summarizes_and_verifies(npz, tmp_path, capsys):
    assert main(["convert", str(npz), str(tmp_path / "out"), "--to", "huggingface"]) == 0
    out = capsys.readouterr().out
    assert "encoderblock_*/LayerNorm_0/{scale,bias}" in out
    assert "vit.encoder.layer.*.attention.attention.{query,key,value}.{weight,bias}" in out
    assert "logits on a probe image differ by 0.0e+00" in out
    assert out.splitlines()[-1] == f"done: {tmp_path / 'out'}"
    assert same_weights(load(tmp_path / "out"), random_model(VIT))


def test_dry_run_writes_nothing_and_json_lists_every_tensor(npz, tmp_path, capsys):
    command = ["convert", str(npz), str(tmp_path / "out"), "--to", "bundle", "--dry-run"]
    assert main(command) == 0
    assert "nothing written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(npz), str(tmp_path / "out"), "--to", "bundle", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["difference"] == 0
    assert done["source_format"] == "google"
    assert [["cls"], ["cls_token"]] in done["tensors"]
    assert len(done["tensors"]) == len(random_model(VIT).state_dict())


def test_convert_to_a_half_as_large_bundle_without_head(npz, tmp_path, capsys):
    command = ["convert", str(npz), str(tmp_path / "out"), "--to", "bundle", "--drop-head"]
    assert main([*command, "--half", "--dry-run"]) == 0
    assert "note: the weights are rounded to float16" in capsys.readouterr().out
    assert main([*command, "--half"]) == 0
    out = capsys.readouterr().out
    assert "changed: head: 3 -> 0 classes (removed: the model returns features)" in out
    assert 0 < float(out.partition("probe image differ by ")[2].split()[0]) < 1e-2
    model, full = load(tmp_path / "out"), random_model(VIT)
    assert model.head is None
    for name, weight in model.state_dict().items():
        assert weight.equal(full.state_dict()[name].half().float())
    assert main(["convert", str(npz), str(tmp_path / "x"), "--to", "timm", "--half"]) == 2
    assert "--to timm is always float32" in capsys.readouterr().err


def test_numerics_loss_needs_allow_loss(npz, tmp_path, capsys):
    command = ["convert", str(npz), str(tmp_path / "out.pth"), "--to", "torchvision"]
    assert main(command) == 2
    assert "torchvision cannot express gelu='tanh'" in capsys.readouterr().err
    assert not (tmp_path / "out.pth").exists()
    assert main([*command, "--allow-loss"]) == 0
    out = capsys.readouterr().out
    assert "lost: gelu='tanh'" in out
    assert "note: the file does not store the preprocessing" in out
    assert (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    ("name", "to", "stated"),
    [
        ("google", "huggingface", "24 x 24 (bilinear), not 24 x 24 (bilinear, no antialiasing)"),
        ("google", "timm", "24 x 24 (bilinear), not 24 x 24 (bilinear, no antialiasing)"),
        ("big_vision", "huggingface", "center crop 24 x 24, not short side to 27 (area)"),
        ("torchvision", "google", "24 x 24 (bilinear, no antialiasing), not short side to 27"),
        ("torchvision", "google", "mean (0.5, 0.5, 0.5), std (0.5, 0.5, 0.5), not mean (0.485"),
        ("google", "google", None),
        ("google", "bundle", None),
        ("torchvision", "huggingface", None),
        ("torchvision", "timm", None),
        ("big_vision", "timm", "a different area filter"),
    ],
)
def test_targets_that_prepare_images_differently_are_warned_about(tmp_path, name, to, stated):
    model = random_model(VIT.change(image_size=24))
    save(model, tmp_path / "bundle", preprocessing=preset(name, (24, 24)))
    out = tmp_path / ("out.npz" if to == "google" else "out")
    done = convert(tmp_path / "bundle", out, to, dry_run=True, allow_loss=True)
    assert len(done.warnings) == (stated is not None)
    library = {"google": "vision_transformer", "huggingface": "transformers"}.get(to, to)
    for line in done.warnings:
        assert line.startswith(f"{library} preprocesses with ")
        assert stated in line
        assert 5 < int(re.search(r"pixels differ by up to (\d+) of 255$", line)[1]) <= 510


def test_overriding_stated_preprocessing_is_warned_about(tmp_path, capsys):
    save(random_model(VIT), tmp_path / "bundle", preprocessing=preset("timm", (8, 8)))
    command = ["convert", str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "bundle"]
    assert main([*command, "--preprocessing", "timm"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*command, "--preprocessing", "deit", "--overwrite"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path / 'bundle'} states mean (0.5, 0.5, 0.5)")


def test_allow_loss_never_drops_weights(tmp_path):
    save(random_model(VIT.change(registers=2)), tmp_path / "source")
    with pytest.raises(CheckpointError, match="google cannot express register tokens"):
        convert(tmp_path / "source", tmp_path / "out.npz", "google", allow_loss=True)
    assert not (tmp_path / "out.npz").exists()
    save(random_model(FAMILIES["mixer"]), tmp_path / "mixer")
    with pytest.raises(
        CheckpointError, match="huggingface does not support Mixer models; use one of bundle"
    ):
        convert(tmp_path / "mixer", tmp_path / "out", "huggingface")


def test_metadata_survives_foreign_safetensors(tmp_path):
    model = random_model(VIT.change(numerics="timm"))
    save(model, tmp_path / "source", class_names=["cat", "dog", "owl"])
    convert(tmp_path / "source", tmp_path / "out.safetensors", "timm")
    metadata = load(tmp_path / "out.safetensors").metadata
    assert metadata.class_names == ("cat", "dog", "owl")
    assert metadata.preprocessing == load(tmp_path / "source").metadata.preprocessing


@pytest.mark.parametrize("wrong", ["logits", "weights"])
def test_failed_verification_writes_nothing(tmp_path, monkeypatch, wrong):
    model, other = random_model(VIT), random_model(VIT.change(numerics="timm"))
    if wrong == "weights":  # the logits are zero whatever the body computes
        other = random_model(VIT, seed=1)
        for each in (model, other):
            nn.init.zeros_(each.head.weight)
            nn.init.zeros_(each.head.bias)
    save(model, tmp_path / "source")
    monkeypatch.setattr(saving, "reload", lambda *_: (other, []))
    with pytest.raises(CheckpointError, match=f"verification failed: {wrong} differ"):
        convert(tmp_path / "source", tmp_path / "out", "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_failed_conversion_keeps_the_old_file(npz, tmp_path):
    convert(npz, tmp_path / "out.npz", "google-older")
    before = (tmp_path / "out.npz").read_bytes()
    with np.load(tmp_path / "out.npz") as arrays:
        assert any("MultiHeadDotProductAttention_1" in name for name in arrays.files)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "absent.npz", tmp_path / "out.npz", "google")
    assert (tmp_path / "out.npz").read_bytes() == before


@pytest.mark.parametrize(
    ("source", "destination", "to", "message"),
    [
        ("a", "b", "bundle", "b already contains a model; choose another"),
        ("a", "b", "timm", "b already contains a model"),
        ("a", "a", "timm", "a would replace the source"),
        ("a/model.safetensors", "a", "bundle", "a would replace the source"),
        ("timm", "timm/model.safetensors", "timm", "model.safetensors would replace the source"),
        ("model.npz", "model.npz", "google", "model.npz would replace the source"),
    ],
)
def test_bundles_and_the_source_are_replaced_only_with_overwrite(
    tmp_path, source, destination, to, message
):
    model = random_model(VIT.change(numerics="timm"))
    for name in "ab":
        save(model if name == "a" else random_model(VIT, seed=1), tmp_path / name)
    save(model, tmp_path / "timm", "timm")
    save(random_model(VIT), tmp_path / "model.npz", "google")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / source, tmp_path / destination, to)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    expected = load(tmp_path / source)
    convert(tmp_path / source, tmp_path / destination, to, overwrite=True)
    assert same_weights(load(tmp_path / destination), expected)


def test_the_weights_of_a_bundle_are_not_replaced_but_other_files_are(tmp_path):
    save(random_model(VIT.change(numerics="timm")), tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("[]")
    for destination in ("out", "out", "out.safetensors", "out.safetensors"):
        convert(tmp_path / "source", tmp_path / destination, "timm")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "bundle"]) == 0
    with pytest.raises(ConfigError, match="out already contains a model"):
        convert(tmp_path / "source", tmp_path / "out" / "model.safetensors", "timm")


@pytest.mark.parametrize(
    ("destination", "to", "message"),
    [
        ("out", "google", "a Google checkpoint is a file; try .*out.npz"),
        ("out.npz", "timm", "is Google's format only"),
        ("out", "torchvision", "a torchvision checkpoint is a file; try .*out.safetensors"),
        ("model.npz/out", "bundle", "cannot write"),
        ("model.npz", "bundle", "it is a file"),
    ],
)
def test_wrong_destination_raises(tmp_path, destination, to, message):
    save(random_model(VIT.change(numerics="timm")), tmp_path / "source")
    save(random_model(VIT), tmp_path / "model.npz", "google")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "source", tmp_path / destination, to)
