"""What is chosen where nothing was said, and that what was said stays."""

from dataclasses import replace

import numpy as np
import pytest

from tiny_runs import write_colors
from vitrail.data.sources import open_source
from vitrail.data.variation import Mixing
from vitrail.errors import ConfigError
from vitrail.models.config import BitConfig
from vitrail.models.registry import configuration
from vitrail.training.choices import Look, choose, choose_variation, look_at, stages_of
from vitrail.training.settings import (
    AugmentSettings,
    LossSettings,
    MachineSettings,
    MixSettings,
    ModelSettings,
    Optim,
    Settings,
)

LOOK = Look(pictures=2000, classes=5, side=160, channels=3, multi_label=False, seconds=3e-4)


def chosen(settings=None, look=LOOK, *, gpu=False, start=None):
    return choose(settings or Settings(), look, gpu=gpu, start=start)


def test_everything_a_run_needs_is_chosen_and_every_choice_has_a_reason():
    choices = chosen()
    settings = choices.settings
    assert None not in (settings.batch_size, settings.epochs, settings.model.name)
    assert None not in (settings.optim.kind, settings.optim.learning_rate, settings.loss.kind)
    assert all(": " in reason for reason in choices.reasons)


def test_what_was_said_stays():
    said = Settings(
        batch_size=7,
        steps=11,
        image_sizes=((0.0, 32),),
        model=ModelSettings(name="ViT-Ti/16", image_size=96),
        optim=Optim(kind="sgd", learning_rate=0.5, schedule="rsqrt", weight_decay=0.1),
        loss=LossSettings(kind="sigmoid"),
        machine=MachineSettings(workers=3),
    )
    assert chosen(said).settings == replace(said, model=replace(said.model, channels=3))


def test_a_model_that_was_chosen_gets_first_filters_that_stay_and_one_that_was_named_does_not():
    quick = chosen().settings
    assert (quick.model.init, quick.optim.freeze) == ("quick", ("stem.layers.0.weight",))
    assert quick.optim.kind == "muon"
    named = chosen(Settings(model=ModelSettings(name="ViT-Ti/16"))).settings
    assert (named.model.init, named.optim.freeze) == (None, ())
    patches = chosen(Settings(model=ModelSettings(stem="patches"))).settings
    assert (patches.model.init, patches.optim.freeze) == (None, ())
    drawn = chosen(Settings(model=ModelSettings(init="google"))).settings
    assert (drawn.model.init, drawn.optim.freeze) == ("google", ())


def test_from_scratch_muons_rate_stays_before_it_falls_and_a_said_schedule_is_kept():
    scratch = chosen().settings.optim
    assert (scratch.schedule, scratch.cooldown) == ("constant-linear", 0.6)
    tuned = chosen(start=configuration("ViT-Pico/8")).settings.optim
    assert (tuned.kind, tuned.schedule, tuned.cooldown) == ("muon", "linear", None)
    said = chosen(Settings(optim=Optim(schedule="constant-linear"))).settings.optim
    assert said.cooldown is None
    said = chosen(Settings(optim=Optim(cooldown=0.1))).settings.optim
    assert (said.schedule, said.cooldown) == ("constant-linear", 0.1)


def test_an_optimizer_that_was_named_gets_its_own_usual_settings():
    lion = chosen(Settings(optim=Optim(kind="lion"))).settings.optim
    assert (lion.learning_rate, lion.schedule, lion.weight_decay) == (1e-4, "cosine", 0.0)
    muon = chosen(Settings(optim=Optim(schedule="cosine", weight_decay=0.0))).settings.optim
    assert (muon.kind, muon.schedule, muon.weight_decay) == ("muon", "cosine", 0.0)


def test_masked_patches_are_not_mixed():
    _, mixing = choose_variation(Settings(objective="masked-patches"), LOOK)
    assert (mixing.mixup, mixing.cutmix) == (0, 0)


def test_small_pictures_are_seen_whole_and_large_ones_reduced():
    small = chosen(look=replace(LOOK, side=28, channels=1)).settings
    assert (small.model.image_size, small.model.patch_size, small.model.channels) == (28, 4, 1)
    assert chosen().settings.model.image_size == 128
    assert chosen(look=replace(LOOK, side=100)).settings.model.image_size == 64
    assert chosen().settings.model.channels == 3


def test_only_large_pictures_begin_small():
    assert chosen(look=replace(LOOK, side=32)).settings.image_sizes == ()
    assert chosen().settings.image_sizes == ((0.0, 64), (0.5, 128))


def test_a_small_model_is_wide_unless_its_shape_is_given():
    small = replace(LOOK, side=32)
    model = chosen(look=small).settings.model
    assert (model.depth, model.width, model.mlp_width, model.heads) == (2, 96, 384, 3)
    given = chosen(Settings(model=ModelSettings(width=64)), look=small).settings.model
    assert (given.depth, given.width, given.heads) == (None, 64, None)


def test_the_chosen_model_can_be_built_at_every_size_of_the_run():
    for side in (8, 15, 28, 32, 40, 41, 100, 500):
        settings = chosen(look=replace(LOOK, side=side)).settings
        config = configuration(settings.model.name).change(**settings.model.changes())
        for _, size in stages_of(settings, config):
            assert size % config.stride[0] == 0
            assert size <= config.image_size


def test_a_gpu_and_many_pictures_make_a_larger_model():
    many = replace(LOOK, pictures=1_000_000)
    assert chosen(look=many, gpu=True).settings.model.name == "ViT-S/16"
    assert chosen(look=many).settings.model.name != "ViT-S/16"


def test_fine_tuning_leaves_the_model_alone_and_takes_small_steps():
    settings = chosen(start=configuration("ViT-B/16")).settings
    assert settings.model == ModelSettings()
    assert settings.optim.kind == "adamw"
    assert settings.optim.learning_rate == 2e-4
    assert settings.optim.layer_decay == 0.75
    assert (settings.batch_size, settings.epochs) == (32, 4.0)


def test_a_narrower_pre_trained_model_takes_larger_steps_and_a_given_rate_is_kept():
    tiny = chosen(start=configuration("ViT-Ti/16")).settings.optim
    assert (tiny.kind, tiny.learning_rate, tiny.layer_decay) == ("adamw", 8e-4, 0.75)
    said = Settings(optim=Optim(learning_rate=1e-5, layer_decay=1.0))
    said = chosen(said, start=configuration("ViT-Ti/16")).settings.optim
    assert (said.learning_rate, said.layer_decay) == (1e-5, 1.0)


def test_a_small_model_is_fine_tuned_as_it_would_be_trained():
    small = configuration("ViT-Pico/8")
    assert chosen(start=small).settings.optim.kind == "muon"
    assert chosen(start=configuration("BiT-R50x1")).settings.optim.kind == "adamw"
    frozen = Settings(optim=Optim(freeze=("encoder.*",)))  # perhaps there is no matrix to turn
    assert chosen(frozen, start=small).settings.optim.kind == "adamw"


def test_several_labels_need_a_sigmoid():
    several = replace(LOOK, multi_label=True)
    assert chosen(look=several).settings.loss.kind == "sigmoid"
    with pytest.raises(ConfigError, match="use 'sigmoid'"):
        chosen(Settings(loss=LossSettings(kind="softmax")), several)


def test_readers_are_used_where_reading_is_slow_or_the_learning_is_elsewhere():
    assert chosen().settings.machine.workers == 0
    assert chosen(look=replace(LOOK, seconds=0.01)).settings.machine.workers is None
    assert chosen(gpu=True).settings.machine.workers is None


def test_a_batch_is_never_larger_than_the_data():
    assert chosen(look=replace(LOOK, pictures=5)).settings.batch_size == 5


def test_variation_that_was_given_is_kept_and_the_rest_is_chosen():
    settings = Settings(augment=AugmentSettings(flip=False, policy="trivial"))
    augmentation, mixing = choose_variation(settings, LOOK)
    assert not augmentation.flip
    assert augmentation.policy == "trivial"
    assert augmentation.crop == "inception"
    assert (mixing.cutmix, mixing.chance, mixing.after) == (1.0, 0.5, 15)
    small, _ = choose_variation(settings, replace(LOOK, side=28))
    assert small.crop == "padded"
    _, tuned = choose_variation(Settings(), LOOK, fine_tuning=True)
    assert tuned.cutmix == 0.0
    many = replace(LOOK, side=28, pictures=60_000)
    light, none = choose_variation(Settings(), many)
    assert (light.crop, none.cutmix) == ("whole", 0.0)


def test_mixing_that_was_asked_for_begins_at_once_and_is_mixed_with_nothing_else():
    _, mixing = choose_variation(Settings(mix=MixSettings(mixup=0.2)), LOOK)
    assert mixing == Mixing(mixup=0.2)
    _, later = choose_variation(Settings(mix=MixSettings(after=5)), LOOK)
    assert later == Mixing(cutmix=1.0, chance=0.5, after=5)


def test_sizes_that_are_no_whole_patches_are_refused():
    config = configuration("ViT-Ti/16")
    with pytest.raises(ConfigError, match="40 pixels are no multiple of 16 up to 224; try 32"):
        stages_of(Settings(image_sizes=((0.0, 40),)), config)
    with pytest.raises(ConfigError, match="end with 224"):
        stages_of(Settings(image_sizes=((0.0, 32),)), config)
    with pytest.raises(ConfigError, match="for Vision Transformers only"):
        stages_of(Settings(image_sizes=((0.0, 32),)), BitConfig())


def test_a_look_at_the_data_tells_size_and_color(tmp_path):
    look = look_at(open_source(write_colors(tmp_path / "colors.npz")))
    assert (look.pictures, look.classes, look.side, look.channels) == (30, 3, 8, 3)
    gray = np.zeros((4, 9, 7), np.uint8)
    np.savez(tmp_path / "gray.npz", x_train=gray, y_train=[0, 1, 0, 1])
    assert look_at(open_source(tmp_path / "gray.npz", "all")).channels == 1
