"""Which package may import which, and where third-party libraries are used."""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "vitrail"

FLOOR = {"errors", "formatting", "extras"}  # everybody may import these; they import nothing else

MAY_IMPORT = {
    **{name: set() for name in FLOOR},
    "models": set(),
    "data": set(),
    "checkpoints": {"models", "data"},
    "distributed": set(),
    "evaluation": {"models", "data", "checkpoints", "distributed"},
    "probing": {"models", "data", "checkpoints", "distributed", "evaluation"},
    "reports": {"data", "evaluation", "inspection"},
    "training": {
        *["models", "data", "checkpoints", "distributed", "evaluation", "probing", "reports"]
    },
    "inspection": {"models", "data", "checkpoints", "evaluation", "probing", "reports"},
    "export": {"models", "data", "checkpoints", "evaluation", "probing"},
    "prediction": {"models", "data", "checkpoints", "distributed", "evaluation", "export"},
    "serving": {"models", "data", "checkpoints", "probing", "inspection", "prediction", "reports"},
    "planning": {"models", "data", "checkpoints", "distributed", "training"},
}  # `cli` may import everything, and nothing imports `cli`

ONLY_IN = {
    **dict.fromkeys(("tyro", "rich"), ("cli/",)),
    **dict.fromkeys(("onnx", "onnxruntime"), ("export/",)),
    **dict.fromkeys(("matplotlib", "jinja2", "markupsafe"), ("reports/",)),
    **dict.fromkeys(("pydantic", "starlette", "uvicorn"), ("serving/",)),
    **dict.fromkeys(("fastapi", "timm", "transformers", "torchvision", "vit_pytorch"), ()),
    "torch.distributed": ("distributed.py",),
    "PIL": ("data/", "reports/"),
    "huggingface_hub": ("checkpoints/hub.py",),
    "simplejpeg": ("data/decode.py",),
    "datasets": ("data/arrays.py",),
    "fsspec": ("data/storage.py",),
    "sklearn": ("inspection/representations.py",),
    "reproduction": ("cli/reproduce.py",),
}

FREE_OF_TORCH = {
    *("errors.py", "formatting.py", "extras.py", "export/__init__.py", "planning/request.py"),
    *("training/recipes.py", "training/config.py", "training/schedules.py", "models/config.py"),
    *("models/registry.py", "data/decode.py", "data/preprocessing.py", "data/datasets.py"),
}
LONGEST_FILE = 700


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def files():
    """Every module: its path in the package, its part, and the modules it imports."""
    places = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    return [(p.as_posix(), p.parts[0].removesuffix(".py"), imports(PACKAGE / p)) for p in places]


def imports(path):
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_import_directions():
    wrong = [
        f"{name} imports {used}"
        for name, part, modules in files()
        for used in {m.split(".")[1] for m in modules if m.startswith("vitrail.")} - {part}
        if not used.startswith("__")  # the version is everybody's
        if part in MAY_IMPORT and used not in MAY_IMPORT[part] | FLOOR
    ]
    assert not wrong, "\n".join(wrong)
    parts = {part for _, part, _ in files()} - {"cli", "__init__", "__main__"}
    assert parts == MAY_IMPORT.keys()


def test_libraries_are_imported_in_one_place_each():
    wrong = [
        f"{name} imports {module}"
        for name, _, modules in files()
        for module in modules
        for library, places in ONLY_IN.items()
        if f"{module}.".startswith(f"{library}.") and not name.startswith(places)
    ]
    assert not wrong, "\n".join(wrong)


def test_option_modules_do_not_import_torch():
    found = {name: modules for name, _, modules in files() if name in FREE_OF_TORCH}
    assert found.keys() == FREE_OF_TORCH
    for name, modules in found.items():
        assert not [m for m in modules if m.split(".")[0] == "torch"], name


def test_files_are_short():
    lengths = {str(p): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_package_docstrings_list_every_file():
    for package in {path.parent for path in PACKAGE.glob("*/*.py")} - {PACKAGE / "cli"}:
        words = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
        named = re.findall(r"[\w*]+\.py", words or "")
        for path in package.glob("[!_]*.py"):
            assert any(path.match(name) for name in named), path


# Words of 0.1 that had standard names: in names of the code, and in texts.
PRIVATE_NAMES = {
    *("house", "room", "shelf", "refusal", "meters", "material", "judge", "rung", "rungs"),
    *("summit", "ladder", "wish", "outlook", "workshop", "picture", "told", "hears", "seen"),
    *("wanted", "looked", "rightly", "surest", "standing"),
}
PRIVATE_WORDS = re.compile(
    r"named rightly|times of 20|kept apart|first weights|made small|go(es)? on with|judged by"
    r"|\b(told|tells|hears|rightly|surest|wish|wishes|rungs?|refusals?|outlook|workshop|shelf)\b"
    r"|look_at_all|looked_at|standing_still|in_the_open|EachCoreAPart"
    r"|\bclass (Place|Order|Feed|Facts|Answer|Guard|Ground|Cell|Kept)\b"
)
KEPT = re.compile(r".*# the key of 0\.1")  # fields of JSON files


def test_code_and_docs_use_the_terms_of_the_field():
    """CHANGELOG.md lists the public names that changed."""
    root = PACKAGE.parents[1]
    pages = [root / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    pages += (root / "docs").glob("*.md")
    kinds = (".py", ".html", ".js", ".css", ".toml")
    sources = [path for path in PACKAGE.rglob("*.*") if path.suffix in kinds]
    wrong = [
        f"{path.relative_to(root)}: {match.group(0)}"
        for path in [*pages, *sources]
        for match in PRIVATE_WORDS.finditer(KEPT.sub("", path.read_text(encoding="utf-8")))
    ]
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            names = [getattr(node, key, None) for key in ("id", "attr", "arg", "name")]
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", " ".join(filter(None, names)))
            if PRIVATE_NAMES & {word.lower() for word in words}:
                wrong.append(f"{path.relative_to(root)}: {names}")
    assert not wrong, "\n".join(wrong)
