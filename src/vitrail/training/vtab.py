"""The VTAB-1k protocol (Zhai et al. 2019, arXiv:1910.04867) on any set of tasks.

1,000 training images are drawn from each task. If there is a hyperparameter to choose, each
candidate is trained on 800 of them and evaluated on the other 200; the best is then trained on all
1,000 and evaluated once on the test set. The score is the mean over tasks. There are three methods:

    finetune    table 4 of the paper: SGD at 0.01, 2,500 steps; chooses among learning rates
    linear      logistic regression on frozen features; chooses the weight decay
    probe       ridge regression on frozen features; chooses l2

Every trial is appended to results.jsonl with all that it depends on and is not repeated: a stopped
benchmark continues, and a new task costs only itself. Tasks are listed in a TOML file:

    [[task]]
    data = "flowers5_160.tar"   any dataset; a path is relative to the file
    name = "flowers"            if not the name of the data
    group = "natural"           any word; there is a mean for each group
    train = "train"             the split to draw from
    test = "val"                the split to evaluate on; test, or else val, if not given
    vary = true                 whether images may be cropped and flipped when fine-tuning

In the group "structured" the label may be a position or an orientation, which crops and flips would
change: its tasks are not augmented by default, as in BiT (arXiv:1912.11370).
"""

import json
import os
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, get_args

import numpy as np

from vitrail import distributed
from vitrail.checkpoints.files import write_json
from vitrail.checkpoints.load import load
from vitrail.checkpoints.save import save
from vitrail.data.datasets import (
    ALL,
    ImageDataset,
    canonical_split,
    evaluation_split,
    open_dataset,
    split_counts,
    stratified_subset,
)
from vitrail.data.provenance import fingerprint
from vitrail.errors import ConfigError, DataError, TrainingError, VitrailError, unknown
from vitrail.evaluation.evaluate import Progress
from vitrail.formatting import percent
from vitrail.models.vit import Model
from vitrail.probing.features import Features, backbone, features_of
from vitrail.probing.others import fit_logistic
from vitrail.probing.ridge import PATH, fit
from vitrail.probing.shots import right
from vitrail.training.callbacks import Callback, read_rows
from vitrail.training.checkpoint import has_state, lock_folder
from vitrail.training.config import (
    AugmentSettings,
    MachineSettings,
    ModelSettings,
    RunConfig,
    Settings,
)
from vitrail.training.data_module import DataSplits, classes_present
from vitrail.training.recipes import read_recipe
from vitrail.training.trainer import run

MethodName = Literal["finetune", "linear", "probe"]
Stage = Literal["choice", "test"]
Trial = Callable[[float, Stage, Path], tuple[float, int]]  # → accuracy, number of images
Row = dict[str, Any]

KEYS = {"data": str, "name": str, "group": str, "train": str, "test": str, "vary": bool}
NO_GROUP, STRUCTURED = "other", "structured"
ABSOLUTE = ("builtin:", "hf:", "~")  # data references that are not relative to the file
EXAMPLES = 1000
FIT_FRACTION = 0.8  # of the drawn images, to train on while choosing
MIN_IMAGES = 5
HEADLESS = "headless"  # in the benchmark's folder, while it runs
PAPER = "paper-finetune-vtab"
DECAYS = (1.0, 0.1, 1e-2, 1e-3)  # strongest first, which wins a tie
ONLY_FINETUNE = ("learning_rates", "steps", "batch_size")
NO_AUGMENTATION = AugmentSettings(
    crop="whole", flip=False, policy="none", color_jitter=0, erasing=0
)


# Tasks


@dataclass(frozen=True, kw_only=True)
class Task:
    """One entry of the file."""

    name: str
    data: str
    group: str = NO_GROUP
    train: str = "train"
    test: str | None = None
    vary: bool = True


@dataclass(frozen=True, kw_only=True)
class OpenTask:
    """A task with its images."""

    task: Task
    train: ImageDataset  # the whole split, to draw from
    test: ImageDataset


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The training images that were drawn, and their split for the choice."""

    train: ImageDataset
    fit: ImageDataset  # four fifths, to train on
    dev: ImageDataset  # the others, to choose on


def read_tasks(path: Path) -> list[Task]:
    """Read the tasks of a TOML file; raise for anything else in it."""
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
    tasks = [read_entry(entry, path, number) for number, entry in enumerate(entries, 1)]
    names = [task.name for task in tasks]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: two tasks are called {duplicates[0]!r}; rename one of them")
    return tasks


def read_entry(entry: Mapping[str, Any], path: Path, number: int) -> Task:
    where = f"{path}, task {number}"
    for key, value in entry.items():
        if key not in KEYS:
            raise ConfigError(f"{where}: {unknown('key', key, KEYS)}")
        if type(value) is not KEYS[key] or value == "":
            kind = "a string" if KEYS[key] is str else "true or false"
            raise ConfigError(f"{where}: {key}={value!r} must be {kind}")
    if "data" not in entry:
        raise ConfigError(f"{where} has no data; add data = with a folder, file or address")
    data = entry["data"]
    name = entry.get("name", Path(data.rpartition(":")[2]).name.split(".")[0])
    if name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\"):
        raise ConfigError(f"{where}: name={name!r} cannot be used as a folder; choose another")
    if not data.startswith(ABSOLUTE) and "://" not in data:
        data = str(path.parent / data)
    values: dict[str, Any] = {"vary": entry.get("group") != STRUCTURED, **entry}
    return Task(**values | {"name": name, "data": data})


def open_task(task: Task) -> OpenTask:
    """Open the images of a task; raise for what does not fit the protocol."""
    data = task.data
    try:
        test_split = task.test or evaluation_split(data)
        if test_split is None:
            splits = ", ".join(split_counts(data))
            raise DataError(f"{data} has neither test nor val to evaluate on; it has: {splits}")
        if canonical_split(task.train) == canonical_split(test_split) or ALL in (
            task.train,
            test_split,
        ):
            raise DataError(
                f"train={task.train!r} and test={test_split!r} share images; name two splits"
            )
        train, test = open_dataset(data, task.train), open_dataset(data, test_split)
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
        raise DataError(f"task {task.name!r}: {error}") from None
    return OpenTask(task=task, train=train, test=test)


def draw_images(train: ImageDataset, count: int, seed: int) -> Draw:
    """Draw `count` images, or all if there are fewer, and split them four to one."""
    rng = np.random.default_rng(seed)
    drawn = train.subset(stratified_subset(train.class_ids(), count, rng))
    fit = stratified_subset(drawn.class_ids(), round(FIT_FRACTION * len(drawn)), rng)
    return Draw(
        train=drawn,
        fit=drawn.subset(fit),
        dev=drawn.subset(np.setdiff1d(np.arange(len(drawn)), fit)),
    )


# Methods


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How every task is evaluated; fine-tuning defaults to the paper's settings."""

    method: MethodName = "finetune"
    learning_rates: tuple[float, ...] = ()
    steps: int | None = None
    batch_size: int | None = None
    image_size: int | None = None  # for probes: the model's own if not given
    examples: int = EXAMPLES

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, get_args(MethodName))
        for name in ("steps", "batch_size", "image_size", "examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        for rate in self.learning_rates:
            if not 0 < rate < float("inf"):
                raise ConfigError(f"learning rate {rate} must be a positive number")
        if self.method == "finetune":
            paper = read_recipe(PAPER)
            defaults: dict[str, Any] = {
                "learning_rates": (paper.optim.learning_rate,),
                "steps": paper.steps,
                "batch_size": paper.batch_size,
                "image_size": paper.model.image_size,
            }
            for name, value in defaults.items():
                object.__setattr__(self, name, getattr(self, name) or value)
        elif options := [name for name in ONLY_FINETUNE if getattr(self, name)]:
            raise ConfigError(f"{options[0]} is for the method finetune, not for {self.method}")

    def to_dict(self) -> Row:
        """Return what a trial depends on; other candidates are not part of it."""
        return {name: value for name, value in asdict(self).items() if name != "learning_rates"}


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What all trials share."""

    reference: str  # to the model
    protocol: Protocol
    out: Path
    machine: MachineSettings = field(default_factory=MachineSettings)
    log: Callable[[str], None] = lambda line: None
    make_callback: Callable[[], Callback] = Callback  # for each run
    progress: Progress | None = None  # of feature extraction


class Finetuning:
    """Fine-tuning of all weights with the paper's settings."""

    setting = "rate"

    def __init__(self, benchmark: Benchmark, model: Model) -> None:
        self.benchmark = benchmark
        self.num_classes = model.config.num_classes
        self.candidates: Sequence[float] = benchmark.protocol.learning_rates

    def prepare(self, task: OpenTask, draw: Draw, seed: int) -> Trial:
        benchmark, protocol = self.benchmark, self.benchmark.protocol

        def trial(rate: float, stage: Stage, folder: Path) -> tuple[float, int]:
            final = stage == "test"
            train, held_out = (draw.train, task.test) if final else (draw.fit, draw.dev)
            name = "test" if final else "dev"
            images = f"all {len(train):,} images" if final else f"{len(train):,} images to choose"
            benchmark.log(f"  training on {images}, rate {rate:g}, seed {seed}")
            settings = finetune_settings(protocol, rate, len(train), augment=task.task.vary)
            if settings.batch_size != protocol.batch_size:
                benchmark.log(f"  note: batch size {settings.batch_size}: there are no more images")
            config = RunConfig(
                data=task.task.data,
                out=folder,
                settings=replace(settings, seed=seed, machine=benchmark.machine),
                start=self.start(len(train.classes)),
                resume=has_state(folder),
                overwrite=True,
                splits=DataSplits(reference=task.task.data, train=train, held_out={name: held_out}),
            )
            try:
                result = run(config, benchmark.make_callback())
            except TrainingError as error:
                if final:
                    raise
                benchmark.log(f"  {str(error).partition(';')[0]}: this rate counts as 0 %")
                return 0.0, len(held_out)
            if not result.finished:
                benchmark.log("stopped; run the same command to continue")
                raise KeyboardInterrupt
            outcome = result.outcomes[name]
            return outcome.accuracy, outcome.samples

        return trial

    def start(self, classes: int) -> str:
        """Return the model; without its head if that would be reused because it happens to fit."""
        if classes != self.num_classes:
            return self.benchmark.reference
        folder = self.benchmark.out / HEADLESS
        save(load(self.benchmark.reference, num_classes=0, log=lambda line: None), folder)
        return str(folder)


def finetune_settings(protocol: Protocol, rate: float, images: int, *, augment: bool) -> Settings:
    """Return the paper's settings with the changes of the protocol."""
    paper = read_recipe(PAPER)
    steps, batch = protocol.steps, min(protocol.batch_size or images, images)
    assert steps is not None
    assert paper.steps is not None
    assert paper.optim.warmup_steps is not None
    warmup = paper.optim.warmup_steps * steps // paper.steps
    return replace(
        paper,
        steps=steps,
        batch_size=batch,
        evaluate_every=float(steps * batch),  # never during training
        preprocessing=None,  # the model's own
        model=ModelSettings(image_size=protocol.image_size),
        optim=replace(paper.optim, learning_rate=rate, warmup_steps=warmup),
        augment=paper.augment if augment else NO_AUGMENTATION,
    )


class Probing:
    """A linear classifier on frozen features."""

    def __init__(
        self,
        benchmark: Benchmark,
        model: Model,
        setting: str,
        candidates: Sequence[float],
        fit: Callable[[np.ndarray, np.ndarray, int, float], Any],
    ) -> None:
        self.benchmark, self.model = benchmark, model
        self.setting, self.candidates, self.fit = setting, candidates, fit

    def prepare(self, task: OpenTask, draw: Draw, seed: int) -> Trial:
        samples = {"fit": draw.fit, "dev": draw.dev, "test": task.test}

        @cache
        def features(part: str) -> Features:
            workers, progress = self.benchmark.machine.workers, self.benchmark.progress
            return features_of(self.model, samples[part], workers=workers, progress=progress)

        def trial(setting: float, stage: Stage, folder: Path) -> tuple[float, int]:
            train = [features("fit"), features("dev")] if stage == "test" else [features("fit")]
            held_out = features("test" if stage == "test" else "dev")
            classifier = self.fit(
                np.concatenate([part.values for part in train]),
                np.concatenate([part.labels for part in train]),
                len(held_out.classes),
                setting,
            )
            return right(classifier, held_out), len(held_out)

        return trial


Method = Finetuning | Probing


METHODS: dict[str, Callable[[Benchmark, Model], Method]] = {
    "finetune": Finetuning,
    "linear": lambda benchmark, model: Probing(
        benchmark, model, "decay", DECAYS, lambda x, y, k, d: fit_logistic(x, y, k, decay=d)
    ),
    "probe": lambda benchmark, model: Probing(
        benchmark, model, "l2", sorted(PATH, reverse=True), fit
    ),
}


# Results


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of a task with one draw of its training images."""

    seed: int
    setting: float  # the rate, decay or l2 that was chosen
    accuracy: float  # on the test set
    train_images: int
    test_images: int
    choices: dict[float, float]  # setting → accuracy on dev


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """One task, over all seeds."""

    task: Task
    classes: int
    scores: list[Score]

    @property
    def accuracy(self) -> float:
        return fmean(score.accuracy for score in self.scores)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds; None with one."""
        values = [score.accuracy for score in self.scores]
        return stdev(values) if len(values) > 1 else None

    def to_dict(self) -> Row:
        return {
            **asdict(self.task),
            "classes": self.classes,
            "accuracy": self.accuracy,
            "deviation": self.deviation,
            "scores": [
                {
                    "seed": score.seed,
                    "setting": score.setting,
                    "accuracy": score.accuracy,
                    "learned": score.train_images,
                    "judged": score.test_images,
                    "choices": score.choices,
                }
                for score in self.scores
            ],
        }


@dataclass(frozen=True, kw_only=True)
class BenchmarkReport:
    """All tasks, and their means."""

    model: str
    protocol: Row
    setting: str  # what can be chosen: rate, decay or l2
    tasks: list[TaskScores]

    @property
    def groups(self) -> dict[str, float]:
        """The mean of each group; empty if no task has one."""
        names = list(dict.fromkeys(task.task.group for task in self.tasks))
        if names == [NO_GROUP]:
            return {}
        return {
            name: fmean(t.accuracy for t in self.tasks if t.task.group == name) for name in names
        }

    @property
    def mean(self) -> float:
        return fmean(task.accuracy for task in self.tasks)

    @property
    def mean_of_groups(self) -> float | None:
        return fmean(self.groups.values()) if self.groups else None

    def to_dict(self) -> Row:
        return {
            "model": self.model,
            **self.protocol,
            "setting": self.setting,
            "tasks": [task.to_dict() for task in self.tasks],
            "groups": self.groups,
            "mean": self.mean,
            "mean_of_groups": self.mean_of_groups,
        }


class TrialLog:
    """A line of JSON for each trial, so that none is repeated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path, key="pictures")
        self.new: list[Row] = []  # of this process

    def find(self, key: Row) -> Row | None:
        """Return the trial that has all these values."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def add(self, key: Row, result: Row) -> Row:
        row = key | result
        text = json.dumps(row) + "\n"
        try:
            with self.path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    text = text if file.read() == b"\n" else f"\n{text}"  # after a cut-off line
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from None
        self.rows.append(row)
        self.new.append(row)
        return row


# The benchmark


def measure(benchmark: Benchmark, tasks: Sequence[OpenTask], seeds: int = 1) -> BenchmarkReport:
    """Evaluate a model on every task; each is the mean over `seeds` draws."""
    if seeds < 1:
        raise ConfigError(f"seeds={seeds} draws no training images; use 1 or more")
    protocol = benchmark.protocol
    with lock_folder(benchmark.out):
        probing = protocol.method != "finetune"  # else each run loads the model itself
        model = load(
            benchmark.reference,
            image_size=protocol.image_size if probing else None,
            log=benchmark.log if probing else (lambda line: None),
        )
        if probing:
            model = model.to(distributed.init(benchmark.machine.device))
        method, digest = METHODS[protocol.method](benchmark, model), backbone(model)
        trials = TrialLog(benchmark.out / "results.jsonl")
        results = []
        try:
            for number, task in enumerate(tasks, 1):
                benchmark.log(f"{task.task.name}, task {number} of {len(tasks)}")
                for note in dict.fromkeys((*task.train.notes, *task.test.notes)):
                    benchmark.log(f"  note: {note}")
                scores = [
                    score(benchmark, method, digest, trials, task, seed) for seed in range(seeds)
                ]
                classes = len(task.train.classes)
                results.append(TaskScores(task=task.task, classes=classes, scores=scores))
        finally:
            shutil.rmtree(benchmark.out / HEADLESS, ignore_errors=True)
        report = BenchmarkReport(
            model=benchmark.reference,
            protocol=protocol.to_dict(),
            setting=method.setting,
            tasks=results,
        )
        write_json(benchmark.out / "results.json", report.to_dict())
    return report


def score(
    benchmark: Benchmark, method: Method, digest: str, trials: TrialLog, task: OpenTask, seed: int
) -> Score:
    """Evaluate one task with one draw: choose the setting if there are several, then test."""
    examples, log = benchmark.protocol.examples, benchmark.log
    draw = draw_images(task.train, examples, seed)
    if len(draw.train) < examples:
        log(f"  note: only {len(draw.train):,} training images, of {examples:,}")
    missing = classes_present(task.test) & ~classes_present(draw.train)
    if missing.any():
        log(f"  note: {missing.sum():,} classes of the test set are not in the training images")
    trial = method.prepare(task, draw, seed)
    samples = {"train": draw.train, "fit": draw.fit, "dev": draw.dev, "test": task.test}
    fingerprints = {name: fingerprint(part) for name, part in samples.items()}
    known = len(trials.new)

    def evaluate(setting: float, stage: Stage) -> tuple[float, int]:
        train, held_out = ("fit", "dev") if stage == "choice" else ("train", "test")
        key = {
            "task": task.task.name,
            "seed": seed,
            "stage": stage,
            method.setting: setting,
            "learned": fingerprints[train],
            "judged": fingerprints[held_out],
            "weights": digest,
            "vary": task.task.vary,
            **benchmark.protocol.to_dict(),
        }
        if (row := trials.find(key)) is None:
            short = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=4).hexdigest()
            folder = benchmark.out / "runs" / task.task.name / f"{stage}-{setting:g}-{short}"
            accuracy, images = trial(setting, stage, folder)
            result = {"model": benchmark.reference, "accuracy": accuracy, "pictures": images}
            row = trials.add(key, result)
            if stage == "choice":
                shutil.rmtree(folder, ignore_errors=True)  # the model is not needed
        return row["accuracy"], row["pictures"]

    candidates = method.candidates
    choices = {value: evaluate(value, "choice")[0] for value in candidates if len(candidates) > 1}
    chosen = max(choices, key=lambda value: choices[value]) if choices else candidates[0]
    accuracy, images = evaluate(chosen, "test")
    cached = ", done before" if len(trials.new) == known else ""
    result = f"test accuracy {percent(accuracy)} (n={images:,})"
    log(f"  {result}, {method.setting} {chosen:g}, seed {seed}{cached}")
    if images < len(task.test):
        log(f"  note: {len(task.test) - images:,} test images could not be read")
    return Score(
        seed=seed,
        setting=chosen,
        accuracy=accuracy,
        train_images=len(draw.train),
        test_images=images,
        choices=choices,
    )
