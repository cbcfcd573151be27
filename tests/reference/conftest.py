"""Makes the peers importable before any test of this folder asks for them."""

import importlib.util
import sys

import pytest
import torch


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


make_torchvision_importable()


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request) -> torch.dtype:
    """The precision a comparison is made in; each has its own tolerance."""
    return request.param
