"""The resumable state of a run, written atomically; run locks, graceful stops, and NaN diagnosis.

    RUN/state/step-1200/state.json       step, schedule, names; and a digest of each file
                        .metadata        which part of which tensor is where   (torch's)
                        __0_0.distcp     the tensors that process 0 wrote      (torch's)

A state is written under a hidden name, synced to disk, and renamed. Tensors are saved by name, so
that a run can be resumed with any number of processes, with DDP or FSDP. Torch's `get_state_dict`
is not used: it takes a step with zero gradients if an optimizer has not taken one, and a restored
state must be bit-exact.

All processes see the same folder; what fails in one of them is raised in all.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail import distributed
from vitrail.checkpoints.bundle import contains_model
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.training import recipes
from vitrail.training.config import RunConfig

NOTE = "state.json"
KEEP = 2  # states: the newest, and the one before in case a disk loses writes
LOCK = ".lock"
GRADIENTS = "the gradients"  # are not finite, although weights and outputs are
# Options of optimizers that are not part of the state: of the machine, and of the settings.
UNSAVED_OPTIONS = ("fused", "foreach", "capturable", "differentiable", "peak")


def save_state(
    folder: Path,
    objective: nn.Module,
    optimizers: list[Optimizer],
    average: dict[str, Tensor] | None,
    extra: dict[str, Any],
) -> None:
    """Add a state to the run in `folder`, and remove those it replaces; on failure nothing changes.

    All processes call this. `extra` has the step.
    """
    names, tensors = names_and_tensors(objective, average)
    values: dict[str, Any] = {}  # scalars: as a file each would cost as much as a matrix
    for number, optimizer in enumerate(optimizers):
        for param, slots in optimizer.state.items():  # empty before the first step
            for key, value in slots.items():
                name = f"optimizer.{number}.{key}.{names[param]}"
                if not isinstance(value, Tensor):
                    values[name] = value
                elif value.ndim:
                    tensors[name] = value
                else:
                    values[name] = {"number": value.item(), "dtype": signature(value)[-1]}
    note = {
        "extra": extra,
        "optimizers": [named_groups(optimizer, names) for optimizer in optimizers],
        "values": values,
        "tensors": {name: signature(tensor) for name, tensor in tensors.items()},
    }
    states = folder / "state"
    json.dumps(note)  # raises before anything is written
    failure, name = f"cannot save the run's state in {states}", f"step-{extra['step']}"
    hidden, first, digests = states / f".{name}.partial", distributed.is_main(), {}
    try:
        with failing_together(failure):
            if first:
                states.mkdir(parents=True, exist_ok=True)
                for leftover in states.glob(".step-*.partial"):  # of killed processes
                    shutil.rmtree(leftover)
                hidden.mkdir()
        with failing_together(failure):
            distributed.save_tensors(hidden, tensors)
            table = [hidden / ".metadata"] if first else []
            digests = digests_of([*table, *sorted(hidden.glob(f"__{distributed.rank()}_*"))])
        parts = distributed.all_gather_object(digests)
        note["files"] = {file: digest for part in parts for file, digest in part.items()}
        with failing_together(failure):
            if first:
                before = list_states(states)
                note["saves"] = save_count(before[0]) + 1 if before else 1
                note["digest"] = digest_of_note(note)
                with (hidden / NOTE).open("w", encoding="utf-8") as file:
                    json.dump(note, file)
                    file.flush()
                    os.fsync(file.fileno())
                sync(hidden)
                taken = (states / name).exists()  # it was stopped right after it was resumed
                hidden.rename(states / (f"{name}.{note['saves']}" if taken else name))
                sync(states)
                for path in list_states(states)[KEEP:]:
                    with suppress(OSError):  # the new state is complete
                        remove(path)
    except CheckpointError:
        if first:
            shutil.rmtree(hidden, ignore_errors=True)
        raise


def load_state(
    folder: Path,
    objective: nn.Module,
    optimizers: list[Optimizer],
    average: dict[str, Tensor] | None,
) -> dict[str, Any]:
    """Restore the newest undamaged state; all processes call this.

    Returns the `extra` of `save_state`, and under "damaged" what was wrong with newer states.
    """
    path, note, damaged = newest_valid_state(folder / "state")
    names, tensors = names_and_tensors(objective, average)
    for name, tensor in tensors.items():
        if note["tensors"].get(name) != signature(tensor):
            saved = note["tensors"].get(name, "missing")
            raise CheckpointError(
                f"checkpoint mismatch: {path} has {name} {saved}, expected {signature(tensor)}; "
                "resume with the settings it was saved with"
            )
    groups = [[group["params"] for group in named_groups(o, names)] for o in optimizers]
    if groups != [[group["params"] for group in saved] for saved in note["optimizers"]]:
        raise CheckpointError(
            f"checkpoint mismatch: {path} was saved with other optimizers or frozen weights; "
            "resume with the settings it was saved with"
        )
    group_of = {p: group for o in optimizers for group in o.param_groups for p in group["params"]}
    params = {name: param for param, name in names.items()}
    states: list[dict[Tensor, dict[str, Any]]] = [{} for _ in optimizers]
    for full_name, saved in (note["tensors"] | note["values"]).items():
        if not full_name.startswith("optimizer."):
            continue
        _, number, key, name = full_name.split(".", 3)
        param, value = params[name], saved
        if full_name in note["tensors"]:  # to be filled
            *shape, dtype = saved
            if tuple(shape) == tuple(param.shape):  # sharded like the parameter
                value = torch.empty_like(param.detach(), dtype=getattr(torch, dtype))
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype), device=param.device)
            tensors[full_name] = value
        elif isinstance(saved, dict):
            # Torch keeps step counters on the CPU, unless the optimizer is fused or capturable.
            group = group_of[param]
            on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
            device, dtype = "cpu" if on_cpu else param.device, getattr(torch, saved["dtype"])
            value = torch.tensor(saved["number"], dtype=dtype, device=device)
        states[int(number)].setdefault(param, {})[key] = value
    with failing_together(f"cannot read {path}"):
        distributed.load_tensors(path, tensors)
    for optimizer, state, saved_groups in zip(optimizers, states, note["optimizers"], strict=True):
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
            for key in saved.keys() - {"params", *UNSAVED_OPTIONS}:
                is_tuple = isinstance(group.get(key), tuple)  # JSON has only lists
                group[key] = tuple(saved[key]) if is_tuple else saved[key]
    return note["extra"] | ({"damaged": damaged} if damaged else {})


def has_state(folder: Path) -> bool:
    return bool(list_states(folder / "state"))


def remove_state(folder: Path) -> None:
    """Remove all states of the run in `folder`; the first process does it, without a barrier."""
    if distributed.is_main():
        for path in list_states(folder / "state"):
            remove(path)
        shutil.rmtree(folder / "state", ignore_errors=True)


def names_and_tensors(
    objective: nn.Module, average: dict[str, Tensor] | None
) -> tuple[dict[Tensor, str], dict[str, Tensor]]:
    """Return the names of the parameters, and the tensors of model and average to save."""
    module = distributed.unwrap(objective)
    tensors = {f"objective.{name}": tensor.detach() for name, tensor in module.state_dict().items()}
    tensors |= {f"average.{name}": tensor for name, tensor in (average or {}).items()}
    return {param: name for name, param in module.named_parameters()}, tensors


def named_groups(optimizer: Optimizer, names: dict[Tensor, str]) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, with names for parameters."""
    return [
        {key: value for key, value in group.items() if key not in UNSAVED_OPTIONS}
        | {"params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def signature(tensor: Tensor) -> list[Any]:
    """Return a tensor's shape and dtype for JSON."""
    return [*tensor.shape, str(tensor.dtype).removeprefix("torch.")]


# Atomic folders


def newest_valid_state(folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the newest undamaged state, its note, and the errors of newer ones.

    Processes share the work of verifying the digests.
    """
    damaged, note = [], {}
    for path in distributed.broadcast_object(list_states(folder)):
        try:
            with failing_together(f"{path} is damaged"):
                try:
                    note = json.loads((path / NOTE).read_text(encoding="utf-8"))
                    if note["digest"] != digest_of_note(note):
                        raise ValueError
                    digests = note["files"]
                except (ValueError, LookupError, TypeError, RecursionError):
                    raise CheckpointError(f"digest mismatch in {NOTE}") from None
                assigned = sorted(digests)[distributed.rank() :: distributed.world_size()]
                for name, digest in digests_of([path / name for name in assigned]).items():
                    if digest != digests[name]:
                        raise CheckpointError(f"digest mismatch in {name}")
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return path, note, damaged
    if damaged:
        raise CheckpointError(
            f"{damaged[0]}, and no other state is intact; delete {folder} to start over"
        )
    raise CheckpointError(f"{folder} has no saved state to resume from; start over")


def list_states(folder: Path) -> list[Path]:
    """Return all states, the newest first; after a rollback, steps are not in that order."""
    paths = [path for path in folder.glob("step-*") if (path / NOTE).is_file()]
    return sorted(paths, key=save_count, reverse=True)


def save_count(path: Path) -> int:
    """Return the number of saves up to this state; 0 if it cannot be read."""
    try:
        return int(json.loads((path / NOTE).read_text(encoding="utf-8"))["saves"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 0


def remove(path: Path) -> None:
    """Rename first, so that a partly deleted state is never used."""
    hidden = path.with_name(f".{path.name}.partial")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def digests_of(files: list[Path]) -> dict[str, str]:
    digests = {}
    for path in files:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def digest_of_note(note: dict[str, Any]) -> str:
    rest = {key: value for key, value in note.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def failing_together(failure: str) -> Iterator[None]:
    """Raise in all processes if the block fails in one of them."""
    problem = None
    try:
        yield
    except (OSError, CheckpointError) as error:
        problem = distributed.error_reason(error)
    for reason in distributed.all_gather_object(problem):
        if reason is not None:
            raise CheckpointError(f"{failure}: {reason}")


# Locks, signals, NaN


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the run's folder; the system releases it if the process dies.

    A folder that it created is removed if nothing was written into it.
    """
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"cannot write into {folder}: {error.strerror}; choose another folder with --out"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"another run is writing into {folder}; wait for it, or choose another --out"
            ) from None
        try:
            yield
        finally:
            if created and [*folder.glob("*")] == [folder / LOCK]:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def check_folder(config: RunConfig) -> None:
    """Raise if the folder has another run, or nothing to resume."""
    out, unfinished = config.out, has_state(config.out)
    if config.overwrite and not config.resume and (recipes.is_run(out) or not out.exists()):
        return
    if unfinished and not config.resume:
        raise ConfigError(
            f"{out} has an unfinished run; use --resume to continue it, or choose another --out"
        )
    if contains_model(out) and not unfinished:
        what = "is finished" if config.resume else "already has a model"
        raise ConfigError(f"{out} {what}; choose another --out for a new run")


class StopSignal:
    """True once Ctrl-C or SIGTERM was received; a second Ctrl-C interrupts at once.

    Until `graceful` is set, there is nothing to save, and either of them interrupts at once.
    """

    graceful = False
    signal: str | None = None  # that was received

    def __bool__(self) -> bool:
        return self.signal is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.graceful or (self.signal is not None and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.signal = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def graceful_stop() -> Iterator[StopSignal]:
    """Turn SIGINT and SIGTERM into a flag that the loop checks after each step."""
    stop = StopSignal()
    try:
        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@torch.no_grad()
def first_nonfinite(objective: nn.Module, images: Tensor, targets: Tensor) -> str:
    """Name the first weight or module output that is not finite, for this batch.

    All processes call this; with FSDP, weights and outputs are gathered.
    """
    if distributed.all_reduce_any(not bool(torch.isfinite(images).all())):
        return "the images"
    for name, parameter in objective.named_parameters():
        if not bool(torch.isfinite(distributed.full_tensor(parameter)).all()):
            return f"the weight {name.removeprefix('model.')}"
    nonfinite: list[str] = []

    def check(module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
            nonfinite.append(names[module].removeprefix("model."))

    names = {m: name for name, m in objective.named_modules() if name and not any(m.children())}
    hooks = [module.register_forward_hook(check) for module in names]
    try:
        objective(images, targets)
    finally:
        for hook in hooks:
            hook.remove()
    return f"the output of {nonfinite[0]}" if nonfinite else GRADIENTS
