"""Pictures to try: some test pictures of the data that a model was trained on."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.checkpoints.metadata import Metadata
from vitrail.data.headers import read_header
from vitrail.data.samples import LabelSets, Source
from vitrail.data.sources import judged_split, open_source
from vitrail.data.thumbnails import thumbnail, to_jpeg, to_png
from vitrail.errors import DataError, VitrailError
from vitrail.serving.settings import Settings

MOST = 12
LARGEST = 2**18  # bytes of a picture that is sent as it is
SIDE = 1024  # pixels of one that is made smaller
NONE = "none"
TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "WebP": "image/webp"}


class Example(NamedTuple):
    """One picture, encoded as browsers can show it, and what it is."""

    label: str
    data: bytes
    media_type: str


def given(settings: Settings, reference: str) -> str:
    """What pictures to try are taken from; empty for a model's own data.

    A model says itself which data that is. So those are shown only of a model on this machine,
    and only to this machine, unless they are named.
    """
    if settings.examples:
        return settings.examples
    local = not is_remote(reference) and Path(reference).expanduser().exists()
    return "" if local and settings.is_loopback else NONE


def find_examples(metadata: Metadata, given: str) -> list[Example]:
    """Pictures of `given`, or of a model's own data if that is on this machine.

    Where nothing was asked for, nothing is fetched and nothing is an error.
    """
    own = metadata.provenance.get("data")
    reference = given or (own if isinstance(own, str) else "")
    if reference in ("", NONE) or (not given and ("://" in reference or is_remote(reference))):
        return []
    try:
        source = open_source(reference, judged_split(reference) or "all")
        return [found for row in spread(source, MOST) if (found := example(source, row))]
    except (VitrailError, OSError):
        if given:
            raise
        return []


def is_remote(reference: str) -> bool:
    return reference.startswith("hf:")


def spread(source: Source, most: int) -> list[int]:
    """Up to `most` rows, in turn from all classes, of each from its beginning to its end."""
    labels = source.labels()
    if isinstance(labels, LabelSets):
        first = np.array([own[0] if own else -1 for own in labels])
    else:
        first = np.asarray(labels)
    classes = np.unique(first)
    if len(classes) > most:
        classes = classes[np.linspace(0, len(classes) - 1, most).astype(int)]
    each = -(-most // max(1, len(classes)))
    rows = []
    for number in classes:
        own = np.flatnonzero(first == number)
        rows.append(own[np.linspace(0, len(own) - 1, min(each, len(own))).astype(int)].tolist())
    turns = [own[turn] for turn in range(each) for own in rows if turn < len(own)]
    return turns[:most]


def example(source: Source, row: int) -> Example | None:
    """One picture; None if it cannot be read."""
    try:
        sample = source[row]
        numbers = sample.label if isinstance(sample.label, tuple) else (sample.label,)
        label = ", ".join(source.classes[number] for number in numbers)
        if isinstance(sample.data, bytes) and len(sample.data) <= LARGEST:
            kind = TYPES.get(read_header(sample.data).format)
            if kind is not None:
                return Example(label, sample.data, kind)
    except DataError:
        return None
    image = thumbnail(source, row, SIDE, enlarge=False)
    if image is None:
        return None
    small = isinstance(sample.data, np.ndarray)
    return Example(
        label, *((to_png(image), "image/png") if small else (to_jpeg(image), "image/jpeg"))
    )
