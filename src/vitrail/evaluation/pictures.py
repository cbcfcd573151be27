"""Which pictures a model is judged by: none that it has learned from, as far as that is known."""

from collections.abc import Iterator
from os import PathLike

from vitrail.checkpoints.metadata import Metadata
from vitrail.data.datasets import (
    ALL,
    Dataset,
    ImageDataset,
    Splits,
    canonical_split,
    evaluation_split,
    open_dataset,
)
from vitrail.data.provenance import DataProvenance, contains_any, fingerprint
from vitrail.formatting import comma_list

APART = ("val", "test")  # what models commonly do not learn from
WORSE = "new ones will do worse"


def open_part(
    data: Dataset | str | PathLike[str], split: str | None, metadata: Metadata
) -> tuple[Dataset, list[str]]:
    """The pictures to judge by, and what should be known about the choice.

    A set that the model has learned from is divided as it was then.
    """
    if not isinstance(data, str | PathLike):
        return data, []
    origin = DataProvenance.from_dict(metadata.provenance)
    splits = origin.splits_for(data)
    if split is None:
        split = usual_split(data, splits)
    source = open_dataset(data, split, splits=splits)
    notes = [f"split {split}", *source.notes]
    notes += doubts(data, canonical_split(split), source, origin, own=splits is not None)
    return source, [*notes, *lessons(source, origin)]


def usual_split(data: str | PathLike[str], splits: Splits | None) -> str:
    """test, or val; all of a set that states neither and that the model has not learned from.

    `splits` is how a set was divided that it has learned from.
    """
    stated = open_dataset(data, ALL).index
    if stated.split_ids is None and splits is None:
        return ALL
    kept_apart = evaluation_split(data, splits=splits)
    return kept_apart or (ALL if stated.split_ids is None else stated.split_names[0])


def doubts(
    data: str | PathLike[str],
    split: str,
    source: ImageDataset,
    origin: DataProvenance,
    *,
    own: bool,
) -> Iterator[str]:
    """A note if the model has, or may have, learned from pictures of this split.

    `own` is a set that it has learned from the train split of.
    """
    stated = split == ALL or split in source.index.split_names
    if fingerprint(source) == origin.fingerprint:
        yield "these are the very pictures that the model has learned from"
    elif contains_any(source, origin.samples) or (split not in APART and origin.is_at(data)):
        yield "the model has learned from some of these pictures"
    elif own and not stated:
        train = open_dataset(data, "train", splits=origin.splits)
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


def lessons(source: ImageDataset, origin: DataProvenance) -> Iterator[str]:
    """A note if classes of the data were taught by pictures that are not recorded."""
    if taught := [name for name in origin.taught if name in source.classes]:
        yield (
            f"the pictures that taught {comma_list(taught, quoted=True)} are not recorded; if the "
            f"model has learned from some of these, {WORSE}"
        )
