"""`vitrail.inspect_model` and `vitrail inspect`, on small models of every family."""

import csv
import json
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tiny_runs import tiny_run, write_colors, write_folder
from vitrail import ConfigError, DataError, VisionTransformer
from vitrail.checkpoints.metadata import Metadata
from vitrail.cli import main
from vitrail.cli.inspect import Method
from vitrail.data.datasets import open_dataset
from vitrail.data.preprocessing import Preprocessing, preset
from vitrail.inspection import inspect
from vitrail.inspection.attention import attention_stats, batch_size_for
from vitrail.inspection.faithfulness import evaluate_faithfulness
from vitrail.inspection.images import crop_box, find_images
from vitrail.inspection.relevance import CLASS_AGNOSTIC, CLASS_SPECIFIC, METHODS
from vitrail.inspection.representations import filter_components, position_similarity, token_colors
from vitrail.models.registry import configuration

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path):
    return write_colors(tmp_path / "colors.npz")


@pytest.fixture
def model():
    return vitrail.create("ViT-Mu/4", image_size=16, num_classes=3, depth=2)


def photo(path, size=(30, 20)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_arrays_equal_those_of_version_0_1(golden):
    model = vitrail.load(golden / "vit-token.npz").eval().double()
    images = np.load(golden / "vit-token.io.npz")["images"][:2].transpose(0, 3, 1, 2)
    images, classes = torch.from_numpy(images).double(), torch.tensor([3, 1])
    stats, scores = attention_stats(model, [images]), evaluate_faithfulness(model, images, classes)
    (positions,) = position_similarity(model).values()
    components, explained = filter_components(model)
    arrays = {"filters": components, "filters_explained": explained, "positions": positions}
    arrays |= {f"distance, {name}": values for name, values in stats.distance.items()}
    for name in ("entropy", "redundancy", "norms", "prefix_norms"):
        arrays[name] = getattr(stats, name)
    arrays |= {name: method(model, images, classes) for name, method in METHODS.items()}
    for name, curves in scores.curves.items():
        arrays |= {f"insertion, {name}": curves.insertion, f"deletion, {name}": curves.deletion}
    arrays["sanity"] = list(scores.sanity.values())
    arrays["token_colors"] = token_colors(model, images)
    expected = np.load(golden / "inspection.npz")
    assert arrays.keys() == set(expected)
    for name, values in arrays.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-6, err_msg=name)


def test_weights_are_inspected_without_images(model):
    result = vitrail.inspect_model(model)
    assert result.filters is not None
    assert result.positions
    assert not result.images
    assert result.attention is result.scatter is None
    for old, new in (("looks", "images"), ("study", "attention"), ("trust", "faithfulness")):
        with pytest.warns(DeprecationWarning, match=f".{old} is now .{new}"):
            assert getattr(result, old) is getattr(result, new)


def test_missing_scikit_learn_is_noted(model, data, monkeypatch):
    hint = "t-SNE needs scikit-learn; install it with: pip install 'vitrail[inspect]'"
    assert hint not in vitrail.inspect_model(model, data=data, num_images=2).notes
    for name in ("inspect", "representations"):
        monkeypatch.setattr(f"vitrail.inspection.{name}.find_spec", lambda name: None)
    result = vitrail.inspect_model(model, data=data, num_images=2)
    assert result.scatter.method == "principal components"
    assert result.notes.count(hint) == 1


def test_class_maps_by_class_name(model, data):
    vitrail.save(model, data.parent / "bundle", class_names=["red", "green", "blue"])
    options = {"data": data, "num_images": 2, "layers": [-1]}
    result = vitrail.inspect_model(data.parent / "bundle", classes=["blue"], **options)
    assert result.images[0].class_maps["relevance"].keys() == {"blue"}
    assert result.images[0].layers.keys() == {1}
    assert result.images[0].label == "red"
    with pytest.raises(ConfigError, match="unknown class 'blu'; did you mean 'blue'"):
        vitrail.inspect_model(data.parent / "bundle", data=data, classes=["blu"])
    vitrail.save(model, data.parent / "other", class_names=["one", "two", "three"])
    result = vitrail.inspect_model(data.parent / "other", data=data, num_images=2)
    assert {image.label for image in result.images} == {""}  # labels unknown to the model


@pytest.mark.parametrize("name", ["BiT-R50x1", "Mixer-S/32"])
def test_model_without_attention(name, tmp_path):
    small = {"depth": 2, "width": 32} if "Mixer" in name else {"blocks": (1, 1, 1, 1)}
    model = vitrail.create(name, image_size=32, num_classes=3, **small)
    result = vitrail.inspect_model(model, [photo(tmp_path / "a.png")], out=tmp_path / "out")
    assert result.filters is not None
    assert (result.mixing is not None) == ("Mixer" in name)
    assert (tmp_path / "out" / "mixing.png").exists() == ("Mixer" in name)
    assert result.attention is None
    assert "no attention" in result.notes[0]
    for arguments, what in (
        ({"methods": ["rollout"]}, "rollout"),
        ({"score": True}, "map to score"),
        ({"layers": [0]}, "attention map"),
    ):
        with pytest.raises(ConfigError, match=f"has no attention, so there is no {what}"):
            vitrail.inspect_model(model, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [7]}, r"layers=\[7\]: 7 is out of range; there are 2"),
        ({"methods": ["rolout"]}, "unknown method 'rolout'; did you mean 'rollout'"),
        ({"num_images": 0}, "images=0 must be at least 1"),
        ({"fuse": "max", "score": True}, "score evaluates rollout with its defaults"),
        ({"score": True}, "score needs images"),
    ],
)
def test_invalid_arguments(model, arguments, message):
    assert {*get_args(Method)} == {*CLASS_AGNOSTIC, *CLASS_SPECIFIC}  # those of the command
    with pytest.raises((ConfigError, DataError), match=message):
        vitrail.inspect_model(model, **arguments)


def test_model_without_a_head_has_no_class_maps_and_no_scores(tmp_path):
    headless = vitrail.create("ViT-Mu/4", image_size=16, num_classes=0, depth=2)
    path = photo(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="no classification head"):
        vitrail.inspect_model(headless, [path], score=True)
    (image,) = vitrail.inspect_model(headless, [path]).images
    assert image.maps
    assert not image.class_maps
    assert image.predictions == ()


def test_crop_box():
    for changes, box in [
        ({}, (0, 0, 20, 40)),
        ({"resize": "short-side", "resize_to": (8, 8)}, (0, 10, 20, 30)),
        ({"resize_to": (16, 16)}, (5, 10, 15, 30)),
    ]:
        assert crop_box(Preprocessing(size=(8, 8), **changes), 20, 40) == pytest.approx(box)


def test_files_are_found_and_unreadable_ones_named(model, tmp_path):
    photo(tmp_path / "set" / "b.png")
    photo(tmp_path / "set" / "a" / "c.jpg")
    (tmp_path / "set" / "notes.txt").write_text("")
    paths = find_images([tmp_path / "set", tmp_path / "set" / "b.png"])
    assert [path.name for path in paths] == ["c.jpg", "b.png", "b.png"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.png").write_bytes(b"no image")
    for path, message in (
        (tmp_path / "empty", "no images in this folder"),
        (tmp_path / "bad.png", r"bad\.png: "),
        ("nowhere", "nowhere does not exist; expected image files or folders"),
        (tmp_path / "Bd.png", r"Bd\.png does not exist; did you mean '.*/bad\.png'\?"),
    ):
        with pytest.raises(DataError, match=message):
            vitrail.inspect_model(model, [path])


def test_unreadable_samples_are_counted_and_named(model, tmp_path):
    paths = [
        photo(tmp_path / "set" / name / f"{i}.png") for name in ("red", "green") for i in "0123"
    ]

    def inspect(images):
        dataset = open_dataset(tmp_path / "set", "all")
        return vitrail.inspect_model(model, data=dataset, num_images=images)

    assert not inspect(2).notes
    paths[0].write_bytes(b"no image")
    (note,) = inspect(2).notes
    assert note.startswith("1 unreadable image skipped: red/0.png (")
    for path in paths[4:]:
        path.write_bytes(b"no image")
    result = inspect(8)
    (note,) = result.notes
    assert note.startswith("5 unreadable images skipped: ")
    assert result.attention.images == 3
    for path in paths:
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of 8 images could be read: green/0\.png: "):
        inspect(8)


def test_multi_label_probabilities_are_sigmoids(model, tmp_path):
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    path = photo(tmp_path / "a.png")
    (single,) = vitrail.inspect_model(model, [path]).images
    assert sum(value for _, value in single.predictions) == pytest.approx(1)
    model.metadata = Metadata(preprocessing=preset("google", (16, 16)), multi_label=True)
    result = vitrail.inspect_model(model, [path])
    assert result.multi_label
    odds = {name: p / (1 - p) for name, p in result.images[0].predictions}
    shares = {name: each / sum(odds.values()) for name, each in odds.items()}
    assert shares == pytest.approx(dict(single.predictions), abs=1e-5)


def test_batch_size_depends_on_the_model(model):
    assert batch_size_for(model, (16, 16)) == 64
    with torch.device("meta"):
        large, small = (VisionTransformer(configuration(f"ViT-{x}/16")) for x in "LS")
    assert batch_size_for(large, (512, 512)) == 1
    assert batch_size_for(small, (224, 224)) >= 16


def test_image_is_not_its_own_neighbor(model, tmp_path):
    for name in ("red", "green"):
        for number in range(4):
            photo(tmp_path / "set" / name / f"{number}.png", size=(20 + number, 20))
    dataset = open_dataset(tmp_path / "set", "all")
    result = vitrail.inspect_model(model, data=dataset, num_images=2)
    assert len(result.images) == 6  # some of the dataset by default
    assert all(near.name != image.name for image in result.images for near in image.neighbors)
    path = tmp_path / "set" / "red" / "0.png"  # a file is not known to be of the dataset
    (image,) = vitrail.inspect_model(model, [path], data=dataset, num_images=2).images
    assert len(image.neighbors) == 6
    assert image.neighbors[0].similarity == pytest.approx(1, abs=1e-5)


def test_images_that_the_model_was_trained_on_are_not_used(tmp_path, capsys):
    folder = write_folder(tmp_path / "set")  # without splits: training held some images out
    tiny_run(folder, tmp_path / "run")
    result = vitrail.inspect_model(tmp_path / "run", data=folder, num_images=30)
    assert result.attention.images == vitrail.evaluate(tmp_path / "run", folder).samples < 30
    words = ["--methods", "rollout", "--json", "--out", str(tmp_path / "out")]
    assert main(["inspect", str(tmp_path / "run"), *words]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["notes"][0].startswith(f"statistics over images of {folder}")


def test_number_and_size_of_images_are_limited(model, tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "MAX_IMAGES", 2)
    for number in range(5):
        photo(tmp_path / "many" / f"{number}.png", size=(900, 600))
    result = vitrail.inspect_model(model, [tmp_path / "many"], methods=["rollout"])
    assert len(result.images) == 2
    assert "only 2 of 5 images are shown" in result.notes
    assert result.images[0].pixels.shape == (320, 480, 3)


def test_command_writes_page_arrays_images_and_json(model, data, tmp_path, capsys):
    vitrail.save(model, tmp_path / "bundle", class_names=["red", "green", "blue"])
    photo(tmp_path / "photos" / "one.png")
    photo(tmp_path / "photos" / "two.png")
    words = [str(tmp_path / "bundle"), str(tmp_path / "photos"), "--data", str(data)]
    out = tmp_path / "out"
    assert main(["inspect", *words, "--images", "5", "--layers", "0", "--out", str(out)]) == 0
    assert "attention over 5 images" in capsys.readouterr().out
    figures = ("filters", "positions", "distance", "map")
    for name in ("report.html", *(f"{name}.{kind}" for name in figures for kind in ("svg", "png"))):
        assert (out / name).stat().st_size > 500, name
    assert len(list((out / "pictures").iterdir())) == 2 * (2 + 2 * 2)
    arrays = np.load(out / "arrays.npz")
    assert arrays["picture_1_rollout"].shape == model.config.grid
    assert arrays["picture_1_colors"].shape == (*model.config.grid, 3)
    tokens = model.config.num_tokens
    assert arrays["picture_0_layer_0"].shape == (model.config.heads, tokens, tokens)
    rows = list(csv.DictReader((out / "attention.csv").read_text().splitlines()))
    assert len(rows) == model.config.depth * model.config.heads
    words = ["inspect", words[0], "--data", str(data), "--images", "3", "--score", "--json"]
    assert main([*words, "--methods", "rollout", "last layer", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "scoring 4 methods on 12 images: 2,016 forward passes, about " in printed.err
    result = json.loads(printed.out)
    assert result["images"] == 3
    assert result["insertion"].keys() == {"rollout", "last layer", "random", "center"}
    assert 0 <= result["insertion"]["rollout"] <= 1
    assert np.array(result["distance"]["patches"]).shape == (2, model.config.heads)
    arrays = np.load(out / "arrays.npz")
    assert arrays["shares_rollout"].shape == arrays["insertion_rollout"].shape == (21,)
    assert main(["inspect", words[1], "--out", words[1]]) == 2
    assert "contains a model with its own report" in capsys.readouterr().err
