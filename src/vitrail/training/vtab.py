"""The VTAB-1k protocol (Zhai et al. 2019, arXiv:1910.04867) on any list of tasks.

1,000 training images are drawn from each task. If there is a setting to choose, each value is tried
on 800 of them and evaluated on the other 200; the best is then trained on all 1,000 and evaluated
once on the test set. The score is the mean over tasks. There are three methods:

    finetune    table 4 of the paper: SGD at 0.01, 2,500 steps; chooses among learning rates
    linear      logistic regression on frozen features; chooses the weight decay
    probe       ridge regression on frozen features; chooses l2
"""

import json
import math
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail import distributed
from vitrail.checkpoints.files import write_json
from vitrail.checkpoints.load import load
from vitrail.checkpoints.save import save
from vitrail.data import datasets
from vitrail.data.datasets import ImageDataset, stratified_subset
from vitrail.data.preprocessing import Augmentation
from vitrail.data.provenance import fingerprint
from vitrail.data.storage import write_atomic
from vitrail.errors import ConfigError, DataError, TrainingError, VitrailError, unknown
from vitrail.evaluation.evaluate import Progress
from vitrail.formatting import percent
from vitrail.probing.features import Features, backbone_digest, features_of
from vitrail.probing.fewshot import accuracy_of
from vitrail.probing.probes import fit_logistic
from vitrail.probing.ridge import L2_GRID, fit
from vitrail.training.adapt import best, joined, reason
from vitrail.training.callbacks import Callback, read_rows, to_line
from vitrail.training.checkpoint import has_state, lock_folder
from vitrail.training.config import MachineSettings, ModelSettings, RunConfig, Settings
from vitrail.training.data_module import DataSplits, classes_present
from vitrail.training.recipes import read_recipe
from vitrail.training.trainer import run

Row = dict[str, Any]

EXAMPLES = 1000  # drawn from each task
FIT_FRACTION = 0.8  # of them, to train on while choosing
MIN_IMAGES = 5
TASK_KEYS = {"data": str, "name": str, "group": str, "train": str, "test": str, "vary": bool}
NO_GROUP = "other"
ABSOLUTE = ("builtin:", "hf:", "~")  # data references that are not relative to the file
PAPER = "paper-finetune-vtab"
PROTOCOL = ("method", "steps", "batch_size", "image_size", "examples")
DECAYS = (1.0, 0.1, 1e-2, 1e-3)  # strongest first, which wins a tie
# The setting that each method chooses, and its grid; learning rates are an option.
METHODS: dict[str, tuple[str, Sequence[float]]] = {
    "finetune": ("rate", ()),
    "linear": ("decay", DECAYS),
    "probe": ("l2", sorted(L2_GRID, reverse=True)),
}
NO_AUGMENTATION = Augmentation(crop="whole", flip=False)


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

    keys: Row  # of the file, with defaults
    train: ImageDataset  # the whole split, to draw from
    test: ImageDataset

    @property
    def name(self) -> str:
        return self.keys["name"]


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
    tasks: dict[str, Row] = {}
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
            **{"name": name, "data": data, "group": NO_GROUP, "train": "train", "test": None},
            **{"vary": entry.get("group") != "structured"},
            **{key: value for key, value in entry.items() if key not in ("name", "data")},
        }
    return [open_task(keys) for keys in tasks.values()]


def open_task(keys: Row) -> Task:
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
            raise DataError(f"the images of {data} have several labels each; one each is needed")
        if train.classes != test.classes:
            raise DataError(f"the classes of the test split of {data} differ from those of train")
        if len(train.classes) < 2:
            raise DataError(
                f"{data} has {len(train.classes)} classes; classification needs two or more"
            )
        if len(train) < MIN_IMAGES:
            raise DataError(
                f"{data} has {len(train)} training images; at least {MIN_IMAGES} needed"
            )
    except VitrailError as error:
        raise DataError(f"task {keys['name']!r}: {error}") from None
    return Task(keys=keys, train=train, test=test)


def draw_images(train: ImageDataset, count: int, seed: int) -> dict[str, ImageDataset]:
    """Draw `count` images, or all if there are fewer: `train`, split four to one into fit, dev."""
    rng = np.random.default_rng(seed)
    drawn = train.subset(stratified_subset(train.class_ids(), count, rng))
    fit_rows = stratified_subset(drawn.class_ids(), round(FIT_FRACTION * len(drawn)), rng)
    dev_rows = np.setdiff1d(np.arange(len(drawn)), fit_rows)
    return {"train": drawn, "fit": drawn.subset(fit_rows), "dev": drawn.subset(dev_rows)}


@dataclass(kw_only=True)
class Benchmark:
    """The VTAB-1k protocol for one model; fine-tuning defaults to the paper's settings.

    Every trial is appended to results.jsonl with all that it depends on and is not repeated: a
    stopped benchmark continues, and a new task costs only itself.
    """

    reference: str  # to the model
    out: Path
    method: Literal["finetune", "linear", "probe"] = "finetune"
    learning_rates: tuple[float, ...] = ()
    steps: int | None = None
    batch_size: int | None = None
    image_size: int | None = None  # for probes: the model's own if not given
    examples: int = EXAMPLES
    machine: MachineSettings = field(default_factory=MachineSettings)
    log: Callable[[str], None] = lambda line: None
    make_callback: Callable[[], Callback] = Callback  # for each run
    progress: Progress | None = None  # of feature extraction

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        for name in ("steps", "batch_size", "image_size", "examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        for rate in self.learning_rates:
            if not 0 < rate < math.inf:
                raise ConfigError(f"learning rate {rate} must be a positive number")
        if self.method == "finetune":
            paper = read_recipe(PAPER)
            assert paper.optim.learning_rate is not None
            self.learning_rates = self.learning_rates or (paper.optim.learning_rate,)
            self.steps = self.steps or paper.steps
            self.batch_size = self.batch_size or paper.batch_size
            self.image_size = self.image_size or paper.model.image_size
        else:
            for name in ("learning_rates", "steps", "batch_size"):
                if getattr(self, name):
                    raise ConfigError(f"{name} is for the method finetune, not for {self.method}")

    def measure(self, tasks: Sequence[Task], seeds: int = 1) -> Row:
        """Evaluate the model on every task, the mean over `seeds` draws; return results.json."""
        if seeds < 1:
            raise ConfigError(f"seeds={seeds} draws no training images; use 1 or more")
        with lock_folder(self.out):
            probing = self.method != "finetune"  # else each run loads the model itself
            self.model = load(
                self.reference,
                image_size=self.image_size if probing else None,
                log=self.log if probing else (lambda line: None),
            )
            if probing:
                self.model = self.model.to(distributed.init(self.machine.device))
            self.weights = backbone_digest(self.model)
            self.rows = read_rows(self.out / "results.jsonl", key="pictures")
            results = []
            try:
                for number, task in enumerate(tasks, 1):
                    self.log(f"{task.name}, task {number} of {len(tasks)}")
                    for note in dict.fromkeys((*task.train.notes, *task.test.notes)):
                        self.log(f"  note: {note}")
                    scores = [self.score(task, seed) for seed in range(seeds)]
                    accuracies = [score["accuracy"] for score in scores]
                    results.append(
                        {
                            **task.keys,
                            "classes": len(task.train.classes),
                            "accuracy": fmean(accuracies),
                            "deviation": stdev(accuracies) if seeds > 1 else None,
                            "scores": scores,
                        }
                    )
            finally:
                shutil.rmtree(self.headless, ignore_errors=True)
            groups: dict[str, list[float]] = {}
            for row in results:
                groups.setdefault(row["group"], []).append(row["accuracy"])
            means = {g: fmean(x) for g, x in groups.items()} if [*groups] != [NO_GROUP] else {}
            report = {
                "model": self.reference,
                **{name: getattr(self, name) for name in PROTOCOL},
                "setting": METHODS[self.method][0],
                "tasks": results,
                "groups": means,
                "mean": fmean(row["accuracy"] for row in results),
                "mean_of_groups": fmean(means.values()) if means else None,
            }
            write_json(self.out / "results.json", report)
        return report

    def score(self, task: Task, seed: int) -> Row:
        """Evaluate a task with one draw: choose the setting if there are several, then test."""
        parts = draw_images(task.train, self.examples, seed) | {"test": task.test}
        train, test = parts["train"], parts["test"]
        if len(train) < self.examples:
            self.log(f"  note: only {len(train):,} training images, of {self.examples:,}")
        missing = classes_present(test) & ~classes_present(train)
        if missing.any():
            self.log(f"  note: {missing.sum():,} classes of test are not in the training images")
        digests = {name: fingerprint(part) for name, part in parts.items()}
        setting, known = METHODS[self.method][0], len(self.rows)
        grid = [*(METHODS[self.method][1] or self.learning_rates)]

        @cache
        def features(part: str) -> Features:
            workers = self.machine.workers
            return features_of(self.model, parts[part], workers=workers, progress=self.progress)

        def trial(value: float, stage: Literal["choice", "test"]) -> Row:
            """Train and evaluate with one value of the setting, or return the row of this trial."""
            fitted, held_out = ("fit", "dev") if stage == "choice" else ("train", "test")
            key = {
                "task": task.name,
                "seed": seed,
                "stage": stage,
                setting: value,
                "learned": digests[fitted],
                "judged": digests[held_out],
                "weights": self.weights,
                "vary": task.keys["vary"],
                **{name: getattr(self, name) for name in PROTOCOL},
            }
            if (row := next((r for r in self.rows if key.items() <= r.items()), None)) is not None:
                return row
            short = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=4).hexdigest()
            folder = self.out / "runs" / task.name / f"{stage}-{value:g}-{short}"
            if self.method == "finetune":
                splits = DataSplits(
                    reference=task.keys["data"],
                    train=parts[fitted],
                    held_out={held_out: parts[held_out]},
                )
                accuracy, images = self.finetune(task, splits, value, seed, folder)
            else:
                names = ("fit", "dev") if stage == "test" else ("fit",)
                values, labels = joined([features(name) for name in names])
                options = (values, labels, len(test.classes))
                linear = self.method == "linear"
                head = fit_logistic(*options, decay=value) if linear else fit(*options, value)
                accuracy, images = accuracy_of(head, features(held_out)), len(features(held_out))
            row = key | {"model": self.reference, "accuracy": accuracy, "pictures": images}
            self.rows.append(row)
            write_atomic(self.out / "results.jsonl", "".join(map(to_line, self.rows)))
            if stage == "choice":
                shutil.rmtree(folder, ignore_errors=True)  # the model is not needed
            return row

        choices = {value: trial(value, "choice")["accuracy"] for value in grid if len(grid) > 1}
        chosen = best(choices) if choices else grid[0]
        final = trial(chosen, "test")
        cached = ", done before" if len(self.rows) == known else ""
        result = f"test accuracy {percent(final['accuracy'])} (n={final['pictures']:,})"
        self.log(f"  {result}, {setting} {chosen:g}, seed {seed}{cached}")
        if final["pictures"] < len(test):
            self.log(f"  note: {len(test) - final['pictures']:,} test images could not be read")
        return {
            "seed": seed,
            "setting": chosen,
            "accuracy": final["accuracy"],
            "learned": len(train),
            "judged": final["pictures"],
            "choices": choices,
        }

    def finetune(
        self, task: Task, splits: DataSplits, rate: float, seed: int, folder: Path
    ) -> tuple[float, int]:
        """Train and return the accuracy and the number of images of the held-out split."""
        [name], images = splits.held_out, len(splits.train)
        what = f"all {images:,} images" if name == "test" else f"{images:,} images to choose"
        self.log(f"  training on {what}, rate {rate:g}, seed {seed}")
        settings = self.finetune_settings(rate, images, augment=task.keys["vary"])
        if settings.batch_size != self.batch_size:
            self.log(f"  note: batch size {settings.batch_size}: there are no more images")
        start = self.reference
        if len(splits.train.classes) == self.model.config.num_classes:
            # The head would be reused because it happens to fit.
            start = str(self.headless)
            save(load(self.reference, num_classes=0, log=lambda line: None), self.headless)
        config = RunConfig(
            data=task.keys["data"],
            out=folder,
            settings=replace(settings, seed=seed, machine=self.machine),
            start=start,
            resume=has_state(folder),
            overwrite=True,
            splits=splits,
        )
        try:
            result = run(config, self.make_callback())
        except TrainingError as error:
            if name == "test":
                raise
            self.log(f"  {reason(error)}: this rate counts as 0 %")
            return 0.0, len(splits.held_out[name])
        if not result.finished:
            self.log("stopped; run the same command to continue")
            raise KeyboardInterrupt
        return result.outcomes[name].accuracy, result.outcomes[name].samples

    def finetune_settings(self, rate: float, images: int, *, augment: bool) -> Settings:
        """Return the paper's settings with the changes of the benchmark."""
        paper, steps = read_recipe(PAPER), self.steps
        assert steps is not None
        assert paper.steps is not None
        assert paper.optim.warmup_steps is not None
        batch = min(self.batch_size or images, images)
        warmup = paper.optim.warmup_steps * steps // paper.steps
        return replace(
            paper,
            steps=steps,
            batch_size=batch,
            evaluate_every=float(steps * batch),  # never during training
            preprocessing=None,  # the model's own
            model=ModelSettings(image_size=self.image_size),
            optim=replace(paper.optim, learning_rate=rate, warmup_steps=warmup),
            augment=paper.augment if augment else NO_AUGMENTATION,
        )

    @property
    def headless(self) -> Path:
        return self.out / "headless"  # while the benchmark runs
