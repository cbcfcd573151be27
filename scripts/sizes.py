"""How large the house is: files, lines and functions, beside the projects it is measured against.

    python scripts/sizes.py

Needs nothing but Python. A line is any line of a file, comments and blank ones too; a function
counts from its `def` to its last line, decorators left out and what is defined inside of it
included.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks")
LONG_FILE = 500  # lines
LONG_FUNCTION = 50  # lines
LISTED = 10  # of the longest functions

# Median and longest Python file: published figures of their repositories at the time of writing.
ANCHORS = {
    "nanochat": (222, 604),
    "big_vision": (147, 1478),
    "torchtitan": (239, 1960),
    "litgpt": (143, 3194),
    "timm": (247, 4922),
    "equinox": (134, 1278),
    "httpx": (248, 2019),
}


class Function(NamedTuple):
    """A function or method, and where it is."""

    lines: int
    name: str  # with its class, if it has one
    file: str  # as seen from the root
    line: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One folder: each file's length, and every function."""

    folder: str
    files: dict[str, int]  # path → lines
    functions: list[Function]  # the longest first

    @property
    def lines(self) -> int:
        return sum(self.files.values())

    @property
    def median(self) -> float:
        return median(self.files.values())

    @property
    def longest(self) -> str:
        return max(self.files, key=lambda path: self.files[path])

    @property
    def long_files(self) -> list[str]:
        return [path for path, lines in self.files.items() if lines > LONG_FILE]

    @property
    def long_functions(self) -> list[Function]:
        return [function for function in self.functions if function.lines > LONG_FUNCTION]

    @property
    def share(self) -> float:
        """How many of the functions are long."""
        return len(self.long_functions) / max(1, len(self.functions))


def sizes_of(folder: str, root: Path = ROOT) -> Sizes:
    """Every Python file below a folder of the root."""
    files: dict[str, int] = {}
    functions: list[Function] = []
    for path in sorted((root / folder).rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        files[name] = len(text.splitlines())
        functions += functions_in(ast.parse(text), name)
    return Sizes(folder=folder, files=files, functions=sorted(functions, reverse=True))


def functions_in(node: ast.AST, file: str, inside: str = "") -> Iterator[Function]:
    """The functions of a file, those inside of others too."""
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}{child.name}."
            if not isinstance(child, ast.ClassDef):
                lines = (child.end_lineno or child.lineno) - child.lineno + 1
                yield Function(lines, inside + child.name, file, child.lineno)
        yield from functions_in(child, file, name)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """In Markdown; all columns but the first are numbers, and stand at the right."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, marks, *rows)]


def folder_table(found: Sequence[Sizes]) -> list[str]:
    head = ("", *(sizes.folder for sizes in found))
    rows = {
        "files": [f"{len(s.files):,}" for s in found],
        "lines": [f"{s.lines:,}" for s in found],
        "median file": [f"{s.median:g}" for s in found],
        "longest file": [f"{s.files[s.longest]:,}" for s in found],
        f"files over {LONG_FILE} lines": [f"{len(s.long_files)}" for s in found],
        "functions": [f"{len(s.functions):,}" for s in found],
        f"functions over {LONG_FUNCTION} lines": [
            f"{len(s.long_functions)} ({100 * s.share:.1f} %)" for s in found
        ],
        "longest function": [f"{s.functions[0].lines}" for s in found],
    }
    return table(head, [(name, *cells) for name, cells in rows.items()])


def anchor_table(ours: Sizes) -> list[str]:
    rows = {"vitrail": (ours.median, ours.files[ours.longest])} | ANCHORS
    cells = [(name, f"{middle:g}", f"{longest:,}") for name, (middle, longest) in rows.items()]
    return table(("", "median file", "longest file"), cells)


def function_table(ours: Sizes) -> list[str]:
    rows = [(f"`{f.name}` in {f.file}:{f.line}", f"{f.lines}") for f in ours.functions[:LISTED]]
    return table((f"the {LISTED} longest functions of {ours.folder}", "lines"), rows)


def main() -> None:
    found = [sizes_of(folder) for folder in FOLDERS]
    print(*folder_table(found), sep="\n")
    print("\nThe others: published figures of their repositories at the time of writing.\n")
    print(*anchor_table(found[0]), sep="\n")
    print()
    print(*function_table(found[0]), sep="\n")


if __name__ == "__main__":
    main()
