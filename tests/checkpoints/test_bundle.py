import json
import os

import pytest
import torch
from small_models import FAMILIES, VIT, awake, probe, same_weights

import vitrail
from vitrail import CheckpointError, Preprocessing, load, save
from vitrail.checkpoints import bundle, files
from vitrail.data.datasets import open_dataset
from vitrail.data.provenance import fingerprint


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bundle_is_the_whole_model(tmp_path, name):
    model = awake(FAMILIES[name])
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model").eval()
    assert loaded.config == model.config
    assert same_weights(loaded, model)
    images = probe(model.config)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


def test_names_preprocessing_and_provenance_travel_along(tmp_path):
    preparing = Preprocessing(size=(8, 8), resize="short-side", resize_to=(10, 10), std=(1, 2, 3))
    save(awake(VIT), tmp_path, class_names=["cat", "dog", "owl"], preprocessing=preparing)
    facts = load(tmp_path).facts
    assert facts.class_names == ("cat", "dog", "owl")
    assert facts.preprocessing == preparing


def test_the_datas_fingerprint_goes_into_the_bundle(tmp_path):
    source = open_dataset("builtin:sign-digits", "train")
    save(awake(VIT), tmp_path, provenance={"data": fingerprint(source)})
    assert load(tmp_path).facts.provenance["data"] == fingerprint(source)
    assert fingerprint(source) in (tmp_path / "README.md").read_text()


def test_what_was_loaded_is_saved_with_its_facts(tmp_path):
    save(awake(VIT), tmp_path / "one", class_names=["cat", "dog", "owl"])
    save(load(tmp_path / "one"), tmp_path / "two")
    assert load(tmp_path / "two").facts == load(tmp_path / "one").facts


def test_saving_the_same_model_twice_gives_the_same_files(tmp_path):
    for folder in ("one", "two"):
        save(awake(VIT), tmp_path / folder / "model")
    for name in ("model.safetensors", "config.json", "README.md"):
        one, two = (tmp_path / folder / "model" / name for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_the_card_tells_the_facts_and_an_example(tmp_path):
    save(awake(VIT), tmp_path / "pets", class_names=["cat", "dog", "owl"])
    card = (tmp_path / "pets" / "README.md").read_text()
    for words in ("cat, dog, owl", 'vitrail.load("pets")', "8 x 8 pixels", "tanh GELU"):
        assert words in card


def test_a_card_that_somebody_wrote_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("my model")
    save(awake(VIT), tmp_path)
    assert (tmp_path / "README.md").read_text() == "my model"


def test_other_files_of_the_folder_are_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    save(awake(VIT), tmp_path)
    save(awake(VIT, seed=1), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"
    assert same_weights(load(tmp_path), awake(VIT, seed=1))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("step", ["write", "sync", "first rename", "second rename", "card"])
def test_a_crash_while_saving_leaves_the_old_bundle_or_the_new(tmp_path, monkeypatch, step):
    old = awake(VIT)
    new = awake(VIT.change(depth=3, num_classes=4), seed=1)
    save(old, tmp_path, class_names=["cat", "dog", "owl"])

    class Crash(BaseException):
        """Not an Exception: nothing may catch it, as nothing catches a power cut."""

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
        assert loaded.facts.class_names == ("cat", "dog", "owl")
    else:
        assert same_weights(loaded, new)
        assert loaded.config == new.config
        assert loaded.facts.class_names == ()


def test_class_names_edited_by_hand_count(tmp_path):
    save(awake(VIT), tmp_path, class_names=["cat", "dog", "owl"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["class_names"][2] = "eagle-owl"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).facts.class_names[2] == "eagle-owl"


def test_the_weights_alone_are_a_bundle_too(tmp_path):
    save(awake(VIT), tmp_path, class_names=["cat", "dog", "owl"])
    (tmp_path / "config.json").unlink()
    assert load(tmp_path).facts.class_names == ("cat", "dog", "owl")
    assert same_weights(load(tmp_path / "model.safetensors"), awake(VIT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vitrail": {"bundle": 99}}, "of version 99; this vitrail reads 1"),
        ({"model": None}, "does not describe a model"),
        ({"model": {"family": "gpt"}}, "unknown model family 'gpt'"),
        ({"class_names": ["cat"]}, "1 class names do not fit a model of 3 classes"),
        ({"class_names": "cat"}, "hold no preprocessing, class_names and provenance"),
        ({"preprocessing": {"sise": 3}}, "unknown preprocessing setting 'sise'"),
    ],
)
def test_a_bundle_that_makes_no_sense_is_one_line(tmp_path, change, message):
    save(awake(VIT), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_saving_where_nothing_can_be_saved_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it is a file, not a folder"):
        save(awake(VIT), tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(awake(VIT), tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="2 class names do not fit"):
        save(awake(VIT), tmp_path / "model", class_names=["cat", "dog"])


def test_the_digest_is_of_weights_and_description():
    one, other = awake(VIT), awake(VIT, seed=1)
    make = bundle.digest
    assert make(one.state_dict(), {"a": 1}) == make(one.state_dict(), {"a": 1})
    assert make(one.state_dict(), {"a": 1}) != make(other.state_dict(), {"a": 1})
    assert make(one.state_dict(), {"a": 1}) != make(one.state_dict(), {"a": 2})


def test_a_folder_without_weights_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        vitrail.load(tmp_path)
