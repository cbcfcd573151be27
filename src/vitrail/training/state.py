"""The resumable state of a run: whole or absent, whenever the power fails.

    RUN/state/step-1200/state.json       what goes on: step, rates, names; and a digest of each file
                        .metadata        which part of which tensor is where   (torch's)
                        __0_0.distcp     the tensors that process 0 wrote      (torch's)

A state is written under a hidden name, settled on the disk, and renamed. Tensors go by the
objective's names, so that any number of processes, with copies ("ddp") or parts ("fsdp"), goes on
from what any other wrote. Torch's `get_state_dict` is not used: it takes a step with zero gradients
if an optimizer has not yet taken one, and a state must be what was there, to the last bit.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail import distributed
from vitrail.errors import CheckpointError
from vitrail.training.state_folder import add_state, newest_whole, remove_all, states, together

OF_THE_MACHINE = ("fused", "foreach", "capturable", "differentiable")  # how, not what, is computed


def save_state(
    folder: Path,
    *,
    objective: nn.Module,
    optimizers: list[Optimizer],
    average: dict[str, Tensor] | None,
    extra: dict[str, Any],
) -> None:
    """Add a state to the run in `folder`; all processes call this. `extra` holds the step."""
    note: dict[str, Any] = {"extra": extra}
    tensors = weights_of(objective, average)
    names = names_of(objective)
    note["optimizers"] = [groups_of(optimizer, names) for optimizer in optimizers]
    note["values"] = {}  # of optimizers: single numbers, which would each cost as much as a matrix
    for name, value in memory_of(optimizers, names).items():
        if isinstance(value, Tensor) and value.ndim:
            tensors[name] = value
        else:
            note["values"][name] = plain(value)
    note["tensors"] = {name: looks(tensor) for name, tensor in tensors.items()}
    add_state(folder / "state", extra["step"], note, tensors)


def load_state(
    folder: Path,
    *,
    objective: nn.Module,
    optimizers: list[Optimizer],
    average: dict[str, Tensor] | None,
) -> dict[str, Any]:
    """Go on from the newest state that is undamaged; all processes call this.

    Gives what was saved as `extra`, and under "damaged" what was wrong with newer states, if any.
    """
    place, note, damaged = newest_whole(folder / "state")
    fill(place, note, objective, optimizers, average)
    return note["extra"] | ({"damaged": damaged} if damaged else {})


def has_state(folder: Path) -> bool:
    """There is something to go on from."""
    return bool(states(folder / "state"))


def remove_state(folder: Path) -> None:
    """Forget all states of the run in `folder`: the first process does it, and nobody waits."""
    if distributed.is_main():
        remove_all(folder / "state")


def weights_of(objective: nn.Module, average: dict[str, Tensor] | None) -> dict[str, Tensor]:
    weights = distributed.unwrap(objective).state_dict()
    tensors = {f"objective.{name}": tensor.detach() for name, tensor in weights.items()}
    return tensors | {f"average.{name}": tensor for name, tensor in (average or {}).items()}


def names_of(objective: nn.Module) -> dict[Tensor, str]:
    return {param: name for name, param in distributed.unwrap(objective).named_parameters()}


def groups_of(optimizer: Optimizer, names: dict[Tensor, str]) -> list[dict[str, Any]]:
    """An optimizer's groups, as they are now, with names for parameters."""
    return [
        {key: value for key, value in group.items() if key not in OF_THE_MACHINE}
        | {"params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def memory_of(optimizers: list[Optimizer], names: dict[Tensor, str]) -> dict[str, Any]:
    """What optimizers remember of each parameter: `optimizer.0.momentum.head.weight`.

    A frozen parameter has no memory, and none has before the first step.
    """
    return {
        f"optimizer.{number}.{key}.{names[param]}": value
        for number, optimizer in enumerate(optimizers)
        for param, memory in optimizer.state.items()
        for key, value in memory.items()
    }


def looks(tensor: Tensor) -> list[Any]:
    """A tensor's shape and type, as JSON can say them."""
    return [*tensor.shape, str(tensor.dtype).removeprefix("torch.")]


def fill(
    place: Path,
    note: dict[str, Any],
    objective: nn.Module,
    optimizers: list[Optimizer],
    average: dict[str, Tensor] | None,
) -> None:
    """Give weights, average and optimizers the values of a state, if it is theirs."""
    tensors = weights_of(objective, average)
    for name, tensor in tensors.items():
        if note["tensors"].get(name) != looks(tensor):
            saved = note["tensors"].get(name, "not there")
            raise CheckpointError(
                f"{place} is of another run: {name} is {saved} in it and {looks(tensor)} here; "
                "go on with the settings it was saved with"
            )
    names = names_of(objective)
    here = [[group["params"] for group in groups_of(o, names)] for o in optimizers]
    if here != [[group["params"] for group in groups] for groups in note["optimizers"]]:
        raise CheckpointError(
            f"{place} was saved with other optimizers, or other weights were frozen; "
            "go on with the settings it was saved with"
        )
    memories = empty_memories(note, optimizers, names)
    for number, memory in enumerate(memories):
        for param, values in memory.items():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.ndim:
                    tensors[f"optimizer.{number}.{key}.{names[param]}"] = value
    together(f"cannot read {place}", lambda: distributed.load_tensors(place, tensors))
    for optimizer, memory, groups in zip(optimizers, memories, note["optimizers"], strict=True):
        optimizer.state.clear()
        optimizer.state.update(memory)
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key in saved.keys() - {"params"}:
                pair = isinstance(group.get(key), tuple)  # JSON has only lists
                group[key] = tuple(saved[key]) if pair else saved[key]


def empty_memories(
    note: dict[str, Any], optimizers: list[Optimizer], names: dict[Tensor, str]
) -> list[dict[Tensor, dict[str, Any]]]:
    """What each optimizer remembered of each parameter, with tensors yet to be filled."""
    group_of = {p: group for o in optimizers for group in o.param_groups for p in group["params"]}
    params = {name: param for param, name in names.items()}
    memories: list[dict[Tensor, dict[str, Any]]] = [{} for _ in optimizers]
    for full_name, saved in (note["tensors"] | note["values"]).items():
        if not full_name.startswith("optimizer."):
            continue
        _, number, key, name = full_name.split(".", 3)
        param = params[name]
        if full_name in note["tensors"]:
            value = empty(saved, param)
        else:
            value = unplain(key, saved, param, group_of[param])
        memories[int(number)].setdefault(param, {})[key] = value
    return memories


def empty(saved: list[Any], param: Tensor) -> Tensor:
    """Memory of a parameter's shape is split as the parameter is; any other is whole everywhere."""
    *shape, dtype = saved
    if tuple(shape) == tuple(param.shape):
        return torch.empty_like(param.detach(), dtype=getattr(torch, dtype))
    return torch.empty(shape, dtype=getattr(torch, dtype), device=param.device)


def plain(value: Any) -> Any:
    """A number as JSON can say it; one in a tensor with its type. Digits are exact in both."""
    if isinstance(value, Tensor):
        return {"number": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def unplain(key: str, saved: Any, param: Tensor, group: dict[str, Any]) -> Any:
    if not isinstance(saved, dict):
        return saved
    # Torch counts steps on the processor, except where the device must not wait for it.
    on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
    device = "cpu" if on_cpu else param.device
    return torch.tensor(saved["number"], dtype=getattr(torch, saved["dtype"]), device=device)
