"""`vitrail export`: options and output."""

import json

import pytest
import torch
import tyro

import vitrail
from tiny_runs import write_colors
from vitrail.cli.export import Export

pytestmark = pytest.mark.slow


def run(*words):
    tyro.cli(Export, args=[str(word) for word in words]).run()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    data = write_colors(folder / "colors.npz")
    torch.manual_seed(0)
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3)
    vitrail.save(model, folder / "bundle", provenance={"data": str(data)})
    return folder / "bundle"


def test_export_reports_the_verified_difference(bundle, tmp_path, capsys):
    run(bundle, "--out", tmp_path / "model.onnx")
    printed = capsys.readouterr().out
    assert "ViT-Mu/4" in printed
    assert "verified: largest relative difference of logits and features" in printed
    assert f"{tmp_path}/model.onnx" in printed
    assert (tmp_path / "model.onnx").exists()


def test_int8_reports_both_accuracies(bundle, tmp_path, capsys):
    words = ("--out", tmp_path / "model.onnx", "--int8", "--max-drop", "1", "--with-preprocessing")
    run(bundle, *words, "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["cost"]["pictures"] == 12
    assert values["cost"].keys() >= {"accuracy", "int8_accuracy", "data"}
    assert values["path"] == str(tmp_path / "model.onnx")
    run(bundle, *words, "--overwrite")
    assert "(n=12," in capsys.readouterr().out
