import json

import numpy as np

from tiny_runs import write_colors, write_folder
from vitrail.data.datasets import Splits, open_dataset
from vitrail.data.provenance import PROVENANCE_SAMPLES, DataProvenance, contains_any, sample_digests
from vitrail.data.storage import same_location


def test_provenance_round_trip(tmp_path):
    folder = write_folder(tmp_path / "images", 20)
    origin = DataProvenance.of("images", open_dataset(folder, splits=Splits(val=0.2, test=0.0)))
    assert origin.splits == Splits(val=0.2, test=0.0)
    assert len(origin.samples) == PROVENANCE_SAMPLES
    assert DataProvenance.from_dict(json.loads(json.dumps(origin.to_dict()))) == origin
    for values in (
        {"data": 3, "fingerprint": None, "splits": "80:20", "samples": "abc", "taught": {}},
        {"splits": {"val": 2.0}},
        {"splits": {"other": 0.1}},
    ):  # invalid values count as unknown
        assert DataProvenance.from_dict(values) == DataProvenance()


def test_unreadable_images_have_no_digests_and_splits_are_recorded(tmp_path):
    (tmp_path / "list.csv").write_text("file,label\na.png,a\nb.png,b\n")
    source = open_dataset(tmp_path / "list.csv", "all")
    assert sample_digests(source) == ()
    assert not contains_any(source, sample_digests(source))
    folder, stated = write_folder(tmp_path / "images"), write_colors(tmp_path / "colors.npz")
    assert open_dataset(folder).splits == Splits()
    assert open_dataset(folder).subset(np.arange(3)).splits == Splits()
    assert open_dataset(stated).splits is None


def test_same_location(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to("images")
    for other in ("images/", "./images", "a/../images", "~/images", "link"):
        assert same_location("images", other)
    assert same_location("images", f"file://{tmp_path}/images")
    assert same_location("hf:a/b", "hf:a/b")
    assert not same_location("hf:a/b", "hf:a/c")
    assert not same_location("images", "images-2")
