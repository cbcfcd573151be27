"""What a benchmark finds: each trial as a line that is kept at once, and the means of all tasks."""

import json
import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from vitrail.errors import DataError
from vitrail.training.records import read_rows
from vitrail.training.tasks import NO_GROUP, Task

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good a model is at a task after one draw of its training pictures."""

    seed: int
    setting: float  # the rate, decay or l2 that was chosen
    accuracy: float  # share of the test pictures
    learned: int  # pictures it learned from
    judged: int  # test pictures
    choices: dict[float, float]  # setting → accuracy on the pictures to choose by


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """One task, over all seeds."""

    task: Task
    classes: int
    scores: list[Score]

    @property
    def accuracy(self) -> float:
        return fmean(score.accuracy for score in self.scores)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds; None with one."""
        values = [score.accuracy for score in self.scores]
        return stdev(values) if len(values) > 1 else None

    def to_dict(self) -> Row:
        return {
            **asdict(self.task),
            "classes": self.classes,
            "accuracy": self.accuracy,
            "deviation": self.deviation,
            "scores": [asdict(score) for score in self.scores],
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """All tasks, and their means."""

    model: str
    protocol: Row
    setting: str  # what can be chosen: rate, decay or l2
    tasks: list[TaskScores]

    @property
    def groups(self) -> dict[str, float]:
        """The mean of each group's tasks; none where no task says its group."""
        names = list(dict.fromkeys(task.task.group for task in self.tasks))
        if names == [NO_GROUP]:
            return {}
        return {
            name: fmean(t.accuracy for t in self.tasks if t.task.group == name) for name in names
        }

    @property
    def mean(self) -> float:
        return fmean(task.accuracy for task in self.tasks)

    @property
    def mean_of_groups(self) -> float | None:
        return fmean(self.groups.values()) if self.groups else None

    def to_dict(self) -> Row:
        return {
            "model": self.model,
            **self.protocol,
            "setting": self.setting,
            "tasks": [task.to_dict() for task in self.tasks],
            "groups": self.groups,
            "mean": self.mean,
            "mean_of_groups": self.mean_of_groups,
        }


class Ledger:
    """A line of JSON for each trial; the same trial is found again, and not made twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path, having="pictures")
        self.new: list[Row] = []  # of this process

    def find(self, about: Row) -> Row | None:
        """The trial of which all of this is true."""
        return next((row for row in self.rows if about.items() <= row.items()), None)

    def add(self, about: Row, found: Row) -> Row:
        row = about | found
        text = json.dumps(row) + "\n"
        try:
            with self.path.open("ab+") as file:
                if file.tell() and not ends_whole(self.path):
                    text = f"\n{text}"
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from None
        self.rows.append(row)
        self.new.append(row)
        return row

    @staticmethod
    def short(about: Row) -> str:
        """A few letters that stand for a trial, in the name of its folder."""
        return blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=4).hexdigest()


def ends_whole(path: Path) -> bool:
    """Whether the last line was written to its end."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
