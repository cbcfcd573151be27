"""What all tests share: one thread, the smallest models, and where the golden vectors are."""

import os
from pathlib import Path

import pytest
import torch

from vitrail import VitConfig

# Tiny models: a second thread costs more than it brings. `make test-cpus` asks for more.
torch.set_num_threads(int(os.environ.get("VITRAIL_TEST_THREADS", "1")))


@pytest.fixture(autouse=True, scope="session")
def features_are_kept_apart(tmp_path_factory):
    """No test reads or leaves features where the user keeps them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def float32_on_every_cpu():
    """Runs train in float32, also where the CPU's instructions would make them choose bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cpu.get_capabilities", dict)
        yield


@pytest.fixture
def tiny() -> VitConfig:
    """The smallest ViT with more than one of everything: two blocks, two heads, four patches."""
    return VitConfig(
        depth=2, width=8, mlp_width=16, heads=2, patch_size=4, image_size=8, num_classes=3
    )


@pytest.fixture
def golden() -> Path:
    """The folder with outputs of the authors' code, of random weights."""
    return Path(__file__).parent / "golden"
