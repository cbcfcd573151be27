import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import Metadata, Preprocessing


@pytest.fixture(scope="session")
def make_model():
    def make(classes=("ape", "bee", "cat"), **changes):
        torch.manual_seed(0)
        model = vitrail.create(
            "ViT-Mu/4", image_size=8, patch_size=4, width=16, mlp_width=32, heads=2, depth=2,
            num_classes=len(classes), **changes,
        )  # fmt: skip
        torch.nn.init.normal_(model.head.weight)
        model.metadata = Metadata(preprocessing=Preprocessing(size=(8, 8)), class_names=classes)
        return model

    return make


@pytest.fixture(scope="session")
def bundle(make_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "bundle"
    vitrail.save(make_model(), folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(7):
        Image.fromarray(rng.integers(0, 255, (9, 12, 3), np.uint8)).save(folder / f"{number}.png")
    return folder
