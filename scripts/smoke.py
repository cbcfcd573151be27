"""Does the wheel work where nothing else is? Build it, install it into an empty place, and use it.

    python scripts/smoke.py           with the Python that runs this
    python3.13 scripts/smoke.py       with another

A line for each step, with its time; the first that fails ends with status 1 and what it printed.
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
LEARNED = 0.2  # accuracy on ten classes that is clearly above chance
UNWANTED = ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "VIRTUAL_ENV")
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def main() -> None:
    begun = time.monotonic()
    version = re.search(r'__version__ = "(.+)"', read("src/vitrail/__init__.py"))[1]
    wheel = DIST / f"vitrail-{version}-py3-none-any.whl"
    print(f"vitrail {version}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory(prefix="vitrail-smoke-") as folder:
        place = Place(Path(folder))
        build = (*PIP, "wheel", "--no-deps", "--wheel-dir", DIST, ROOT)
        place.step("build the wheel", sys.executable, *build)
        print(f"{'':11}{contents(wheel)}")
        place.step("an empty environment", sys.executable, "-m", "venv", place.folder / "venv")
        install = (*PIP, "install", "--constraint", ROOT / "constraints.txt", wheel)
        place.step("install the wheel", place.bin("python"), *install)
        place.step("nothing is missing", place.bin("python"), *PIP, "check")
        write_pictures(wheel, place.folder / "pictures")
        use(place, version)
    say("all of it works", time.monotonic() - begun)


def use(place: "Place", version: str) -> None:
    """What a new user might type, from a folder that is not the repository's."""
    expect(place.vitrail("--version").strip() == f"vitrail {version}", "another version answers")
    expect("ViT-B/16" in place.vitrail("models"), "there is no ViT-B/16")
    place.vitrail("train", DATA, "--minutes", "0.4", "--out", "runs/first")
    found = json.loads(place.vitrail("evaluate", "runs/first", DATA, "--json"))
    expect(found["accuracy"] > LEARNED, f"it has learned nothing: {found['accuracy']:.1%}")
    print(f"{'':11}accuracy {found['accuracy']:.1%} of {found['samples']} photographs")
    answers = place.vitrail("predict", "runs/first", "pictures", "--json").splitlines()
    expect(len(answers) == 3 and all(json.loads(a)["labels"] for a in answers), "no answers")
    place.vitrail("inspect", "runs/first", "pictures", "--images", "16", "--out", "inside")
    for extra, words in {
        "serve": ("serve", "runs/first"),
        "export": ("export", "runs/first", "--out", "first.onnx"),
        "data": ("check", "hf:owner/name"),
    }.items():
        error = place.vitrail(*words, status=2)
        expect(f"pip install 'vitrail[{extra}]'" in error, f"it does not say what to do: {error}")
    place.vitrail("demo", "--minutes", "0.3", "--out", "demo")
    for page in ("runs/first", "inside", "demo", "demo/inspection"):
        expect((place.folder / page / "report.html").exists(), f"{page}/report.html is missing")
    expect((place.folder / "demo" / "attention.png").exists(), "the demo's picture is missing")


class Place:
    """A folder with an environment of its own, in which commands are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        self.environment = kept | {"VITRAIL_CACHE": str(folder / "cache")}

    def bin(self, name: str) -> Path:
        return self.folder / "venv" / "bin" / name

    def vitrail(self, *words: str, status: int = 0) -> str:
        """What the command prints; if it is to fail, to standard error."""
        return self.step(" ".join(("vitrail", *words)), self.bin("vitrail"), *words, status=status)

    def step(self, what: str, *command: str | Path, status: int = 0) -> str:
        begun = time.monotonic()
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        expect(
            done.returncode == status,
            f"{what}: status {done.returncode}\n{done.stdout}\n{done.stderr}",
        )
        say(f"{what}: refused, as it should" if status else what, time.monotonic() - begun)
        return done.stderr if status else done.stdout


def contents(wheel: Path) -> str:
    """Every file of the package is in the wheel, and nothing else but its description."""
    package = ROOT / "src" / "vitrail"
    files = (path for path in package.rglob("*") if path.is_file())
    wanted = {p.relative_to(package.parent).as_posix() for p in files if p.suffix != ".pyc"}
    held = set(zipfile.ZipFile(wheel).namelist())
    described = {name for name in held if ".dist-info/" in name}
    expect(wanted <= held, f"not in the wheel: {sorted(wanted - held)}")
    expect(held - described <= wanted, f"not of the package: {sorted(held - described - wanted)}")
    for name in ("licenses/LICENSE", "builtin/LICENSE", "builtin/ATTRIBUTION"):
        expect(any(x.endswith(name) for x in described), f"{name} is not among the license files")
    return f"{len(held)} files, {wheel.stat().st_size / 1e6:.1f} MB"


def write_pictures(wheel: Path, folder: Path) -> None:
    """Three of the test photographs that come along, as files."""
    folder.mkdir()
    archive = io.BytesIO(zipfile.ZipFile(wheel).read(BUILTIN))
    with tarfile.open(fileobj=archive) as tar:
        tests = [m for m in tar if m.name.startswith("test/") and m.name.endswith(".JPG")]
        for number, member in enumerate(tests[::150]):
            (folder / f"{number}.jpg").write_bytes(tar.extractfile(member).read())


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def say(what: str, seconds: float) -> None:
    print(f"{seconds:7.1f} s  {what}", flush=True)


def expect(truth: bool, otherwise: str) -> None:
    if not truth:
        sys.exit(otherwise)


if __name__ == "__main__":
    main()
