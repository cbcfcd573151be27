"""All experiments, and how one is carried out."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitrail.data.storage import write_atomic
from vitrail.errors import ConfigError
from vitrail.planning.cost import training_flops
from vitrail.reproduction import (
    carrying,
    compute,
    full,
    heads,
    learned,
    looking,
    page,
    positions,
    scaling,
    set_size,
    table1,
    table2,
    table5,
    table6,
)
from vitrail.reproduction.cells import Cell, Result, open_part
from vitrail.reproduction.experiments import Experiment, Sets
from vitrail.reproduction.measuring import measured
from vitrail.reproduction.models import config_of
from vitrail.reproduction.names import ALL, NAMES
from vitrail.reproduction.report import Report
from vitrail.reproduction.workshop import Pace, Workshop

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        table1.EXPERIMENT,
        table2.EXPERIMENT,
        set_size.FIGURE3,
        set_size.FIGURE4,
        compute.EXPERIMENT,
        table5.EXPERIMENT,
        table6.EXPERIMENT,
        looking.FIGURE6,
        learned.FIGURE7,
        carrying.TRANSFER,
        carrying.SELFSUPERVISED,
        scaling.EXPERIMENT,
        heads.EXPERIMENT,
        positions.EXPERIMENT,
        learned.FIGURE10,
        looking.FIGURE11,
    )
}
assert tuple(EXPERIMENTS) == NAMES, "names.py lists them for the command's help"
PAGE = "reproduction.md"


@dataclass
class Lab:
    """Where experiments are carried out, with which data, and who is told of it."""

    sets: Sets
    folder: Path
    workers: int
    tell: Callable[[str, Cell, Result], None]
    progress: Callable[[int, int, float], None]
    pace: Pace = field(default_factory=Pace)

    def carry_out(self, name: str) -> Report:
        """Run what has not been run, and write the report."""
        experiment = EXPERIMENTS[name]
        cells = experiment.cells(self.sets)
        for cell in {(c.data, c.pictures, c.half): c for c in cells.values()}.values():
            open_part(cell)  # what cannot be learned from is refused now
        shop = Workshop(self.folder, self.workers, work_of, self.tell, self.progress, self.pace)
        report = experiment.report(shop.results(cells), self.sets)
        report = replace(report, command=self.command(name, trained=bool(cells)))
        page.write(report, self.folder / name)
        return report

    def command(self, name: str, *, trained: bool) -> str:
        words = ["vitrail", "reproduce", name]
        if trained:
            words += ["--data", Path(self.sets.pretrain).name]
            words += ["--target", Path(self.sets.target).name] if self.sets.target else []
        return shlex.join(words)

    def written(self) -> list[Report]:
        """The reports that the folder holds, in the order of the paper."""
        found = (page.read(self.folder / name) for name in NAMES)
        return [report for report in found if report is not None]


def work_of(cell: Cell) -> float:
    """Floating-point operations of a cell's training."""
    steps, batch = cell.settings.steps, cell.settings.batch_size
    assert steps is not None
    assert batch is not None
    return training_flops(config_of(cell), steps * batch)


def with_weights(name: str, weights: Mapping[str, str], data: Mapping[str, str]) -> Report:
    """Table 2 or 5 with what models of the user's reach beside the published numbers."""
    if name not in TABLES:
        raise ConfigError(
            f"--weights are judged beside {' and '.join(TABLES)}, and {name} has none of them"
        )
    return TABLES[name].report_with(measured(weights, data, name))


TABLES = {"table2": table2, "table5": table5}


def names_of(asked: str) -> tuple[str, ...]:
    return NAMES if asked == ALL else (asked,)


def write_docs(reports: list[Report], folder: Path) -> Path:
    """reproduction.md and the folder of its figures."""
    for report in reports:
        page.write_pictures(report, folder / "reproduction")
    write_atomic(folder / PAGE, page.markdown(reports))
    return folder / PAGE


def full_scale(name: str) -> Report:
    """The paper's own runs, built without memory."""
    experiment = EXPERIMENTS[name]
    tables = full.tables(name)
    return experiment.reported(
        did="The paper's own settings were built on a device without memory.",
        found=(
            "Every model, objective and optimizer fits together; the commands run them."
            if tables
            else "Nothing is trained for this one."
        ),
        verdict="checked",
        tables=tables,
    )
