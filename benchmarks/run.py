"""`make bench`: measure vitrail beside its peers and write benchmarks/README.md.

    python benchmarks/run.py                 everything; resumes after an interruption
    python benchmarks/run.py models data     these sections anew; the rest of the page stays

A section is a module with `report()`, which gives its part of the page. One whose text begins with
`Not measured: ` leaves what the page had. Lines made by `timing.claim` are repeated at the top.
"""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import result_cache
from timing import machine, machine_table
from vitrail.errors import VitrailError, unknown
from vitrail.training.memory import configure_malloc

PAGE = Path(__file__).with_name("README.md")
NOT = "Not measured: "
CLAIM = re.compile(r"^\*\*(.+?): (.+)\.\*\*$", re.M)
HEAD = """# Benchmarks

Written by `make bench`, which repeats all measurements on your machine
(`make bench DATA=folder WEIGHTS=checkpoint` for sections that need data). Compare ratios, not
times: times from two machines, or from two hours on a shared one, are not comparable. Measurements
that are compared are interleaved; values are medians over rounds. The last line of a section has
its date, duration and machine. The most recent machine:
"""


class Section(NamedTuple):
    """What a module adds to the page, and about how long that takes on two cores."""

    headings: tuple[str, ...]
    minutes: float


SECTIONS = {
    "race": Section(("## Time to accuracy",), 40),
    "transfer": Section(("## Fine-tuning",), 35),
    "fidelity": Section(("## Fidelity",), 0.2),
    "models": Section(("## Models",), 4),
    "training": Section(("## The training loop",), 2),
    "growth": Section(("## Scaling",), 4),
    "memory": Section(("## Memory",), 6),
    "fewshot": Section(("## The few-shot probe",), 4),
    "inspection": Section(("## Inspection",), 3),
    "prediction": Section(("## Prediction",), 11),
    "serving": Section(("## Serving",), 3),
    "data": Section(("## Data",), 2),
    "versions": Section(("## Previous version",), 4),
}


CACHED_MINUTES = 0.02  # a section that took less was cached


@dataclass
class Incomplete(Exception):  # noqa: N818  (it is an outcome, and no error)
    """A section lacks data or a library that it needs."""

    parts: dict[str, str]


def main(names: Sequence[str]) -> None:
    """Measure the named sections, or all; what is not measured stays on the page."""
    for name in names:
        if name not in SECTIONS:
            raise unknown("section", name, SECTIONS)
    result_cache.FOLDER = result_cache.FOLDER / ("-".join(names) or "all")
    configure_malloc()  # as `vitrail train` does, for every section
    page = sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    PAGE.parent.mkdir(exist_ok=True)
    # The short sections first, each written at once: an interruption loses little.
    for name, parts in measured(sorted(names or SECTIONS, key=lambda n: SECTIONS[n].minutes)):
        for heading, part in parts.items():
            if lacks(part):
                print(f"{name}: {part.split(NOT)[1].strip()}", flush=True)
                page.setdefault(heading, part)
            else:
                page[heading] = part
        PAGE.write_text(assemble(page, machine_table()), encoding="utf-8")
    result_cache.forget()
    print(f"written to {PAGE.name}")


def measured(names: Sequence[str]):
    """Yield each section's parts of the page, and print the progress."""
    spent = expected = 0.0
    for number, name in enumerate(names):
        left = minutes_left(names[number:], spent, expected)
        print(f"{number + 1} of {len(names)}: {name}; about {left:.0f} minutes left", flush=True)
        start = time.monotonic()
        try:
            parts = result_cache.cached(f"section-{name}", lambda name=name: complete(name))
        except Incomplete as incomplete:
            parts = incomplete.parts
        minutes = (time.monotonic() - start) / 60
        if minutes > CACHED_MINUTES:
            spent, expected = spent + minutes, expected + SECTIONS[name].minutes
        yield name, parts


def minutes_left(names: Sequence[str], spent: float, expected: float) -> float:
    """The usual minutes of these sections, at the pace of those that were measured so far."""
    pace = spent / expected if spent > 1 else 1.0
    return pace * sum(SECTIONS[name].minutes for name in names)


def complete(name: str) -> dict[str, str]:
    """Measure a section; an incomplete one is not cached, so the next run tries it again."""
    start = time.monotonic()
    try:
        text = import_module(name).report()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("vitrail", *SECTIONS):
            raise
        text = f"{error.name} is not installed"
    note = f"*{date.today().isoformat()}, {time.monotonic() - start:.0f} s, {machine()}.*\n"
    parts = {
        heading: part if lacks(part) else f"{part}\n{note}"
        for heading, part in (sections(text) or lacking(name, text)).items()
    }
    if any(map(lacks, parts.values())):
        raise Incomplete(parts)
    return parts


def sections(text: str) -> dict[str, str]:
    """The parts of a page by their headings."""
    parts = re.split(r"^(?=## )", text, flags=re.M)
    return {part.splitlines()[0]: part.rstrip() + "\n" for part in parts if part.startswith("## ")}


def lacking(name: str, reason: str) -> dict[str, str]:
    reason = reason.strip().removeprefix(NOT)
    return {heading: f"{heading}\n\n{NOT}{reason}\n" for heading in SECTIONS[name].headings}


def lacks(part: str) -> bool:
    return part.partition("\n")[2].lstrip().startswith(NOT)


def assemble(page: Mapping[str, str], about: Sequence[str]) -> str:
    """The whole page: sections in their order, whatever the order they were measured in."""
    headings = [heading for section in SECTIONS.values() for heading in section.headings]
    parts = [page[heading] for heading in headings if heading in page]
    return "\n".join([HEAD, *about, "", *summary(parts), *parts])


def summary(parts: Sequence[str]) -> list[str]:
    """All claims of all sections, in a table."""
    rows = []
    for part in parts:
        heading = part.splitlines()[0].removeprefix("## ")
        link = f"[{heading}](#{heading.lower().replace(' ', '-')})"
        rows += [f"| {what} | {found} | {link} |" for what, found in CLAIM.findall(part)]
    return ["## Summary", "", "| | | section |", "|---|---|---|", *rows, ""] if rows else []


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except VitrailError as error:
        sys.exit(f"bench: {error}")
