"""Automatic configuration, and that explicit settings are kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tiny_models import awake
from tiny_runs import write_colors
from vitrail.data.datasets import open_dataset
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Augmentation, Mixing, Preprocessing
from vitrail.errors import ConfigError
from vitrail.models.config import BitConfig
from vitrail.models.registry import configuration
from vitrail.training.auto_config import (
    AutoConfig,
    DatasetStats,
    choose_augmentation,
    dataset_stats,
    image_size_stages,
)
from vitrail.training.budget import (
    ENOUGH_EPOCHS,
    FinetunePlan,
    encoder_cost,
    plan_finetuning,
)
from vitrail.training.config import LossSettings, ModelSettings, OptimSettings, Settings
from vitrail.training.data_module import batch_preparation
from vitrail.training.optim import freeze

STATS = DatasetStats(images=2000, classes=5, side=160, channels=3, multi_label=False, seconds=3e-4)
SMALL = replace(STATS, side=32)
TINY, PICO = configuration("ViT-Ti/16"), configuration("ViT-Pico/8")


def chosen(settings=None, stats=STATS, *, gpu=False, start=None, **options):
    return AutoConfig(settings or Settings(), stats, gpu=gpu, start=start, **options)


def values(settings, names):
    """Return the values of settings such as `model.name`."""
    found = []
    for name in names.split():
        value = settings
        for part in name.split("."):
            value = getattr(value, part)
        found.append(value)
    return tuple(found)


def model(**changes):
    return Settings(model=ModelSettings(**changes))


def optim(**changes):
    return Settings(optim=OptimSettings(**changes))


def test_explicit_settings_are_kept():
    explicit = Settings(
        batch_size=7,
        steps=11,
        image_sizes=((0.0, 32),),
        model=ModelSettings(name="ViT-Ti/16", image_size=96),
        optim=OptimSettings(kind="sgd", learning_rate=0.5, schedule="rsqrt", weight_decay=0.1),
        loss=LossSettings(kind="sigmoid"),
        machine=replace(Settings().machine, workers=3),
    )
    assert chosen(explicit).settings == replace(explicit, model=replace(explicit.model, channels=3))


GRAY, LARGE = replace(STATS, side=28, channels=1), replace(STATS, images=1_000_000)
SIZE, COOLDOWN = "model.image_size model.patch_size", "optim.schedule optim.cooldown"
TIMES, TUNED = "model batch_size epochs", ("adamw", 2e-4, 0.75, ModelSettings(), 32, 4.0)
EXPLICIT = optim(learning_rate=1e-5, layer_decay=1.0)
HEAD = replace(optim(kind="sgd"), head_init="probe")
LABELS = {"start": TINY, "stats": replace(STATS, multi_label=True)}
FROZEN, SHAPE = ("stem.layers.0.weight",), "model.depth model.width model.mlp_width model.heads"
RATE, MUON = "optim.kind optim.learning_rate optim.layer_decay", "optim.muon_learning_rate"
CASES = {
    # Whitening filters, frozen, for chosen models only.
    "quick": (None, {}, "model.init optim.freeze optim.kind", ("quick", FROZEN, "muon")),
    "named": (model(name="ViT-Ti/16"), {}, "model.init optim.freeze", (None, ())),
    "patches": (model(stem="patches"), {}, "model.init optim.freeze", (None, ())),
    "google": (model(init="google"), {}, "model.init optim.freeze", ("google", ())),
    # The model follows the images.
    "large images": (None, {}, "model.image_size model.channels", (128, 3)),
    "medium images": (None, {"stats": replace(STATS, side=100)}, "model.image_size", (64,)),
    "small gray images": (None, {"stats": GRAY}, f"{SIZE} model.channels", (28, 4, 1)),
    "progressive": (None, {}, "image_sizes", (((0.0, 64), (0.5, 128)),)),
    "not progressive": (None, {"stats": SMALL}, "image_sizes", ((),)),
    "wide": (None, {"stats": SMALL}, SHAPE, (2, 96, 384, 3)),
    "explicit shape": (model(width=64), {"stats": SMALL}, SHAPE, (None, 64, None, None)),
    "large dataset on a GPU": (None, {"stats": LARGE, "gpu": True}, "model.name", ("ViT-S/16",)),
    "large dataset without a GPU": (None, {"stats": LARGE}, "model.name", ("ViT-Pico/16",)),
    "batch of few images": (None, {"stats": replace(STATS, images=5)}, "batch_size", (5,)),
    # Schedules and rates of optimizers.
    "muon": (None, {}, f"{COOLDOWN} {MUON}", ("constant-linear", 0.6, 0.02)),
    "muon, schedule": (optim(schedule="constant-linear"), {}, "optim.cooldown", (None,)),
    "muon, cooldown": (optim(cooldown=0.1), {}, COOLDOWN, ("constant-linear", 0.1)),
    "muon, cosine": (optim(schedule="cosine"), {}, "optim.kind optim.schedule", ("muon", "cosine")),
    "lion": (optim(kind="lion"), {}, "optim.learning_rate optim.schedule", (1e-4, "cosine")),
    # Large models that the user names.
    "large": (
        model(name="ViT-L/16"),
        {"stats": LARGE},
        f"batch_size {RATE} optim.weight_decay optim.clip_norm optim.schedule optim.warmup",
        (1024, "adamw", 1e-3, None, 0.05, 1.0, "cosine", 0.05),
    ),
    "large, few images": (
        model(name="BiT-R50x1"),
        {},
        f"batch_size {RATE}",
        (32, "adamw", 3.1e-5, None),
    ),
    "large, explicit": (
        Settings(
            batch_size=512,
            model=ModelSettings(name="ViT-B/16"),
            optim=OptimSettings(weight_decay=0.1),
        ),
        {},
        "batch_size optim.learning_rate optim.weight_decay",
        (512, 5e-4, 0.1),
    ),
    "small by its depth": (model(name="ViT-B/16", depth=1), {}, "optim.kind", ("muon",)),
    "small": (model(name="ViT-Ti/16"), {}, "optim.kind optim.learning_rate", ("muon", 6e-3)),
    # Fine-tuning.
    "fine-tuning": (None, {"start": configuration("ViT-B/16")}, f"{RATE} {TIMES}", TUNED),
    "fine-tuning, narrow": (None, {"start": TINY}, f"{RATE} {MUON}", ("muon", 3e-4, None, 3e-3)),
    "fine-tuning, Muon's rate": (
        optim(muon_learning_rate=0.02),
        {"start": TINY},
        f"optim.kind {MUON}",
        ("muon", 0.02),
    ),
    "fine-tuning, frozen": (
        optim(freeze=("stem.*",)),
        {"start": TINY},
        RATE,
        ("adamw", 8e-4, 0.75),
    ),
    "fine-tuning, explicit": (EXPLICIT, {"start": TINY}, RATE, ("muon", 1e-5, 1.0)),
    # Naming AdamW gives the defaults that AdamW has where it is chosen.
    "large, AdamW": (
        Settings(model=ModelSettings(name="ViT-L/16"), optim=OptimSettings(kind="adamw")),
        {"stats": LARGE},
        f"batch_size {RATE} optim.weight_decay optim.clip_norm",
        (1024, "adamw", 1e-3, None, 0.05, 1.0),
    ),
    "fine-tuning, AdamW": (
        optim(kind="adamw"),
        {"start": configuration("ViT-B/16")},
        f"{RATE} head_init",
        ("adamw", 2e-4, 0.75, "probe"),
    ),
    "fine-tuning, AdamW and its rate": (
        optim(kind="adamw", learning_rate=1e-4),
        {"start": TINY},
        f"{RATE} head_init",
        ("adamw", 1e-4, None, "zeros"),
    ),
    # One learning rate scales all of Muon's.
    "muon, learning rate": (optim(learning_rate=3e-3), {}, MUON, (0.01,)),
    "fine-tuning, learning rate": (
        optim(learning_rate=1e-4),
        {"start": TINY},
        f"{RATE} {MUON}",
        ("muon", 1e-4, None, 1e-3),
    ),
    "both learning rates": (
        optim(learning_rate=3e-3, muon_learning_rate=0.02),
        {},
        f"optim.learning_rate {MUON}",
        (3e-3, 0.02),
    ),
    "fine-tuning, small": (
        None,
        {"start": PICO},
        f"optim.kind {COOLDOWN} {MUON}",
        ("muon", "linear", None, 0.02),
    ),
    "fine-tuning, BiT": (None, {"start": configuration("BiT-R50x1")}, "optim.kind", ("adamw",)),
    # Perhaps there is no matrix for Muon.
    "frozen": (optim(freeze=("encoder.*",)), {"start": PICO}, "optim.kind", ("adamw",)),
    "new head": (None, {"start": TINY}, "head_init", ("probe",)),
    "known head": (None, {"start": TINY, "new_head": False}, "head_init", ("zeros",)),
    "named optimizer": (optim(kind="sgd"), {"start": TINY}, "head_init", ("zeros",)),
    "explicit head": (HEAD, {"start": TINY}, "head_init", ("probe",)),
    "several labels": (None, LABELS, "head_init loss.kind", ("zeros", "sigmoid")),
    # Data loading.
    "fast decoding": (None, {}, "machine.workers", (0,)),
    "slow decoding": (None, {"stats": replace(STATS, seconds=0.01)}, "machine.workers", (None,)),
    "GPU": (None, {"gpu": True}, "machine.workers", (None,)),
}


@pytest.mark.parametrize("case", CASES)
def test_chosen_settings(case):
    settings, options, names, expected = CASES[case]
    assert values(chosen(settings, **options).settings, names) == expected


def test_reasons_for_a_large_model_are_honest():
    reasons = chosen(model(name="ViT-L/16"), LARGE).reasons
    assert (
        "3 epochs: a short default; large models usually train for 90 to 300, set --epochs"
        in reasons
    )
    assert not any("Muon" in reason or "small" in reason for reason in reasons)


@pytest.mark.parametrize("side", [8, 15, 28, 32, 40, 41, 100, 500])
def test_chosen_model_fits_every_image_size_stage(side):
    settings = chosen(stats=replace(STATS, side=side)).settings
    config = configuration(settings.model.name).change(**settings.model.changes())
    for _, size in image_size_stages(settings, config):
        assert size % config.stride[0] == 0
        assert size <= config.image_size


def test_invalid_settings_raise():
    for sizes, config, message in [
        (((0.0, 40),), TINY, "40 pixels are not a multiple of 16 up to 224; try 32"),
        (((0.0, 32),), TINY, "end with 224"),
        (((0.0, 32),), BitConfig(), "for Vision Transformers only"),
    ]:
        with pytest.raises(ConfigError, match=message):
            image_size_stages(Settings(image_sizes=sizes), config)
    with pytest.raises(ConfigError, match="use 'sigmoid'"):
        chosen(Settings(loss=LossSettings(kind="softmax")), replace(STATS, multi_label=True))
    for loss, stats in [({}, replace(STATS, multi_label=True)), ({"teacher": "runs/one"}, STATS)]:
        with pytest.raises(ConfigError, match="logit_adjustment=1 needs one label per image and"):
            chosen(Settings(loss=LossSettings(logit_adjustment=1.0, **loss)), stats)
    with pytest.raises(ConfigError, match="after=-1"):
        Mixing(after=-1)


def test_dataset_stats_of_arrays(tmp_path):
    stats = dataset_stats(open_dataset(write_colors(tmp_path / "colors.npz")))
    assert (stats.images, stats.classes, stats.side, stats.channels) == (30, 3, 8, 3)
    gray = np.zeros((4, 9, 7), np.uint8)
    np.savez(tmp_path / "gray.npz", x_train=gray, y_train=[0, 1, 0, 1])
    assert dataset_stats(open_dataset(tmp_path / "gray.npz", "all")).channels == 1


def test_explicit_augmentation_is_kept_and_completed():
    settings = Settings(augment=Augmentation(flip=False, policy="trivial"))
    augmentation, mixing = choose_augmentation(settings, STATS)
    expected = Augmentation(crop_area=(0.35, 1.0), flip=False, policy="trivial")
    assert augmentation == expected.resolve()
    assert mixing == Mixing(cutmix=1.0, chance=0.5, after=15, mixup=0.0)
    small, _ = choose_augmentation(settings, replace(STATS, side=28))
    assert (small.crop, small.padding) == ("padded", 3)
    many = replace(STATS, side=28, images=60_000)
    light, none = choose_augmentation(Settings(), many)
    assert (light.crop, none.cutmix) == ("whole", 0.0)


@pytest.mark.parametrize(
    ("settings", "fine_tuning", "mixing"),
    [
        (Settings(), True, Mixing()),
        (Settings(objective="masked-patches"), False, Mixing()),
        (Settings(mix=Mixing(mixup=0.2)), False, Mixing(mixup=0.2)),  # from the first step
        (Settings(mix=Mixing(after=5)), False, Mixing(cutmix=1.0, chance=0.5, after=5)),
    ],
)
def test_chosen_mixing(settings, fine_tuning, mixing):
    assert choose_augmentation(settings, STATS, fine_tuning=fine_tuning)[1] == mixing.resolve()


@pytest.mark.parametrize(
    ("step", "after", "mixed"), [(0, 0, True), (29, 3, False), (30, 3, True), (25, 2.5, True)]
)
def test_mixing_starts_after_the_configured_epochs(step, after, mixed):
    mixing, preprocessing = Mixing(cutmix=1.0, after=after), Preprocessing(size=(8, 8))
    prepare = batch_preparation(preprocessing, mixing, 4, torch.device("cpu"), steps_per_epoch=10)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    batch = Batch(images, torch.arange(4), torch.arange(4))
    _, targets = prepare(batch, np.random.default_rng(0), step)
    assert targets.ndim == (2 if mixed else 1)


# Fine-tuning within a time budget. DeiT-Ti on two cores: 60 images a second at 224 pixels,
# 2,641 + 293 flowers, 736 to evaluate on.

FLOWERS = {"seconds": 300, "forward": 1 / 60, "read": 1e-3, "train": 2641, "dev": 293, "test": 736}


def plan(minutes: float, config=TINY, **changes):
    return plan_finetuning(config, **FLOWERS | {"seconds": 60 * minutes} | changes)


def test_plan_follows_the_budget():
    plans = [plan(minutes) for minutes in (0.35, 1, 2, 3, 5, 10, 20, 30, 60, 120, 600)]
    sizes = [p.image_size for p in plans]
    frozen = [p.frozen_blocks for p in plans]
    assert sizes == sorted(sizes)
    assert frozen == sorted(frozen, reverse=True)
    assert (plans[0].name, plans[0].frozen_blocks, plans[0].image_size) == ("last", 8, 128)
    for full in (plans[-1], plan(5, forward=1e-4, read=1e-5)):
        assert (full.name, full.image_size, full.image_sizes) == ("full", 224, ())
        assert full.frozen_blocks == 0
    one = plan(2.5)  # the largest affordable image size
    assert one.name == "small"
    assert one.epochs >= ENOUGH_EPOCHS
    assert 128 < one.image_size < 224
    assert plan(10).image_sizes == ((0.0, 160), (0.9, 224))  # three quarters first
    assert plan(1).image_sizes == ((0.0, 96), (0.9, 128))


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_norm": True, "registers": 1, "distillation": True},
        {"pre_norm": True, "position": "relative"},
        {"position": "learned", "position_place": "every-layer"},
        {"position": "learned-2d", "position_place": "shared"},
        {"position": "rotary", "stem": "conv"},
        {"position": "learned-2d", "stem": "resnet", "patch_size": 1},
    ],
    ids=str,
)
def test_frozen_first_blocks_need_no_backward_pass(tiny, changes):
    model, inputs = awake(tiny.change(image_size=32, **changes)), []
    names = [name for name, _ in model.named_parameters()]
    last = FinetunePlan("last", 32, train_images=100, frozen_blocks=1)
    freeze(model, chosen(start=model.config, plan=last, weights=names).settings.optim.freeze)
    model.encoder.blocks[1].register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    assert model(torch.zeros(1, 3, 32, 32)).requires_grad
    assert [tokens.requires_grad for tokens in inputs] == [False]


def test_short_plan_evaluates_some_test_images():
    assert plan(1).test_images is None  # all 736
    many = plan(1, test=50_000)
    assert 500 <= many.test_images < 50_000
    assert many.epochs > 0.5 * plan(1).epochs
    assert plan(1 / 60, test=50_000).test_images == 500
    assert plan(600, test=50_000).test_images is None
    choices = chosen(start=TINY, plan=many)
    assert choices.test_images == many.test_images
    assert any(f"evaluating {many.test_images:,} test images" in r for r in choices.reasons)


def test_plan_for_muon_trains_all_weights_and_counts_its_cost():
    short = plan(0.35, muon_batch=32)
    assert (short.name, short.frozen_blocks, short.image_size) == ("small", 0, 128)
    ratios = [plan(5, muon_batch=batch).epochs / plan(5).epochs for batch in (8, 32, 10**9)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.8
    assert ratios[-1] == pytest.approx(1)


@pytest.mark.parametrize("minutes", [0.4, 1, 3, 10, 60])
@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-B/32", "ViT-L/14"])
def test_planned_sizes_are_valid(name, minutes):
    config = configuration(name)
    one = plan(minutes, config)
    for size in (one.image_size, *(size for _, size in one.image_sizes)):
        assert size % config.stride[0] == 0
        assert size <= one.image_size <= config.image_size


@pytest.mark.parametrize(
    ("settings", "image_size", "freeze"),
    [
        (Settings(minutes=0.5), 128, ("stem.*", "cls_token", "encoder.blocks.0.*")),
        (replace(model(image_size=224), minutes=0.5), 224, ()),
        (replace(optim(freeze=("stem.*",)), minutes=0.5), None, ("stem.*",)),
    ],
)
def test_explicit_settings_disable_the_plan(settings, image_size, freeze):
    weights = ("stem.w", "cls_token", "encoder.blocks.0.w", "head.w")
    planned = chosen(settings, start=TINY, plan=plan(0.35), weights=weights).settings
    assert (planned.model.image_size, planned.optim.freeze) == (image_size, freeze)


def test_probe_leaves_time_for_evaluation_and_training():
    read, train, evaluated = 1e-4, 7200, 2800
    cifar = {"read": read, "train": train, "dev": 800, "test": 2000}
    one = plan(1, **cifar)
    each = encoder_cost(TINY, one.image_size) / encoder_cost(TINY, 224) / 60 + read
    assert one.probe_images < train
    assert one.probe_images * each <= 0.5 * (60 - evaluated * each)
    assert one.epochs > 0
    assert plan(15, **cifar).probe_images is None  # all
    assert plan(1 / 60, **cifar).probe_images == 500
    choices = chosen(start=TINY, plan=plan(0.2))
    assert choices.probe_images == 500
    assert any("linear probe of 500 of 2,641 training images" in r for r in choices.reasons)
    assert chosen(start=TINY, plan=plan(5)).probe_images is None


def test_encoder_cost_matches_multiply_adds():
    tokens, width = 197, 192
    per_block = tokens * (3 * width**2 + width**2 + 2 * width * 768) + 2 * tokens**2 * width
    assert encoder_cost(TINY, 224) * width == per_block
