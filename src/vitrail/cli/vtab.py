"""`vitrail vtab`: transfer to many small tasks, and the mean accuracy."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.cli.console import paragraph, print_json, print_lines, table
from vitrail.cli.options import DataOptions, ModelReference, options_of
from vitrail.errors import ConfigError
from vitrail.formatting import percent, truncate
from vitrail.training.config import MachineSettings

MAX_GROUP = 12  # characters


@dataclass(frozen=True, kw_only=True)
class Vtab(DataOptions):
    """Transfer a model to small tasks (VTAB-1k protocol); report the mean accuracy."""

    model: ModelReference
    tasks: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TASKS")]
    """A .toml file with a [[task]] table per dataset; keys: data and optionally name, group, train,
    test, vary."""
    out: Path | None = None
    """Folder of results and runs (default: runs/vtab-MODEL-METHOD). Finished tasks are reused."""
    method: Literal["finetune", "linear", "probe"] = "finetune"
    """Fine-tune with the paper's settings, or fit a logistic or ridge probe to the features."""
    learning_rates: tuple[float, ...] = ()
    """finetune: default 0.01; several are compared with 800 train and 200 dev images."""
    steps: int | None = None
    """finetune: number of steps (default: 2500)."""
    batch_size: int | None = None
    """finetune: batch size (default: 512)."""
    image_size: int | None = None
    """Image size in pixels (default: 384, or the model's own for a probe)."""
    seeds: int = 1
    """Number of random training subsets; the mean accuracy is reported."""
    machine: MachineSettings = field(default_factory=MachineSettings)
    json: bool = False
    """Print one JSON object at the end; progress goes to standard error."""

    def run(self) -> None:
        from vitrail.cli.live import Live
        from vitrail.training.adapt import Benchmark
        from vitrail.training.data_module import read_tasks
        from vitrail.training.memory import configure_malloc

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "`vitrail vtab` runs in one process; split the tasks over several files, each with "
                "its own --out"
            )
        # The same folder for the same model, so that a second call continues.
        name = Path(self.model.rpartition(":")[2]).name.split(".")[0] or "model"
        bench = Benchmark(
            reference=self.model,
            out=self.out or Path("runs") / f"vtab-{name}-{self.method}",
            **options_of(self, "method", "learning_rates", "steps", "batch_size", "image_size"),
            machine=self.machine,
            callback=(live := Live(stderr=self.json)),
        )
        tasks = read_tasks(self.tasks)
        if self.machine.parts != 1:
            configure_malloc()
        with live:
            result = bench.measure(tasks, self.seeds)
        if self.json:
            print_json(result | {"written": str(bench.out)})
            return
        print_lines(report(result))
        print(f"\ndone: {bench.out / 'results.json'}")


def report(result: dict[str, Any]) -> Iterator[str]:
    rows = []
    for task in result["tasks"]:
        first = task["scores"][0]
        counts = [f"{n:,}" for n in (first["learned"], first["judged"], task["classes"])]
        settings = list(dict.fromkeys(f"{score['setting']:g}" for score in task["scores"]))
        setting = settings[0] if len(settings) == 1 else "several"
        deviation = "" if task["deviation"] is None else f" ± {100 * task['deviation']:.1f}"
        accuracy = f"{percent(task['accuracy'])}{deviation}"
        rows.append([task["name"], truncate(task["group"], MAX_GROUP), *counts, setting, accuracy])
    yield ""
    yield from paragraph(f"{result['model']}, {result['method']}: top-1 accuracy")
    yield ""
    head = ["task", "group", "train", "test", "classes", result["setting"], "accuracy"]
    yield from table(rows, "llrrrrr", head)
    yield ""
    for group, mean in result["groups"].items():
        count = sum(task["group"] == group for task in result["tasks"])
        yield f"{percent(mean):>7}  mean of {truncate(group, 40)} ({count})"
    yield f"{percent(result['mean']):>7}  mean of all tasks ({len(result['tasks'])})"
    if result["mean_of_groups"] is not None:
        yield f"{percent(result['mean_of_groups']):>7}  mean of the group means"
