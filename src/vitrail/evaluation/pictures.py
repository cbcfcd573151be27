"""Which pictures a model is judged by: none that it has learned from, as far as that is known."""

from collections.abc import Iterator
from os import PathLike

from vitrail.checkpoints.metadata import Metadata
from vitrail.data.origin import Origin, from_provenance, holds_some
from vitrail.data.samples import Samples, Source
from vitrail.data.sources import ALL, fingerprint, judged_split, open_source
from vitrail.data.splits import Splits, canonical
from vitrail.formatting import comma_list

APART = ("val", "test")  # what models commonly do not learn from
WORSE = "new ones will do worse"


def open_part(
    data: Source | str | PathLike[str], split: str | None, metadata: Metadata
) -> tuple[Source, list[str]]:
    """The pictures to judge by, and what should be known about the choice.

    A set that the model has learned from is divided as it was then.
    """
    if not isinstance(data, str | PathLike):
        return data, []
    origin = from_provenance(metadata.provenance)
    splits = origin.division(data)
    if split is None:
        split = usual_split(data, splits)
    source = open_source(data, split, splits=splits)
    notes = [f"split {split}", *source.notes]
    notes += doubts(data, canonical(split), source, origin, own=splits is not None)
    return source, [*notes, *lessons(source, origin)]


def usual_split(data: str | PathLike[str], splits: Splits | None) -> str:
    """test, or val; all of a set that states neither and that the model has not learned from.

    `splits` is how a set was divided that it has learned from.
    """
    stated = open_source(data, ALL).collection
    if stated.split is None and splits is None:
        return ALL
    kept_apart = judged_split(data, splits=splits)
    return kept_apart or (ALL if stated.split is None else stated.split_names[0])


def doubts(
    data: str | PathLike[str], split: str, source: Samples, origin: Origin, *, own: bool
) -> Iterator[str]:
    """A note if the model has, or may have, learned from pictures of this split.

    `own` is a set that it has learned from the train split of.
    """
    stated = split == ALL or split in source.collection.split_names
    if fingerprint(source) == origin.fingerprint:
        yield "these are the very pictures that the model has learned from"
    elif holds_some(source, origin.samples) or (split not in APART and origin.is_at(data)):
        yield "the model has learned from some of these pictures"
    elif own and not stated:
        train = open_source(data, "train", splits=origin.splits)
        if fingerprint(train) != origin.fingerprint:
            yield (
                "the train part is not exactly what the model has learned from; a few of these "
                "pictures may have been in it"
            )
    elif split not in APART and not origin.samples:
        yield (
            "what the model has learned from is not recorded; if some of these pictures were "
            f"among it, {WORSE}"
        )


def lessons(source: Samples, origin: Origin) -> Iterator[str]:
    """A note if classes of the data were taught by pictures that are not recorded."""
    if taught := [name for name in origin.taught if name in source.classes]:
        yield (
            f"the pictures that taught {comma_list(taught, quoted=True)} are not recorded; if the "
            f"model has learned from some of these, {WORSE}"
        )
