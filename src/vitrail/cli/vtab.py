"""`vitrail vtab`: a model fitted to many small tasks, and the mean of them."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitrail.cli.arguments import DataOptions, ModelReference, TasksFile
from vitrail.cli.progress import Progress
from vitrail.cli.text import WIDTH, aside, paragraph, printable
from vitrail.cli.text import tell as say
from vitrail.errors import ConfigError
from vitrail.formatting import percent, truncate
from vitrail.training.config import MachineSettings

LONGEST_GROUP = 12


@dataclass(frozen=True, kw_only=True)
class Vtab(DataOptions):
    """Fit a model to small tasks by the protocol of VTAB-1k, and tell the mean over them."""

    model: ModelReference
    """A bundle, a file of weights, or hf:owner/name."""
    tasks: TasksFile
    """A .toml file with a [[task]] for each data set: data, and if need be name, group, train,
    test, vary."""
    out: Path | None = None
    """A folder for results and runs, else runs/vtab-MODEL-METHOD; what it holds is not redone."""
    method: Literal["finetune", "linear", "probe"] = "finetune"
    """All weights by the paper's settings; or a logistic or ridge probe of the features."""
    learning_rates: tuple[float, ...] = ()
    """finetune: 0.01 if not given; several are chosen from, with 800 pictures and 200 to judge."""
    steps: int | None = None
    """finetune: 2500 if not given."""
    batch_size: int | None = None
    """finetune: 512 if not given."""
    image_size: int | None = None
    """Pixels along each side: 384 if not given, or the model's own for a probe."""
    seeds: int = 1
    """Times that the pictures are drawn anew; the mean counts."""
    machine: MachineSettings = field(default_factory=MachineSettings)
    json: bool = False
    """Print one JSON object when done; progress goes to standard error."""

    def run(self) -> None:
        from vitrail.cli.live import Live
        from vitrail.training.memory import configure_malloc
        from vitrail.training.vtab import Benchmark, read_tasks

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "tasks are done by one process; give each process its own file of tasks and --out"
            )
        progress = Progress()

        def tell(line: str) -> None:
            progress.done()
            (aside if self.json else say)(printable(line))

        bench = Benchmark(
            reference=self.model,
            out=self.out or usual_folder(self.model, self.method),
            method=self.method,
            learning_rates=self.learning_rates,
            steps=self.steps,
            batch_size=self.batch_size,
            image_size=self.image_size,
            machine=self.machine,
            log=tell,
            make_callback=lambda: Live(aside=self.json),
            progress=progress,
        )
        tasks = read_tasks(self.tasks)
        if self.machine.parts != 1:
            configure_malloc()
        with progress:
            report = bench.measure(tasks, self.seeds)
        if self.json:
            print(json.dumps(report | {"written": str(bench.out)}, indent=1))
            return
        for line in words(report):
            print(printable(line))
        print(f"\ndone: {bench.out / 'results.json'}")


def usual_folder(model: str, method: str) -> Path:
    """The same for the same model, so that a second call goes on."""
    name = Path(model.rpartition(":")[2]).name.split(".")[0] or "model"
    return Path("runs") / f"vtab-{name}-{method}"


def words(report: dict[str, Any]) -> Iterator[str]:
    """The results for people, in 80 columns."""
    yield ""
    yield from paragraph(f"{report['model']}, {report['method']}: top-1 accuracy")
    yield ""
    yield from table(report)
    yield ""
    for group, mean in report["groups"].items():
        count = sum(task["group"] == group for task in report["tasks"])
        yield f"{percent(mean):>7}  mean of {truncate(group, 40)} ({count})"
    yield f"{percent(report['mean']):>7}  mean of all tasks ({len(report['tasks'])})"
    if report["mean_of_groups"] is not None:
        yield f"{percent(report['mean_of_groups']):>7}  mean of the groups' means"


def table(report: dict[str, Any]) -> Iterator[str]:
    """A line for each task."""
    numbers = [numbers_of(task) for task in report["tasks"]]
    heads = ["pictures", "test", "classes", report["setting"], "accuracy"]
    widths = [max(map(len, column)) for column in zip(heads, *numbers, strict=True)]
    groups = [truncate(task["group"], LONGEST_GROUP) for task in report["tasks"]]
    group = max(map(len, ["group", *groups]))
    room = WIDTH - group - 2 - sum(width + 2 for width in widths)
    names = [truncate(task["name"], max(room, len("task"))) for task in report["tasks"]]
    name = max(map(len, ["task", *names]))
    for first, second, rest in zip(
        ["task", *names], ["group", *groups], [heads, *numbers], strict=True
    ):
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths, strict=True)]
        yield "  ".join([f"{first:{name}}", f"{second:{group}}", *cells])


def numbers_of(task: dict[str, Any]) -> list[str]:
    first = task["scores"][0]
    settings = list(dict.fromkeys(f"{score['setting']:g}" for score in task["scores"]))
    deviation = "" if task["deviation"] is None else f" ± {100 * task['deviation']:.1f}"
    return [
        f"{first['learned']:,}",
        f"{first['judged']:,}",
        f"{task['classes']:,}",
        settings[0] if len(settings) == 1 else "several",
        f"{percent(task['accuracy'])}{deviation}",
    ]
