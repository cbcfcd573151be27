"""Three ways to fit a model to a small task, each a trial for one value of what can be chosen.

    finetune    table 4 of the paper: SGD at 0.01, 2,500 steps; several rates make a choice
    linear      logistic regression on the model's features; its weight decay is chosen
    probe       ridge regression on them; its l2 is chosen

A trial knows two stages: learn from four fifths of the drawn pictures and be judged by the others,
to choose; learn from all of them and be judged by the test pictures.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from vitrail.checkpoints.load import load
from vitrail.checkpoints.save import save
from vitrail.data.samples import Samples
from vitrail.errors import ConfigError, TrainingError, unknown
from vitrail.evaluation.passes import Progress
from vitrail.models.build import Model
from vitrail.probing.features import Features, features_of
from vitrail.probing.others import fit_logistic
from vitrail.probing.ridge import PATH, fit
from vitrail.probing.shots import right
from vitrail.training.material import Material
from vitrail.training.recipes import read_recipe
from vitrail.training.run import run
from vitrail.training.settings import AugmentSettings, MachineSettings, ModelSettings, Settings
from vitrail.training.setup import Order
from vitrail.training.state import has_state
from vitrail.training.tasks import Hand, OpenTask
from vitrail.training.watch import Watch

MethodName = Literal["finetune", "linear", "probe"]
Stage = Literal["choice", "test"]
Trial = Callable[[float, Stage, Path], tuple[float, int]]  # → accuracy, and of how many pictures

EXAMPLES = 1000
HEADLESS = "headless"  # in the benchmark's folder, while it goes on
PAPER = "paper-finetune-vtab"
DECAYS = (1.0, 0.1, 1e-2, 1e-3)  # strongest first: of equal ones the first is taken
ONLY_FINETUNE = ("learning_rates", "steps", "batch_size")
UNVARIED = AugmentSettings(crop="whole", flip=False, policy="none", color_jitter=0, erasing=0)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How every task is done; what fine-tuning is not told is the paper's."""

    method: MethodName = "finetune"
    learning_rates: tuple[float, ...] = ()
    steps: int | None = None
    batch_size: int | None = None
    image_size: int | None = None  # a probe's is the model's own if not given
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
            usual: dict[str, Any] = {
                "learning_rates": (paper.optim.learning_rate,),
                "steps": paper.steps,
                "batch_size": paper.batch_size,
                "image_size": paper.model.image_size,
            }
            for name, value in usual.items():
                object.__setattr__(self, name, getattr(self, name) or value)
        elif given := [name for name in ONLY_FINETUNE if getattr(self, name)]:
            raise ConfigError(f"{given[0]} is for the method finetune, not for {self.method}")

    def to_dict(self) -> dict[str, Any]:
        """What a trial depends on; which other candidates there are does not matter to it."""
        return {name: value for name, value in asdict(self).items() if name != "learning_rates"}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all trials share."""

    reference: str  # to the model
    protocol: Protocol
    out: Path
    machine: MachineSettings = field(default_factory=MachineSettings)
    tell: Callable[[str], None] = lambda line: None
    watch: Callable[[], Watch] = Watch  # a new one for each run
    progress: Progress | None = None  # of features


class Finetuning:
    """All weights learn, by the paper's settings."""

    setting = "rate"

    def __init__(self, bench: Bench, model: Model) -> None:
        self.bench = bench
        self.outputs = model.config.num_classes
        self.candidates: Sequence[float] = bench.protocol.learning_rates

    def begin(self, task: OpenTask, hand: Hand, seed: int) -> Trial:
        bench = self.bench

        def trial(rate: float, stage: Stage, folder: Path) -> tuple[float, int]:
            final = stage == "test"
            learned, judged = (hand.train, task.test) if final else (hand.fit, hand.dev)
            name = "test" if final else "dev"
            pictures = "all of them" if final else f"{len(learned):,} of them, to choose"
            bench.tell(f"  learning from {pictures}, rate {rate:g}, seed {seed}")
            settings = settings_for(bench.protocol, rate, len(learned), vary=task.task.vary)
            if settings.batch_size != bench.protocol.batch_size:
                bench.tell(f"  note: batches of {settings.batch_size}, since there are no more")
            order = Order(
                data=task.task.data,
                out=folder,
                settings=replace(settings, seed=seed, machine=bench.machine),
                start=self.start(len(learned.classes)),
                resume=has_state(folder),
                overwrite=True,
                material=Material(reference=task.task.data, train=learned, judged={name: judged}),
            )
            try:
                result = run(order, bench.watch())
            except TrainingError as error:
                if final:
                    raise
                bench.tell(f"  {str(error).partition(';')[0]}: this rate counts as 0 %")
                return 0.0, len(judged)
            if not result.finished:
                bench.tell("stopped; nothing is lost, and the same command goes on")
                raise KeyboardInterrupt
            outcome = result.outcomes[name]
            return outcome.accuracy, outcome.samples

        return trial

    def start(self, classes: int) -> str:
        """The model; without its head if that would be taken over because it happens to fit."""
        if classes != self.outputs:
            return self.bench.reference
        folder = self.bench.out / HEADLESS
        model = load(self.bench.reference, num_classes=0, log=lambda line: None)
        save(model, folder)
        return str(folder)


def settings_for(protocol: Protocol, rate: float, pictures: int, *, vary: bool) -> Settings:
    """The paper's settings for a task, in which only what was asked for is another."""
    paper = read_recipe(PAPER)
    steps, batch = protocol.steps, min(protocol.batch_size or pictures, pictures)
    assert steps is not None
    assert paper.steps is not None
    assert paper.optim.warmup_steps is not None
    warmup = paper.optim.warmup_steps * steps // paper.steps
    return replace(
        paper,
        steps=steps,
        batch_size=batch,
        evaluate_every=float(steps * batch),  # epochs, which is never: nothing depends on it
        preprocessing=None,  # the model's own
        model=ModelSettings(image_size=protocol.image_size),
        optim=replace(paper.optim, learning_rate=rate, warmup_steps=warmup),
        augment=paper.augment if vary else UNVARIED,
    )


def parts(task: OpenTask, hand: Hand) -> dict[str, Samples]:
    return {"train": hand.train, "fit": hand.fit, "dev": hand.dev, "test": task.test}


class Probing:
    """A linear classifier learns; the model's features stay as they are."""

    def __init__(
        self,
        bench: Bench,
        model: Model,
        setting: str,
        candidates: Sequence[float],
        fit: Callable[[np.ndarray, np.ndarray, int, float], Any],
    ) -> None:
        self.bench, self.model = bench, model
        self.setting, self.candidates, self.fit = setting, candidates, fit

    def begin(self, task: OpenTask, hand: Hand, seed: int) -> Trial:
        samples = parts(task, hand)

        @cache
        def features(part: str) -> Features:
            workers = self.bench.machine.workers
            return features_of(
                self.model, samples[part], workers=workers, progress=self.bench.progress
            )

        def trial(setting: float, stage: Stage, folder: Path) -> tuple[float, int]:
            learned = [features("fit"), features("dev")] if stage == "test" else [features("fit")]
            judged = features("test" if stage == "test" else "dev")
            classifier = self.fit(
                np.concatenate([part.values for part in learned]),
                np.concatenate([part.labels for part in learned]),
                len(judged.classes),
                setting,
            )
            return right(classifier, judged), len(judged)

        return trial


Method = Finetuning | Probing


def linear(bench: Bench, model: Model) -> Probing:
    return Probing(bench, model, "decay", DECAYS, lambda x, y, c, d: fit_logistic(x, y, c, decay=d))


def ridge(bench: Bench, model: Model) -> Probing:
    return Probing(bench, model, "l2", sorted(PATH, reverse=True), fit)


METHODS: dict[str, Callable[[Bench, Model], Method]] = {
    "finetune": Finetuning,
    "linear": linear,
    "probe": ridge,
}
