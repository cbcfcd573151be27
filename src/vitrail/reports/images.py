"""Images on pages: thumbnails and data URLs."""

import base64

from PIL import Image

from vitrail.data.datasets import Dataset
from vitrail.data.decode import thumbnail, to_jpeg, to_png


def data_url(data: bytes, format: str = "png") -> str:
    return f"data:image/{format};base64,{base64.b64encode(data).decode('ascii')}"


def smallest_data_url(image: Image.Image) -> str:
    """Encode as PNG or JPEG, whichever is smaller."""
    png, jpeg = to_png(image), to_jpeg(image)
    return data_url(png) if len(png) <= len(jpeg) else data_url(jpeg, "jpeg")


def thumbnail_url(dataset: Dataset, index: int, side: int) -> str | None:
    """Return a thumbnail, not enlarged, for the `src` of an <img>; None if it cannot be read."""
    image = thumbnail(dataset, index, side, enlarge=False)
    return None if image is None else smallest_data_url(image)
