"""What is raced on: the data sets, their pictures in memory, and the model of the race.

All contenders learn from and are judged by the same pictures, read by vitrail.
"""

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
class Course:
    """A data set, and the seconds of training that everybody gets."""

    title: str
    data: str  # a file in the folder DATA, or a built-in set
    seconds: float


COURSES = {
    "fashion": Course("Fashion-MNIST", "fashion_mnist.npz", 45),
    "cifar": Course("CIFAR-10 (10k)", "cifar10_10k.npz", 45),
    "flowers": Course("flowers5", "flowers5_160.tar", 45),
}
SMALL = 40  # pixels: pictures that are not cut when they are judged


def data_folder() -> Path:
    """Where the data sets are: DATA, or a folder `data` beside the project."""
    return Path(os.environ.get("DATA") or Path(__file__).parents[2] / "data")


def reference(course: Course) -> str:
    """What vitrail calls the data of a course."""
    return course.data if ":" in course.data else str(data_folder() / course.data)


def missing(names: list[str]) -> str:
    """One line on files that are not there, as `run.py` reads it; or nothing."""
    files = [COURSES[name].data for name in names]
    absent = [file for file in files if not (data_folder() / file).exists()]
    if not absent:
        return ""
    return (
        f"Not measured: the folder {data_folder().name} has no {', '.join(absent)}; "
        "`make bench DATA=folder` names the folder that has"
    )


@dataclass(frozen=True)
class Pictures:
    """The pictures of a split, decoded."""

    images: list[Image.Image]
    labels: Tensor  # (n,) int64


def read(data: str, split: str) -> Pictures:
    """A split of a data set, decoded into memory."""
    source = open_dataset(data, split)
    images = [picture(sample.data) for sample in source]
    return Pictures(images, torch.from_numpy(np.asarray(source.labels(), np.int64)))


def picture(data: bytes | np.ndarray) -> Image.Image:
    pixels = data if isinstance(data, np.ndarray) else decode(data)
    return Image.fromarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels)


def judged_by(data: str) -> str:
    split = evaluation_split(data)
    assert split is not None, f"{data} has nothing to be judged by"
    return split


def prepared(pictures: Pictures, transform: Callable[[Image.Image], Tensor]) -> Tensor:
    """All pictures as a model reads them: (n, C, H, W)."""
    return torch.stack([transform(image) for image in pictures.images])


def default_model(source: ImageDataset) -> VitConfig:
    """The model that vitrail chooses for a data set when nothing is given."""
    splits = DataSplits(reference="", train=source, held_out={})
    model, _ = build_model(Settings(), splits, "", torch.device("cpu"), lambda line: None)
    config = model.config
    assert isinstance(config, VitConfig)
    return config
