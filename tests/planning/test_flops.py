import pytest

from vitrail.models.registry import configuration
from vitrail.planning.flops import PUBLISHED_RUNS, UTILIZATION, cost_of

pytestmark = pytest.mark.slow


def test_flops_of_vit_and_attention_pool_match_the_formula():
    tokens, width, depth, hidden = 197, 768, 12, 3072
    stem = 196 * 768 * width
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * hidden
    cost = cost_of(configuration("ViT-B/16").change(num_classes=0))
    assert cost.forward == 2 * (stem + depth * block)
    assert cost.tokens == tokens
    assert cost.training == 3 * cost.forward
    tokens, config = 196, configuration("ViT-B/16").change(num_classes=0)
    pool = 2 * width**2 + 2 * tokens * width**2 + 2 * tokens * width + 2 * width * hidden
    added = cost_of(config.change(pool="map")).forward - cost_of(config.change(pool="mean")).forward
    assert added == 2 * pool


def test_image_size_changes_the_cost():
    config = configuration("ViT-Ti/16")
    assert cost_of(config, 384) == cost_of(config.change(image_size=384))
    assert cost_of(config, 384).tokens == 577


def test_assumed_utilization_is_between_those_of_the_paper():
    reached = [run.utilization for run in PUBLISHED_RUNS]
    assert min(reached) < UTILIZATION < max(reached)
