"""Pictures to look at: as they are, and as a model sees them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path

import numpy as np
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import Dataset
from vitrail.data.decode import open_image, to_rgb
from vitrail.data.folders import walk_images
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.storage import LocalStorage
from vitrail.data.transforms import EvalTransform, normalize, resize, short_side_size
from vitrail.errors import DataError
from vitrail.inspection.findings import Box
from vitrail.models.vit import Model

LARGEST = 480  # pixels of the longer side that are kept of a picture


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture, twice."""

    name: str
    pixels: np.ndarray  # uint8 (height, width, 3), no larger than a page shows
    image: Tensor  # (C, H, W), normalized
    box: Box  # the part of the pixels that the model sees
    label: str = ""  # its class, where that is known
    row: int | None = None  # its place in the data set that it comes from


def from_paths(model: Model, paths: Iterable[str | PathLike[str]]) -> Iterator[Picture]:
    """Files, one after the other; a `DataError` that names the file if one cannot be read."""
    for path in paths:
        try:
            data = LocalStorage().read_all(fspath(path))
            yield prepared(model, data, name=Path(path).name)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None


def from_source(
    model: Model, source: Dataset, rows: Sequence[int], unread: dict[str, str]
) -> Iterator[Picture]:
    """Some pictures of a data set. Those that cannot be read are left out, and `unread` says why,
    by name."""
    for row in rows:
        try:
            sample = source[int(row)]
            label = source.classes[sample.label] if isinstance(sample.label, int) else ""
            picture = prepared(model, sample.data, name=sample.name, label=label)
            yield replace(picture, row=int(row))
        except DataError as error:
            unread[source.name(int(row))] = str(error)


def prepared(model: Model, data: bytes | np.ndarray, *, name: str = "", label: str = "") -> Picture:
    image = as_seen(model, data)
    pixels = open_image(data).pixels(channels=3) if isinstance(data, bytes) else to_rgb(data)
    if (longer := max(pixels.shape[:2])) > LARGEST:
        high, wide = (max(1, round(side * LARGEST / longer)) for side in pixels.shape[:2])
        pixels = resize(pixels, (high, wide), "bilinear").permute(1, 2, 0).numpy()
    box = seen(get_metadata(model).preprocessing, *pixels.shape[:2])
    return Picture(name=name, pixels=pixels, image=image, box=box, label=label)


def as_seen(model: Model, data: bytes | np.ndarray) -> Tensor:
    """A picture as the model takes it: (C, H, W), normalized, on its device."""
    how = get_metadata(model).preprocessing
    transform = EvalTransform(preprocessing=how, channels=model.config.channels)
    return normalize(transform(data)[None], how)[0].to(next(model.parameters()))


def seen(how: Preprocessing, height: int, width: int) -> Box:
    """The part of a picture that is left after resizing and cutting the middle out."""
    size = how.resize_to or how.size
    if how.resize == "short-side":
        size = short_side_size(height, width, min(size))
    down, across = how.size[0] / size[0] * height, how.size[1] / size[1] * width
    top, left = (height - down) / 2, (width - across) / 2
    return Box(top, left, top + down, left + across)


def files(places: Iterable[str | PathLike[str]]) -> list[Path]:
    """The files that are named, and those in folders that are named."""
    found: list[Path] = []
    for place in places:
        path = Path(place).expanduser()
        if path.is_dir():
            inside = [path / name for name in walk_images(path, "", Counter())]
            if not inside:
                raise DataError(f"{place}: there is no picture in it")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{place} does not exist; give pictures, or folders of pictures")
    return found


def spaced(total: int, count: int) -> list[int]:
    """Up to `count` of `total` numbers, evenly spaced."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int)).tolist()
