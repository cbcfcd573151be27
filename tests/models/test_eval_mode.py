import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import CLASSES, write_colors
from vitrail import Metadata, Preprocessing
from vitrail.data.datasets import open_dataset
from vitrail.export.verify import measure_int8
from vitrail.inspection.attention import attention_for_browser, attention_stats
from vitrail.inspection.relevance import rollout
from vitrail.models.vit import eval_mode
from vitrail.probing.features import features_of

pytestmark = pytest.mark.slow

PIXELS = np.zeros((8, 8, 3), np.uint8)
CALLS = {
    "evaluate": lambda model, data: vitrail.evaluate(model, data),
    "features_of": lambda model, data: features_of(model, open_dataset(data, "test"), cache=False),
    "inspect_model": lambda model, data: vitrail.inspect_model(model, data=data, num_images=4),
    "Predictor": lambda model, data: vitrail.Predictor(model)(PIXELS),
    "Predictor.features": lambda model, data: vitrail.Predictor(model).features(PIXELS),
    "onnx": lambda model, data: vitrail.Predictor(model, engine="onnx")(PIXELS),
    "int8": lambda model, data: measure_int8(model, vitrail.Predictor(model).engine, data),
    "rollout": lambda model, data: rollout(model, torch.zeros(2, 3, 8, 8)),
    "study": lambda model, data: attention_stats(model, [torch.zeros(2, 3, 8, 8)]),
    "browser": lambda model, data: attention_for_browser(model, torch.zeros(3, 8, 8)),
}


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("name", CALLS)
def test_inference_restores_training_mode(name, tmp_path):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3, depth=1, dropout=0.5)
    model.metadata = Metadata(preprocessing=Preprocessing(size=(8, 8)), class_names=CLASSES)
    model.head.eval()  # a frozen submodule
    before, training = modes(model), []
    model.encoder.register_forward_hook(lambda module, *_: training.append(module.training))
    CALLS[name](model, write_colors(tmp_path / "colors.npz", train=6, test=6))
    assert modes(model) == before
    assert not any(training)


def test_mode_is_restored_after_an_error():
    model = vitrail.create("ViT-Mu/4")
    with pytest.raises(ZeroDivisionError), eval_mode(model):
        _ = 1 / 0
    assert all(modes(model))
