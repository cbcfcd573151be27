"""A foreign format is one table of rules, read in both directions; nothing may be left over.

Reading and writing cannot drift apart, and a partial load is an error, never a log line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.checkpoints.files import FLOATS, Entry
from vitrail.errors import CheckpointError
from vitrail.models.build import Model, build
from vitrail.models.config import Config

Entries = Mapping[str, Entry]
SHOWN = 5  # names in a message; more would hide what it says


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
    tensors = model.state_dict()
    arrays = {}
    for rule in rules:
        parts = rule.unpack(tensors[rule.ours].detach())
        arrays |= zip(rule.theirs, parts, strict=True)
    return {name: array.contiguous() for name, array in arrays.items()}


def same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,))


def first(ours: str, theirs: str) -> Rule:
    """(1, n, D) as (n, D): most libraries keep an axis for the batch."""
    return Rule(ours, (theirs,), lambda array: array.squeeze(0), lambda tensor: (tensor[None],))


def packed(rule: Rule, entries: Entries) -> Tensor:
    parts = [entries[name].read() for name in rule.theirs]
    for name, part in zip(rule.theirs, parts, strict=True):
        if part.dtype not in FLOATS:
            raise CheckpointError(f"{name} holds {part.dtype} values, which are no weights")
    return rule.pack(*parts).to(torch.float32).contiguous()


def listed(names: Sequence[str]) -> str:
    """The names, or the first few and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
