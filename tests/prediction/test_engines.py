"""Engines give the same answers; the fastest is chosen by time, and int8 only by measure."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close as close

import vitrail
from vitrail import CheckpointError, ConfigError, Predictor
from vitrail.prediction import engines
from vitrail.prediction.engines import Guard, open_engine

CLASSES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("set") / "colors.npz"
    np.savez(
        path,
        x_test=rng.integers(0, 255, (300, 8, 8, 3), np.uint8),
        y_test=np.arange(300) % 3,
        class_names=np.array(CLASSES),
    )
    return path


@pytest.fixture(scope="module")
def model(answering):
    return answering(CLASSES)


def opened(model, choice, told=None, **changes):
    tell = (lambda line: None) if told is None else told.append
    return open_engine(model, choice, guard=Guard(**changes), tell=tell)


def test_all_engines_give_the_same_logits_and_features(model):
    images = torch.randn(3, 3, 8, 8)
    torch_engine, onnx = opened(model, "torch"), opened(model, "onnx")
    close(onnx(images), torch_engine(images), rtol=1e-4, atol=1e-5)
    close(onnx.features(images), torch_engine.features(images), rtol=1e-4, atol=1e-5)
    close(torch_engine(images), model(images))


def test_int8_is_measured_before_it_is_used(model, data):
    told = []
    engine = opened(model, "onnx-int8", told, data=data, max_drop=0.2)
    assert engine.name == "onnx-int8"
    assert "of 256 pictures" in told[-1]


def test_int8_that_loses_too_much_is_refused_with_both_accuracies(model, data, monkeypatch):
    broken = opened(model, "onnx-int8", max_drop=1.0)
    monkeypatch.setattr("vitrail.export.sessions.engine_for", lambda *_, **__: Worse(broken, model))
    with pytest.raises(CheckpointError, match=r"int8 is right on .* and the model on"):
        opened(model, "onnx-int8", data=data, max_drop=0.0)


class Worse:
    """An engine that is wrong wherever the model is right."""

    name = "onnx-int8"

    def __init__(self, engine, model):
        self.engine = engine
        self.model = model

    def __call__(self, images):
        return -self.model(images)


def test_int8_without_pictures_to_measure_by_is_refused_unless_nobody_minds(model):
    with pytest.raises(ConfigError, match="must be measured; give --data"):
        opened(model, "onnx-int8")
    assert opened(model, "onnx-int8", max_drop=1.0).name == "onnx-int8"


def choose(model, monkeypatch, paces, **changes):
    monkeypatch.setattr(engines, "time_each", lambda *_: paces)
    told = []
    return opened(model, "auto", told, **changes).name, told[-1]


def test_auto_takes_the_fastest_and_says_so(model, data, monkeypatch):
    paces = {"torch": 3.0, "onnx": 2.0, "onnx-int8": 1.0}
    assert choose(model, monkeypatch, paces)[0] == "torch"
    paces = {"torch": 1.0, "onnx": 2.0, "onnx-int8": 3.0}
    name, told = choose(model, monkeypatch, paces, data=data, max_drop=0.2)
    assert name == "onnx-int8"
    assert "int8 is right on" in told
    assert "onnx-int8 3, onnx 2, torch 1" in told


def test_auto_passes_over_an_int8_that_was_not_measured(model, monkeypatch):
    paces = {"torch": 1.0, "onnx": 2.0, "onnx-int8": 3.0}
    assert choose(model, monkeypatch, paces)[0] == "onnx"


def test_auto_is_torch_where_onnxruntime_is_missing(model, monkeypatch):
    def missing(*_, **__):
        raise ConfigError("engine=onnx needs onnxruntime")

    monkeypatch.setattr("vitrail.export.sessions.engine_for", missing)
    told = []
    assert opened(model, "auto", told).name == "torch"
    assert "needs onnxruntime" in told[-1]


def test_every_engine_is_timed(model, monkeypatch):
    monkeypatch.setattr(engines, "SECONDS", 0.1)
    paces = engines.time_each([opened(model, "torch"), opened(model, "onnx")], model)
    assert paces.keys() == {"torch", "onnx"}
    assert all(0 < pace < float("inf") for pace in paces.values())


@pytest.mark.parametrize(
    ("choice", "changes", "reason"),
    [
        ("onx", {}, "unknown engine 'onx'; did you mean 'onnx'"),
        ("onnx", {"merge": 2}, "merge=2 is for the torch engine"),
        ("onnx", {"device": "cuda"}, "runs on the CPU, not on cuda"),
    ],
)
def test_what_does_not_go_together_is_refused(model, choice, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        open_engine(model, choice, guard=Guard(), tell=print, **changes)


def test_merging_is_for_models_with_tokens():
    model = vitrail.create("Mixer-S/32", num_classes=2, image_size=64, depth=1)
    with pytest.raises(ConfigError, match="merge=4 merges the tokens of a Vision Transformer"):
        Predictor(model, merge=4)


def test_an_exported_file_predicts_by_itself(model, data, tmp_path):
    from vitrail.export.api import export_model

    export_model(model, tmp_path / "model.onnx")
    alone = Predictor(tmp_path / "model.onnx")
    picture = np.load(data)["x_test"][0]
    expected = Predictor(model)(picture)
    assert alone.classes == CLASSES
    assert alone(picture).label == expected.label
    assert alone(picture).probability == pytest.approx(expected.probability, abs=1e-4)
    with pytest.raises(ConfigError, match="leave the engine out"):
        Predictor(tmp_path / "model.onnx", engine="torch")


def test_what_int8_costs_is_measured_without_dropout(data, answering):
    """The labels are the model's own answers: float is right on all of them."""
    shaky = answering(CLASSES, dropout=0.5)
    pixels = np.load(data)["x_test"]
    labels = [CLASSES.index(answer.label) for answer in Predictor(shaky)(list(pixels))]
    own = data.parent / "own.npz"
    np.savez(own, x_test=pixels, y_test=np.array(labels), class_names=np.array(CLASSES))
    told = []
    opened(shaky.train(), "onnx-int8", told, data=own, max_drop=0.2)
    assert "float on 100 %" in told[-1]


def test_auto_tries_what_a_model_can_be_made_into(monkeypatch):
    model = vitrail.create("BiT-R50x1", num_classes=2, image_size=32, blocks=(1, 1, 1, 1))
    monkeypatch.setattr(engines, "time_each", lambda *_: {"torch": 1.0, "onnx": 2.0})
    told = []
    assert opened(model, "auto", told).name == "onnx"
    assert any("not onnx-int8" in line for line in told)
