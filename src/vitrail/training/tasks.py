"""The tasks of a benchmark: a TOML file that names data sets, and what is drawn of each.

    [[task]]
    data = "flowers5_160.tar"   any data set; a path is relative to the file
    name = "flowers"            what to call it, if not by the data's own name
    group = "natural"           any word; there is a mean for each group
    train = "train"             the split to draw from
    test = "val"                the split to judge by; without it test, or else val
    vary = true                 whether pictures may be cut and mirrored when fine-tuning

In a task of the group structured the label may be a place or a direction, which cutting and
mirroring would change: those are not varied unless the file says so (BiT, arXiv:1912.11370, does
likewise). This file does not import torch.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.datasets import (
    ALL,
    ImageDataset,
    canonical_split,
    evaluation_split,
    open_dataset,
    split_counts,
    stratified_subset,
)
from vitrail.errors import ConfigError, DataError, VitrailError, unknown

KEYS = {"data": str, "name": str, "group": str, "train": str, "test": str, "vary": bool}
NO_GROUP = "other"
UNVARIED = "structured"  # the group whose labels cutting and mirroring would change
ELSEWHERE = ("builtin:", "hf:", "~")  # data that is not relative to the file
TO_FIT = 0.8  # share of the drawn pictures to learn from while something is chosen
LEAST = 5  # pictures of which four can be learned from and one chosen by


@dataclass(frozen=True, kw_only=True)
class Task:
    """One entry of the file."""

    name: str
    data: str
    group: str = NO_GROUP
    train: str = "train"
    test: str | None = None
    vary: bool = True


@dataclass(frozen=True, kw_only=True)
class OpenTask:
    """A task with its pictures."""

    task: Task
    train: ImageDataset  # all of the split, to draw from
    test: ImageDataset

    @property
    def name(self) -> str:
        return self.task.name


@dataclass(frozen=True, kw_only=True)
class Hand:
    """The pictures that were drawn, and how they are divided while something is chosen."""

    train: ImageDataset
    fit: ImageDataset  # four fifths of them, to learn from
    dev: ImageDataset  # the others, to choose by


def read_tasks(path: Path) -> list[Task]:
    """The tasks that a file names; what it says beyond them is refused."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the tasks in {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    if others := values.keys() - {"task"}:
        raise ConfigError(f"{path}: {unknown('key', min(others), ['task'])}")
    entries = values.get("task", [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{path}: task must be a list; write [[task]] above each one")
    if not entries:
        raise ConfigError(f"{path} names no tasks; each begins with [[task]] and needs data = …")
    tasks = [read_entry(entry, path, place) for place, entry in enumerate(entries, 1)]
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: two tasks are called {twice[0]!r}; give one another name")
    return tasks


def read_entry(entry: Mapping[str, Any], path: Path, place: int) -> Task:
    where = f"{path}, task {place}"
    for key, value in entry.items():
        if key not in KEYS:
            raise ConfigError(f"{where}: {unknown('key', key, KEYS)}")
        if type(value) is not KEYS[key] or value == "":
            kind = "text in quotes" if KEYS[key] is str else "true or false"
            raise ConfigError(f"{where}: {key}={value!r} must be {kind}")
    if "data" not in entry:
        raise ConfigError(f"{where} names no data; add data = with a folder, file or address")
    data = entry["data"]
    name = entry.get("name", Path(data.rpartition(":")[2]).name.split(".")[0])
    if name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\"):
        raise ConfigError(f"{where}: name={name!r} cannot name a folder; give it a plain name")
    given: dict[str, Any] = {"vary": entry.get("group") != UNVARIED, **entry}
    return Task(**given | {"name": name, "data": resolved(data, path.parent)})


def resolved(data: str, folder: Path) -> str:
    """The reference as it is understood beside the file."""
    return data if data.startswith(ELSEWHERE) or "://" in data else str(folder / data)


def open_task(task: Task) -> OpenTask:
    """The pictures of a task; what cannot be judged by this protocol is refused."""
    try:
        test = task.test or evaluation_split(task.data)
        if test is None:
            found = ", ".join(split_counts(task.data))
            raise DataError(f"{task.data} has neither test nor val to judge by; it has: {found}")
        if canonical_split(task.train) == canonical_split(test) or ALL in (task.train, test):
            raise DataError(
                f"train={task.train!r} and test={test!r} share pictures; name two splits"
            )
        opened = OpenTask(
            task=task, train=open_dataset(task.data, task.train), test=open_dataset(task.data, test)
        )
        check(opened)
    except VitrailError as error:
        raise DataError(f"task {task.name!r}: {error}") from None
    return opened


def check(opened: OpenTask) -> None:
    train, test, data = opened.train, opened.test, opened.task.data
    if train.multi_label or test.multi_label:
        raise DataError(f"the pictures of {data} have several labels each; one each is needed")
    if train.classes != test.classes:
        raise DataError(f"the classes of the test pictures of {data} are not those of train")
    if len(train.classes) < 2:
        raise DataError(f"{data} has {len(train.classes)} classes; telling apart needs two or more")
    if len(train) < LEAST:
        raise DataError(f"{data} has {len(train)} training pictures; {LEAST} are the least")


def deal(train: ImageDataset, count: int, seed: int) -> Hand:
    """Draw `count` pictures, or all if there are fewer, and divide them four to one."""
    rng = np.random.default_rng(seed)
    drawn = train.subset(stratified_subset(train.class_ids(), count, rng))
    fit = stratified_subset(drawn.class_ids(), round(TO_FIT * len(drawn)), rng)
    return Hand(
        train=drawn,
        fit=drawn.subset(fit),
        dev=drawn.subset(np.setdiff1d(np.arange(len(drawn)), fit)),
    )
