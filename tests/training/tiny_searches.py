"""Tiny adaptation searches, with trial runs that only return an accuracy."""

import json
from dataclasses import replace

from tiny_runs import SETTINGS
from vitrail.evaluation.results import EvaluationResult
from vitrail.training import adapt
from vitrail.training.config import ModelSettings, OptimSettings, RunConfig
from vitrail.training.trainer import Result

ADAMW = OptimSettings(kind="adamw", learning_rate=2e-4, warmup_steps=0)
FINE = replace(SETTINGS, model=ModelSettings(), steps=2, optim=ADAMW)
real_run = adapt.run


class FakeRuns:
    """Replaces `run`: records the configurations, and sets the dev accuracy of each trial.

    `final` is called for the final run on all images.
    """

    def __init__(self, accuracies=None, *, real=False, steps=2):
        self.accuracies, self.real, self.steps = accuracies or {}, real, steps
        self.configs, self.final = [], real_run

    def __call__(self, config, callback=None):
        if config.splits is None:
            return self.final(config, callback)
        self.configs.append(config)
        name = config.out.name.rpartition("-")[0].replace("-only", "")
        if self.real:
            result = real_run(config, callback)
        else:
            known = {"samples": 3, "top5": None, "loss": 0.0, "confusion": None, "skipped": {}}
            result = Result(
                folder=config.out,
                step=self.steps,
                seconds=1.0,
                finished=True,
                outcomes={"dev": EvaluationResult(accuracy=0.0, **known)},
            )
        if "dev" not in result.outcomes:
            return result
        rate = (name, config.settings.optim.learning_rate)
        accuracy = self.accuracies.get(rate, self.accuracies.get(name, 0.0))
        return replace(result, outcomes={"dev": replace(result.outcomes["dev"], accuracy=accuracy)})


def config_of(data, out, start, **changes) -> RunConfig:
    options = {key: changes.pop(key) for key in ("overwrite",) if key in changes}
    settings = replace(FINE, **changes)
    return RunConfig(data=str(data), out=out, settings=settings, start=start, **options)


def named(samples) -> set[str]:
    return {samples.name(index) for index in range(len(samples))}


def written(out) -> dict:
    return json.loads((out / "ladder.json").read_text())


def without_times(candidate) -> dict:
    candidate.pop("seconds")
    for trial in candidate["trials"]:
        trial.pop("seconds")
    return candidate
