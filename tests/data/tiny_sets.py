"""Small datasets in every format, for tests."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SHARED = Path(__file__).parents[3] / "shared" / "data"


def png(value: int, size: tuple[int, int] = (4, 5)) -> bytes:
    """Return a PNG of one gray level."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (value % 256,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


def make_folder(root: Path, counts: dict[str, int]) -> Path:
    """Write `{"train/cat": 3}` as three images in train/cat; each image has its own gray level."""
    value = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (root / name / f"{number:03}.png").write_bytes(png(value))
            value += 1
    return root


def shared(name: str, tmp_path: Path) -> Path:
    """Link a file of the shared data, so that no index is cached beside it."""
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not beside this checkout, in ../shared/data")
    (tmp_path / name).symlink_to(SHARED / name)
    return tmp_path / name


def pixels(count: int, shape: tuple[int, ...] = (4, 4)) -> np.ndarray:
    """Return random images, the same each time."""
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


def same_samples(a, b) -> bool:
    """Return whether two datasets have the same images and labels in the same order."""
    same = len(a) == len(b) and a.classes == b.classes and a.multi_label == b.multi_label
    return same and all(x.data == y.data and x.label == y.label for x, y in zip(a, b, strict=True))
