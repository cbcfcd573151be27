"""What commands take without an option's name, called in help as docs/commands.md calls it."""

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
