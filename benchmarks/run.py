"""`make bench`: measure vitrail beside its peers and write docs/benchmarks.md.

Each section is a module with `report()`; name sections to run only those.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

from timing import machine

SECTIONS = ["fidelity", "models", "training", "fewshot", "inspection", "prediction", "data"]
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Made by `make bench`, which measures everything again on your machine and rewrites this page.
Times were taken on {machine}; a section is one run.
Compare ratios, not times: they come from things that took turns.
"""


def main(names: list[str]) -> None:
    """Measure the named sections, or all; sections that are not measured stay on the page."""
    page = sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() and names else {}
    for name in names or SECTIONS:
        print(f"measuring {name}", flush=True)
        page |= sections(import_module(name).report())
        print("\n".join(page.values()))
    PAGE.parent.mkdir(exist_ok=True)
    text = "\n".join([HEAD.format(machine=machine()), *page.values()])
    PAGE.write_text(text, encoding="utf-8")
    print(f"written to {PAGE.name}")


def sections(text: str) -> dict[str, str]:
    """The parts of a page by their headings."""
    parts = re.split(r"^(?=## )", text, flags=re.M)
    return {part.splitlines()[0]: part.rstrip() + "\n" for part in parts if part.startswith("## ")}


if __name__ == "__main__":
    main(sys.argv[1:])
