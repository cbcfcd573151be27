"""What several commands take: words without an option's name, and the options about data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitrail.data.preprocessing import Preset as PresetName

ModelReference = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
DataReference = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
FileToWrite = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
FolderToWrite = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
Preset = Annotated[
    PresetName | None,
    tyro.conf.arg(help="How images are resized and normalized, if not as the checkpoint states."),
]
TasksFile = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TASKS")]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What commands that read data sets take."""

    allow_outside: bool = False
    """Read files that a list names outside its own folder; only for lists you trust."""
