"""Timing things against each other fairly: in turns, many times, with the machine described.

Absolute times mean little on a shared machine; ratios between things that took turns do.
"""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

MATRIX = 1536  # side of the plain matrix product that says what this machine can do


def in_turns(calls: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` times; after a warm-up, one of each, then again."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def matrix_call() -> Callable[[], object]:
    """A large float32 matrix product, to be timed among the others."""
    one, other = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    out = torch.empty(MATRIX, MATRIX)
    return lambda: [torch.mm(one, other, out=out) for _ in range(4)]


def matrix_rate(seconds: list[float]) -> float:
    """Operations per second of the best `matrix_call`."""
    return 4 * 2 * MATRIX**3 / min(seconds)


def spread(seconds: list[float]) -> str:
    """`best 502 ms, median 531`."""
    return f"{min(seconds) * 1e3:.0f} | {statistics.median(seconds) * 1e3:.0f}"


def machine() -> str:
    """One line on what the numbers were measured on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":")[1].strip() if models else name
    level = torch.backends.cpu.get_cpu_capability()
    return (
        f"{name}, {torch.get_num_threads()} threads, {level}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
