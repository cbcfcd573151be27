"""Makes the peers importable before any test of this folder asks for them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # it is on no package's path

from peers import make_torchvision_importable

make_torchvision_importable()


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request) -> torch.dtype:
    """The precision a comparison is made in; each has its own tolerance."""
    return request.param
