"""Smoke test of the wheel: build it, install it into an empty environment, run commands.

    python scripts/smoke.py           with the Python that runs this
    python3.13 scripts/smoke.py       with another

Prints a line for each step with its time; the first failure ends it with status 1.
The wheel stays in dist/. Needs pip and an index to install from, nothing else.
"""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
DATA = "builtin:sign-digits"
BUILTIN = "vitrail/data/builtin/sign_digits_100.tar"
MIN_ACCURACY = 0.2  # clearly above chance for ten classes
REMOVED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "VIRTUAL_ENV")
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def main() -> None:
    start = time.monotonic()
    version = re.search(r'__version__ = "(.+)"', read("src/vitrail/__init__.py"))[1]
    wheel = DIST / f"vitrail-{version}-py3-none-any.whl"
    print(f"vitrail {version}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory(prefix="vitrail-smoke-") as folder:
        sandbox = Sandbox(Path(folder))
        build = (*PIP, "wheel", "--no-deps", "--wheel-dir", DIST, ROOT)
        sandbox.step("build the wheel", sys.executable, *build)
        print(f"{'':11}{contents(wheel)}")
        sandbox.step("create an environment", sys.executable, "-m", "venv", sandbox.folder / "venv")
        install = (*PIP, "install", "--constraint", ROOT / "constraints.txt", wheel)
        sandbox.step("install the wheel", sandbox.bin("python"), *install)
        sandbox.step("check requirements", sandbox.bin("python"), *PIP, "check")
        write_images(wheel, sandbox.folder / "pictures")
        run_commands(sandbox, version)
    log_step("all passed", time.monotonic() - start)


def run_commands(sandbox: "Sandbox", version: str) -> None:
    """Run the commands of a first session, from a folder outside of the repository."""
    expect(sandbox.vitrail("--version").strip() == f"vitrail {version}", "wrong version")
    expect("ViT-B/16" in sandbox.vitrail("models"), "no ViT-B/16 in the list")
    sandbox.vitrail("train", DATA, "--steps", "80", "--out", "runs/first")
    result = json.loads(sandbox.vitrail("evaluate", "runs/first", DATA, "--json"))
    expect(result["accuracy"] > MIN_ACCURACY, f"accuracy too low: {result['accuracy']:.1%}")
    print(f"{'':11}accuracy {result['accuracy']:.1%} of {result['samples']} photographs")
    answers = sandbox.vitrail("predict", "runs/first", "pictures", "--json").splitlines()
    expect(len(answers) == 3 and all(json.loads(a)["labels"] for a in answers), "no predictions")
    sandbox.vitrail("fewshot", DATA, "--shots", "5", "--seeds", "1")  # of the built-in model
    sandbox.vitrail("inspect", "runs/first", "pictures", "--images", "16", "--out", "inside")
    for extra, words in {
        "serve": ("serve", "runs/first"),
        "export": ("export", "runs/first", "--out", "first.onnx"),
        "data": ("check", "hf:owner/name"),
    }.items():
        error = sandbox.vitrail(*words, status=2)
        expect(f"pip install 'vitrail[{extra}]'" in error, f"no install hint: {error}")
    sandbox.vitrail("demo", "--minutes", "0.3", "--out", "demo")
    for page in ("runs/first", "inside", "demo", "demo/inspection"):
        expect((sandbox.folder / page / "report.html").exists(), f"{page}/report.html is missing")
    expect((sandbox.folder / "demo" / "attention.png").exists(), "demo/attention.png is missing")


class Sandbox:
    """A folder with a virtual environment, in which commands are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {
            name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES
        }
        self.environment = environment | {"VITRAIL_CACHE": str(folder / "cache")}

    def bin(self, name: str) -> Path:
        return self.folder / "venv" / "bin" / name

    def vitrail(self, *words: str, status: int = 0) -> str:
        """Run a command; return stdout, or stderr if it is expected to fail."""
        return self.step(" ".join(("vitrail", *words)), self.bin("vitrail"), *words, status=status)

    def step(self, name: str, *command: str | Path, status: int = 0) -> str:
        start = time.monotonic()
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        expect(
            done.returncode == status,
            f"{name}: status {done.returncode}\n{done.stdout}\n{done.stderr}",
        )
        log_step(f"{name}: failed as expected" if status else name, time.monotonic() - start)
        return done.stderr if status else done.stdout


def contents(wheel: Path) -> str:
    """Check that the wheel contains the files of the package and its metadata, nothing else."""
    package = ROOT / "src" / "vitrail"
    files = (path for path in package.rglob("*") if path.is_file())
    expected = {p.relative_to(package.parent).as_posix() for p in files if p.suffix != ".pyc"}
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    expect(expected <= names, f"not in the wheel: {sorted(expected - names)}")
    expect(
        names - metadata <= expected, f"not in the package: {sorted(names - metadata - expected)}"
    )
    for name in ("licenses/LICENSE", "builtin/LICENSE", "builtin/ATTRIBUTION"):
        expect(any(x.endswith(name) for x in metadata), f"{name} is not among the license files")
    return f"{len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB"


def write_images(wheel: Path, folder: Path) -> None:
    """Write three test images of the built-in dataset as files."""
    folder.mkdir()
    archive = io.BytesIO(zipfile.ZipFile(wheel).read(BUILTIN))
    with tarfile.open(fileobj=archive) as tar:
        tests = [m for m in tar if m.name.startswith("test/") and m.name.endswith(".JPG")]
        for number, member in enumerate(tests[::150]):
            (folder / f"{number}.jpg").write_bytes(tar.extractfile(member).read())


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def log_step(name: str, seconds: float) -> None:
    print(f"{seconds:7.1f} s  {name}", flush=True)


def expect(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(message)


if __name__ == "__main__":
    main()
