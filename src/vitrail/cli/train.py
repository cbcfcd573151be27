"""`vitrail train` and `vitrail finetune`: a dataset → a bundle. `vitrail demo`: an example."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import tyro

from vitrail.checkpoints import builtin
from vitrail.cli.console import (
    VERBOSITY,
    Progress,
    accuracy_line,
    log,
    log_stderr,
    paragraph,
    print_json,
    print_lines,
    table,
)
from vitrail.cli.fewshot import with_interval
from vitrail.cli.options import (
    STOPPED,
    Command,
    DataOptions,
    DataReference,
    default_model,
    options_of,
)
from vitrail.data.storage import same_location
from vitrail.errors import ConfigError, DataError
from vitrail.formatting import duration, percent, shell_command
from vitrail.training import recipes
from vitrail.training.config import RunConfig, Settings

if TYPE_CHECKING:
    from vitrail.training.adapt import SearchResult
    from vitrail.training.trainer import Result

DEMO_DATA = "builtin:sign-digits"
DEMO_IMAGES = 64  # that attention statistics are averaged over
DEMO_SHOTS, DEMO_DRAWS = 5, 3  # images per class for transfer, and how often they are drawn
START_TIME = time.monotonic()  # a time budget includes the time that importing takes


@dataclass(frozen=True, kw_only=True)
class Train(DataOptions):
    """Train from scratch; settings that are not given are chosen from the data."""

    data: DataReference = ""
    out: Path | None = None
    """Folder of the run (default: a new one in runs/)."""
    recipe: str = ""
    """Default settings: a name from `vitrail recipes`, or a .toml file."""
    overwrite: bool = False
    """Replace the run in --out."""
    resume: bool = False
    """Resume the interrupted run in --out."""
    print_settings: bool = False
    """Print the settings as a recipe, without training."""
    json: bool = False
    """Print one JSON object at the end; progress goes to standard error."""
    search: bool = False
    """Compare short runs on held-out images, and train with the best settings: learning rate and
    augmentation or, when fine-tuning, learning rate and which layers to train."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        """Return what the options override: defaults, a recipe, or the run to resume."""
        recipe, out = option(argv, "--recipe"), option(argv, "--out")
        if "--resume" in argv and out is not None and recipes.is_run(Path(out)):
            settings, data, start = recipes.read_run(Path(out))
            origin: dict[str, Any] = {"origin": start} if issubclass(cls, Finetune) else {}
            return cls(settings=settings, data=data, **origin)
        settings = recipes.read_recipe(recipe) if recipe else Settings()
        names = {word.partition("=")[0].replace("_", "-") for word in argv}
        alternatives = [name for pair in recipes.ALTERNATIVES for name in pair]
        passed = [name for name in alternatives if f"--{name}".replace("_", "-") in names]
        # Options override the recipe.
        return cls(settings=recipes.drop_alternatives(settings, passed))

    def run(self) -> int:
        if self.print_settings:
            print(recipes.to_toml(self.settings), end="")
            return 0
        if self.search and self.resume:
            raise ConfigError(
                "--search cannot be resumed; omit --search to resume its final run, or omit "
                "--resume to start over"
            )
        if self.resume:  # options may change how a run continues, but not what it computes
            if self.out is None:
                raise ConfigError("--resume needs --out with the folder of the run")
            before, data, start = recipes.read_run(self.out)
            if not same_location(data, self.data):
                raise ConfigError(
                    f"{self.out} was trained on {data}, not {self.data}; omit the dataset to resume"
                )
            if start != self.start:
                command = "finetune" if start else "train"
                raise ConfigError(
                    f"{self.out} is a run of `vitrail {command}`; resume it with that command"
                )
            recipes.check_same_run(before, self.settings)
        if not self.data:
            raise ConfigError(
                "no dataset given; pass a folder with one subfolder per class, or "
                "builtin:sign-digits"
            )
        if self.out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("several processes need the same run folder; pass --out")
        config = RunConfig(
            data=self.data,
            out=self.out or recipes.new_run_folder(self.data),
            settings=self.settings,
            start=self.start,
            resume=self.resume,
            overwrite=self.overwrite,
        )
        from vitrail.training.memory import configure_malloc

        if self.settings.machine.parts != 1:
            configure_malloc()
        return 0 if self.fit(config) else STOPPED

    def fit(self, config: RunConfig) -> bool:
        """Train and report; return whether training finished."""
        from vitrail import distributed
        from vitrail.cli.live import Live
        from vitrail.training.trainer import run

        if self.search:
            from vitrail.training.adapt import search

            rate = self.settings.optim.learning_rate
            if self.recipe and rate == recipes.read_recipe(self.recipe).optim.learning_rate:
                rate = None  # the recipe's, not the user's: try others too
            with Live(stderr=self.json) as live:
                found = search(config, live, rate=rate, started=START_TIME)
            if self.json:
                print_json(found.to_dict())
            else:
                print_lines(search_report(found, self))
            return found.finished
        with (
            Live(stderr=self.json) as live,
            distributed.process_group(self.settings.machine.device),
        ):
            result = run(config, live, started=START_TIME)
            first = distributed.is_main()
        if not first:
            return result.finished
        if self.json:
            results = {split: outcome.to_dict() for split, outcome in result.outcomes.items()}
            values = {"folder": str(result.folder), **options_of(result, "finished", "step")}
            print_json(values | {"seconds": round(result.seconds, 1), "results": results})
        else:
            print_lines(report(result, self, f"stopped after step {result.step:,}"))
        return result.finished

    @property
    def start(self) -> str:
        """The model to start from; empty for random initialization."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Finetune(Train):
    """Fine-tune a pre-trained model: the built-in one, a bundle, a weights file, or a model from
    the hub."""

    origin: Annotated[str, tyro.conf.arg(name="from")] = ""
    """The pre-trained model: a bundle, a weights file, or hf:owner/name (default:
    builtin:vit-photos)."""

    def fit(self, config: RunConfig) -> bool:
        if not self.origin:
            default_model("--from {}", log=log_stderr if self.json else log)
        return super().fit(config)

    @property
    def start(self) -> str:
        return self.origin or builtin.DEFAULT


def option(argv: Sequence[str], name: str) -> str | None:
    """Return the value of an option before all of them are parsed."""
    for number, word in enumerate(argv):
        if word == name and number + 1 < len(argv):
            return argv[number + 1]
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return None


def report(result: "Result | SearchResult", command: Train, stopped: str) -> Iterator[str]:
    if not result.finished:
        name = "finetune" if command.start else "train"
        yield f"{stopped}; the state is saved. Resume with:"
        yield f"  {shell_command(name, '--resume', '--out', result.folder)}"
        return
    for split, outcome in result.outcomes.items():
        yield accuracy_line(split, outcome)
    yield f"done in {duration(result.seconds)}: {result.folder}"
    if not VERBOSITY.quiet:
        from vitrail.evaluation.dataset import HELD_OUT

        yield ""
        yield "Next:"
        if (page := result.folder / "report.html").exists():  # not if a probe is the result
            yield f"  open {page} in a browser: curves, mistakes, settings"
        if any(name in result.outcomes for name in HELD_OUT):  # dev is a part of train
            yield f"  {shell_command('evaluate', result.folder, command.data)}"
        else:
            yield f"  {shell_command('predict', result.folder, 'IMAGES')}"
        yield f"  {shell_command('inspect', result.folder)}"
        yield f'  vitrail.load("{result.folder}") in Python'


def search_report(result: "SearchResult", command: Train) -> Iterator[str]:
    """The candidates, which of them improved the dev accuracy, and what to run next."""
    rows = []
    for candidate in result.candidates:
        gain = result.gain(candidate)
        gained = "" if gain is None else f"{100 * gain:+.1f}"
        finished = sum(trial.accuracy is not None for trial in candidate.trials)
        rate = f"{candidate.value:g}" if finished else ""
        rate += f" (best of {finished})" if finished > 1 else ""
        accuracy, seconds = percent(candidate.accuracy), duration(candidate.seconds)
        rows.append([candidate.name, accuracy, gained, seconds, rate])
    yield ""
    yield from table(rows, "lrrrl", ["candidate", "dev", "gain", "time", "learning rate"])
    for candidate in result.candidates:
        if candidate.problem and not candidate.trials:
            yield from paragraph(f"  {candidate.name}: {candidate.problem}", 4)
        for trial in candidate.trials:
            if trial.problem:
                where = f"{candidate.name}, learning rate {trial.value:g}"
                yield from paragraph(f"  {where}: {trial.problem}", 4)
    yield ""
    best, origin = result.chosen, "the val split" if result.dev == "val" else "held out from train"
    on_dev = f"{percent(best.accuracy)} on dev: {result.images:,} images, {origin}"
    yield from paragraph(f"chosen: {best.name} ({on_dev})")
    yield ""
    yield from report(result, command, "stopped in the run on all training images")


def transfer_report(scratch: "Result") -> Iterator[str]:
    """Compare the demo with classifiers of a few of its images, fitted in closed form."""
    import numpy as np

    from vitrail.checkpoints.load import load
    from vitrail.data.datasets import open_dataset
    from vitrail.probing.features import features_of, pixels_of
    from vitrail.probing.fewshot import draw, try_shots

    started = time.monotonic()
    train, test = (open_dataset(DEMO_DATA, split) for split in ("train", "test"))
    classes = len(train.classes)
    some = train.subset(draw(np.asarray(train.labels()), classes, DEMO_DRAWS * DEMO_SHOTS, seed=0))
    model = load(builtin.DEFAULT)
    accuracies = {}
    for name, features in {
        "built-in model": [features_of(model, part, cache=False) for part in (some, test)],
        "raw pixels": [pixels_of(part) for part in (some, test)],
    }.items():
        (row,) = try_shots(*features, shots=[DEMO_SHOTS], seeds=DEMO_DRAWS)
        accuracies[name] = row[-1]  # ridge with the best l2
    rows = [
        ["from scratch, all images", f"{len(train):,}", percent(scratch.outcomes["test"].accuracy)]
    ]
    for name, trial in accuracies.items():
        few = f"{name}, {DEMO_SHOTS} images per class"
        rows.append([few, f"{classes * DEMO_SHOTS:,}", with_interval(trial)])
    yield ""
    yield from table(rows, "lrr", ["", "training images", "test accuracy"])
    yield ""
    yield from paragraph(
        f"The built-in model, {builtin.DEFAULT}, was trained on other photographs and stays "
        f"frozen: a classifier is fitted to its features in closed form. Mean of {DEMO_DRAWS} "
        f"draws ± half-width of its 95 % CI; {duration(time.monotonic() - started)} in total.",
        0,
    )


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train and evaluate a small ViT on built-in photos of hand signs, in 3 minutes."""

    out: Path = Path("demo")
    """Folder for the model and its report; an earlier demo in it is replaced."""
    minutes: float = 2.95
    """Time budget of training and evaluation."""
    seed: int = 0
    """Random seed."""

    def run(self) -> int:
        from vitrail.checkpoints.load import load
        from vitrail.cli.live import Live
        from vitrail.data.datasets import open_dataset
        from vitrail.data.storage import write_atomic
        from vitrail.inspection.inspect import inspect_model
        from vitrail.models.vit import VisionTransformer
        from vitrail.reports.figures import png_bytes
        from vitrail.reports.inspection import rollout_figure, write_inspection
        from vitrail.training.memory import configure_malloc
        from vitrail.training.trainer import run

        used = self.out.is_dir() and any(self.out.iterdir())
        if used and (not recipes.is_run(self.out) or recipes.read_run(self.out)[1] != DEMO_DATA):
            raise DataError(f"{self.out} contains other files; pass another --out")
        if self.minutes <= 0:
            raise ConfigError(f"--minutes {self.minutes:g}: must be greater than 0")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: must be 0 or more")
        log("Training a Vision Transformer from scratch on 2,062 photos of hand signs for the")
        log("digits 0 to 9, taken by students of a high school in Ankara.\n")
        settings = replace(recipes.read_recipe("demo"), minutes=self.minutes, seed=self.seed)
        configure_malloc()
        with Live() as live:
            config = RunConfig(data=DEMO_DATA, out=self.out, settings=settings, overwrite=True)
            result = run(config, live, started=START_TIME)
        if not result.finished:
            print(f"stopped; resume with: {shell_command('train', '--resume', '--out', self.out)}")
            return STOPPED
        model, test = load(self.out).eval(), open_dataset(DEMO_DATA, "test")
        assert isinstance(model, VisionTransformer)
        log("inspecting the model")
        with Progress() as progress:
            inspection = inspect_model(
                model,
                data=test,
                num_images=DEMO_IMAGES,
                progress=lambda what, *done: progress(*done),
            )
        page = write_inspection(self.out / "inspection", inspection)[-1]
        figure = rollout_figure(inspection.images, model.config.grid)
        write_atomic(self.out / "attention.png", png_bytes(figure))
        print(f"\n{accuracy_line('test', result.outcomes['test'])}")
        if builtin.references():
            log("adapting the built-in model to five images per class")
            print_lines(transfer_report(result))
        print(f"done in {duration(time.monotonic() - START_TIME)}\n")
        files = {
            self.out / "report.html": "training report: curves, mistakes, settings",
            page: "inspection report: attention, filters, position embeddings",
            self.out / "attention.png": "patches, attention rollout and predictions",
            self.out: f'the model: vitrail.load("{self.out}") in Python',
        }
        rows = [(str(path), text) for path, text in files.items()]
        print(*table(rows, "lw", indent=2), sep="\n")
        log("\nNext, your own images, in one folder per class:")
        log("  vitrail check images/")
        log("  vitrail train images/ --minutes 10")
        log("  vitrail finetune images/ --minutes 5")
        log("  vitrail evaluate runs/images images/")
        return 0
