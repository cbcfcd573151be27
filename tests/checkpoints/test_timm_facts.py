"""What timm's config.json tells of pictures and classes: what is written is read."""

import pytest

from vitrail import CheckpointError
from vitrail.checkpoints import timm
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import Preprocessing, preset


@pytest.fixture
def small(tiny):
    """The tiny model with timm's numerics and five classes."""
    return tiny.change(numerics="timm", num_classes=5)


@pytest.mark.parametrize("size", [(224, 224), (384, 384), (96, 160), (7, 7)], ids=str)
@pytest.mark.parametrize("name", ["timm", "torchvision", "big_vision", "transformers"])
def test_facts_come_back_from_config_json(small, name, size):
    config = small.change(patch_size=1, image_size=size)
    metadata = Metadata(
        preprocessing=preset(name, size),
        class_names=("a", "b", "c", "d", "e"),
        provenance={"license": "apache-2.0"},
    )
    settings = timm.VIT.json_files(config, metadata)["config.json"]
    assert timm.read_metadata(settings, config) == metadata


def test_the_usual_crop_is_written_as_timm_writes_it(small):
    config = small.change(patch_size=1, image_size=224)
    metadata = Metadata(preprocessing=preset("timm", (224, 224)))
    settings = timm.VIT.json_files(config, metadata)["config.json"]
    assert settings["pretrained_cfg"]["crop_pct"] == 0.9


def test_facts_of_a_published_config_json_are_read(small):
    settings = {
        "architecture": "vit_base_patch16_224",
        "num_classes": 5,
        "global_pool": "token",
        "label_names": {"10": "e", "2": "c", "0": "a", "1": "b", "3": "d"},
        "pretrained_cfg": {
            "input_size": [3, 8, 8],
            "interpolation": "box",
            "crop_pct": 0.8,
            "crop_mode": "squash",
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
        },
    }
    metadata = timm.read_metadata(settings, small)
    assert metadata == Metadata(
        preprocessing=Preprocessing(
            size=(8, 8),
            resize_to=(10, 10),
            interpolation="area",
            mean=(0.1, 0.2, 0.3),
            std=(0.4, 0.5, 0.6),
        ),
        class_names=("a", "b", "c", "d", "e"),
    )


def test_no_facts_where_none_are_written(small):
    assert timm.read_metadata({"format": "pt"}, small) is None
    gray = {"pretrained_cfg": {"mean": [0.5], "std": [0.5]}}
    assert timm.read_metadata(gray, small) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": "dark"},
        {"std": [0, 0, 0]},
        {"crop_pct": "all"},
        {"crop_pct": 1e-320},
        {"interpolation": ["box"]},
        {"interpolation": "magic"},
        {"crop_mode": "border"},
    ],
    ids=str,
)
def test_impossible_facts_are_refused(small, wrong):
    with pytest.raises(CheckpointError, match=r"invalid preprocessing in config\.json"):
        timm.read_metadata({"pretrained_cfg": wrong}, small)
