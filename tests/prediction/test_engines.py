"""Engines agree; auto takes the fastest, and int8 only if its accuracy was measured."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close as close

import vitrail
from vitrail import CheckpointError, ConfigError, Predictor
from vitrail.export.verify import measure_int8
from vitrail.prediction import engines
from vitrail.prediction.engines import AccuracyGuard, open_engine

pytestmark = pytest.mark.slow

CLASSES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("set") / "colors.npz"
    images = rng.integers(0, 255, (300, 8, 8, 3), np.uint8)
    np.savez(path, x_test=images, y_test=np.arange(300) % 3, class_names=np.array(CLASSES))
    return path


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(CLASSES)


def open_with(model, choice, lines=None, **changes):
    log = (lambda line: None) if lines is None else lines.append
    return open_engine(model, choice, guard=AccuracyGuard(**changes), log=log)


def test_engines_agree_on_logits_and_features(model):
    images = torch.randn(3, 3, 8, 8)
    torch_engine, onnx = open_with(model, "torch"), open_with(model, "onnx")
    close(onnx(images), torch_engine(images), rtol=1e-4, atol=1e-5)
    close(onnx.features(images), torch_engine.features(images), rtol=1e-4, atol=1e-5)
    close(torch_engine(images), model(images))


def test_int8_is_measured_before_use_and_rejected_if_inaccurate(model, data, monkeypatch):
    lines = []
    engine = open_with(model, "onnx-int8", lines, data=data, max_drop=0.2)
    assert engine.name == "onnx-int8"
    assert "n=256" in lines[-1]
    with pytest.raises(ConfigError, match="must be measured; pass --data"):
        open_with(model, "onnx-int8")
    assert open_with(model, "onnx-int8", max_drop=1.0).name == "onnx-int8"  # without the guard
    monkeypatch.setattr(
        "vitrail.export.session.engine_for", lambda *_, **__: lambda images: -model(images)
    )
    with pytest.raises(CheckpointError, match=r"int8 accuracy .*, float .*: the drop exceeds"):
        open_with(model, "onnx-int8", data=data, max_drop=0.0)


def choose(model, monkeypatch, throughput, **changes):
    monkeypatch.setattr(engines, "measure_throughput", lambda *_: throughput)
    lines = []
    return open_with(model, "auto", lines, **changes).name, lines[-1]


def test_auto_takes_the_fastest_and_logs_it(model, data, monkeypatch):
    throughput = {"torch": 3.0, "onnx": 2.0, "onnx-int8": 1.0}
    assert choose(model, monkeypatch, throughput)[0] == "torch"
    throughput = {"torch": 1.0, "onnx": 2.0, "onnx-int8": 3.0}
    name, lines = choose(model, monkeypatch, throughput, data=data, max_drop=0.2)
    assert name == "onnx-int8"
    assert "int8 accuracy" in lines
    assert "onnx-int8 3, onnx 2, torch 1" in lines
    assert choose(model, monkeypatch, throughput)[0] == "onnx"  # without data, int8 is skipped


def test_auto_skips_engines_that_are_missing_or_cannot_export_the_model(model, monkeypatch):
    usable = []

    def engine_for(model, kind, **_):
        if kind not in usable:
            raise ConfigError(f"engine={kind} needs onnxruntime")
        return SimpleNamespace(name=kind)

    monkeypatch.setattr("vitrail.export.session.engine_for", engine_for)
    lines = []
    assert open_with(model, "auto", lines).name == "torch"
    assert "skipped onnx-int8: engine=onnx-int8 needs onnxruntime" in lines[-1]
    usable.append("onnx")
    assert choose(model, monkeypatch, {"torch": 1.0, "onnx": 2.0})[0] == "onnx"


def test_every_engine_is_timed(model, monkeypatch):
    monkeypatch.setattr(engines, "TIMING_SECONDS", 0.1)
    both = [open_with(model, "torch"), open_with(model, "onnx")]
    throughput = engines.measure_throughput(both, model)
    assert throughput.keys() == {"torch", "onnx"}
    assert all(0 < rate < float("inf") for rate in throughput.values())


@pytest.mark.parametrize(
    ("choice", "changes", "reason"),
    [
        ("onx", {}, "unknown engine 'onx'; did you mean 'onnx'"),
        ("onnx", {"merge": 2}, "merge=2 needs engine=torch"),
        ("onnx", {"device": "cuda"}, "runs on the CPU, not on cuda"),
    ],
)
def test_incompatible_options_are_rejected(model, choice, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        open_engine(model, choice, guard=AccuracyGuard(), log=print, **changes)


def test_files_run_in_onnxruntime_only_and_merging_needs_tokens():
    with pytest.raises(ConfigError, match="leave engine and merge out"):
        Predictor("model.onnx", engine="torch")
    model = vitrail.create("Mixer-S/32", num_classes=2, image_size=64, depth=1)
    with pytest.raises(ConfigError, match="merge=4 needs a Vision Transformer"):
        Predictor(model, merge=4)


def test_int8_accuracy_is_measured_in_eval_mode(data, make_model):
    """The labels are the model's own predictions, so float accuracy is 100 %."""
    shaky = make_model(CLASSES, dropout=0.5)
    pixels = np.load(data)["x_test"]
    labels = [CLASSES.index(p.label) for p in Predictor(shaky)(list(pixels))]
    own = data.parent / "own.npz"
    np.savez(own, x_test=pixels, y_test=np.array(labels), class_names=np.array(CLASSES))
    assert measure_int8(shaky.train(), lambda images: -shaky(images), own).accuracy == 1
