"""Compile the WebAssembly kernels of the HTML export; run it after changing kernels.c.

    pip install ziglang==0.17.0
    python scripts/build_kernels.py

The result is committed, so that neither users nor tests need a compiler. Zig is a C compiler for
WebAssembly that pip can install.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src" / "vitrail" / "export" / "browser"
OPTIONS = ["-target", "wasm32-freestanding", "-O3", "-msimd128", "-nostdlib"]
LINKER = ["--no-entry", "--import-memory", "--strip-all", "--export=__heap_base", "-z"]
LINKER += ["stack-size=65536"]


def build(out: Path) -> None:
    linker = [f"-Wl,{option}" for option in LINKER]
    command = [sys.executable, "-m", "ziglang", "cc", *OPTIONS, *linker]
    subprocess.run([*command, "-o", str(out), str(FOLDER / "kernels.c")], check=True)


if __name__ == "__main__":
    build(FOLDER / "kernels.wasm")
