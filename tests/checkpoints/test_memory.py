"""Peak memory of loading is close to the size of the model."""

import subprocess
import sys
from pathlib import Path

import pytest

from vitrail import save
from vitrail.models.registry import configuration
from vitrail.models.vit import build

pytestmark = pytest.mark.slow

MEASURE = """
import sys
from vitrail import create, load

def now(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

create("ViT-Mu/4")  # everything that loading needs is imported
before = now("VmRSS")
model = load(sys.argv[1])
size = sum(p.nbytes for p in model.parameters())
print((now("VmHWM") - before) / size)
"""
FORMATS = {"model": "bundle", "model.npz": "google", "folder": "huggingface"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_of_loading(tmp_path):
    model = build(configuration("ViT-S/16"), device="cpu")  # any values will do
    for name, format in FORMATS.items():
        save(model, tmp_path / name, format)
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / name)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 1.3, format
