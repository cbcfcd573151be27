"""`vitrail inspect`: attention, filters, position embeddings and explanations of a model."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitrail.cli.console import (
    Progress,
    log_stderr,
    note_lines,
    paragraph,
    print_json,
    print_lines,
    table,
)
from vitrail.cli.options import DataOptions, Json, ModelReference, Preset, options_of
from vitrail.errors import ConfigError, DataError
from vitrail.training.recipes import is_run

if TYPE_CHECKING:
    from vitrail.inspection.inspect import Inspection

Method = Literal["rollout", "last layer", "gradient rollout", "relevance"]


@dataclass(frozen=True, kw_only=True)
class Inspect(DataOptions):
    """Report on a model: attention, filters, position embeddings, explanations."""

    model: ModelReference
    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[IMAGES]")] = ()
    """Image files or folders (default: some images of the dataset)."""
    out: Path = Path("inspection")
    """Folder for report.html, figures and arrays."""
    data: str | None = None
    """Dataset for statistics over its test images (default: the training data of a bundle, if it is
    available)."""
    images: int = 128
    """Number of images that attention statistics are averaged over."""
    methods: tuple[Method, ...] | None = None
    """Explanation methods (default: all)."""
    classes: tuple[str, ...] = ()
    """Classes to explain in each image (default: the most probable ones)."""
    layers: tuple[int, ...] = ()
    """Layers whose attention maps are saved to arrays.npz; -1 is the last."""
    fuse: Literal["mean", "max", "min"] = "mean"
    """Rollout: how heads are combined."""
    discard: float = 0.0
    """Rollout: fraction of attention weights to drop, smallest first."""
    score: bool = False
    """Measure how faithful the explanations are: insertion, deletion, randomized weights."""
    preprocessing: Preset = None
    json: Json = False

    def run(self) -> None:
        from vitrail.checkpoints.bundle import contains_model
        from vitrail.checkpoints.load import load
        from vitrail.checkpoints.metadata import get_metadata
        from vitrail.data.datasets import evaluation_split
        from vitrail.inspection.inspect import inspect_model
        from vitrail.reports.inspection import write_inspection

        if is_run(self.out) or contains_model(self.out):
            raise ConfigError(
                f"{self.out} contains a model with its own report; pass another --out"
            )
        model = load(self.model, preprocessing=self.preprocessing, log=log_stderr)
        data, notes = self.data, []
        recorded = get_metadata(model).local_data
        if data is None and recorded:
            with suppress(DataError):  # it may not be here
                evaluation_split(recorded)
                data = recorded
                notes = [f"statistics over images of {recorded}, the model's training data"]
        with Progress() as progress:
            result = inspect_model(
                model,
                self.paths,
                data=data,
                progress=lambda what, *done: progress(*done, what=f"images ({what})"),
                num_images=self.images,
                **options_of(self, "methods", "classes", "layers"),
                **options_of(self, "fuse", "discard", "score"),
            )
        written = write_inspection(self.out, result)
        if self.json:
            # Large arrays are in arrays.npz.
            values: dict[str, object] = {"model": result.title, **result.facts}
            if "pooling" in result.facts:
                values["what the head reads"] = result.facts["pooling"]  # the key of 0.1
            values["pictures"] = [
                {"name": image.name, "label": image.label, "classes": dict(image.predictions)}
                for image in result.images
            ]
            if (stats := result.attention) is not None:
                values["images"] = stats.images
                values["distance"] = {
                    name: array.tolist() for name, array in stats.distance.items()
                }
                values["entropy"] = stats.entropy.tolist()
            if (scores := result.faithfulness) is not None:
                values["insertion"] = {name: c.insertion_area for name, c in scores.curves.items()}
                values["deletion"] = {name: c.deletion_area for name, c in scores.curves.items()}
                values["sanity"] = dict(scores.sanity)
            values |= {"notes": [*notes, *result.notes], "written": [str(p) for p in written]}
            print_json(values)
            return
        print_lines(report(result, notes))
        print(f"done: {written[-1]}")


def report(result: "Inspection", notes: list[str]) -> Iterator[str]:
    yield result.title
    yield from note_lines((*notes, *result.notes))
    for image in result.images:
        classes = ", ".join(f"{name} {100 * p:.0f} %" for name, p in image.predictions[:3])
        label = f" ({image.label})" if image.label else ""
        yield from paragraph(f"  {image.name}{label}: {classes}", 4)
    if (stats := result.attention) is not None:
        yield ""
        yield f"attention over {stats.images:,} images: range over heads"
        distance = next(iter(stats.distance.values()))
        rows = [
            (
                str(layer),
                f"{pixels.min():.1f} to {pixels.max():.1f}",
                f"{100 * entropy.min():.0f} to {100 * entropy.max():.0f} %",
            )
            for layer, (pixels, entropy) in enumerate(zip(distance, stats.entropy, strict=True))
        ]
        yield from table(rows, "rrr", ("layer", "distance (pixels)", "entropy"), indent=2)
    if (scores := result.faithfulness) is not None:
        yield ""
        yield f"faithfulness on {scores.images:,} images"
        rows = [
            (method, f"{curves.insertion_area:.3f}", f"{curves.deletion_area:.3f}")
            for method, curves in scores.curves.items()
        ]
        yield from table(rows, "lrr", ("method", "insertion", "deletion"), indent=2)
    yield ""
