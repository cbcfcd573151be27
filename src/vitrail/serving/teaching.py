"""Classes that clients add to a served model with a few images each.

The head becomes a linear probe, fitted in closed form to everything the model remembers (see
`probing/memory.py`). The taught model replaces the old one at once; requests in progress finish on
the old one. It runs in torch, whatever the engine was before.
"""

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vitrail.checkpoints.bundle import CARD, CONFIG, WEIGHTS, contains_model, is_generated_card
from vitrail.checkpoints.save import save
from vitrail.data.transforms import normalize
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.models.vit import Model
from vitrail.prediction.engines import TorchEngine
from vitrail.prediction.predictor import Predictor
from vitrail.probing.memory import MEMORY, MOST_BYTES, Memory, holds_memory, save_memory
from vitrail.probing.teaching import fitted, remembered
from vitrail.serving.limits import ApiError, Upload
from vitrail.serving.registry import ModelRegistry, ServedModel
from vitrail.serving.schemas import ImageStatus, TeachResponse

FEATURE_BATCH_SIZE = 16
HEAD_REPLACED = "the first taught class replaces the trained head by a linear probe"


def load_memory(
    predictor: Predictor, reference: str, using: str | None
) -> tuple[Memory, list[str]]:
    """Return what a model remembers of its classes, and notes on how that was obtained."""
    if predictor.model is None:
        raise ConfigError(
            f"{reference} is an exported model and cannot be taught; serve the bundle"
        )
    if predictor.metadata.multi_label:
        raise ConfigError(f"{reference} is a multi-label model and cannot be taught")
    memory, notes = remembered(predictor.model, Path(reference), using, only=False)
    return memory, [*notes[:1], *([HEAD_REPLACED] if notes else [])]


def folder_for(root: Path | None, name: str, reference: str, *, several: bool) -> Path | None:
    """Return where a taught model is saved.

    Never over another model, nor over the served one if that has a trained head.
    """
    if root is None:
        return None
    folder = root / name if several else root
    own = folder.resolve() == Path(reference).resolve()
    if contains_model(folder) and not own:
        raise ConfigError(f"{folder} already holds a model; serve that one, or name another folder")
    if contains_model(folder) and not holds_memory(folder):
        raise ConfigError(
            f"{folder} has no {MEMORY}, and only a bundle with one is changed in place; "
            "give --teach-to another folder"
        )
    return folder


def teach(
    registry: ModelRegistry,
    model: str | None,
    label: str,
    uploads: Sequence[Upload],
    images: "Sequence[Future[torch.Tensor]]",
    folder: Path | None,
) -> TeachResponse:
    """Add a class to a served model, or replace it. `images` are the decoded uploads.

    Runs in the batch thread. An abandoned thread may come back at any time, so the model that it
    started from must still be the served one.
    """
    start = time.perf_counter()
    served = registry.get(model)
    name = served.name
    old_model, old_memory = served.predictor.model, served.memory
    assert old_model is not None
    assert old_memory is not None
    features, errors = extract_features(served.predictor, old_model, uploads, images)
    memory = old_memory.with_class(label, features)
    if memory.rows.nbytes > MOST_BYTES:
        raise ApiError(413, "the model's memory for taught classes is full", reason="size")
    notes, accuracy, predictor = [], None, served.predictor
    if len(memory.classes) < 2:
        notes.append("a classifier needs two classes; teach another one")
    else:
        earlier = () if len(old_memory.classes) > 1 else old_memory.classes  # had no head yet
        taught, memory, accuracy = fitted(old_model, memory, taught=(*earlier, label))
        predictor = Predictor(taught, device=str(next(old_model.parameters()).device))
        if predictor.engine.name != served.predictor.engine.name:
            notes.append(f"engine changed from {served.predictor.engine.name} to torch")
    with registry.lock:
        if registry.get(name) is not served:
            text = "the model changed in the meantime and the class was not added; send it again"
            raise ApiError(503, text, reason="changed", headers={"Retry-After": "1"})
        if folder is not None and len(memory.classes) > 1:
            assert predictor.model is not None
            save_taught(predictor.model, memory, folder)
        shared, size = (served.pool, served.metrics), served.batch_size
        registry.set(ServedModel(name, predictor, *shared, batch_size=size, memory=memory))
    return TeachResponse(
        model=name,
        engine=predictor.engine.name,
        seconds=round(time.perf_counter() - start, 4),
        classes=list(memory.classes),
        pictures=len(features),
        replaced=label in old_memory.classes,
        accuracy=accuracy,
        notes=notes,
        errors=errors,
    )


def extract_features(
    predictor: Predictor,
    model: Model,
    uploads: Sequence[Upload],
    images: "Sequence[Future[torch.Tensor]]",
) -> tuple[torch.Tensor, list[ImageStatus]]:
    """Return features (n, D) of the images that can be read, and the errors of the others."""
    engine = TorchEngine(model, device=next(model.parameters()).device)
    decoded, errors = [], []
    for upload, image in zip(uploads, images, strict=True):
        try:
            decoded.append(image.result())
        except DataError as error:
            errors.append(ImageStatus(name=upload.name, error=str(error)))
    if not decoded:
        raise DataError(f"none of {len(uploads)} images could be read: {errors[0].error}")
    preprocessing = predictor.metadata.preprocessing
    batches = [
        engine.features(normalize(torch.stack(decoded[i : i + FEATURE_BATCH_SIZE]), preprocessing))
        for i in range(0, len(decoded), FEATURE_BATCH_SIZE)
    ]
    return torch.cat(batches), errors


def save_taught(model: Model, memory: Memory, folder: Path) -> None:
    """Save a taught model atomically: an error leaves the folder as it was.

    The memory is moved first, since the model can be rebuilt from it if the process is killed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".lesson-") as scratch:
            new, backup = Path(scratch) / folder.resolve().name, Path(scratch) / "old"
            backup.mkdir()
            save_memory(memory, new)
            save(model, new)
            if not is_generated_card(folder / CARD):
                (new / CARD).unlink()
            move_files(new, folder, backup)
    except (OSError, VitrailError):
        text = "the server cannot save the taught model, and the class was not added"
        raise ApiError(503, text, reason="disk") from None


def move_files(new: Path, folder: Path, backup: Path) -> None:
    """Move a bundle's files into a folder; on an error, restore those that were there."""
    names = [name for name in (MEMORY, WEIGHTS, CONFIG, CARD) if (new / name).exists()]
    for name in names:
        if (folder / name).is_file():
            try:
                os.link(folder / name, backup / name)
            except OSError:  # hard links are not supported everywhere
                shutil.copy2(folder / name, backup / name)
    moved: list[str] = []
    try:
        for name in names:
            (new / name).replace(folder / name)
            moved.append(name)
    except OSError:
        for name in moved:
            if (backup / name).exists():
                (backup / name).replace(folder / name)
            else:
                (folder / name).unlink()
        raise
