"""Cache of results on disk, so that an interrupted benchmark resumes.

Each result is a JSON file in `.bench/` in the root of the project, written atomically.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitrail.data.storage import atomic_path

FOLDER = Path(__file__).parents[1] / ".bench"


def cached(key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the cached result of a key; compute and cache it if there is none."""
    path = FOLDER / f"{quote(key, safe=' ')}.json"
    if not path.exists():
        result = make()
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def version(library: str, scripts: str) -> str:
    """Return a short hash of what a result depends on: our code, or the scripts of the peers."""
    here = Path(__file__).parent
    ours = sorted((here.parent / "src" / "vitrail").rglob("*.py"))
    digest = hashlib.sha256()
    for path in ours if library == "vitrail" else sorted(here.glob(scripts)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def forget() -> None:
    """Delete all cached results."""
    shutil.rmtree(FOLDER, ignore_errors=True)
