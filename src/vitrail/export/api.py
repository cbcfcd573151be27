"""`vitrail.export_model`: write a model to a file that runs without vitrail."""

import time
from os import PathLike
from pathlib import Path
from typing import NamedTuple, get_args

from torch import nn

from vitrail.checkpoints.files import atomic_write
from vitrail.checkpoints.load import Reference, load
from vitrail.checkpoints.metadata import get_metadata
from vitrail.errors import ConfigError, unknown
from vitrail.evaluation.conformal import load_conformal
from vitrail.evaluation.evaluate import Progress
from vitrail.export import MAX_DROP, Target
from vitrail.export.session import OnnxEngine, open_session, run_session
from vitrail.export.torch_program import save_program
from vitrail.export.verify import (
    INT8_TOLERANCE,
    TOLERANCE,
    Data,
    Int8Accuracy,
    measure_int8,
    prepare_model,
    verify_images,
    verify_pixels,
)
from vitrail.extras import require
from vitrail.models.config import MixerConfig, pair
from vitrail.models.registry import name_of
from vitrail.models.vit import Model

SUFFIXES: dict[Target, str] = {
    "onnx": ".onnx",
    "torch": ".pt2",
    "aotinductor": ".pt2",
    "html": ".html",
}


class Exported(NamedTuple):
    """The file that was written, and how it compares with the model."""

    path: Path
    to: Target
    model: str
    bytes: int
    difference: float  # of logits and features from the model's, relative to the largest
    cost: Int8Accuracy | None
    notes: tuple[str, ...]
    seconds: float


def export_model(
    model: Model | Reference,
    out: str | PathLike[str],
    *,
    to: Target = "onnx",
    int8: bool = False,
    data: Data | None = None,
    max_drop: float = MAX_DROP,
    preprocessing: bool = False,
    examples: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Export a model, and verify that the file gives the same logits and features.

    >>> export_model("runs/first", "first.onnx")  # any batch, height and width
    >>> export_model("runs/first", "first-int8.onnx", int8=True, data="images")
    >>> export_model("runs/first", "first.pt2", to="torch")
    >>> export_model("runs/first", "first.html", to="html")  # a page for a browser

    `int8` rounds weights: its accuracy is measured on the test split of `data`, or of the training
    data, and a drop of more than `max_drop` raises CheckpointError. With `preprocessing` the file
    takes the pixels of an image. `examples` is a dataset of which a page shows some images.
    `progress` is called with the number of images evaluated. Nothing is written unless the outputs
    agree.
    """
    start = time.perf_counter()
    path = Path(out)
    if to not in get_args(Target):
        raise unknown("target", to, get_args(Target))
    if path.suffix != SUFFIXES[to]:
        raise ConfigError(
            f"{path} has the wrong suffix for --to {to}; try {path.with_suffix(SUFFIXES[to])}"
        )
    for option, given, targets in (
        ("int8", int8, ("onnx", "html")),
        ("preprocessing", preprocessing, ("onnx",)),
        ("examples", examples is not None, ("html",)),
    ):
        if given and to not in targets:
            raise ConfigError(f"{option} works with --to {' or '.join(targets)}, not with {to}")
    if data is not None and not int8:
        raise ConfigError("data is used to measure int8; add --int8, or leave it out")
    if not 0 <= max_drop <= 1:
        raise ConfigError(f"max_drop={max_drop} must be a fraction of the images, such as 0.01")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; choose another --out, or use --overwrite")
    folder = None if isinstance(model, nn.Module) else Path(model)
    model = prepare_model(model if isinstance(model, nn.Module) else load(model))
    load_conformal(get_metadata(model), model.config.num_classes, model, int8=int8)  # warns
    notes: tuple[str, ...] = ()
    cost = None
    with atomic_write(path) as temporary:
        if to == "onnx":
            require("onnxruntime", "onnx", extra="export", feature="ONNX")
            from vitrail.export.onnx import to_onnx

            content = to_onnx(model, int8=int8, preprocessing=preprocessing)
            if int8:
                engine = OnnxEngine(to_onnx(model, int8=True) if preprocessing else content)
                cost = measure_int8(model, engine, data, progress=progress)
                cost.check(max_drop)
                notes = cost.notes
            session = open_session(content)
            verify = verify_pixels if preprocessing else verify_images
            difference = verify(
                model,
                lambda images: run_session(session, images),
                INT8_TOLERANCE if int8 else TOLERANCE,
            )
            temporary.write_bytes(content)
        elif to == "html":
            require("onnxruntime", "onnx", extra="export", feature="--to html")
            from vitrail.export.html import build_page

            page, difference, cost = build_page(
                model,
                title=path.stem,
                int8=int8,
                data=data,
                max_drop=max_drop,
                folder=folder,
                examples=examples,
                progress=progress,
            )
            notes = () if cost is None else cost.notes
            temporary.write_text(page, encoding="utf-8", errors="replace")
        else:
            program = save_program(model, temporary, compiled=to == "aotinductor")
            difference = verify_images(model, program, any_size=False)
        size = temporary.stat().st_size
    height, width = pair(model.config.image_size)
    if to in ("torch", "aotinductor"):
        notes = (f"it takes any number of images of {height}x{width} pixels",)
    elif to == "onnx" and isinstance(model.config, MixerConfig) and not preprocessing:
        notes = (f"the image size of a Mixer is fixed: {height}x{width} pixels", *notes)
    seconds = time.perf_counter() - start
    return Exported(path, to, name_of(model.config), size, difference, cost, notes, seconds)
