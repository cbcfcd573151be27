"""What this machine is: packages, processor, memory, disks, and the variables that steer them.

`vitrail doctor` tells it. Nothing is measured here (`speed.py`) and nothing judged
(`diagnosis.py`). A broken torch is a finding, not an end: it is imported where it is needed.
"""

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vitrail import __version__
from vitrail.extras import EXTRAS
from vitrail.planning.packages import Package, requirements

VARIABLES = {
    "OMP_NUM_THREADS": "how many threads share a matrix product",
    "MKL_NUM_THREADS": "the same, where torch multiplies with MKL",
    "GOMP_SPINCOUNT": "how long those threads wait awake; `vitrail` sets 20000",
    "ATEN_CPU_CAPABILITY": "which instructions torch may use",
    "MALLOC_ARENA_MAX": "the C library's heaps; training then leaves them alone",
    "MALLOC_MMAP_THRESHOLD_": "the same",
    "MALLOC_TRIM_THRESHOLD_": "the same",
    "CUDA_VISIBLE_DEVICES": "which GPUs there are",
    "VITRAIL_CACHE": "the folder of features and engines that are kept",
    "XDG_CACHE_HOME": "the folder in which that one is",
    "HF_HOME": "the folder of the Hugging Face hub's files",
    "HF_HUB_CACHE": "the folder of models from the hub",
    "HF_HUB_OFFLINE": "1 takes models of the hub from that folder only",
    "HF_ENDPOINT": "another hub",
    "NO_COLOR": "no colors in a terminal",
}
ABLE = {"AVX2": "avx2", "AVX-512": "avx512_f", "AMX": "amx_tile"}  # what torch calls them
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Processor:
    """What computes where there is no accelerator."""

    model: str
    cores: int  # of the machine
    allowed: int  # of which this process may use so many
    quota: float | None  # cores' worth of time that a container may take
    load: float | None  # processes that have wanted a core, over the last minute
    threads: int | None  # of torch; None if it cannot be imported
    capability: str  # the instructions torch uses
    able: dict[str, bool]


@dataclass(frozen=True)
class MachineMemory:
    """Bytes."""

    total: int
    limit: int | None  # of the container
    free: int | None  # for this process; None if torch cannot be imported


@dataclass(frozen=True)
class Disk:
    """A place that is written to."""

    what: str
    path: str
    free: int  # bytes
    writable: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All of it."""

    vitrail: str
    python: str
    system: str
    packages: tuple[Package, ...]
    extras: dict[str, tuple[Package, ...]]
    broken: str  # why torch cannot be imported
    whole: bool  # torch and the other packages are there, so that our own parts can be asked
    processor: Processor
    memory: MachineMemory
    accelerators: tuple[str, ...]
    disks: tuple[Disk, ...]
    environment: dict[str, str]


def look_at_machine() -> Machine:
    """This one, now."""
    broken, needed = torch_fault(), requirements()
    whole = not broken and all(package.version for package in needed.get("", ()))
    return Machine(
        vitrail=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        packages=needed.get("", ()),
        extras={name: needed.get(name, ()) for name in EXTRAS},
        broken=broken,
        whole=whole,
        processor=look_at_processor(with_torch=not broken),
        memory=look_at_memory(with_torch=not broken),
        accelerators=() if broken else accelerators(),
        disks=tuple(disks()) if whole else (),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def torch_fault() -> str:
    """Why torch cannot be imported; nothing if it can."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a library that does not fit raises anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def look_at_processor(*, with_torch: bool) -> Processor:
    able: dict[str, bool] = {}
    threads, capability = None, ""
    if with_torch:
        import torch

        known = torch.cpu.get_capabilities()
        able = {name: bool(known.get(key)) for name, key in ABLE.items()}
        able["bfloat16"] = bool(known.get("amx_bf16") or known.get("avx512_bf16"))
        threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    every = os.cpu_count() or 1
    return Processor(
        model=processor_name(),
        cores=every,
        allowed=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every,
        quota=quota(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        threads=threads,
        capability=capability,
        able=able,
    )


def processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def quota(groups: Path = GROUPS) -> float | None:
    """Cores' worth of time that a container may take, as Linux says in its newer or older way."""
    try:
        if (groups / "cpu.max").exists():
            most, period = map(int, (groups / "cpu.max").read_text().split())
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            most, period = (int((groups / "cpu" / name).read_text()) for name in names)
        return most / period if most > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such file; or "max", which is no number
        return None


def look_at_memory(*, with_torch: bool) -> MachineMemory:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = limit = None
    if with_torch:
        import torch

        from vitrail.training.memory import CGROUP_LIMITS, free_bytes

        free = free_bytes(torch.device("cpu"))
        limit = memory_limit([name for name, _, _ in CGROUP_LIMITS], total)
    return MachineMemory(total=total, limit=limit, free=free)


def memory_limit(names: list[str], total: int, groups: Path = GROUPS) -> int | None:
    """What a container may take, if that is less than there is."""
    limits = [total]
    for name in names:
        try:
            limits.append(int((groups / name).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits) if min(limits) < total else None


def accelerators() -> tuple[str, ...]:
    """`cuda:0 NVIDIA A100, 80 GiB`."""
    import torch

    found = []
    if torch.cuda.is_available():
        for n in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(n)
            found.append(f"cuda:{n} {about.name}, {about.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        found.append("mps, which shares the memory of the processor")
    return tuple(found)


def disks() -> Iterator[Disk]:
    """The places that commands write to if nothing else is said."""
    from vitrail.checkpoints.hub import cache_dir
    from vitrail.data.storage import cache_folder

    yield disk("runs", Path("runs").absolute())
    if (kept := cache_folder("features")) is not None:
        yield disk("features and engines", kept.parent)
    yield disk("models of the hub", cache_dir())
    yield disk("temporary files", Path(tempfile.gettempdir()))


def disk(what: str, path: Path) -> Disk:
    there = next(place for place in (path, *path.parents) if place.exists())
    free = shutil.disk_usage(there).free
    return Disk(what=what, path=str(path), free=free, writable=os.access(there, os.W_OK))
