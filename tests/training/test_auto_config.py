"""Automatic configuration, and that explicit settings are kept."""

from dataclasses import replace

import numpy as np
import pytest

from tiny_runs import write_colors
from vitrail.data.datasets import open_dataset
from vitrail.data.preprocessing import Mixing
from vitrail.errors import ConfigError
from vitrail.models.config import BitConfig
from vitrail.models.registry import configuration
from vitrail.training.auto_config import (
    DatasetStats,
    choose_augmentation,
    complete_settings,
    dataset_stats,
    image_size_stages,
)
from vitrail.training.config import (
    AugmentSettings,
    LossSettings,
    MachineSettings,
    MixSettings,
    ModelSettings,
    OptimSettings,
    Settings,
)

STATS = DatasetStats(images=2000, classes=5, side=160, channels=3, multi_label=False, seconds=3e-4)


def chosen(settings=None, stats=STATS, *, gpu=False, start=None):
    return complete_settings(settings or Settings(), stats, gpu=gpu, start=start)


def test_all_settings_are_completed_with_reasons():
    choices = chosen()
    settings = choices.settings
    assert None not in (settings.batch_size, settings.epochs, settings.model.name)
    assert None not in (settings.optim.kind, settings.optim.learning_rate, settings.loss.kind)
    assert all(": " in reason for reason in choices.reasons)


def test_explicit_settings_are_kept():
    explicit = Settings(
        batch_size=7,
        steps=11,
        image_sizes=((0.0, 32),),
        model=ModelSettings(name="ViT-Ti/16", image_size=96),
        optim=OptimSettings(kind="sgd", learning_rate=0.5, schedule="rsqrt", weight_decay=0.1),
        loss=LossSettings(kind="sigmoid"),
        machine=MachineSettings(workers=3),
    )
    assert chosen(explicit).settings == replace(explicit, model=replace(explicit.model, channels=3))


def test_only_automatic_models_get_frozen_whitening_filters():
    quick = chosen().settings
    assert (quick.model.init, quick.optim.freeze) == ("quick", ("stem.layers.0.weight",))
    assert quick.optim.kind == "muon"
    named = chosen(Settings(model=ModelSettings(name="ViT-Ti/16"))).settings
    assert (named.model.init, named.optim.freeze) == (None, ())
    patches = chosen(Settings(model=ModelSettings(stem="patches"))).settings
    assert (patches.model.init, patches.optim.freeze) == (None, ())
    google = chosen(Settings(model=ModelSettings(init="google"))).settings
    assert (google.model.init, google.optim.freeze) == ("google", ())


def test_muon_schedule_from_scratch_and_explicit():
    scratch = chosen().settings.optim
    assert (scratch.schedule, scratch.cooldown) == ("constant-linear", 0.6)
    tuned = chosen(start=configuration("ViT-Pico/8")).settings.optim
    assert (tuned.kind, tuned.schedule, tuned.cooldown) == ("muon", "linear", None)
    explicit = chosen(Settings(optim=OptimSettings(schedule="constant-linear"))).settings.optim
    assert explicit.cooldown is None
    explicit = chosen(Settings(optim=OptimSettings(cooldown=0.1))).settings.optim
    assert (explicit.schedule, explicit.cooldown) == ("constant-linear", 0.1)


def test_explicit_optimizer_gets_its_defaults():
    lion = chosen(Settings(optim=OptimSettings(kind="lion"))).settings.optim
    assert (lion.learning_rate, lion.schedule, lion.weight_decay) == (1e-4, "cosine", 0.0)
    muon = chosen(Settings(optim=OptimSettings(schedule="cosine", weight_decay=0.0))).settings.optim
    assert (muon.kind, muon.schedule, muon.weight_decay) == ("muon", "cosine", 0.0)


def test_masked_patches_are_not_mixed():
    _, mixing = choose_augmentation(Settings(objective="masked-patches"), STATS)
    assert (mixing.mixup, mixing.cutmix) == (0, 0)


def test_image_size_follows_the_data():
    small = chosen(stats=replace(STATS, side=28, channels=1)).settings
    assert (small.model.image_size, small.model.patch_size, small.model.channels) == (28, 4, 1)
    assert chosen().settings.model.image_size == 128
    assert chosen(stats=replace(STATS, side=100)).settings.model.image_size == 64
    assert chosen().settings.model.channels == 3


def test_progressive_resizing_only_for_large_images():
    assert chosen(stats=replace(STATS, side=32)).settings.image_sizes == ()
    assert chosen().settings.image_sizes == ((0.0, 64), (0.5, 128))


def test_small_model_is_wide_unless_its_shape_is_set():
    small = replace(STATS, side=32)
    model = chosen(stats=small).settings.model
    assert (model.depth, model.width, model.mlp_width, model.heads) == (2, 96, 384, 3)
    explicit = chosen(Settings(model=ModelSettings(width=64)), stats=small).settings.model
    assert (explicit.depth, explicit.width, explicit.heads) == (None, 64, None)


def test_chosen_model_fits_every_image_size_stage():
    for side in (8, 15, 28, 32, 40, 41, 100, 500):
        settings = chosen(stats=replace(STATS, side=side)).settings
        config = configuration(settings.model.name).change(**settings.model.changes())
        for _, size in image_size_stages(settings, config):
            assert size % config.stride[0] == 0
            assert size <= config.image_size


def test_gpu_and_large_dataset_choose_a_larger_model():
    many = replace(STATS, images=1_000_000)
    assert chosen(stats=many, gpu=True).settings.model.name == "ViT-S/16"
    assert chosen(stats=many).settings.model.name != "ViT-S/16"


def test_finetuning_defaults():
    settings = chosen(start=configuration("ViT-B/16")).settings
    assert settings.model == ModelSettings()
    assert settings.optim.kind == "adamw"
    assert settings.optim.learning_rate == 2e-4
    assert settings.optim.layer_decay == 0.75
    assert (settings.batch_size, settings.epochs) == (32, 4.0)


def test_finetuning_rate_depends_on_width():
    tiny = chosen(start=configuration("ViT-Ti/16")).settings.optim
    assert (tiny.kind, tiny.learning_rate, tiny.layer_decay) == ("adamw", 8e-4, 0.75)
    explicit = Settings(optim=OptimSettings(learning_rate=1e-5, layer_decay=1.0))
    explicit = chosen(explicit, start=configuration("ViT-Ti/16")).settings.optim
    assert (explicit.learning_rate, explicit.layer_decay) == (1e-5, 1.0)


def test_small_models_are_finetuned_with_muon():
    small = configuration("ViT-Pico/8")
    assert chosen(start=small).settings.optim.kind == "muon"
    assert chosen(start=configuration("BiT-R50x1")).settings.optim.kind == "adamw"
    frozen = Settings(
        optim=OptimSettings(freeze=("encoder.*",))
    )  # perhaps there is no matrix to turn
    assert chosen(frozen, start=small).settings.optim.kind == "adamw"


def test_multi_label_data_needs_sigmoid_loss():
    several = replace(STATS, multi_label=True)
    assert chosen(stats=several).settings.loss.kind == "sigmoid"
    with pytest.raises(ConfigError, match="use 'sigmoid'"):
        chosen(Settings(loss=LossSettings(kind="softmax")), several)


def test_workers_are_used_for_slow_decoding_or_gpu():
    assert chosen().settings.machine.workers == 0
    assert chosen(stats=replace(STATS, seconds=0.01)).settings.machine.workers is None
    assert chosen(gpu=True).settings.machine.workers is None


def test_batch_size_is_capped_by_the_dataset():
    assert chosen(stats=replace(STATS, images=5)).settings.batch_size == 5


def test_explicit_augmentation_is_kept_and_completed():
    settings = Settings(augment=AugmentSettings(flip=False, policy="trivial"))
    augmentation, mixing = choose_augmentation(settings, STATS)
    assert not augmentation.flip
    assert augmentation.policy == "trivial"
    assert augmentation.crop == "inception"
    assert (mixing.cutmix, mixing.chance, mixing.after) == (1.0, 0.5, 15)
    small, _ = choose_augmentation(settings, replace(STATS, side=28))
    assert small.crop == "padded"
    _, tuned = choose_augmentation(Settings(), STATS, fine_tuning=True)
    assert tuned.cutmix == 0.0
    many = replace(STATS, side=28, images=60_000)
    light, none = choose_augmentation(Settings(), many)
    assert (light.crop, none.cutmix) == ("whole", 0.0)


def test_explicit_mixing_starts_immediately():
    _, mixing = choose_augmentation(Settings(mix=MixSettings(mixup=0.2)), STATS)
    assert mixing == Mixing(mixup=0.2)
    _, later = choose_augmentation(Settings(mix=MixSettings(after=5)), STATS)
    assert later == Mixing(cutmix=1.0, chance=0.5, after=5)


def test_invalid_image_sizes_raise():
    config = configuration("ViT-Ti/16")
    with pytest.raises(ConfigError, match="40 pixels are not a multiple of 16 up to 224; try 32"):
        image_size_stages(Settings(image_sizes=((0.0, 40),)), config)
    with pytest.raises(ConfigError, match="end with 224"):
        image_size_stages(Settings(image_sizes=((0.0, 32),)), config)
    with pytest.raises(ConfigError, match="for Vision Transformers only"):
        image_size_stages(Settings(image_sizes=((0.0, 32),)), BitConfig())


def test_dataset_stats_of_arrays(tmp_path):
    stats = dataset_stats(open_dataset(write_colors(tmp_path / "colors.npz")))
    assert (stats.images, stats.classes, stats.side, stats.channels) == (30, 3, 8, 3)
    gray = np.zeros((4, 9, 7), np.uint8)
    np.savez(tmp_path / "gray.npz", x_train=gray, y_train=[0, 1, 0, 1])
    assert dataset_stats(open_dataset(tmp_path / "gray.npz", "all")).channels == 1
