"""A run's folder: what it was begun with, so that it can be gone on with. Without torch.

model.safetensors, config.json, README.md   the bundle, when the run is finished
settings.toml                               all settings, and what they were used on, and how
metrics.jsonl                               how it went
report.html                                 the same for people, when the run is finished
state/                                      what a resumed run needs, until it is finished
"""

import shutil
import tomllib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.data.storage import atomic_path
from vitrail.errors import ConfigError
from vitrail.training.recipes import literal, settings_from, to_toml
from vitrail.training.settings import Settings

SETTINGS = "settings.toml"
METRICS = "metrics.jsonl"
REPORT = "report.html"
BUNDLE = ("model.safetensors", "config.json", "README.md")
# Heads that were found in closed form.
BESIDE = ("probe.safetensors", "probe_head.safetensors", "ladder.json")
# What the weights and the order of the data depend on: these stay when a run is resumed.
FIXED = ("model", "batch_size", "seed", "repeats", "objective", "image_sizes", "mix", "augment")
FIXED += ("average", "dev", "masked", "epochs", "steps", "evaluate_every", "loss", "preprocessing")
FIXED += ("head_init",)
FREE_IN_OPTIM = ("learning_rate", "muon_learning_rate", "clip_norm")


def write_run(
    folder: Path,
    settings: Settings,
    *,
    data: str,
    start: str,
    processes: int = 1,
    micro_batch: int | None = None,
) -> None:
    """Keep the settings, the data's reference and that of the model it began with.

    How batches were divided is told beside the settings and is none of them: given to another
    machine as a recipe, they choose by its memory, where a micro-batch that is too large might end
    the process without a word.
    """
    run: dict[str, str | int] = {"data": data, "from": start}
    if micro_batch is not None:
        run |= {"processes": processes, "micro_batch": micro_batch}
    lines = [f"{name} = {literal(value)}\n" for name, value in run.items()]
    with atomic_path(folder / SETTINGS) as temporary:
        temporary.write_text(f"{to_toml(settings)}\n[run]\n{''.join(lines)}", encoding="utf-8")


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
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def check_same_run(before: Settings, now: Settings) -> None:
    """Settings may change how a run goes on, but not what it is."""
    free = {name: getattr(now.optim, name) for name in FREE_IN_OPTIM}
    before = replace(before, optim=replace(before.optim, **free))
    for name in (*FIXED, "optim"):
        if getattr(before, name) != getattr(now, name):
            raise ConfigError(
                f"{difference(name, getattr(before, name), getattr(now, name))} cannot be changed "
                "when a run is resumed; leave it out, or begin another run"
            )


def difference(name: str, was: Any, now: Any) -> str:
    """`model.depth=6`: the first field that differs."""
    if is_dataclass(was):
        names = [f.name for f in fields(was)]
        part = next(part for part in names if getattr(was, part) != getattr(now, part))
        return f"{name}.{part}={getattr(now, part)!r}"
    return f"{name}={now!r}"


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
