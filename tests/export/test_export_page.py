"""The scripts of docs/export.md run without vitrail and torch."""

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

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
NAMES = ("ant", "bee", "cat")


def script(words):
    """The script of the page that contains these words."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if words in block]
    return found


@pytest.fixture(scope="module")
def model():
    model = awake(BASE)
    model.metadata = Metadata(preprocessing=Preprocessing(size=(8, 8)), class_names=NAMES)
    return model


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "image.png"
    place = np.mgrid[:60, :90]
    waves = [128 + 100 * np.sin(place[0] / 7), 2.5 * place[1], 255 - 2 * place.sum(axis=0) / 2]
    Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def probabilities(model, image):
    """Probabilities of the model in torch."""
    how = model.metadata.preprocessing
    with torch.no_grad():
        pixels = EvalTransform(preprocessing=how)(image.read_bytes())
        return model(normalize(pixels[None], how))[0].softmax(0)


def run_alone(text, folder, *words):
    """Run a script where vitrail and torch cannot be imported; return its output."""
    for name in ("torch", "vitrail"):
        (folder / f"{name}.py").write_text("raise ImportError('not installed')\n")
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


def test_image_is_classified_with_three_libraries(model, image, probabilities, tmp_path):
    path = export_model(model, tmp_path / "model.onnx").path
    text = script('{"images": images}')
    assert len(text.strip().splitlines()) <= 17
    assert not {"vitrail", "torch"} & set(re.findall(r"\w+", text))
    lines = [line.split() for line in run_alone(text, tmp_path, path, image).splitlines()]
    order = probabilities.argsort(descending=True).tolist()
    assert [name for _, name in lines] == [NAMES[index] for index in order]
    shown = [float(probability.rstrip("%")) / 100 for probability, _ in lines]
    assert shown == pytest.approx(probabilities[order].tolist(), abs=0.02)


def test_file_with_preprocessing_takes_pixels(model, image, probabilities, tmp_path):
    path = export_model(model, tmp_path / "model.onnx", preprocessing=True).path
    lines = run_alone(script('{"pixels": pixels}'), tmp_path, path, image)
    assert lines.strip() == NAMES[int(probabilities.argmax())]
