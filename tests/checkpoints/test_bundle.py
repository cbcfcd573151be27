import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import VIT, random_model, same_weights

from vitrail import CheckpointError, Preprocessing, load, save
from vitrail.checkpoints import files
from vitrail.data.datasets import open_dataset
from vitrail.data.provenance import fingerprint

pytestmark = pytest.mark.slow


def test_float16_bundle_has_rounded_weights_and_a_digest(tmp_path):
    model = random_model(VIT)
    save(model, tmp_path / "half", dtype=torch.float16)
    loaded, weights = load(tmp_path / "half"), tmp_path / "half" / "model.safetensors"
    rounded = {name: x.half().float() for name, x in model.state_dict().items()}
    assert all(torch.equal(x, rounded[name]) for name, x in loaded.state_dict().items())
    save(model, tmp_path / "full")
    full = (tmp_path / "full" / "model.safetensors").stat().st_size
    parameters = sum(p.numel() for p in model.parameters())
    assert full - weights.stat().st_size >= 2 * parameters - 100  # the header is about the same
    assert "rounded to float16" in (tmp_path / "half" / "README.md").read_text()
    save(loaded, tmp_path / "again")  # as float32, with the values and the digest of float16
    digests = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("half", "again")]
    assert digests[0]["weights"] == digests[1]["weights"]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="do not match their digest"):
        load(tmp_path / "half")


def test_weights_that_float16_cannot_express_are_not_stored(tmp_path):
    model = random_model(VIT)
    with torch.no_grad():
        model.head.bias[0] = 1e6
    with pytest.raises(CheckpointError, match=r"head.bias has values up to 1e\+06"):
        save(model, tmp_path / "half", dtype=torch.float16)
    assert not (tmp_path / "half").exists()
    with pytest.raises(CheckpointError, match=r"float32 or float16 weights, not torch\.int8"):
        save(model, tmp_path / "half", dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"only a bundle can be torch\.float16"):
        save(model, tmp_path / "x.npz", "google", dtype=torch.float16)


def test_bundle_of_version_0_1_gives_the_same_probabilities():
    folder = Path(__file__).parent / "bundle-0.1"
    model = load(folder)
    assert model.metadata.class_names == ("cat", "dog", "owl")
    assert model.metadata.provenance["data"] == "a seeded random model"
    expected = np.load(folder / "expected.npz")
    with torch.inference_mode():
        logits = model(model.metadata.prepare(expected["pixels"]))
    probabilities = model.metadata.probabilities(logits)[0]
    np.testing.assert_allclose(probabilities, expected["probabilities"], rtol=1e-5)


def test_metadata_is_saved_in_bundle_and_card(tmp_path):
    data = fingerprint(open_dataset("builtin:sign-digits", "train"))
    how = Preprocessing(size=(8, 8), resize="short-side", resize_to=(10, 10), std=(1, 2, 3))
    names = ["cat", "dog", "owl"]
    options = {"class_names": names, "preprocessing": how, "provenance": {"data": data}}
    save(random_model(VIT), tmp_path / "pets", **options)
    metadata = load(tmp_path / "pets").metadata
    assert (metadata.class_names, metadata.preprocessing) == (tuple(names), how)
    assert metadata.provenance["data"] == data
    card = (tmp_path / "pets" / "README.md").read_text()
    for text in ("cat, dog, owl", 'vitrail.load("pets")', "8 x 8 pixels", "tanh GELU", data):
        assert text in card
    save(load(tmp_path / "pets"), tmp_path / "copy" / "pets")
    assert load(tmp_path / "copy" / "pets").metadata == metadata
    for name in ("model.safetensors", "config.json", "README.md"):  # saving is deterministic
        one, two = (folder / "pets" / name for folder in (tmp_path, tmp_path / "copy"))
        assert one.read_bytes() == two.read_bytes()


def test_other_files_and_hand_written_cards_are_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "README.md").write_bytes(b"mine \xe9")
    for seed in (0, 1):
        save(random_model(VIT, seed), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"
    assert (tmp_path / "README.md").read_bytes() == b"mine \xe9"
    assert same_weights(load(tmp_path), random_model(VIT, seed=1))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("step", ["write", "sync", "first rename", "second rename", "card"])
def test_saving_is_atomic(tmp_path, monkeypatch, step):
    old = random_model(VIT)
    new = random_model(VIT.change(depth=3, num_classes=4), seed=1)
    save(old, tmp_path, class_names=["cat", "dog", "owl"])

    def crash(*_, **__):  # like a power cut: not an Exception, so nothing catches it
        raise KeyboardInterrupt

    replaced, replace = [], files.Path.replace

    def counted(self, target):
        replaced.append(target)
        if len(replaced) == {"first rename": 1, "second rename": 2, "card": 3}.get(step):
            crash()
        return replace(self, target)

    monkeypatch.setattr(files.Path, "replace", counted)
    if step == "write":
        monkeypatch.setattr(files, "save_file", crash)
    if step == "sync":
        monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        save(new, tmp_path)
    monkeypatch.undo()
    loaded, kept = load(tmp_path), step in ("write", "sync", "first rename")
    assert same_weights(loaded, old if kept else new)
    assert loaded.config == (old if kept else new).config
    assert loaded.metadata.class_names == (("cat", "dog", "owl") if kept else ())


def test_config_json_may_be_edited_or_missing(tmp_path):
    save(random_model(VIT), tmp_path, class_names=["cat", "dog", "owl"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["class_names"][2] = "eagle-owl"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).metadata.class_names[2] == "eagle-owl"
    (tmp_path / "config.json").unlink()
    assert load(tmp_path).metadata.class_names == ("cat", "dog", "owl")
    assert same_weights(load(tmp_path / "model.safetensors"), random_model(VIT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vitrail": {"bundle": 99}}, "unsupported bundle version 99; supported: 1"),
        (
            {"vitrail": {"bundle": 2, "version": "0.9"}},
            "model: unsupported .*; written by vitrail 0.9: upgrade vitrail",
        ),
        ({"model": None}, "does not describe a model"),
        ({"model": {"family": "gpt"}}, "unknown model family 'gpt'"),
        ({"class_names": ["cat"]}, "expected 3 class names for the model, got 1"),
        ({"class_names": "cat"}, "invalid preprocessing, class_names or provenance"),
        ({"preprocessing": {"sise": 3}}, "unknown preprocessing setting 'sise'"),
    ],
)
def test_invalid_bundle_raises(tmp_path, change, message):
    folder = tmp_path / "model"
    save(random_model(VIT), folder)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_invalid_destination_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it is a file, not a folder"):
        save(random_model(VIT), tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(random_model(VIT), tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="expected 3 class names for the model, got 2"):
        save(random_model(VIT), tmp_path / "model", class_names=["cat", "dog"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"contains no weights; .* comes after the model"):
        load(tmp_path / "empty")
    save(random_model(VIT), tmp_path / "runs" / "first")
    message = r"runs contains no weights; .* such as .*/runs/first"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "runs")


def test_unreadable_subfolder_does_not_hide_the_models(tmp_path, monkeypatch):
    save(random_model(VIT), tmp_path / "model")
    (tmp_path / "lost+found").mkdir()
    stat = Path.stat

    def denied(path, **options):
        if path.parent.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(CheckpointError, match=r"contains no weights; .* such as .*/model"):
        load(tmp_path)


def test_module_that_the_config_does_not_describe_is_not_saved(tmp_path):
    class Linear(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    class Extended(type(random_model(VIT))):
        def embeddings(self, images):
            return self.features(images)

    model = random_model(VIT)
    model.__class__ = Extended  # only adds a method
    save(model, tmp_path / "extended")
    assert same_weights(load(tmp_path / "extended"), model)
    model.encoder.blocks[0].mlp.fc1.__class__ = Linear
    for path, format in (("bundle", "bundle"), ("x.npz", "google")):
        with pytest.raises(CheckpointError, match=r"save encoder\.blocks\.0\.mlp\.fc1, a Linear: "):
            save(model, tmp_path / path, format)
        assert not (tmp_path / path).exists()
    model = random_model(VIT)
    model.pool.forward = lambda tokens, sizes: 2 * tokens[:, 0]
    with pytest.raises(CheckpointError, match="cannot save pool, a ClassToken: "):
        save(model, tmp_path / "bundle")
