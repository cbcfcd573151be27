"""Which part of vitrail imports which: read from the source, as a table or as a drawing.

    python scripts/imports.py                                   a table in Markdown
    python scripts/imports.py --svg docs/house/imports.svg      a drawing, arrows downward

Needs nothing but Python. A part is a package of src/vitrail, or a file beside them. Imports inside
functions and for the type checker alone count too, as in tests/test_architecture.py. The drawing
leaves out what follows from other arrows; the table has them all.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "vitrail"
OUTSIDE = ("__init__", "__main__")  # the public names, and the command: they are no part
COMMAND = "python scripts/imports.py --svg docs/house/imports.svg"

# What goes in and out, and where a part stands from left to right; a part that is not here is
# drawn too, without words, at the right of its layer. In which layer it is, its imports decide.
WORDS = {
    "cli": ("commands", 2.0),
    "reproduction": ("the paper, run by run", 1.0),
    "planning": ("a run, before it begins", 0.42),
    "demo": ("one picture", 2.5),
    "serving": ("answers over HTTP", 3.62),
    "training": ("settings → a bundle", 0.42),
    "inspection": ("what a model looks at", 2.1),
    "prediction": ("pictures → answers", 3.62),
    "probing": ("features → a head", 1.25),
    "export": ("a model → ONNX", 3.2),
    "evaluation": ("a model → numbers", 2.2),
    "checkpoints": ("files ↔ a model", 1.45),
    "data": ("files → batches", 0.85),
    "models": ("batches → logits", 2.05),
    "distributed": ("many processes", 3.25),
    "errors": ("what a user can mend", 2.05),
    "formatting": ("numbers as text", 3.05),
    "extras": ("what may be missing", 1.05),
}
COLUMN, ROW = 190, 74  # pixels from one place to the next
WIDE, HIGH = 150, 42  # pixels of a box
EDGE = 16  # pixels around everything
STYLE = """
:root { --ink: #1d1d1f; --soft: #57606a; --line: #8b949e; --paper: #fff; --box: #f3f1ee; }
@media (prefers-color-scheme: dark) {
:root { --ink: #e6edf3; --soft: #9da7b3; --line: #6e7681; --paper: #0d1117; --box: #1c2129; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif;
  text-anchor: middle; fill: var(--soft); }
.name { font-size: 14px; font-weight: 600; fill: var(--ink); }
.paper { fill: var(--paper); }
.box { fill: var(--box); stroke: var(--line); }
.arrow { fill: none; stroke: var(--line); stroke-width: 1.4; marker-end: url(#head); }
#head path { fill: var(--line); }
"""

Graph = Mapping[str, set[str]]  # part → the parts it imports


class Part(NamedTuple):
    """A part, and how large it is."""

    files: int
    lines: int


def parts(package: Path = PACKAGE) -> dict[str, Part]:
    """Every part, by its name."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        name = part_of(path, package)
        files[name] += 1
        lines[name] += len(path.read_text(encoding="utf-8").splitlines())
    return {name: Part(files[name], lines[name]) for name in sorted(files) if name not in OUTSIDE}


def graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """For each part the others that some file of it imports."""
    found: dict[str, set[str]] = {name: set() for name in parts(package)}
    for path in package.rglob("*.py"):
        name = part_of(path, package)
        if name in found:
            found[name] |= (imported(path) & found.keys()) - {name}
    return found


def part_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The second words of what a file imports from vitrail."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("vitrail.")}


def layers(graph: Graph) -> dict[str, int]:
    """How high each part stands: 0 imports nothing, every other is above all that it imports."""
    heights: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...] = ()) -> int:
        if name in above:
            raise SystemExit(f"{' imports '.join((*above, name))}: a circle has no layers")
        if name not in heights:
            below = [height(other, (*above, name)) for other in sorted(graph[name])]
            heights[name] = max(below, default=-1) + 1
        return heights[name]

    for name in graph:
        height(name)
    return heights


def told(graph: Graph) -> dict[str, set[str]]:
    """The arrows that do not follow from others."""
    reached: dict[str, set[str]] = {}
    for name in sorted(graph, key=layers(graph).__getitem__):
        reached[name] = graph[name].union(*(reached[other] for other in graph[name]))
    return {
        name: {other for other in used if not any(other in reached[via] for via in used)}
        for name, used in graph.items()
    }


def table(graph: Graph, sizes: Mapping[str, Part]) -> Iterator[str]:
    """In Markdown, from the top layer down."""
    yield "| part | layer | files | lines | imports |"
    yield "| --- | ---: | ---: | ---: | --- |"
    heights = layers(graph)
    for name in sorted(graph, key=lambda name: (-heights[name], name)):
        used = ", ".join(sorted(graph[name], key=lambda other: (-heights[other], other)))
        size = sizes[name]
        yield f"| {name} | {heights[name]} | {size.files} | {size.lines:,} | {used or 'nothing'} |"


def places(graph: Graph) -> dict[str, tuple[float, float]]:
    """The middle of each part's box, in pixels."""
    heights = layers(graph)
    top = max(heights.values())
    found: dict[str, tuple[float, float]] = {}
    for layer in range(top + 1):
        names = sorted((name for name in graph if heights[name] == layer), key=unknown_last)
        right = 0.0
        for name in names:
            column = WORDS[name][1] if name in WORDS else right + 1
            right = max(right, column)
            x = EDGE + WIDE / 2 + (column - 0.42) * COLUMN
            found[name] = (x, EDGE + HIGH / 2 + (top - layer) * ROW)
    return found


def unknown_last(name: str) -> tuple[bool, str]:
    return name not in WORDS, name


def drawing(graph: Graph) -> str:
    """The graph as an SVG file that is right by day and by night."""
    middles = places(graph)
    wide = max(x for x, _ in middles.values()) + WIDE / 2 + EDGE
    high = max(y for _, y in middles.values()) + HIGH / 2 + EDGE
    drawn = told(graph)
    arrows = [(name, other) for name in sorted(drawn) for other in sorted(drawn[name])]
    spoken = "; ".join(f"{name} imports {other}" for name, other in arrows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
            f'viewBox="0 0 {wide:.0f} {high:.0f}" role="img">',
            "<title>Which part of vitrail imports which</title>",
            f"<desc>{escape(spoken)}</desc>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0.5L8 4L0 7.5z"/></marker></defs>',
            f'<rect class="paper" width="{wide:.0f}" height="{high:.0f}"/>',
            *(arrow(middles[name], middles[other]) for name, other in arrows),
            *(box(name, *middles[name]) for name in sorted(graph)),
            "</svg>\n",
        ]
    )


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From the lower edge of a box to the upper edge of another, leaving and coming upright."""
    (x0, y0), (x1, y1) = start, end
    lean = max(-1.0, min(1.0, (x1 - x0) / (2 * COLUMN)))  # not all at one point of the edge
    x0, y0, x1, y1 = x0 + 40 * lean, y0 + HIGH / 2, x1 - 40 * lean, y1 - HIGH / 2
    bend = min(ROW, y1 - y0) * 0.5
    return (
        f'<path class="arrow" d="M{x0:.0f} {y0:.0f}'
        f'C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"/>'
    )


def box(name: str, x: float, y: float) -> str:
    words = WORDS[name][0] if name in WORDS else ""
    left, top = x - WIDE / 2, y - HIGH / 2
    return (
        f'<rect class="box" x="{left:.0f}" y="{top:.0f}" width="{WIDE}" height="{HIGH}" rx="6"/>'
        f'<text class="name" x="{x:.0f}" y="{y - 3:.0f}">{escape(name)}</text>'
        f'<text x="{x:.0f}" y="{y + 13:.0f}">{escape(words)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Which part of vitrail imports which.")
    parser.add_argument("--svg", type=Path, help="draw it into this file instead")
    path = parser.parse_args().svg
    found = graph()
    if path is None:
        print(*table(found, parts()), sep="\n")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawing(found), encoding="utf-8")
    print(f"done: {path}")


if __name__ == "__main__":
    main()
