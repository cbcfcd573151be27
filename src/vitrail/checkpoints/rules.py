"""A foreign format is one table of rules, read in both directions; nothing may be left over.

Reading and writing cannot drift apart, and a partial load is an error, never a log line.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.files import FLOATS, Entry
from vitrail.errors import CheckpointError
from vitrail.models.build import Model, build
from vitrail.models.config import Config
from vitrail.words import listed

Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Rule:
    """Our tensor `ours` is `pack` of their arrays; `unpack` undoes it."""

    ours: str
    theirs: tuple[str, ...]
    pack: Callable[..., Tensor] = lambda array: array
    unpack: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)


def read(entries: Entries, rules: Sequence[Rule], config: Config) -> Model:
    """The model their arrays make. Every array must be used and every weight be given.

    All names and shapes are checked before a value is read: `unpack` of a tensor without values
    says what the shapes must be.
    """
    wanted = {name for rule in rules for name in rule.theirs}
    if missing := sorted(wanted - entries.keys()):
        raise CheckpointError(f"the file has no {listed(missing)}, which the model needs")
    if left_over := sorted(entries.keys() - wanted):
        raise CheckpointError(f"the model has no place for {listed(left_over)}")
    model = build(config)
    places = dict(model.state_dict())
    assert {rule.ours for rule in rules} == places.keys(), "a table must cover its models"
    for rule in rules:
        for name, part in zip(rule.theirs, rule.unpack(places[rule.ours]), strict=True):
            if entries[name].shape != tuple(part.shape):
                raise CheckpointError(
                    f"{name} is {entries[name].shape}; the rest of the file "
                    f"asks for {tuple(part.shape)}"
                )
    model.load_state_dict({rule.ours: packed(rule, entries) for rule in rules}, assign=True)
    return model


def write(model: Model, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Their arrays for a model of ours; what no rule names is left behind."""
    tensors = saved_tensors(model)
    arrays = {}
    for rule in rules:
        parts = rule.unpack(tensors[rule.ours])
        arrays |= zip(rule.theirs, parts, strict=True)
    return {name: array.contiguous() for name, array in arrays.items()}


def same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,))


def first(ours: str, theirs: str) -> Rule:
    """(1, n, D) as (n, D): most libraries keep an axis for the batch."""
    return Rule(ours, (theirs,), lambda array: array.squeeze(0), lambda tensor: (tensor[None],))


def weight_and_bias(ours: str, theirs: str) -> Iterator[Rule]:
    """A module that both have as torch has it."""
    yield same(f"{ours}.weight", f"{theirs}.weight")
    yield same(f"{ours}.bias", f"{theirs}.bias")


def saved_tensors(model: Model) -> dict[str, Tensor]:
    """The weights as they are written: float32, of a model that is what its description says."""
    places = build(model.config).state_dict()
    tensors = model.state_dict()
    for name in sorted(places.keys() | tensors.keys()):
        place, tensor = places.get(name), tensors.get(name)
        if place is None or tensor is None or tensor.shape != place.shape:
            here = None if tensor is None else tuple(tensor.shape)
            there = None if place is None else tuple(place.shape)
            raise CheckpointError(
                f"the model is not what its config says: {name} is {here} and should be {there}; "
                "change a model with vitrail.load(…, num_classes=…), or its config too"
            )
        if tensor.is_meta:
            raise CheckpointError("the model has shapes but no values; nothing can be saved")
    return {n: t.detach().to("cpu", torch.float32).contiguous() for n, t in tensors.items()}


def unwrapped(model: Model) -> Model:
    """The model inside what torch.compile or data parallelism put around it."""
    inner: Any = model
    while not hasattr(inner, "config") or hasattr(inner, "_orig_mod"):
        wrapped = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if wrapped is None:
            raise CheckpointError(f"a {type(model).__name__} is no model of vitrail")
        inner = wrapped
    return inner


def packed(rule: Rule, entries: Entries) -> Tensor:
    parts = [entries[name].read() for name in rule.theirs]
    for name, part in zip(rule.theirs, parts, strict=True):
        if part.dtype not in FLOATS:
            raise CheckpointError(f"{name} holds {part.dtype} values, which are no weights")
    return rule.pack(*parts).to(torch.float32).contiguous()
