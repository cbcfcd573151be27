"""Search: how much of a pre-trained model to train, or how to train one from scratch.

    few-shot probe     ridge regression on frozen features, with an l2
    linear head        logistic regression on the same features, with a weight decay
    attention-only     fine-tuning of attention and head (Touvron et al. 2022), with a learning rate
    full fine-tuning   the same, of all weights
    ... augmentation   from scratch: default, light or strong, with a learning rate

A candidate is one of these methods with a grid for its setting. `Search` fits each value to part of
the training images, compares them on the rest (dev), and fits the best, the first in a tie, to all.
No other split is used for the choice. `search` compares all methods within a time budget and writes
a bundle; `Benchmark`, the VTAB-1k protocol, applies one method to many tasks and writes a table.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np

from vitrail import distributed
from vitrail.checkpoints.files import write_json
from vitrail.checkpoints.load import backbone_digest, check_reference, load, with_head
from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.save import save
from vitrail.data.datasets import ImageDataset
from vitrail.data.preprocessing import Augmentation, Mixing
from vitrail.data.provenance import DataProvenance, fingerprint
from vitrail.data.storage import write_atomic
from vitrail.errors import ConfigError, DataError, TrainingError, VitrailError, unknown
from vitrail.evaluation.results import EvaluationResult
from vitrail.formatting import duration, percent
from vitrail.models.registry import name_of
from vitrail.models.vit import Model
from vitrail.probing.features import Features, features_of
from vitrail.probing.fewshot import accuracy_of
from vitrail.probing.probes import DECAY, fit_logistic
from vitrail.probing.ridge import L2_GRID, fit, fit_path
from vitrail.probing.teach import ProbeMemory, fit_head, saving_memory
from vitrail.training.auto_config import STRENGTHS, muon_rate
from vitrail.training.budget import END_SECONDS, feature_seconds
from vitrail.training.callbacks import Callback, TrialCallback, read_rows, to_line
from vitrail.training.checkpoint import check_folder, has_state, lock_folder
from vitrail.training.config import MachineSettings, ModelSettings, RunConfig, Settings
from vitrail.training.data_module import (
    DataSplits,
    Task,
    classes_present,
    draw_images,
    hold_out_dev,
    open_splits,
    subsample,
)
from vitrail.training.loop import Evaluator
from vitrail.training.model_init import build_model
from vitrail.training.objectives import Classification
from vitrail.training.optim import all_but_attention_patterns
from vitrail.training.recipes import BUNDLE, clear_run, read_recipe, write_run
from vitrail.training.trainer import run

Row = dict[str, Any]

PROBES = PROBE, LINEAR = "few-shot probe", "linear head"
ATTENTION, FULL = "attention-only", "full fine-tuning"
TRIALS = ".trials"  # folder of the trial runs, until the search is finished
SGD_RATES = (0.01, 0.003, 0.03, 0.001)  # table 4 of the paper; the first, the default, wins a tie
RATE_FACTORS = (1.0, 0.3, 3.0)  # times the usual rate, for other optimizers
MIN_TRIAL = 2.0  # times the shortest run: fewer learning rates rather than shorter trials
FINAL_FRACTION = 1 / 3  # of the time after the probes, for the final run on all images
PROBE_FRACTION = 1 / 4  # of the time, for computing features
EVALUATION_FRACTION = 1 / 2  # of the time; a longer final evaluation extends the budget
NO_TIME, TOO_SHORT = "no time left", "only one step fit into the time budget"
PAPER = "paper-finetune-vtab"
PROTOCOL = ("method", "steps", "batch_size", "image_size", "examples")
# Methods of VTAB-1k: candidate, setting and grid. The grid of learning rates is an option.
METHODS: dict[str, tuple[str, str, Sequence[float]]] = {
    "finetune": (FULL, "rate", ()),
    "linear": (LINEAR, "decay", (1.0, 0.1, 1e-2, 1e-3)),  # the strongest first: it wins a tie
    "probe": (PROBE, "l2", sorted(L2_GRID, reverse=True)),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A method with one value of its setting: l2, weight decay or learning rate."""

    value: float | None  # None: the default
    accuracy: float | None = None  # on dev
    images: int = 0  # evaluated
    steps: int = 0
    seconds: float = 0.0
    problem: str = ""  # why there is no accuracy


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An adaptation method, and its accuracy on dev."""

    name: str
    accuracy: float | None
    seconds: float
    trials: tuple[Trial, ...] = ()  # empty if it has no grid
    problem: str = ""  # why there is no accuracy

    @property
    def value(self) -> float | None:
        """The best value of its setting; the first in a tie."""
        done = [trial for trial in self.trials if trial.accuracy is not None]
        return max(done, key=lambda t: t.accuracy or 0.0).value if done else None


class Search:
    """The candidates of one task; `settings` are those of `config`, completed."""

    failures: tuple[type[VitrailError], ...] = (ConfigError, TrainingError)  # end one trial only

    def __init__(
        self,
        config: RunConfig,
        settings: Settings,
        model: Model,
        splits: DataSplits,
        fit: ImageDataset,
        dev: ImageDataset,
        callback: Callback,
    ) -> None:
        self.config, self.settings, self.model, self.splits = config, settings, model, splits
        self.callback, self.log = callback, callback.log
        self.device = distributed.init(settings.machine.device)
        self.fit, self.parts = fit, {"fit": fit, "dev": dev, **splits.held_out}
        self.computed: dict[str, Features] = {}
        self.deadline, self.final_evaluation = math.inf, 0.0  # seconds, with a time budget
        self.shortest = END_SECONDS  # seconds of a run of one step

    def free(self) -> float:
        """Return the seconds until the final evaluation has to start."""
        return self.deadline - time.monotonic() - self.final_evaluation

    def features(self, *parts: str) -> Features:
        """Return the features of a part, or of several together."""
        settings, progress = self.settings, self.callback.on_progress
        options = {"workers": settings.machine.workers, "strict": settings.strict}
        for part in parts:
            if part not in self.computed:
                model, samples = self.model.to(self.device), self.parts[part]
                self.computed[part] = features_of(model, samples, progress=progress, **options)
                self.splits.skipped.update(self.computed[part].skipped)
        together = [self.computed[part] for part in parts]
        values = np.concatenate([features.values for features in together])
        labels = np.concatenate([features.labels for features in together])
        return replace(together[0], values=values, labels=labels)

    def compare(
        self, grids: Mapping[str, Sequence[float] | None], trial: Callable[..., Trial] | None = None
    ) -> tuple[Candidate, ...]:
        """Evaluate each method on dev with every value of its grid.

        An empty grid is the default, None the best value of the first. `trial` replaces the method.
        """
        trial, counts = trial or self.trial, [1 if g is None else len(g) for g in grids.values()]
        candidates, reserve = [], None
        for index, (name, grid) in enumerate(grids.items()):
            started, trials, problem = time.monotonic(), [], ""
            if grid is None:
                grid = () if candidates[0].value is None else (candidates[0].value,)
            if name in PROBES:
                trials = [trial(name, value) for value in grid or (None,)]
                self.log(
                    f"  {name}: dev accuracy {percent(max(t.accuracy or 0.0 for t in trials))}"
                )
            elif name == ATTENTION and not all_but_attention_patterns(self.model):
                problem = f"{name_of(self.model.config)} has no attention"
            else:
                self.model.to("cpu")  # the device is for the runs now
                free = self.free()
                reserve = FINAL_FRACTION * max(0.0, free) if reserve is None else reserve
                share = counts[index] / sum(counts[index:])
                seconds = share * (free - reserve) if free < math.inf else free
                affordable = min(len(grid), seconds / (MIN_TRIAL * self.shortest))
                count = max(int(seconds >= self.shortest), int(affordable))
                for number, rate in enumerate(grid):
                    left = started + seconds - time.monotonic()
                    available = left / max(1, count - number)
                    if number < count and available >= self.shortest:
                        trials.append(trial(name, rate, available))
                    else:
                        trials.append(Trial(value=rate, problem=NO_TIME))
                    outcome = trials[-1].problem or f"dev accuracy {percent(trials[-1].accuracy)}"
                    self.log(f"  {name}, learning rate {rate:g}: {outcome}")
            accuracies = [t.accuracy for t in trials if t.accuracy is not None]
            problem = problem or "; ".join(dict.fromkeys(t.problem for t in trials))
            candidates.append(
                Candidate(
                    name=name,
                    accuracy=max(accuracies, default=None),
                    seconds=time.monotonic() - started,
                    trials=tuple(trials) if grid else (),
                    problem="" if accuracies else problem,
                )
            )
        return tuple(candidates)

    def trial(
        self,
        name: str,
        value: float | None,
        seconds: float = math.inf,
        *,
        test: bool = False,
        folder: Path | None = None,
    ) -> Trial:
        """Fit a method to `fit` and evaluate on dev; with `test`, fit to all, evaluate on test."""
        if name in PROBES:
            features = self.features("fit", "dev") if test else self.features("fit")
            data = (features.values, features.labels, len(features.classes))
            if name == LINEAR:
                probe = fit_logistic(*data, decay=DECAY if value is None else value)
            elif value is None:
                path = fit_path(*data)  # l2 by leave-one-out
                probe = path.probes[path.best]
            else:
                probe = fit(*data, value)
            features = self.features("test" if test else "dev")
            return Trial(value=value, accuracy=accuracy_of(probe, features), images=len(features))
        assert value is not None, "fine-tuning needs a learning rate"
        split, train = ("test", self.splits.train) if test else ("dev", self.fit)
        settings = self.with_rate(self.settings, name, value, seconds)
        if settings.batch_size is not None and settings.batch_size > len(train):
            self.log(f"  note: batch size {len(train)}, the number of training images")
            settings = replace(settings, batch_size=len(train))
        config = replace(
            self.config,
            out=folder or self.trial_folder(name, value),
            settings=settings,
            splits=replace(self.splits, train=train, held_out={split: self.parts[split]}),
            resume=folder is not None and has_state(folder),  # it was stopped
            overwrite=True,
        )
        started, timer = time.monotonic(), TrialCallback(self.callback)
        try:
            result = run(config, self.callback if test else timer)
        except self.failures as error:  # diverged, or out of memory
            if test:
                raise
            seconds, problem = time.monotonic() - started, str(error).partition(";")[0]
            return Trial(value=value, seconds=round(seconds, 1), problem=problem)
        if not result.finished:
            raise KeyboardInterrupt
        self.shortest = timer.first + result.seconds - timer.last
        too_short = result.step == 1 and not math.isinf(seconds)
        return Trial(
            value=value,
            accuracy=None if too_short else result.outcomes[split].accuracy,
            images=result.outcomes[split].samples,
            steps=result.step,
            seconds=round(time.monotonic() - started, 1),
            problem=TOO_SHORT if too_short else "",
        )

    def trial_folder(self, name: str, rate: float) -> Path:
        return self.config.out / TRIALS / f"{name.replace(' ', '-')}-{rate:g}"

    def with_rate(self, settings: Settings, name: str, rate: float, seconds: float) -> Settings:
        """Return settings with a candidate's learning rate, frozen weights and time budget."""
        optim = settings.optim
        frozen = all_but_attention_patterns(self.model) if name == ATTENTION else ()
        if optim.kind == "muon" and optim.learning_rate:
            start = self.model.config if self.config.start else None
            usual = optim.muon_learning_rate or muon_rate(start)
            optim = replace(optim, muon_learning_rate=usual * rate / optim.learning_rate)
        optim = replace(optim, learning_rate=rate, freeze=(*optim.freeze, *frozen))
        augment, mix = STRENGTHS.get(name, ({}, {}))
        augment, mix = replace(settings.augment, **augment), replace(settings.mix, **mix)
        settings = replace(settings, optim=optim, augment=augment, mix=mix)
        if math.isinf(seconds):
            return settings
        return replace(settings, minutes=seconds / 60, epochs=None, steps=None)

    def refit_probe(self, name: str) -> dict[str, EvaluationResult]:
        """Fit the probe to all features of the training set, and make it the model's head."""
        classes = self.splits.train.classes
        features = self.features("fit", *(() if self.fit is self.splits.train else ("dev",)))
        provenance = {"head": f"{name} on {len(features):,} images"}
        if name == PROBE:
            memory = ProbeMemory.of(self.model, features.values, features.labels, classes)
            model, memory, _ = fit_head(self.model, memory, adjust=False)  # as evaluated
            return self.write_result(model, provenance, memory)
        probe = fit_logistic(features.values, features.labels, len(classes))
        model = with_head(self.model, probe.weight, probe.bias, classes)
        return self.write_result(model, provenance)

    def final_run(self, chosen: Candidate) -> tuple[bool, dict[str, EvaluationResult]]:
        """Train on all images; return whether the run, which can be resumed, is complete.

        If there is no time for it, or it fails, the best trial is the result.
        """
        config, remaining, rate = self.config, self.deadline - time.monotonic(), chosen.value
        assert rate is not None, "a chosen candidate has a trial"
        problem = "no time left to train on all images"
        if self.free() >= self.shortest:
            auto = self.settings
            settings = replace(config.settings, optim=auto.optim, head_init=auto.head_init)
            settings = self.with_rate(settings, chosen.name, rate, remaining)
            try:
                result = run(replace(config, settings=settings), self.callback)
                return result.finished, result.outcomes
            except self.failures as error:
                problem = str(error).partition(";")[0]  # without the advice
                clear_run(config.out)
            finally:
                if has_state(config.out):  # stopped: a half-trained model is not a result
                    for name in BUNDLE:
                        (config.out / name).unlink(missing_ok=True)
        self.log(f"note: {problem}; the result is the model of the trial")
        return True, self.write_result(load(self.trial_folder(chosen.name, rate)), {})

    def write_result(
        self, model: Model, provenance: Mapping[str, object], memory: ProbeMemory | None = None
    ) -> dict[str, EvaluationResult]:
        """Write a finished model as the bundle, then evaluate it on all held-out splits."""
        config, settings = self.config, self.settings
        if config.overwrite:
            clear_run(config.out)
        write_run(config.out, settings, data=config.data, start=config.start)
        origin = DataProvenance.of(config.data, self.splits.train)
        provenance = {**origin.to_dict(), "from": config.start, **provenance}
        with saving_memory(memory, config.out):
            save(model.to("cpu"), config.out, provenance=provenance)
        objective = Classification(model.to(self.device), settings.loss)
        preprocessing = get_metadata(self.model).preprocessing
        evaluator = Evaluator(objective, None, self.splits, preprocessing, settings, self.device)
        outcomes, _ = evaluator.final()
        self.splits.log_skipped(self.log)
        accuracies = {f"{name} accuracy": round(o.accuracy, 6) for name, o in outcomes.items()}
        save(model.to("cpu"), config.out, provenance=provenance | accuracies)
        return outcomes


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The candidates that were compared; `folder` is the bundle of the chosen one."""

    folder: Path
    data: str
    start: str
    dev: str  # the split that dev is, or was held out of
    images: int  # in dev
    candidates: tuple[Candidate, ...]
    seconds: float = 0.0
    finished: bool = False  # False: the final run was stopped, and can be resumed
    outcomes: dict[str, EvaluationResult] = field(default_factory=dict)  # of the result, by split

    @property
    def chosen(self) -> Candidate:
        """The best on dev; the cheaper in a tie."""
        return max(self.candidates, key=lambda c: -1.0 if c.accuracy is None else c.accuracy)

    def gain(self, candidate: Candidate) -> float | None:
        """Return the improvement over the best cheaper candidate."""
        cheaper = self.candidates[: self.candidates.index(candidate)]
        before = [c.accuracy for c in cheaper if c.accuracy is not None]
        accuracy = candidate.accuracy
        return accuracy - max(before) if before and accuracy is not None else None

    def to_dict(self) -> dict[str, Any]:
        candidates = []
        for candidate in self.candidates:
            row: Row = asdict(candidate) | {"seconds": round(candidate.seconds, 1)}
            for trial in row["trials"]:
                trial["learning_rate"] = trial.pop("value")
                del trial["images"]
            row |= {"gain": self.gain(candidate), "chosen": candidate is self.chosen}
            candidates.append(row | {"learning_rate": candidate.value})
        return {
            "folder": str(self.folder),
            "data": self.data,
            "from": self.start,
            "dev": {"split": self.dev, "pictures": self.images},
            "candidates": candidates,
            "rungs": candidates,  # the key of 0.1
            "finished": self.finished,
            "seconds": round(self.seconds, 1),
            "results": {split: outcome.to_dict() for split, outcome in self.outcomes.items()},
        }


def learning_rates(settings: Settings) -> tuple[float, ...]:
    """Return the grid around an optimizer's usual learning rate, which comes first."""
    if settings.optim.kind == "sgd":
        return SGD_RATES
    usual = settings.optim.learning_rate or 0.0  # set by auto_config
    return tuple(float(f"{usual * factor:.2g}") for factor in RATE_FACTORS)


def search(
    config: RunConfig,
    callback: Callback | None = None,
    *,
    rate: float | None = None,
    started: float | None = None,
) -> SearchResult:
    """Compare all methods, and write the bundle of the best one to `config.out`.

    `rate` replaces the grid of learning rates; `dev` in the settings is the fraction of train to
    hold out, if the dataset does not have both val and test. The time budget is counted from
    `started`. A search that is stopped starts over, but the final run on all images can be resumed.
    """
    started, settings = started or time.monotonic(), config.settings
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"the search runs in one process, and there are {processes}; start it without torchrun"
        )
    for name in ("objective", "until_accuracy", "lora", "patience"):
        if (value := getattr(settings, name)) != getattr(Settings(), name):
            raise ConfigError(
                f"the search compares complete runs of classifiers; leave out {name}={value!r}"
            )
    check_reference(config.start)  # before the data is read
    config = replace(config, settings=replace(settings, dev=None))  # for the final run
    searching, finished, outcomes = None, False, {}
    try:
        with lock_folder(config.out):
            check_folder(config)
            searching = open_search(config, callback or Callback(), started, settings.dev)
            rates = learning_rates(searching.settings) if rate is None else (rate,)
            grids = {PROBE: (), LINEAR: (), ATTENTION: rates, FULL: rates}
            if not config.start:
                fixed = (settings.augment, settings.mix) != (Augmentation(), Mixing())
                default, *others = STRENGTHS
                grids = {default: rates} | dict.fromkeys(() if fixed else others)
            result = SearchResult(
                folder=config.out,
                data=config.data,
                start=config.start,
                dev="val" if searching.fit is searching.splits.train else "train",
                images=len(searching.parts["dev"]),
                candidates=searching.compare(grids),
                seconds=time.monotonic() - started,
            )
            chosen = result.chosen
            if chosen.accuracy is None:
                raise TrainingError(f"no trial succeeded: {chosen.problem}; allow more time")
            searching.log(f"chosen: {chosen.name}")
            if chosen.name in PROBES:
                finished, outcomes = True, searching.refit_probe(chosen.name)
        if not finished:
            write_json(config.out / "ladder.json", result.to_dict())
            finished, outcomes = searching.final_run(chosen)
        seconds = time.monotonic() - started
        result = replace(result, finished=finished, outcomes=outcomes, seconds=seconds)
        write_json(config.out / "ladder.json", result.to_dict())
        return result
    finally:
        if searching is not None:
            shutil.rmtree(config.out / TRIALS, ignore_errors=True)


def open_search(
    config: RunConfig, callback: Callback, started: float, fraction: float | None
) -> Search:
    """Open the data, load the model, and hold out dev: `fraction` of train, or the default."""
    opened, minutes = time.monotonic(), config.settings.minutes
    splits = open_splits(config.data, config.settings)
    if splits.train.multi_label:
        raise DataError(
            f"--search needs single-label data, and the images of {config.data} have several "
            "labels; leave it out"
        )
    others = (note for samples in splits.held_out.values() for note in samples.notes)
    for note in dict.fromkeys((*splits.notes, *others)):
        callback.log(f"note: {note}")
    train, _, dev = hold_out_dev(splits, fraction)
    if not len(dev):
        raise DataError(
            f"{splits.reference} has {len(train)} training images, too few to hold some out; "
            "the search needs three per class, or both val and test"
        )
    device = distributed.init(config.settings.machine.device)
    model, auto = build_model(config.settings, splits, config.start, device, callback.log)
    searching = Search(config, auto.settings, model, splits, train, dev, callback)
    source = "the val split" if train is splits.train else "held out of train"
    callback.log(f"{len(train):,} training images, {len(dev):,} in dev: {source}")
    searching.shortest += time.monotonic() - opened
    if minutes is None:
        return searching
    # Use no more images for probes and dev than there is time for.
    searching.deadline = started + 60 * minutes
    each = feature_seconds(model, dev, searching.device, auto.settings.machine.workers)
    evaluated = sum(map(len, splits.held_out.values()))
    searching.final_evaluation = each * evaluated
    if searching.final_evaluation > EVALUATION_FRACTION * (searching.deadline - time.monotonic()):
        callback.log(
            f"note: evaluating the result on {evaluated:,} images takes about "
            f"{duration(searching.final_evaluation)}, in addition to the time budget"
        )
        searching.deadline += searching.final_evaluation
    affordable = int(PROBE_FRACTION * max(0.0, searching.free()) / each)
    few_dev = subsample(dev, affordable // 2)
    few_fit = subsample(train, affordable - len(few_dev))
    searching.shortest += each * len(few_dev)  # each run is evaluated on them
    parts = [("probes use", "fit", few_fit), ("dev has", "dev", few_dev)]
    for text, name, few in parts if config.start else parts[1:]:
        many, searching.parts[name] = len(searching.parts[name]), few
        if len(few) < many:
            callback.log(f"{text} {len(few):,} of {many:,} images to fit the time budget")
    return searching


# VTAB-1k


@dataclass(kw_only=True)
class Benchmark:
    """VTAB-1k (Zhai et al. 2019, arXiv:1910.04867); fine-tuning defaults to the paper's settings.

    Each task has 1,000 training images. If there are several values of a setting, each is fitted on
    800 images and compared on the other 200; the best one is then fitted on all 1,000 and evaluated
    on the test set. Every trial is appended to results.jsonl with everything it depends on and is
    never repeated, so a stopped benchmark resumes.
    """

    reference: str  # to the model
    out: Path
    method: Literal["finetune", "linear", "probe"] = "finetune"
    learning_rates: tuple[float, ...] = ()
    steps: int | None = None
    batch_size: int | None = None
    image_size: int | None = None  # for probes: the model's own if not given
    examples: int = 1000  # drawn from each task
    machine: MachineSettings = field(default_factory=MachineSettings)
    callback: Callback = field(default_factory=Callback)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        for name in ("steps", "batch_size", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if self.method != "finetune":
            for name in ("learning_rates", "steps", "batch_size"):
                if getattr(self, name):
                    raise ConfigError(f"{name} applies to method finetune, not to {self.method}")
            return
        paper = read_recipe(PAPER)
        self.steps = self.steps or paper.steps
        self.batch_size = self.batch_size or paper.batch_size
        self.image_size = self.image_size or paper.model.image_size
        self.learning_rates = self.learning_rates or (paper.optim.learning_rate or 0.0,)
        for rate in self.learning_rates:
            replace(paper.optim, learning_rate=rate)  # raises unless it is positive

    def measure(self, tasks: Sequence[Task], seeds: int = 1) -> Row:
        """Evaluate the model on every task, the mean over `seeds` draws; return results.json."""
        if seeds < 1:
            raise ConfigError(f"seeds={seeds} draws no training images; use 1 or more")
        log = self.callback.log
        with lock_folder(self.out):
            image_size = None if self.method == "finetune" else self.image_size
            self.model = load(self.reference, image_size=image_size, log=log)
            self.weights = backbone_digest(self.model)
            self.rows = read_rows(self.out / "results.jsonl", key="pictures")
            results = []
            try:
                for number, task in enumerate(tasks, 1):
                    log(f"{task.name}, task {number} of {len(tasks)}")
                    for note in dict.fromkeys((*task.train.notes, *task.test.notes)):
                        log(f"  note: {note}")
                    scores = [self.score(task, seed) for seed in range(seeds)]
                    accuracies = [score["accuracy"] for score in scores]
                    deviation = stdev(accuracies) if seeds > 1 else None
                    row = {"classes": len(task.train.classes), "accuracy": fmean(accuracies)}
                    results.append(task.keys | row | {"deviation": deviation, "scores": scores})
            except KeyboardInterrupt:
                log("stopped; run the same command to continue")
                raise
            finally:
                shutil.rmtree(self.out / "headless", ignore_errors=True)
            groups: dict[str, list[float]] = {}
            for row in results:
                groups.setdefault(row["group"], []).append(row["accuracy"])
            means = {g: fmean(x) for g, x in groups.items()} if [*groups] != ["other"] else {}
            report = {
                "model": self.reference,
                **{name: getattr(self, name) for name in PROTOCOL},
                "setting": METHODS[self.method][1],
                "tasks": results,
                "groups": means,
                "mean": fmean(row["accuracy"] for row in results),
                "mean_of_groups": fmean(means.values()) if means else None,
            }
            write_json(self.out / "results.json", report)
        return report

    def score(self, task: Task, seed: int) -> Row:
        """Evaluate a task with one draw: choose the setting if there are several, then test."""
        method, setting, grid = METHODS[self.method]
        grid, known, log = grid or self.learning_rates, len(self.rows), self.callback.log
        train, fit, dev = draw_images(task.train, self.examples, seed)
        if len(train) < self.examples:
            log(f"  note: only {len(train):,} training images, of {self.examples:,}")
        missing = classes_present(task.test) & ~classes_present(train)
        if missing.any():
            log(f"  note: {missing.sum():,} classes of test are not in the training images")
        start = self.reference
        if self.method == "finetune" and len(train.classes) == self.model.config.num_classes:
            # The head would be reused because it happens to fit.
            start = str(self.out / "headless")
            save(load(self.reference, num_classes=0, log=lambda line: None), start)
        settings = self.settings(seed, augment=task.keys["vary"])
        config = RunConfig(data=task.keys["data"], out=self.out, settings=settings, start=start)
        splits = DataSplits(reference=config.data, train=train, held_out={"test": task.test})
        search = Search(config, settings, self.model, splits, fit, dev, self.callback)
        search.failures = (TrainingError,)
        digests = [list(map(fingerprint, x)) for x in ((fit, dev), (train, task.test))]

        def trial(_: str, value: float, seconds: float = math.inf, *, test: bool = False) -> Trial:
            """Return the recorded trial, or run and record it; one that diverges counts as 0 %."""
            key = {
                "task": task.name,
                "seed": seed,
                "stage": "test" if test else "choice",
                setting: value,
                "learned": digests[test][0],
                "judged": digests[test][1],
                "weights": self.weights,
                "vary": task.keys["vary"],
                **{name: getattr(self, name) for name in PROTOCOL},
            }
            row = next((row for row in self.rows if key.items() <= row.items()), None)
            if row is None:
                digest = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=4)
                folder = self.out / "runs" / task.name
                folder /= f"{key['stage']}-{value:g}-{digest.hexdigest()}"
                if self.method == "finetune":
                    images = f"all {len(train):,}" if test else f"{len(fit):,} of {len(train):,}"
                    log(f"  training on {images} images, rate {value:g}, seed {seed}")
                result = search.trial(method, value, seconds, test=test, folder=folder)
                if result.problem:
                    log(f"  {result.problem}: this rate counts as 0 %")
                row = key | {"model": self.reference, "accuracy": result.accuracy or 0.0}
                row["pictures"] = result.images or len(dev)
                self.rows.append(row)
                write_atomic(self.out / "results.jsonl", "".join(map(to_line, self.rows)))
                if not test:
                    shutil.rmtree(folder, ignore_errors=True)  # the model is not needed
            return Trial(value=value, accuracy=row["accuracy"], images=row["pictures"])

        chosen, choices = grid[0], {}
        if len(grid) > 1:
            [candidate] = search.compare({method: grid}, trial)
            choices = {t.value: t.accuracy for t in candidate.trials}
            chosen = candidate.value
            assert chosen is not None, "every trial has an accuracy"
        final = trial(method, chosen, test=True)
        cached = ", done before" if len(self.rows) == known else ""
        result = f"test accuracy {percent(final.accuracy)} (n={final.images:,})"
        log(f"  {result}, {setting} {chosen:g}, seed {seed}{cached}")
        if final.images < len(task.test):
            log(f"  note: {len(task.test) - final.images:,} test images could not be read")
        values = {"seed": seed, "setting": chosen, "accuracy": final.accuracy}
        return values | {"learned": len(train), "judged": final.images, "choices": choices}

    def settings(self, seed: int = 0, *, augment: bool = True) -> Settings:
        """Return the paper's settings with the changes of the benchmark."""
        paper = read_recipe(PAPER)
        steps, warmup = self.steps or 1, paper.optim.warmup_steps or 0
        return replace(
            paper,
            steps=steps,
            batch_size=self.batch_size,
            seed=seed,
            evaluate_every=1e9,  # never during training
            preprocessing=None,  # the model's own
            model=ModelSettings(image_size=self.image_size),
            optim=replace(paper.optim, warmup_steps=warmup * steps // (paper.steps or 1)),
            augment=paper.augment if augment else Augmentation(crop="whole", flip=False),
            machine=self.machine,
        )
