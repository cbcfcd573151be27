"""Interleaved timing, and a description of the machine.

On a shared machine, ratios of interleaved measurements are meaningful and absolute times are not.
"""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import torch

MATRIX = 1536  # side of the matrix product that measures the peak rate of the machine
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def interleave(calls: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each round; calls are interleaved, after a warm-up."""
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
    """Return a large float32 matrix product to be timed."""
    one, other = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    out = torch.empty(MATRIX, MATRIX)
    return lambda: [torch.mm(one, other, out=out) for _ in range(4)]


def matrix_rate(seconds: list[float]) -> float:
    """Operations per second of the best `matrix_call`."""
    return 4 * 2 * MATRIX**3 / min(seconds)


def spread(seconds: list[float]) -> str:
    """`best 502 ms, median 531`."""
    return f"{min(seconds) * 1e3:.0f} | {statistics.median(seconds) * 1e3:.0f}"


def claim(subject: str, result: str) -> str:
    """Format a claim, which the summary at the top of the page repeats."""
    return f"**{subject}: {result}.**"


def machine() -> str:
    """Describe the machine in one line."""
    level = torch.backends.cpu.get_cpu_capability()
    return (
        f"{processor()}, {torch.get_num_threads()} threads, {level}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def machine_table() -> list[str]:
    """Describe the machine as a Markdown table."""
    facts = {
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": f"{os.cpu_count()}, {torch.get_num_threads()} threads used",
        "caches": caches(CACHES) or "unknown",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "torch": f"{torch.__version__}, {blas()}",
        "Python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    return ["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())]


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if models:
            return models[0].split(":")[1].strip()
    return platform.processor() or platform.machine()


def caches(folder: Path) -> str:
    """`L1 32K data, L2 512K, L3 32768K`: of the first core; empty if unknown."""
    levels = []
    for cache in sorted(folder.glob("index*")):
        level, kind, size = (
            (cache / name).read_text().strip() for name in ("level", "type", "size")
        )
        if kind != "Instruction":
            levels.append(f"L{level} {size}" + (" data" if kind == "Data" else ""))
    return ", ".join(levels)


def blas() -> str:
    """The libraries that torch multiplies matrices with, as torch reports them."""
    build_info = torch.__config__.show()
    kind = re.search(r"BLAS_INFO=(\w+)", build_info)
    onednn = re.search(r"MKL-DNN v([\d.]+)", build_info)
    parts = [f"BLAS: {kind[1]}" if kind else "BLAS unknown"]
    return ", ".join([*parts, f"oneDNN {onednn[1]}"] if onednn else parts)
