"""`vitrail inspect`: what a model has learned and what it looks at, as pictures and a page."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitrail.cli.arguments import DataOptions, ModelReference, Preset
from vitrail.cli.progress import Progress
from vitrail.cli.text import aside, paragraph, printable
from vitrail.errors import ConfigError
from vitrail.training.recipes import is_run

if TYPE_CHECKING:
    from vitrail.inspection.findings import Inspection
    from vitrail.models.vit import Model

Method = Literal["rollout", "last layer", "gradient rollout", "relevance"]


@dataclass(frozen=True, kw_only=True)
class Inspect(DataOptions):
    """Look inside a model: attention, filters, positions, and whether the maps are true."""

    model: ModelReference
    """A bundle, a file of weights, or hf:owner/name."""
    pictures: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[PICTURES]")
    ] = ()
    """Files, or folders of them; without any, some of the data are taken."""
    out: Path = Path("inspection")
    """The folder to write report.html, pictures and arrays into."""
    data: str | None = None
    """A data set: its test pictures for what is averaged. Without it, the one of a bundle's
    training, if it is there."""
    images: int = 128
    """Pictures that attention is averaged over."""
    methods: tuple[Method, ...] | None = None
    """Which maps; all of them if not given."""
    classes: tuple[str, ...] = ()
    """Classes to ask about in each picture, in place of the likeliest."""
    layers: tuple[int, ...] = ()
    """Layers whose attention maps of each picture go into arrays.npz; -1 is the last."""
    fuse: Literal["mean", "max", "min"] = "mean"
    """How rollout joins heads."""
    discard: float = 0.0
    """Share of the smallest attention weights that rollout leaves out."""
    score: bool = False
    """Test whether the maps tell the truth: insertion, deletion, random weights."""
    preprocessing: Preset = None
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> None:
        from vitrail.checkpoints.bundle import contains_model
        from vitrail.checkpoints.load import load
        from vitrail.inspection.api import inspect_model
        from vitrail.inspection.folder import write_folder

        if is_run(self.out) or contains_model(self.out):
            raise ConfigError(f"{self.out} holds a model and its own report; name another --out")
        model = load(self.model, preprocessing=self.preprocessing, log=aside)
        data, note = (self.data, "") if self.data else usual_data(model)
        progress = Progress()

        def tell(what: str, done: int, total: int) -> None:
            progress.what = f"images ({what})"
            progress(done, total)

        with progress:
            found = inspect_model(
                model,
                self.pictures,
                data=data,
                images=self.images,
                methods=self.methods,
                classes=self.classes,
                layers=self.layers,
                fuse=self.fuse,
                discard=self.discard,
                score=self.score,
                progress=tell,
            )
        written = list(write_folder(self.out, found))
        if self.json:
            print(json.dumps(as_json(found) | {"written": [str(p) for p in written]}, indent=1))
            return
        for line in report(found, [note] if note else []):
            print(printable(line))
        print(f"done: {written[-1]}")


def usual_data(model: "Model") -> tuple[str | None, str]:
    """The data that a bundle was trained on, if it can be opened; and what to say about that."""
    from vitrail.checkpoints.metadata import get_metadata
    from vitrail.data.datasets import evaluation_split
    from vitrail.errors import DataError

    reference = get_metadata(model).provenance.get("data")
    try:
        if isinstance(reference, str):
            evaluation_split(reference)
            return reference, f"pictures come from {reference}, which the model was trained on"
    except DataError:
        pass
    return None, ""


def report(found: "Inspection", notes: list[str]) -> Iterator[str]:
    """The numbers for people, in 80 columns."""
    yield found.title
    for note in (*notes, *found.notes):
        yield from paragraph(f"  note: {note}", 4)
    for look in found.looks:
        said = ", ".join(f"{name} {100 * chance:.0f} %" for name, chance in look.classes[:3])
        label = f" ({look.label})" if look.label else ""
        yield from paragraph(f"  {look.name}{label}: {said}", 4)
    if (study := found.study) is not None:
        yield ""
        yield f"attention over {study.images:,} pictures: layer, distance in pixels, entropy"
        distance = next(iter(study.distance.values()))
        for layer, (far, wide) in enumerate(zip(distance, study.entropy, strict=True)):
            spread = f"{far.min():.1f} to {far.max():.1f}"
            yield f"  {layer:>3}  {spread:>16}  {100 * wide.min():.0f} to {100 * wide.max():.0f} %"
    if (trust := found.trust) is not None:
        yield ""
        title = f"explanations on {trust.images:,} pictures"
        yield f"{title:32}  insertion  deletion"
        for method, curves in trust.curves.items():
            areas = f"{curves.insertion_area:>9.3f}  {curves.deletion_area:>8.3f}"
            yield f"  {method:30}  {areas}"
    yield ""


def as_json(found: "Inspection") -> dict[str, object]:
    """What is short enough to be printed; arrays.npz has the rest."""
    told: dict[str, object] = {"model": found.title, **found.facts}
    told["pictures"] = [
        {"name": look.name, "label": look.label, "classes": dict(look.classes)}
        for look in found.looks
    ]
    if (study := found.study) is not None:
        told["images"] = study.images
        told["distance"] = {name: values.tolist() for name, values in study.distance.items()}
        told["entropy"] = study.entropy.tolist()
    if (trust := found.trust) is not None:
        told["insertion"] = {name: c.insertion_area for name, c in trust.curves.items()}
        told["deletion"] = {name: c.deletion_area for name, c in trust.curves.items()}
        told["sanity"] = dict(trust.sanity)
    return told | {"notes": list(found.notes)}
