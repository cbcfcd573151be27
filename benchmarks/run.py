"""`make bench`: measure vitrail beside its peers and write docs/benchmarks.md.

Each section is a module with `report()`; name sections to run only those.
"""

import sys
from importlib import import_module
from pathlib import Path

from timing import machine

SECTIONS = ["fidelity", "models", "data"]
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Made by `make bench`, which measures everything again on your machine and rewrites this page.
Times are of one run on {machine}.
Compare ratios, not times: they come from things that took turns.
"""


def main(names: list[str]) -> None:
    parts = [HEAD.format(machine=machine())]
    for name in names or SECTIONS:
        print(f"measuring {name}", flush=True)
        parts.append(import_module(name).report())
    text = "\n".join(parts)
    print(text)
    if not names:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
        print(f"written to {PAGE.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main(sys.argv[1:])
