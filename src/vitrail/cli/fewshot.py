"""`vitrail fewshot`: accuracy of closed-form classifiers that see a few images per class.
`vitrail teach`: add classes from a few images, in seconds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitrail.cli.console import (
    Progress,
    log,
    log_stderr,
    note_lines,
    paragraph,
    print_json,
    print_lines,
    table,
)
from vitrail.cli.options import (
    DATA_HELP,
    BatchSize,
    DataOptions,
    DataReference,
    Device,
    Json,
    OptionalModel,
    Overwrite,
    Preset,
    Workers,
    default_model,
    options_of,
)
from vitrail.errors import ConfigError
from vitrail.formatting import duration, percent, shell_command

if TYPE_CHECKING:
    from vitrail.data.provenance import DataProvenance
    from vitrail.models.vit import Model
    from vitrail.probing.features import Features
    from vitrail.probing.fewshot import Trial


@dataclass(frozen=True, kw_only=True)
class Fewshot(DataOptions):
    """Fit classifiers to a few images per class, and report their test accuracy."""

    model: OptionalModel = ""
    data: DataReference = ""
    shots: tuple[int | Literal["all"], ...] = (1, 5, 10, 25)
    """Training images per class: numbers, or all."""
    seeds: int = 3
    """Number of random draws of the training images."""
    probes: tuple[Literal["ridge", "neighbors", "logistic"], ...] = ("ridge",)
    """Classifiers to fit."""
    l2: float = 1024.0
    """L2 penalty of the ridge probe. A second column uses the best one by leave-one-out."""
    pixels: bool = False
    """Add a baseline that uses raw pixels as features."""
    image_size: int | None = None
    """Image size in pixels, if not the model's; position embeddings are interpolated."""
    preprocessing: Preset = None
    out: Path | None = None
    """Write a bundle with a ridge probe as its head: largest number of shots, best penalty."""
    overwrite: Overwrite = False
    cache: bool = True
    """Cache the features on disk."""
    batch_size: BatchSize = 64
    workers: Workers = None
    device: Device = ""
    json: Json = False

    def run(self) -> None:
        from vitrail import distributed
        from vitrail.checkpoints.bundle import check_overwrite
        from vitrail.checkpoints.load import load
        from vitrail.checkpoints.metadata import get_metadata
        from vitrail.data.provenance import DataProvenance
        from vitrail.probing.features import features_of, pixels_of
        from vitrail.probing.fewshot import check_protocol, open_pair, try_shots

        check_protocol(self.shots, self.seeds, self.probes, self.l2)
        if not self.model:
            raise ConfigError(f"no dataset given; {DATA_HELP[0].lower()}{DATA_HELP[1:-1]}")
        if not self.data:  # the only argument is the dataset
            model = default_model("vitrail fewshot {} DATA")
            replace(self, model=model, data=self.model).run()
            return
        if self.out is not None:
            check_overwrite(self.out, overwrite=self.overwrite)
        device = distributed.init(self.device)
        chosen = options_of(self, "image_size", "preprocessing")
        model = load(self.model, log=log_stderr, **chosen).to(device)
        origin = DataProvenance.from_dict(get_metadata(model).provenance)
        sources = open_pair(self.data, origin)
        loading, features = options_of(self, "cache", "batch_size", "workers"), []
        for split, source in zip(("training", "test"), sources, strict=True):
            with Progress(f"{split} images") as progress:
                shown = progress if distributed.is_main() else None
                features.append(features_of(model, source, progress=shown, **loading))
        train, test = features
        protocol = {"shots": self.shots, "seeds": self.seeds}
        trials = list(try_shots(train, test, **protocol, probes=self.probes, l2=self.l2))
        if self.pixels:  # one more column: ridge with the best l2
            with Progress("images (raw pixels)") as progress:
                options = {"channels": model.config.channels, "workers": self.workers}
                options["progress"] = progress if distributed.is_main() else None
                pixels = [pixels_of(source, **options) for source in sources]
            for row, baseline in zip(trials, try_shots(*pixels, **protocol), strict=True):
                row.append(baseline[-1]._replace(probe="raw pixels"))
        if not distributed.is_main():
            return
        notes = list(sources[0].notes)
        most = max((n for n in self.shots if isinstance(n, int)), default=0)
        counts = {x: int((train.labels == n).sum()) for n, x in enumerate(train.classes)}
        fewest = min(counts, key=lambda name: counts[name])
        if counts[fewest] < most:
            few = f"{fewest!r} has only {counts[fewest]:,} training images"
            notes.append(f"{few}; all of them are used")
        if self.out is not None:
            record = DataProvenance.of(self.data, sources[0])
            samples = tuple(dict.fromkeys((*record.samples, *origin.samples)))
            notes += self.write(model, train, self.out, replace(record, samples=samples))
        if self.json:
            result = {
                "model": self.model,
                "data": self.data,
                "features": train.values.shape[1],
                "pictures": {"train": len(train), "test": len(test)},
                "skipped": train.skipped | test.skipped,
                "trials": [trial.to_dict() for row in trials for trial in row],
                "notes": list(notes),
                "bundle": self.out and str(self.out),
            }
            print_json(result)
            return
        counts = f"{len(train):,} training images, {len(test):,} test images"
        print_lines(paragraph(f"{self.model} on {self.data}: {counts}"))
        print_lines(report(train, test, trials, notes))
        if self.out is not None:
            print(f"\ndone: {self.out}")
            log(f"Next:\n  {shell_command('evaluate', self.out, self.data)}")
            log(f"  {shell_command('teach', self.out, 'another-class=folder-of-images')}")

    def write(
        self, model: "Model", train: "Features", out: Path, record: "DataProvenance"
    ) -> list[str]:
        """Write the bundle of the largest number of shots; return notes about it."""
        from vitrail.checkpoints.save import save
        from vitrail.probing.fewshot import draw
        from vitrail.probing.teach import NOT_REMEMBERED, ProbeMemory, fit_head, saving_memory

        most = "all" if "all" in self.shots else max(n for n in self.shots if n != "all")
        rows = draw(train.labels, len(train.classes), most, seed=0)
        memory = ProbeMemory.of(model, train.values[rows], train.labels[rows], train.classes)
        headed, memory, _ = fit_head(model, memory)
        about = {"shots": most, "from": self.model}
        with saving_memory(memory, out) as saved:
            save(headed, out, provenance=record.to_dict() | about)
        return [] if saved else [NOT_REMEMBERED]


def with_interval(trial: "Trial") -> str:
    """`61.2 ± 3.0 %`: the mean over draws and the half-width of its 95 % CI."""
    if trial.interval is None:
        return percent(trial.mean)
    half = max(trial.mean - trial.interval[0], trial.interval[1] - trial.mean)
    return f"{100 * trial.mean:.1f} ± {100 * half:.1f} %"


def report(
    train: "Features", test: "Features", trials: list[list["Trial"]], notes: Sequence[str]
) -> Iterator[str]:
    origin = "cached" if train.cached and test.cached else "computed"
    yield f"  {len(train.classes):,} classes, {train.values.shape[1]:,} features ({origin})"
    yield from note_lines(notes, train.skipped | test.skipped)
    yield ""
    rows = [[str(row[0].shots), *map(with_interval, row)] for row in trials]
    head = ["shots", *(trial.probe for trial in trials[0])]
    yield from table(rows, "r" * len(head), head)
    yield ""
    yield "Test accuracy: mean over draws ± half-width of its 95 % CI."
    for row in trials:
        for trial in row:
            if trial.probe == "ridge, best":
                low, high = min(trial.l2), max(trial.l2)
                values = f"{low:g}" if low == high else f"{low:g} to {high:g}"
                yield f"  best l2 by leave-one-out, shots={trial.shots}: {values}"


@dataclass(frozen=True, kw_only=True)
class Teach(DataOptions):
    """Add classes to a model, or replace classes, from a few images of each."""

    model: OptionalModel = ""
    classes: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="CLASS=IMAGES")
    ] = ()
    """thumb=folder or thumb=image.jpg; repeat a class to add more images."""
    out: Path | None = None
    """Bundle to write. Without it, a bundle that stores its training statistics is updated."""
    using: str | None = None
    """Dataset with images of the existing classes, for a model that stores no statistics of them;
    or probe.safetensors of an exported page."""
    only: bool = False
    """Drop the model's existing classes."""
    preprocessing: Preset = None
    overwrite: Overwrite = False
    device: Device = ""
    json: Json = False

    def run(self) -> None:
        from vitrail.probing.teach import teach

        images: dict[str, list[str]] = {}
        model, classes = self.model, self.classes
        if not model or ("=" in model and not Path(model).exists()):  # it is the first class
            classes = (*filter(None, [model]), *classes)
            model = default_model("vitrail teach {} CLASS=IMAGES")
        for word in classes:
            name, equals, path = word.partition("=")
            if not (name.strip() and equals and path):
                raise ConfigError(f"{word!r} is not CLASS=IMAGES, such as thumb=folder")
            images.setdefault(name.strip(), []).append(path)
        with Progress() as progress:
            taught = teach(
                model,
                images,
                self.out,
                progress=progress,
                **options_of(self, "using", "only", "preprocessing", "overwrite", "device"),
            )
        if self.json:
            print_json(taught._asdict() | {"folder": str(taught.folder)})
            return
        for name, count in taught.pictures.items():
            verb = "replaced" if name in taught.replaced else "added"
            print_lines([f"{name}: {verb}, {count:,} image{'s' * (count != 1)}"])
        print_lines(note_lines(taught.notes))
        for name, reason in taught.skipped.items():
            print_lines(paragraph(f"  unreadable: {name}: {reason}", 4))
        accuracy = ""
        if taught.accuracy is not None:
            accuracy = f", leave-one-out accuracy {percent(taught.accuracy)}"
        balanced = taught.balanced_accuracy
        if balanced is not None and not math.isclose(balanced, taught.accuracy or 0.0):
            accuracy += f", balanced {percent(balanced)}"
        print(f"{len(taught.classes):,} classes{accuracy}")
        print(f"done in {duration(taught.seconds)}: {taught.folder}")
