"""What a file says about itself: everything that travels with the weights."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from vitrail import __version__
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import Config, from_dict, to_dict
from vitrail.models.registry import name_of
from vitrail.models.vit import Model


class Description(NamedTuple):
    """A file's model, what is known beside its weights, and whether they are rounded."""

    config: Config
    metadata: Metadata
    int8: bool


def about(model: Model, *, int8: bool = False) -> dict[str, Any]:
    """The description of a model as plain values."""
    metadata = get_metadata(model)
    return {
        "vitrail": __version__,
        "name": name_of(model.config),
        "model": to_dict(model.config),
        **metadata.to_dict(),
        "multi_label": metadata.multi_label,
        "int8": int8,
    }


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Each value as a text of JSON: ONNX files hold texts by name."""
    return {key: json.dumps(value) for key, value in values.items()}


def from_texts(texts: Mapping[str, str], where: str) -> Description:
    """What `as_texts` made of a description, in the file `where`."""
    if "vitrail" not in texts:
        raise CheckpointError(
            f"{where} is an ONNX file, but not of vitrail: it does not say how pictures are "
            "prepared and what the classes are called; make one with `vitrail export`"
        )
    try:
        values = {key: json.loads(text) for key, text in texts.items()}
        config = from_dict(values["model"])
        return Description(config, Metadata.from_dict(values), bool(values["int8"]))
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        ConfigError,
    ) as error:
        raise CheckpointError(f"{where} describes no possible model: {error}") from None
