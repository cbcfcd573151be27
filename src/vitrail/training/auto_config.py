"""Automatic configuration: every setting that is left open, decided from the data and the machine.

Each decision is recorded with its reason. The constants come from the experiments in
docs/notebook.md.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from vitrail import distributed
from vitrail.data.datasets import Dataset
from vitrail.data.decode import open_image
from vitrail.data.preprocessing import Augmentation, Mixing
from vitrail.errors import ConfigError, DataError
from vitrail.formatting import percent
from vitrail.models.config import Config, VitConfig, pair
from vitrail.models.registry import configuration
from vitrail.models.vit import Model, build
from vitrail.training.budget import FinetunePlan
from vitrail.training.config import (
    MIN_CLASS_IMAGES,
    ModelSettings,
    OptimSettings,
    Precision,
    Settings,
)
from vitrail.training.memory import (
    USABLE,
    activation_bytes,
    bytes_per_weight,
    free_bytes,
    largest_divisor,
    num_trainable,
)
from vitrail.training.optim import INPUT_WEIGHTS, MUON_RATE
from vitrail.training.schedules import Stages

SAMPLED_IMAGES = 48  # images from which the statistics of a dataset are estimated
SMALL_IMAGE = 40  # pixels; images up to this size are not downsampled
FAST_DECODE = 1.5e-3  # seconds per image; no loading processes below this
SMALL_DATASET = 20_000  # images; smaller datasets need strong augmentation
LARGE_DATASET = 100_000
FEW_PHOTOGRAPHS = 5_000  # up to here, the built-in model is very likely a better start
MIN_PHOTOGRAPH = 64  # pixels; the built-in model suits images from this size on
IMBALANCED = 10  # times as many images in the largest class as in the smallest
MIXING_AFTER = 15  # epochs; mixing helps on a small dataset after these
# For the same cost, two wide blocks learn more in a short run than four of two thirds the width.
WIDE_SHAPES = {
    "ViT-Femto": {"depth": 2, "width": 96, "mlp_width": 384, "heads": 3},
    "ViT-Pico": {"depth": 2, "width": 128, "mlp_width": 512, "heads": 4},
}
WHITENING_FILTERS = "stem.layers.0.weight"  # frozen: training makes them worse
USUAL_BATCH = 32
SMALL_ENCODER = 1_500_000  # weights; up to here, fine-tuning uses the from-scratch rate
LARGE_MODEL = 10_000_000  # parameters; from here on, the rate of DeiT and AugReg
LARGE_BATCH, LARGE_RATE, LARGE_DECAY = 1024, 1e-3, 0.05  # the rate is for that batch size
LEARNING_RATES = {"muon": 6e-3, "lion": 1e-4, "sgd": 0.01}  # from scratch; 1e-3 for the others
FINETUNE_RATES = {"muon": 1e-3, "lion": 3e-5, "sgd": 0.01}  # 2e-4 for the others
# AdamW on pre-trained weights: 8e-4 for ViT-Ti, inversely proportional to the width.
TRANSFER_RATE, TRANSFER_WIDTH, TRANSFER_DECAY = 8e-4, 192, 0.75
LORA_FACTOR = 5  # of that learning rate, without layer decay
# Muon, which learns more in the same time up to this width; wider models were not tried.
MUON_MAX_WIDTH, MUON_TRANSFER_RATE, MUON_TRANSFER_REST = 256, 3e-3, 3e-4


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """What the automatic configuration needs to know about a training set."""

    images: int
    classes: int
    side: int  # median of the shorter sides, in pixels
    seconds: float  # to read and decode one image
    channels: int  # 1 for grayscale, 3 for color, or those of the arrays
    multi_label: bool
    photographs: bool = False  # whether most images look like photographs: JPEG files in color
    # Fewest and most of a class, ignoring classes that are too small to learn; multi-label data: 1.
    class_images: tuple[int, int] = (1, 1)


def dataset_stats(dataset: Dataset) -> DatasetStats:
    """Estimate the statistics of a dataset from a few evenly spaced images."""
    sides, channels, photographs, started = [], [], 0, time.monotonic()
    for index in sample_indices(dataset):
        try:
            data = dataset[index].data
            if isinstance(data, np.ndarray):
                sides.append(min(data.shape[:2]))
                channels.append(1 if data.ndim == 2 else data.shape[2])
            else:
                image = open_image(data)
                sides.append(min(image.height, image.width))
                pixels = image.pixels(channels=3, min_size=(32, 32))
                channels.append(1 if (np.ptp(pixels.astype(np.int16), axis=2) <= 2).all() else 3)
                photographs += image.format == "JPEG" and channels[-1] == 3
        except DataError:
            continue
    if not sides:
        raise DataError(
            f"none of {min(SAMPLED_IMAGES, len(dataset))} sampled images can be read; "
            "`vitrail check` lists the reasons"
        )
    seconds, class_images = (time.monotonic() - started) / len(sides), (1, 1)
    if not dataset.multi_label and len(dataset.classes):
        counts = np.bincount(np.asarray(dataset.labels(), np.int64))
        enough = counts[counts >= min(MIN_CLASS_IMAGES, counts.max())]
        class_images = int(enough.min()), int(counts.max())
    return DatasetStats(
        images=len(dataset),
        classes=len(dataset.classes),
        side=int(np.median(sides)),
        seconds=seconds,
        channels=max(channels),
        multi_label=dataset.multi_label,
        photographs=photographs > len(sides) / 2,
        class_images=class_images,
    )


def sample_indices(dataset: Dataset) -> list[int]:
    count = min(SAMPLED_IMAGES, len(dataset))
    return np.linspace(0, len(dataset) - 1, count, dtype=int).tolist()


# Settings


class AutoConfig:
    """Complete settings, in which nothing is None, and the reason for each decision."""

    def __init__(
        self,
        settings: Settings,
        stats: DatasetStats,
        *,
        gpu: bool,
        start: Config | None,
        new_head: bool = True,
        plan: FinetunePlan | None = None,
        weights: Sequence[str] = (),
    ) -> None:
        """`start` is the model to fine-tune, if there is one.

        `new_head`: the classes differ from those of `start`. `plan`: how much of `start`, whose
        parameters are named `weights`, can be fine-tuned within the time budget.
        """
        self.settings, self.stats, self.gpu = settings, stats, gpu
        self.start = start
        self.reasons: list[str] = []
        self.large = False  # named by the user; those chosen here are trained with Muon
        if start is None and (name := settings.model.name) is not None:
            network = build(configuration(name).change(**settings.model.changes()))  # on meta
            self.large = sum(p.numel() for p in network.parameters()) > LARGE_MODEL
        self.probe_images: int | None = None  # training images for the initial head; None for all
        self.test_images: int | None = None  # final evaluation, without dev; None for all
        self.augmentation, self.mixing = Augmentation(), Mixing()
        self.precision = torch.float32
        self.shards = 1  # of a batch, for CPU data parallelism
        if start is None:
            self.choose_model()
        else:
            self.choose_transfer(start, plan, weights, new_head=new_head)
        self.choose_length()
        self.choose_optimizer()
        self.choose_loss()

    def explain(self, what: str, why: str) -> None:
        self.reasons.append(f"{what}: {why}")

    def choose_model(self) -> None:
        stats, model = self.stats, self.settings.model
        if model.channels is None:
            model = replace(model, channels=stats.channels)
            if stats.channels == 1:
                self.explain("1 channel", "the images are grayscale")
            elif stats.channels != 3:
                self.explain(f"{stats.channels} channels", "as in the arrays")
        if model.name is not None:
            self.settings = replace(self.settings, model=model)
            return
        if stats.side <= SMALL_IMAGE:
            size, patch = max(8, 4 * round(stats.side / 4)), 4
            name, why = "ViT-Femto/4", f"images of {stats.side} pixels"
        elif self.gpu and stats.images >= LARGE_DATASET:
            size, patch = 224, 16
            name, why = "ViT-S/16", f"{stats.images:,} images and a GPU"
        else:
            size, patch = (128, 16) if stats.side >= 112 else (64, 8)
            name = f"ViT-Pico/{patch}"
            why = f"a small model is best for {stats.images:,} images"
        classify = self.settings.objective == "classify"
        defaults = {"image_size": size, "patch_size": patch, "pool": "mean"}
        if name != "ViT-S/16":
            defaults["stem"] = "conv"
            if classify and model.stem in (None, "conv"):
                defaults["init"] = "quick"
        shape = WIDE_SHAPES.get(name.partition("/")[0], {})
        if all(getattr(model, key) is None for key in shape):
            defaults |= shape
        changed = {key: value for key, value in defaults.items() if getattr(model, key) is None}
        model = replace(model, name=name, **changed)  # pyright: ignore[reportArgumentType]
        blocks = (
            f" with {shape['depth']} blocks of width {shape['width']}" if "depth" in changed else ""
        )
        self.explain(f"{name}{blocks}, {model.image_size} pixels", why)
        if "init" in changed:
            self.explain("init", "whitening stem filters, sin-cos position embeddings")
        self.settings = replace(self.settings, model=model)
        size, patch = model.image_size, model.patch_size
        if self.settings.image_sizes or not classify or not size or not patch:
            return
        half = round(size / 2 / patch) * patch
        if size > SMALL_IMAGE and half >= 3 * patch:
            self.settings = replace(self.settings, image_sizes=((0.0, half), (0.5, size)))
            self.explain(f"{half} pixels in the first half of the run", "a quarter of the FLOPs")

    def choose_transfer(
        self, start: Config, plan: FinetunePlan | None, weights: Sequence[str], *, new_head: bool
    ) -> None:
        """Linear probing, then as much fine-tuning as fits, unless an optimizer is set."""
        settings, stats = self.settings, self.stats
        auto = is_automatic(settings.optim) and settings.objective == "classify"
        if settings.head_init is None:
            probe = auto and new_head and stats.classes > 1 and not stats.multi_label
            settings = replace(settings, head_init="probe" if probe else "zeros")
            if probe:
                self.explain(
                    "head initialized by a closed-form linear probe", "fine-tuning starts from it"
                )
            elif new_head and not is_automatic(settings.optim):
                why = "an optimizer was set, so there is no linear probe (head_init)"
                self.explain("head initialized to zero", why)
        free = not (settings.optim.freeze or settings.image_sizes or settings.model.image_size)
        if auto and free and plan is not None and isinstance(start, VitConfig):
            model = settings.model
            if plan.image_size != pair(start.image_size)[0]:
                model = replace(model, image_size=plan.image_size)
            patterns = (f"encoder.blocks.{block}.*" for block in range(plan.frozen_blocks))
            frozen = [*INPUT_WEIGHTS, *patterns] if plan.frozen_blocks else []
            freeze = tuple(p for p in frozen if any(fnmatchcase(name, p) for name in weights))
            optim = replace(settings.optim, freeze=freeze)
            settings = replace(settings, model=model, optim=optim, image_sizes=plan.image_sizes)
            blocks = start.depth - plan.frozen_blocks
            trained = f"the last {blocks} blocks" if blocks > 1 else "the last block"
            every = "all weights" if settings.lora is None else "all blocks"
            what = trained if plan.frozen_blocks else every
            sizes = [str(size) for _, size in plan.image_sizes] or [str(plan.image_size)]
            self.explain(f"fine-tuning {what} at {', then '.join(sizes)} pixels", plan.reason)
            if settings.head_init == "probe" and plan.probe_images is not None:
                self.probe_images = plan.probe_images
                images = f"{plan.probe_images:,} of {plan.train_images:,} training images"
                self.explain(f"linear probe of {images}", "all of them would take too long")
            if plan.test_images is not None and not stats.multi_label:
                self.test_images = plan.test_images
                why = "all of them would take too long; `vitrail evaluate` uses all"
                self.explain(f"evaluating {plan.test_images:,} test images at the end", why)
        self.settings = settings

    def choose_length(self) -> None:
        settings, images = self.settings, self.stats.images
        if settings.batch_size is None:
            if self.start is not None and is_small(self.start):
                usual = 16
            elif images < SMALL_DATASET:
                usual = USUAL_BATCH
            elif self.large and is_automatic(settings.optim) and images >= LARGE_DATASET:
                usual = LARGE_BATCH
            else:
                usual = 64 if self.stats.side <= SMALL_IMAGE else 128
            size = max(1, min(usual, images))
            settings = replace(settings, batch_size=size)
            self.explain(f"batch size {size}", f"{images:,} training images")
        if settings.epochs is None and settings.steps is None and settings.minutes is None:
            epochs = float(min(100, max(3, round(8 * math.sqrt(SMALL_DATASET / images)))))
            if self.start is not None:
                epochs = 4.0
            settings = replace(settings, epochs=epochs)
            why = "more for smaller datasets; --minutes sets a time budget"
            if self.large:
                why = "a short default; large models usually train for 90 to 300, set --epochs"
            self.explain(f"{epochs:g} epochs", why)
        if settings.machine.workers is None and not self.gpu and self.stats.seconds < FAST_DECODE:
            # The threads of a matrix product wait for each other: one that shares its core with a
            # loading process delays all.
            settings = replace(settings, machine=replace(settings.machine, workers=0))
            self.explain("data loading in-process", "all cores are needed for compute")
        self.settings = settings

    def choose_optimizer(self) -> None:
        settings, start, optim = self.settings, self.start, self.settings.optim
        if is_automatic(optim):
            small = is_small(start) and settings.lora is None if start else not self.large
            muon = optim.kind is None and settings.objective == "classify" and not optim.freeze
            muon = muon and (small or tunes_with_muon(settings, start))
            optim = replace(optim, kind="muon" if muon else "adamw")
            if muon and small:
                self.explain("Muon", "small models reach the same accuracy in half the time")
            elif muon:
                self.explain("Muon", "narrow pre-trained models learn more in the same time")
            elif isinstance(start, VitConfig) and settings.objective == "classify":
                rate = float(f"{TRANSFER_RATE * min(1, TRANSFER_WIDTH / start.width):.2g}")
                decay, of = optim.layer_decay or TRANSFER_DECAY, "pre-trained weights"
                if settings.lora is not None:
                    rate, decay, of = LORA_FACTOR * rate, optim.layer_decay or 1.0, "LoRA"
                optim = replace(optim, learning_rate=optim.learning_rate or rate, layer_decay=decay)
                self.explain(
                    f"AdamW, learning rate {optim.learning_rate:g}, layer decay {decay:g}",
                    f"default for {of} of width {start.width}",
                )
            elif self.large and settings.objective == "classify":
                scale = min(1.0, (settings.batch_size or LARGE_BATCH) / LARGE_BATCH)
                rate = optim.learning_rate or float(f"{LARGE_RATE * scale:.2g}")
                optim = replace(optim, learning_rate=rate)
                if optim.weight_decay is None:
                    optim = replace(optim, weight_decay=LARGE_DECAY)
                if optim.clip_norm is None:
                    optim = replace(optim, clip_norm=1.0)
                why = f"usual for models of this size: {LARGE_RATE:g} for {LARGE_BATCH:,} images"
                self.explain(f"AdamW, learning rate {rate:g}", why)
        kind = str(optim.kind)
        usual = LEARNING_RATES.get(kind, 1e-3) if start is None else FINETUNE_RATES.get(kind, 2e-4)
        if kind == "muon":
            if start is not None and not is_small(start):
                usual = MUON_TRANSFER_REST
            rate = muon_rate(start) * (optim.learning_rate or usual) / usual
            defaults = {"weight_decay": 0.05, "clip_norm": 1.0, "schedule": "linear"}
            defaults |= {"muon_learning_rate": float(f"{rate:.2g}")}
            if start is None and optim.schedule is None:
                defaults |= {"schedule": "constant-linear", "cooldown": 0.6}
        else:
            defaults = {"weight_decay": 0.0, "schedule": "cosine"}
        missing = {name: value for name, value in defaults.items() if getattr(optim, name) is None}
        optim = replace(optim, **missing)  # pyright: ignore[reportArgumentType]
        if optim.learning_rate is None:
            rate = usual * (1 if settings.lora is None else LORA_FACTOR)
            optim = replace(optim, learning_rate=rate)
            muon = f", Muon's {optim.muon_learning_rate:g}" if kind == "muon" else ""
            self.explain(f"learning rate {rate:g}{muon}", f"default for {kind}")
        if start is None and uses_whitening(settings.model) and not optim.freeze:
            optim = replace(optim, freeze=(WHITENING_FILTERS,))
        self.settings = replace(settings, optim=optim)

    def choose_loss(self) -> None:
        """Choose the loss by the labels; adjust it for classes that nothing else balances."""
        settings, multi_label = self.settings, self.stats.multi_label
        if settings.loss.kind is None:
            kind = "sigmoid" if multi_label else "softmax"
            settings = replace(settings, loss=replace(settings.loss, kind=kind))
            if multi_label:
                self.explain("sigmoid loss", "images have several labels")
        elif settings.loss.kind == "softmax" and multi_label:
            raise ConfigError(
                "loss.kind='softmax' needs one label per image, and these have several; "
                "use 'sigmoid'"
            )
        if settings.loss.logit_adjustment and (multi_label or settings.loss.teacher):
            raise ConfigError(
                f"loss.logit_adjustment={settings.loss.logit_adjustment:g} needs one label per "
                "image and no loss.teacher; set it to 0"
            )
        fewest, most = self.stats.class_images
        unset = settings.loss.logit_adjustment is None and settings.balance is None
        possible = settings.loss.kind == "softmax" and not settings.loss.teacher
        if settings.objective == "classify" and unset and possible and most >= IMBALANCED * fewest:
            settings = replace(settings, loss=replace(settings.loss, logit_adjustment=1.0))
            self.explain(
                "logit adjustment for balanced accuracy",
                f"classes have {fewest:,} to {most:,} images (--loss.logit-adjustment 0: none)",
            )
        self.settings = settings

    def choose_execution(self, config: Config, device: torch.device) -> None:
        """Decide augmentation, precision and CPU data parallelism for the model that was built."""
        settings, stats = self.settings, self.stats
        fine_tuning = self.start is not None
        augmentation, mixing = choose_augmentation(settings, stats, fine_tuning=fine_tuning)
        self.augmentation, self.mixing = augmentation, mixing
        crops = {"padded": f"random crops with a padding of {augmentation.padding} pixels"}
        if augmentation.crop_area:
            crops["inception"] = f"random resized crops of {augmentation.crop_area[0]:.0%} or more"
        after = f" after {mixing.after:g} epochs" if mixing.after else ""
        parts = [
            crops.get(str(augmentation.crop)),
            augmentation.flip and "flips",
            augmentation.policy != "none" and augmentation.policy,
            augmentation.color_jitter and f"color jitter {augmentation.color_jitter:g}",
            augmentation.erasing and f"random erasing {augmentation.erasing:.0%}",
            mixing.mixup and f"mixup {mixing.mixup:g}{after}",
            mixing.cutmix and f"cutmix {mixing.cutmix:g}{after}",
        ]
        self.explain("augmentation", ", ".join(part for part in parts if part) or "none")
        self.precision, why = choose_precision(settings.machine.precision, device, config)
        self.explain(str(self.precision).removeprefix("torch."), why)
        self.shards = choose_shards(config, settings, self.precision, device)
        if self.shards > 1:
            self.explain(f"CPU data parallelism with {self.shards} shards", "less synchronization")
        if settings.until_accuracy is not None:
            accuracy = percent(settings.until_accuracy)
            why = "val is then used for model selection"
            self.explain(f"early stopping at {accuracy} val accuracy", why)


def suggests_transfer(settings: Settings, stats: DatasetStats) -> bool:
    """Return whether the built-in model is probably a better start than random weights.

    Only for small datasets of color photographs, and only if no model setting is given.
    """
    free = settings.model == ModelSettings() and settings.objective == "classify"
    few = stats.images <= FEW_PHOTOGRAPHS and stats.classes > 1 and not stats.multi_label
    return free and few and stats.photographs and stats.side >= MIN_PHOTOGRAPH


def is_automatic(optim: OptimSettings) -> bool:
    """Return whether defaults are chosen; AdamW without a learning rate has those of AdamW."""
    return optim.kind is None or (optim.kind == "adamw" and optim.learning_rate is None)


def muon_rate(start: Config | None) -> float:
    """Return Muon's learning rate; small models are fine-tuned at the from-scratch rate."""
    return MUON_RATE if start is None or is_small(start) else MUON_TRANSFER_RATE


def tunes_with_muon(settings: Settings, start: Config | None) -> bool:
    """Return whether Muon is the default for all weights of a pre-trained model."""
    possible = settings.optim.kind is None and settings.lora is None
    if not possible or not isinstance(start, VitConfig):
        return False
    narrow = start.width <= MUON_MAX_WIDTH or is_small(start)
    return settings.objective == "classify" and narrow


def is_small(start: Config) -> bool:
    return isinstance(start, VitConfig) and 12 * start.depth * start.width**2 <= SMALL_ENCODER


def uses_whitening(model: ModelSettings) -> bool:
    """Return whether the first convolution is initialized with whitening filters."""
    return model.init == "quick" and model.stem == "conv"


# What `vitrail train --search` compares: changes of augmentation and mixing.
STRENGTHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default augmentation": ({}, {}),
    "light augmentation": ({"crop_area": (0.7, 1.0), "padding": 1}, {"mixup": 0.0, "cutmix": 0.0}),
    "strong augmentation": ({"policy": "trivial", "erasing": 0.25}, {}),
}


def choose_augmentation(
    settings: Settings, stats: DatasetStats, *, fine_tuning: bool = False
) -> tuple[Augmentation, Mixing]:
    """Choose augmentation and mixing settings that were left open, by the size of the dataset."""
    crops = {"crop": "inception", "crop_area": (0.35, 1.0)}
    if stats.side <= SMALL_IMAGE:
        crops = {"crop": "padded" if stats.images < SMALL_DATASET else "whole", "padding": 3}
    long = not fine_tuning and settings.objective == "classify"  # long enough to overfit
    small = stats.images < SMALL_DATASET and not stats.multi_label
    explicit = settings.mix.mixup is not None or settings.mix.cutmix is not None
    mixing = {}
    if long and small and not explicit:
        mixing = {"cutmix": 1.0, "chance": 0.5, "after": float(MIXING_AFTER)}
    return settings.augment.resolve(**crops), settings.mix.resolve(**mixing)


def image_size_stages(settings: Settings, config: Config) -> Stages:
    """Return the image sizes of the run; the last is that of the model."""
    final = pair(config.image_size)[0]
    if not settings.image_sizes:
        return ((0.0, final),)
    if not isinstance(config, VitConfig):
        raise ConfigError("image_sizes are supported for Vision Transformers only; leave them out")
    stride = config.stride[0]
    for _, pixels in settings.image_sizes:
        if pixels % stride or pixels > final:
            raise ConfigError(
                f"image_sizes: {pixels} pixels are not a multiple of {stride} up to {final}; "
                f"try {max(stride, round(pixels / stride) * stride)}"
            )
    if settings.image_sizes[-1][1] != final:
        raise ConfigError(
            f"image_sizes end at {settings.image_sizes[-1][1]} pixels, and the model's image size "
            f"is {final}; end with {final}, or set model.image_size"
        )
    return settings.image_sizes


# The machine: precision, CPU data parallelism, micro-batches

# With avx512_bf16 a step of ViT-S/16 takes 0.7 times as long as in float32, of ViT-Ti/16 0.96 to
# 1.2 times (docs/notebook.md): narrow models spend the gain on conversions.
AVX512_MIN_WIDTH = 384
MAX_SHARDS = 4  # with more cores, each shard has several
MAX_SHARDED_WEIGHTS = 100_000_000  # beyond, another copy of the gradients is too expensive
RANDOM_LAYERS = ("dropout", "drop_path", "patch_dropout")  # threads would draw in any order
GRADIENT_BYTES = 4  # per weight and shard


def choose_precision(
    setting: Precision, device: torch.device, config: Config
) -> tuple[torch.dtype, str]:
    """Return the dtype of the matrix products, and the reason."""
    if setting != "auto":
        return getattr(torch, setting), "as configured"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "faster on this GPU, with the same range as float32"
        return torch.float16, "faster on this GPU, with gradient scaling"
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        if able.get("amx_bf16"):
            return torch.bfloat16, "this CPU has AMX"
        wide = isinstance(config, VitConfig) and config.width >= AVX512_MIN_WIDTH
        if able.get("avx512_bf16") and wide:
            return torch.bfloat16, "this CPU has AVX-512 BF16, and the model is wide"
        return torch.float32, "bfloat16 is not faster for this model on this CPU"
    return torch.float32, f"no faster precision is known on {device.type}"


def choose_shards(
    config: Config, settings: Settings, precision: torch.dtype, device: torch.device
) -> int:
    """Return the shards of a batch for CPU data parallelism; 1 disables it."""
    setting, obstacle = settings.machine.parts, ""
    if distributed.world_size() > 1:
        obstacle = "each process has its own shard of the batch already"
    elif device.type != "cpu" or precision == torch.float16:
        obstacle = "it needs float32 or bfloat16 on a CPU"
    elif not isinstance(config, VitConfig) or settings.objective != "classify":
        obstacle = "it needs a Vision Transformer and objective='classify'"
    elif settings.loss.teacher and settings.loss.teaching != "features":
        obstacle = "the teacher needs the whole batch"
    elif any(getattr(config, name) for name in RANDOM_LAYERS):
        obstacle = "dropout needs the whole batch"
    if setting is not None and setting > 1 and obstacle:
        raise ConfigError(f"machine.parts={setting} is not possible: {obstacle}; leave it out")
    if setting is not None:
        return setting
    weights = 12 * config.depth * config.width**2 if isinstance(config, VitConfig) else 0
    if obstacle or weights > MAX_SHARDED_WEIGHTS:
        return 1
    return min(MAX_SHARDS, torch.get_num_threads())


def choose_accumulation(
    settings: Settings, model: Model, device: torch.device, log: Callable[[str], None]
) -> int:
    """Return the micro-batches per step that fit into memory; may enable checkpointing."""
    assert settings.batch_size is not None
    processes = distributed.world_size()
    batch, remainder = divmod(settings.batch_size, processes)
    if remainder or not batch:
        raise ConfigError(
            f"batch_size={settings.batch_size} is not divisible by {processes} processes; "
            f"try {max(1, batch) * processes}"
        )
    if (setting := settings.machine.micro_batch) is not None:
        micro = min(setting, batch)
        if micro < 1 or batch % micro:
            raise ConfigError(
                f"machine.micro_batch={setting} does not divide the {batch} images per process "
                f"and step; try {largest_divisor(batch, micro)}"
            )
        return batch // micro
    shape = (1, model.config.channels, *pair(model.config.image_size))
    per_image = activation_bytes(model, shape)
    shards = choose_shards(model.config, settings, torch.float32, device)
    per_weight = bytes_per_weight(settings) + GRADIENT_BYTES * (shards if shards > 1 else 0)
    state = per_weight * num_trainable(model)
    available = free_bytes(device)
    free = max(0, available - state)
    short = distributed.broadcast_object(per_image > USABLE * free)
    if short and getattr(model, "checkpointing", None) is False:
        model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]
        per_image = activation_bytes(model, shape)
        short = distributed.broadcast_object(per_image > USABLE * free)
        log("  activation checkpointing enabled to fit in memory")
    if short:
        log(
            f"note: {available / 2**30:.1f} GiB of memory are free, and training may need "
            f"{(state + per_image) / 2**30:.1f} GiB; try --optim.kind adafactor, smaller images, "
            "--lora or --optim.freeze"
        )
    limit = int(free * USABLE) // max(1, per_image)
    micro = distributed.broadcast_object(largest_divisor(batch, limit))
    if micro < batch:
        log(
            f"  gradient accumulation over {batch // micro} micro-batches of {micro}: a batch of "
            f"{batch} needs {batch * per_image / 2**30:.1f} GiB"
        )
    return batch // micro
