"""The scripts of docs/export.md run without vitrail and torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exportable import SMALLEST
from PIL import Image

from tiny_models import awake
from vitrail import Metadata, Preprocessing
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.export.api import export_model

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
NAMES = ("ant", "bee", "cat")


COVER = {"resize": "short-side", "resize_to": (11, 11), "interpolation": "bicubic"}


@pytest.mark.parametrize(("preprocessing", "fields"), [(False, {}), (False, COVER), (True, {})])
def test_script_classifies_an_image(tmp_path, preprocessing, fields):
    model, settings = awake(SMALLEST), Preprocessing(size=(8, 8), **fields)
    model.metadata = Metadata(preprocessing=settings, class_names=NAMES)
    place = np.mgrid[:60, :90]
    waves = [128 + 100 * np.sin(place[0] / 7), 2.5 * place[1], 255 - place.sum(axis=0)]
    pixels = np.stack(waves, axis=-1).astype(np.uint8)
    exif = Image.Exif()
    exif[274] = 6 if fields else 1  # rotated
    kind = "jpg" if fields else "png"
    Image.fromarray(pixels).save(tmp_path / f"image.{kind}", exif=exif)
    export_model(model, tmp_path / "model.onnx", preprocessing=preprocessing)
    scripts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (text,) = [x for x in scripts if ('{"pixels": pixels}' in x) is preprocessing and "argv" in x]
    assert len(text.strip().splitlines()) <= 25
    assert not {"vitrail", "torch"} & set(re.findall(r"\w+", text))
    for name in ("torch", "vitrail"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n")
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, "script.py", "model.onnx", f"image.{kind}"]
    how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}, "timeout": 200}
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        data = (tmp_path / f"image.{kind}").read_bytes()
        image = EvalTransform(preprocessing=settings)(data)
        expected = model(normalize(image[None], settings))[0].softmax(0)
    order = expected.argsort(descending=True).tolist()
    if preprocessing:
        assert done.stdout.strip() == NAMES[order[0]]
        return
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for _, name in lines] == [NAMES[index] for index in order]
    shown = [float(probability.rstrip("%")) / 100 for probability, _ in lines]
    assert shown == pytest.approx(expected[order].tolist(), abs=0.02)
