"""One training run of an experiment as a value, and its result on disk.

A job that several experiments need runs once: its folder is named by a digest of everything it
depends on. The folder is the bundle of the run, with its checkpoint until the run is finished, and
result.json, written last.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from reproduction.report import TEXT
from vitrail.checkpoints.bundle import contains_model
from vitrail.checkpoints.files import read_json, write_json
from vitrail.checkpoints.load import load
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import ImageDataset, evaluation_split, open_dataset, stratified_subset
from vitrail.data.decode import decode
from vitrail.data.provenance import fingerprint
from vitrail.data.storage import atomic_path
from vitrail.errors import ConfigError, DataError
from vitrail.models.config import Config, from_dict, to_dict
from vitrail.models.registry import configuration
from vitrail.planning.flops import cost_of
from vitrail.probing.features import features_of
from vitrail.probing.fewshot import try_shots
from vitrail.training.callbacks import Callback
from vitrail.training.checkpoint import has_state
from vitrail.training.config import ModelSettings, RunConfig, Settings
from vitrail.training.data_module import DataSplits
from vitrail.training.optim import MUON_RATE
from vitrail.training.recipes import read_recipe, read_run, settings_from_dict
from vitrail.training.trainer import run

RESULT = "result.json"
VERSION = 2  # of what is measured
SHOTS, DRAWS = 5, 10
PROBE: dict[str, Any] = TEXT["probe_protocol"]
POOL = 50  # test images per class from which shots are drawn; the probe is evaluated on the others
PROTOCOL: dict[str, Any] = TEXT["protocol"]
RECIPE = read_recipe(str(Path(__file__).with_name("small.toml")))

Key = tuple[Any, ...]  # identifies a job within an experiment; the last item is the seed
ClassHalf = Literal["", "even", "odd"]


@dataclass(frozen=True)
class Datasets:
    """References of the pre-training dataset and of those that models are transferred to.

    Without a target, models are pre-trained on every other class and transferred to the rest.
    With probes, models are compared by closed-form probes on those datasets.
    """

    pretrain: str
    target: str = ""
    probes: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, Any]:
        """Names and phrases for reports: `fashion_mnist` for ../data/fashion_mnist.npz."""
        pretrain, target, *probes = (
            Path(data.rpartition(":")[2]).stem or data
            for data in (self.pretrain, self.target, *self.probes)
        )
        source = pretrain if self.target else f"every other class of {pretrain}"
        names = {"pretrain": pretrain, "source": source, "target": target or "the other classes"}
        if not probes:
            measure = "evaluated on {test_images} test images"
            names |= {"trained_on": source, "measure": measure, "score": "test accuracy"}
            return names | {"shots": SHOTS}
        probe = PROBE["probe"].format(**PROBE, datasets=", ".join(probes))
        names |= {"probe": probe, "measure": f"compared by {probe}", "trained_on": pretrain}
        names |= {"score": f"{PROBE['shots']}-shot accuracy", "shots": PROBE["shots"]}
        return names | {"batch": f"{PROBE['batch']} with Muon", "seeds": PROBE["seeds"]}

    def seeds(self, experiment: str) -> int:
        return PROBE["seeds"] if self.probes else TEXT[experiment].get("seeds", 0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one training run depends on; equal jobs have equal results."""

    data: str
    settings: Settings
    images: int | None = None  # size of the training subset, stratified by class
    test_images: int | None = None
    half: ClassHalf = ""  # of the classes: every other one, from the first or from the second
    start: "Job | None" = None  # whose model is fine-tuned
    probes: tuple[str, ...] = ()  # datasets of the few-shot evaluation; default: the test images

    @property
    def config(self) -> Config:
        """The model, except for its classes and channels, which the data decides."""
        model = self.settings.model
        before = self.start.config if self.start else configuration(model.name or "")
        return before.change(**model.changes())

    @property
    def flops(self) -> float:
        """FLOPs of training."""
        images = (self.settings.steps or 0) * (self.settings.batch_size or 0)
        return images * cost_of(self.config).training


class Result(NamedTuple):
    """The measurements of a finished job."""

    folder: Path  # the bundle
    accuracy: float | None  # on the test images; None without classes
    fewshot: float  # accuracy of a linear probe, mean over draws and datasets
    images: int  # seen in training
    test_images: int
    seconds: float
    config: Config
    draws: Sequence[float] = ()  # accuracies of the probes


def small_model(name: str, **changes: Any) -> ModelSettings:
    """Return a model of [models] in experiments.toml, with changes."""
    values = {"image_size": PROTOCOL["image_size"], **TEXT["models"][name], **changes}
    return settings_from_dict({"model": values}).model


def pretraining(
    datasets: Datasets,
    model: ModelSettings,
    seed: int,
    *,
    steps: int = PROTOCOL["steps"],
    rate: float = PROTOCOL["rate"],
    images: int | None = None,
    objective: str = "classify",
    transfer: bool = False,
) -> Job:
    """Return the training of a model from scratch.

    `transfer`: the model is fine-tuned later, on another dataset or on the other classes.
    """
    settings = replace(RECIPE, seed=seed, steps=steps, objective=objective)
    optim = replace(RECIPE.optim, learning_rate=rate)
    if datasets.probes:
        settings = replace(settings, batch_size=PROBE["batch"])
        optim = replace(optim, kind="muon", muon_learning_rate=PROBE["muon_factor"] * rate)
    return Job(
        data=datasets.pretrain,
        settings=replace(settings, model=model, optim=optim),
        images=images,
        test_images=PROTOCOL["test_images"],
        half="even" if transfer and not datasets.target else "",
        probes=datasets.probes,
    )


def grid_jobs(name: str, datasets: Datasets) -> dict[Key, Job]:
    """Return the runs of an experiment in experiments.toml, for all seeds."""
    jobs = {}
    for one in TEXT[name].get("runs", ()):
        model = small_model(one["model"], **one.get("change", {}))
        train = one.get("train", {}) | (one.get("probe_train", {}) if datasets.probes else {})
        for seed in one.get("seeds", range(datasets.seeds(name))):
            jobs[*one["key"], seed] = pretraining(datasets, model, seed, **train)
    return jobs


def finetuning(datasets: Datasets, start: Job | None, model: ModelSettings, seed: int) -> Job:
    """Return the training on a few target images, from a pre-trained model or from scratch.

    As in the paper with a cosine schedule and without weight decay, but with Adam: a hundred steps
    of SGD hardly move such a small model.
    """
    rate, steps, batch = (PROTOCOL[f"fine_{name}"] for name in ("rate", "steps", "batch"))
    optim = replace(RECIPE.optim, learning_rate=rate, schedule="cosine", weight_decay=0.0)
    settings = replace(RECIPE, seed=seed, steps=steps, batch_size=batch)
    return Job(
        data=datasets.target or datasets.pretrain,
        settings=replace(settings, model=model, optim=optim),
        images=PROTOCOL["fine_images"],
        test_images=PROTOCOL["test_images"],
        half="" if datasets.target else "odd",
        start=start,
    )


# Settings of a model that earlier runs did not have: they count only if they are set.
ADDED = ("resnet_width", "unit", "rope_theta", "attention", "qkv_bias", "key_bias", "qk_norm")
ADDED += ("mlp", "norm", "pre_norm", "registers", "class_token")


def digest(job: Job) -> str:
    """Return a short hash of a job and everything it depends on."""
    settings = asdict(job.settings)
    for name in ADDED:
        if settings["model"][name] is None:
            del settings["model"][name]
    settings["optim"]["muon_learning_rate"] = job.settings.optim.muon_learning_rate or MUON_RATE
    values = {
        "protocol": VERSION,
        "data": data_fingerprints(job.data),
        "settings": settings,
        "images": job.images,
        "test_images": job.test_images,
        "half": job.half,
        "start": digest(job.start) if job.start else None,
        "probes": job.probes and [[*map(data_fingerprints, job.probes)], PROBE],
    }
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


@cache
def data_fingerprints(data: str) -> list[str]:
    return [fingerprint(open_dataset(data, split)) for split in ("train", test_split(data))]


def test_split(data: str) -> str:
    split = evaluation_split(data)
    if split is None:
        raise DataError(f"{data} has no test split, which the experiments evaluate on")
    return split


def open_data(job: Job) -> DataSplits:
    """Open the images of a job; the seed selects the subset, and smaller ones are nested."""
    splits = (open_dataset(job.data, split) for split in ("train", test_split(job.data)))
    train, test = (select_half(samples, job.half) for samples in splits)
    train = subset(train, job.images, job.settings.seed)
    held_out = {"test": subset(test, job.test_images, 0)}
    return DataSplits(reference=job.data, train=train, held_out=held_out)


def select_half(samples: ImageDataset, half: ClassHalf) -> ImageDataset:
    """Return the images of every other class as a dataset of its own."""
    if not half:
        return samples
    first, index, count = int(half == "odd"), samples.index, len(samples.classes)
    if count < 4:
        raise ConfigError(f"{count} classes are too few to split in half; give --target as well")
    rows = np.flatnonzero(samples.class_ids() % 2 == first)
    labels = np.asarray(index.labels) // 2
    halved = index._replace(labels=labels, classes=index.classes[first::2])
    return ImageDataset(halved, samples.rows).subset(rows)


def subset(samples: ImageDataset, count: int | None, seed: int) -> ImageDataset:
    """Return a random stratified subset."""
    if count is None or count >= len(samples):
        return samples
    if count < len(samples.classes):
        raise ConfigError(f"{count} images are fewer than {len(samples.classes)} classes")
    rows = stratified_subset(samples.class_ids(), count, np.random.default_rng(seed))
    return samples.subset(rows)


def probe_split(test: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
    """Split test images into those a probe is fitted to and those it is evaluated on."""
    pool = subset(test, min(POOL * len(test.classes), len(test) // 3), 1)
    rows, pool_rows = (np.arange(len(s)) if s.rows is None else s.rows for s in (test, pool))
    return pool, ImageDataset(test.index, np.setdiff1d(rows, pool_rows))


def open_probe(data: str) -> tuple[ImageDataset, ImageDataset]:
    """Open the training images of a probe, and the test images that it is evaluated on."""
    train, test = (open_dataset(data, split) for split in ("train", test_split(data)))
    pool = subset(train, PROBE["pool"] * len(train.classes), 1)
    return pool, subset(test, PROBE["test_images"], 0)


def shrink(data: str, folder: Path) -> str:
    """Write the images of a dataset as small squares into an .npz, once, and return its path."""
    size, splits = PROTOCOL["image_size"], {"train": "train", "test": test_split(data)}
    path = folder / "-".join(data_fingerprints(data))[:24] / f"{Path(data).stem}.npz"
    if path.exists():
        return str(path)
    arrays: dict[str, np.ndarray] = {}
    for name, split in splits.items():
        samples = open_dataset(data, split)
        images = np.empty((len(samples), size, size, 3), np.uint8)
        for index in range(len(samples)):
            sample = samples[index]
            pixels = decode(sample.data) if isinstance(sample.data, bytes) else sample.data
            image = Image.fromarray(pixels.squeeze()).convert("RGB")
            images[index] = np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC))
        arrays |= {f"x_{name}": images, f"y_{name}": samples.class_ids()}
        arrays["class_names"] = np.array(samples.classes)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return str(path)


def run_job(job: Job, folder: Path, start: str = "", callback: Callback | None = None) -> bool:
    """Train, measure and write the result; False if interrupted (the run can be resumed)."""
    data = open_data(job)
    resume = has_state(folder)
    if resume or not contains_model(folder):
        settings = read_run(folder)[0] if resume else job.settings
        config = RunConfig(
            data=job.data, out=folder, settings=settings, start=start, resume=resume, splits=data
        )
        if not run(config, callback).finished:
            return False
    model, test = load(folder), data.held_out["test"]
    provenance = get_metadata(model).provenance
    # The shots are test images, since the model may have memorized its training images.
    splits = [open_probe(data) for data in job.probes] or [probe_split(test)]
    shots, seeds = (PROBE["shots"], PROBE["draws"]) if job.probes else (SHOTS, DRAWS)
    draws = []
    for split in splits:
        pool, rest = (features_of(model, part, cache=False) for part in split)
        trials = next(try_shots(pool, rest, shots=(shots,), seeds=seeds))
        draws += next(trial for trial in trials if trial.probe == "ridge, best").accuracies
    values = {
        "accuracy": provenance.get("test accuracy"),
        "fewshot": sum(draws) / len(draws),
        "draws": draws,
        "test_images": len(test),
        "images": provenance["steps"] * (read_run(folder)[0].batch_size or 1),
        "seconds": provenance["seconds"],
        "config": to_dict(model.config),
    }
    write_json(folder / RESULT, values)
    return True


def read_result(folder: Path) -> Result | None:
    """Read the result of a finished job."""
    if not (folder / RESULT).exists():
        return None
    values: dict[str, Any] = read_json(folder / RESULT)
    return Result(folder=folder, **{**values, "config": from_dict(values["config"])})
