"""What can be given as a picture: a path, the bytes of a file, a Pillow image, or pixels."""

from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from torch import Tensor

from vitrail.data.decoding import from_pillow
from vitrail.data.files import Disk
from vitrail.errors import DataError


class PillowImage(Protocol):
    """A Pillow image, known by what it can do: this file does not need Pillow."""

    mode: str

    def convert(self, mode: str, /) -> Any: ...


class Named(NamedTuple):
    """The bytes of a picture, and what to call it."""

    name: str
    data: bytes


Picture = Named | str | PathLike[str] | bytes | PillowImage | np.ndarray | Tensor


def several(pictures: Picture | Sequence[Picture]) -> tuple[Sequence[Picture], bool]:
    """Pictures as a list, and whether they were given as one."""
    if isinstance(pictures, list | tuple) and not isinstance(pictures, Named):
        return pictures, True
    return [cast(Picture, pictures)], False


def name_of(picture: Picture, number: int) -> str:
    """What to call a picture: its path, or its place among those given."""
    if isinstance(picture, Named):
        return picture.name
    return fspath(picture) if isinstance(picture, str | PathLike) else f"picture {number + 1}"


def read(picture: Picture, channels: int = 3) -> bytes | np.ndarray:
    """The bytes of a picture file, or pixels uint8 (H, W) or (H, W, C) for so many channels."""
    match picture:
        case Named():
            return picture.data
        case str() | PathLike():
            return Disk().read_all(fspath(picture))
        case bytes() | bytearray() | memoryview():
            return bytes(picture)
        case Tensor():
            pixels = picture.detach().cpu().numpy()
            return checked(pixels, "(C, H, W)", 0, channels).transpose(1, 2, 0)
        case np.ndarray():
            return checked(picture, "(H, W) or (H, W, C)", -1, channels)
    if hasattr(picture, "convert") and hasattr(picture, "mode"):
        return from_pillow(picture)  # pyright: ignore[reportArgumentType]
    raise DataError(
        f"a {type(picture).__name__} is no picture; give a path, bytes, a Pillow image or pixels"
    )


def checked(pixels: np.ndarray, shapes: str, axis: int, channels: int) -> np.ndarray:
    """Pixels that can be made to have so many channels, or why they cannot."""
    flat = pixels.ndim == 2 and axis == -1
    if pixels.dtype != np.uint8 or not (flat or pixels.ndim == 3) or 0 in pixels.shape:
        raise DataError(
            f"{pixels.dtype} values of shape {pixels.shape} are no pixels; "
            f"give uint8, 0 to 255, of shape {shapes}"
        )
    other = 3 if channels == 1 else channels
    if not flat and pixels.shape[axis] not in (1, other):
        raise DataError(
            f"pixels of shape {pixels.shape} have {pixels.shape[axis]} channels; "
            f"give 1 or {other}, as {shapes}"
        )
    return pixels if pixels.flags.writeable else pixels.copy()  # torch warns of what is not
