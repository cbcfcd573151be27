"""`vitrail demo`: a model learns to read hands while you watch."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from vitrail.cli.progress import Progress
from vitrail.cli.status import STOPPED
from vitrail.cli.text import tell
from vitrail.errors import ConfigError, DataError
from vitrail.formatting import duration, percent

DATA = "builtin:sign-digits"
SHOWN = 6  # pictures of attention.png
LOOKED_AT = 64  # pictures that attention is averaged over
BEGUN = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small ViT on photographs of hands that come along; about three minutes."""

    out: Path = Path("demo")
    """Folder for the model and its report; an earlier demo in it is replaced."""
    minutes: float = 2.95
    """The time that training and evaluation may take."""
    seed: int = 0
    """Another number begins with other weights."""

    def run(self) -> int:
        from vitrail.checkpoints.load import load
        from vitrail.cli.live import Live
        from vitrail.data.datasets import open_dataset
        from vitrail.demo import draw_predictions
        from vitrail.inspection.api import inspect_model
        from vitrail.inspection.folder import write_folder
        from vitrail.models.vit import VisionTransformer
        from vitrail.training.config import RunConfig
        from vitrail.training.memory import configure_malloc
        from vitrail.training.recipes import is_run, read_recipe, read_run
        from vitrail.training.trainer import run

        used = self.out.is_dir() and any(self.out.iterdir())
        if used and (not is_run(self.out) or read_run(self.out)[1] != DATA):
            raise DataError(f"{self.out} holds something else; name another --out")
        if self.minutes <= 0 or self.seed < 0:
            raise ConfigError(f"minutes={self.minutes} must be above 0, seed={self.seed} not below")
        tell("A Vision Transformer learns to read the digits that hands show (2,062 photographs")
        tell("by the students of a high school in Ankara), from nothing.\n")
        settings = replace(read_recipe("demo"), minutes=self.minutes, seed=self.seed)
        configure_malloc()
        with Live() as live:
            config = RunConfig(data=DATA, out=self.out, settings=settings, overwrite=True)
            result = run(config, live, started=BEGUN)
        if not result.finished:
            print(f"stopped; vitrail train --resume --out {self.out} goes on")
            return STOPPED
        model, test = load(self.out).eval(), open_dataset(DATA, "test")
        assert isinstance(model, VisionTransformer)
        samples = [test[i * len(test) // SHOWN] for i in range(SHOWN)]
        draw_predictions(model, samples).save(self.out / "attention.png")
        tell("looking inside the model")
        with Progress() as progress:
            inside = inspect_model(
                model, data=test, images=LOOKED_AT, progress=lambda what, *done: progress(*done)
            )
        *_, page = write_folder(self.out / "inspection", inside)
        outcome = result.outcomes["test"]
        right = round(outcome.accuracy * outcome.samples)
        print(f"\n{right} of {outcome.samples} new photographs are classified correctly: ", end="")
        print(f"{percent(outcome.accuracy)}, after {duration(result.seconds)}.\n")
        found = {
            self.out / "report.html": "open it in a browser: curves, mistakes, settings",
            page: "what it looks at, patch by patch",
            self.out / "attention.png": "the same as one picture",
            self.out: f"the model: vitrail.load('{self.out}') in Python",
        }
        widest = max(len(str(place)) for place in found)
        for place, what in found.items():
            print(f"  {place!s:{widest}}  {what}")
        tell()
        tell("Next, your own pictures, a folder for each class:")
        tell("  vitrail check pictures/                   what is wrong with them")
        tell("  vitrail train pictures/ --minutes 10      a model from scratch")
        tell("  vitrail finetune pictures/ --from hf:google/vit-base-patch16-224")
        tell("  vitrail evaluate runs/pictures pictures/  how good it is, and how sure it may be")
        return 0
