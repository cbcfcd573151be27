"""The models that are served, by name. A lesson puts another version in a model's place."""

from collections.abc import Mapping
from functools import cached_property
from threading import Lock
from typing import Any

from vitrail.errors import unknown
from vitrail.models.registry import name_of
from vitrail.models.vit import VisionTransformer
from vitrail.prediction.predictor import Predictor
from vitrail.probing.memory import Memory
from vitrail.serving.looking import methods_of
from vitrail.serving.refusals import Refusal
from vitrail.serving.work import USUAL_BATCH, Answering, Featuring, Tools


class Served:
    """A model under its name, in one of its versions; requests keep the one they began with."""

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        tools: Tools,
        *,
        batch: int = USUAL_BATCH,
        memory: Memory | None = None,
    ) -> None:
        self.name, self.predictor, self.tools, self.memory = name, predictor, tools, memory
        self.answering = Answering(predictor, tools, batch)
        self.featuring = Featuring(predictor, tools, batch)

    @property
    def batch(self) -> int:
        return self.answering.most

    @batch.setter
    def batch(self, pictures: int) -> None:
        self.answering.most = self.featuring.most = pictures

    @cached_property
    def about(self) -> dict[str, Any]:
        """What anybody may know: nothing of this machine, its files or its data."""
        model, limits = self.predictor.model, self.tools.limits
        vit = model if isinstance(model, VisionTransformer) else None
        return {
            "name": self.name,
            "architecture": "onnx" if model is None else name_of(model.config),
            "classes": list(self.predictor.classes),
            "image_size": list(self.predictor.metadata.preprocessing.size),
            "channels": self.predictor.channels,
            "parameters": None if model is None else sum(p.numel() for p in model.parameters()),
            "engine": self.predictor.engine.name,
            "multi_label": self.predictor.metadata.multi_label,
            "methods": list(methods_of(model)),
            "layers": vit.config.depth if vit else 0,
            "heads": vit.config.heads if vit else 0,
            "teach": self.memory is not None,
            "limits": {
                "bytes": limits.body,
                "pictures": limits.pictures,
                "pixels": limits.pixels,
                "seconds": limits.timeout,
            },
        }


class Shelf:
    """Served models; the first is meant where none is named."""

    def __init__(self, models: Mapping[str, Served]) -> None:
        self.models = dict(models)
        self.lock = Lock()  # held while a lesson is written down and its model replaced

    @property
    def names(self) -> list[str]:
        return list(self.models)

    def get(self, name: str | None) -> Served:
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Refusal(404, str(unknown("model", name[:100], self.models)), reason="model")
        return self.models[name]

    def replace(self, served: Served) -> None:
        """From now on, this version."""
        self.models[served.name] = served
