"""Small datasets in every format, for tests."""

from pathlib import Path

import numpy as np
from odd_images import saved
from PIL import Image


def png(value: int, size: tuple[int, int] = (4, 5)) -> bytes:
    return saved(Image.new("RGB", size, (value % 256,) * 3), "PNG")


def photograph(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return soft shapes and some grain, as a camera would see them."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return (soft + rng.integers(-6, 7, soft.shape)).clip(0, 255).astype(np.uint8)


def jpeg(pixels: np.ndarray) -> bytes:
    return saved(pixels, "JPEG", quality=95, subsampling=0)


def make_folder(root: Path, counts: dict[str, int]) -> Path:
    """Write `{"train/cat": 3}` as three images in train/cat; each image has its own gray level."""
    value = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (root / name / f"{number:03}.png").write_bytes(png(value))
            value += 1
    return root


def pixels(count: int, shape: tuple[int, ...] = (4, 4)) -> np.ndarray:
    """Return random images, the same each time."""
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


def same_samples(a, b) -> bool:
    """Return whether two datasets have the same images and labels in the same order."""
    same = len(a) == len(b) and a.classes == b.classes and a.multi_label == b.multi_label
    return same and all(x.data == y.data and x.label == y.label for x, y in zip(a, b, strict=True))
