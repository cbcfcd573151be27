"""`vitrail.Predictor`: a picture, or many, to answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from os import PathLike
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import distributed
from vitrail.checkpoints.load import Reference, load
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.data.given import Picture, name_of, read, several
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.threads import reading_threads
from vitrail.data.transforms import EvaluationTransform, normalize
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.api import Runner
from vitrail.models.build import Model
from vitrail.prediction.answers import USUAL_TOP, Answer, Deciding, Seen, answers
from vitrail.prediction.engines import Choice, Engine, Guard, open_engine, open_onnx

USUAL_BATCH = 16


class Predictor:
    """A model that answers for pictures.

    >>> predictor = Predictor("runs/first")
    >>> predictor("cat.jpg").label
    >>> [answer.guesses for answer in predictor([picture, other, "third.png"])]

    `model` is a model, any reference to one, or an .onnx file of `vitrail export`. `engine` is
    torch, onnx, onnx-int8, or auto, which takes the fastest; `guard` says how much accuracy int8
    may cost and on which pictures that is measured. `merge` merges so many tokens in each layer.
    `preprocessing` is as in `load`. `tell` hears what was chosen.

    A model that is given as such is not copied. It is moved to the device, keeps its own `merge`
    unless one is given, and is in the mode it was in after each answer; call its `eval()` first to
    ask from several threads.
    """

    def __init__(
        self,
        model: Model | Reference,
        *,
        engine: Choice = "",
        merge: int | None = None,
        guard: Guard | None = None,
        preprocessing: str | Preprocessing | None = None,
        device: str = "",
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.model: Model | None = None
        self.device = torch.device("cpu")
        exported = isinstance(model, str | PathLike) and str(model).endswith(".onnx")
        if preprocessing is not None and (exported or isinstance(model, nn.Module)):
            raise ConfigError(
                "preprocessing is for a checkpoint; an .onnx file holds its own, and a model has "
                "it in model.metadata"
            )
        if isinstance(model, str | PathLike) and exported:
            if merge or engine not in ("", "onnx"):
                raise ConfigError(f"{model} is run by onnxruntime, as it is; leave the engine out")
            session = open_onnx(model)
            self.engine: Engine = session
            self.metadata: Metadata = session.metadata
            self.channels, self.num_classes = session.channels, session.num_classes
        else:
            self.model = (
                model
                if isinstance(model, nn.Module)
                else load(model, preprocessing=preprocessing, log=tell)
            )
            self.device = distributed.init(device)
            self.engine = open_engine(
                self.model,
                engine or "torch",
                merge=merge,
                guard=guard or Guard(),
                device=self.device,
                tell=tell or (lambda line: None),
            )
            self.metadata = get_metadata(self.model)
            self.channels = self.model.config.channels
            self.num_classes = self.model.config.num_classes
        self.classes = self.metadata.names(self.num_classes)
        self.transform = EvaluationTransform(
            preprocessing=self.metadata.preprocessing, channels=self.channels
        )

    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]: a path is many letters, too
        self, pictures: Picture, *, top: int = ..., threshold: float | None = ...
    ) -> Answer: ...

    @overload
    def __call__(
        self, pictures: Sequence[Picture], *, top: int = ..., threshold: float | None = ...
    ) -> list[Answer]: ...

    def __call__(
        self,
        pictures: Picture | Sequence[Picture],
        *,
        top: int = USUAL_TOP,
        threshold: float | None = None,
    ) -> Answer | list[Answer]:
        """An answer for one picture, or one for each of a list.

        A picture is a path, the bytes of a file, a Pillow image, or pixels: uint8 (H, W) or
        (H, W, C). One that cannot be read is a `DataError`; `stream` goes on instead.
        """
        given, many = several(pictures)
        found = []
        for answer in self.stream(given, top=top, threshold=threshold):
            if answer.error:
                raise DataError(f"{answer.name}: {answer.error}")
            found.append(answer)
        return found if many else found[0]

    def features(self, pictures: Picture | Sequence[Picture]) -> np.ndarray:
        """The vector of one picture (D,), or of each of a list (N, D)."""
        given, many = several(pictures)
        rows = []
        for seen in self.look(given, vectors=True):
            for name, error in zip(seen.names, seen.errors, strict=True):
                if error:
                    raise DataError(f"{name}: {error}")
            assert seen.found is not None
            rows.append(seen.found.numpy())
        found = np.concatenate(rows) if rows else np.zeros((0, 0), np.float32)
        return found if many else found[0]

    def stream(
        self,
        pictures: Iterable[Picture],
        *,
        top: int = USUAL_TOP,
        threshold: float | None = None,
        batch_size: int = USUAL_BATCH,
    ) -> Iterator[Answer]:
        """Answers in the order of the pictures, as they come; of any number of them.

        A picture that cannot be read has an answer with its `error`.
        """
        deciding = Deciding(top=top, threshold=threshold)
        if not self.num_classes:
            raise ConfigError("the model knows no classes; ask for its features, or teach it some")
        for seen in self.look(pictures, batch_size=batch_size):
            yield from seen.answers(self.metadata, deciding)

    def look(
        self,
        pictures: Iterable[Picture],
        *,
        batch_size: int = USUAL_BATCH,
        vectors: bool = False,
    ) -> Iterator[Seen]:
        """Batches of what the model makes of pictures: logits, or features if `vectors`.

        On the CPU, threads prepare a batch while the model rests, and the model has all cores while
        it works: the two would only get in each other's way. Files are read ahead meanwhile; for
        another device, pictures are prepared ahead.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be 1 or more")
        numbered = iter(enumerate(pictures))
        ahead = self.begin(islice(numbered, batch_size))
        while ahead:
            names = [name for name, _ in ahead]
            prepared = list(self.threads.map(self.prepared, [data for _, data in ahead]))
            ahead = self.begin(islice(numbered, batch_size))
            yield self.seen(names, prepared, vectors)

    def begin(self, pictures: Iterable[tuple[int, Picture]]) -> list[tuple[str, Future]]:
        """Read some pictures, in other threads: their names, and what will be there."""
        return [(name_of(one, n), self.threads.submit(self.early, one)) for n, one in pictures]

    def early(self, picture: Picture) -> bytes | np.ndarray | Tensor:
        """What is done to a picture while the model works on those before it."""
        data = read(picture, self.channels)
        return data if self.device.type == "cpu" else self.prepare(data)

    def prepared(self, data: "Future[bytes | np.ndarray | Tensor]") -> Tensor | str:
        """A picture as the model takes it, or why it cannot be read."""
        try:
            found = data.result()
            return found if isinstance(found, Tensor) else self.prepare(found)
        except DataError as error:
            return str(error)

    def seen(self, names: list[str], prepared: list[Tensor | str], vectors: bool) -> Seen:
        images = [image for image in prepared if isinstance(image, Tensor)]
        errors = ["" if isinstance(image, Tensor) else image for image in prepared]
        run = self.vectors if vectors else self.logits
        return Seen(names, errors, run(torch.stack(images)) if images else None)

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """What prepares pictures."""
        return reading_threads()

    @property
    def runner(self) -> Runner:
        """What `vitrail.evaluate` takes, so that what is measured is what answers."""
        return Runner(
            run=self.engine,
            metadata=self.metadata,
            num_classes=self.num_classes,
            channels=self.channels,
            device=self.device,
        )

    def prepare(self, data: bytes | np.ndarray) -> Tensor:
        """A picture, encoded or as pixels, as the model takes it: uint8 (C, H, W)."""
        return self.transform(data)

    def logits(self, images: Tensor) -> Tensor:
        """What the model makes of prepared pictures uint8 (B, C, H, W): (B, K)."""
        return self.engine(normalize(images.to(self.device), self.metadata.preprocessing))

    def vectors(self, images: Tensor) -> Tensor:
        """Their features (B, D)."""
        return self.engine.features(normalize(images.to(self.device), self.metadata.preprocessing))

    def answers(
        self,
        logits: Tensor,
        names: Sequence[str],
        *,
        top: int = USUAL_TOP,
        threshold: float | None = None,
    ) -> list[Answer]:
        """Logits (B, K) in words."""
        return answers(logits, names, self.metadata, Deciding(top=top, threshold=threshold))
