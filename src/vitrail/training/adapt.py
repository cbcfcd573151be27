"""Adaptation search: from a linear probe to full fine-tuning, and which candidate is worth it.

    few-shot probe     ridge regression on frozen features, l2 by leave-one-out
    linear head        logistic regression on the same features
    attention-only     fine-tuning of attention and head (Touvron et al. 2022)
    full fine-tuning

Candidates are compared on dev, held out of the training set; the last two with a grid of learning
rates (appendix B.1.1 of the paper). The best one, the cheaper in a tie, is then fitted to the whole
training set; with a time budget, a probe to the images whose features there was time for. Other
held-out splits are not used for the choice. `vtab.py` chooses in the same way on many tasks.
"""

import math
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import distributed
from vitrail.checkpoints.files import write_json
from vitrail.checkpoints.load import HEADS, load, with_head
from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.save import save
from vitrail.data.loader import default_workers
from vitrail.data.provenance import DataProvenance
from vitrail.errors import ConfigError, DataError, TrainingError, VitrailError
from vitrail.evaluation.evaluate import quick_evaluate
from vitrail.evaluation.results import EvaluationResult
from vitrail.formatting import duration, percent
from vitrail.models.registry import name_of
from vitrail.models.vit import Model
from vitrail.probing.features import Features, features_of
from vitrail.probing.fewshot import accuracy_of
from vitrail.probing.probes import fit_logistic
from vitrail.probing.ridge import fit_path
from vitrail.probing.teach import ProbeMemory, fit_head, saving_memory
from vitrail.training.auto_config import seconds_per_image
from vitrail.training.budget import END_SECONDS
from vitrail.training.callbacks import Callback
from vitrail.training.checkpoint import has_state, lock_folder
from vitrail.training.config import OptimSettings, RunConfig, Settings
from vitrail.training.data_module import DataSplits, hold_out_dev, open_splits, subsample
from vitrail.training.model_init import build_model
from vitrail.training.recipes import BUNDLE, clear_run, write_run
from vitrail.training.trainer import check_folder, run

PROBE, LINEAR = "few-shot probe", "linear head"
ATTENTION, FULL = "attention-only", "full fine-tuning"
RESULT = "ladder.json"
TRIALS = "trials"  # folder of the trial runs, until the search is finished
SGD_RATES = (0.01, 0.003, 0.03, 0.001)  # table 4 of the paper; the usual one first wins a tie
RATE_FACTORS = (1.0, 0.3, 3.0)  # times the usual rate, for other optimizers
MIN_TRIAL = 2.0  # times the shortest run: fewer learning rates rather than shorter trials
FINAL_FRACTION = 1 / 3  # of the time after the probes, for the final run on all images
PROBE_FRACTION = 1 / 4  # of the time, for computing features
EVALUATION_FRACTION = 1 / 2  # of the time; if the final evaluation takes more, it is added
TIMED_IMAGES = 32  # from which the cost of features is measured
EVALUATION_BATCH = 64
NO_TIME, TOO_SHORT = "no time left", "the time was enough for one step only"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate with one learning rate."""

    learning_rate: float
    accuracy: float | None = None  # on dev
    steps: int = 0
    seconds: float = 0.0
    problem: str = ""  # why there is no accuracy


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An adaptation method, and its accuracy on dev."""

    name: str
    accuracy: float | None
    seconds: float
    trials: tuple[Trial, ...] = ()
    problem: str = ""  # why there is no accuracy

    @property
    def learning_rate(self) -> float | None:
        """The best learning rate; the first in a tie."""
        done = {t.learning_rate: t.accuracy for t in self.trials if t.accuracy is not None}
        return best(done) if done else None


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

    def best_before(self, candidate: Candidate) -> float | None:
        """Return the best accuracy of cheaper candidates."""
        cheaper = self.candidates[: self.candidates.index(candidate)]
        return max((c.accuracy for c in cheaper if c.accuracy is not None), default=None)

    def gain(self, candidate: Candidate) -> float | None:
        """Return the improvement over the best cheaper candidate."""
        before = self.best_before(candidate)
        return None if before is None or candidate.accuracy is None else candidate.accuracy - before

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        rungs = [
            {
                **asdict(candidate),
                "gain": self.gain(candidate),
                "seconds": round(candidate.seconds, 1),
                "chosen": candidate is self.chosen,
                "learning_rate": candidate.learning_rate,
            }
            for candidate in self.candidates
        ]
        return {
            "folder": str(self.folder),
            "data": self.data,
            "from": self.start,
            "dev": {"split": self.dev, "pictures": self.images},
            "rungs": rungs,
            "finished": self.finished,
            "seconds": round(self.seconds, 1),
            "results": {split: outcome.to_dict() for split, outcome in self.outcomes.items()},
        }


def best(accuracies: Mapping[float, float]) -> float:
    """Return the setting with the best accuracy on dev; the first in a tie."""
    return max(accuracies, key=lambda setting: accuracies[setting])


def reason(error: VitrailError) -> str:
    """Return what went wrong, without the advice."""
    return str(error).partition(";")[0]


def search(
    config: RunConfig,
    callback: Callback | None = None,
    *,
    rate: float | None = None,
    started: float | None = None,
) -> SearchResult:
    """Compare all candidates, and write the bundle of the best one to `config.out`.

    `rate` replaces the grid of learning rates. `dev` in the settings is the fraction of train to
    hold out, if there is no val beside test. With `minutes` the search ends on time, counted from
    `started`, unless the final evaluation alone takes too long, which is logged. A search that is
    stopped starts over, but the final run on all images can be resumed.
    """
    started = time.monotonic() if started is None else started
    settings = config.settings
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"the search runs in one process, and there are {processes}; start it without torchrun"
        )
    if config.resume:
        raise ConfigError("a search starts over and cannot be resumed; leave --resume out")
    if settings.objective != "classify":
        raise ConfigError(
            f"the search compares classifiers, and objective={settings.objective!r} is not one; "
            "leave one of them out"
        )
    if settings.until_accuracy is not None:
        raise ConfigError(
            "until_accuracy stops a run early, and the search compares complete ones; leave it out"
        )
    config = replace(config, settings=replace(settings, dev=None))  # for the final run
    device = distributed.init(settings.machine.device)

    def write(result: SearchResult) -> SearchResult:
        result = replace(result, seconds=time.monotonic() - started)
        write_json(result.folder / RESULT, result.to_dict())
        return result

    try:
        with lock_folder(config.out):
            check_folder(config)
            searching = AdaptationSearch(
                config, callback or Callback(), device, started, settings.dev
            )
            result = searching.compare(rate)
            chosen = result.chosen
            searching.log(f"chosen: {chosen.name}")
            if chosen.name in (PROBE, LINEAR):
                outcomes = searching.refit_probe(chosen)
                return write(replace(result, finished=True, outcomes=outcomes))
        write(result)
        finished, outcomes = searching.final_run(chosen)
        return write(replace(result, finished=finished, outcomes=outcomes))
    finally:
        trials = config.out / TRIALS
        for name in (ATTENTION, FULL):
            for trial in trials.glob(f"{name.replace(' ', '-')}-*"):
                shutil.rmtree(trial, ignore_errors=True)
        with suppress(OSError):  # it has other files, or does not exist
            trials.rmdir()


class AdaptationSearch:
    """The data and model that all candidates share, and the time that is left."""

    def __init__(
        self,
        config: RunConfig,
        callback: Callback,
        device: torch.device,
        started: float,
        fraction: float | None,
    ) -> None:
        """Open the data, load the model, and hold out dev: `fraction` of train, or the usual."""
        start_time, minutes = time.monotonic(), config.settings.minutes
        self.config, self.callback, self.device = config, callback, device
        self.log = callback.log
        self.splits = splits = open_splits(config.data, config.settings)
        if splits.train.multi_label:
            raise DataError(
                f"the images of {config.data} have several labels each, and probes need one; "
                "fine-tune without --search"
            )
        others = (note for samples in splits.held_out.values() for note in samples.notes)
        for note in dict.fromkeys((*splits.notes, *others)):
            self.log(f"note: {note}")
        self.train, _, self.dev = hold_out_dev(splits, fraction)  # for trials, without dev
        if not len(self.dev):
            raise DataError(
                f"{splits.reference} has {len(self.train)} training images, too few to hold some "
                "out; the search needs three per class, or both val and test"
            )
        self.dev_from_train = self.train is not splits.train
        self.probe_train = self.train  # for probes: all of it, or a subset that fits the time
        self.model, auto = build_model(config.settings, splits, config.start, device, self.log)
        self.settings = auto.settings
        source = "held out of train" if self.dev_from_train else "the val split"
        self.log(f"{len(self.train):,} training images, {len(self.dev):,} in dev: {source}")
        self.deadline = math.inf if minutes is None else started + 60 * minutes
        self.shortest = END_SECONDS + time.monotonic() - start_time  # seconds of a run of one step
        self.final_evaluation = 0.0  # seconds, if there is a deadline
        if minutes is not None:
            self.subsample_for_budget(self.seconds_per_image())

    def free(self) -> float:
        """Return the seconds until the final evaluation has to start."""
        return self.deadline - time.monotonic() - self.final_evaluation

    def seconds_per_image(self) -> float:
        """Measure feature extraction on some images of dev; loader processes share the loading."""
        forward, count = (
            seconds_per_image(self.model, self.device),
            min(TIMED_IMAGES, len(self.dev)),
        )
        sample = self.dev.subset(np.linspace(0, len(self.dev) - 1, count, dtype=int))
        started = time.monotonic()
        features_of(self.model, sample, cache=False, batch_size=count, workers=0)
        loading = max(0.0, (time.monotonic() - started) / count - forward)
        workers = self.settings.machine.workers
        workers = default_workers(self.dev) if workers is None else workers
        return max(1e-6, forward + loading / max(1, workers))  # clocks may be coarse

    def subsample_for_budget(self, each: float) -> None:
        """Use no more images for probes and dev than there is time for, at `each` seconds."""
        evaluated = sum(map(len, self.splits.held_out.values()))
        self.final_evaluation = each * evaluated
        if self.final_evaluation > EVALUATION_FRACTION * (self.deadline - time.monotonic()):
            self.log(
                f"note: evaluating the result on {evaluated:,} images takes about "
                f"{duration(self.final_evaluation)}, in addition to the time budget"
            )
            self.deadline += self.final_evaluation
        affordable = int(PROBE_FRACTION * max(0.0, self.free()) / each)
        dev = subsample(self.dev, affordable // 2)
        train = subsample(self.train, affordable - len(dev))
        self.shortest += each * len(dev)  # each run is evaluated on them
        for name, few, many in (("probes use", train, self.train), ("dev has", dev, self.dev)):
            if len(few) < len(many):
                self.log(f"{name} {len(few):,} of {len(many):,} images to fit the time budget")
        self.dev, self.probe_train = dev, train

    def compare(self, rate: float | None) -> SearchResult:
        """Evaluate all candidates, from cheap to expensive."""
        start_time, candidates = time.monotonic(), []
        model, settings = self.model.to(self.device), self.settings
        self.train_features, self.dev_features = (
            features_of(
                model,
                samples,
                workers=settings.machine.workers,
                strict=settings.strict,
                progress=self.callback.on_progress,
            )
            for samples in (self.probe_train, self.dev)
        )
        model.to("cpu")  # the device is for the runs now
        features = self.train_features
        data = (features.values, features.labels, len(features.classes))
        for name in (PROBE, LINEAR):
            path = fit_path(*data) if name == PROBE else None  # l2 by leave-one-out
            probe = fit_logistic(*data) if path is None else path.probes[path.best]
            accuracy, now = accuracy_of(probe, self.dev_features), time.monotonic()
            candidates.append(Candidate(name=name, accuracy=accuracy, seconds=now - start_time))
            self.log(f"  {name}: dev accuracy {percent(accuracy)}")
            start_time = now
        rates = learning_rates(settings.optim) if rate is None else (rate,)
        reserve = FINAL_FRACTION * max(0.0, self.free())
        for name, share in ((ATTENTION, 1 / 2), (FULL, 1)):
            freeze = frozen_patterns(name, model)
            if freeze is None:
                problem = f"{name_of(model.config)} has no attention"
                candidates.append(Candidate(name=name, accuracy=None, seconds=0.0, problem=problem))
                continue
            free = self.free()
            seconds = free if math.isinf(free) else share * (free - reserve)
            candidates.append(self.tune(name, rates, freeze, seconds))
        return SearchResult(
            folder=self.config.out,
            data=self.config.data,
            start=self.config.start,
            dev="train" if self.dev_from_train else "val",
            images=len(self.dev),
            candidates=tuple(candidates),
        )

    def tune(
        self, name: str, rates: Sequence[float], freeze: Sequence[str], seconds: float
    ) -> Candidate:
        """Run a trial for each learning rate, as many as fit into the time."""
        start_time = time.monotonic()
        affordable = min(len(rates), seconds / (MIN_TRIAL * self.shortest))
        count = max(int(seconds >= self.shortest), int(affordable))
        trials = []
        for index, rate in enumerate(rates):
            available = (start_time + seconds - time.monotonic()) / max(1, count - index)
            if index < count and available >= self.shortest:
                trial = self.run_trial(name, rate, freeze, available)
            else:
                trial = Trial(learning_rate=rate, problem=NO_TIME)
            trials.append(trial)
            accuracy = trial.accuracy
            outcome = trial.problem if accuracy is None else f"dev accuracy {percent(accuracy)}"
            self.log(f"  {name}, learning rate {rate:g}: {outcome}")
        accuracies = [trial.accuracy for trial in trials if trial.accuracy is not None]
        return Candidate(
            name=name,
            accuracy=max(accuracies, default=None),
            seconds=time.monotonic() - start_time,
            trials=tuple(trials),
            problem="" if accuracies else "; ".join(dict.fromkeys(t.problem for t in trials)),
        )

    def run_trial(self, name: str, rate: float, freeze: Sequence[str], seconds: float) -> Trial:
        """Train without dev and evaluate on it; if the run is stopped, so is the search."""
        start_time, steps, accuracy, problem = time.monotonic(), 0, None, ""
        config = replace(
            self.config,
            out=self.trial_folder(name, rate),
            settings=with_rate(self.settings, rate, freeze, seconds),
            splits=DataSplits(
                reference=self.splits.reference, train=self.train, held_out={"dev": self.dev}
            ),
            overwrite=True,
        )
        timer = TrialCallback(self.callback)
        try:
            result = run(config, timer)
        except (ConfigError, TrainingError) as error:  # out of memory, or diverged
            problem = reason(error)
        else:
            if not result.finished:
                raise KeyboardInterrupt
            self.shortest = timer.first + result.seconds - timer.last
            steps = result.step
            if steps == 1 and not math.isinf(seconds):
                problem = TOO_SHORT
            else:
                accuracy = result.outcomes["dev"].accuracy
        return Trial(
            learning_rate=rate,
            accuracy=accuracy,
            steps=steps,
            seconds=round(time.monotonic() - start_time, 1),
            problem=problem,
        )

    def trial_folder(self, name: str, rate: float) -> Path:
        return self.config.out / TRIALS / f"{name.replace(' ', '-')}-{rate:g}"

    def refit_probe(self, chosen: Candidate) -> dict[str, EvaluationResult]:
        """Fit the probe to all features of the training set, and make it the model's head."""
        classes = self.splits.train.classes
        parts = [self.train_features, *([self.dev_features] if self.dev_from_train else [])]
        values, labels = joined(parts)
        provenance = {"head": f"{chosen.name} on {len(labels):,} images"}
        if chosen.name == PROBE:
            memory = ProbeMemory.of(self.model, values, labels, classes)
            model, memory, _ = fit_head(self.model, memory)
            return self.write_result(model, provenance, memory)
        probe = fit_logistic(values, labels, len(classes))
        return self.write_result(with_head(self.model, *probe.linear(), classes), provenance)

    def final_run(self, chosen: Candidate) -> tuple[bool, dict[str, EvaluationResult]]:
        """Train on all images; return whether the run is complete, and its outcomes.

        The run can be resumed. If there is no time for it, or it fails, the best trial is the
        result.
        """
        config, remaining = self.config, self.deadline - time.monotonic()
        rate, freeze = chosen.learning_rate, frozen_patterns(chosen.name, self.model)
        assert rate is not None, "a chosen candidate has a trial"
        assert freeze is not None, "a chosen candidate has trainable weights"
        problem = "no time left to train on all images"
        if self.free() >= self.shortest:
            auto = self.settings
            settings = replace(config.settings, optim=auto.optim, head_init=auto.head_init)
            settings = with_rate(settings, rate, freeze, remaining)
            try:
                result = run(replace(config, settings=settings), self.callback)
                return result.finished, result.outcomes
            except (ConfigError, TrainingError) as error:
                problem = reason(error)
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
        with nullcontext() if memory is None else saving_memory(memory, config.out):
            save(model.to("cpu"), config.out, provenance=provenance)
        model = model.to(self.device).eval()
        outcomes = {
            name: quick_evaluate(
                model,
                samples,
                get_metadata(self.model).preprocessing,
                loss=settings.loss.kind or "softmax",
                channels=model.config.channels,
                batch_size=EVALUATION_BATCH,
                workers=settings.machine.workers,
                device=self.device,
            )
            for name, samples in self.splits.held_out.items()
        }
        accuracies = {f"{name} accuracy": round(o.accuracy, 6) for name, o in outcomes.items()}
        save(model.to("cpu"), config.out, provenance=provenance | accuracies)
        return outcomes


class TrialCallback(Callback):
    """Forwards the steps of a trial, but not its log, and records when they were taken."""

    def __init__(self, callback: Callback) -> None:
        self.on_train_begin, self.on_train_end = callback.on_train_begin, callback.on_train_end
        self.on_evaluate, self.forward = callback.on_evaluate, callback.on_step
        self.first = self.last = 0.0  # seconds from the start to the end of that step

    def on_step(self, row: Mapping[str, Any]) -> None:
        self.first = self.first or row["seconds"]
        self.last = row["seconds"]
        self.forward(row)


def learning_rates(optim: OptimSettings) -> tuple[float, ...]:
    """Return the grid around an optimizer's usual learning rate, which comes first."""
    assert optim.learning_rate is not None, "set by auto_config"
    if optim.kind == "sgd":
        return SGD_RATES
    return tuple(float(f"{optim.learning_rate * factor:.2g}") for factor in RATE_FACTORS)


def frozen_patterns(name: str, model: Model) -> tuple[str, ...] | None:
    """Return `optim.freeze` of a candidate; None if the model has no attention to train.

    All weights but those of attention and heads, as few patterns as possible.
    """
    if name != ATTENTION:
        return ()
    names = [name for name, _ in model.named_parameters()]
    if not any(".attention." in name for name in names):
        return None
    trained = [n for n in names if ".attention." in n or n.split(".")[0] in HEADS]
    patterns: dict[str, None] = {}
    for name in names:
        if name not in trained:
            parts = re.sub(r"\.\d+(?=\.)", ".*", name).split(".")
            wider = [".".join([*parts[:n], "*"]) for n in range(1, len(parts))]
            fitting = (p for p in wider if not any(fnmatchcase(n, p) for n in trained))
            patterns[next(fitting, ".".join(parts))] = None
    return tuple(patterns)


def with_rate(settings: Settings, rate: float, freeze: Sequence[str], seconds: float) -> Settings:
    """Return settings with another learning rate, more frozen weights, and a time budget."""
    optim = settings.optim
    if optim.kind == "muon" and optim.learning_rate:
        muon_rate = optim.muon_learning_rate * rate / optim.learning_rate
        optim = replace(optim, muon_learning_rate=muon_rate)
    optim = replace(optim, learning_rate=rate, freeze=(*optim.freeze, *freeze))
    settings = replace(settings, optim=optim)
    if math.isinf(seconds):
        return settings
    return replace(settings, minutes=seconds / 60, epochs=None, steps=None)


def joined(parts: Sequence[Features]) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and labels of several feature sets."""
    values = np.concatenate([features.values for features in parts])
    return values, np.concatenate([features.labels for features in parts])
