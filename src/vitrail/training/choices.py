"""Sensible settings for what was left open, by looking at the data; each with its reason.

The numbers come from the experiments in docs/notebook.md.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from vitrail.data.decoding import open_picture
from vitrail.data.samples import Source
from vitrail.data.variation import Augmentation, Mixing
from vitrail.errors import ConfigError, DataError
from vitrail.models.config import Config, VitConfig, pair
from vitrail.training.finetune_plan import Budget, frozen_patterns, plan_finetuning
from vitrail.training.settings import ModelSettings, Settings, given

LOOKED_AT = 48  # pictures that speak for all
SMALL_PICTURES = 40  # pixels: up to here every pixel counts
QUICK = 1.5e-3  # seconds to read a picture that need not be read beforehand
FEW = 20_000  # pictures: a set that needs to be varied to be learned from
MANY = 100_000
# For the cost of four blocks of two thirds of the width, two wide ones learn more in a short time.
WIDE = {
    "ViT-Femto": {"depth": 2, "width": 96, "mlp_width": 384, "heads": 3},
    "ViT-Pico": {"depth": 2, "width": 128, "mlp_width": 512, "heads": 4},
}
FIRST_FILTERS = "stem.layers.0.weight"  # which learning would only spoil
KNOWN = 15  # epochs until pictures are known so well that mixing them teaches more


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the choices depend on."""

    pictures: int
    classes: int
    side: int  # the median of the pictures' short sides
    seconds: float  # to read one picture
    channels: int  # 1 if all are gray, 3 if they are in color, or those that arrays have
    multi_label: bool


def look_at(source: Source) -> Look:
    """A few pictures, evenly spaced, speak for all."""
    sides, channels, begun = [], [], time.monotonic()
    for index in some_of(source):
        try:
            data = source[index].data
            if isinstance(data, np.ndarray):
                sides.append(min(data.shape[:2]))
                channels.append(1 if data.ndim == 2 else data.shape[2])
            else:
                picture = open_picture(data)
                sides.append(min(picture.height, picture.width))
                pixels = picture.pixels(channels=3, at_least=(32, 32))
                channels.append(1 if (np.ptp(pixels.astype(np.int16), axis=2) <= 2).all() else 3)
        except DataError:
            continue
    if not sides:
        raise DataError(
            f"none of the {min(LOOKED_AT, len(source))} pictures that were tried can be read; "
            "`vitrail check` tells why"
        )
    return Look(
        pictures=len(source),
        classes=len(source.classes),
        side=int(np.median(sides)),
        seconds=(time.monotonic() - begun) / len(sides),
        channels=max(channels),
        multi_label=source.multi_label,
    )


def some_of(source: Source) -> list[int]:
    return np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source)), dtype=int).tolist()


@dataclass
class Choices:
    """Settings being completed, and what was chosen why."""

    settings: Settings
    look: Look
    gpu: bool
    reasons: list[str]
    probe_images: int | None = None  # for the initial head; None takes all

    def say(self, what: str, why: str) -> None:
        self.reasons.append(f"{what}: {why}")


def choose(
    settings: Settings,
    look: Look,
    *,
    gpu: bool,
    start: Config | None,
    new_head: bool = True,
    budget: Budget | None = None,
) -> Choices:
    """Fill in what is None; `start` is the model to fine-tune, if there is one.

    `new_head` says that its head knows other classes; `budget` is the time there is to tune it.
    """
    choices = Choices(settings, look, gpu, [])
    if start is None:
        choose_model(choices)
    else:
        choose_transfer(choices, start, new_head=new_head, budget=budget)
    choose_length(choices, start)
    choose_workers(choices)
    choose_optimizer(choices, start)
    choose_loss(choices)
    return choices


def choose_model(choices: Choices) -> None:
    settings, look = choices.settings, choices.look
    model = settings.model
    if model.channels is None:
        model = replace(model, channels=look.channels)
        if look.channels == 1:
            choices.say("1 channel", "the pictures are gray")
        elif look.channels != 3:
            choices.say(f"{look.channels} channels", "the arrays have as many")
    if model.name is None:
        model = small_model(choices, model)
        choices.settings = replace(settings, model=model)
        choose_sizes(choices)
        return
    choices.settings = replace(settings, model=model)


def small_model(choices: Choices, model: ModelSettings) -> ModelSettings:
    """A model and an image size for the pictures; given fields stay."""
    look = choices.look
    if look.side <= SMALL_PICTURES:
        size, patch = max(8, 4 * round(look.side / 4)), 4
        name, why = "ViT-Femto/4", f"pictures of {look.side} pixels"
    elif choices.gpu and look.pictures >= MANY:
        size, patch = 224, 16
        name, why = "ViT-S/16", f"{look.pictures:,} pictures and a GPU"
    else:
        size, patch = (128, 16) if look.side >= 112 else (64, 8)
        name = f"ViT-Pico/{patch}"
        why = f"{look.pictures:,} pictures are learned best by a small model"
    defaults = {"image_size": size, "patch_size": patch, "pool": "mean"}
    if name != "ViT-S/16":
        defaults["stem"] = "conv"
        if choices.settings.objective == "classify" and model.stem in (None, "conv"):
            defaults["init"] = "quick"
    shape = WIDE.get(name.partition("/")[0], {})
    if all(getattr(model, key) is None for key in shape):
        defaults |= shape
    changed = {key: value for key, value in defaults.items() if getattr(model, key) is None}
    size = changed.get("image_size", model.image_size)
    shaped = f" of {shape['depth']} blocks, {shape['width']} wide" if "depth" in changed else ""
    choices.say(f"{name}{shaped}, {size} pixels", why)
    if "init" in changed:
        choices.say("quick first weights", "filters that whiten these pictures, sines as positions")
    return replace(model, name=name, **changed)  # pyright: ignore[reportArgumentType]


def choose_sizes(choices: Choices) -> None:
    """Half of the pixels along each side for half of the run, where they are not all needed."""
    settings = choices.settings
    size, patch = settings.model.image_size, settings.model.patch_size
    if settings.image_sizes or not size or not patch or settings.objective != "classify":
        return
    if size <= SMALL_PICTURES:
        return
    half = round(size / 2 / patch) * patch
    if half >= 3 * patch:
        sizes = ((0.0, half), (0.5, size))
        choices.settings = replace(settings, image_sizes=sizes)
        choices.say(f"pictures of {half} pixels for the first half", "they cost a quarter")


def choose_transfer(
    choices: Choices, start: Config, *, new_head: bool, budget: Budget | None
) -> None:
    """Linear probing, then as much fine-tuning as fits; a recipe or an optimizer decides itself."""
    settings, look = choices.settings, choices.look
    auto = settings.optim.kind is None and settings.objective == "classify"
    if settings.head_init is None:
        probe = auto and new_head and look.classes > 1 and not look.multi_label
        settings = replace(settings, head_init="probe" if probe else "zeros")
        if probe:
            choices.say("head: closed-form linear probe", "fine-tuning starts where it ends")
    free = not (settings.optim.freeze or settings.image_sizes or settings.model.image_size)
    square = len(set(pair(start.image_size))) == 1
    if auto and free and square and budget is not None and isinstance(start, VitConfig):
        plan = plan_finetuning(start, budget)
        model = settings.model
        if plan.image_size != pair(start.image_size)[0]:
            model = replace(model, image_size=plan.image_size)
        optim = replace(settings.optim, freeze=frozen_patterns(plan.frozen_blocks, budget.weights))
        settings = replace(settings, model=model, optim=optim, image_sizes=plan.image_sizes)
        trained = f"the last {start.depth - plan.frozen_blocks} blocks"
        what = trained if plan.frozen_blocks else "every weight"
        sizes = "then ".join(f"{size} " for _, size in plan.image_sizes) or f"{plan.image_size} "
        choices.say(f"fine-tuning of {what} at {sizes}pixels", plan.reason)
        if settings.head_init == "probe" and plan.probe_images < budget.train:
            choices.probe_images = plan.probe_images
            share = f"{plan.probe_images:,} of {budget.train:,} training images"
            choices.say(f"linear probe of {share}", "the features of all would take too long")
    choices.settings = settings


def choose_length(choices: Choices, start: Config | None) -> None:
    settings, look = choices.settings, choices.look
    fine_tuning = start is not None
    if settings.batch_size is None:
        usual = 16 if start is not None and is_small(start) else usual_batch(look)
        size = max(1, min(usual, look.pictures))
        settings = replace(settings, batch_size=size)
        choices.say(f"batches of {size}", f"{look.pictures:,} training pictures")
    if settings.epochs is None and settings.steps is None and settings.minutes is None:
        epochs = 4.0 if fine_tuning else usual_epochs(look.pictures)
        settings = replace(settings, epochs=epochs)
        choices.say(f"{epochs:g} epochs", "longer for few pictures; --minutes sets a time instead")
    choices.settings = settings


def choose_workers(choices: Choices) -> None:
    """Beside a processor that learns with all its cores, other processes cost more than they bring.

    The threads of a matrix product wait for each other; one that has to share its core with a
    reader holds up all.
    """
    settings = choices.settings
    if settings.machine.workers is None and not choices.gpu and choices.look.seconds < QUICK:
        machine = replace(settings.machine, workers=0)
        choices.settings = replace(settings, machine=machine)
        choices.say("pictures are read between the steps", "learning needs all cores")


def usual_batch(look: Look) -> int:
    if look.pictures < FEW:
        return 32
    return 64 if look.side <= SMALL_PICTURES else 128


def usual_epochs(pictures: int) -> float:
    """The fewer pictures there are, the more often each must be seen."""
    return float(min(100, max(3, round(8 * math.sqrt(FEW / pictures)))))


SHORT_TRAINING = 3_000_000  # encoder weights: up to here those of a short training, free to move
RATES = {"muon": 6e-3, "lion": 1e-4, "sgd": 0.01}  # from scratch; 1e-3 for the others
FINE_RATES = {"muon": 1e-3, "lion": 3e-5, "sgd": 0.01}  # 2e-4 for the others
# AdamW on real weights: 8e-4 for ViT-Ti, less for wider models; blocks further down learn less.
TRANSFER_RATE, TRANSFER_WIDTH, TRANSFER_DECAY = 8e-4, 192, 0.75


def choose_optimizer(choices: Choices, start: Config | None) -> None:
    settings = choices.settings
    optim = settings.optim
    if optim.kind is None:
        small = start is None or is_small(start)
        fits = small and settings.objective == "classify" and not optim.freeze
        optim = replace(optim, kind="muon" if fits else "adamw")
        if fits:
            choices.say("Muon", "brings small models to a given accuracy in about half the time")
        elif isinstance(start, VitConfig) and settings.objective == "classify":
            rate = float(f"{TRANSFER_RATE * TRANSFER_WIDTH / start.width:.2g}")
            decay = optim.layer_decay or TRANSFER_DECAY
            optim = replace(optim, learning_rate=optim.learning_rate or rate, layer_decay=decay)
            choices.say(
                f"AdamW, learning rate {optim.learning_rate:g}, layer decay {decay:g}",
                f"usual for pre-trained weights of width {start.width}",
            )
    if optim.kind == "muon":
        usual = {"weight_decay": 0.05, "clip_norm": 1.0, "schedule": "linear"}
        if start is None and optim.schedule is None:
            usual |= {"schedule": "constant-linear", "cooldown": 0.6}
    else:
        usual = {"weight_decay": 0.0, "schedule": "cosine"}
    missing = {name: value for name, value in usual.items() if getattr(optim, name) is None}
    optim = replace(optim, **missing)  # pyright: ignore[reportArgumentType]
    if optim.learning_rate is None:
        kind = str(optim.kind)
        rate = RATES.get(kind, 1e-3) if start is None else FINE_RATES.get(kind, 2e-4)
        optim = replace(optim, learning_rate=rate)
        choices.say(f"learning rate {rate:g}", f"usual for {optim.kind}")
    if start is None and whitened(settings.model) and not optim.freeze:
        optim = replace(optim, freeze=(FIRST_FILTERS,))
    choices.settings = replace(settings, optim=optim)


def is_small(start: Config) -> bool:
    """Whether a model has so few weights that a short training made them."""
    return isinstance(start, VitConfig) and 12 * start.depth * start.width**2 <= SHORT_TRAINING


def whitened(model: ModelSettings) -> bool:
    """Whether the first convolution starts as filters that fit the pictures (`learner.py`)."""
    return model.init == "quick" and model.stem == "conv"


def choose_loss(choices: Choices) -> None:
    settings, look = choices.settings, choices.look
    if settings.loss.kind is None:
        kind = "sigmoid" if look.multi_label else "softmax"
        choices.settings = replace(settings, loss=replace(settings.loss, kind=kind))
        if look.multi_label:
            choices.say("sigmoid loss", "pictures have several labels")
    elif settings.loss.kind == "softmax" and look.multi_label:
        raise ConfigError(
            "loss.kind='softmax' wants one label for each picture, and these have several; "
            "use 'sigmoid'"
        )


def choose_variation(
    settings: Settings, look: Look, *, fine_tuning: bool = False
) -> tuple[Augmentation, Mixing]:
    """How pictures are varied: what was given, and the rest by the size of the set."""
    base = Augmentation(crop="inception", crop_area=(0.35, 1.0))
    if look.side <= SMALL_PICTURES:  # many pictures are enough as they are
        base = Augmentation(crop="padded" if look.pictures < FEW else "whole", padding=3)
    long = not fine_tuning and settings.objective == "classify"  # enough to learn too much by heart
    few = look.pictures < FEW and not look.multi_label
    said = settings.mix.mixup is not None or settings.mix.cutmix is not None
    mixing = Mixing()
    if long and few and not said:  # who says how to mix means it as it is said
        mixing = Mixing(cutmix=1.0, chance=0.5, after=KNOWN)
    return replace(base, **given(settings.augment)), replace(mixing, **given(settings.mix))


def describe(augmentation: Augmentation, mixing: Mixing) -> str:
    """In words: what is done to training pictures."""
    return ", ".join(words(augmentation, mixing)) or "nothing"


def words(augmentation: Augmentation, mixing: Mixing) -> Iterator[str]:
    if augmentation.crop == "inception":
        yield f"random parts of {augmentation.crop_area[0]:.0%} or more"
    if augmentation.crop == "padded":
        yield f"shifts by up to {augmentation.padding} pixels"
    if augmentation.flip:
        yield "flips"
    if augmentation.policy != "none":
        yield augmentation.policy
    if augmentation.color_jitter:
        yield f"color jitter {augmentation.color_jitter:g}"
    if augmentation.erasing:
        yield f"erasing {augmentation.erasing:.0%}"
    if mixing.mixup:
        yield f"mixup {mixing.mixup:g}"
    if mixing.cutmix:
        yield f"cutmix {mixing.cutmix:g}"
    if mixing.after and (mixing.mixup or mixing.cutmix):
        yield f"which begin after {mixing.after:g} epochs"


def stages_of(settings: Settings, config: Config) -> tuple[tuple[float, int], ...]:
    """From which share of the run on, which image size; the last is the model's own."""
    size = config.image_size
    final = size if isinstance(size, int) else size[0]
    if not settings.image_sizes:
        return ((0.0, final),)
    if not isinstance(config, VitConfig):
        raise ConfigError("image_sizes grow for Vision Transformers only; leave them out here")
    stride = config.stride[0]
    for _, pixels in settings.image_sizes:
        if pixels % stride or pixels > final:
            raise ConfigError(
                f"image_sizes: {pixels} pixels are no multiple of {stride} up to {final}; "
                f"try {max(stride, round(pixels / stride) * stride)}"
            )
    if settings.image_sizes[-1][1] != final:
        raise ConfigError(
            f"image_sizes end at {settings.image_sizes[-1][1]} pixels and the model is made for "
            f"{final}; end with {final}, or set model.image_size"
        )
    return settings.image_sizes
