"""`export`: proved before it is written, whole or absent, and clear about what cannot be."""

import copy
import json
import os
import shutil
import sys
import zipfile

import numpy as np
import onnx
import pytest
import torch
from exportable import BASE, CONFIGS

import vitrail
from tiny_models import awake
from vitrail import CheckpointError, ConfigError, Metadata, Preprocessing
from vitrail.export import api, networks, programs
from vitrail.export.api import export_model
from vitrail.export.sessions import open_session


@pytest.fixture
def model():
    model = awake(BASE)
    model.metadata = Metadata(
        preprocessing=Preprocessing(size=(8, 8), mean=(0.4,) * 3),
        class_names=("ant", "bee", "cat é"),
        provenance={"data": "insects", "steps": 3},
        multi_label=True,
    )
    return model


def test_a_reference_becomes_a_file(model, tmp_path):
    vitrail.save(model, tmp_path / "bundle")
    done = export_model(tmp_path / "bundle", tmp_path / "model.onnx")
    assert done.path.stat().st_size == done.bytes
    assert done.difference < 1e-5
    assert list(tmp_path.glob("model.*")) == [done.path]
    images = torch.randn(2, 3, 8, 8)
    found = open_session(done.path, 1).run(["logits"], {"images": images.numpy()})[0]
    with torch.no_grad():
        assert np.allclose(found, model(images), atol=1e-5)


def test_the_file_says_everything_about_itself(model, tmp_path):
    done = export_model(model, tmp_path / "model.onnx")
    about = {each.key: json.loads(each.value) for each in onnx.load(done.path).metadata_props}
    assert about["class_names"] == ["ant", "bee", "cat é"]
    assert about["preprocessing"]["mean"] == [0.4, 0.4, 0.4]
    assert about["provenance"] == {"data": "insects", "steps": 3}
    assert about["multi_label"] is True
    assert about["vitrail"] == vitrail.__version__
    assert about["int8"] is False


def test_nothing_is_written_if_the_export_is_not_the_model(model, tmp_path, monkeypatch):
    head = networks.head
    monkeypatch.setattr(networks, "head", lambda graph, *given: graph("Neg", head(graph, *given)))
    for preprocessing in (False, True):
        with pytest.raises(CheckpointError, match=r"other numbers than the model.*nothing was"):
            export_model(model, tmp_path / "model.onnx", preprocessing=preprocessing)
    assert not list(tmp_path.iterdir())


def test_a_model_of_broken_numbers_is_not_written(model, tmp_path):
    model.head.bias.data[0] = torch.nan
    with pytest.raises(CheckpointError, match="by nan of the largest"):
        export_model(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_on_demand(model, tmp_path):
    export_model(model, tmp_path / "model.onnx")
    before = (tmp_path / "model.onnx").read_bytes()
    model.head.bias.data += 1
    with pytest.raises(ConfigError, match=r"exists already; name another --out, or say --overw"):
        export_model(model, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == before
    export_model(model, tmp_path / "model.onnx", overwrite=True)
    assert (tmp_path / "model.onnx").read_bytes() != before


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("m.pt", {}, r"m.pt does not end as a file for --to onnx does; try .*m.onnx"),
        ("m.onnx", {"to": "torch"}, r"--to torch does; try .*m.pt2"),
        ("m.pt2", {"to": "torch", "int8": True}, "int8 is for --to onnx, not torch"),
        ("m.pt2", {"to": "torch", "preprocessing": True}, "preprocessing is for --to onnx"),
        ("m.onnx", {"data": "pictures"}, "say --int8 too, or leave it out"),
        ("m.onnx", {"int8": True, "max_drop": 3}, "max_drop=3 must be a share"),
        ("m.onnx", {"to": "onyx"}, "unknown target 'onyx'; did you mean 'onnx'?"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(name, settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        export_model("no such model", tmp_path / name, **settings)


def test_a_model_in_training_or_in_half_precision_is_left_as_it_is(model, tmp_path):
    training = copy.deepcopy(model).to(torch.bfloat16).train()
    export_model(training, tmp_path / "model.onnx")
    assert training.training
    assert training.head.weight.dtype == torch.bfloat16


def test_what_is_no_model_of_ours_cannot_be_exported(tmp_path):
    with torch.device("meta"):
        shapes = vitrail.create("ViT-Mu/4")
    with pytest.raises(CheckpointError, match="shapes but no values"):
        export_model(shapes, tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match="a Linear is not a vitrail model"):
        export_model(torch.nn.Linear(2, 2), tmp_path / "model.onnx")


def test_a_mixer_says_that_its_size_is_fixed(tmp_path):
    done = export_model(awake(CONFIGS["Mixer"]), tmp_path / "model.onnx")
    assert done.notes == ("a Mixer's weights are tied to its size: it takes 8x8 pixels only",)


def test_a_missing_library_is_told_with_its_cure(model, tmp_path, monkeypatch):
    for missing in ("onnx", "onnxruntime"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            with pytest.raises(ConfigError, match=rf"ONNX needs {missing}; .*'vitrail\[export\]'"):
                export_model(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_is_one_line(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        export_model(model, tmp_path / "file" / "model.onnx")


def test_a_torch_program_runs_without_us_and_knows_its_classes(tmp_path):
    model = awake(CONFIGS["distillation"])
    done = export_model(model, tmp_path / "model.pt2", to="torch")
    assert done.notes == ("it takes any number of images, of 8x8 pixels",)
    extra = {programs.ABOUT: ""}
    program = torch.export.load(done.path, extra_files=extra).module()
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        found = program(images)
        torch.testing.assert_close(found["logits"], model(images))
        torch.testing.assert_close(found["features"], model.features(images))
    assert json.loads(extra[programs.ABOUT])["vitrail"] == vitrail.__version__


def test_without_a_compiler_aotinductor_says_so(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*install g\+\+, or export --to"):
        export_model(model, tmp_path / "model.pt2", to="aotinductor")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="AOTInductor needs a C++ compiler"
)
def test_a_compiled_package_is_the_model(tmp_path):
    model = awake(BASE.change(depth=1))
    quick = {"compile_threads": 1, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with torch._inductor.config.patch(quick):
        done = export_model(model, tmp_path / "model.pt2", to="aotinductor")
    assert done.difference < 1e-5
    assert zipfile.is_zipfile(done.path)


def test_every_target_has_its_ending():
    assert api.SUFFIXES.keys() == set(api.get_args(api.Target))
