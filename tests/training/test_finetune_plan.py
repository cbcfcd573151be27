"""Planning of fine-tuning within a time budget."""

from dataclasses import replace

import pytest

from vitrail.models.registry import configuration
from vitrail.training.auto_config import (
    ENOUGH_EPOCHS,
    DatasetStats,
    FinetuneBudget,
    complete_settings,
    encoder_cost,
    frozen_patterns,
    plan_finetuning,
)
from vitrail.training.config import ModelSettings, OptimSettings, Settings

TINY = configuration("ViT-Ti/16")
# DeiT-Ti on two cores: 60 images a second at 224 pixels, 2,641 + 293 flowers, 736 to evaluate on.
FLOWERS = FinetuneBudget(seconds=300, forward=1 / 60, read=1e-3, train=2641, evaluated=293 + 736)
STATS = DatasetStats(images=2934, classes=5, side=160, seconds=1e-3, channels=3, multi_label=False)


def plan(minutes: float, config=TINY, **changes):
    return plan_finetuning(config, replace(FLOWERS, seconds=60 * minutes, **changes))


def test_plan_is_monotonic_in_the_budget():
    plans = [plan(minutes) for minutes in (0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 600)]
    sizes = [p.image_size for p in plans]
    frozen = [p.frozen_blocks for p in plans]
    assert sizes == sorted(sizes)
    assert frozen == sorted(frozen, reverse=True)


def test_large_budget_plans_full_finetuning():
    for one in (plan(600), plan(5, forward=1e-4, read=1e-5)):  # ten hours, or a GPU
        assert one.name == "full"
        assert one.image_size == 224
        assert not one.image_sizes
        assert not one.frozen_blocks


def test_largest_affordable_image_size_is_used():
    one = plan(2.5)
    assert one.name == "small"
    assert one.epochs >= ENOUGH_EPOCHS
    assert 128 < one.image_size < 224


def test_training_size_is_three_quarters():
    assert plan(10).image_sizes == ((0.0, 160), (0.9, 224))
    assert plan(1).image_sizes == ((0.0, 96), (0.9, 128))


def test_short_budget_trains_the_last_blocks():
    one = plan(0.5)
    assert one.name == "last"
    assert one.frozen_blocks == 8
    assert one.image_size == 128


@pytest.mark.parametrize("minutes", [0.4, 1, 3, 10, 60])
@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-B/32", "ViT-L/14"])
def test_planned_sizes_are_valid(name, minutes):
    config = configuration(name)
    one = plan(minutes, config)
    for size in (one.image_size, *(size for _, size in one.image_sizes)):
        assert size % config.stride[0] == 0
        assert size <= one.image_size <= config.image_size


def test_encoder_cost_matches_multiply_adds():
    tokens, width = 197, 192
    per_block = tokens * (3 * width**2 + width**2 + 2 * width * 768) + 2 * tokens**2 * width
    assert encoder_cost(TINY, 224) * width == per_block


def test_frozen_patterns_match_existing_weights():
    names = ["stem.projection.weight", "cls_token", "encoder.blocks.0.norm1.weight", "head.weight"]
    assert frozen_patterns(1, names) == ("stem.*", "cls_token", "encoder.blocks.0.*")
    assert frozen_patterns(0, names) == ()


def chosen(settings: Settings, **options):
    return complete_settings(settings, STATS, gpu=False, start=TINY, **options).settings


def test_probe_init_is_the_default_for_new_heads():
    assert chosen(Settings()).head_init == "probe"
    assert chosen(Settings(), new_head=False).head_init == "zeros"
    assert chosen(Settings(optim=OptimSettings(kind="sgd"))).head_init == "zeros"
    assert chosen(Settings(optim=OptimSettings(kind="sgd"), head_init="probe")).head_init == "probe"
    several = replace(STATS, multi_label=True)
    assert (
        complete_settings(Settings(), several, gpu=False, start=TINY).settings.head_init == "zeros"
    )


def test_explicit_settings_disable_planning():
    budget = replace(FLOWERS, seconds=30, weights=("stem.w", "encoder.blocks.0.w", "head.w"))
    planned = chosen(Settings(minutes=0.5), budget=budget)
    assert planned.model.image_size == 128
    assert planned.optim.freeze
    sized = chosen(Settings(minutes=0.5, model=ModelSettings(image_size=224)), budget=budget)
    assert sized.model.image_size == 224
    assert not sized.optim.freeze
    frozen = chosen(Settings(minutes=0.5, optim=OptimSettings(freeze=("stem.*",))), budget=budget)
    assert frozen.model.image_size is None
    assert frozen.optim.freeze == ("stem.*",)


def test_probe_leaves_time_for_evaluation_and_training():
    cifar = FinetuneBudget(seconds=60, forward=1 / 60, read=1e-4, train=7200, evaluated=2800)
    one = plan_finetuning(TINY, cifar)
    per_image = (
        cifar.forward * encoder_cost(TINY, one.image_size) / encoder_cost(TINY, 224) + cifar.read
    )
    evaluation = cifar.evaluated * per_image
    assert one.probe_images < cifar.train
    assert one.probe_images * per_image <= 0.5 * (cifar.seconds - evaluation)
    assert one.epochs > 0
    assert plan_finetuning(TINY, replace(cifar, seconds=600)).probe_images == cifar.train
    assert plan_finetuning(TINY, replace(cifar, seconds=1)).probe_images == 500


def test_probe_images_are_limited_by_the_budget():
    choices = complete_settings(
        Settings(), STATS, gpu=False, start=TINY, budget=replace(FLOWERS, seconds=12)
    )
    assert choices.probe_images == 500
    assert any("linear probe of 500 of 2,641 training images" in r for r in choices.reasons)
    assert (
        complete_settings(Settings(), STATS, gpu=False, start=TINY, budget=FLOWERS).probe_images
        is None
    )
