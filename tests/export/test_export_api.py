"""`export_model`: files are verified before they are written, and int8 is measured."""

import copy
import json
import os
import shutil
import zipfile

import numpy as np
import onnx
import pytest
import torch
from exportable import CONFIGS, SMALLEST, WIDE

import vitrail
from tiny_models import awake
from tiny_runs import write_colors
from vitrail import CheckpointError, ConfigError, Metadata, Preprocessing
from vitrail.checkpoints.metadata import get_metadata
from vitrail.export.api import export_model
from vitrail.export.onnx import OPERATIONS, to_onnx
from vitrail.export.session import OnnxEngine, open_session
from vitrail.export.torch_program import METADATA_FILE
from vitrail.export.verify import measure_int8

pytestmark = pytest.mark.slow


@pytest.fixture
def model():
    model = awake(SMALLEST)
    model.metadata = Metadata(
        preprocessing=Preprocessing(size=(8, 8), mean=(0.4,) * 3),
        class_names=("ant", "bee", "cat é"),
        provenance={"data": "insects", "steps": 3},
        multi_label=True,
    )
    return model


def test_bundle_is_exported_with_its_metadata(model, tmp_path):
    vitrail.save(model, tmp_path / "bundle")
    (tmp_path / "model.onnx").write_text("older")
    with pytest.raises(ConfigError, match=r"exists; choose another --out, or use --overwrite"):
        export_model(tmp_path / "bundle", tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_text() == "older"
    done = export_model(tmp_path / "bundle", tmp_path / "model.onnx", overwrite=True)
    assert done.path.stat().st_size == done.bytes
    assert done.difference < 1e-5
    assert list(tmp_path.glob("model.*")) == [done.path]
    images = torch.randn(2, 3, 8, 8)
    session = open_session(done.path, 1)
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    found = session.run(["logits"], {"images": images.numpy()})[0]
    with torch.no_grad():
        assert np.allclose(found, model(images), atol=1e-5)
    metadata = {each.key: json.loads(each.value) for each in onnx.load(done.path).metadata_props}
    assert metadata["class_names"] == ["ant", "bee", "cat é"]
    assert metadata["preprocessing"]["mean"] == [0.4, 0.4, 0.4]
    assert metadata["provenance"] == {"data": "insects", "steps": 3}
    assert metadata["multi_label"] is True
    assert metadata["vitrail"] == vitrail.__version__
    assert metadata["int8"] is False


def test_nothing_is_written_if_outputs_differ(model, tmp_path, monkeypatch):
    monkeypatch.setitem(OPERATIONS, "gelu", lambda graph, out, x, **_: graph.emit("Relu", x))
    for preprocessing in (False, True):
        with pytest.raises(CheckpointError, match=r"differ from the model's by .*nothing was"):
            export_model(model, tmp_path / "model.onnx", preprocessing=preprocessing)
    monkeypatch.undo()
    model.head.bias.data[0] = torch.nan
    with pytest.raises(CheckpointError, match="by nan of the largest"):
        export_model(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("m.pt", {}, r"m.pt has the wrong suffix for --to onnx; try .*m.onnx"),
        ("m.onnx", {"to": "torch"}, r"for --to torch; try .*m.pt2"),
        ("m.pt2", {"to": "torch", "int8": True}, "int8 works with --to onnx or html, not with"),
        ("m.pt2", {"to": "torch", "preprocessing": True}, "preprocessing works with --to onnx"),
        ("m.onnx", {"data": "images"}, "add --int8, or leave it out"),
        ("m.onnx", {"int8": True, "max_drop": 3}, "max_drop=3 must be a fraction"),
        ("m.onnx", {"to": "onyx"}, "unknown target 'onyx'; did you mean 'onnx'?"),
        ("m.onnx", {"examples": "images"}, "examples works with --to html"),
        ("m.html", {"to": "html", "preprocessing": True}, "preprocessing works with --to onnx"),
    ],
)
def test_incompatible_options_are_rejected_before_any_work(name, settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        export_model("no such model", tmp_path / name, **settings)


def test_models_in_training_mode_or_half_precision_are_not_modified(model, tmp_path):
    training = copy.deepcopy(model).to(torch.bfloat16).train()
    export_model(training, tmp_path / "model.onnx")
    assert training.training
    assert training.head.weight.dtype == torch.bfloat16


def test_models_without_values_foreign_modules_and_unwritable_folders_are_rejected(tmp_path):
    with torch.device("meta"):
        shapes = vitrail.create("ViT-Mu/4")
    with pytest.raises(CheckpointError, match="has no weights to export"):
        export_model(shapes, tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match="a Linear is not a vitrail model"):
        export_model(torch.nn.Linear(2, 2), tmp_path / "model.onnx")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        export_model(awake(SMALLEST), tmp_path / "file" / "model.onnx")


def test_torch_program_runs_without_vitrail(tmp_path):
    model = awake(CONFIGS["distillation"])
    done = export_model(model, tmp_path / "model.pt2", to="torch")
    assert done.notes == ("it takes any number of images of 8x8 pixels",)
    extra = {METADATA_FILE: ""}
    program = torch.export.load(done.path, extra_files=extra).module()
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        found = program(images)
        torch.testing.assert_close(found["logits"], model(images))
        torch.testing.assert_close(found["features"], model.features(images))
    assert json.loads(extra[METADATA_FILE])["vitrail"] == vitrail.__version__


def test_missing_compiler_is_reported(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*install g\+\+, or export --to"):
        export_model(model, tmp_path / "model.pt2", to="aotinductor")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="AOTInductor needs a C++ compiler"
)
def test_aotinductor_package_is_verified(tmp_path):
    model = awake(SMALLEST)
    quick = {"compile_threads": 1, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with torch._inductor.config.patch(quick):
        done = export_model(model, tmp_path / "model.pt2", to="aotinductor")
    assert done.difference < 1e-5
    assert zipfile.is_zipfile(done.path)


# int8: never without measuring its accuracy


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return write_colors(tmp_path_factory.mktemp("colors") / "colors.npz", test=41)


@pytest.fixture
def trained(colors):
    model = awake(WIDE)
    model.metadata = Metadata(
        preprocessing=get_metadata(model).preprocessing, provenance={"data": str(colors)}
    )
    return model


def test_both_accuracies_are_measured_on_the_training_datas_test_split(trained, colors, tmp_path):
    done = export_model(trained, tmp_path / "model.onnx", int8=True, max_drop=1)
    assert done.cost.images == 41
    assert done.cost.data == str(colors)
    assert done.cost.accuracy == vitrail.evaluate(trained, colors).accuracy
    assert OnnxEngine(done.path, threads=1).int8
    assert "split: test" in done.notes


def constant(model, answer):
    """Make a model predict one class for every image."""
    model.head.weight.data.zero_()
    model.head.bias.data = 9.0 * torch.nn.functional.one_hot(torch.tensor(answer), 3)
    return model


def test_drop_beyond_the_limit_is_rejected_with_both_accuracies(trained, tmp_path, monkeypatch):
    constant(trained, 0)  # correct for 14 of the 41 images
    worse = to_onnx(constant(awake(WIDE), 2), int8=True)  # for 13
    monkeypatch.setattr("vitrail.export.onnx.to_onnx", lambda *_, **__: worse)
    message = r"int8 accuracy 31.7 %, float 34.1 % \(n=41, .*: the drop exceeds max_drop=0.01"
    with pytest.raises(CheckpointError, match=message):
        export_model(trained, tmp_path / "model.onnx", int8=True)
    assert not list(tmp_path.iterdir())
    measured = measure_int8(trained, OnnxEngine(worse, threads=1))
    measured.check(0.03)
    assert measured.accuracy - measured.int8_accuracy == pytest.approx(1 / 41)


@pytest.mark.parametrize("name", ["model.onnx", "page.html"])
def test_int8_without_labeled_images_is_rejected(trained, tmp_path, name):
    to = "html" if name == "page.html" else "onnx"
    preprocessing = trained.metadata.preprocessing
    trained.metadata = Metadata(preprocessing=preprocessing)
    with pytest.raises(ConfigError, match=r"must be measured; pass --data"):
        export_model(trained, tmp_path / name, int8=True, to=to)
    gone = {"data": str(tmp_path / "gone")}
    trained.metadata = Metadata(preprocessing=preprocessing, provenance=gone)
    with pytest.raises(ConfigError, match=r"training data cannot be opened: .*gone.*; pass --data"):
        export_model(trained, tmp_path / name, int8=True, to=to)
    assert not list(tmp_path.iterdir())


def test_given_data_takes_precedence_and_int8_may_include_preprocessing(trained, tmp_path):
    data = write_colors(tmp_path / "others.npz", test=7)
    settings = {"int8": True, "preprocessing": True, "data": data, "max_drop": 1}
    done = export_model(trained, tmp_path / "m.onnx", **settings)
    assert (done.cost.images, done.cost.data) == (7, str(data))
    assert done.difference < 0.5
    (given,) = open_session(done.path, 1).get_inputs()
    assert (given.name, given.type) == ("pixels", "tensor(uint8)")
    assert given.shape == ["batch", "height", "width", 3]
