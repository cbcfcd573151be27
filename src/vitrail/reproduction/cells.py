"""One small run of an experiment: what it depends on as a value, and its result on disk.

A cell that several experiments ask for is run once: its folder is named by a digest of all that it
depends on. The folder is the bundle of the run, with its resumable state while it is not finished,
and cell.json, which is written last.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.checkpoints.bundle import contains_model
from vitrail.checkpoints.files import read_json, write_json
from vitrail.checkpoints.load import load
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import ImageDataset, evaluation_split, open_dataset, stratified_subset
from vitrail.data.provenance import fingerprint
from vitrail.errors import ConfigError, DataError
from vitrail.models.config import Config, from_dict, to_dict
from vitrail.probing.features import features_of
from vitrail.probing.shots import try_shots
from vitrail.training.callbacks import Callback
from vitrail.training.checkpoint import has_state
from vitrail.training.config import RunConfig, Settings
from vitrail.training.data_module import DataSplits
from vitrail.training.recipes import read_run
from vitrail.training.trainer import run

RESULT = "cell.json"
PROTOCOL = 2  # changes when what is measured changes
SHOTS, DRAWS = 5, 10  # pictures of each class for a linear probe, and how often they are drawn
POOL = 50  # test pictures of each class that these are drawn from; they judge no probe
PROBE = f"a linear probe of {SHOTS} test pictures of each class ({DRAWS} draws), judged by others"

Half = Literal["", "even", "odd"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one run depends on; two equal cells have the same result."""

    data: str
    settings: Settings
    pictures: int | None = None  # of the training pictures, each class keeping its share
    judged: int | None = None  # of the test pictures
    half: Half = ""  # of the classes: every other one, from the first or from the second
    start: "Cell | None" = None  # whose model is fine-tuned


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a cell."""

    folder: Path  # the bundle
    accuracy: float | None  # of the test pictures; None without classes
    fewshot: float  # 5-shot accuracy of a linear probe of the features, mean over draws
    images: int  # seen in training
    judged: int  # test pictures
    seconds: float
    config: Config


def digest(cell: Cell) -> str:
    """A few letters that stand for a cell and everything it depends on."""
    about = {
        "protocol": PROTOCOL,
        "data": prints_of(cell.data),
        "settings": asdict(cell.settings),
        "pictures": cell.pictures,
        "judged": cell.judged,
        "half": cell.half,
        "start": digest(cell.start) if cell.start else None,
    }
    return blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).hexdigest()


@cache
def prints_of(data: str) -> list[str]:
    """What tells the pictures and labels from others: to learn from, and to be judged by."""
    return [fingerprint(open_dataset(data, split)) for split in ("train", tested(data))]


def tested(data: str) -> str:
    split = evaluation_split(data)
    if split is None:
        raise DataError(f"{data} has no pictures to be judged by; it needs a test split")
    return split


def read_result(folder: Path) -> Result | None:
    """The result of a cell that was run before."""
    if not (folder / RESULT).exists():
        return None
    values = read_json(folder / RESULT)
    return Result(
        folder=folder,
        accuracy=values["accuracy"],
        fewshot=values["fewshot"],
        images=values["images"],
        judged=values["judged"],
        seconds=values["seconds"],
        config=from_dict(values["config"]),
    )


def run_cell(cell: Cell, folder: Path, start: str = "", watch: Callback | None = None) -> bool:
    """Train, measure and write the result; False if it was asked to stop before the end."""
    material = open_part(cell)
    settings, resume = cell.settings, has_state(folder)
    if resume:
        settings = read_run(folder)[0]
    if resume or not contains_model(folder):
        config = RunConfig(
            data=cell.data,
            out=folder,
            settings=settings,
            start=start,
            resume=resume,
            splits=material,
        )
        if not run(config, watch).finished:
            return False
    write_json(folder / RESULT, measure(folder, material))
    return True


def open_part(cell: Cell) -> DataSplits:
    """The pictures of a cell; the seed decides which, and fewer are always among more."""
    train = halved(open_dataset(cell.data, "train"), cell.half)
    test = halved(open_dataset(cell.data, tested(cell.data)), cell.half)
    return DataSplits(
        reference=cell.data,
        train=part(train, cell.pictures, cell.settings.seed),
        held_out={"test": part(test, cell.judged, 0)},
    )


def halved(samples: ImageDataset, half: Half) -> ImageDataset:
    """The pictures of every other class, as a set of its own."""
    if not half:
        return samples
    first, collection = 0 if half == "even" else 1, samples.index
    if len(samples.classes) < 4:
        raise ConfigError(
            f"{len(samples.classes)} classes are too few to be halved; give --target as well"
        )
    own = replace(
        collection,
        labels=np.asarray(collection.labels) // 2,
        classes=collection.classes[first::2],
    )
    places = np.flatnonzero(samples.class_ids() % 2 == first)
    return ImageDataset(own, samples.rows).subset(places)


def part(samples: ImageDataset, count: int | None, seed: int) -> ImageDataset:
    if count is None or count >= len(samples):
        return samples
    if count < len(samples.classes):
        raise ConfigError(f"{count} pictures are fewer than {len(samples.classes)} classes")
    rng = np.random.default_rng(seed)
    return samples.subset(stratified_subset(samples.class_ids(), count, rng))


def without(samples: ImageDataset, others: ImageDataset) -> ImageDataset:
    return ImageDataset(samples.index, np.setdiff1d(places(samples), places(others)))


def places(samples: ImageDataset) -> np.ndarray:
    return np.arange(len(samples)) if samples.rows is None else samples.rows


def measure(folder: Path, material: DataSplits) -> Mapping[str, Any]:
    """How good a bundle is: its test accuracy, and its features with five pictures of a class.

    The five are test pictures, since a model may know its training pictures by heart.
    """
    model = load(folder)
    provenance = get_metadata(model).provenance
    test = material.held_out["test"]
    shown = part(test, min(POOL * len(test.classes), len(test) // 3), 1)
    pool = features_of(model, shown, cache=False)
    judged = features_of(model, without(test, shown), cache=False)
    trials = next(try_shots(pool, judged, shots=(SHOTS,), seeds=DRAWS))
    best = next(trial for trial in trials if trial.probe == "ridge, best")
    return {
        "accuracy": provenance.get("test accuracy"),
        "fewshot": best.mean,
        "draws": list(best.accuracies),
        "judged": len(test),
        "images": provenance["steps"] * (read_run(folder)[0].batch_size or 1),
        "seconds": provenance["seconds"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "config": to_dict(model.config),
    }
