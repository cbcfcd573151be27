"""`vitrail demo`: train a small model on a built-in dataset, and show what it has learned."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.console import Progress, accuracy_line, log, table
from vitrail.cli.options import STOPPED
from vitrail.errors import ConfigError, DataError
from vitrail.formatting import duration, percent

if TYPE_CHECKING:
    from PIL.Image import Image

    from vitrail.data.datasets import Sample
    from vitrail.models.vit import VisionTransformer

DATA = "builtin:sign-digits"
SHOWN = 6  # images in attention.png
INSPECTED = 64  # images that attention statistics are averaged over
SIDE, GAP = 150, 12  # pixels of an image in attention.png, and between images
BEGUN = time.monotonic()


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
        from vitrail.inspection.api import inspect_model
        from vitrail.inspection.folder import write_folder
        from vitrail.models.vit import VisionTransformer
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
            result = run(config, live, started=BEGUN)
        if not result.finished:
            print(f"stopped; resume with: vitrail train --resume --out {self.out}")
            return STOPPED
        model, test = load(self.out).eval(), open_dataset(DATA, "test")
        assert isinstance(model, VisionTransformer)
        samples = [test[i * len(test) // SHOWN] for i in range(SHOWN)]
        draw_predictions(model, samples).save(self.out / "attention.png")
        log("inspecting the model")
        with Progress() as progress:
            inspection = inspect_model(
                model, data=test, images=INSPECTED, progress=lambda what, *done: progress(*done)
            )
        *_, page = write_folder(self.out / "inspection", inspection)
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


def draw_predictions(model: "VisionTransformer", samples: Sequence["Sample"]) -> "Image":
    """Draw one column per image: its patches, the attention rollout, the top 2 classes."""
    import numpy as np
    import torch
    from PIL import Image, ImageDraw, ImageFont

    from vitrail.checkpoints.metadata import get_metadata
    from vitrail.data.decode import open_image
    from vitrail.inspection.drawing import overlay
    from vitrail.inspection.findings import Box
    from vitrail.inspection.layers import lag
    from vitrail.inspection.pictures import as_seen
    from vitrail.inspection.rollout import rollout

    font, small = ImageFont.load_default(17), ImageFont.load_default(13)
    size = (len(samples) * (SIDE + GAP) + GAP, 2 * (SIDE + GAP) + 40 + 56)
    figure = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(figure)
    pen.text((GAP, 10), "patches, attention rollout, prediction", "black", font)
    for column, sample in enumerate(samples):
        assert isinstance(sample.data, bytes)
        pixels = open_image(sample.data).pixels(channels=3)
        image = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        with torch.inference_mode():
            batch = as_seen(model, sample.data)[None]
            probabilities = model(batch)[0].softmax(dim=0)
            attention = rollout(model, batch)[0].numpy()  # (h, w)
        whole = Box(0, 0, SIDE, SIDE)
        heat_map = overlay(np.asarray(image), attention, whole, lag=lag(model)).resize(image.size)
        x, y = GAP + column * (SIDE + GAP), 40
        figure.paste(image, (x, y))
        rows, columns = model.config.grid
        for i in range(1, rows):
            pen.line([(x, y + i * SIDE // rows), (x + SIDE - 1, y + i * SIDE // rows)], "white")
        for i in range(1, columns):
            at = x + i * SIDE // columns
            pen.line([(at, y), (at, y + SIDE - 1)], "white")
        figure.paste(heat_map, (x, y + SIDE + GAP))
        for line, (value, index) in enumerate(zip(*probabilities.topk(2), strict=True)):
            text = f"{percent(value.item())}  {get_metadata(model).class_names[int(index)]}"
            color, typeface = ("black", font) if line == 0 else ("gray", small)
            pen.text((x, y + 2 * (SIDE + GAP) + 22 * line), text, color, typeface)
    return figure
