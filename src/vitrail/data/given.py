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


def read(picture: Picture) -> bytes | np.ndarray:
    """The bytes of a picture file, or pixels uint8 (H, W) or (H, W, C)."""
    match picture:
        case Named():
            return picture.data
        case str() | PathLike():
            return Disk().read_all(fspath(picture))
        case bytes() | bytearray() | memoryview():
            return bytes(picture)
        case Tensor():
            return checked(picture.detach().cpu().numpy(), "(C, H, W)", 0).transpose(1, 2, 0)
        case np.ndarray():
            return checked(picture, "(H, W) or (H, W, C)", -1)
    if hasattr(picture, "convert") and hasattr(picture, "mode"):
        return from_pillow(picture)  # pyright: ignore[reportArgumentType]
    raise DataError(
        f"a {type(picture).__name__} is no picture; give a path, bytes, a Pillow image or pixels"
    )


def checked(pixels: np.ndarray, shapes: str, channels: int) -> np.ndarray:
    """Pixels, or why they are none."""
    flat = pixels.ndim == 2 and channels == -1
    if pixels.dtype != np.uint8 or not (flat or pixels.ndim == 3) or 0 in pixels.shape:
        raise DataError(
            f"{pixels.dtype} values of shape {pixels.shape} are no pixels; "
            f"give uint8, 0 to 255, of shape {shapes}"
        )
    if not flat and pixels.shape[channels] not in (1, 3):
        raise DataError(
            f"pixels of shape {pixels.shape} have {pixels.shape[channels]} channels; "
            f"give 1 or 3, as {shapes}"
        )
    return pixels if pixels.flags.writeable else pixels.copy()  # torch warns of what is not
