"""Every backbone works after loading: few-shot, fine-tuning, maps, export and plans."""

import numpy as np
import pytest
import torch

import vitrail
from tiny_models import awake
from tiny_runs import CLASSES, tiny_run, write_folder
from vitrail import BitConfig, ConfigError, VitConfig
from vitrail.cli import main
from vitrail.data.preprocessing import preset
from vitrail.export.session import OnnxEngine
from vitrail.inspection.inspect import inspect_model
from vitrail.inspection.relevance import rollout
from vitrail.models.config import Numerics
from vitrail.planning.plan import make_plan
from vitrail.planning.request import PlanRequest
from vitrail.training.config import ModelSettings

pytestmark = pytest.mark.slow

BASE = VitConfig(
    depth=2, width=16, mlp_width=24, heads=2, patch_size=4, image_size=16, num_classes=0
)
DINO = {"layer_scale": 0.5, "registers": 2}
BACKBONES = {
    "CLIP": BASE.change(pre_norm=True, numerics=Numerics(gelu="quick", norm_eps=1e-5)),
    "SigLIP": BASE.change(pool="map"),
    "DINOv2": BASE.change(**DINO, mlp="swiglu", numerics="transformers"),
    "DINOv3": BASE.change(**DINO, position="rotary", key_bias=False),
    "I-JEPA": BASE.change(pool="mean"),
    "QK-norm": BASE.change(qk_norm=True, norm="rmsnorm", pool="cls+mean"),
    "Axial-ViT": BASE.change(attention="axial", pool="mean"),
    "AxialResNet": BitConfig(blocks=(1, 1), unit="axial", image_size=16, num_classes=0),
}


@pytest.mark.parametrize("kind", BACKBONES)
def test_backbone(kind, tmp_path, capsys):
    config, data = BACKBONES[kind], str(write_folder(tmp_path / "data"))
    model, bundle, taught = awake(config), tmp_path / "bundle", tmp_path / "taught"
    vitrail.save(model, bundle, preprocessing=preset("google", (16, 16)))

    words = ["fewshot", str(bundle), data, "--shots", "5", "--seeds", "1"]
    assert main([*words, "--out", str(taught)]) == 0
    classifier = vitrail.load(taught)
    assert classifier.config == config.change(num_classes=3)
    assert classifier.metadata.class_names == tuple(sorted(CLASSES))

    wide = torch.randn(3, 3, 24, 40)  # another size and aspect ratio
    vitrail.export_model(taught, tmp_path / "model.onnx")  # verified at several sizes
    with torch.no_grad():
        expected = classifier(wide).numpy()
    found = OnnxEngine(tmp_path / "model.onnx")(wide).numpy()
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()

    picture = next((tmp_path / "data").rglob("*.png"))
    if isinstance(config, BitConfig):
        message = "AxialResNet of 2 units.* along lines of feature maps .*so there is no rollout"
        with pytest.raises(ConfigError, match=message):
            rollout(classifier, wide)
    else:
        inspection = inspect_model(taught, [picture], data=data, num_images=4, score=True)
        (image,) = inspection.images
        maps = [image.maps["rollout"], *image.class_maps["relevance"].values()]
        assert {values.shape for values in maps} == {(4, 4)}
        assert all(np.isfinite(values).all() and values.max() == 1 for values in maps)
        assert inspection.attention.entropy.shape == (2, 2)
        assert np.isfinite(inspection.attention.entropy).all()

    plan = make_plan(PlanRequest(model=str(taught), batch_size=4, image_size=24), measure=False)
    assert plan.memory.peak > 0
    model = ModelSettings(image_size=24)
    tiny_run(data, tmp_path / "tuned", start=str(taught), steps=2, model=model)
    assert vitrail.load(tmp_path / "tuned").config.image_size == 24
