"""What all tests share: one thread, the smallest models, and where the golden vectors are."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from vitrail import VitConfig

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"

torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings


def make_torchvision_importable() -> None:
    """Give torchvision the two operators its CPU-only import misses.

    A torchvision that was built for CUDA cannot load its compiled part beside a CPU torch, and
    then neither timm nor transformers can be imported. Its models and transforms need none of it.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        make_torchvision_importable.keep = library  # or the operators would go with it


@pytest.fixture
def tiny() -> VitConfig:
    """The smallest ViT with more than one of everything: two blocks, two heads, four patches."""
    return VitConfig(
        depth=2, width=8, mlp_width=16, heads=2, patch_size=4, image_size=8, num_classes=3
    )


@pytest.fixture
def golden() -> Path:
    """The folder with the authors' outputs."""
    if not GOLDEN.exists():
        pytest.skip("the golden vectors are not beside this checkout, in ../shared/golden")
    return GOLDEN
