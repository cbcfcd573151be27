"""The same model with another head: a map of its features that was found in some other way."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitrail.checkpoints.adapt import HEADS
from vitrail.checkpoints.facts import facts_of
from vitrail.errors import ConfigError
from vitrail.models.build import Model, build
from vitrail.models.config import VitConfig


@torch.no_grad()
def with_head(model: Model, weight: Tensor, bias: Tensor, class_names: Sequence[str] = ()) -> Model:
    """The model whose logits are features @ weight.T + bias: weight (K, D), bias (K,).

    All other weights are shared with `model`, which stays as it is.
    """
    config = model.config.change(num_classes=len(bias))
    state = {name: x for name, x in model.state_dict().items() if name.split(".")[0] not in HEADS}
    like = next(model.parameters())
    weight, bias = (x.detach().to(like.device, like.dtype) for x in (weight, bias))
    if isinstance(config, VitConfig) and config.distillation:
        # Two heads are averaged: one says it twice as loud, the other says nothing.
        state |= {"head.weight": 2 * weight, "head.bias": 2 * bias}
        state["distillation_head.weight"] = torch.zeros_like(weight)
        state["distillation_head.bias"] = torch.zeros_like(bias)
    else:
        state |= {"head.weight": weight, "head.bias": bias}
    changed = build(config)
    changed.load_state_dict(state, assign=True)
    changed.facts = replace(facts_of(model), class_names=tuple(class_names))
    return changed.train(model.training)


@torch.no_grad()
def with_temperature(model: Model, temperature: float) -> Model:
    """The model with its logits divided by a number, which is what its head then does.

    So calibrated probabilities come out wherever the weights go, in whatever format.
    """
    if model.head is None:
        raise ConfigError("the model has no head, and so no logits to divide by a temperature")
    state = {
        name: x / temperature if name.split(".")[0] in HEADS else x
        for name, x in model.state_dict().items()
    }
    changed = build(model.config)
    changed.load_state_dict(state, assign=True)
    facts = facts_of(model)
    before = facts.provenance.get("temperature", 1.0)
    told = dict(facts.provenance) | {"temperature": round(before * temperature, 6)}
    changed.facts = replace(facts, provenance=told)
    return changed.train(model.training)
