"""`vitrail teach`: classes from a handful of pictures, in seconds."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.cli.arguments import DataOptions, ModelReference, Preset
from vitrail.cli.progress import Progress
from vitrail.cli.text import paragraph, printable
from vitrail.errors import ConfigError
from vitrail.formatting import duration, percent

if TYPE_CHECKING:
    from vitrail.probing.teaching import Taught

CLASS = tyro.conf.arg(metavar="CLASS=PICTURES")


@dataclass(frozen=True, kw_only=True)
class Teach(DataOptions):
    """Add classes to a model, or replace some, by a few pictures of each."""

    model: ModelReference
    """A bundle, a file of weights, or hf:owner/name."""
    classes: Annotated[tyro.conf.Positional[tuple[str, ...]], CLASS]
    """thumb=folder, or thumb=picture.jpg; the same class may come more than once."""
    out: Path | None = None
    """The bundle to write; without it, a bundle that remembers what it has seen is changed."""
    using: str | None = None
    """A data set with pictures of the classes the model knows, where it does not remember any."""
    only: bool = False
    """Leave the classes behind that the model knows, and learn just these."""
    preprocessing: Preset = None
    overwrite: bool = False
    """Replace the model that --out holds."""
    device: str = ""
    """cpu, cuda, mps; chosen if not given."""
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> None:
        from vitrail.probing.teaching import teach

        places = as_places(self.classes)
        with Progress() as progress:
            taught = teach(
                self.model,
                places,
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
            return
        for line in report(taught):
            print(printable(line))


def as_places(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Each class and where its pictures are, of words such as thumb=folder."""
    places: dict[str, list[str]] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not (name.strip() and equals and place):
            raise ConfigError(f"{word!r} names no class with pictures; write thumb=folder")
        places.setdefault(name.strip(), []).append(place)
    return places


def report(taught: "Taught") -> Iterator[str]:
    for name, pictures in taught.pictures.items():
        how = "learned anew" if name in taught.replaced else "learned"
        yield f"{name}: {how} from {pictures:,} picture{'s' * (pictures != 1)}"
    for note in taught.notes:
        yield from paragraph(f"  note: {note}", 4)
    for name, why in taught.skipped.items():
        yield from paragraph(f"  not read: {name}: {why}", 4)
    yield f"it tells {len(taught.classes):,} classes apart now"
    if taught.accuracy is not None:
        right = percent(taught.accuracy)
        yield f"with each of its pictures left out in turn, {right} are right"
    yield f"done in {duration(taught.seconds)}: {taught.folder}"
