"""Shared fixtures: one thread, the smallest model, the golden vectors."""

import os
import re
from pathlib import Path

import pytest
import torch

from vitrail import VitConfig

# A second thread slows tiny models down. `make test-cpus` sets more.
torch.set_num_threads(int(os.environ.get("VITRAIL_TEST_THREADS", "1")))

SLOW = re.compile(r"^pytestmark = (\[[^]]*|.*)\bslow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Do not even import the modules that `-m "not slow"` leaves out: some load large libraries."""
    if config.option.markexpr == "not slow" and collection_path.name.startswith("test_"):
        return True if SLOW.search(collection_path.read_text(encoding="utf-8")) else None
    return None


@pytest.fixture(autouse=True, scope="session")
def separate_cache(tmp_path_factory):
    """Keep the features of tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def float32_on_every_cpu():
    """Train in float32, also on CPUs for which bfloat16 would be chosen."""
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
    """The folder with outputs of the authors' code for random weights."""
    return Path(__file__).parent / "golden"
