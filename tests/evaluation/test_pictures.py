"""No model is judged by pictures that it has learned from, unless that is said."""

import shutil
from dataclasses import replace

import pytest
from PIL import Image

import vitrail
from tiny_runs import tiny_run, write_colors, write_folder
from vitrail import DataError
from vitrail.checkpoints.metadata import get_metadata
from vitrail.cli import main
from vitrail.data.packing import pack
from vitrail.data.sources import open_source, picture_bytes
from vitrail.data.splits import Splits
from vitrail.evaluation.pictures import open_part
from vitrail.export.guard import pictures_for

DIVIDED = "the set states no splits and was divided: 80% train, 10% val, 10% test by seed 0"
SOME = "the model has learned from some of these pictures"
CHANGED = (
    "the train part is not exactly what the model has learned from; a few of these pictures may "
    "have been in it"
)
UNKNOWN = "what the model has learned from is not recorded; if some of these pictures were among it"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder without splits; models that learned from a part of it, by the usual rule and by
    another; nothing in it is changed by a test."""
    home = tmp_path_factory.mktemp("home")
    write_folder(home / "pictures", 20)
    tiny_run(home / "pictures", home / "usual")
    tiny_run(home / "pictures", home / "tenth", dev=0.1)
    return home


def judged(model, data, split=None):
    """The pictures that a model would be judged by, as bytes, and the notes."""
    source, notes = open_part(data, split, get_metadata(vitrail.load(model)))
    return {picture_bytes(source, row) for row in range(len(source))}, notes


def learned(data, **splits):
    return {sample.data for sample in open_source(data, splits=Splits(**splits))}


def test_all_pictures_of_a_set_without_splits_are_judged_by(home, tmp_path):
    other = write_folder(tmp_path / "pictures", seed=1)
    pictures, notes = judged(home / "usual", other)
    assert len(pictures) == 30
    assert notes == ["split all"]


def test_of_a_set_that_taught_the_model_only_what_was_kept_apart_is_judged_by(home):
    pictures, notes = judged(home / "usual", home / "pictures")
    assert len(pictures) == 6
    assert not pictures & learned(home / "pictures")
    assert notes == ["split test", DIVIDED]


def test_pictures_that_were_kept_apart_by_dev_are_judged_by(home):
    pictures, notes = judged(home / "tenth", home / "pictures")
    assert len(pictures) == 6
    assert not pictures & learned(home / "pictures", val=0.1, test=0.0)
    assert notes[0] == "split val"
    with pytest.raises(DataError, match="has no split 'test'; it has: train, val"):
        judged(home / "tenth", home / "pictures", "test")  # some of those taught it


@pytest.mark.parametrize("model", ["usual", "tenth"])
@pytest.mark.parametrize("place", ["pictures/", "./pictures", "more/../pictures", "link", "copy"])
def test_a_set_is_the_same_wherever_it_is(home, tmp_path, monkeypatch, model, place):
    plain = judged(home / model, home / "pictures")
    shutil.copytree(home / "pictures", tmp_path / "copy")
    for name in ("pictures", "link"):
        (tmp_path / name).symlink_to(home / "pictures")
    (tmp_path / "more").mkdir()
    monkeypatch.chdir(tmp_path)
    assert judged(home / model, place) == plain


def test_the_same_place_is_the_same_set_though_its_pictures_were_resized(home, tmp_path):
    larger = tmp_path / "larger"
    shutil.copytree(home / "pictures", larger)
    for picture in larger.glob("*/*.png"):
        Image.open(picture).resize((9, 9)).save(picture)
    metadata = get_metadata(vitrail.load(home / "usual"))
    there = replace(metadata, provenance={**metadata.provenance, "data": f"{larger}/"})
    source, notes = open_part(larger, None, there)
    assert len(source) == 6
    assert notes[-1] == CHANGED
    assert open_part(larger, "train", there)[1][-1] == SOME


def test_a_picture_that_is_added_lets_no_others_be_judged_by(home, tmp_path):
    more = tmp_path / "more"
    shutil.copytree(home / "pictures", more)
    new = write_folder(tmp_path / "new", 1, seed=1) / "red" / "0.png"
    shutil.copy(new, more / "red" / "new.png")
    pictures, notes = judged(home / "usual", more)
    assert len(pictures) == 6
    assert not pictures & learned(home / "pictures")
    assert notes[-1] == CHANGED


def test_all_pictures_are_judged_by_only_with_a_warning(home):
    for split in ("all", "train"):
        _, notes = judged(home / "tenth", f"{home}/pictures/", split)
        assert "learned from" in notes[-1]
    assert judged(home / "usual", home / "pictures", "all")[1] == ["split all", SOME]


def test_training_pictures_in_another_folder_are_known_again(home, tmp_path):
    """Shards state the usual splits; of a set that was divided otherwise, some test pictures taught
    the model."""
    assert len(list(pack(str(home / "pictures"), tmp_path / "shards"))) == 3
    assert judged(home / "usual", tmp_path / "shards")[1] == ["split test"]
    assert judged(home / "tenth", tmp_path / "shards")[1] == ["split test", SOME]
    assert judged(home / "usual", tmp_path / "shards", "train")[1][-1] == SOME
    for picture in (home / "pictures").glob("*/*.png"):
        place = tmp_path / "renamed" / picture.parent.name / f"picture {picture.stem}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, place)
    assert judged(home / "usual", tmp_path / "renamed", "all")[1][-1] == SOME


def test_where_nothing_is_recorded_the_risk_is_named(home):
    model = vitrail.load(home / "usual")
    known = dict(get_metadata(model).provenance)
    told = [{}, {"data": "elsewhere", "fingerprint": known["fingerprint"]}, {"samples": 3}]
    for provenance in told:
        metadata = replace(get_metadata(model), provenance=provenance)
        source, notes = open_part(home / "pictures", None, metadata)
        assert len(source) == 60
        assert notes[-1].startswith(UNKNOWN)


def test_a_set_with_training_pictures_only_is_divided_as_in_training(tmp_path):
    folder = write_folder(tmp_path / "set" / "train").parent
    tiny_run(folder, tmp_path / "own", dev=0.3)
    pictures, notes = judged(tmp_path / "own", folder)
    assert len(pictures) == 9
    assert notes[0] == "split val"
    assert not [note for note in notes if "learned from" in note]
    tiny_run(folder, tmp_path / "all")
    assert "very pictures" in judged(tmp_path / "all", folder)[1][-1]


def test_arrays_are_known_again(tmp_path):
    data = write_colors(tmp_path / "colors.npz")
    tiny_run(data, tmp_path / "run")
    moved = data.rename(tmp_path / "moved.npz")
    assert judged(tmp_path / "run", moved)[1] == ["split test"]
    assert judged(tmp_path / "run", moved, "all")[1][-1] == SOME


def test_int8_is_measured_on_what_was_kept_apart_too(home, monkeypatch):
    monkeypatch.chdir(home)
    model = vitrail.load(home / "tenth")
    for data in (None, "pictures/"):
        source, _, notes = pictures_for(model, data)
        assert len(source) == 6
        assert notes[0] == "split val"


def test_the_command_judges_by_what_was_kept_apart(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    assert main(["evaluate", "tenth", "pictures/"]) == 0
    told = capsys.readouterr().out
    assert "6 pictures" in told
    assert "note: split val" in told
