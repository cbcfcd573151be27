"""A foreign format is one table of rules, read in both directions; nothing may be left over.

Reading and writing cannot drift apart, and a partial load is an error, never a log line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.models.build import Model, build
from vitrail.models.config import Config

Arrays = Mapping[str, Tensor]
SHOWN = 5  # names in a message; more would hide what it says


@dataclass(frozen=True, slots=True)
class Rule:
    """Our tensor `ours` is `pack` of their arrays; `unpack` undoes it."""

    ours: str
    theirs: tuple[str, ...]
    pack: Callable[..., Tensor] = lambda array: array
    unpack: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)


def read(arrays: Arrays, rules: Sequence[Rule], config: Config) -> Model:
    """The model their arrays make. Every array must be used and every weight be given."""
    wanted = {name for rule in rules for name in rule.theirs}
    if missing := sorted(wanted - arrays.keys()):
        raise CheckpointError(f"the file has no {listed(missing)}, which the model needs")
    if left_over := sorted(arrays.keys() - wanted):
        raise CheckpointError(f"the model has no place for {listed(left_over)}")
    model = build(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tensors = {}
    for rule in rules:
        tensor = packed(rule, arrays)
        if rule.ours not in shapes or tensor.shape != shapes[rule.ours]:
            raise CheckpointError(
                f"{listed(rule.theirs)} {given_shapes(rule, arrays)} do not fit the model, "
                f"whose {rule.ours} is {tuple(shapes.get(rule.ours, ()))}"
            )
        tensors[rule.ours] = tensor
    if absent := sorted(shapes.keys() - tensors.keys()):
        raise CheckpointError(f"the file says nothing about {listed(absent)}")
    model.load_state_dict(tensors, assign=True)
    return model


def write(model: Model, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Their arrays for a model of ours."""
    tensors = dict(model.state_dict())
    arrays = {}
    for rule in rules:
        parts = rule.unpack(tensors.pop(rule.ours))
        arrays |= zip(rule.theirs, parts, strict=True)
    if tensors:
        raise CheckpointError(f"the format has no place for {listed(sorted(tensors))}")
    return {name: array.contiguous() for name, array in arrays.items()}


def packed(rule: Rule, arrays: Arrays) -> Tensor:
    parts = [arrays[name] for name in rule.theirs]
    try:
        return rule.pack(*parts).to(torch.float32).contiguous()
    except (RuntimeError, IndexError, TypeError):  # torch's words for a shape that cannot be turned
        shapes = given_shapes(rule, arrays)
        raise CheckpointError(f"{listed(rule.theirs)} cannot be used: {shapes}") from None


def given_shapes(rule: Rule, arrays: Arrays) -> str:
    return ", ".join(str(tuple(arrays[name].shape)) for name in rule.theirs)


def listed(names: Sequence[str]) -> str:
    """The names, or the first few and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
