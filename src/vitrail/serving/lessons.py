"""Classes that are taught while the server runs, by a few pictures of each.

The head becomes a probe that is fitted in closed form to everything the model remembers (see
`probing/memory.py`). The taught model takes the place of the old one at once; requests under way
finish on the old one. It is run by torch, whatever engine ran the one before.
"""

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vitrail.checkpoints.bundle import CARD, CONFIG, WEIGHTS, contains_model, is_generated_card
from vitrail.checkpoints.save import save
from vitrail.data.transforms import normalize
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.models.build import Model
from vitrail.prediction.engines import TorchEngine
from vitrail.prediction.predictor import Predictor
from vitrail.probing.memory import MEMORY, MOST_BYTES, Memory, holds_memory, save_memory
from vitrail.probing.teaching import fitted, remembered
from vitrail.serving.bodies import Upload
from vitrail.serving.refusals import Refusal
from vitrail.serving.shelf import Served, Shelf

AT_ONCE = 16
LATER = "its first lesson puts a probe in the place of the head that was trained"
LONGEST_NAME = 100


def ready(predictor: Predictor, reference: str, using: str | None) -> tuple[Memory, list[str]]:
    """What a model remembers of the classes it knows, and what was done to find out."""
    if predictor.model is None:
        raise ConfigError(
            f"{reference} is an exported model, which cannot be taught; serve the bundle"
        )
    if predictor.metadata.multi_label:
        raise ConfigError(f"{reference} gives several labels to a picture, and cannot be taught")
    memory, notes = remembered(predictor.model, Path(reference), using, only=False)
    return memory, [*notes[:1], *([LATER] if notes else [])]


def place_for(folder: Path | None, name: str, reference: str, *, several: bool) -> Path | None:
    """Where the lessons of a model are kept; never in the place of another model, nor in its own
    if that has a head that was trained."""
    if folder is None:
        return None
    place = folder / name if several else folder
    own = place.resolve() == Path(reference).resolve()
    if contains_model(place) and not own:
        raise ConfigError(f"{place} holds a model already; serve that one, or name another folder")
    if contains_model(place) and not holds_memory(place):
        raise ConfigError(
            f"{place} has no {MEMORY}, and only a bundle that remembers what it has seen is "
            "changed in place; give --teach-to another folder"
        )
    return place


def teach(
    shelf: Shelf,
    model: str | None,
    label: str,
    uploads: Sequence[Upload],
    images: "Sequence[Future[torch.Tensor]]",
    folder: Path | None,
) -> dict[str, Any]:
    """Give a served model one lesson; what became of it. `images` are the uploads, decoded.

    Runs in the batch thread, one by one. A thread that was abandoned may come back beside it, so
    the model that the lesson began with must still be the one that is served.
    """
    begun = time.perf_counter()
    served = shelf.get(model)
    pupil, before = served.predictor.model, served.memory
    assert pupil is not None
    assert before is not None
    features, errors = seen(served.predictor, pupil, uploads, images)
    memory = before.with_class(label, features)
    if memory.rows.nbytes > MOST_BYTES:
        raise Refusal(413, "the model has learned all it can remember", reason="size")
    notes, accuracy, predictor = [], None, served.predictor
    if len(memory.classes) < 2:
        notes.append("one class cannot be told from anything; teach another one")
    else:
        waiting = () if len(before.classes) > 1 else before.classes  # for a second one
        graduate, memory, accuracy = fitted(pupil, memory, taught=(*waiting, label))
        device = str(next(pupil.parameters()).device)
        predictor = Predictor(graduate, device=device)
        if predictor.engine.name != served.predictor.engine.name:
            notes.append(f"it was run by {served.predictor.engine.name} and is run by torch now")
    taught = Served(served.name, predictor, served.tools, batch=served.batch, memory=memory)
    with shelf.lock:
        if shelf.get(served.name) is not served:
            text = "the model has changed during the lesson, which was not learned; send it again"
            raise Refusal(503, text, reason="changed", headers={"Retry-After": "1"})
        if folder is not None and len(memory.classes) > 1:
            assert predictor.model is not None
            keep(predictor.model, memory, folder)
        shelf.replace(taught)
    return {
        "model": served.name,
        "engine": predictor.engine.name,
        "seconds": round(time.perf_counter() - begun, 4),
        "classes": list(memory.classes),
        "pictures": len(features),
        "replaced": label in before.classes,
        "accuracy": accuracy,
        "notes": notes,
        "errors": errors,
    }


def seen(
    predictor: Predictor,
    model: Model,
    uploads: Sequence[Upload],
    decoded: "Sequence[Future[torch.Tensor]]",
) -> tuple[torch.Tensor, list[dict[str, str]]]:
    """The features (n, D) of the pictures that can be read, and why the others cannot."""
    engine, how = TorchEngine(model, device=next(model.parameters()).device), predictor.metadata
    images, errors = [], []
    for upload, image in zip(uploads, decoded, strict=True):
        try:
            images.append(image.result())
        except DataError as error:
            errors.append({"name": upload.name, "error": str(error)})
    if not images:
        raise DataError(f"none of {len(uploads)} pictures could be read: {errors[0]['error']}")
    parts = [
        engine.features(normalize(torch.stack(images[i : i + AT_ONCE]), how.preprocessing))
        for i in range(0, len(images), AT_ONCE)
    ]
    return torch.cat(parts), errors


def keep(model: Model, memory: Memory, folder: Path) -> None:
    """Write a taught model down, all of it or nothing: an error leaves the folder as it was.

    Its memory comes first, from which the model can be made again if the process is killed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".lesson-") as scratch:
            new, old = Path(scratch) / folder.resolve().name, Path(scratch) / "old"
            old.mkdir()
            save_memory(memory, new)
            save(model, new)
            if not is_generated_card(folder / CARD):
                (new / CARD).unlink()
            move_in(new, folder, old)
    except (OSError, VitrailError):
        text = "the lesson cannot be written down on the server, and was not learned"
        raise Refusal(503, text, reason="disk") from None


def move_in(new: Path, folder: Path, old: Path) -> None:
    """Move a bundle's files into a folder; on an error, back to those that were there."""
    names = [name for name in (MEMORY, WEIGHTS, CONFIG, CARD) if (new / name).exists()]
    for name in names:
        if (folder / name).is_file():
            try:
                os.link(folder / name, old / name)
            except OSError:  # not on every file system
                shutil.copy2(folder / name, old / name)
    moved: list[str] = []
    try:
        for name in names:
            (new / name).replace(folder / name)
            moved.append(name)
    except OSError:
        for name in moved:
            if (old / name).exists():
                (old / name).replace(folder / name)
            else:
                (folder / name).unlink()
        raise
