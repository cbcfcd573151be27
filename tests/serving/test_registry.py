from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from serving_helpers import encoded_image, make_client, make_state, tiny_model, wait_for
from starlette.testclient import TestClient

import vitrail
from tiny_runs import write_colors
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.datasets import open_dataset
from vitrail.data.decode import decode
from vitrail.data.preprocessing import preset
from vitrail.errors import DataError
from vitrail.prediction.predictor import Predictor
from vitrail.serving.app import make_app
from vitrail.serving.config import ServerConfig
from vitrail.serving.registry import examples_from, find_examples, spread_rows
from vitrail.serving.server import load_model

PREPROCESSING = preset("google", (8, 8), 3)


def metadata_with(data):
    return Metadata(preprocessing=PREPROCESSING, provenance={"data": str(data)})


def test_examples_are_spread_over_the_classes_of_the_test_split(tmp_path):
    data = write_colors(tmp_path / "colors.npz", train=30, test=30)
    examples = find_examples(metadata_with(data), "")
    assert [one.label for one in examples] == ["red", "green", "blue"] * 4
    assert {one.media_type for one in examples} == {"image/png"}
    test = open_dataset(data, "test")
    assert any(np.array_equal(decode(examples[0].data), sample.data) for sample in test)
    many = SimpleNamespace(labels=lambda: np.repeat(np.arange(100), 3))
    rows = spread_rows(many, 12)
    assert len(rows) == len({row // 3 for row in rows}) == 12
    few = SimpleNamespace(labels=lambda: np.array([0, 0, 1]))
    assert sorted(spread_rows(few, 12)) == [0, 1, 2]


def test_small_examples_are_unchanged_and_large_ones_resized(tmp_path):
    images = {"a": encoded_image("red"), "b": encoded_image("blue", (700, 700), "BMP")}
    for name, data in images.items():
        (tmp_path / "set" / name).mkdir(parents=True)
        for n in range(3):
            (tmp_path / "set" / name / f"{n}.png").write_bytes(data)
    examples = find_examples(metadata_with("nowhere"), str(tmp_path / "set"))
    kinds = {one.label: one for one in examples}
    assert kinds["a"].data == images["a"]
    assert kinds["b"].media_type == "image/jpeg"  # browsers are not sent a large BMP
    assert len(kinds["b"].data) < 2**18


def test_missing_examples_are_an_error_only_if_configured(tmp_path):
    assert find_examples(metadata_with(tmp_path / "gone"), "") == []
    assert find_examples(metadata_with("hf:some/where"), "") == []  # nothing is downloaded
    assert find_examples(Metadata(preprocessing=PREPROCESSING), "") == []
    data = write_colors(tmp_path / "colors.npz")
    assert find_examples(metadata_with(data), "none") == []
    with pytest.raises(DataError):
        find_examples(metadata_with(data), str(tmp_path / "gone"))


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_examples_of_the_models_data_are_shown_on_loopback_only(tmp_path, host, shown):
    config = ServerConfig(host=host)
    assert examples_from(config, str(tmp_path)) == ("" if shown else "none")
    assert examples_from(replace(config, allow_host=("example.org",)), str(tmp_path)) == "none"
    assert examples_from(config, "hf:some/where") == "none"
    assert examples_from(config, str(tmp_path / "gone")) == "none"
    assert examples_from(ServerConfig(host=host, examples="photos"), "hf:some/where") == "photos"
    model = tiny_model()
    data = write_colors(tmp_path / "colors.npz")
    model.metadata = replace(model.metadata, provenance={"data": str(data)})
    vitrail.save(model, tmp_path / "bundle")
    with make_state(host=host, allow_host=()) as state:
        state.registry.models.clear()
        arguments = (state, "tiny", str(tmp_path / "bundle"), Predictor, lambda line: None)
        load_model(*arguments, several=False)
        with TestClient(make_app(state)):
            wait_for(lambda: "tiny" in state.examples)
        assert bool(state.examples["tiny"]) is shown


def test_examples_are_served_by_number(tmp_path):
    data = write_colors(tmp_path / "colors.npz")
    with make_state() as state:
        state.examples["tiny"] = find_examples(metadata_with(data), "")
        client = make_client(state)
        listed = client.get("/examples").json()
        assert listed[1] == {"id": "1", "label": "green"}
        one = client.get("/examples/1")
        assert one.headers["content-type"] == "image/png"
        assert one.content == state.examples["tiny"][1].data
        for invalid in ("12", "-1", "x", "1e1", "..%2f..%2fetc%2fpasswd", "²"):
            assert client.get(f"/examples/{invalid}").status_code == 404
