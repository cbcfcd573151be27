"""`vitrail teach`: add classes from a few images, in seconds."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.cli.console import Progress, paragraph, print_lines
from vitrail.cli.options import DataOptions, Device, Json, ModelReference, Preset
from vitrail.errors import ConfigError
from vitrail.formatting import duration, percent

if TYPE_CHECKING:
    from vitrail.probing.teach import TeachResult


@dataclass(frozen=True, kw_only=True)
class Teach(DataOptions):
    """Add classes to a model, or replace classes, from a few images of each."""

    model: ModelReference
    classes: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="CLASS=IMAGES")]
    """thumb=folder or thumb=image.jpg; repeat a class to add more images."""
    out: Path | None = None
    """Bundle to write. Without it, a bundle that stores its training statistics is updated."""
    using: str | None = None
    """Dataset with images of the model's existing classes, if it stores no statistics of them."""
    only: bool = False
    """Drop the model's existing classes."""
    preprocessing: Preset = None
    overwrite: bool = False
    """Replace the model in --out."""
    device: Device = ""
    json: Json = False

    def run(self) -> None:
        from vitrail.probing.teach import teach

        images: dict[str, list[str]] = {}
        for word in self.classes:
            name, equals, path = word.partition("=")
            if not (name.strip() and equals and path):
                raise ConfigError(f"{word!r} is not CLASS=IMAGES, such as thumb=folder")
            images.setdefault(name.strip(), []).append(path)
        with Progress() as progress:
            taught = teach(
                self.model,
                images,
                self.out,
                using=self.using,
                only=self.only,
                preprocessing=self.preprocessing,
                overwrite=self.overwrite,
                device=self.device,
                progress=progress,
            )
        if self.json:
            print(json.dumps(asdict(taught) | {"folder": str(taught.folder)}, indent=1))
        else:
            print_lines(report(taught))


def report(taught: "TeachResult") -> Iterator[str]:
    for name, count in taught.pictures.items():
        verb = "replaced" if name in taught.replaced else "added"
        yield f"{name}: {verb}, {count:,} image{'s' * (count != 1)}"
    for note in taught.notes:
        yield from paragraph(f"  note: {note}", 4)
    for name, reason in taught.skipped.items():
        yield from paragraph(f"  unreadable: {name}: {reason}", 4)
    accuracy = ""
    if taught.accuracy is not None:
        accuracy = f", leave-one-out accuracy {percent(taught.accuracy)}"
    yield f"{len(taught.classes):,} classes{accuracy}"
    yield f"done in {duration(taught.seconds)}: {taught.folder}"
