"""The scripts and the notebook in examples/ run with one training step and a few images."""

import inspect
import json
import runpy
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.checkpoints import builtin
from vitrail.models.config import PositionKind

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
MOMENT = 0.001  # minutes: one step
LONGEST = 61  # lines: a screen


def script(name: str) -> dict:
    """What a script defines; it does nothing until its `main` is called."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


@pytest.fixture
def pictures(tmp_path) -> str:
    """A folder of two classes; one test picture is in the wrong one."""
    rng = np.random.default_rng(0)
    places = [(split, name) for split in ("train", "test") for name in ("dark", "light")]
    for split, name in places:
        folder = tmp_path / "pictures" / split / name
        folder.mkdir(parents=True)
        for number in range(6):
            light = (name == "light") != (split == "test" and number == 0)
            pixels = rng.integers(0, 100, (16, 16, 3)) + 150 * light
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return str(tmp_path / "pictures")


def test_train_a_folder(pictures, tmp_path, capsys):
    findings = script("train_a_folder")["main"](pictures, tmp_path / "out", MOMENT)
    said = capsys.readouterr().out
    assert findings.samples == 12
    assert f"test accuracy {findings.accuracy:.1%} (95 % CI " in said
    assert said.count(", confidence ") == 3
    assert (tmp_path / "out" / "model" / "report.html").exists()


def test_transfer_at_higher_resolution(pictures, tmp_path, capsys):
    main = script("transfer_at_higher_resolution")["main"]
    assert len(main(pictures, tmp_path / "out", MOMENT)) == 3
    said = capsys.readouterr().out
    assert "4 x 4 -> 8 x 8" in said
    assert (tmp_path / "out" / "large" / "report.html").exists()


def test_compare_positions(pictures, tmp_path, capsys):
    compare = script("compare_positions")
    assert set(compare["KINDS"]) <= set(get_args(PositionKind))
    found = compare["main"](pictures, tmp_path / "out", MOMENT, kinds=("none", "relative"))
    assert [*found] == ["none", "relative"]
    assert all(0 <= estimate.low <= estimate.value <= estimate.high for estimate in found.values())
    assert "not clearly worse" in capsys.readouterr().out


def test_explain_a_mistake(pictures, tmp_path, capsys):
    found = script("explain_a_mistake")["main"](pictures, tmp_path / "out", MOMENT)
    assert {*found.images[0].class_maps["relevance"]} == {"dark", "light"}
    assert capsys.readouterr().out.count(" is most relevant in row ") == 2
    assert (tmp_path / "out" / "mistake.png").exists()
    assert (tmp_path / "out" / "inspection" / "report.html").exists()


def test_serve_and_call(tmp_path, capfd):
    script("serve_and_call")["main"](out=tmp_path / "out", minutes=MOMENT)
    said = capfd.readouterr().out
    assert said.count(", confidence ") == 5
    assert "the server exited with status 0" in said
    assert (tmp_path / "out" / "4.png").read_bytes().startswith(b"\x89PNG")


def test_tutorial(tmp_path, capsys, monkeypatch):
    """Its cells are run one after the other, as a kernel would."""
    notebook = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert "tutorial.ipynb" in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(builtin, "FOLDER", tmp_path / "builtin")  # with a tiny model
    tiny = vitrail.create("ViT-Mu/4", image_size=32, patch_size=8, num_classes=0)
    vitrail.save(tiny, tmp_path / "builtin" / "vit-photos")
    names = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        if "MINUTES" in names:
            names["MINUTES"] = MOMENT
    said = capsys.readouterr().out
    assert "1,653 training and 409 test images of 10 classes" in said
    assert said.count("accuracy ") >= 3
    assert "layer 0: " in said
    assert "5 images per class: accuracy " in said
    assert 0 <= names["rollout"].min() <= names["rollout"].max() <= 1
    assert names["prediction"].label in "0123456789"
    assert "of the sets contain the label" in said
    assert names["comparison"].samples == 409
    assert names["answer"]["prediction_set"]
    assert all((names["OUT"] / f"digits.{kind}").exists() for kind in ("onnx", "html"))
    assert names["OUT"].parent == tmp_path


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_examples_are_short_listed_and_need_no_arguments(path):
    assert f"examples/{path.name}" in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST
    found = runpy.run_path(str(path))
    assert f"python examples/{path.name}" in found["__doc__"]
    options = inspect.signature(found["main"]).parameters.values()
    assert all(option.default is not inspect.Parameter.empty for option in options)
