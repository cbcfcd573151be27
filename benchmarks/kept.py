"""Results that are kept as they come, so that a benchmark that was interrupted goes on.

Each is a JSON file in `.bench/` in the project's root, written whole or not at all.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitrail.data.storage import atomic_path

FOLDER = Path(__file__).parents[1] / ".bench"


def kept(key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is kept under a key; made now, and kept, if there is nothing yet."""
    path = FOLDER / f"{quote(key, safe=' ')}.json"
    if not path.exists():
        result = make()
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def forget() -> None:
    """Begin anew: everything that was kept goes."""
    shutil.rmtree(FOLDER, ignore_errors=True)
