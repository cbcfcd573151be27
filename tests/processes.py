"""Processes of their own that do not import torch again: they are forked from a server.

The server is a process without threads or state of the tests, so that a fork of it behaves as a
new process. Functions and arguments must be picklable.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["vitrail.cli", "vitrail.training.trainer", "torch.utils.tensorboard"]
)


def fork(function: Callable[..., Any], *args: Any, output: Path, **environment: str) -> BaseProcess:
    """Start a process that calls a function and exits with the status that it returns.

    It prints into `output`, and errors into a file beside it that ends in .errors.
    """
    everything = (function, args, torch.get_num_threads(), os.environ | environment, output)
    process = SERVER.Process(target=call, args=everything, daemon=True)
    process.start()
    return process


def call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    threads: int,
    environment: dict[str, str],
    output: Path,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    with (
        output.open("w") as printed,
        output.with_suffix(".errors").open("w") as errors,
        redirect_stdout(printed),
        redirect_stderr(errors),
    ):
        sys.exit(function(*args))


def in_two_processes(folder: Path, function: Callable[..., Any], *args: Any) -> list[str]:
    """Call a function in two processes with the environment of torchrun; return their output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    outputs = [folder / f"output-{rank}" for rank in "01"]
    both = [
        fork(function, *args, output=output, RANK=rank, LOCAL_RANK=rank, **group)
        for rank, output in zip("01", outputs, strict=True)
    ]
    for process in both:
        process.join(200)
    errors = [output.with_suffix(".errors").read_text() for output in outputs]
    assert [process.exitcode for process in both] == [0, 0], errors
    return [output.read_text() for output in outputs]
