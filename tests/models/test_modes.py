"""Whoever looks at a model leaves it in the mode it was in."""

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import CLASSES, write_colors
from vitrail import Facts, Preprocessing
from vitrail.data.datasets import open_dataset
from vitrail.export.guard import measure
from vitrail.inspection.attention import attention_for_browser, study
from vitrail.inspection.rollout import rollout
from vitrail.models.modes import standing_still
from vitrail.probing.features import features_of

PIXELS = np.zeros((8, 8, 3), np.uint8)
LOOKS = {
    "evaluate": lambda model, data: vitrail.evaluate(model, data),
    "features_of": lambda model, data: features_of(model, open_dataset(data, "test"), cache=False),
    "inspect_model": lambda model, data: vitrail.inspect_model(model, data=data, images=4),
    "Predictor": lambda model, data: vitrail.Predictor(model)(PIXELS),
    "Predictor.features": lambda model, data: vitrail.Predictor(model).features(PIXELS),
    "onnx": lambda model, data: vitrail.Predictor(model, engine="onnx")(PIXELS),
    "int8": lambda model, data: measure(model, vitrail.Predictor(model).engine, data),
    "rollout": lambda model, data: rollout(model, torch.zeros(2, 3, 8, 8)),
    "study": lambda model, data: study(model, [torch.zeros(2, 3, 8, 8)]),
    "browser": lambda model, data: attention_for_browser(model, torch.zeros(3, 8, 8)),
}


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("name", LOOKS)
def test_a_model_that_was_looked_at_goes_on_learning(name, tmp_path):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3, depth=1, dropout=0.5)
    model.facts = Facts(preprocessing=Preprocessing(size=(8, 8)), class_names=CLASSES)
    model.head.eval()  # a part of it that is to stand still
    before, seen = modes(model), []
    model.encoder.register_forward_hook(lambda module, *_: seen.append(module.training))
    LOOKS[name](model, write_colors(tmp_path / "colors.npz", train=6, test=6))
    assert modes(model) == before
    assert not any(seen)  # and nothing was dropped meanwhile


def test_a_model_is_put_back_after_an_error_too():
    model = vitrail.create("ViT-Mu/4")
    with pytest.raises(ZeroDivisionError), standing_still(model):
        model.fell = model.training / 0
    assert all(modes(model))
