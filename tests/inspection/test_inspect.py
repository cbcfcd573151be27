"""`vitrail.inspect_model` and `vitrail inspect`, on small models of every family."""

import csv
import json
import math
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tiny_runs import write_colors
from vitrail import ConfigError, DataError, VisionTransformer
from vitrail.checkpoints.metadata import Metadata
from vitrail.cli import main
from vitrail.cli.inspect import Method
from vitrail.data.datasets import open_dataset
from vitrail.data.preprocessing import Preprocessing, preset
from vitrail.inspection.layers import at_once
from vitrail.inspection.pictures import files, seen, spaced
from vitrail.inspection.relevance import FOR_CLASSES, GENERAL
from vitrail.models.registry import configuration


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return write_colors(tmp_path / "colors.npz")


@pytest.fixture
def model():
    return vitrail.create("ViT-Mu/4", image_size=16, num_classes=3, depth=2)


def photo(path, size=(30, 20)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_everything_that_applies_is_found(model, data, tmp_path):
    found = vitrail.inspect_model(
        model, [photo(tmp_path / "a.png")], data=data, images=10, layers=[-1], score=True
    )
    layers, heads, grid = model.config.depth, model.config.heads, model.config.grid
    tokens = model.config.num_tokens
    assert found.filters is not None
    assert len(found.positions) == 1
    assert found.positions[0].similarity.shape == (*grid, *grid)
    assert found.study is not None
    assert found.study.images == 10
    assert found.study.entropy.shape == (layers, heads)
    assert found.trust is not None
    assert {"rollout", "relevance", "random", "center"} <= found.trust.curves.keys()
    assert found.scatter is not None
    (look,) = found.looks
    assert look.pixels.shape == (20, 30, 3)
    assert look.maps.keys() == {"rollout", "last layer"}
    assert look.class_maps.keys() == {"gradient rollout", "relevance"}
    assert all(len(maps) == 2 for maps in look.class_maps.values())
    assert look.maps["rollout"].shape == grid
    assert look.layers[layers - 1].shape == (heads, tokens, tokens)
    assert len(look.neighbors) == 6


def test_without_pictures_some_of_the_data_are_shown(model, data):
    found = vitrail.inspect_model(model, data=data, images=4)
    assert len(found.looks) == 6
    assert found.looks[0].name == "test/0"
    assert all(near.name != found.looks[0].name for near in found.looks[0].neighbors)


def test_without_pictures_and_data_the_weights_are_shown(model):
    found = vitrail.inspect_model(model)
    assert found.filters is not None
    assert found.positions
    assert not found.looks
    assert found.study is None
    assert found.scatter is None


def test_classes_can_be_asked_for_by_name(model, data):
    vitrail.save(model, data.parent / "bundle", class_names=["red", "green", "blue"])
    found = vitrail.inspect_model(data.parent / "bundle", data=data, images=2, classes=["blue"])
    assert found.looks[0].class_maps["relevance"].keys() == {"blue"}
    assert found.looks[0].label == "red"
    with pytest.raises(ConfigError, match="unknown class 'blu'; did you mean 'blue'"):
        vitrail.inspect_model(data.parent / "bundle", data=data, classes=["blu"])


@pytest.mark.parametrize("name", ["BiT-R50x1", "Mixer-S/32"])
def test_a_model_without_attention_shows_what_it_has(name, tmp_path):
    small = {"depth": 2, "width": 32} if "Mixer" in name else {"blocks": (1, 1, 1, 1)}
    model = vitrail.create(name, image_size=32, num_classes=3, **small)
    found = vitrail.inspect_model(model, [photo(tmp_path / "a.png")])
    assert found.filters is not None
    assert (found.mixing is not None) == ("Mixer" in name)
    assert found.study is None
    assert "no attention" in found.notes[0]
    with pytest.raises(ConfigError, match="has no attention, and so no rollout"):
        vitrail.inspect_model(model, methods=["rollout"])
    with pytest.raises(ConfigError, match="has no attention, and so no explanations to test"):
        vitrail.inspect_model(model, score=True)
    with pytest.raises(ConfigError, match="has no attention, and so no maps of its layers"):
        vitrail.inspect_model(model, layers=[0])


def test_all_that_was_found_is_drawn_where_one_asks_for_it(tmp_path):
    model = vitrail.create("ViT-Mu/8", image_size=16, num_classes=2)
    out = tmp_path / "inside"
    vitrail.inspect_model(model, [photo(tmp_path / "a.png")], out=out)
    assert {"report.html", "arrays.npz", "filters.png"} <= {path.name for path in out.iterdir()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": [7]}, r"layers=\[7\] asks for 7; there are 2"),
        ({"methods": ["rolout"]}, "unknown method 'rolout'; did you mean 'rollout'"),
        ({"images": 0}, "images=0 leaves nothing"),
    ],
)
def test_what_cannot_be_asked_is_refused(model, changes, said):
    with pytest.raises(ConfigError, match=said):
        vitrail.inspect_model(model, **changes)


def test_a_picture_that_cannot_be_read_is_named(model, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"bad\.png: "):
        vitrail.inspect_model(model, [tmp_path / "bad.png"])
    with pytest.raises(DataError, match="nowhere does not exist"):
        vitrail.inspect_model(model, ["nowhere"])


def test_pictures_of_the_data_that_cannot_be_read_are_counted_and_named(model, tmp_path):
    for name in ("red", "green"):
        for number in range(4):
            photo(tmp_path / "set" / name / f"{number}.png")
    whole = open_dataset(tmp_path / "set", "all")
    assert not vitrail.inspect_model(model, data=whole, images=2).notes
    (tmp_path / "set" / "red" / "0.png").write_bytes(b"no picture")
    found = vitrail.inspect_model(model, data=open_dataset(tmp_path / "set", "all"), images=2)
    (note,) = found.notes
    assert note.startswith("1 picture of the data could not be read: red/0.png (")
    for number in range(4):
        (tmp_path / "set" / "green" / f"{number}.png").write_bytes(b"no picture")
    found = vitrail.inspect_model(model, data=open_dataset(tmp_path / "set", "all"), images=8)
    (note,) = found.notes
    assert note.startswith("5 pictures of the data could not be read: ")
    assert note.endswith(" and 2 more")
    assert found.study is not None
    assert found.study.images == 3
    for number in range(4):
        (tmp_path / "set" / "red" / f"{number}.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"none of 8 images could be read: green/0\.png: "):
        vitrail.inspect_model(model, data=open_dataset(tmp_path / "set", "all"), images=8)


def test_where_several_classes_may_apply_their_probabilities_are_their_own(model, tmp_path):
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    once = photo(tmp_path / "a.png")
    (one,) = vitrail.inspect_model(model, [once]).looks
    assert sum(chance for _, chance in one.classes) == pytest.approx(1)
    model.metadata = Metadata(preprocessing=preset("google", (16, 16)), multi_label=True)
    found = vitrail.inspect_model(model, [once])
    assert found.multi_label
    odds = {name: math.log(chance / (1 - chance)) for name, chance in found.looks[0].classes}
    shares = np.exp(list(odds.values())) / np.exp(list(odds.values())).sum()
    assert dict(zip(odds, shares, strict=True)) == pytest.approx(dict(one.classes), abs=1e-5)


def test_large_models_take_few_pictures_at_a_time(model):
    assert at_once(model, (16, 16)) == 64
    with torch.device("meta"):
        large, small = (VisionTransformer(configuration(f"ViT-{x}/16")) for x in "LS")
    assert at_once(large, (512, 512)) == 1
    assert at_once(small, (224, 224)) >= 16


def test_explanations_need_a_picture_and_a_class_to_be_tested(model, tmp_path):
    with pytest.raises(DataError, match="no picture to test explanations with"):
        vitrail.inspect_model(model, score=True)
    headless = vitrail.create("ViT-Mu/4", image_size=16, num_classes=0, depth=2)
    with pytest.raises(ConfigError, match="this model has none"):
        vitrail.inspect_model(headless, [photo(tmp_path / "a.png")], score=True)


def test_a_model_without_classes_has_maps_that_ask_for_none(tmp_path):
    model = vitrail.create("ViT-Mu/4", image_size=16, num_classes=0, depth=2)
    (look,) = vitrail.inspect_model(model, [photo(tmp_path / "a.png")]).looks
    assert look.maps
    assert not look.class_maps
    assert look.classes == ()


def test_the_command_writes_a_page_arrays_and_pictures(model, data, tmp_path, capsys):
    vitrail.save(model, tmp_path / "bundle", class_names=["red", "green", "blue"])
    photo(tmp_path / "photos" / "one.png")
    photo(tmp_path / "photos" / "two.png")
    words = [str(tmp_path / "bundle"), str(tmp_path / "photos"), "--data", str(data)]
    out = tmp_path / "out"
    assert main(["inspect", *words, "--images", "5", "--layers", "0", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "attention over 5 images" in told
    assert max(map(len, told.splitlines()[:-1])) <= 80
    for name in ("report.html", "filters.png", "positions.png", "distance.png", "map.png"):
        assert (out / name).stat().st_size > 500, name
    assert len(list((out / "pictures").iterdir())) == 2 * (2 + 2 * 2)
    arrays = np.load(out / "arrays.npz")
    assert arrays["picture_1_rollout"].shape == model.config.grid
    assert arrays["picture_1_colors"].shape == (*model.config.grid, 3)
    assert "picture_0_layer_0" in arrays
    rows = list(csv.DictReader((out / "attention.csv").read_text().splitlines()))
    assert len(rows) == model.config.depth * model.config.heads


def test_a_models_own_report_is_not_overwritten(model, tmp_path, capsys):
    vitrail.save(model, tmp_path / "bundle")
    assert main(["inspect", str(tmp_path / "bundle"), "--out", str(tmp_path / "bundle")]) == 2
    assert "contains a model with its own report" in capsys.readouterr().err


def test_a_picture_of_the_set_is_not_its_own_neighbor_and_another_of_its_name_is(model, tmp_path):
    for name in ("red", "green"):
        for number in range(4):
            photo(tmp_path / "set" / name / f"{number}.png", size=(20 + number, 20))
    whole = open_dataset(tmp_path / "set", "all")
    found = vitrail.inspect_model(model, data=whole, images=2)
    assert all(near.name != look.name for look in found.looks for near in look.neighbors)
    named = [tmp_path / "set" / "red" / "0.png"]
    (look,) = vitrail.inspect_model(model, named, data=whole, images=2).looks
    assert look.neighbors[0].similarity == pytest.approx(1, abs=1e-5)


def test_a_class_that_the_model_does_not_know_is_no_verdict(model, data):
    vitrail.save(model, data.parent / "bundle", class_names=["one", "two", "three"])
    found = vitrail.inspect_model(data.parent / "bundle", data=data, images=2)
    assert {look.label for look in found.looks} == {""}


def test_many_pictures_are_counted_and_some_are_shown(model, tmp_path):
    for number in range(30):
        photo(tmp_path / "many" / f"{number}.png", size=(900, 600))
    found = vitrail.inspect_model(model, [tmp_path / "many"])
    assert len(found.looks) == 24
    assert "6 more pictures were named than are shown" in found.notes
    assert found.looks[0].pixels.shape == (320, 480, 3)


def test_rollout_is_tested_as_it_is(model, data):
    with pytest.raises(ConfigError, match="score tests rollout as it is"):
        vitrail.inspect_model(model, data=data, fuse="max", score=True)


def test_json_has_the_numbers(model, data, tmp_path, capsys):
    vitrail.save(model, tmp_path / "bundle")
    words = [str(tmp_path / "bundle"), "--data", str(data), "--images", "3", "--score", "--json"]
    assert main(["inspect", *words, "--out", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"] == 3
    assert 0 <= told["insertion"]["rollout"] <= 1
    assert np.array(told["distance"]["patches"]).shape == (2, model.config.heads)
    arrays = np.load(tmp_path / "out" / "arrays.npz")
    assert arrays["shares_rollout"].shape == arrays["insertion_rollout"].shape == (21,)


@pytest.mark.parametrize(
    ("how", "box"),
    [
        (preset("google", (8, 8)), (0, 0, 20, 40)),
        (Preprocessing(size=(8, 8), resize="short-side", resize_to=(8, 8)), (0, 10, 20, 30)),
        (Preprocessing(size=(8, 8), resize_to=(16, 16)), (5, 10, 15, 30)),
    ],
)
def test_the_part_that_a_model_sees_is_known(how, box):
    assert seen(how, 20, 40) == pytest.approx(box)


def test_files_and_folders_are_found(tmp_path):
    photo(tmp_path / "set" / "b.png")
    photo(tmp_path / "set" / "a" / "c.jpg")
    (tmp_path / "set" / "notes.txt").write_text("")
    found = files([tmp_path / "set", tmp_path / "set" / "b.png"])
    assert [path.name for path in found] == ["c.jpg", "b.png", "b.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no picture in it"):
        files([tmp_path / "empty"])


def test_numbers_are_evenly_spaced():
    assert spaced(10, 3) == [0, 4, 9]
    assert spaced(2, 5) == [0, 1]
    assert spaced(0, 5) == []


def test_the_command_knows_every_map_that_there_is_to_ask_for():
    assert {*get_args(Method)} == {*GENERAL, *FOR_CLASSES}
