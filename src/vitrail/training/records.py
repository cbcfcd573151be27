"""What a run tells while it goes on: metrics.jsonl, always, and TensorBoard's events."""

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from vitrail.data.storage import write_atomic
from vitrail.errors import DataError
from vitrail.training.folder import METRICS

Row = dict[str, Any]


class Records:
    """One line of JSON for each report; lines of steps that will be taken again are dropped."""

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool = True) -> None:
        self.path = folder / METRICS
        self.rows = [row for row in read_rows(self.path) if row["step"] <= after_step]
        write_atomic(self.path, "".join(map(line, self.rows)))
        self.events = event_writer(folder, after_step) if tensorboard else None

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row: it has a step, and numbers."""
        self.rows.append(dict(row))
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line(row))
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from None
        if self.events is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self.events.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


def read_rows(path: Path, having: str = "step") -> list[Row]:
    """The rows of a file that have a key; a last line that a crash cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get(having), int):
            rows.append(row)
    return rows


def line(row: Mapping[str, Any]) -> str:
    finite = {k: v if not isinstance(v, float) or isfinite(v) else None for k, v in row.items()}
    return json.dumps(finite) + "\n"


def event_writer(folder: Path, after_step: int) -> Any:
    """TensorBoard's writer where it is installed: `pip install 'vitrail[track]'`.

    TensorBoard shows nothing more of earlier events after that step.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1)
