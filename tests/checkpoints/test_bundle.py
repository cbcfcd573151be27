import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import FAMILIES, VIT, random_images, random_model, same_weights

import vitrail
from vitrail import CheckpointError, Preprocessing, load, save
from vitrail.checkpoints import bundle, files
from vitrail.data.datasets import open_dataset
from vitrail.data.provenance import fingerprint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FAMILIES)
def test_bundle_round_trip(tmp_path, name):
    model = random_model(FAMILIES[name])
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model").eval()
    assert loaded.config == model.config
    assert same_weights(loaded, model)
    images = random_images(model.config)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


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


def test_metadata_round_trip(tmp_path):
    preprocessing = Preprocessing(
        size=(8, 8), resize="short-side", resize_to=(10, 10), std=(1, 2, 3)
    )
    save(
        random_model(VIT), tmp_path, class_names=["cat", "dog", "owl"], preprocessing=preprocessing
    )
    metadata = load(tmp_path).metadata
    assert metadata.class_names == ("cat", "dog", "owl")
    assert metadata.preprocessing == preprocessing


def test_provenance_is_saved_in_bundle_and_card(tmp_path):
    source = open_dataset("builtin:sign-digits", "train")
    save(random_model(VIT), tmp_path, provenance={"data": fingerprint(source)})
    assert load(tmp_path).metadata.provenance["data"] == fingerprint(source)
    assert fingerprint(source) in (tmp_path / "README.md").read_text()


def test_save_keeps_the_metadata_of_a_loaded_model(tmp_path):
    save(random_model(VIT), tmp_path / "one", class_names=["cat", "dog", "owl"])
    save(load(tmp_path / "one"), tmp_path / "two")
    assert load(tmp_path / "two").metadata == load(tmp_path / "one").metadata


def test_saving_is_deterministic(tmp_path):
    for folder in ("one", "two"):
        save(random_model(VIT), tmp_path / folder / "model")
    for name in ("model.safetensors", "config.json", "README.md"):
        one, two = (tmp_path / folder / "model" / name for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_model_card_contents(tmp_path):
    save(random_model(VIT), tmp_path / "pets", class_names=["cat", "dog", "owl"])
    card = (tmp_path / "pets" / "README.md").read_text()
    for text in ("cat, dog, owl", 'vitrail.load("pets")', "8 x 8 pixels", "tanh GELU"):
        assert text in card


def test_hand_written_card_is_kept(tmp_path):
    (tmp_path / "README.md").write_text("my model")
    save(random_model(VIT), tmp_path)
    assert (tmp_path / "README.md").read_text() == "my model"


def test_other_files_are_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    save(random_model(VIT), tmp_path)
    save(random_model(VIT, seed=1), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"
    assert same_weights(load(tmp_path), random_model(VIT, seed=1))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("step", ["write", "sync", "first rename", "second rename", "card"])
def test_saving_is_atomic(tmp_path, monkeypatch, step):
    old = random_model(VIT)
    new = random_model(VIT.change(depth=3, num_classes=4), seed=1)
    save(old, tmp_path, class_names=["cat", "dog", "owl"])

    class Crash(BaseException):
        """Simulates a power cut: not an Exception, so nothing catches it."""

    def crash(*_, **__):
        raise Crash

    replaced = []
    replace = files.Path.replace

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
    with pytest.raises(Crash):
        save(new, tmp_path)
    monkeypatch.undo()
    loaded = load(tmp_path)
    if step in ("write", "sync", "first rename"):
        assert same_weights(loaded, old)
        assert loaded.metadata.class_names == ("cat", "dog", "owl")
    else:
        assert same_weights(loaded, new)
        assert loaded.config == new.config
        assert loaded.metadata.class_names == ()


def test_edited_class_names_are_used(tmp_path):
    save(random_model(VIT), tmp_path, class_names=["cat", "dog", "owl"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["class_names"][2] = "eagle-owl"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).metadata.class_names[2] == "eagle-owl"


def test_weights_file_alone_is_a_bundle(tmp_path):
    save(random_model(VIT), tmp_path, class_names=["cat", "dog", "owl"])
    (tmp_path / "config.json").unlink()
    assert load(tmp_path).metadata.class_names == ("cat", "dog", "owl")
    assert same_weights(load(tmp_path / "model.safetensors"), random_model(VIT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vitrail": {"bundle": 99}}, "unsupported bundle version 99; supported: 1"),
        ({"model": None}, "does not describe a model"),
        ({"model": {"family": "gpt"}}, "unknown model family 'gpt'"),
        ({"class_names": ["cat"]}, "expected 3 class names for the model, got 1"),
        ({"class_names": "cat"}, "invalid preprocessing, class_names or provenance"),
        ({"preprocessing": {"sise": 3}}, "unknown preprocessing setting 'sise'"),
    ],
)
def test_invalid_bundle_raises(tmp_path, change, message):
    save(random_model(VIT), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_invalid_destination_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it is a file, not a folder"):
        save(random_model(VIT), tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(random_model(VIT), tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="expected 3 class names for the model, got 2"):
        save(random_model(VIT), tmp_path / "model", class_names=["cat", "dog"])


def test_digest_depends_on_weights_and_config():
    one, other = random_model(VIT), random_model(VIT, seed=1)
    make = bundle.digest
    assert make(one.state_dict(), {"a": 1}) == make(one.state_dict(), {"a": 1})
    assert make(one.state_dict(), {"a": 1}) != make(other.state_dict(), {"a": 1})
    assert make(one.state_dict(), {"a": 1}) != make(one.state_dict(), {"a": 2})


def test_folder_without_weights_raises(tmp_path):
    with pytest.raises(CheckpointError, match="contains no weights"):
        vitrail.load(tmp_path)
