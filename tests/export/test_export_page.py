"""The scripts of docs/export.md run as they stand, where neither vitrail nor torch exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exportable import BASE
from PIL import Image

from tiny_models import awake
from vitrail import Metadata, Preprocessing
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.export.api import export_model

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
NAMES = ("ant", "bee", "cat")


def script(words):
    """The script of the page that feeds the graph with these."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if words in block]
    return found


@pytest.fixture(scope="module")
def model():
    model = awake(BASE)
    model.metadata = Metadata(preprocessing=Preprocessing(size=(8, 8)), class_names=NAMES)
    return model


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    place = np.mgrid[:60, :90]
    waves = [128 + 100 * np.sin(place[0] / 7), 2.5 * place[1], 255 - 2 * place.sum(axis=0) / 2]
    Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def chances(model, picture):
    """What vitrail itself says."""
    how = model.metadata.preprocessing
    with torch.no_grad():
        pixels = EvalTransform(preprocessing=how)(picture.read_bytes())
        return model(normalize(pixels[None], how))[0].softmax(0)


def run_alone(text, folder, *words):
    """A script in a Python in which vitrail and torch cannot be imported."""
    for name in ("torch", "vitrail"):
        (folder / f"{name}.py").write_text("raise ImportError('it is not here')\n")
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py"), *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_picture_is_classified_with_three_libraries(model, picture, chances, tmp_path):
    path = export_model(model, tmp_path / "model.onnx").path
    text = script('{"images": images}')
    assert len(text.strip().splitlines()) <= 17
    assert not {"vitrail", "torch"} & set(re.findall(r"\w+", text))
    told = [line.split() for line in run_alone(text, tmp_path, path, picture).splitlines()]
    order = chances.argsort(descending=True).tolist()
    assert [name for _, name in told] == [NAMES[place] for place in order]
    for (share, _), place in zip(told, order, strict=True):
        assert float(share.rstrip("%")) / 100 == pytest.approx(float(chances[place]), abs=0.02)


def test_a_file_with_preprocessing_needs_nothing_but_pixels(model, picture, chances, tmp_path):
    path = export_model(model, tmp_path / "model.onnx", preprocessing=True).path
    told = run_alone(script('{"pixels": pixels}'), tmp_path, path, picture)
    assert told.strip() == NAMES[int(chances.argmax())]


def test_vitrail_is_really_out_of_reach(tmp_path):
    with pytest.raises(AssertionError, match="it is not here"):
        run_alone("import vitrail", tmp_path)
