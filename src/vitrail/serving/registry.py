"""The served models: descriptions, explanations, classes taught by clients, and example images.

Explanations hold one image and one layer in memory at a time. The model is never changed: it is in
eval mode, and gradients are taken of attention and tokens, never of weights. So other threads may
use it.

Teaching replaces the head by a linear probe, fitted in closed form to everything the model
remembers (`probing/teach.py`). The taught model replaces the old one at once and runs in torch,
whatever the engine was before; requests in progress finish on the old one.

Shapes: L layers, H heads, h x w patches, N tokens, q queries, C channels, D features.
"""

import base64
import shutil
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail import __version__
from vitrail.checkpoints.bundle import CARD, CONFIG, WEIGHTS, contains_model, is_generated_card
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.checkpoints.save import save
from vitrail.data.datasets import Dataset, LabelSets, evaluation_split, open_dataset
from vitrail.data.decode import open_image, thumbnail, to_jpeg, to_png
from vitrail.data.image_headers import read_header
from vitrail.data.transforms import normalize
from vitrail.errors import ConfigError, DataError, VitrailError, unknown
from vitrail.inspection.attention import iter_layers, patch_grid, require_attention, token_offset
from vitrail.inspection.images import InputImage, crop_box, preprocess
from vitrail.inspection.relevance import (
    CLASS_AGNOSTIC,
    CLASS_SPECIFIC,
    METHODS,
    head_weights,
    rollout,
)
from vitrail.models.registry import name_of
from vitrail.models.vit import Model, VisionTransformer
from vitrail.prediction.engines import TorchEngine
from vitrail.prediction.predictor import Prediction, Predictor
from vitrail.probing.teach import (
    MAX_BYTES,
    MEMORY_FILE,
    ProbeMemory,
    fit_head,
    recall,
    save_memory,
)
from vitrail.reports.images import overlay
from vitrail.serving import schemas
from vitrail.serving.batching import (
    DEFAULT_BATCH_SIZE,
    DecodePool,
    FeatureVector,
    ImageWork,
    predict_batch,
)
from vitrail.serving.config import ServerConfig
from vitrail.serving.limits import ApiError, Upload
from vitrail.serving.metrics import Metrics

MAX_LISTED_CLASSES = 20  # in an error message
View = tuple[Tensor, list[float]]  # the model's input (C, H, W), and its box within the image
FEATURE_BATCH_SIZE = 16
HEAD_REPLACED = "the first taught class replaces the trained head by a linear probe"
DRIFT_IMAGES = 500  # the latest ones, whose confidences are compared with the calibration's
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
        memory: ProbeMemory | None = None,
        digest: str = "",
    ) -> None:
        self.name, self.predictor, self.memory, self.digest = name, predictor, memory, digest
        metrics.models.labels(name, __version__, digest).set(1)
        self.pool, self.metrics, self.batch_size = pool, metrics, batch_size
        for counter in (metrics.images, metrics.unreadable):
            counter.labels(name)  # from zero
        self.confidences = deque[float](maxlen=DRIFT_IMAGES)  # of the latest predictions
        self.predict = ImageWork(self, predict_batch, Prediction)
        self.features = ImageWork(
            self,
            lambda predictor, images, items: [
                FeatureVector(item.name, row)
                for item, row in zip(items, predictor.forward_features(images).numpy(), strict=True)
            ],
            FeatureVector,
        )

    @cached_property
    def info(self) -> schemas.ModelInfo:
        """Public information about the model: nothing about this machine, its files or its data."""
        model, config = self.predictor.model, self.pool.config
        vit = model if isinstance(model, VisionTransformer) else None
        return schemas.ModelInfo(
            name=self.name,
            digest=self.digest,
            architecture="onnx" if model is None else name_of(model.config),
            classes=list(self.predictor.classes),
            image_size=list(self.predictor.metadata.preprocessing.size),
            channels=self.predictor.channels,
            parameters=None if model is None else sum(p.numel() for p in model.parameters()),
            engine=self.predictor.engine.name,
            multi_label=self.predictor.metadata.multi_label,
            conformal=self.predictor.conformal
            and schemas.ConformalInfo.model_validate(self.predictor.conformal),
            methods=list(methods_of(model)),
            layers=vit.config.depth if vit else 0,
            heads=vit.config.heads if vit else 0,
            teach=self.memory is not None,
            limits=schemas.LimitsInfo(
                bytes=config.max_body,
                pictures=config.max_images,
                pixels=config.max_pixels,
                seconds=config.timeout,
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


# Explanations


def methods_of(model: Model | None) -> tuple[str, ...]:
    """Return the explanation methods of a model, the default first; none without attention."""
    if not isinstance(model, VisionTransformer):
        return ()
    return CLASS_AGNOSTIC if model.head is None else CLASS_SPECIFIC + CLASS_AGNOSTIC


def explain(model: Model, image: InputImage, *, method: str | None, label: str | None) -> bytes:
    """Return a PNG of the grayscale image, overlaid with a heat map of the evidence for a class.

    `method` defaults to the model's first, `label` to the predicted class.
    """
    vit = with_attention(model, "explanation")
    method = method or methods_of(vit)[0]
    if method not in methods_of(vit):
        raise unknown("method", method, methods_of(vit))
    classes = None
    if label is not None:
        names = get_metadata(vit).names(vit.config.num_classes)
        if label not in names:
            raise unknown(
                "class", label, names, "see /model" if len(names) > MAX_LISTED_CLASSES else ""
            )
        if method in CLASS_AGNOSTIC:
            raise ConfigError(
                f"{method} is the same for every class; leave class={label} out, "
                f"or use {' or '.join(CLASS_SPECIFIC)}"
            )
        classes = torch.tensor([names.index(label)])
    values = METHODS[method](vit, image.tensor[None], classes)[0]  # (h, w)
    values = values.float().cpu().numpy()
    return to_png(overlay(image.pixels, values, image.box, "heat", offset=token_offset(vit)))


@torch.inference_mode()
def attention(model: Model, view: View) -> schemas.AttentionResponse:
    """Return where the tokens that the head reads attend, for every layer and head.

    The head reads the class token, the mean of the patches, or the output of attention pooling.
    """
    vit, (pixels, box) = with_attention(model, "attention map"), view
    image = pixels[None]  # (1, C, H, W)
    (last,) = deque(iter_layers(vit, image), maxlen=1)
    weights = head_weights(vit, last.tokens, "mean")[0]  # (N,)
    grid, prefix = patch_grid(vit, image), vit.config.num_prefix
    layers = []
    for layer in iter_layers(vit, image):
        attended = layer.query.new_zeros(layer.query.shape[1], layer.query.shape[2])  # (H, N)
        for part, rows in layer.slices():
            if weights[rows].any():
                attended += weights[rows] @ layer.distributions(part, rows)[0]  # (H, q, N)
        layers.append(attended[:, prefix:])
    maps = torch.stack(layers)  # (L, H, h * w)
    peaks = maps.amax(dim=-1)  # (L, H)
    rolled = rollout(vit, image)[0]  # (h, w)
    return schemas.AttentionResponse(
        grid=list(grid),
        layers=len(maps),
        heads=maps.shape[1],
        box=box,
        lag=token_offset(vit),
        maps=to_base64(maps, peaks[..., None]),
        peaks=[[round(peak, 6) for peak in row] for row in peaks.tolist()],
        rollout=to_base64(rolled, rolled.amax()),
    )


def load_view(model: Model, data: bytes) -> View:
    """Decode what `attention` needs of an image."""
    header = open_image(data)
    height, width = header.height, header.width
    box = crop_box(get_metadata(model).preprocessing, height, width)
    sides = (box.top / height, box.left / width)
    sides += ((box.bottom - box.top) / height, (box.right - box.left) / width)
    return preprocess(model, data), [round(side, 5) for side in sides]


def with_attention(model: Model, what: str) -> VisionTransformer:
    """Return the model, or a copy that shares its weights and does not merge tokens."""
    vit = require_attention(model, what)
    if not vit.merge:
        return vit
    with torch.device("meta"):
        copy = VisionTransformer(vit.config)
    copy.load_state_dict(vit.state_dict(keep_vars=True), assign=True)
    copy.metadata = vit.metadata
    return copy.eval()


def to_base64(values: Tensor, largest: Tensor) -> str:
    """Encode values as base64 of bytes, with `largest` as 255."""
    tiny = torch.finfo(values.dtype).tiny
    scaled = (255 * values / largest.clamp_min(tiny)).round().byte()
    return base64.b64encode(scaled.cpu().numpy().tobytes()).decode("ascii")


# Teaching


def load_memory(
    predictor: Predictor, reference: str, using: str | None
) -> tuple[ProbeMemory, list[str]]:
    """Return what a model remembers of its classes, and notes on how that was obtained."""
    if predictor.model is None:
        raise ConfigError(
            f"{reference} is an exported model and cannot be taught; serve the bundle"
        )
    if predictor.metadata.multi_label:
        raise ConfigError(f"{reference} is a multi-label model and cannot be taught")
    memory, notes = recall(predictor.model, Path(reference), using, only=False)
    return memory, [*notes[:1], *([HEAD_REPLACED] if notes else [])]


def folder_for(root: Path | None, name: str, reference: str, *, several: bool) -> Path | None:
    """Return where a taught model is saved.

    Never over another model, nor over the served one if that has a trained head.
    """
    if root is None:
        return None
    folder = root / name if several else root
    in_place = folder.resolve() == Path(reference).resolve()
    if contains_model(folder) and not in_place:
        raise ConfigError(f"{folder} already holds a model; serve that one, or name another folder")
    if contains_model(folder) and not (folder / MEMORY_FILE).is_file():
        raise ConfigError(
            f"{folder} has no {MEMORY_FILE}, and only a bundle with one is changed in place; "
            "pass another folder to --teach-to"
        )
    return folder


def teach(
    registry: ModelRegistry,
    name: str,
    label: str,
    uploads: Sequence[Upload],
    images: "Sequence[Future[torch.Tensor]]",
    folder: Path | None,
) -> schemas.TeachResponse:
    """Add a class to a served model, or replace it. `images` are the decoded uploads.

    Runs in the batch thread. An abandoned thread may come back at any time, so the model that it
    started from must still be the served one.
    """
    start = time.perf_counter()
    served = registry.get(name)
    old_model, old_memory = served.predictor.model, served.memory
    assert old_model is not None
    assert old_memory is not None
    decoded, errors = [], []
    for upload, image in zip(uploads, images, strict=True):
        try:
            decoded.append(image.result())
        except DataError as error:
            errors.append(schemas.ImageStatus(name=upload.name, error=str(error)))
    if not decoded:
        raise DataError(f"none of {len(uploads)} images could be read: {errors[0].error}")
    device = next(old_model.parameters()).device
    engine = TorchEngine(old_model, device=device)
    preprocessing = served.predictor.metadata.preprocessing
    batches = torch.stack(decoded).split(FEATURE_BATCH_SIZE)
    features = torch.cat([engine.features(normalize(x, preprocessing)) for x in batches])  # (n, D)
    memory = old_memory.with_class(label, features)
    if memory.rows.nbytes > MAX_BYTES:
        raise ApiError(413, "the model cannot store more taught classes", reason="size")
    notes, held_out, predictor = [], None, served.predictor
    if len(memory.classes) < 2:
        notes.append("a classifier needs two classes; teach another one")
    else:
        earlier = () if len(old_memory.classes) > 1 else old_memory.classes  # had no head yet
        taught, memory, held_out = fit_head(old_model, memory, taught=(*earlier, label))
        predictor = Predictor(taught, device=str(device))
        if predictor.engine.name != served.predictor.engine.name:
            notes.append(f"engine changed from {served.predictor.engine.name} to torch")
    with registry.lock:
        if registry.get(name) is not served:
            text = "the model changed in the meantime and the class was not added; send it again"
            raise ApiError(503, text, reason="changed", headers={"Retry-After": "1"})
        if folder is not None and len(memory.classes) > 1:
            assert predictor.model is not None
            save_taught(predictor.model, memory, folder)
        served.metrics.models.remove(name, __version__, served.digest)
        registry.models[name] = ServedModel(
            name,
            predictor,
            served.pool,
            served.metrics,
            batch_size=served.batch_size,
            memory=memory,
        )
    return schemas.TeachResponse(
        model=name,
        engine=predictor.engine.name,
        seconds=round(time.perf_counter() - start, 4),
        classes=list(memory.classes),
        pictures=len(features),
        replaced=label in old_memory.classes,
        accuracy=held_out and held_out.accuracy,
        balanced_accuracy=held_out and held_out.balanced_accuracy,
        notes=notes,
        errors=errors,
    )


def save_taught(model: Model, memory: ProbeMemory, folder: Path) -> None:
    """Save a taught model; an error leaves the folder as it was.

    The memory is moved first, since the model can be rebuilt from it if the process is killed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".teach-") as scratch:
            new, backup = Path(scratch) / folder.resolve().name, Path(scratch) / "old"
            backup.mkdir()
            save_memory(memory, new)
            save(model, new)
            if not is_generated_card(folder / CARD):
                (new / CARD).unlink()
            names = [name for name in (MEMORY_FILE, WEIGHTS, CONFIG, CARD) if (new / name).exists()]
            moved: list[str] = []
            try:
                for name in names:
                    if (folder / name).is_file():
                        shutil.copy2(folder / name, backup / name)
                    (new / name).replace(folder / name)
                    moved.append(name)
            except OSError:
                for name in moved:
                    (folder / name).unlink()
                    if (backup / name).exists():
                        (backup / name).replace(folder / name)
                raise
    except (OSError, VitrailError):
        text = "the server cannot save the taught model, and the class was not added"
        raise ApiError(503, text, reason="disk") from None


# Example images


class Example(NamedTuple):
    """An image in a format that browsers can show."""

    label: str
    data: bytes
    media_type: str


def examples_from(config: ServerConfig, reference: str) -> str:
    """Return the dataset to take examples from; empty for the model's training data.

    The model's metadata name its training data. So unless `config.examples` is set, examples are
    shown only for a model on this machine, and only to clients on this machine.
    """
    if config.examples:
        return config.examples
    local = not reference.startswith("hf:") and Path(reference).expanduser().exists()
    private = config.is_loopback and not config.allow_host  # no proxy
    return "" if local and private else NO_EXAMPLES


def find_examples(metadata: Metadata, data: str) -> list[Example]:
    """Return examples of `data`, or of the model's own data if that is on this machine.

    Unless a dataset is configured, nothing is downloaded and errors are ignored.
    """
    reference = data or metadata.local_data
    if reference in ("", NO_EXAMPLES):
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
        labels = [labels_of[0] if labels_of else -1 for labels_of in labels]
    first = np.asarray(labels)
    classes = spread(np.unique(first), count)
    per_class = -(-count // max(1, len(classes)))
    rows = [spread(np.flatnonzero(first == number), per_class) for number in classes]
    turns = chain.from_iterable(zip_longest(*rows))
    return [int(row) for row in turns if row is not None][:count]


def spread(values: np.ndarray, count: int) -> np.ndarray:
    """Return up to `count` values, evenly spaced."""
    return values[np.linspace(0, len(values) - 1, min(count, len(values))).astype(int)]


def read_example(source: Dataset, row: int) -> Example | None:
    """Return one image, unchanged if browsers can show it; None if it cannot be read."""
    try:
        label, data = source[row].label, source[row].data
        format = read_header(data).format if isinstance(data, bytes) else ""
    except DataError:
        return None
    label = ", ".join(source.classes[n] for n in (label if isinstance(label, tuple) else [label]))
    if isinstance(data, bytes) and len(data) <= MAX_EXAMPLE_BYTES and format in MEDIA_TYPES:
        return Example(label, data, MEDIA_TYPES[format])
    image = thumbnail(source, row, EXAMPLE_SIDE, enlarge=False)
    if image is None:
        return None
    if isinstance(data, np.ndarray):
        return Example(label, to_png(image), "image/png")
    return Example(label, to_jpeg(image), "image/jpeg")
