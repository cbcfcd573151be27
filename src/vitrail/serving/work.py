"""What is done to the pictures of many requests at once, in the batcher's thread.

Decoding and running take turns, each with all cores: the threads of a matrix product wait for
each other, so that one which shares its core with a decoder holds up all. An image whose decoding
holds up its batch is left behind and joins a later one.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.decoding import open_picture
from vitrail.errors import DataError
from vitrail.prediction.answers import Answer
from vitrail.prediction.predictor import Predictor
from vitrail.serving.meters import Meters
from vitrail.serving.readers import Readers
from vitrail.serving.settings import MOST_PIXELS, Limits

SIZES = (1, 2, 4, 8, 16, 32)
USUAL_BATCH = 8
ENOUGH = 0.99  # of the best pace: a lone request never waits for a batch to fill
MEASURED = 2.0  # seconds
STALL = 0.05  # seconds in which no image of a batch is decoded, after which it runs without them


@dataclass(slots=True)
class Piece:
    """One picture of a request, and how its answer is made."""

    name: str
    data: bytes
    top: int = 1
    threshold: float | None = None
    image: "Future[Tensor] | None" = None  # decoded, or about to be


class Vector(NamedTuple):
    """The features of one picture, or why it has none."""

    name: str
    values: np.ndarray | None  # (D,)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What all work is done with."""

    readers: Readers
    limits: Limits
    meters: Meters


class Pictures(ABC):
    """A model's work on pictures: what can be read is prepared and run together."""

    def __init__(self, predictor: Predictor, tools: Tools, most: int = USUAL_BATCH) -> None:
        self.predictor, self.tools, self.most = predictor, tools, most

    def __call__(self, pieces: Sequence[Piece]) -> list[Any]:
        """What `told` makes of those that can be read, `unread` of the others."""
        begun = time.perf_counter()
        prepared = self.prepared(pieces)
        images = {place: x for place, x in enumerate(prepared) if isinstance(x, Tensor)}
        results: list[Any] = [
            self.unread(piece, found) if isinstance(found, DataError) else found
            for piece, found in zip(pieces, prepared, strict=True)
        ]
        ready = time.perf_counter()
        if images:
            batch = torch.stack(list(images.values()))  # (B, C, H, W)
            told = self.told(batch, [pieces[place] for place in images])
            for place, result in zip(images, told, strict=True):
                results[place] = result
        meters = self.tools.meters
        meters.stages.see(ready - begun, "prepare")
        meters.stages.see(time.perf_counter() - ready, "run")
        meters.pictures.add(amount=len(images))
        deferred = sum(isinstance(image, Future) for image in prepared)
        meters.unreadable.add(amount=len(pieces) - len(images) - deferred)
        return results

    def prepared(self, pieces: Sequence[Piece]) -> list["Tensor | BaseException | Future[Tensor]"]:
        """uint8 (C, H, W) for each; or the error, or the future of what is still being decoded."""
        futures: list[Future[Tensor]] = []
        for piece in pieces:
            if piece.image is None:
                piece.image = self.tools.readers.submit(piece.data, self.prepare)
            futures.append(piece.image)
        waiting, before = {*futures}, 0
        while waiting and len(waiting) != before:  # as long as some get done
            before = len(waiting)
            waiting = wait(waiting, timeout=STALL).not_done
        return [outcome(future) for future in futures]

    def prepare(self, data: bytes) -> Tensor:
        return self.predictor.prepare(checked(data, self.tools.limits))

    @abstractmethod
    def told(self, images: Tensor, pieces: Sequence[Piece]) -> Sequence[Any]:
        """The results of prepared pictures uint8 (B, C, H, W)."""

    @abstractmethod
    def unread(self, piece: Piece, error: DataError) -> Any:
        """The result of a picture that cannot be read."""


def outcome(future: "Future[Tensor]") -> "Tensor | BaseException | Future[Tensor]":
    """The result or the error; the future itself if it has neither yet."""
    if not future.done():
        return future
    if future.cancelled():
        return CancelledError()  # nobody waits for it any more
    return future.exception() or future.result()


class Answering(Pictures):
    """Pictures → answers. Requests may want them told differently: only logits are shared."""

    def told(self, images: Tensor, pieces: Sequence[Piece]) -> Sequence[Answer]:
        logits = self.predictor.logits(images)  # (B, K)
        found: dict[int, Answer] = {}
        for how in {(piece.top, piece.threshold) for piece in pieces}:
            rows = [r for r, piece in enumerate(pieces) if (piece.top, piece.threshold) == how]
            own = logits if len(rows) == len(pieces) else logits[rows]
            names = [pieces[row].name for row in rows]
            told = self.predictor.answers(own, names, top=how[0], threshold=how[1])
            found |= zip(rows, told, strict=True)
        return [found[row] for row in range(len(pieces))]

    def unread(self, piece: Piece, error: DataError) -> Answer:
        return Answer(name=piece.name, error=str(error))


class Featuring(Pictures):
    """Pictures → vectors."""

    def told(self, images: Tensor, pieces: Sequence[Piece]) -> Sequence[Vector]:
        values = self.predictor.vectors(images).numpy()  # (B, D)
        return [Vector(p.name, row) for p, row in zip(pieces, values, strict=True)]

    def unread(self, piece: Piece, error: DataError) -> Vector:
        return Vector(piece.name, None, str(error))


class Alone:
    """A function that is called once, with nothing beside it, after its images are decoded."""

    most = 1

    def __init__(self, function: Callable[[], Any], decoding: "Sequence[Future[Any]]" = ()) -> None:
        self.function, self.decoding = function, decoding

    def __call__(self, pieces: Sequence[Any]) -> list[Any]:
        late = [future for future in self.decoding if not future.done()]
        return late[:1] or [self.function()]


def checked(data: bytes, limits: Limits) -> bytes:
    """A picture that is not too large to be decoded; a `DataError` if it is."""
    if limits.pixels < MOST_PIXELS:  # more is never decoded
        open_picture(data, max_pixels=limits.pixels)
    return data


def best_batch(predictor: Predictor, seconds: float = MEASURED) -> int:
    """The smallest batch that is nearly as fast as any: what is larger would only wait longer."""
    until, paces = time.perf_counter() + seconds, {}
    for count in SIZES:
        try:
            paces[count] = pace(predictor, count, seconds / 20)
        except (RuntimeError, MemoryError):  # no memory for so many
            if not paces:
                raise
            break
        if time.perf_counter() > until:
            break
    return next(count for count in paces if paces[count] >= ENOUGH * max(paces.values()))


def pace(predictor: Predictor, count: int, seconds: float) -> float:
    """Pictures per second, so many at once."""
    run_once(predictor, count)  # the first is slower
    taken = []
    while len(taken) < 3 or (len(taken) < 10 and sum(taken) < seconds):
        begun = time.perf_counter()
        run_once(predictor, count)
        taken.append(time.perf_counter() - begun)
    return count / min(taken)


def run_once(predictor: Predictor, count: int) -> int:
    """Look at so many black pictures; how many they were."""
    size = predictor.metadata.preprocessing.size
    predictor.logits(torch.zeros(count, predictor.channels, *size, dtype=torch.uint8))
    return count
