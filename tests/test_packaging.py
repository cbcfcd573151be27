"""What a user gets: every file, the licenses of what comes along, and a word about what is not."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import vitrail
from vitrail.data.datasets import BUILTIN, open_dataset
from vitrail.errors import VitrailError
from vitrail.extras import require
from vitrail.serving.server import REQUIRED, check_installed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitrail"
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETUP["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {"", "reproduction"}  # of this repository; the latter is found in a checkout only
CALLED = {"PIL": "pillow", "sklearn": "scikit-learn"}


def names(requirements) -> set[str]:
    """What is required, without its version."""
    found = (re.match(r"[\w.-]+", requirement)[0] for requirement in requirements)
    return {name.lower().replace("_", "-") for name in found} - {"vitrail"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pairs}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules_of(path: Path, *, later: bool) -> set[str]:
    """The modules that are imported when a file is loaded; `later` adds those of its functions."""
    found, left = set(), [tree_of(path)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif later or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ("body", "orelse", "handlers", "finalbody", "cases"):
                left += getattr(node, part, [])
    return found


def files_of(module: str) -> list[Path]:
    """Where a module of ours is; nowhere, if it is a name inside one."""
    place = PACKAGE.parent / module.replace(".", "/")
    return [p for p in (place.with_suffix(".py"), place / "__init__.py") if p.exists()]


def distribution(module: str) -> str:
    """What has to be installed for a module; empty for Python's own and ours."""
    top = module.partition(".")[0]
    ours = top == "vitrail" or top in sys.stdlib_module_names
    return "" if ours else CALLED.get(top, top).replace("_", "-")


# The wheel


def test_no_file_of_the_package_is_left_out_of_the_wheel():
    """hatchling takes all that lies under the package, unless .gitignore says otherwise."""
    assert SETUP["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/vitrail"]}
    files = [p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert {".toml", ".html", ".css", ".js", ".tar", ""} <= {path.suffix for path in files}
    if not (ROOT / ".git").exists():
        pytest.skip("what .gitignore means is asked of git, and this is no checkout")
    asked = subprocess.run(
        ["git", "-c", "core.excludesFile=", "check-ignore", "--no-index", "--stdin"],
        input="\n".join(str(path.relative_to(ROOT)) for path in files),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (asked.returncode, asked.stdout) == (1, "")  # 1: none of them


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_license_files_name_every_piece_of_data_that_comes_along():
    folder = PACKAGE / "data" / "builtin"
    described = (folder / "ATTRIBUTION").read_text(encoding="utf-8")
    data = {p.name for p in folder.iterdir()} - {"ATTRIBUTION", "LICENSE", "__pycache__"}
    assert data == set(BUILTIN.values())
    for name in data:
        assert f"{name}:" in described
    for word in ("https://", "Licensed under", "What was changed"):
        assert described.count(word) == len(data)
    licenses = [ROOT / name for name in PROJECT["license-files"]]
    assert set(licenses) == {ROOT / "LICENSE", folder / "ATTRIBUTION", folder / "LICENSE"}
    assert all(path.exists() for path in licenses)


def test_what_is_shipped_beside_code_is_text_or_listed_data():
    odd = []
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix != ".pyc" and path.name not in BUILTIN.values():
            odd += [path.name] if b"\0" in path.read_bytes() else []
    assert odd == []


def test_the_version_has_one_place():
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", vitrail.__version__)


def test_the_stated_pythons_begin_with_the_oldest_that_is_required():
    stated = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={stated[0]}"
    assert SETUP["tool"]["ruff"]["target-version"] == f"py{stated[0].replace('.', '')}"
    assert SETUP["tool"]["pyright"]["pythonVersion"] == stated[0]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in stated


# What it needs


def test_whatever_is_imported_is_declared():
    declared = names(PROJECT["dependencies"])
    for name, extra in EXTRAS.items():
        declared |= names(extra) if name not in ("bench", "dev", "reference") else set()
    for path in PACKAGE.rglob("*.py"):
        for module in modules_of(path, later=True):
            assert distribution(module) in declared | OWN, f"{path} imports {module}"


def test_all_commands_and_public_names_load_without_any_extra():
    """Loading follows what files import at once; of commands and datasets.py, also later."""
    base = names(PROJECT["dependencies"])
    left = [f"vitrail.{module}" for module in vitrail.WHERE.values()]
    left += [f"vitrail.cli.{path.stem}" for path in (PACKAGE / "cli").glob("[!_]*.py")]
    seen = set()
    while left:
        module = left.pop()
        if module in seen or not module.startswith("vitrail"):
            continue
        seen.add(module)
        for path in files_of(module):
            later = (
                path.parent.name == "cli" or path.name == "datasets.py"
            )  # which loads one format
            used = modules_of(path, later=later)
            left += used
            assert {distribution(name) for name in used} <= base | OWN, f"{module} needs more"
    assert {"vitrail.serving.server", "vitrail.export.api", "vitrail.data.hf_datasets"} <= seen


@pytest.mark.parametrize(
    ("missing", "extra", "wish"),
    [
        ("datasets", "data", lambda: open_dataset("hf:owner/name")),
        ("fsspec.core", "data", lambda: open_dataset("memory://shards/*.tar")),
        ("onnx", "export", lambda: require("onnxruntime", "onnx", extra="export", feature="ONNX")),
        ("onnxruntime", "export", lambda: vitrail.Predictor(ROOT / "model.onnx")),
        *((module, "serve", check_installed) for module in REQUIRED),
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(missing, extra, wish, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    with pytest.raises(VitrailError) as told:
        wish()
    assert f"pip install 'vitrail[{extra}]'" in str(told.value)
    assert "\n" not in str(told.value)
    assert missing.partition(".")[0].replace("_", "-") in names(EXTRAS[extra])


def test_every_extra_that_a_message_or_a_page_names_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    for path in [*PACKAGE.rglob("*.py"), *pages]:
        for extra in re.findall(r"vitrail\[([\w,{}]+)\]", path.read_text(encoding="utf-8")):
            for name in extra.split(","):
                assert name in EXTRAS or "{" in name, f"{path.name}: {name}"


def test_every_package_that_is_asked_for_is_pinned_to_what_was_tested():
    asked = names(PROJECT["dependencies"])
    for requirements in EXTRAS.values():
        asked |= names(requirements)
    assert asked - pins().keys() == set()
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins().values())
