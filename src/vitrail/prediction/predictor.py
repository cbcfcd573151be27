"""`vitrail.Predictor`: predictions and features for images.

Shapes: B images, C channels, K classes, D features.
"""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import islice
from os import PathLike, fsdecode
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.checkpoints.load import Reference, load
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.data import folders
from vitrail.data.image_headers import detect_format
from vitrail.data.loader import map_batches, reader_pool
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.storage import MAX_IMAGE_BYTES
from vitrail.data.transforms import (
    EvalTransform,
    ImageInput,
    NamedImage,
    as_sequence,
    input_name,
    normalize,
    read_image,
)
from vitrail.errors import ConfigError, DataError, renamed_attribute, renamed_keyword
from vitrail.evaluation.conformal import Conformal, load_conformal
from vitrail.evaluation.evaluate import Runner
from vitrail.models.vit import Model
from vitrail.prediction.engines import AccuracyGuard, Engine, EngineChoice, TorchEngine, open_engine

DEFAULT_TOP = 5
MULTI_LABEL_THRESHOLD = 0.5  # probability from which a class applies to a multi-label model's image
DEFAULT_BATCH_SIZE = 16
STANDARD_INPUT = "standard input"
MAGIC_BYTES = 64  # bytes that identify an image format


class Guess(NamedTuple):
    label: str
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The prediction for one image, or the error if the image cannot be read."""

    name: str  # path of the image, or its position
    guesses: tuple[Guess, ...] = ()  # top classes, most probable first
    labels: tuple[str, ...] = ()  # one class, several if multi-label, none below the threshold
    prediction_set: tuple[str, ...] = ()  # of a calibrated model: contains the true class
    error: str = ""

    @property
    def label(self) -> str:
        """The predicted class; empty if the model abstains."""
        return self.labels[0] if self.labels else ""

    @property
    def probability(self) -> float:
        """Probability of the top class."""
        return self.guesses[0].probability if self.guesses else 0.0


def decode_logits(
    logits: Tensor,
    names: Sequence[str],
    metadata: Metadata,
    *,
    top: int = DEFAULT_TOP,
    threshold: float | None = None,
    conformal: Conformal | None = None,
) -> list[Prediction]:
    """Return one prediction per row of logits (B, K); `names` are those of the images.

    Below `threshold` no label is assigned; the default is that of `conformal`, else 0, or 0.5 per
    class if multi-label.
    """
    probabilities = metadata.probabilities(logits.double())
    accepted, sets = [True] * len(probabilities), [()] * len(probabilities)
    if conformal is not None and len(probabilities):
        table = probabilities.numpy()
        if threshold is None:
            accepted = conformal.accepts(table).tolist()
        ranked = zip(conformal.sets(table), table, strict=True)
        sets = [sorted(inside.nonzero()[0], key=lambda k: -row[k]) for inside, row in ranked]
    if threshold is None:
        threshold = MULTI_LABEL_THRESHOLD if metadata.multi_label else 0.0
    best = probabilities.topk(min(top, probabilities.shape[1]))
    classes = metadata.names(probabilities.shape[1])
    tops = [
        tuple(Guess(classes[i], p) for i, p in zip(indices, values, strict=True))
        for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    predictions = []
    rows = zip(names, probabilities, tops, accepted, sets, strict=True)
    for name, row, guesses, accept, inside in rows:
        if metadata.multi_label:
            order = row.argsort(descending=True)
            labels = tuple(classes[i] for i in order[row[order] >= threshold].tolist())
        else:
            labels = (guesses[0].label,) if accept and guesses[0].probability >= threshold else ()
        members = tuple(classes[k] for k in inside)
        predictions.append(
            Prediction(name=name, guesses=guesses, labels=labels, prediction_set=members)
        )
    return predictions


class BatchOutput(NamedTuple):
    """One batch of images and the model's output for those that could be read."""

    names: list[str]
    errors: list[str]  # why an image cannot be read; empty for the others
    outputs: Tensor | None  # logits or features, one row per readable image


class Predictor:
    """A model with its preprocessing and class names, ready for inference.

    >>> predictor = Predictor("runs/first")
    >>> predictor("cat.jpg").label
    >>> [prediction.guesses for prediction in predictor([image, other, "third.png"])]

    Args:
        model: A model, any reference that `load` accepts, or an .onnx file of `vitrail export`.
            A model object is not copied: it is moved to the device and keeps its train/eval mode.
            Call its `eval()` first to use the predictor from several threads.
        engine: torch, onnx, onnx-int8, or auto, which times them and takes the fastest.
        merge: Tokens to merge per layer; None takes the model's setting, which does not change.
        guard: How much accuracy int8 may cost, and the data to measure it on.
        preprocessing: As in `load`.
        log: Called with each line about what was chosen.
    """

    facts = renamed_attribute("facts", "metadata")

    @renamed_keyword("tell", "log")
    def __init__(
        self,
        model: Model | Reference,
        *,
        engine: EngineChoice = "",
        merge: int | None = None,
        guard: AccuracyGuard | None = None,
        preprocessing: str | Preprocessing | None = None,
        device: str = "",
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.model: Model | None = None
        self.device = torch.device("cpu")
        is_onnx = isinstance(model, str | PathLike) and str(model).endswith(".onnx")
        if preprocessing is not None and (is_onnx or isinstance(model, nn.Module)):
            raise ConfigError(
                "preprocessing applies to a checkpoint; an .onnx file has its own, and a model has "
                "it in model.metadata"
            )
        if isinstance(model, str | PathLike) and is_onnx:
            if merge or engine not in ("", "onnx"):
                raise ConfigError(f"{model} always runs in onnxruntime; leave engine and merge out")
            from vitrail.export.session import OnnxEngine

            session = OnnxEngine(model)
            self.engine: Engine = session
            self.metadata: Metadata = session.metadata
            self.channels, self.num_classes = session.channels, session.num_classes
        else:
            self.model = (
                model
                if isinstance(model, nn.Module)
                else load(model, preprocessing=preprocessing, log=log)
            )
            self.metadata = get_metadata(self.model)
            self.device = distributed.local_device(device)
            self.engine = open_engine(
                self.model,
                engine or "torch",
                merge=merge,
                guard=guard or AccuracyGuard(),
                device=self.device,
                log=log or (lambda line: None),
            )
            self.channels = self.model.config.channels
            self.num_classes = self.model.config.num_classes
        self.conformal = load_conformal(
            self.metadata,
            self.num_classes,
            self.engine.model if isinstance(self.engine, TorchEngine) else self.model,
            int8=not isinstance(self.engine, TorchEngine) and self.engine.int8,
        )
        self.classes = self.metadata.names(self.num_classes)
        # Decodes and resizes an image: encoded bytes or pixels to uint8 (C, H, W).
        self.preprocess = EvalTransform(
            preprocessing=self.metadata.preprocessing, channels=self.channels
        )

    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]: a str is a sequence of str
        self, images: ImageInput, *, top: int = ..., threshold: float | None = ...
    ) -> Prediction: ...

    @overload
    def __call__(
        self, images: Sequence[ImageInput], *, top: int = ..., threshold: float | None = ...
    ) -> list[Prediction]: ...

    def __call__(
        self,
        images: ImageInput | Sequence[ImageInput],
        *,
        top: int = DEFAULT_TOP,
        threshold: float | None = None,
    ) -> Prediction | list[Prediction]:
        """Return the prediction for one image, or a list of them for a list.

        An image is a path, encoded bytes, a Pillow image, or uint8 pixels (H, W) or (H, W, C).
        One that cannot be read raises `DataError`; use `stream` to continue past it.
        """
        images, is_list = as_sequence(images)
        predictions = []
        for prediction in self.stream(images, top=top, threshold=threshold):
            if prediction.error:
                raise DataError(f"{prediction.name}: {prediction.error}")
            predictions.append(prediction)
        return predictions if is_list else predictions[0]

    def features(self, images: ImageInput | Sequence[ImageInput]) -> np.ndarray:
        """Return the feature vector (D,) of one image, or (N, D) for a list."""
        images, is_list = as_sequence(images)
        rows = []
        for batch in self.run_batches(images, features=True):
            for name, error in zip(batch.names, batch.errors, strict=True):
                if error:
                    raise DataError(f"{name}: {error}")
            assert batch.outputs is not None
            rows.append(batch.outputs.numpy())
        vectors = np.concatenate(rows) if rows else np.zeros((0, 0), np.float32)
        return vectors if is_list else vectors[0]

    def stream(
        self,
        images: Iterable[ImageInput],
        *,
        top: int = DEFAULT_TOP,
        threshold: float | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
    ) -> Iterator[Prediction]:
        """Yield predictions in order, for any number of images.

        An image that cannot be read yields a prediction with its `error`.
        """
        if top < 1:
            raise ConfigError(f"top={top} must be 1 or more")
        if threshold is not None and not 0 <= threshold <= 1:
            raise ConfigError(f"threshold={threshold} is not a probability; expected 0 to 1")
        if not self.num_classes:
            raise ConfigError("the model has no classes; use its features, or teach it some")
        for names, errors, logits in self.run_batches(images, batch_size=batch_size):
            readable = [name for name, error in zip(names, errors, strict=True) if not error]
            decoded = iter(
                decode_logits(
                    logits,
                    readable,
                    self.metadata,
                    top=top,
                    threshold=threshold,
                    conformal=self.conformal,
                )
                if logits is not None
                else ()
            )
            for name, error in zip(names, errors, strict=True):
                yield Prediction(name=name, error=error) if error else next(decoded)

    def run_batches(
        self,
        images: Iterable[ImageInput],
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        features: bool = False,
    ) -> Iterator[BatchOutput]:
        """Run the model on prefetched batches; yield logits, or `features` instead.

        Files are read one batch ahead. On the CPU, preprocessing and the model take turns with all
        cores, since running both at once slows each down; for other devices preprocessing runs
        ahead too.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be 1 or more")
        numbered = enumerate(images)
        forward = self.forward_features if features else self.logits

        def read_batch() -> list[tuple[str, Future]]:
            return [
                (input_name(image, number), self.threads.submit(self.load_image, image))
                for number, image in islice(numbered, batch_size)
            ]

        def finish(item: tuple[str, Future]) -> tuple[str, Tensor | str]:
            name, image = item
            try:
                data = image.result()
                return name, data if isinstance(data, Tensor) else self.preprocess(data)
            except DataError as error:
                return name, str(error)

        for results in map_batches(self.threads, finish, iter(read_batch, [])):
            tensors = [result for _, result in results if isinstance(result, Tensor)]
            errors = ["" if isinstance(result, Tensor) else result for _, result in results]
            outputs = forward(torch.stack(tensors)) if tensors else None
            yield BatchOutput([name for name, _ in results], errors, outputs)

    def load_image(self, image: ImageInput) -> bytes | np.ndarray | Tensor:
        """Read an image ahead of its batch, and preprocess it unless the model runs on the CPU."""
        data = read_image(image, self.channels)
        return data if self.device.type == "cpu" else self.preprocess(data)

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Threads that read and preprocess images."""
        return reader_pool()

    @property
    def runner(self) -> Runner:
        """This engine as an argument of `vitrail.evaluate`."""
        return Runner(
            run=self.engine,
            metadata=self.metadata,
            num_classes=self.num_classes,
            channels=self.channels,
            device=self.device,
        )

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (B, K) of preprocessed images uint8 (B, C, H, W)."""
        return self.engine(normalize(images.to(self.device), self.metadata.preprocessing))

    def forward_features(self, images: Tensor) -> Tensor:
        """Return features (B, D) of preprocessed images uint8 (B, C, H, W)."""
        return self.engine.features(normalize(images.to(self.device), self.metadata.preprocessing))


def find_images(
    locations: Iterable[str],
    standard_input: Callable[[], BufferedReader],
    skipped: Counter[str] | None = None,
) -> Iterator[ImageInput]:
    """Yield the images of files, folders, glob patterns and standard input (`-`), in order.

    A named file is yielded whether it exists or not: reading it reports the error. Standard input
    is one encoded image, or a list of paths. Other files in folders are counted in `skipped`.
    """
    skipped = Counter() if skipped is None else skipped
    for location in locations:
        path = os.path.expanduser(location)  # Path.expanduser raises on `~backup.png`
        if location == "-":
            stream = standard_input()
            if detect_format(stream.peek(MAGIC_BYTES)[:MAGIC_BYTES]):
                data = stream.read(MAX_IMAGE_BYTES + 1)
                if len(data) > MAX_IMAGE_BYTES:
                    raise DataError(
                        f"standard input exceeds the limit of {MAX_IMAGE_BYTES:,} bytes per image"
                    )
                yield NamedImage(STANDARD_INPUT, data)
                continue
            for line in stream:  # paths, separated by newlines or null bytes (`find -print0`)
                for part in line.rstrip(b"\r\n").split(b"\0"):
                    if part.strip():
                        yield Path(fsdecode(part))
            continue
        matches = [path]
        if glob.has_magic(location) and not os.path.exists(path):
            matches = sorted(glob.iglob(path, recursive=True))
            if not matches:
                raise DataError(f"{path}: no file matches this pattern")
        for match in map(Path, matches):
            if not os.path.isdir(match):  # Path.is_dir raises on names that are too long
                yield match
                continue
            empty = True
            for name in folders.walk_images(match, "", skipped):
                empty = False
                yield match / name
            if empty:
                raise DataError(f"{match}: the folder contains no images")
