"""The wheel: its files, licenses, dependencies and extras."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vitrail
from test_architecture import PACKAGE, tree_of
from vitrail.checkpoints import builtin
from vitrail.data.datasets import BUILTIN, open_dataset
from vitrail.errors import VitrailError
from vitrail.serving.config import ServerConfig
from vitrail.serving.server import REQUIRED, serve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETUP["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {"", "reproduction"}  # the latter exists in a checkout only
CALLED = {"PIL": "pillow", "sklearn": "scikit-learn", "sympy": "torch"}  # torch requires sympy


def names(requirements) -> set[str]:
    """Return package names without versions."""
    packages = (re.match(r"[\w.-]+", requirement)[0] for requirement in requirements)
    return {name.lower().replace("_", "-") for name in packages} - {"vitrail"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def modules_of(path: Path, *, later: bool) -> set[str]:
    """Return the imports of a file at module level; `later` adds those inside functions."""
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
    """Return the file of one of our modules; nothing for a name inside one."""
    place = PACKAGE.parent / module.replace(".", "/")
    return [p for p in (place.with_suffix(".py"), place / "__init__.py") if p.exists()]


def distribution(module: str) -> str:
    """Return the package to install for a module; empty for the standard library and ours."""
    top = module.partition(".")[0]
    ours = top == "vitrail" or top in sys.stdlib_module_names
    return "" if ours else CALLED.get(top, top).replace("_", "-")


def test_wheel_contains_every_file():
    """hatchling includes everything below the package that .gitignore does not exclude."""
    assert SETUP["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/vitrail"]}
    files = [p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert {".toml", ".html", ".css", ".js", ".tar", ""} <= {path.suffix for path in files}
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    command = ["git", "-c", "core.excludesFile=", "check-ignore", "--no-index", "--stdin"]
    listed = "\n".join(str(path.relative_to(ROOT)) for path in files)
    done = subprocess.run(command, input=listed, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")  # 1: none is ignored


def test_built_in_models_have_a_card():
    for name in builtin.NAMES:
        card = (PACKAGE / "checkpoints" / "builtin" / name / "README.md").read_text("utf-8")
        for word in ("public datasets", "not distributed", "Apache-2.0", "teacher"):
            assert word in card


def test_license_files_cover_the_built_in_data():
    folder = PACKAGE / "data" / "builtin"
    described = (folder / "ATTRIBUTION").read_text(encoding="utf-8")
    data = {p.name for p in folder.iterdir()} - {"ATTRIBUTION", "LICENSE", "__pycache__"}
    assert data == set(BUILTIN.values())
    for name in data:
        assert f"{name}:" in described
    for word in ("https://", "Licensed under", "Changes:"):
        assert described.count(word) == len(data)
    licenses = [ROOT / name for name in PROJECT["license-files"]]
    assert set(licenses) == {ROOT / "LICENSE", folder / "ATTRIBUTION", folder / "LICENSE"}
    assert all(path.exists() for path in licenses)


def test_versions_agree():
    assert (PACKAGE / "py.typed").exists()
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", vitrail.__version__)
    stated = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={stated[0]}"
    assert SETUP["tool"]["ruff"]["target-version"] == f"py{stated[0].replace('.', '')}"
    assert SETUP["tool"]["pyright"]["pythonVersion"] == stated[0]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in stated


def test_imports_are_declared_dependencies():
    declared = names(PROJECT["dependencies"])
    for name, extra in EXTRAS.items():
        declared |= names(extra) if name not in ("bench", "dev", "reference") else set()
    for path in PACKAGE.rglob("*.py"):
        for module in modules_of(path, later=True):
            assert distribution(module) in declared | OWN, f"{path} imports {module}"


def test_commands_and_public_names_load_without_extras():
    """Follow imports at module level; for commands and datasets.py, also inside functions."""
    base = names(PROJECT["dependencies"])
    left = [f"vitrail.{module}" for module in vitrail.MODULE_OF.values()]
    left += [f"vitrail.cli.{path.stem}" for path in (PACKAGE / "cli").glob("[!_]*.py")]
    seen = set()
    while left:
        module = left.pop()
        if module in seen or not module.startswith("vitrail"):
            continue
        seen.add(module)
        for path in files_of(module):
            later = path.parent.name == "cli" or path.name == "datasets.py"
            used = modules_of(path, later=later)
            left += used
            assert {distribution(name) for name in used} <= base | OWN, f"{module} needs more"
    assert {"vitrail.serving.server", "vitrail.export.api", "vitrail.data.arrays"} <= seen


@pytest.mark.parametrize(
    ("missing", "extra", "call"),
    [
        ("datasets", "data", lambda: open_dataset("hf:owner/name")),
        ("fsspec.core", "data", lambda: open_dataset("memory://shards/*.tar")),
        ("onnx", "export", lambda: vitrail.export_model(vitrail.create("ViT-Mu/4"), "m.onnx")),
        ("onnxruntime", "export", lambda: vitrail.Predictor(ROOT / "model.onnx")),
        *((module, "serve", lambda: serve({}, ServerConfig())) for module in REQUIRED),
    ],
)
def test_missing_extra_is_one_line_with_the_pip_command(missing, extra, call, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    with pytest.raises(VitrailError) as raised:
        call()
    assert f"pip install 'vitrail[{extra}]'" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert missing.partition(".")[0].replace("_", "-") in names(EXTRAS[extra])


def test_extras_in_messages_exist_and_dependencies_are_pinned():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    for path in [*PACKAGE.rglob("*.py"), *pages]:
        for extra in re.findall(r"vitrail\[([\w,{}]+)\]", path.read_text(encoding="utf-8")):
            for name in extra.split(","):
                assert name in EXTRAS or "{" in name, f"{path.name}: {name}"
    required = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert required - pins().keys() == set()
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins().values())
