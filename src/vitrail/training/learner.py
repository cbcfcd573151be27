"""The model that is to learn: made fresh, or taken from anywhere and fitted to the task."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from vitrail import distributed
from vitrail.checkpoints.load import load
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.data.preprocessing import Preprocessing, preset
from vitrail.data.samples import Samples
from vitrail.data.transforms import EvaluationTransform, normalize
from vitrail.errors import ConfigError, DataError
from vitrail.models.build import Model, build, create
from vitrail.models.config import pair
from vitrail.models.init import whiten
from vitrail.models.patch_embed import ConvStem
from vitrail.models.vit import VisionTransformer
from vitrail.training.choices import Look, choose, some_of, whitened
from vitrail.training.finetune_plan import Budget, seconds_per_image
from vitrail.training.material import Material, hold_out_dev
from vitrail.training.settings import Settings

FITTED = ("image_size", "patch_size", "channels", "numerics")  # what loading can change
HARMLESS = ("dropout", "drop_path", "patch_dropout")  # what no weight depends on


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A model, how pictures are prepared for it, and the settings it was made by."""

    model: Model
    preprocessing: Preprocessing
    settings: Settings  # complete
    reasons: list[str]
    teacher: Model | None = None
    probe_images: int | None = None  # for the initial head; None takes all


def build_learner(
    settings: Settings,
    material: Material,
    look: Look,
    start: str,
    device: torch.device,
    say: Callable[[str], None],
    *,
    begun: float | None = None,
) -> Learner:
    """Choose what is open, then make the model or load it; the time budget runs since `begun`."""
    source = material.train
    classes = source.classes if settings.objective == "classify" else ()
    gpu = device.type == "cuda"
    if settings.model.distillation and not settings.loss.teacher:
        raise ConfigError("model.distillation learns from a teacher; name one with loss.teacher")
    if start:
        if settings.model.name is not None:
            raise ConfigError(f"model.name={settings.model.name!r} and --from both name a model")
        told: list[str] = []
        model = fitted(start, settings, len(classes), told.append)
        choices = choose(
            settings,
            look,
            gpu=gpu,
            start=model.config,
            new_head=get_metadata(model).class_names != tuple(classes),
            budget=time_budget(settings, material, look, model, device, begun),
        )
        if choices.settings.model.image_size != settings.model.image_size:
            told.clear()
            model = fitted(start, choices.settings, len(classes), told.append)
        for line in told:
            say(line)
        usual = get_metadata(model).preprocessing
    else:
        choices = choose(settings, look, gpu=gpu, start=None)
        model = fresh(choices.settings, len(classes))
        usual = Preprocessing(
            size=pair(model.config.image_size),
            mean=(0.5,) * model.config.channels,
            std=(0.5,) * model.config.channels,
        )
    if settings.preprocessing is not None:
        size, channels = pair(model.config.image_size), model.config.channels
        usual = preset(settings.preprocessing, size, channels)
    if not start and isinstance(model, VisionTransformer) and whitened(choices.settings.model):
        whiten(cast(ConvStem, model.stem), some_pictures(source, usual))
    several = source.multi_label and bool(classes)
    model.metadata = Metadata(preprocessing=usual, class_names=tuple(classes), multi_label=several)
    return Learner(
        model=model,
        preprocessing=usual,
        settings=choices.settings,
        reasons=choices.reasons,
        teacher=teacher(settings),
        probe_images=choices.probe_images,
    )


def time_budget(
    settings: Settings,
    material: Material,
    look: Look,
    model: Model,
    device: torch.device,
    begun: float | None,
) -> Budget | None:
    """What fine-tuning may take, measured; None where the run has a length instead."""
    if settings.minutes is None or settings.optim.kind is not None:
        return None
    forward = (
        distributed.broadcast_object(seconds_per_image(model, device)) / distributed.world_size()
    )
    elapsed = 0.0 if begun is None else time.monotonic() - begun
    train, _, dev = hold_out_dev(material)
    evaluated = {id(dev): len(dev)} | {id(s): len(s) for s in material.judged.values()}
    return Budget(
        seconds=60 * settings.minutes - distributed.broadcast_object(elapsed),
        forward=forward,
        read=distributed.broadcast_object(look.seconds),
        train=len(train),
        evaluated=sum(evaluated.values()),
        weights=tuple(name for name, _ in model.named_parameters()),
    )


def fresh(settings: Settings, classes: int) -> Model:
    """A model with the first values that the seed draws."""
    model = settings.model
    assert model.name is not None
    return create(
        model.name,
        init=model.init or "google",
        head_bias=model.head_bias,
        generator=torch.Generator().manual_seed(settings.seed),
        **(model.changes() | {"num_classes": classes}),
    )


def some_pictures(source: Samples, preprocessing: Preprocessing) -> Tensor:
    """A few, evenly spaced, as the model will read them: (B, C, H, W)."""
    transform = EvaluationTransform(preprocessing=preprocessing, channels=len(preprocessing.mean))
    found = []
    for index in some_of(source):
        with suppress(DataError):
            found.append(transform(source[index].data))
    return normalize(torch.stack(found), preprocessing)


def fitted(start: str, settings: Settings, classes: int, say: Callable[[str], None]) -> Model:
    """The model of a reference with a head for these classes, at the wanted size."""
    changes = settings.model.changes()
    for name in changes:
        if name not in (*FITTED, *HARMLESS):
            raise ConfigError(
                f"model.{name} is given by {start} and cannot be changed when fine-tuning; "
                f"what can: {', '.join((*FITTED, *HARMLESS))}"
            )
    model = load(
        start,
        num_classes=classes,
        preprocessing=settings.preprocessing,
        log=say,
        **{name: changes[name] for name in FITTED if name in changes},
    )
    kept = {name: changes[name] for name in HARMLESS if name in changes}
    if not kept:
        return model
    changed = build(model.config.change(**kept))
    changed.load_state_dict(model.state_dict(), assign=True)
    changed.metadata = model.metadata
    return changed


def teacher(settings: Settings) -> Model | None:
    """The model to learn from, if there is one."""
    return load(settings.loss.teacher) if settings.loss.teacher else None
