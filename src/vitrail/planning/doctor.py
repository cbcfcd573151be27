"""Packages, hardware, measured speed and problems of this machine: `vitrail doctor`.

Results are dictionaries, as `vitrail doctor --json` prints them. `inspect_machine` collects,
`measure_speeds` times matrix products and JPEG decoding for a second or two, `find_problems` and
`draw_conclusions` are pure functions of both. A broken torch is a finding, not a crash: torch and
what needs it are imported inside functions.
"""

import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.extras import EXTRAS
from vitrail.formatting import GIB, MIB

VARIABLES = {
    "OMP_NUM_THREADS": "threads of a matrix product",
    "MKL_NUM_THREADS": "threads of a matrix product, with MKL",
    "GOMP_SPINCOUNT": "how long idle OpenMP threads spin; `vitrail` sets 20000",
    "ATEN_CPU_CAPABILITY": "instruction set that torch may use",
    "MALLOC_ARENA_MAX": "glibc allocator; if set, training does not configure it",
    "MALLOC_MMAP_THRESHOLD_": "glibc allocator",
    "MALLOC_TRIM_THRESHOLD_": "glibc allocator",
    "CUDA_VISIBLE_DEVICES": "visible GPUs",
    "VITRAIL_CACHE": "folder of cached features and engines",
    "XDG_CACHE_HOME": "cache folder, instead of ~/.cache",
    "HF_HOME": "folder of Hugging Face files",
    "HF_HUB_CACHE": "folder of models from the hub",
    "HF_HUB_OFFLINE": "1: use only downloaded models",
    "HF_ENDPOINT": "address of a hub mirror",
    "NO_COLOR": "no colors in a terminal",
}
REMEDIES = {  # of a disk that is full or not writable
    "runs": "pass --out, or work in {}",
    "features and engines": "set VITRAIL_CACHE to {}",
    "Hugging Face models": "set HF_HOME to {}",
    "temporary files": "set TMPDIR to {}",
}
CPU_FEATURES = {"AVX2": "avx2", "AVX-512": "avx512_f", "AMX": "amx_tile"}  # torch's names
CGROUP = Path("/sys/fs/cgroup")
LOW_DISK = 1 * GIB  # below which a run or a download may not fit
NO_DISK = 64 * MIB  # below which nothing does
LOW_MEMORY = 1 * GIB  # torch itself takes a third of it
SIMILAR_RATIO = 1.1  # ratios below this count as equally fast
BUSY_CORES = 0.5  # cores in use by others before it is reported
SECONDS = 0.2  # of each measurement
WIDTH = 768  # of the measured matrices: that of ViT-B
SIDE = 480  # pixels of the measured JPEG
SAMPLE = "builtin:sign-digits"  # where that JPEG's image comes from


# JSON values. A package has a name, the least version that works, the first one that no longer
# does, or "", and the installed version, or None.
Package = dict[str, Any]
Machine = dict[str, Any]  # of `inspect_machine`
Problem = dict[str, Any]  # what, remedy, and whether it is fatal, rather than slow
Speeds = dict[str, Any]  # of `measure_speeds`


def inspect_machine() -> Machine:
    required, broken = requirements(), ""
    cores, cpuinfo = os.cpu_count() or 1, ""
    with suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    processor: dict[str, Any] = {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "cores": cores,  # of the machine
        "allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        "quota": cpu_quota(),  # CPU limit of the container, in cores
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # of the last minute
        "threads": None,  # of torch; None if it cannot be imported
        "capability": "",  # instruction set that torch uses
        "able": {},
    }
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory: dict[str, int | None] = {"total": total, "limit": None, "free": None}
    accelerators: list[str] = []
    try:
        import torch
    except Exception as error:  # a library that does not fit raises anything
        broken = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        from vitrail.training.memory import CGROUP_LIMITS, free_bytes

        has = torch.cpu.get_capabilities()
        processor["able"] = {name: bool(has.get(key)) for name, key in CPU_FEATURES.items()}
        processor["able"]["bfloat16"] = bool(has.get("amx_bf16") or has.get("avx512_bf16"))
        processor["threads"] = torch.get_num_threads()
        processor["capability"] = torch.backends.cpu.get_cpu_capability()
        memory["free"] = free_bytes(torch.device("cpu"))
        memory["limit"] = memory_limit([name for name, _, _ in CGROUP_LIMITS], total)
        if torch.cuda.is_available():
            for n in range(torch.cuda.device_count()):
                gpu = torch.cuda.get_device_properties(n)
                accelerators.append(f"cuda:{n} {gpu.name}, {gpu.total_memory / GIB:.0f} GiB")
        if torch.backends.mps.is_available():
            accelerators.append("mps, which shares the CPU's memory")
    whole = not broken and all(package["version"] for package in required.get("", ()))
    return {
        "vitrail": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "packages": required.get("", []),
        "extras": {name: required.get(name, []) for name in EXTRAS},
        "broken": broken,  # why torch cannot be imported; empty if it can
        "whole": whole,  # torch and all required packages are installed
        "processor": processor,
        "memory": memory,
        "accelerators": accelerators,
        "disks": [*disks()] if whole else [],
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def requirements() -> dict[str, list[Package]]:
    """Return what the installed vitrail requires, under "" or the name of an extra."""
    packages: dict[str, list[Package]] = {}
    try:
        lines = metadata.requires("vitrail") or []
    except metadata.PackageNotFoundError:  # run from its source, without an installation
        lines = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        name, least, below, extra = (
            found[1] if (found := re.search(pattern, text)) else ""
            for pattern, text in (
                (r"^([\w.-]+)", line),
                (r">=([\d.]+)", requirement),
                (r"<([\d.]+)", requirement),
                (r"extra == ['\"]([\w-]+)", marker),
            )
        )
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        package = {"name": name, "least": least, "below": below, "version": version}
        packages.setdefault(extra, []).append(package)
    return packages


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return the CPU limit of the container in cores (cgroup v2 or v1)."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = map(int, (cgroup / "cpu.max").read_text().split())
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (int((cgroup / "cpu" / name).read_text()) for name in names)
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such file; or "max", which is no number
        return None


def memory_limit(names: list[str], total: int, cgroup: Path = CGROUP) -> int | None:
    """Return the memory limit of the container, if it is below the machine's memory."""
    limits = [total]
    for name in names:
        with suppress(OSError, ValueError):
            limits.append(int((cgroup / name).read_text()))
    return min(limits) if min(limits) < total else None


def disks() -> Iterator[dict[str, Any]]:
    """Yield the folders that commands write to by default."""
    from vitrail.checkpoints.hub import cache_dir
    from vitrail.data.storage import cache_folder

    features = cache_folder("features")
    folders = {
        "runs": Path("runs").absolute(),
        "features and engines": features and features.parent,
        "Hugging Face models": cache_dir(),
        "temporary files": Path(tempfile.gettempdir()),
    }
    for what, path in folders.items():
        if path is not None:
            existing = next(folder for folder in (path, *path.parents) if folder.exists())
            free = shutil.disk_usage(existing).free
            writable = os.access(existing, os.W_OK)
            yield {"what": what, "path": str(path), "free": free, "writable": writable}


def version_fits(package: Package) -> bool:
    """Compare versions as tuples: 2.13.0+cpu is (2, 13, 0)."""
    version, least, below = (
        [int(part) for part in re.findall(r"\d+", (package[key] or "").partition("+")[0])]
        for key in ("version", "least", "below")
    )
    return package["version"] is not None and least <= version and (not below or version < below)


def version_range(package: Package) -> str:
    """Return the versions that vitrail works with as pip writes them: `>=1.0,<2`."""
    bounds = (f">={package['least']}", f"<{package['below']}")
    return ",".join(bound for bound in bounds if bound[-1].isdigit())


def find_problems(machine: Machine) -> list[Problem]:
    """Return what to fix in packages, disks, threads, load and memory, fatal problems first."""
    keys = ("what", "remedy", "fatal")
    rows = list_problems(machine)
    problems: list[Problem] = [dict(zip(keys, row, strict=True)) for row in rows]
    return sorted(problems, key=lambda problem: not problem["fatal"])


def list_problems(machine: Machine) -> Iterator[tuple[str, str, bool]]:
    for package in machine["packages"]:
        if not version_fits(package):
            name, version, needed = package["name"], package["version"], version_range(package)
            state = f"is {version}" if version else "is missing"
            pinned = f"'{name}{needed}'" if needed else name
            what = f"{name} {state}, and vitrail needs {needed.removeprefix('>=') or 'it'}"
            yield what, f"pip install {pinned}", True
    for extra, packages in machine["extras"].items():
        for package in packages:
            if package["version"] and not version_fits(package):
                what = f"{package['name']} is {package['version']}, and vitrail[{extra}] needs "
                what += version_range(package).removeprefix(">=")
                yield what, f"pip install --upgrade 'vitrail[{extra}]'", False
    if machine["broken"]:
        yield f"torch cannot be imported: {machine['broken']}", "reinstall torch", True
    for disk in machine["disks"]:
        remedy, free = REMEDIES[disk["what"]], disk["free"]
        where = f"{disk['path']} ({disk['what']})"
        if not disk["writable"]:
            yield f"not writable: {where}", remedy.format("a writable folder"), True
        elif free < LOW_DISK:
            remedy = f"free up space, or {remedy.format('a folder with more space')}"
            yield f"{free / MIB:,.0f} MiB free for {where}", remedy, free < NO_DISK
    processor, free = machine["processor"], machine["memory"]["free"]
    threads, load, quota = processor["threads"], processor["load"], processor["quota"]
    cores = processor["allowed"]
    if quota is not None:
        cores = max(1, min(cores, ceil(quota)))
    if threads is not None and threads > cores:
        what = f"torch uses {threads} threads, but this process may use only {cores} cores"
        yield f"{what}: threads wait for each other", f"set OMP_NUM_THREADS={cores}", False
    if threads == 1 < cores:
        text = f"torch uses one thread, but this process may use {cores} cores"
        yield text, "unset OMP_NUM_THREADS", False
    if load is not None and load > processor["cores"] + BUSY_CORES:
        what = f"load average {load:.1f} on {processor['cores']} cores: everything is slower, and"
        remedy = "wait for other processes, or stop them"
        yield f"{what} speeds measured here are too low", remedy, False
    if free is not None and free < LOW_MEMORY:
        remedy = "close other programs; `vitrail plan MODEL` reports what a training run needs"
        yield f"{free / MIB:,.0f} MiB of memory free", remedy, False


def measure_speeds(seconds: float = SECONDS, width: int = WIDTH, side: int = SIDE) -> Speeds:
    """Time matrix products in both data types and JPEG decoding by both decoders.

    The best of several repetitions counts: other processes can only slow a measurement down.
    """
    import torch

    from vitrail.data.datasets import open_dataset
    from vitrail.data.decode import decode, load_simplejpeg, thumbnail, to_jpeg
    from vitrail.data.loader import start_pool
    from vitrail.distributed import device_type
    from vitrail.models.registry import CONFIGURATIONS
    from vitrail.training.auto_config import choose_precision, choose_shards
    from vitrail.training.config import Settings

    def best_time(work: Callable[[], object]) -> float:
        times: list[float] = []
        while len(times) < 2 or sum(times) < seconds:  # the first also warms up
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return min(times)

    def matmul_flops(dtype: torch.dtype) -> float:
        matrix = torch.ones(width, width, dtype=dtype)
        return 2 * width**3 / best_time(lambda: matrix @ matrix)

    image = thumbnail(open_dataset(SAMPLE, "test"), 0, side)
    assert image is not None, "it is part of the package"
    jpeg = to_jpeg(image)
    with start_pool(1, torch_threads=1, name="alone") as pool:
        alone = pool.submit(matmul_flops, torch.float32).result()
    fast = None if load_simplejpeg() is None else 1 / best_time(lambda: decode(jpeg))
    device, model = torch.device(device_type("", 1)), CONFIGURATIONS["ViT-S/16"]
    precision, reason = choose_precision("auto", device, model)
    return {
        "threads": torch.get_num_threads(),
        "float32": matmul_flops(torch.float32),  # FLOP/s with all threads
        "float32_alone": alone,  # with one
        "bfloat16": matmul_flops(torch.bfloat16),
        "jpeg_simplejpeg": fast,  # images per second; None: not installed
        "jpeg_pillow": 1 / best_time(lambda: decode(jpeg, backend="pillow")),
        "precision": str(precision).removeprefix("torch."),
        "reason": reason,
        # Shards of a batch (CPU data parallelism) when ViT-S/16 is trained.
        "parts": choose_shards(model, Settings(), precision, device),
    }


def draw_conclusions(machine: Machine, speeds: Speeds) -> Iterator[str]:
    """Yield what is fast on this machine, and why."""
    for name in machine["accelerators"]:
        yield f"compute device: {name}, unless --device or --machine.device is set"
    ratio = speeds["float32"] / speeds["bfloat16"]
    if ratio > SIMILAR_RATIO:
        fastest = f"float32 is fastest here, {ratio:.1f} times as fast as bfloat16"
    elif 1 / ratio > SIMILAR_RATIO:
        fastest = f"bfloat16 is fastest here, {1 / ratio:.1f} times as fast as float32"
    else:
        fastest = "float32 and bfloat16 are equally fast here"
    yield f"{fastest}; training uses {speeds['precision']}: {speeds['reason']}"
    if speeds["threads"] > 1:
        ratio = speeds["float32"] / speeds["float32_alone"]
        faster = (
            f"{ratio:.1f} times as fast as one" if ratio > SIMILAR_RATIO else "no faster than one"
        )
        yield f"matrix products with {speeds['threads']} threads are {faster}"
    if speeds["parts"] > 1:
        yield f"CPU data parallelism: training splits each batch into {speeds['parts']} shards"
    if speeds["jpeg_simplejpeg"] is None:
        yield "JPEGs are decoded by Pillow; install vitrail[fast] for a faster decoder"
    else:
        ratio = speeds["jpeg_simplejpeg"] / speeds["jpeg_pillow"]
        yield f"JPEGs are decoded by simplejpeg, {ratio:.1f} times as fast as Pillow"
