"""The data of a run: the splits of a dataset, and the micro-batches of each step."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail import distributed
from vitrail.data import augment, datasets
from vitrail.data.datasets import (
    Dataset,
    ImageDataset,
    LabelSets,
    Splits,
    assign_splits,
    stratified_subset,
)
from vitrail.data.loader import Batch, Loader, TrainSampler, balanced_probabilities
from vitrail.data.preprocessing import Augmentation, Mixing, Preprocessing
from vitrail.data.provenance import fingerprint
from vitrail.data.transforms import TrainTransform, normalize
from vitrail.errors import ConfigError, DataError, VitrailError, unknown
from vitrail.formatting import comma_list
from vitrail.training.config import Settings
from vitrail.training.objectives import TeacherFeatures
from vitrail.training.schedules import Schedule

# Appendix B.1.1: 10 % of Pets and Flowers, 2 % of CIFAR, 1 % of ImageNet.
DEV_FRACTIONS = {20_000: 0.1, 100_000: 0.02}  # training images below which this fraction is dev
DEV_FRACTION_LARGE = 0.01
TASK_KEYS = {"data": str, "name": str, "group": str, "train": str, "test": str, "vary": bool}
ABSOLUTE = ("builtin:", "hf:", "~")  # data references that are not relative to the tasks file
MIN_TASK_IMAGES = 5
NAMED_SKIPPED = 3  # unreadable images in the log; the report of a run lists all
FIT_FRACTION = 0.8  # of the images drawn from a task, to train on while choosing


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """The training set, and the held-out splits: val, test, or both."""

    reference: str
    train: ImageDataset
    held_out: dict[str, ImageDataset]  # by split; the first is evaluated during training
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images so far, and why

    def log_skipped(self, log: Callable[[str], None]) -> None:
        """Log the unreadable images in one line; all processes call this with the same images."""
        for skipped in distributed.all_gather_object(self.skipped):
            self.skipped.update(skipped)
        if count := len(self.skipped):
            total = len(self.train) + sum(map(len, self.held_out.values()))
            # Without the advice, which follows a semicolon.
            names = [f"{name} ({why.partition(';')[0]})" for name, why in self.skipped.items()]
            log(
                f"note: {count:,} of {total:,} images could not be read and "
                f"{'was' if count == 1 else 'were'} skipped: {comma_list(names, NAMED_SKIPPED)}"
            )


def reference_of(data: Any) -> tuple[str, dict[str, ImageDataset] | None]:
    """Return a reference, and opened datasets by split; a dataset alone is the train split.

    The reference of opened datasets is the fingerprint of the training images.
    """
    if isinstance(data, str | PathLike):
        return fspath(data), None
    splits = data if isinstance(data, Mapping) else {"train": data}
    splits = {datasets.canonical_split(name): dataset for name, dataset in splits.items()}
    for dataset in splits.values():
        if not isinstance(dataset, ImageDataset):
            raise ConfigError(
                f"data is a {type(dataset).__name__}; expected a reference, such as a folder, or "
                "a dict of datasets from vitrail.open_dataset, by split"
            )
    if "train" not in splits:
        raise DataError(f"the datasets have no train split; they have: {', '.join(splits)}")
    return f"dataset:{fingerprint(splits['train'])}", splits


def open_splits(data: str | dict[str, ImageDataset], settings: Settings) -> DataSplits:
    """Open the splits of a dataset, or check opened ones; raise if training cannot work, and note
    what is unusual."""
    if isinstance(data, str):
        reference = data
        fractions = None if settings.dev is None else Splits(val=settings.dev, test=0.0)
        splits = datasets.open_splits(reference, splits=fractions)
    else:
        reference, splits = "the dataset", dict(data)
        if settings.dev and not splits.get("val"):
            alone = DataSplits(reference=reference, train=splits["train"], held_out={})
            splits["train"], _, splits["val"] = hold_out_dev(alone, settings.dev)
    if "train" not in splits:
        raise DataError(
            f"{reference} has no train split; it has: {', '.join(splits) or 'no images'}"
        )
    train = splits["train"]
    held_out = {name: splits[name] for name in ("val", "test") if splits.get(name)}  # not empty
    notes = list(train.notes)
    if settings.objective == "classify":
        if len(train.classes) < 2:
            raise DataError(
                f"{reference} has one class, {train.classes[0]!r}; classification needs two or more"
                if train.classes
                else f"{reference} has no classes; put the images of each class into its own folder"
            )
        in_train, without = classes_present(train), dict[str, list[str]]()
        for name, samples in held_out.items():
            if samples.classes != train.classes:
                raise DataError(
                    f"{reference}: the classes of {name} differ from those of train; "
                    "both need the same class folders"
                )
            in_split = classes_present(samples)
            if unseen := [samples.classes[c] for c in np.flatnonzero(in_split & ~in_train)]:
                raise DataError(
                    f"{reference}: train has no image of {comma_list(unseen, quoted=True)}, "
                    f"which {name} contains; add some, or remove the class"
                )
            if missing := [train.classes[c] for c in np.flatnonzero(in_train & ~in_split)]:
                without.setdefault(comma_list(missing, quoted=True), []).append(name)
        notes += [
            f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no image of {missing}: "
            "results do not cover it; add some, or --dev 0.1 evaluates on a tenth of train"
            for missing, names in without.items()
        ]
    if settings.batch_size is not None and settings.batch_size > len(train):
        raise ConfigError(
            f"batch_size={settings.batch_size} is more than the {len(train):,} training images; "
            f"try {max(1, len(train) // 4)}"
        )
    for name in ("until_accuracy", "patience"):
        if getattr(settings, name) is None:
            continue
        option = f"{name}={getattr(settings, name)}"
        if settings.objective != "classify":
            raise ConfigError(
                f"{option} needs classes, and objective={settings.objective!r} has none; "
                "leave it out"
            )
        if "val" not in held_out:
            test = ", and test must not be used for model selection" if "test" in held_out else ""
            raise ConfigError(
                f"{option} needs a val split, which {reference} does not have{test}; "
                "--dev 0.1 holds out a tenth of train as val"
            )
    if not held_out:
        notes.append("no split to evaluate on; --dev 0.1 holds out a tenth of the images")
    return DataSplits(reference=reference, train=train, held_out=held_out, notes=notes)


def classes_present(samples: ImageDataset) -> np.ndarray:
    """Return for each class whether the samples contain it."""
    labels = samples.labels()
    indices = labels.classes if isinstance(labels, LabelSets) else labels
    return np.bincount(np.asarray(indices, np.int64), minlength=len(samples.classes)) > 0


def hold_out_dev(
    splits: DataSplits, fraction: float | None = None
) -> tuple[ImageDataset, str, ImageDataset]:
    """Return the images to train on during model selection, and the name and images of dev.

    A dataset with both val and test is split already; otherwise a fraction of each class of train
    is held out. For classes of one or two images, that may be none.
    """
    train, held_out = splits.train, splits.held_out
    for name in ("dev", "val"):
        if name in held_out and (name == "dev" or "test" in held_out):
            return train, name, held_out[name]
    limits = DEV_FRACTIONS.items()
    usual = next((share for limit, share in limits if len(train) < limit), DEV_FRACTION_LARGE)
    names = [train.name(index) for index in range(len(train))]
    in_dev = assign_splits(names, train.labels(), Splits(val=fraction or usual, test=0.0)) > 0
    return train.subset(np.flatnonzero(~in_dev)), "dev", train.subset(np.flatnonzero(in_dev))


def subsample(samples: ImageDataset, count: int) -> ImageDataset:
    """Return at most `count` images, stratified by class, deterministically."""
    labels = samples.class_ids()
    count = max(count, len(np.unique(labels)))
    if count >= len(samples):
        return samples
    return samples.subset(stratified_subset(labels, count, np.random.default_rng(0)))


def limit_test_images(splits: DataSplits, count: int) -> DataSplits:
    """Evaluate at most `count` held-out images in total, in addition to dev."""
    _, _, dev = hold_out_dev(splits)
    total = sum(len(samples) for samples in splits.held_out.values() if samples is not dev)
    held_out = {
        name: samples if samples is dev else subsample(samples, count * len(samples) // total)
        for name, samples in splits.held_out.items()
    }
    return replace(splits, held_out=held_out)


class BatchStream:
    """Call it with a step for that step's micro-batches; consecutive steps share one loader."""

    def __init__(
        self,
        dataset: Dataset,
        preprocessing: Preprocessing,
        augmentation: Augmentation,
        channels: int,
        schedule: Schedule,
        *,
        full_size: bool = False,  # at every step, whatever the schedule's image size
        skipped: dict[str, str] | None = None,  # gets the unreadable images, and why
    ) -> None:
        self.dataset, self.preprocessing, self.augmentation = dataset, preprocessing, augmentation
        self.channels, self.schedule, self.full_size = channels, schedule, full_size
        self.probabilities = None
        if balance := schedule.settings.balance:
            labels = dataset.labels()
            if isinstance(labels, LabelSets):
                raise ConfigError(
                    f"balance={balance:g} needs one label per image, and these have several; "
                    "leave it out"
                )
            self.probabilities = balanced_probabilities(labels, balance)
        self.skipped = {} if skipped is None else skipped
        self.running: Iterator[Batch] = iter(())
        self.expected: tuple[int, int] | None = None  # next step of `running`, and its image size

    def __call__(self, step: int) -> Iterator[Batch]:
        size = self.schedule.image_size(step)
        if self.full_size:
            size = self.preprocessing.size[0]
        if self.expected != (step, size):
            self.running = iter(self.loader(step, size))
        self.expected = (step + 1, size)
        return self.running

    def loader(self, step: int, size: int) -> Loader:
        settings, accumulate = self.schedule.settings, self.schedule.accumulate
        assert settings.batch_size is not None
        order = TrainSampler(
            samples=len(self.dataset),
            batch_size=settings.batch_size // accumulate,
            seed=settings.seed,
            start_step=step * accumulate,
            repeats=settings.repeats,
            probabilities=self.probabilities,
            views=self.augmentation.views,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        transform = TrainTransform(
            preprocessing=at_size(self.preprocessing, size),
            augmentation=self.augmentation,
            channels=self.channels,
        )
        return Loader(
            self.dataset,
            transform,
            order,
            seed=settings.seed,
            workers=settings.machine.workers,
            strict=settings.strict,
            skipped=self.skipped,
        )


def at_size(preprocessing: Preprocessing, size: int | None) -> Preprocessing:
    """Return the preprocessing for images of another height, with the same aspect ratio."""
    height, width = preprocessing.size
    if size is None or size == height:
        return preprocessing
    resize_to = preprocessing.resize_to
    if resize_to is not None:
        resize_to = (resize_to[0] * size // height, resize_to[1] * size // height)
    return replace(preprocessing, size=(size, width * size // height), resize_to=resize_to)


def batch_preparation(
    preprocessing: Preprocessing,
    mixing: Mixing,
    num_classes: int,
    device: torch.device,
    *,
    steps_per_epoch: float,
    teacher: TeacherFeatures | None = None,
    image_size: Callable[[int], int] | None = None,  # of a step; with a teacher only
) -> Callable[[Batch, np.random.Generator, int], tuple[Tensor, Tensor]]:
    """Return the function that normalizes and mixes a batch of bytes on the device.

    With feature distillation, targets are [label, teacher features]; the teacher sees full-size
    images, the student those of the step.
    """
    mixing = mixing.resolve()
    if teacher is not None and (mixing.mixup or mixing.cutmix):
        raise ConfigError("loss.teaching='features' excludes mixup and CutMix; set both to 0")
    mixup, cutmix, chance = mixing.mixup or 0.0, mixing.cutmix or 0.0, mixing.chance or 0.0
    first_mixed_step = (mixing.after or 0.0) * steps_per_epoch

    def prepare(batch: Batch, rng: np.random.Generator, step: int) -> tuple[Tensor, Tensor]:
        images = normalize(batch.images.to(device, non_blocking=True), preprocessing)
        labels = batch.labels.to(device, non_blocking=True)
        if teacher is not None:
            targets = torch.cat([labels[:, None], teacher(batch.images, images)], dim=1)
            size = at_size(preprocessing, image_size and image_size(step)).size
            if size != images.shape[-2:]:
                images = F.interpolate(images, size, mode="bilinear", antialias=True)
            return images, targets
        if not (mixup or cutmix) or step < first_mixed_step:
            return images, labels
        if mixing.style == "big_vision":
            if rng.random() >= chance:
                return images, labels
            how = {"classes": num_classes, "alpha": mixup, "rng": rng}
            return augment.mixup(images, labels, **how, style="big_vision")
        how = {"mixup_alpha": mixup, "cutmix_alpha": cutmix, "prob": chance}
        return augment.mixup_or_cutmix(images, labels, classes=num_classes, rng=rng, **how)

    return prepare


# Tasks of a benchmark


class Task(NamedTuple):
    """A dataset of the benchmark, from a TOML file:

    [[task]]
    data = "flowers5_160.tar"   any dataset; a path is relative to the file
    name = "flowers"            if not the name of the data
    group = "natural"           any word; there is a mean for each group
    train = "train"             the split to draw from
    test = "val"                the split to evaluate on; test, or else val, if not given
    vary = true                 whether images may be cropped and flipped when fine-tuning

    In the group "structured" the label may be a position or an orientation, which crops and flips
    would change: its tasks are not augmented by default, as in BiT (arXiv:1912.11370).
    """

    name: str
    keys: dict[str, Any]  # of the file, with defaults
    train: ImageDataset  # the whole split, to draw from
    test: ImageDataset


def read_tasks(path: Path) -> list[Task]:
    """Read the tasks of a TOML file and open all of them; raise for anything else in it."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the tasks in {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    if others := values.keys() - {"task"}:
        raise ConfigError(f"{path}: {unknown('key', min(others), ['task'])}")
    entries = values.get("task", [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{path}: task must be a list; write [[task]] above each one")
    if not entries:
        raise ConfigError(f"{path} has no tasks; each starts with [[task]] and needs data = …")
    tasks: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}, task {number}"
        for key, value in entry.items():
            if key not in TASK_KEYS:
                raise ConfigError(f"{where}: {unknown('key', key, TASK_KEYS)}")
            if type(value) is not TASK_KEYS[key] or value == "":
                kind = "a string" if TASK_KEYS[key] is str else "true or false"
                raise ConfigError(f"{where}: {key}={value!r} must be {kind}")
        if "data" not in entry:
            raise ConfigError(f"{where} has no data; add data = with a folder, file or address")
        data = entry["data"]
        name = entry.get("name", Path(data.rpartition(":")[2]).name.split(".")[0])
        if name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\"):
            raise ConfigError(f"{where}: name={name!r} cannot be used as a folder; choose another")
        if name in tasks:
            raise ConfigError(f"{path}: two tasks are called {name!r}; rename one of them")
        if not data.startswith(ABSOLUTE) and "://" not in data:
            data = str(path.parent / data)
        tasks[name] = {
            **{"name": name, "data": data, "group": "other", "train": "train", "test": None},
            **{"vary": entry.get("group") != "structured"},
            **{key: value for key, value in entry.items() if key not in ("name", "data")},
        }
    return [open_task(keys) for keys in tasks.values()]


def open_task(keys: dict[str, Any]) -> Task:
    """Open the images of a task; raise for what does not fit the protocol."""
    data, train_split = keys["data"], keys["train"]
    try:
        test_split = keys["test"] or datasets.evaluation_split(data)
        if test_split is None:
            splits = ", ".join(datasets.split_counts(data))
            raise DataError(f"{data} has neither test nor val to evaluate on; it has: {splits}")
        same = datasets.canonical_split(train_split) == datasets.canonical_split(test_split)
        if same or datasets.ALL in (train_split, test_split):
            raise DataError(
                f"train={train_split!r} and test={test_split!r} share images; name two splits"
            )
        train, test = (datasets.open_dataset(data, split) for split in (train_split, test_split))
        if train.multi_label or test.multi_label:
            raise DataError(
                f"tasks need single-label data; the images of {data} have several labels"
            )
        if train.classes != test.classes:
            raise DataError(f"the classes of the test split of {data} differ from those of train")
        if len(train.classes) < 2:
            raise DataError(
                f"{data} has {len(train.classes)} classes; classification needs two or more"
            )
        if len(train) < MIN_TASK_IMAGES:
            raise DataError(
                f"{data} has {len(train)} training images; at least {MIN_TASK_IMAGES} needed"
            )
    except VitrailError as error:
        raise DataError(f"task {keys['name']!r}: {error}") from None
    return Task(name=keys["name"], keys=keys, train=train, test=test)


def draw_images(train: ImageDataset, count: int, seed: int) -> tuple[ImageDataset, ...]:
    """Draw `count` images, or all if there are fewer; split them four to one into fit and dev."""
    rng = np.random.default_rng(seed)
    drawn = train.subset(stratified_subset(train.class_ids(), count, rng))
    fit_rows = stratified_subset(drawn.class_ids(), round(FIT_FRACTION * len(drawn)), rng)
    dev_rows = np.setdiff1d(np.arange(len(drawn)), fit_rows)
    return drawn, drawn.subset(fit_rows), drawn.subset(dev_rows)
