"""What computes logits: torch itself, or onnxruntime with the same model in its own format.

`auto` times what is there on this machine and takes the fastest. int8 rounds weights, so it is
measured first: what it loses on known pictures must be less than a guard allows.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from vitrail import distributed
from vitrail.data.samples import Samples
from vitrail.errors import ConfigError, VitrailError, unknown
from vitrail.export.kinds import MOST_DROP, EngineKind
from vitrail.formatting import percent
from vitrail.models.build import Model, eval_mode
from vitrail.models.config import pair
from vitrail.models.registry import name_of
from vitrail.models.vit import VisionTransformer

if TYPE_CHECKING:
    from vitrail.export.guard import Cost
    from vitrail.export.sessions import OnnxEngine

Choice = EngineKind | Literal[""]
SECONDS = 2.0  # that auto measures, shared by the engines
TIMED_BATCH = 8
GUARDED = 256  # pictures that int8 is measured on, at most
Tell = Callable[[str], None]


class Engine(Protocol):
    """Images (B, C, H, W), already normalized → logits and features."""

    @property
    def name(self) -> str: ...

    def __call__(self, images: Tensor, /) -> Tensor:
        """Logits (B, K), on the CPU."""
        ...

    def features(self, images: Tensor, /) -> Tensor:
        """Vectors (B, D), on the CPU."""
        ...


class TorchEngine:
    """The model as it is, moved to the device; `merge`, unless it is None, becomes the model's."""

    name = "torch"

    def __init__(
        self, model: Model, *, merge: int | None = None, device: str | torch.device = "cpu"
    ) -> None:
        if merge and not isinstance(model, VisionTransformer):
            raise ConfigError(
                f"merge={merge} merges the tokens of a Vision Transformer; "
                f"{name_of(model.config)} has none"
            )
        self.model = model.to(device)
        self.parts = tuple(model.modules())  # walking through a model for each answer is slow
        self.device = torch.device(device)
        if merge is not None and isinstance(model, VisionTransformer):
            model.merge = merge

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        with self.answering():
            return self.model(images.to(self.device)).float().cpu()

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        with self.answering():
            return self.model.features(images.to(self.device)).float().cpu()

    def answering(self) -> AbstractContextManager[None]:
        """Evaluation mode meanwhile. A model that is in it is left alone, for any thread to use."""
        learning = any(module.training for module in self.parts)
        return eval_mode(self.model) if learning else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What int8 may cost."""

    max_drop: float = MOST_DROP  # share of pictures that are no longer right; 1: whatever it is
    data: str | PathLike[str] | None = None  # pictures with labels; None: those of the training

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop <= 1:
            raise ConfigError(f"max_drop={self.max_drop} must be a share, such as 0.01")


def open_engine(
    model: Model,
    choice: EngineKind,
    *,
    merge: int | None = None,
    guard: Guard,
    device: str | torch.device = "cpu",
    tell: Tell,
) -> Engine:
    """The engine of that name, or for `auto` the fastest one that the guard lets through."""
    if choice not in get_args(EngineKind):
        raise unknown("engine", choice, get_args(EngineKind))
    if merge and choice != "torch":
        raise ConfigError(f"merge={merge} is for the torch engine, not {choice}; leave one out")
    if choice == "auto" and distributed.is_distributed():
        raise ConfigError("engine=auto would choose for each process by itself; name one")
    if choice == "torch" or torch.device(device).type != "cpu":
        if choice not in ("torch", "auto"):
            raise ConfigError(
                f"engine={choice} runs on the CPU, not on {device}; use torch there, or device=cpu"
            )
        return TorchEngine(model, merge=merge, device=device)
    if choice == "auto":
        return fastest(model, guard, tell)
    from vitrail.export.sessions import engine_for

    engine = engine_for(model, choice, tell=tell)
    if choice == "onnx-int8" and guard.max_drop < 1:
        from vitrail.export.guard import refuse

        cost = measured(model, engine, guard)
        refuse(cost, guard.max_drop)
        tell(in_words(cost))
    return engine


def fastest(model: Model, guard: Guard, tell: Tell) -> Engine:
    """Time every engine there is on this machine; the first by speed that may be used."""
    from vitrail.export.sessions import engine_for

    engines: list[Engine] = [TorchEngine(model)]
    for kind in ("onnx", "onnx-int8"):
        try:
            engines.append(engine_for(model, kind, tell=tell))
        except VitrailError as error:  # it is not installed, or nothing for this model
            tell(f"engine auto: not {kind}: {error}")
    if len(engines) == 1:
        return engines[0]
    paces = time_each(engines, model)
    ranked = sorted(engines, key=lambda engine: -paces[engine.name])
    told = ", ".join(f"{engine.name} {paces[engine.name]:,.0f}" for engine in ranked)
    for engine in ranked:
        reason = ""
        if engine.name == "onnx-int8":
            allowed, reason = may_round(model, engine, guard)
            if not allowed:
                tell(f"engine auto: not onnx-int8: {reason}")
                continue
        tell(f"engine auto: {engine.name}{reason and f' ({reason})'}; pictures a second: {told}")
        return engine
    raise AssertionError("torch is always allowed")


def time_each(engines: list[Engine], model: Model) -> dict[str, float]:
    """Pictures a second of each engine, in turns, for two seconds in all."""
    size = pair(model.config.image_size)
    images = torch.randn(TIMED_BATCH, model.config.channels, *size)
    for engine in engines:
        engine(images)  # the first time is slower
    best = dict.fromkeys((engine.name for engine in engines), float("inf"))
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        for engine in engines:
            begun = time.perf_counter()
            engine(images)
            best[engine.name] = min(best[engine.name], time.perf_counter() - begun)
    return {name: TIMED_BATCH / seconds for name, seconds in best.items()}


def may_round(model: Model, engine: Engine, guard: Guard) -> tuple[bool, str]:
    """Whether int8 loses little enough, and how that is known."""
    if guard.max_drop >= 1:
        return True, ""
    try:
        cost = measured(model, engine, guard)
    except VitrailError as error:
        return False, str(error)
    return cost.drop <= guard.max_drop, in_words(cost)


def measured(model: Model, engine: Engine, guard: Guard) -> "Cost":
    """What int8 costs, on some of the pictures."""
    from vitrail.export.guard import measure, pictures_for

    source, name, notes = pictures_for(model, guard.data)
    if isinstance(source, Samples) and len(source) > GUARDED:
        source = source.take(np.linspace(0, len(source) - 1, GUARDED).astype(np.int64))
    learned = tuple(note for note in notes if "learned from" in note)
    return replace(measure(model, engine, source), data=name, notes=learned)


def in_words(cost: "Cost") -> str:
    right = f"int8 is right on {percent(cost.int8_accuracy)} of {cost.pictures:,} pictures of "
    return "; ".join([f"{right}{cost.data}, float on {percent(cost.accuracy)}", *cost.notes])


def open_onnx(path: str | PathLike[str]) -> "OnnxEngine":
    """An .onnx file of `vitrail export`, which brings its classes and preprocessing along."""
    from vitrail.export.sessions import OnnxEngine

    return OnnxEngine(path)
