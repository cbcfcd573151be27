"""`vitrail.export_model`: a model into a file that runs without vitrail."""

import time
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import get_args

from torch import nn

from vitrail.checkpoints.files import atomic_write
from vitrail.checkpoints.load import Reference, load
from vitrail.errors import ConfigError, unknown
from vitrail.evaluation.evaluate import Progress
from vitrail.export.guard import Cost, Data, measure, refuse
from vitrail.export.kinds import MOST_DROP, Target
from vitrail.export.programs import write_compiled, write_program
from vitrail.export.proof import (
    INT8_TOLERANCE,
    TOLERANCE,
    check_same,
    check_same_pixels,
    ready,
)
from vitrail.export.sessions import OnnxEngine, open_session
from vitrail.extras import require
from vitrail.models.config import MixerConfig, pair
from vitrail.models.registry import name_of
from vitrail.models.vit import Model

SUFFIXES: dict[Target, str] = {"onnx": ".onnx", "torch": ".pt2", "aotinductor": ".pt2"}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how it compares with the model."""

    path: Path
    to: Target
    model: str
    bytes: int
    difference: float  # from the model's logits and features, of the largest
    cost: Cost | None = None  # what int8 costs
    notes: tuple[str, ...] = ()
    seconds: float


def export_model(
    model: Model | Reference,
    out: str | PathLike[str],
    *,
    to: Target = "onnx",
    int8: bool = False,
    data: Data | None = None,
    max_drop: float = MOST_DROP,
    preprocessing: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a model so that it runs without vitrail, and prove that it is the same model.

    >>> export_model("runs/first", "first.onnx")  # any batch, any height and width
    >>> export_model("runs/first", "first-int8.onnx", int8=True, data="pictures")
    >>> export_model("runs/first", "first.pt2", to="torch")

    `int8` rounds weights: what that costs is measured on the test split of `data`, or of the
    pictures the model was trained with, and more than `max_drop` of the accuracy is refused. With
    `preprocessing` the file takes the pixels of a picture. `progress` hears how many pictures
    have been looked at. Nothing is written unless the export gives the model's numbers.
    """
    began = time.perf_counter()
    path = Path(out)
    check(path, to, int8=int8, preprocessing=preprocessing, data=data, max_drop=max_drop)
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists already; name another --out, or say --overwrite")
    model = ready(model if isinstance(model, nn.Module) else load(model))
    cost = measured(model, data, max_drop, progress) if int8 else None
    with atomic_write(path) as temporary:
        match to:
            case "onnx":
                difference = write_onnx(model, temporary, int8=int8, preprocessing=preprocessing)
            case "torch":
                difference = write_program(model, temporary)
            case "aotinductor":
                difference = write_compiled(model, temporary)
        size = temporary.stat().st_size
    return Exported(
        path=path,
        to=to,
        model=name_of(model.config),
        bytes=size,
        difference=difference,
        cost=cost,
        notes=(*notes_on(model, to, preprocessing), *(cost.notes if cost else ())),
        seconds=time.perf_counter() - began,
    )


def measured(model: Model, data: Data | None, max_drop: float, progress: Progress | None) -> Cost:
    """What int8 costs this model; too much is an error."""
    require("onnxruntime", "onnx", extra="export", feature="ONNX")
    from vitrail.export.onnx_file import to_onnx

    cost = measure(model, OnnxEngine(to_onnx(model, int8=True)), data, progress=progress)
    refuse(cost, max_drop)
    return cost


def write_onnx(model: Model, path: Path, *, int8: bool, preprocessing: bool) -> float:
    """Write the file once it is proved; how far it is from the model."""
    require("onnxruntime", "onnx", extra="export", feature="ONNX")
    from vitrail.export.onnx_file import to_onnx

    content = to_onnx(model, int8=int8, preprocessing=preprocessing)
    compare = check_same_pixels if preprocessing else check_same
    difference = compare(model, open_session(content), INT8_TOLERANCE if int8 else TOLERANCE)
    path.write_bytes(content)
    return difference


def check(
    path: Path, to: Target, *, int8: bool, preprocessing: bool, data: object, max_drop: float
) -> None:
    """Refuse what does not go together, before any work is done."""
    if to not in get_args(Target):
        raise unknown("target", to, get_args(Target))
    if path.suffix != SUFFIXES[to]:
        raise ConfigError(
            f"{path} does not end as a file for --to {to} does; "
            f"try {path.with_suffix(SUFFIXES[to])}"
        )
    if to != "onnx" and (int8 or preprocessing):
        what = "int8" if int8 else "preprocessing"
        raise ConfigError(f"{what} is for --to onnx, not {to}; leave one out")
    if data is not None and not int8:
        raise ConfigError("data is for measuring what int8 costs; say --int8 too, or leave it out")
    if not 0 <= max_drop <= 1:
        raise ConfigError(f"max_drop={max_drop} must be a share of the accuracy, such as 0.01")


def notes_on(model: Model, to: Target, preprocessing: bool) -> tuple[str, ...]:
    """What a user should know about the file."""
    height, width = pair(model.config.image_size)
    if to != "onnx":
        return (f"it takes any number of images, of {height}x{width} pixels",)
    if isinstance(model.config, MixerConfig) and not preprocessing:
        return (f"a Mixer's weights are tied to its size: it takes {height}x{width} pixels only",)
    return ()
