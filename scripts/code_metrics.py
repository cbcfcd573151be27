"""Size and structure of the source: a Markdown table, with other checkouts beside it.

    python scripts/code_metrics.py                        this checkout
    python scripts/code_metrics.py ../before .            two checkouts side by side
    python scripts/code_metrics.py --folders ../before .  files and lines of each package
    python scripts/code_metrics.py --train .              also trace a short `vitrail train`

Needs nothing but Python; `--train` needs the package's dependencies. A line is any line of a file.
Imports inside functions count. `--train` counts the files whose functions run, and the calls they
make, from the start of the command to the first gradient.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

# Runs in a process of its own with PYTHONPATH set to the checkout's src.
TRACER = """
import sys, threading
files, calls = set(), 0
def profile(frame, event, arg):
    global calls
    name = frame.f_code.co_filename
    if event == "call" and "/vitrail/" in name and "site-packages" not in name:
        if frame.f_code.co_name != "<module>":
            files.add(name); calls += 1
import torch
class Done(BaseException): pass
def backward(*args, **options): raise Done
from vitrail.cli import main
torch.Tensor.backward = backward
sys.setprofile(profile); threading.setprofile(profile)
try: main(["train", sys.argv[1], "--out", sys.argv[2], "--steps", "1"])
except Done: pass
sys.setprofile(None)
print("TRACED", len(files), calls)
"""


def measure(checkout: Path) -> dict[str, str]:
    """The rows of the table for one checkout."""
    sources = python_files(checkout)
    trees = {path: ast.parse(text) for path, text in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    lines = {path: text.count("\n") for path, text in sources.items()}
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    dataclasses = [
        c for c in classes if any("dataclass" in ast.unparse(d) for d in c.decorator_list)
    ]
    importers = Counter(used for path, tree in trees.items() for used in imports(path, tree, trees))
    single = [module for module, count in importers.items() if count == 1 and "__" not in module]
    total = sum(lines.values())
    return {
        "files": f"{len(sources)}",
        "lines": f"{total:,}",
        "functions per 1,000 lines": f"{1000 * len(functions) / total:.0f}",
        "dataclasses": f"{len(dataclasses)}",
        "modules with exactly one importer": f"{len(single)}",
        "longest file": f"{max(lines.values())}",
    }


def python_files(checkout: Path) -> dict[str, str]:
    """Path below src/vitrail → text."""
    root = checkout / "src" / "vitrail"
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.py"))
    }


def imports(path: str, tree: ast.AST, trees: dict[str, ast.Module]) -> set[str]:
    """The package's modules that a module imports."""
    used = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            file = name.removeprefix("vitrail.").replace(".", "/") + ".py"
            if name.startswith("vitrail.") and file in trees and file != path:
                used.add(file)
    return used


def folder_rows(checkout: Path) -> dict[str, str]:
    counts: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path, text in python_files(checkout).items():
        folder = path.split("/")[0] if "/" in path else "(top level)"
        counts[folder] += 1
        lines[folder] += text.count("\n")
    return {folder: f"{counts[folder]} / {lines[folder]:,}" for folder in sorted(counts)}


def trace_train(checkout: Path) -> dict[str, str]:
    """Files and calls of `vitrail train` up to the first gradient, on a tiny folder of images."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "images"
        for split in ("train", "val"):
            for color in ("red", "green", "blue"):
                for number in range(8):
                    path = folder / split / color / f"{number}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.new("RGB", (64, 64), color).save(path)
        done = subprocess.run(
            [sys.executable, "-c", TRACER, str(folder), f"{temporary}/run"],
            env=os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("TRACED")), "")
    if not line:
        raise SystemExit(done.stderr[-2000:])
    _, files, calls = line.split()
    return {"files on the way to the first gradient": files, "calls on that way": f"{int(calls):,}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path, nargs="*", default=[Path(__file__).parents[1]])
    parser.add_argument("--folders", action="store_true")
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    columns = []
    for checkout in options.checkouts:
        rows = folder_rows(checkout) if options.folders else measure(checkout)
        columns.append(rows | (trace_train(checkout) if options.train else {}))
    print(f"| | {' | '.join(str(path) for path in options.checkouts)} |")
    print(f"|---|{'---:|' * len(columns)}")
    for name in dict.fromkeys(name for rows in columns for name in rows):
        print(f"| {name} | {' | '.join(rows.get(name, '') for rows in columns)} |")


if __name__ == "__main__":
    main()
