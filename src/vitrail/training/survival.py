"""What keeps a run from being lost: one writer per folder, orderly stops, and a cause for NaN."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.errors import DataError

LOCK = ".lock"


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold the run's folder; the system lets go of it however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"cannot write into {folder}: {error.strerror}; name another folder with --out"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"another run is writing into {folder}; wait for it, or name another --out"
            ) from None
        yield
    finally:
        os.close(handle)


class Stop:
    """True once the run was asked to end: Ctrl-C or SIGTERM. A second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def orderly_stop() -> Iterator[Stop]:
    """Turn the signals that end a program into a wish that the loop can grant after its step."""
    stop = Stop()
    try:
        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: signals are somebody else's
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@torch.no_grad()
def first_bad_layer(objective: nn.Module, images: Tensor, targets: Tensor) -> str:
    """The first part of the model whose output is not a number, with this batch."""
    if not bool(torch.isfinite(images).all()):
        return "the pictures themselves"
    for name, parameter in objective.named_parameters():
        if not bool(torch.isfinite(distributed.full_tensor(parameter)).all()):
            return f"the weight {name.removeprefix('model.')}"
    found: list[str] = []

    def look(name: str, output: object) -> None:
        if not found and isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: look(name, out))
        for name, module in objective.named_modules()
        if name and not any(module.children())
    ]
    try:
        objective(images, targets)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0].removeprefix("model.") if found else "the gradients alone"
