"""Every packaged recipe takes two steps: its model made tiny, everything else as it is written."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tiny_runs import write_colors
from vitrail.data.sources import open_source
from vitrail.models.build import build
from vitrail.models.config import BitConfig, VitConfig
from vitrail.models.init import initialize
from vitrail.models.registry import configuration
from vitrail.training.averaging import Average
from vitrail.training.choices import Look, choose, choose_variation
from vitrail.training.feed import Feed, preparation
from vitrail.training.learner import Preprocessing
from vitrail.training.loop import TrainState, train_step
from vitrail.training.objectives import make_objective
from vitrail.training.optimizers import make_optimizers
from vitrail.training.plan import Plan
from vitrail.training.recipes import read_recipe, recipe_names

CLASSES, BATCH = 3, 4
LOOK = Look(pictures=30, classes=CLASSES, side=8, channels=3, multi_label=False, seconds=0.0)


def size_for(settings) -> int:
    """Two patches."""
    return 28 if (settings.model.name or "").endswith("/14") else 32


def tiny_model(settings, *, distillation=True):
    """The recipe's kind of model with as little of everything as there can be."""
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
    settings = choose(read_recipe(name), LOOK, gpu=False, start=None).settings
    settings = replace(settings, batch_size=BATCH, image_sizes=())
    model = tiny_model(settings)
    taught = settings.model.distillation
    teacher = tiny_model(settings, distillation=False) if taught else None
    objective = make_objective(model, settings, teacher=teacher)
    named = {
        n.removeprefix("model."): p for n, p in objective.named_parameters() if p.requires_grad
    }
    before = {n: p.detach().clone() for n, p in named.items()}
    state = TrainState(
        objective=objective,
        wrapped=objective,
        optimizers=make_optimizers(named.items(), settings.optim, 2),
        average=Average(named, settings.average) if settings.average else None,
    )
    source = open_source(write_colors(tmp_path / "colors.npz"))
    augmentation, mixing = choose_variation(settings, LOOK)
    size = size_for(settings)
    plan = Plan(settings=settings, length=settings.steps or 50_000, stages=((0.0, size),))
    how = Preprocessing(size=(size, size))
    feed = Feed(source, how, augmentation, 3, plan)
    prepare = preparation(how, mixing, CLASSES, torch.device("cpu"), epoch=1)
    for state.step in range(2):
        done = train_step(state, plan, feed(state.step), prepare)
        assert np.isfinite([done.loss, done.grad_norm]).all()
        assert len(done.indices) == BATCH
    assert any(not torch.equal(before[n], p) for n, p in named.items())
    assert 0 < plan.rate(1) <= 1
