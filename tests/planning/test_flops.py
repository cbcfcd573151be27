import pytest

from vitrail.models.registry import configuration
from vitrail.planning.flops import EXA, PUBLISHED_RUNS, UTILIZATION, cost_of, training_flops

pytestmark = pytest.mark.slow

JFT = 303e6  # images

# Table 6 of the paper (arXiv:2010.11929v2), without some of its ResNets and hybrids, which take
# long to build: epochs, exaFLOPs, tolerance.
TABLE6 = [
    ("ViT-B/32", 7, 55, 0.03),
    ("ViT-B/16", 7, 224, 0.03),
    ("ViT-L/32", 7, 196, 0.03),
    ("ViT-L/16", 7, 783, 0.03),
    ("ViT-L/16", 14, 1567, 0.03),
    ("ViT-H/14", 14, 4262, 0.03),
    ("BiT-R50x1", 7, 50, 0.05),  # we count products with the zeros of the padding
    ("BiT-R152x2", 7, 563, 0.05),
    ("R50+ViT-B/16", 7, 274, 0.03),
    ("R50+ViT-L/32", 7, 246, 0.03),
    ("R50+ViT-L/16", 7, 859, 0.03),  # more than half of the next row: one of them is wrong
    ("R50+ViT-L/16", 14, 1668, 0.03),
]


@pytest.mark.parametrize(("name", "epochs", "published", "tolerance"), TABLE6)
def test_pretraining_exaflops_match_table_6(name, epochs, published, tolerance):
    exaflops = training_flops(configuration(name), JFT * epochs) / EXA
    assert exaflops == pytest.approx(published, rel=tolerance)


def test_vit_flops_match_the_formula():
    tokens, width, depth, hidden = 197, 768, 12, 3072
    stem = 196 * 768 * width
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * hidden
    cost = cost_of(configuration("ViT-B/16").change(num_classes=0))
    assert cost.forward == 2 * (stem + depth * block)
    assert cost.tokens == tokens
    assert cost.training == 3 * cost.forward


def test_keys_and_values_of_the_attention_pool_are_counted():
    tokens, width, hidden = 196, 768, 3072
    config = configuration("ViT-B/16").change(num_classes=0)
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
