"""A run's folder: what it was begun with, so that it can be gone on with. Without torch.

model.safetensors, config.json, README.md   the bundle, when the run is finished
settings.toml                               all settings, and what they were used on
metrics.jsonl                               how it went
report.html                                 the same for people, when the run is finished
state/                                      what a resumed run needs, until it is finished
"""

import shutil
import tomllib
from pathlib import Path

from vitrail.data.files import whole_or_absent
from vitrail.errors import ConfigError
from vitrail.training.recipes import literal, settings_from, to_toml
from vitrail.training.settings import Settings

SETTINGS = "settings.toml"
METRICS = "metrics.jsonl"
REPORT = "report.html"
BUNDLE = ("model.safetensors", "config.json", "README.md")
BESIDE = ("probe.safetensors", "ladder.json")  # of a head that was found in another way


def write_run(folder: Path, settings: Settings, *, data: str, start: str) -> None:
    """Keep the settings, the data's reference and that of the model it began with."""
    run = f"\n[run]\ndata = {literal(data)}\nfrom = {literal(start)}\n"
    with whole_or_absent(folder / SETTINGS) as temporary:
        temporary.write_text(to_toml(settings) + run, encoding="utf-8")


def read_run(folder: Path) -> tuple[Settings, str, str]:
    """What `write_run` kept: settings, data, and the model it began with."""
    path = folder / SETTINGS
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        run = values.pop("run")
        return settings_from(values), str(run["data"]), str(run["from"])
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no run to resume: it has no {SETTINGS}; leave --resume out"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def is_run(folder: Path) -> bool:
    return (folder / SETTINGS).exists()


def new_folder(data: str) -> Path:
    """runs/flowers, or runs/flowers-2 if that exists."""
    stem = Path(data.rpartition(":")[2]).name.split(".")[0] or "pictures"
    number, folder = 1, Path("runs") / stem
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{stem}-{number}"
    return folder


def clear_run(folder: Path) -> None:
    """Take away what a run has written, and nothing else."""
    for name in (*BUNDLE, *BESIDE, SETTINGS, METRICS, REPORT):
        (folder / name).unlink(missing_ok=True)
    for name in ("state", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
