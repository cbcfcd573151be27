"""`vitrail doctor`: hardware, packages, speed and problems of this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vitrail.cli.console import paragraph, print_json, print_lines, table
from vitrail.cli.options import UNMET, Command, Json
from vitrail.extras import EXTRAS
from vitrail.formatting import byte_size
from vitrail.planning.doctor import (
    SIDE,
    VARIABLES,
    WIDTH,
    Machine,
    Problem,
    Speeds,
    draw_conclusions,
    find_problems,
    inspect_machine,
    measure_speeds,
)


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Report hardware, packages, measured speed and problems of this machine."""

    measure: bool = True
    """Measure matrix products and JPEG decoding, for a second or two."""
    json: Json = False

    def run(self) -> int:
        machine = inspect_machine()
        speeds = measure_speeds() if self.measure and machine["whole"] else None
        problems = find_problems(machine)
        if self.json:
            conclusions = [*draw_conclusions(machine, speeds)] if speeds else []
            print_json(
                machine | {"measured": speeds, "conclusions": conclusions, "problems": problems}
            )
        else:
            print_lines(report(machine, speeds, problems))
        return UNMET if any(problem["fatal"] for problem in problems) else 0


def report(machine: Machine, speeds: Speeds | None, problems: Sequence[Problem]) -> Iterator[str]:
    yield from paragraph(
        f"vitrail {machine['vitrail']}, Python {machine['python']}, {machine['system']}"
    )
    required = ", ".join(f"{p['name']} {p['version'] or 'missing'}" for p in machine["packages"])
    rows = [("required", required or "unknown: vitrail is not installed as a package")]
    for name, packages in machine["extras"].items():
        if all(package["version"] for package in packages):
            installed = ", ".join(f"{p['name']} {p['version']}" for p in packages)
            rows.append((f"vitrail[{name}]", installed or "unknown"))
        else:
            rows.append((f"vitrail[{name}]", f"not installed: {EXTRAS[name]}"))
            rows.append(("", f"pip install 'vitrail[{name}]'"))
    yield from section("Packages", rows)
    processor, memory = machine["processor"], machine["memory"]
    rows = [("processor", processor["model"])]
    if processor["able"]:
        able = [f"{name} {'yes' if it else 'no'}" for name, it in processor["able"].items()]
        rows.append(("instructions", f"{', '.join(able)}; torch uses {processor['capability']}"))
    cores = [f"{processor['allowed']} of {processor['cores']} available to this process"]
    if processor["quota"] is not None:
        cores.append(f"container limit {processor['quota']:g} cores")
    if processor["threads"] is not None:
        threads = processor["threads"]
        cores.append(f"{threads} thread{'s' * (threads != 1)} in torch")
    if processor["load"] is not None:
        cores.append(f"load {processor['load']:.1f}")
    rows.append(("cores", ", ".join(cores)))
    free = "" if memory["free"] is None else f"{byte_size(memory['free'])} free of "
    limit = f", container limit {byte_size(memory['limit'])}" if memory["limit"] else ""
    rows.append(("memory", f"{free}{byte_size(memory['total'])}{limit}"))
    rows.append(("accelerators", "; ".join(machine["accelerators"]) or "none"))
    yield from section("Machine", rows)
    disks = [
        (disk["what"], f"{byte_size(disk['free'])} at {disk['path']}") for disk in machine["disks"]
    ]
    yield from section("Free disk space", disks)
    environment = [(k, f"{value} ({VARIABLES[k]})") for k, value in machine["environment"].items()]
    yield from section("Environment", environment or [("none set", "")])
    if speeds is not None:
        threads = f"{speeds['threads']} thread{'s' * (speeds['threads'] != 1)}"
        products = {
            f"float32, {threads}": speeds["float32"],
            f"bfloat16, {threads}": speeds["bfloat16"],
        }
        if speeds["threads"] > 1:
            products["float32, 1 thread"] = speeds["float32_alone"]
        rows = [
            (name, f"{value / 1e9:,.1f} GFLOP/s", f"{WIDTH} x {WIDTH} matrix product")
            for name, value in products.items()
        ]
        for name, value in (
            ("simplejpeg", speeds["jpeg_simplejpeg"]),
            ("Pillow", speeds["jpeg_pillow"]),
        ):
            if value is not None:
                rows.append(
                    (f"{name}, 1 thread", f"{value:,.0f} JPEGs/s", f"{SIDE} x {SIDE} pixels")
                )
        yield ""
        yield "Measured speed"
        yield from table(rows, "lrl", indent=2)
        for sentence in draw_conclusions(machine, speeds):
            yield from paragraph(f"- {sentence}")
    yield ""
    yield "Problems" if problems else "No problems found"
    for problem in problems:
        yield from paragraph(f"- {problem['what']}; {problem['remedy']}")


def section(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield ""
        yield title
        yield from table([(f"{name:20}", text) for name, text in rows], "lw", indent=2)
