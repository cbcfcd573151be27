"""The served models by name, and example images to try them with."""

from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from vitrail.checkpoints.metadata import Metadata
from vitrail.data.datasets import Dataset, LabelSets, evaluation_split, open_dataset
from vitrail.data.decode import thumbnail, to_jpeg, to_png
from vitrail.data.image_headers import read_header
from vitrail.errors import DataError, VitrailError, unknown
from vitrail.models.registry import name_of
from vitrail.models.vit import VisionTransformer
from vitrail.prediction.predictor import Predictor
from vitrail.prediction.results import Prediction
from vitrail.probing.memory import Memory
from vitrail.serving.batching import (
    DEFAULT_BATCH_SIZE,
    DecodePool,
    FeatureVector,
    ImageWork,
    extract_batch,
    predict_batch,
)
from vitrail.serving.config import ServerConfig
from vitrail.serving.limits import ApiError
from vitrail.serving.metrics import Metrics
from vitrail.serving.overlay import methods_of
from vitrail.serving.schemas import LimitsInfo, ModelInfo

MAX_EXAMPLES = 12
MAX_EXAMPLE_BYTES = 2**18  # of an image that is sent unchanged
EXAMPLE_SIDE = 1024  # pixels; larger images are resized
NO_EXAMPLES = "none"
MEDIA_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "WebP": "image/webp"}


class ServedModel:
    """One version of a model; requests keep the version they started with."""

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        pool: DecodePool,
        metrics: Metrics,
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        memory: Memory | None = None,
    ) -> None:
        self.name, self.predictor, self.memory = name, predictor, memory
        self.pool, self.metrics = pool, metrics
        shared = (predictor, pool, metrics, batch_size)
        self.predict = ImageWork(predict_batch, Prediction, *shared)
        self.features = ImageWork(extract_batch, FeatureVector, *shared)

    @property
    def batch_size(self) -> int:
        return self.predict.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.predict.batch_size = self.features.batch_size = size

    def header(self, seconds: float) -> dict[str, Any]:
        """Return the fields that the responses of all models share."""
        engine = self.predictor.engine.name
        return {"model": self.name, "engine": engine, "seconds": round(seconds, 5)}

    @cached_property
    def info(self) -> ModelInfo:
        """What clients may know: nothing about this machine, its files or its data."""
        model, limits = self.predictor.model, self.pool.limits
        vit = model if isinstance(model, VisionTransformer) else None
        return ModelInfo(
            name=self.name,
            architecture="onnx" if model is None else name_of(model.config),
            classes=list(self.predictor.classes),
            image_size=list(self.predictor.metadata.preprocessing.size),
            channels=self.predictor.channels,
            parameters=None if model is None else sum(p.numel() for p in model.parameters()),
            engine=self.predictor.engine.name,
            multi_label=self.predictor.metadata.multi_label,
            methods=list(methods_of(model)),
            layers=vit.config.depth if vit else 0,
            heads=vit.config.heads if vit else 0,
            teach=self.memory is not None,
            limits=LimitsInfo(
                bytes=limits.body,
                pictures=limits.images,
                pixels=limits.pixels,
                seconds=limits.timeout,
            ),
        )


class ModelRegistry:
    """Served models by name; the first is the default."""

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}
        self.lock = Lock()  # held while a taught model is saved and replaces the old one

    def get(self, name: str | None) -> ServedModel:
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(404, str(unknown("model", name[:100], self.models)), reason="model")
        return self.models[name]

    def set(self, served: ServedModel) -> None:
        """Add a model, or replace the version of that name."""
        self.models[served.name] = served


# Example images


class Example(NamedTuple):
    """An image in a format that browsers can show."""

    label: str
    data: bytes
    media_type: str


def examples_from(config: ServerConfig, reference: str) -> str:
    """Return the data set to take examples from; empty for the model's own.

    A model itself names its data. So unless configured, they are shown only if the model is on
    this machine, and only to this machine.
    """
    if config.examples:
        return config.examples
    local = not reference.startswith("hf:") and Path(reference).expanduser().exists()
    return "" if local and config.is_loopback else NO_EXAMPLES


def find_examples(metadata: Metadata, data: str) -> list[Example]:
    """Return examples of `data`, or of the model's own data if that is on this machine.

    Unless configured, nothing is downloaded and nothing is an error.
    """
    own = metadata.provenance.get("data")
    reference = data or (own if isinstance(own, str) else "")
    remote = "://" in reference or reference.startswith("hf:")
    if reference in ("", NO_EXAMPLES) or (not data and remote):
        return []
    try:
        source = open_dataset(reference, evaluation_split(reference) or "all")
        rows = spread_rows(source, MAX_EXAMPLES)
        return [example for row in rows if (example := read_example(source, row))]
    except (VitrailError, OSError):
        if data:
            raise
        return []


def spread_rows(source: Dataset, count: int) -> list[int]:
    """Return up to `count` rows, round-robin over the classes and spread within each."""
    labels = source.labels()
    if isinstance(labels, LabelSets):
        first = np.array([own[0] if own else -1 for own in labels])
    else:
        first = np.asarray(labels)
    classes = np.unique(first)
    if len(classes) > count:
        classes = classes[np.linspace(0, len(classes) - 1, count).astype(int)]
    per_class = -(-count // max(1, len(classes)))
    rows = []
    for number in classes:
        own = np.flatnonzero(first == number)
        picked = np.linspace(0, len(own) - 1, min(per_class, len(own))).astype(int)
        rows.append(own[picked].tolist())
    return [own[turn] for turn in range(per_class) for own in rows if turn < len(own)][:count]


def read_example(source: Dataset, row: int) -> Example | None:
    """Return one image, unchanged if browsers can show it; None if it cannot be read."""
    try:
        sample = source[row]
        numbers = sample.label if isinstance(sample.label, tuple) else (sample.label,)
        label = ", ".join(source.classes[number] for number in numbers)
        if isinstance(sample.data, bytes) and len(sample.data) <= MAX_EXAMPLE_BYTES:
            media_type = MEDIA_TYPES.get(read_header(sample.data).format)
            if media_type is not None:
                return Example(label, sample.data, media_type)
    except DataError:
        return None
    image = thumbnail(source, row, EXAMPLE_SIDE, enlarge=False)
    if image is None:
        return None
    if isinstance(sample.data, np.ndarray):
        return Example(label, to_png(image), "image/png")
    return Example(label, to_jpeg(image), "image/jpeg")
