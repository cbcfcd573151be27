from dataclasses import replace

import numpy as np
import pytest
from houses import a_house, picture, tiny_model, wait_for
from starlette.testclient import TestClient

import vitrail
from tiny_runs import write_colors
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.decoding import decode
from vitrail.data.preprocessing import preset
from vitrail.data.sources import open_source
from vitrail.errors import DataError
from vitrail.prediction.predictor import Predictor
from vitrail.serving.app import make_app
from vitrail.serving.examples import find_examples, given, spread
from vitrail.serving.run import open_model
from vitrail.serving.settings import Settings

HOW = preset("google", (8, 8), 3)


def known(data):
    return Metadata(preprocessing=HOW, provenance={"data": str(data)})


def test_test_pictures_of_all_classes_are_to_be_tried(tmp_path):
    data = write_colors(tmp_path / "colors.npz", train=30, test=30)
    found = find_examples(known(data), "")
    assert [one.label for one in found] == ["red", "green", "blue"] * 4
    assert {one.media_type for one in found} == {"image/png"}
    test = open_source(data, "test")
    assert any(np.array_equal(decode(found[0].data), sample.data) for sample in test)


def test_encoded_pictures_are_shown_as_they_are_and_large_ones_smaller(tmp_path):
    for name, data in {"a": picture("red"), "b": picture("blue", (700, 700), "BMP")}.items():
        (tmp_path / "set" / name).mkdir(parents=True)
        for n in range(3):
            (tmp_path / "set" / name / f"{n}.png").write_bytes(data)
    found = find_examples(known("nowhere"), str(tmp_path / "set"))
    kinds = {one.label: one for one in found}
    assert kinds["a"].data == picture("red")
    assert kinds["b"].media_type == "image/jpeg"  # no browser is sent a BMP of a megabyte
    assert len(kinds["b"].data) < 2**18


def test_what_cannot_be_opened_is_an_error_only_if_it_was_asked_for(tmp_path):
    assert find_examples(known(tmp_path / "gone"), "") == []
    assert find_examples(known("hf:some/where"), "") == []  # nothing is fetched unasked
    assert find_examples(Metadata(preprocessing=HOW), "") == []
    data = write_colors(tmp_path / "colors.npz")
    assert find_examples(known(data), "none") == []
    with pytest.raises(DataError):
        find_examples(known(data), str(tmp_path / "gone"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_data_that_only_a_model_names_is_shown_to_this_machine(tmp_path, host):
    assert given(Settings(host=host), str(tmp_path)) == ""
    assert given(Settings(host=host), "hf:some/where") == "none"
    assert given(Settings(host=host), str(tmp_path / "gone")) == "none"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_data_that_only_a_model_names_is_not_shown_to_others(tmp_path, host):
    assert given(Settings(host=host), str(tmp_path)) == "none"
    assert given(Settings(host=host, examples="photos"), "hf:some/where") == "photos"


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_server_that_others_reach_shows_nothing_that_was_not_named(tmp_path, host, shown):
    model = tiny_model()
    data = write_colors(tmp_path / "colors.npz")
    model.metadata = replace(model.metadata, provenance={"data": str(data)})
    vitrail.save(model, tmp_path / "bundle")
    with a_house(host=host) as house:
        house.shelf.models.clear()
        words = (house, "tiny", str(tmp_path / "bundle"), Predictor, lambda line: None)
        open_model(*words, several=False)
        with TestClient(make_app(house)):
            wait_for(lambda: "tiny" in house.examples)
        assert bool(house.examples["tiny"]) is shown


def test_many_classes_are_spread_and_few_pictures_are_all_taken(tmp_path):
    class Many:
        def labels(self):
            return np.repeat(np.arange(100), 3)

    class Few:
        def labels(self):
            return np.array([0, 0, 1])

    rows = spread(Many(), 12)
    assert len(rows) == len({row // 3 for row in rows}) == 12
    assert sorted(spread(Few(), 12)) == [0, 1, 2]


def test_examples_are_served_by_number(tmp_path):
    data = write_colors(tmp_path / "colors.npz")
    with a_house() as house:
        house.examples["tiny"] = find_examples(known(data), "")
        client = TestClient(make_app(house))
        told = client.get("/examples").json()
        assert told[1] == {"id": "1", "label": "green"}
        one = client.get("/examples/1")
        assert one.headers["content-type"] == "image/png"
        assert one.content == house.examples["tiny"][1].data
        for odd in ("12", "-1", "x", "1e1", "..%2f..%2fetc%2fpasswd", "²"):
            assert client.get(f"/examples/{odd}").status_code == 404
