"""Every packaged recipe takes two steps with a tiny model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tiny_runs import write_colors
from vitrail.data.datasets import open_dataset
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.config import BitConfig, VitConfig
from vitrail.models.init import initialize
from vitrail.models.registry import configuration
from vitrail.models.vit import build
from vitrail.training.auto_config import AutoConfig, DatasetStats, choose_augmentation
from vitrail.training.data_module import BatchStream, batch_preparation
from vitrail.training.loop import make_state, train_step
from vitrail.training.objectives import make_objective
from vitrail.training.recipes import read_recipe, recipe_names
from vitrail.training.schedules import Schedule

CLASSES, BATCH = 3, 4
STATS = DatasetStats(images=30, classes=CLASSES, side=8, channels=3, multi_label=False, seconds=0.0)


def size_for(settings) -> int:
    """Two patches."""
    return 28 if (settings.model.name or "").endswith("/14") else 32


def tiny_model(settings, *, distillation=True):
    """Return the smallest model of the recipe's kind."""
    config = configuration(settings.model.name or "ViT-B/16")
    changes = settings.model.changes() | {"image_size": size_for(settings), "num_classes": CLASSES}
    if isinstance(config, BitConfig):
        config = replace(config.change(**changes), blocks=(1, 1), width_factor=1)
    else:
        assert isinstance(config, VitConfig)
        small = {"depth": 2, "width": 16, "mlp_width": 32, "heads": 2}
        small |= {"representation": 16} if changes.get("representation") else {}
        small |= {"resnet_blocks": (1, 1, 1)} if config.resnet_blocks else {}
        small |= {} if distillation else {"distillation": False}
        classes = 0 if settings.objective == "masked-patches" else CLASSES
        config = config.change(**(changes | small | {"num_classes": classes}))
    model = build(config, device="cpu")
    initialize(model, settings.model.init or "google", head_bias=settings.model.head_bias)
    return model


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_takes_two_steps(name, tmp_path):
    settings = AutoConfig(read_recipe(name), STATS, gpu=False, start=None).settings
    settings = replace(settings, batch_size=BATCH, image_sizes=())
    model = tiny_model(settings)
    taught = settings.model.distillation
    teacher = tiny_model(settings, distillation=False) if taught else None
    objective = make_objective(model, settings, teacher=teacher)
    named = {
        n.removeprefix("model."): p for n, p in objective.named_parameters() if p.requires_grad
    }
    before = {n: p.detach().clone() for n, p in named.items()}
    dataset = open_dataset(write_colors(tmp_path / "colors.npz"))
    augmentation, mixing = choose_augmentation(settings, STATS)
    size = size_for(settings)
    schedule = Schedule(settings=settings, length=settings.steps or 50_000, stages=((0.0, size),))
    state = make_state(objective, objective, schedule)
    preprocessing, device = Preprocessing(size=(size, size)), torch.device("cpu")
    batches = BatchStream(dataset, preprocessing, augmentation, 3, schedule)
    prepare = batch_preparation(preprocessing, mixing, CLASSES, device, steps_per_epoch=1)
    for state.step in range(2):
        result = train_step(state, batches(state.step), prepare)
        assert np.isfinite([result.loss, result.grad_norm]).all()
        assert len(result.indices) == BATCH
    assert any(not torch.equal(before[n], p) for n, p in named.items())
    assert 0 < schedule.lr_factor(1) <= 1
