"""ImageNet-ReaL (Beyer et al. 2020, arXiv:2006.07159): what ImageNet's pictures really show.

A list of 50,000 entries, one for each validation picture by its number, each the classes that
people see in it. A picture in which they see none of the thousand is left out.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.errors import DataError
from vitrail.evaluation.findings import Predictions
from vitrail.evaluation.matching import Match

NUMBER = re.compile(r"val_(\d{8})\.")


def real_hits(
    entries: Sequence[Sequence[int]], matched: Match, predictions: Predictions
) -> np.ndarray:
    """For each picture that has real labels whether the likeliest class is one of them: bool.

    Labels are numbers of the model's classes, in the order of ImageNet.
    """
    best = predictions.logits.argmax(1)
    if matched.columns is not None:
        best = np.asarray(matched.columns)[best]
    best = best.tolist()
    hits = []
    for row, index in enumerate(predictions.indices.tolist()):
        name = matched.source.name(index)
        found = NUMBER.search(name)
        if found is None or not 1 <= int(found[1]) <= len(entries):
            raise DataError(
                f"{name!r} is no ImageNet validation picture, such as "
                "ILSVRC2012_val_00000001.JPEG, so --real has no labels for it"
            )
        if labels := entries[int(found[1]) - 1]:
            hits.append(best[row] in labels)
    if not hits:
        raise DataError("the real labels are of other pictures than these: none has one")
    return np.array(hits)


def read_real(path: Path) -> list[list[int]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as real labels: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, list) for entry in entries):
        raise DataError(f"{path} must be a list with a list of classes for each picture")
    return entries
