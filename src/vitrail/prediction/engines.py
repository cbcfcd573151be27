"""Inference engines: torch, or onnxruntime with an export of the same model.

`auto` times the available engines and takes the fastest. int8 rounds weights, so it is used only
after its accuracy was measured on labeled images and is within the guard's limit.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Literal, get_args

import torch
from torch import Tensor

from vitrail import distributed
from vitrail.errors import ConfigError, VitrailError, unknown
from vitrail.export import MAX_DROP, EngineKind, session
from vitrail.export.verify import measure_int8
from vitrail.models.config import pair
from vitrail.models.registry import name_of
from vitrail.models.vit import Model, VisionTransformer, eval_mode

EngineChoice = EngineKind | Literal[""]
TIMING_SECONDS = 2.0  # that auto measures, shared by the engines
TIMING_BATCH_SIZE = 8
GUARD_IMAGES = 256  # images that int8 is measured on, at most
Log = Callable[[str], None]


class TorchEngine:
    """The model, moved to the device; with another `merge`, a copy that shares its weights."""

    name = "torch"

    def __init__(
        self, model: Model, *, merge: int | None = None, device: str | torch.device = "cpu"
    ) -> None:
        if merge and not isinstance(model, VisionTransformer):
            raise ConfigError(
                f"merge={merge} needs a Vision Transformer, and the model is a "
                f"{name_of(model.config)}"
            )
        model = model.to(device)
        if merge is not None and isinstance(model, VisionTransformer) and merge != model.merge:
            model = copy.copy(model)  # the caller's model keeps its setting, which its encoder has
            model._modules = model._modules | {"encoder": copy.copy(model.encoder)}
            model.merge = merge
        self.model = model
        self.modules = tuple(model.modules())  # traversing the model on every call is slow
        self.device = torch.device(device)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Return logits (B, K) of normalized images (B, C, H, W), on the CPU."""
        with self.in_eval_mode():
            return self.model(images.to(self.device)).float().cpu()

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        """Return features (B, D) of normalized images, on the CPU."""
        with self.in_eval_mode():
            return self.model.features(images.to(self.device)).float().cpu()

    def in_eval_mode(self) -> AbstractContextManager[None]:
        """Switch to eval mode; a model already in eval mode is not touched, so threads may share
        it."""
        training = any(module.training for module in self.modules)
        return eval_mode(self.model) if training else nullcontext()


Engine = TorchEngine | session.OnnxEngine


@dataclass(frozen=True, kw_only=True)
class AccuracyGuard:
    """The accuracy that int8 may cost."""

    max_drop: float = MAX_DROP  # fraction of images; 1 disables the guard
    data: str | PathLike[str] | None = None  # labeled images; None: those of the training run

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop <= 1:
            raise ConfigError(f"max_drop={self.max_drop} must be a fraction, such as 0.01")


def open_engine(
    model: Model,
    choice: EngineKind,
    *,
    merge: int | None = None,
    guard: AccuracyGuard,
    device: str | torch.device = "cpu",
    log: Log,
) -> Engine:
    """Open the engine of that name; `auto` is the fastest one that passes the guard."""
    if choice not in get_args(EngineKind):
        raise unknown("engine", choice, get_args(EngineKind))
    if merge and choice != "torch":
        raise ConfigError(f"merge={merge} needs engine=torch, not {choice}; leave one out")
    if choice == "auto" and distributed.is_distributed():
        raise ConfigError("engine=auto could differ between processes; name an engine")
    if choice == "torch" or torch.device(device).type != "cpu":
        if choice not in ("torch", "auto"):
            raise ConfigError(
                f"engine={choice} runs on the CPU, not on {device}; use torch there, or device=cpu"
            )
        return TorchEngine(model, merge=merge, device=device)
    if choice != "auto":
        engine = session.engine_for(model, choice, log=log)
        if choice == "onnx-int8" and guard.max_drop < 1:
            log(check_int8(model, engine, guard))
        return engine
    engines: list[Engine] = [TorchEngine(model)]
    for kind in ("onnx", "onnx-int8"):
        try:
            engines.append(session.engine_for(model, kind, log=log))
        except VitrailError as error:  # not installed, or the model cannot be exported
            log(f"engine auto: skipped {kind}: {error}")
    if len(engines) == 1:
        return engines[0]
    throughput = measure_throughput(engines, model)
    ranked = sorted(engines, key=lambda engine: -throughput[engine.name])
    summary = ", ".join(f"{engine.name} {throughput[engine.name]:,.0f}" for engine in ranked)
    for engine in ranked:
        reason = ""
        if engine.name == "onnx-int8" and guard.max_drop < 1:
            try:
                reason = check_int8(model, engine, guard)
            except VitrailError as error:
                log(f"engine auto: skipped onnx-int8: {error}")
                continue
        log(f"engine auto: {engine.name}{reason and f' ({reason})'}; images/s: {summary}")
        return engine
    raise AssertionError("torch is always allowed")


def measure_throughput(engines: list[Engine], model: Model) -> dict[str, float]:
    """Return images per second of each engine, timed in turns for two seconds in all."""
    size = pair(model.config.image_size)
    images = torch.randn(TIMING_BATCH_SIZE, model.config.channels, *size)
    seconds = best_times([(engine, images) for engine in engines])
    return {e.name: TIMING_BATCH_SIZE / s for e, s in zip(engines, seconds, strict=True)}


def best_times(work: Sequence[tuple[Engine, Tensor]]) -> list[float]:
    """Return the shortest seconds of each engine for its batch, timed in turns."""
    best = [math.inf] * len(work)
    for engine, images in work:
        engine(images)  # warm up
    deadline = time.perf_counter() + TIMING_SECONDS
    while math.inf in best or time.perf_counter() < deadline:
        for number, (engine, images) in enumerate(work):
            start = time.perf_counter()
            engine(images)
            best[number] = min(best[number], time.perf_counter() - start)
    return best


def check_int8(model: Model, engine: Engine, guard: AccuracyGuard) -> str:
    """Measure int8 on up to 256 of the guard's images; raise if its accuracy drops too much."""
    measured = measure_int8(model, engine, guard.data, max_images=GUARD_IMAGES)
    measured.check(guard.max_drop)
    overlap = [note for note in measured.notes if "trained on" in note]
    return "; ".join([str(measured), *overlap])
