"""Datasets of the race, their decoded images, and the model that vitrail chooses for them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.datasets import ImageDataset, evaluation_split, open_dataset
from vitrail.data.decode import decode
from vitrail.models.config import VitConfig
from vitrail.training.config import Settings
from vitrail.training.data_module import DataSplits
from vitrail.training.model_init import build_model


@dataclass(frozen=True)
class RaceDataset:
    """A dataset, and its training time in seconds."""

    title: str
    data: str  # a file in the folder DATA, or a built-in set
    seconds: float


DATASETS = {
    "fashion": RaceDataset("Fashion-MNIST", "fashion_mnist.npz", 30),
    "cifar": RaceDataset("CIFAR-10 (10k)", "cifar10_10k.npz", 30),
    "flowers": RaceDataset("flowers5", "flowers5_160.tar", 30),
}
SMALL = 40  # pixels: smaller images are evaluated without a center crop


def data_folder() -> Path:
    """Return the folder of the datasets: DATA, or `data` beside the project."""
    return Path(os.environ.get("DATA") or Path(__file__).parents[2] / "data")


def reference(course: RaceDataset) -> str:
    """Return the dataset reference for vitrail."""
    return course.data if ":" in course.data else str(data_folder() / course.data)


def missing(names: list[str]) -> str:
    """Return a line on missing files, as `run.py` expects it, or an empty string."""
    files = [DATASETS[name].data for name in names]
    absent = [file for file in files if not (data_folder() / file).exists()]
    if not absent:
        return ""
    return (
        f"Not measured: the folder {data_folder().name} has no {', '.join(absent)}; "
        "set it with `make bench DATA=folder`"
    )


@dataclass(frozen=True)
class DecodedImages:
    """Decoded images of a split."""

    images: list[Image.Image]
    labels: Tensor  # (n,) int64


def read(data: str, split: str) -> DecodedImages:
    """Decode a split into memory."""
    source = open_dataset(data, split)
    images = [to_pillow(sample.data) for sample in source]
    return DecodedImages(images, torch.from_numpy(np.asarray(source.labels(), np.int64)))


def to_pillow(data: bytes | np.ndarray) -> Image.Image:
    pixels = data if isinstance(data, np.ndarray) else decode(data)
    return Image.fromarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels)


def test_split_of(data: str) -> str:
    split = evaluation_split(data)
    assert split is not None, f"{data} has no test or validation split"
    return split


def prepared(split: DecodedImages, transform: Callable[[Image.Image], Tensor]) -> Tensor:
    """Return the transformed images: (n, C, H, W)."""
    return torch.stack([transform(image) for image in split.images])


def default_model(source: ImageDataset) -> VitConfig:
    """Return the model that vitrail chooses by default."""
    splits = DataSplits(reference="", train=source, held_out={})
    model, _ = build_model(Settings(), splits, "", torch.device("cpu"), lambda line: None)
    config = model.config
    assert isinstance(config, VitConfig)
    return config
