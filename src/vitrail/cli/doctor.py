"""`vitrail doctor`: what this machine is, what is fast on it and why, and what is wrong."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from vitrail.cli.status import UNMET
from vitrail.cli.text import WIDTH, paragraph, printable
from vitrail.extras import EXTRAS
from vitrail.formatting import byte_size
from vitrail.planning.doctor import (
    SIDE,
    VARIABLES,
    Machine,
    Package,
    Problem,
    Speeds,
    draw_conclusions,
    find_problems,
    inspect_machine,
    measure_speeds,
)
from vitrail.planning.doctor import WIDTH as MATRIX

NAME = 24  # columns of what is told about


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Tell what this machine is, what is fast on it and why, and what is wrong."""

    measure: bool = True
    """Measure matrix products and JPEGs, for a second or two."""
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> int:
        machine = inspect_machine()
        speeds = measure_speeds() if self.measure and machine["whole"] else None
        found = find_problems(machine)
        if self.json:
            print(json.dumps(as_json(machine, speeds, found), indent=1))
        else:
            for line in report(machine, speeds, found):
                print(printable(line))
        return UNMET if any(problem["fatal"] for problem in found) else 0


def as_json(machine: Machine, speeds: Speeds | None, found: Sequence[Problem]) -> dict[str, Any]:
    return {
        **machine,
        "measured": speeds,
        "conclusions": [*draw_conclusions(machine, speeds)] if speeds else [],
        "problems": [*found],
    }


def report(machine: Machine, speeds: Speeds | None, found: Sequence[Problem]) -> Iterator[str]:
    """All of it for people, in 80 columns."""
    yield from paragraph(
        f"vitrail {machine['vitrail']}, Python {machine['python']}, {machine['system']}"
    )
    yield from package_words(machine)
    yield ""
    yield from machine_words(machine)
    if machine["disks"]:
        yield ""
        yield "Free disk"
        for disk in machine["disks"]:
            yield from row(disk["what"], f"{byte_size(disk['free'])} for {disk['path']}")
    yield ""
    yield "Environment"
    for name, value in machine["environment"].items():
        yield from row(f"{name}", f"{value}  ({VARIABLES[name]})")
    if not machine["environment"]:
        yield "  nothing that matters is set"
    if speeds is not None:
        yield ""
        yield from speed_words(machine, speeds)
    yield ""
    yield "Problems" if found else "No problems found"
    for problem in found:
        yield from paragraph(f"- {problem['what']}; {problem['remedy']}")


def package_words(machine: Machine) -> Iterator[str]:
    yield ""
    yield "Packages"
    yield from wrap(
        ", ".join(map(named, machine["packages"])) or "as vitrail is not installed, none are known",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    for name, packages in machine["extras"].items():
        if all(package["version"] for package in packages):
            yield from row(f"vitrail[{name}]", ", ".join(map(named, packages)) or "not known")
        else:
            yield from row(f"vitrail[{name}]", f"not there: {EXTRAS[name]}")
            yield from row("", f"pip install 'vitrail[{name}]'")


def named(package: Package) -> str:
    return f"{package['name']} {package['version'] or 'missing'}"


def machine_words(machine: Machine) -> Iterator[str]:
    processor, memory = machine["processor"], machine["memory"]
    yield "Machine"
    yield from row("processor", processor["model"])
    if processor["able"]:
        able = [f"{name} {'yes' if it else 'no'}" for name, it in processor["able"].items()]
        yield from row("instructions", f"{', '.join(able)}; torch uses {processor['capability']}")
    shared = [f"{processor['allowed']} of {processor['cores']} for this process"]
    if processor["quota"] is not None:
        shared.append(f"{processor['quota']:g} cores' worth of time for its container")
    if processor["threads"] is not None:
        shared.append(f"{threads(processor['threads'])} of torch")
    if processor["load"] is not None:
        shared.append(f"load {processor['load']:.1f}")
    yield from row("cores", ", ".join(shared))
    limit = (
        f", of which the container may take {byte_size(memory['limit'])}" if memory["limit"] else ""
    )
    free = "" if memory["free"] is None else f"{byte_size(memory['free'])} free of "
    yield from row("memory", f"{free}{byte_size(memory['total'])}{limit}")
    yield from row("accelerators", "; ".join(machine["accelerators"]) or "none")


def speed_words(machine: Machine, speeds: Speeds) -> Iterator[str]:
    yield "What is fast here, as just measured"
    every = threads(speeds["threads"])
    products = {f"float32, {every}": speeds["float32"], f"bfloat16, {every}": speeds["bfloat16"]}
    if speeds["threads"] > 1:
        products["float32, 1 thread"] = speeds["float32_alone"]
    for name, value in products.items():
        yield f"  {name:22}{value / 1e9:>9,.1f} GFLOP/s, matrices of {MATRIX} x {MATRIX}"
    for name, value in (
        ("simplejpeg", speeds["jpeg_simplejpeg"]),
        ("Pillow", speeds["jpeg_pillow"]),
    ):
        if value is not None:
            yield f"  {f'{name}, 1 thread':22}{value:>9,.0f} JPEGs/s of {SIDE} x {SIDE} pixels"
    yield "So"
    for sentence in draw_conclusions(machine, speeds):
        yield from paragraph(f"- {sentence}")


def threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def row(name: str, words: str) -> list[str]:
    """A name and what there is to say, in a column of its own."""
    lines = wrap(words, WIDTH - NAME, break_on_hyphens=False, break_long_words=False)
    return [f"  {'' if n else name:{NAME - 2}}{line}" for n, line in enumerate(lines)]
