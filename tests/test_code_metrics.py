"""`scripts/code_metrics.py` counts what it says."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "scripts"))  # they are on no package's path

import code_metrics


def test_counts_files_functions_dataclasses_and_importers(tmp_path):
    package = tmp_path / "src" / "vitrail"
    (package / "models").mkdir(parents=True)
    (package / "models" / "vit.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass A:\n    x: int\n\n\n"
        "class B:\n    def f(self):\n        def g():\n            return 1\n\n        return g\n",
        encoding="utf-8",
    )
    (package / "errors.py").write_text("class E(Exception):\n    pass\n", encoding="utf-8")
    (package / "train.py").write_text(
        "from vitrail.errors import E\n\n\ndef run():\n    from vitrail.models import vit\n",
        encoding="utf-8",
    )
    (package / "use.py").write_text("import vitrail.errors\n", encoding="utf-8")
    assert code_metrics.measure(tmp_path) == {
        "files": "4",
        "lines": "22",
        "functions per 1,000 lines": "136",
        "dataclasses": "1",
        "modules with exactly one importer": "1",
        "longest file": "14",
    }
    assert code_metrics.folder_rows(tmp_path) == {"(top level)": "3 / 8", "models": "1 / 14"}
