"""What follows from what a machine is and how fast it is: what is wrong, and what pays.

Pure functions of `Machine` and `Speeds`, in sentences. `vitrail doctor` prints them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from vitrail.formatting import GIB, MIB
from vitrail.planning.machine import Machine

if TYPE_CHECKING:
    from vitrail.planning.speed import Speeds

LITTLE_DISK = 1 * GIB  # below which a run or a download may not fit
NO_DISK = 64 * MIB  # below which nothing does
LITTLE_MEMORY = 1 * GIB  # torch itself takes a third of it
ALIKE = 1.1  # what is not this many times as fast is called the same
BUSY = 0.5  # cores that others may want before it is worth a word


@dataclass(frozen=True)
class Problem:
    """Something to mend."""

    what: str
    remedy: str
    fatal: bool = False  # vitrail fails where it is met, rather than being slow


def problems(machine: Machine) -> list[Problem]:
    """The worst first."""
    found = [
        *package_problems(machine),
        *disk_problems(machine),
        *thread_problems(machine),
        *memory_problems(machine),
    ]
    return sorted(found, key=lambda problem: not problem.fatal)


def package_problems(machine: Machine) -> Iterator[Problem]:
    for package in machine.packages:
        if not package.fits:
            there = f"is {package.version}" if package.version else "is missing"
            least = f"'{package.name}>={package.least}'" if package.least else package.name
            yield Problem(
                f"{package.name} {there}, and vitrail needs {package.least or 'it'}",
                f"pip install {least}",
                fatal=True,
            )
    for name, packages in machine.extras.items():
        for package in packages:
            if package.version and not package.fits:
                yield Problem(
                    f"{package.name} {package.version} is older than {package.least}, which "
                    f"vitrail[{name}] needs",
                    f"pip install --upgrade 'vitrail[{name}]'",
                )
    if machine.broken:
        yield Problem(
            f"torch cannot be imported: {machine.broken}", "install torch again", fatal=True
        )


def disk_problems(machine: Machine) -> Iterator[Problem]:
    for disk in machine.disks:
        where = f"{disk.path} ({disk.what})"
        if not disk.writable:
            yield Problem(
                f"nothing can be written to {where}",
                remedy_for(disk.what, "a folder where you may write"),
                fatal=True,
            )
        elif disk.free < LITTLE_DISK:
            yield Problem(
                f"{disk.free / MIB:,.0f} MiB are free for {where}",
                f"make room, or {remedy_for(disk.what, 'a folder that has more')}",
                fatal=disk.free < NO_DISK,
            )


def remedy_for(what: str, place: str) -> str:
    """How another place is named."""
    return {
        "runs": f"give --out, or work in {place}",
        "features and engines": f"set VITRAIL_CACHE to {place}",
        "models of the hub": f"set HF_HOME to {place}",
        "temporary files": f"set TMPDIR to {place}",
    }[what]


def thread_problems(machine: Machine) -> Iterator[Problem]:
    processor, cores = machine.processor, usable_cores(machine)
    if processor.threads is not None and processor.threads > cores:
        yield Problem(
            f"torch shares its work among {processor.threads} threads, and this process may use "
            f"{cores} of the cores: they wait for each other",
            f"set OMP_NUM_THREADS={cores}",
        )
    if processor.threads == 1 < cores:
        yield Problem(
            f"torch works with one thread, and this process may use {cores} cores",
            "leave OMP_NUM_THREADS out",
        )
    if processor.load is not None and processor.load > processor.cores + BUSY:
        yield Problem(
            f"{processor.load:.1f} processes have wanted a core in the last minute, and there are "
            f"{processor.cores}: everything takes longer, and what is measured here is too slow",
            "wait for the others, or end them",
        )


def usable_cores(machine: Machine) -> int:
    """As many as this process is allowed, or its container's share of their time is worth."""
    processor = machine.processor
    worth = processor.allowed if processor.quota is None else ceil(processor.quota)
    return max(1, min(processor.allowed, worth))


def memory_problems(machine: Machine) -> Iterator[Problem]:
    free = machine.memory.free
    if free is not None and free < LITTLE_MEMORY:
        yield Problem(
            f"{free / MIB:,.0f} MiB of memory are free",
            "end other programs; `vitrail plan MODEL` tells what a training needs",
        )


def conclusions(machine: Machine, speeds: "Speeds") -> Iterator[str]:
    """What is fast here, and why."""
    for name in machine.accelerators:
        yield f"{name} computes, unless --device or --machine.device says otherwise"
    yield f"{type_words(speeds)}; training takes {speeds.precision}: {speeds.reason}"
    if speeds.threads > 1:
        times = speeds.float32 / speeds.float32_alone
        faster = f"{times:.1f} times as fast as one" if times > ALIKE else "no faster than one"
        yield f"{speeds.threads} threads multiply {faster}"
    if speeds.parts > 1:
        yield f"training goes in {speeds.parts} parts, each on cores of its own"
    if speeds.jpeg_simplejpeg is None:
        yield "JPEGs are decoded by Pillow; install vitrail[fast], and it goes faster"
    else:
        times = speeds.jpeg_simplejpeg / speeds.jpeg_pillow
        yield f"simplejpeg decodes JPEGs, {times:.1f} times as fast as Pillow would"


def type_words(speeds: "Speeds") -> str:
    """`float32 is the fastest type here: bfloat16 takes 3.1 times as long`."""
    ratio = speeds.float32 / speeds.bfloat16
    if ratio > ALIKE:
        return f"float32 is the fastest type here: bfloat16 takes {ratio:.1f} times as long"
    if 1 / ratio > ALIKE:
        return f"bfloat16 is the fastest type here: float32 takes {1 / ratio:.1f} times as long"
    return "float32 and bfloat16 are equally fast here"
