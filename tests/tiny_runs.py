"""A tiny dataset, and tiny training runs on it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.data.preprocessing import Augmentation, Mixing
from vitrail.training.callbacks import Callback
from vitrail.training.config import ModelSettings, OptimSettings, RunConfig, Settings
from vitrail.training.trainer import Result, run

CLASSES = ("red", "green", "blue")
TINY = ModelSettings(
    name="ViT-Mu/4", image_size=8, patch_size=4, width=16, mlp_width=32, heads=2, depth=2
)
SETTINGS = Settings(
    steps=8,
    batch_size=6,
    model=TINY,
    optim=OptimSettings(kind="adamw", learning_rate=3e-3, warmup_steps=1),
    augment=Augmentation(crop="padded", padding=1, flip=True),
    mix=Mixing(cutmix=0.0),  # mixes within a micro-batch
)


def write_colors(path: Path, *, train: int = 30, test: int = 12, classes: int = 3) -> Path:
    """Write noisy 8 x 8 images in which one color is strongest."""
    rng = np.random.default_rng(0)
    parts = {}
    for split, count in (("train", train), ("test", test)):
        labels = np.arange(count) % classes
        pixels = rng.integers(0, 120, (count, 8, 8, 3))
        pixels[np.arange(count), :, :, labels % 3] += 100
        parts[f"x_{split}"] = pixels.astype(np.uint8)
        parts[f"y_{split}"] = labels
    np.savez(path, **parts, class_names=np.array(CLASSES[:classes]))
    return path


def write_folder(root: Path, count: int = 10, seed: int = 0) -> Path:
    """Write such images as class folders, without splits."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 120, (8, 8, 3))
            pixels[:, :, label] += 100
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{number}.png")
    return root


def tiny_run(data: Path | str, out: Path, *, callback: Callback | None = None, **changes) -> Result:
    """Train on a dataset; `changes` are settings, or `resume`, `start` and `overwrite`."""
    options = {key: changes.pop(key) for key in ("resume", "start", "overwrite") if key in changes}
    settings = replace(SETTINGS, **changes)
    return run(RunConfig(data=str(data), out=out, settings=settings, **options), callback)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return vitrail.load(folder).state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two state dicts are bit-identical."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Recorder(Callback):
    def __init__(self):
        self.lines, self.rows, self.evaluations = [], [], []

    def log(self, line):
        self.lines.append(line)

    def on_step(self, row):
        self.rows.append(row)

    def on_evaluate(self, row):
        self.evaluations.append(row)
