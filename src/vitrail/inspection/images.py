"""Input images: pixels for display, and preprocessed for a model."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import Dataset
from vitrail.data.decode import open_image, to_rgb
from vitrail.data.folders import walk_images
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms import EvalTransform, cover_size, normalize, resize
from vitrail.errors import DataError, similar_path
from vitrail.models.vit import Model

MAX_SIDE = 480  # pixels of the longer side that are kept for display


class Box(NamedTuple):
    """A part of an image, in its pixels."""

    top: float
    left: float
    bottom: float
    right: float


class InputImage(NamedTuple):
    """An image for display and as model input."""

    name: str
    pixels: np.ndarray  # uint8 (height, width, 3), at most `MAX_SIDE`
    tensor: Tensor  # (C, H, W), normalized
    box: Box  # the part of `pixels` that the model sees
    label: str = ""  # class, if known
    row: int | None = None  # index in its dataset


def load_image(
    model: Model, data: bytes | np.ndarray, *, name: str = "", label: str = ""
) -> InputImage:
    tensor = preprocess(model, data)
    pixels = open_image(data).pixels(channels=3) if isinstance(data, bytes) else to_rgb(data)
    if (longer := max(pixels.shape[:2])) > MAX_SIDE:
        height, width = (max(1, round(side * MAX_SIDE / longer)) for side in pixels.shape[:2])
        pixels = resize(pixels, (height, width), "bilinear").permute(1, 2, 0).numpy()
    box = crop_box(get_metadata(model).preprocessing, *pixels.shape[:2])
    return InputImage(name, pixels, tensor, box, label)


def preprocess(model: Model, data: bytes | np.ndarray) -> Tensor:
    """Return an image as the model takes it: (C, H, W), normalized, on its device."""
    config = get_metadata(model).preprocessing
    transform = EvalTransform(preprocessing=config, channels=model.config.channels)
    return normalize(transform(data)[None], config)[0].to(next(model.parameters()))


def crop_box(config: Preprocessing, height: int, width: int) -> Box:
    """Return the part of an image that remains after resizing and center cropping."""
    size = config.resize_to or config.size
    if config.resize == "short-side":
        size = cover_size(height, width, size)
    down, across = config.size[0] / size[0] * height, config.size[1] / size[1] * width
    top, left = (height - down) / 2, (width - across) / 2
    return Box(top, left, top + down, left + across)


def load_samples(
    model: Model, dataset: Dataset, rows: Sequence[int], skipped: dict[str, str]
) -> Iterator[InputImage]:
    """Load samples of a dataset; names and errors of unreadable ones are added to `skipped`."""
    for row in rows:
        try:
            sample = dataset[int(row)]
            label = dataset.classes[sample.label] if isinstance(sample.label, int) else ""
            image = load_image(model, sample.data, name=sample.name, label=label)
            yield image._replace(row=int(row))
        except DataError as error:
            skipped[dataset.name(int(row))] = str(error)


def find_images(paths: Iterable[str | PathLike[str]]) -> list[Path]:
    """Return the given files, and those in the given folders."""
    files: list[Path] = []
    for reference in paths:
        path = Path(reference).expanduser()
        if path.is_dir():
            inside = [path / name for name in walk_images(path, "", Counter())]
            if not inside:
                raise DataError(f"{reference}: no images in this folder")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            hint = similar_path(str(path)) or "; expected image files or folders of images"
            raise DataError(f"{reference} does not exist{hint}")
    return files


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return up to `count` evenly spaced indices below `total`."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int)).tolist()
