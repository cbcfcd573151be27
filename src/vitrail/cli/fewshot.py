"""`vitrail fewshot`: what a model makes of a few pictures of each class."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitrail.cli.arguments import DataOptions, DataReference, ModelReference, Preset
from vitrail.cli.progress import Progress
from vitrail.cli.text import aside, paragraph, printable, tell
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.data.datasets import ImageDataset
    from vitrail.models.vit import Model
    from vitrail.probing.features import Features
    from vitrail.probing.shots import Trial

COLUMN = 14


@dataclass(frozen=True, kw_only=True)
class Fewshot(DataOptions):
    """Fit a classifier to a few pictures of each class, in closed form, and measure it."""

    model: ModelReference
    """A bundle, a file of weights, or hf:owner/name."""
    data: DataReference
    """A folder of class folders, a list, .tar or .npz files, builtin:sign-digits or another."""
    shots: tuple[int | Literal["all"], ...] = (1, 5, 10, 25)
    """Pictures of each class to learn from; all for all there are."""
    seeds: int = 3
    """Times that the pictures are drawn anew."""
    probes: tuple[Literal["ridge", "neighbors", "logistic"], ...] = ("ridge",)
    """What is fitted to the features."""
    l2: float = 1024.0
    """Ridge's penalty; the best one by leave-one-out is told beside it."""
    pixels: bool = False
    """Show what raw pixels in place of the model's features would give."""
    image_size: int | None = None
    """Pixels along each side, if not those of the model: its positions are stretched."""
    preprocessing: Preset = None
    out: Path | None = None
    """Write a bundle: the model with ridge, best, of the largest number of shots as its head."""
    overwrite: bool = False
    """Replace the model that --out holds."""
    cache: bool = True
    """Keep the features on disk, so that another call need not compute them."""
    batch_size: int = 64
    """Pictures at once."""
    workers: int | None = None
    """Processes that read pictures."""
    device: str = ""
    """cpu, cuda, mps; chosen if not given."""
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> None:
        from vitrail import distributed
        from vitrail.checkpoints.bundle import check_overwrite
        from vitrail.probing.shots import check_protocol, open_pair, try_shots

        check_protocol(self.shots, self.seeds, self.probes, self.l2)
        if self.out is not None:
            check_overwrite(self.out, overwrite=self.overwrite)
        try:
            sources = open_pair(self.data)
            model, train, test = self.look(sources)
            trials = list(
                try_shots(
                    train,
                    test,
                    shots=self.shots,
                    seeds=self.seeds,
                    probes=self.probes,
                    l2=self.l2,
                )
            )
            if self.pixels:
                self.add_pixels(model, sources, trials)
            if distributed.is_main():
                notes = [*sources[0].notes, *few_pictures(train, self.shots)]
                if self.out is not None:
                    notes += self.write(model, train, self.out, sources[0])
                self.tell(train, test, trials, notes)
        finally:
            distributed.shutdown()

    def look(
        self, sources: "tuple[ImageDataset, ImageDataset]"
    ) -> "tuple[Model, Features, Features]":
        """The model, and its features of the pictures to learn from and to be judged by."""
        from vitrail import distributed
        from vitrail.checkpoints.load import load
        from vitrail.probing.features import features_of

        device = distributed.init(self.device)
        model = load(
            self.model, image_size=self.image_size, preprocessing=self.preprocessing, log=aside
        ).to(device)
        found = []
        for part, source in zip(("training", "test"), sources, strict=True):
            with Progress(f"{part} images") as progress:
                features = features_of(
                    model,
                    source,
                    cache=self.cache,
                    batch_size=self.batch_size,
                    workers=self.workers,
                    progress=progress if distributed.is_main() else None,
                )
            found.append(features)
        return model, *found

    def add_pixels(
        self,
        model: "Model",
        sources: "tuple[ImageDataset, ImageDataset]",
        trials: list[list["Trial"]],
    ) -> None:
        """A column of what raw pixels give, by ridge with the best l2."""
        from vitrail import distributed
        from vitrail.probing.features import pixels_of
        from vitrail.probing.shots import try_shots

        channels = model.config.channels
        with Progress("images (raw pixels)") as progress:
            how = {"workers": self.workers, "progress": progress if distributed.is_main() else None}
            pair = [pixels_of(source, channels=channels, **how) for source in sources]
        for row, found in zip(
            trials, try_shots(*pair, shots=self.shots, seeds=self.seeds), strict=True
        ):
            row.append(replace(found[-1], probe="raw pixels"))

    def write(
        self, model: "Model", train: "Features", out: Path, source: "ImageDataset"
    ) -> list[str]:
        """The bundle of the largest number of shots; what should be known about it."""
        from vitrail.checkpoints.save import save
        from vitrail.data.provenance import DataProvenance
        from vitrail.probing.memory import memory_beside
        from vitrail.probing.shots import draw
        from vitrail.probing.teaching import FORGETFUL, learned

        most = "all" if "all" in self.shots else max(n for n in self.shots if n != "all")
        rows = draw(train.labels, len(train.classes), most, seed=0)
        headed, memory = learned(model, train.values[rows], train.labels[rows], train.classes)
        about = {"shots": most, "from": self.model}
        with memory_beside(memory, out) as kept:
            save(headed, out, provenance=DataProvenance.of(self.data, source).to_dict() | about)
        return [] if kept else [FORGETFUL]

    def tell(
        self,
        train: "Features",
        test: "Features",
        trials: list[list["Trial"]],
        notes: Sequence[str],
    ) -> None:
        if self.json:
            about = {
                "model": self.model,
                "data": self.data,
                "features": train.values.shape[1],
                "pictures": {"train": len(train), "test": len(test)},
                "skipped": train.skipped | test.skipped,
                "trials": [trial.to_dict() for row in trials for trial in row],
                "notes": list(notes),
                "bundle": self.out and str(self.out),
            }
            print(json.dumps(about, indent=1))
            return
        for line in self.report(train, test, trials, notes):
            print(printable(line))
        if self.out is not None:
            print(f"\ndone: {self.out}")
            tell(f"Next:\n  vitrail evaluate {self.out} {self.data}")
            tell(f"  vitrail teach {self.out} another-class=folder-of-pictures")

    def report(
        self,
        train: "Features",
        test: "Features",
        trials: Sequence[Sequence["Trial"]],
        notes: Sequence[str],
    ) -> Iterator[str]:
        counts = f"{len(train):,} pictures to draw from, {len(test):,} to judge by"
        yield from paragraph(f"{self.model} on {self.data}: {counts}")
        kept = "found on disk" if train.cached and test.cached else "computed"
        yield f"  {len(train.classes):,} classes, {train.values.shape[1]:,} features, {kept}"
        for note in notes:
            yield from paragraph(f"  note: {note}", 4)
        if skipped := train.skipped | test.skipped:
            name, why = next(iter(skipped.items()))
            yield from paragraph(f"  {len(skipped):,} could not be read, such as {name}: {why}", 4)
        yield ""
        yield f"{'shots':>5} " + "".join(f"{trial.probe:>{COLUMN}}" for trial in trials[0])
        for row in trials:
            yield f"{row[0].shots!s:>5} " + "".join(f"{cell(trial):>{COLUMN}}" for trial in row)
        yield ""
        yield "Accuracy on the test pictures, the mean over draws and its 95 % interval."
        for row in trials:
            for trial in row:
                if trial.probe == "ridge, best":
                    yield f"  best l2 by leave-one-out, shots {trial.shots}: {values(trial.l2)}"


def values(l2: Sequence[float]) -> str:
    """`16`, or `4 to 64`."""
    low, high = min(l2), max(l2)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def few_pictures(train: "Features", shots: Sequence[int | str]) -> Iterator[str]:
    """A note if some class has fewer pictures than were asked for."""
    most = max((count for count in shots if isinstance(count, int)), default=0)
    counts = {name: int((train.labels == n).sum()) for n, name in enumerate(train.classes)}
    fewest = min(counts, key=lambda name: counts[name])
    if counts[fewest] < most:
        yield f"{fewest!r} has {counts[fewest]:,} pictures only, and is learned from those"


def cell(trial: "Trial") -> str:
    """`81.3 ± 2.0 %`."""
    if trial.interval is None:
        return percent(trial.mean)
    half = max(trial.mean - trial.interval[0], trial.interval[1] - trial.mean)
    return f"{100 * trial.mean:.1f} ± {100 * half:.1f} %"
