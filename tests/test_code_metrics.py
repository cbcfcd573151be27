"""`scripts/code_metrics.py` counts what it says; `scripts/test_cpus.py` runs files that exist."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "scripts"))  # they are on no package's path

import code_metrics
import test_cpus


def test_counts_files_functions_dataclasses_and_importers(tmp_path):
    vit = (
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass A:\n    x: int\n\n\n"
    )
    vit += (
        "class B:\n    def f(self):\n        def g():\n            return 1\n\n        return g\n"
    )
    train = "from vitrail.errors import E\n\n\ndef run():\n    from vitrail.models import vit\n"
    files = {"models/vit.py": vit, "errors.py": "class E(Exception):\n    pass\n"}
    for name, text in (files | {"train.py": train, "use.py": "import vitrail.errors\n"}).items():
        path = tmp_path / "src" / "vitrail" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    counts = [*code_metrics.measure(tmp_path).values()]
    # files, lines, functions per 1,000, dataclasses, modules with one importer, longest file
    assert counts == ["4", "22", "136", "1", "1", "14"]
    assert code_metrics.folder_rows(tmp_path) == {"(top level)": "3 / 8", "models": "1 / 14"}


def test_numeric_tests_exist():
    assert [path for path in test_cpus.FILES if not (test_cpus.ROOT / path).exists()] == []
