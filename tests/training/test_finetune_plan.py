"""How much of a model is fine-tuned in a given time, and at which image size."""

from dataclasses import replace

import pytest

from vitrail.models.registry import configuration
from vitrail.training.choices import Look, choose
from vitrail.training.finetune_plan import (
    ENOUGH_EPOCHS,
    Budget,
    frozen_patterns,
    plan_finetuning,
    work,
)
from vitrail.training.settings import ModelSettings, Optim, Settings

TINY = configuration("ViT-Ti/16")
# DeiT-Ti on two cores: 60 images a second at 224 pixels, 2,641 + 293 flowers, 736 to evaluate on.
FLOWERS = Budget(seconds=300, forward=1 / 60, read=1e-3, train=2641, evaluated=293 + 736)
LOOK = Look(pictures=2934, classes=5, side=160, seconds=1e-3, channels=3, multi_label=False)


def plan(minutes: float, config=TINY, **changes):
    return plan_finetuning(config, replace(FLOWERS, seconds=60 * minutes, **changes))


def test_a_longer_budget_never_gives_a_smaller_image_or_fewer_trained_blocks():
    plans = [plan(minutes) for minutes in (0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 600)]
    sizes = [p.image_size for p in plans]
    frozen = [p.frozen_blocks for p in plans]
    assert sizes == sorted(sizes)
    assert frozen == sorted(frozen, reverse=True)


def test_a_generous_budget_arrives_at_the_papers_full_fine_tuning():
    for one in (plan(600), plan(5, forward=1e-4, read=1e-5)):  # ten hours, or a GPU
        assert one.name == "full"
        assert one.image_size == 224
        assert not one.image_sizes
        assert not one.frozen_blocks


def test_the_largest_image_size_with_enough_epochs_is_taken():
    one = plan(2.5)
    assert one.name == "small"
    assert one.epochs >= ENOUGH_EPOCHS
    assert 128 < one.image_size < 224


def test_most_of_a_run_is_at_three_quarters_of_the_size_it_ends_at():
    assert plan(10).image_sizes == ((0.0, 160), (0.9, 224))
    assert plan(1).image_sizes == ((0.0, 96), (0.9, 128))


def test_a_short_budget_trains_the_last_blocks_at_the_smallest_size():
    one = plan(0.5)
    assert one.name == "last"
    assert one.frozen_blocks == 8
    assert one.image_size == 128


@pytest.mark.parametrize("minutes", [0.4, 1, 3, 10, 60])
@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-B/32", "ViT-L/14"])
def test_every_size_is_a_whole_number_of_patches_and_none_is_larger_than_the_checkpoints(
    name, minutes
):
    config = configuration(name)
    one = plan(minutes, config)
    for size in (one.image_size, *(size for _, size in one.image_sizes)):
        assert size % config.stride[0] == 0
        assert size <= one.image_size <= config.image_size


def test_work_counts_what_a_block_multiplies():
    tokens, width = 197, 192
    per_block = tokens * (3 * width**2 + width**2 + 2 * width * 768) + 2 * tokens**2 * width
    assert work(TINY, 224) * width == per_block


def test_only_weights_that_exist_are_frozen():
    names = ["stem.projection.weight", "cls_token", "encoder.blocks.0.norm1.weight", "head.weight"]
    assert frozen_patterns(1, names) == ("stem.*", "cls_token", "encoder.blocks.0.*")
    assert frozen_patterns(0, names) == ()


def chosen(settings: Settings, **how):
    return choose(settings, LOOK, gpu=False, start=TINY, **how).settings


def test_a_new_head_starts_as_a_probe_unless_an_optimizer_or_recipe_was_chosen():
    assert chosen(Settings()).head_init == "probe"
    assert chosen(Settings(), new_head=False).head_init == "zeros"
    assert chosen(Settings(optim=Optim(kind="sgd"))).head_init == "zeros"
    assert chosen(Settings(optim=Optim(kind="sgd"), head_init="probe")).head_init == "probe"
    several = replace(LOOK, multi_label=True)
    assert choose(Settings(), several, gpu=False, start=TINY).settings.head_init == "zeros"


def test_a_given_image_size_or_frozen_weights_are_not_planned_over():
    budget = replace(FLOWERS, seconds=30, weights=("stem.w", "encoder.blocks.0.w", "head.w"))
    planned = chosen(Settings(minutes=0.5), budget=budget)
    assert planned.model.image_size == 128
    assert planned.optim.freeze
    sized = chosen(Settings(minutes=0.5, model=ModelSettings(image_size=224)), budget=budget)
    assert sized.model.image_size == 224
    assert not sized.optim.freeze
    frozen = chosen(Settings(minutes=0.5, optim=Optim(freeze=("stem.*",))), budget=budget)
    assert frozen.model.image_size is None
    assert frozen.optim.freeze == ("stem.*",)


def test_the_probe_of_a_large_set_leaves_time_for_evaluation_and_training():
    cifar = Budget(seconds=60, forward=1 / 60, read=1e-4, train=7200, evaluated=2800)
    one = plan_finetuning(TINY, cifar)
    per_image = cifar.forward * work(TINY, one.image_size) / work(TINY, 224) + cifar.read
    evaluation = cifar.evaluated * per_image
    assert one.probe_images < cifar.train
    assert one.probe_images * per_image <= 0.5 * (cifar.seconds - evaluation)
    assert one.epochs > 0
    assert plan_finetuning(TINY, replace(cifar, seconds=600)).probe_images == cifar.train
    assert plan_finetuning(TINY, replace(cifar, seconds=1)).probe_images == 500


def test_the_probe_is_fitted_to_as_many_images_as_the_budget_allows():
    choices = choose(Settings(), LOOK, gpu=False, start=TINY, budget=replace(FLOWERS, seconds=12))
    assert choices.probe_images == 500
    assert any("linear probe of 500 of 2,641 training images" in r for r in choices.reasons)
    assert choose(Settings(), LOOK, gpu=False, start=TINY, budget=FLOWERS).probe_images is None
