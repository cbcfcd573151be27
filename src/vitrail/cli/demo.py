"""`vitrail demo`: train a small model on a built-in dataset, and show what it has learned."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from vitrail.cli.console import Progress, accuracy_line, log, table
from vitrail.cli.options import STOPPED
from vitrail.errors import ConfigError, DataError
from vitrail.formatting import duration

DATA = "builtin:sign-digits"
INSPECTED = 64  # images that attention statistics are averaged over
START_TIME = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train and evaluate a small ViT on built-in photos of hand signs, in 3 minutes."""

    out: Path = Path("demo")
    """Folder for the model and its report; an earlier demo in it is replaced."""
    minutes: float = 2.95
    """Time budget of training and evaluation."""
    seed: int = 0
    """Random seed."""

    def run(self) -> int:
        from vitrail.checkpoints.load import load
        from vitrail.cli.live import Live
        from vitrail.data.datasets import open_dataset
        from vitrail.data.storage import write_atomic
        from vitrail.inspection.inspect import inspect_model
        from vitrail.models.vit import VisionTransformer
        from vitrail.reports.figures import png_bytes
        from vitrail.reports.inspection import rollout_figure, write_inspection
        from vitrail.training.config import RunConfig
        from vitrail.training.memory import configure_malloc
        from vitrail.training.recipes import is_run, read_recipe, read_run
        from vitrail.training.trainer import run

        used = self.out.is_dir() and any(self.out.iterdir())
        if used and (not is_run(self.out) or read_run(self.out)[1] != DATA):
            raise DataError(f"{self.out} contains other files; pass another --out")
        if self.minutes <= 0:
            raise ConfigError(f"--minutes {self.minutes:g}: must be greater than 0")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: must be 0 or more")
        log("Training a Vision Transformer from scratch on 2,062 photos of hand signs for the")
        log("digits 0 to 9, taken by students of a high school in Ankara.\n")
        settings = replace(read_recipe("demo"), minutes=self.minutes, seed=self.seed)
        configure_malloc()
        with Live() as live:
            config = RunConfig(data=DATA, out=self.out, settings=settings, overwrite=True)
            result = run(config, live, started=START_TIME)
        if not result.finished:
            print(f"stopped; resume with: vitrail train --resume --out {self.out}")
            return STOPPED
        model, test = load(self.out).eval(), open_dataset(DATA, "test")
        assert isinstance(model, VisionTransformer)
        log("inspecting the model")
        with Progress() as progress:
            inspection = inspect_model(
                model, data=test, images=INSPECTED, progress=lambda what, *done: progress(*done)
            )
        page = write_inspection(self.out / "inspection", inspection)[-1]
        figure = rollout_figure(inspection.images, model.config.grid)
        write_atomic(self.out / "attention.png", png_bytes(figure))
        print(f"\n{accuracy_line('test', result.outcomes['test'])}")
        print(f"done in {duration(result.seconds)}\n")
        files = {
            self.out / "report.html": "training report: curves, mistakes, settings",
            page: "inspection report: attention, filters, position embeddings",
            self.out / "attention.png": "patches, attention rollout and predictions",
            self.out: f'the model: vitrail.load("{self.out}") in Python',
        }
        rows = [(str(path), text) for path, text in files.items()]
        print(*table(rows, "lw", indent=2), sep="\n")
        log("\nNext, your own images, in one folder per class:")
        log("  vitrail check images/")
        log("  vitrail train images/ --minutes 10")
        log("  vitrail finetune images/ --from hf:google/vit-base-patch16-224")
        log("  vitrail evaluate runs/images images/")
        return 0
