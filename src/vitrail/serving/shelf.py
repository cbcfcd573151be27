"""The models that are served, by name. A lesson puts another version in a model's place."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, unknown
from vitrail.models.names import name_of
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
            "image_size": list(self.predictor.facts.preprocessing.size),
            "channels": self.predictor.channels,
            "parameters": None if model is None else sum(p.numel() for p in model.parameters()),
            "engine": self.predictor.engine.name,
            "multi_label": self.predictor.facts.multi_label,
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


def by_name(words: tuple[str, ...]) -> dict[str, str]:
    """What each model is called, and where it is, of words such as `runs/a` and `digits=runs/b`."""
    if not words:
        raise ConfigError("serve what? Give a bundle, a file of weights, or hf:owner/name")
    places: dict[str, str] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not equals or Path(word).exists():
            name, place = Path(word).resolve().name if Path(word).exists() else word, word
            name = name.rpartition("/")[2].rpartition(":")[2].removesuffix(".onnx")
        if not (name and place and name.isprintable()):
            raise ConfigError(f"{word!r} names no model; write runs/first, or digits=runs/first")
        if name in places:
            raise ConfigError(
                f"two models are called {name!r}: {places[name]} and {place}; "
                f"give one another name, such as other={place}"
            )
        places[name] = place
    return places
