"""Figures 6, 7, 10 and 11: what is measured, by which rule it is judged, and what is shown."""

import json
from typing import get_args

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import write_colors
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.results import Estimate
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Sets
from vitrail.reproduction.learned import FIGURE7, FIGURE10
from vitrail.reproduction.looking import FIGURE6, FIGURE11, first_of_each
from vitrail.reproduction.report import Verdict
from vitrail.reproduction.structure import (
    Reach,
    by_areas,
    components_for,
    even_distance,
    joint,
    less_local,
    likeness,
    mean_of,
    ranks,
    structure,
)
from vitrail.reproduction.subjects import HYBRID, SHORT, VIT, reach_of, studied

SIDE = 6  # patches


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    data = write_colors(tmp_path_factory.mktemp("data") / "colors.npz")
    return Sets(pretrain=str(data), target=str(data))


def tiny_vit(seed, **changes):
    """A ViT with 4 x 4 patches of pictures of 8 x 8 pixels."""
    small = {"image_size": 8, "patch_size": 2, "num_classes": 3, "depth": 2, "width": 16}
    torch.manual_seed(seed)
    model = vitrail.create("ViT-Mu/4", **(small | changes)).eval()
    how = Preprocessing(size=(8, 8))
    model.metadata = Metadata(preprocessing=how, class_names=("red", "green", "blue"))
    return model


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What training would leave, of models that were not trained."""
    folder = tmp_path_factory.mktemp("models")
    models = {
        (VIT, 0): tiny_vit(0),
        (SHORT, 0): tiny_vit(1),
        (SHORT, 1): tiny_vit(2),
        (HYBRID, 0): tiny_vit(3, stem="resnet", patch_size=1, resnet_blocks=()),
    }
    return {key: kept(model, folder / str(n)) for n, (key, model) in enumerate(models.items())}


def kept(model, folder):
    vitrail.save(model, folder)
    about = {"accuracy": 0.5, "fewshot": 0.5, "images": 100, "judged": 12, "seconds": 1.0}
    return Result(folder=folder, config=model.config, **about)


def only(results, *names):
    return {key: result for key, result in results.items() if key[0] in names}


@pytest.fixture(scope="module")
def reports(results, sets):
    names = {FIGURE6: (VIT,), FIGURE7: (VIT,), FIGURE10: (VIT, SHORT), FIGURE11: (VIT, HYBRID)}
    return {it.name: it.report(only(results, *names[it]), sets) for it in names}


def similarity(of_steps):
    """A table (h, w, h, w) from a function of steps down and across."""
    down, across = np.indices((SIDE, SIDE))
    return of_steps(
        np.abs(down[:, :, None, None] - down), np.abs(across[:, :, None, None] - across)
    )


# --- What is measured ---


def test_similarity_that_falls_with_distance_is_near_and_has_no_lines():
    found = structure(similarity(lambda down, across: 1 - np.hypot(down, across) / 10))
    assert found.nearness == pytest.approx(1)
    assert [part.holds for part in found.parts()] == [True, False, False]
    assert abs(found.rows) + abs(found.columns) < 0.02


def test_rows_and_columns_are_told_from_distance_and_from_each_other():
    found = structure(similarity(lambda down, across: 0.5 * (down == 0) + 0.5 * (across == 0)))
    assert (found.rows, found.columns) == pytest.approx((0.5, 0.5))
    assert [part.holds for part in found.parts()] == [True, True, True]
    found = structure(similarity(lambda down, across: 0.5 * (down == 0)))
    assert (found.rows, found.columns) == pytest.approx((0.5, 0))
    assert [part.holds for part in found.parts()][1:] == [True, False]


def test_positions_at_random_have_no_structure():
    units = np.random.default_rng(1).normal(size=(SIDE * SIDE, 64))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    found = structure((units @ units.T).reshape(SIDE, SIDE, SIDE, SIDE))
    assert [part.holds for part in found.parts()] == [False, False, False]
    assert abs(found.nearness) < 0.1


def test_a_table_is_like_itself_and_unlike_its_opposite():
    table = similarity(lambda down, across: np.exp(-np.hypot(down, across)))
    assert likeness(table, 2 * table + 1) == pytest.approx(1)
    assert likeness(table, -table) == pytest.approx(-1)


def test_equal_values_share_a_rank():
    assert ranks(np.array([5.0, 1.0, 5.0, 2.0])).tolist() == [3.0, 0.5, 3.0, 1.5]


def test_a_model_whose_attention_is_even_looks_as_far_as_an_even_head():
    model = tiny_vit(0)
    for block in model.encoder.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
    reach = reach_of(model, studied(model, torch.rand(2, 3, 8, 8)))
    np.testing.assert_allclose(reach.shares, 1)


def test_an_even_head_of_two_patches_looks_half_a_step_far():
    assert even_distance((1, 2), (4, 4)) == 2


def test_components_are_counted_until_they_hold_enough():
    assert components_for(np.array([0.5, 0.25, 0.15, 0.1]), 0.9) == 3
    assert components_for(np.array([1.0]), 0.9) == 1


def test_a_mean_comes_with_where_other_pictures_would_put_it():
    values = np.random.default_rng(0).normal(0.5, 1, 400)
    found = mean_of(values)
    assert found.value == values.mean()
    assert found.high - found.low == pytest.approx(2 * 1.96 / 20, rel=0.2)
    assert mean_of(np.full(5, -0.5)) == Estimate(-0.5, -0.5, -0.5)


# --- Rules ---


@pytest.mark.parametrize(
    ("random", "center", "verdict"),
    [
        ((0.2, 0.1, 0.3), (0.1, 0.05, 0.2), "holds"),
        ((0.2, 0.1, 0.3), (0.1, -0.05, 0.2), "holds in part"),
        ((0.2, -0.1, 0.3), (0.1, 0.05, 0.2), "cannot be told"),
        ((-0.2, -0.3, -0.1), (-0.1, -0.2, 0.1), "does not hold"),
    ],
)
def test_maps_are_judged_by_the_whole_interval(random, center, verdict):
    assert by_areas(Estimate(*random), Estimate(*center)) == verdict


@pytest.mark.parametrize(
    ("vit", "hybrid", "verdict"),
    [
        (0.4, 0.7, "holds"),
        (0.7, 0.4, "does not hold"),
        (0.4, 0.44, "cannot be told"),
        (0.95, 1.05, "cannot be told"),  # there is no local attention that could be less
    ],
)
def test_a_hybrid_is_less_local_only_where_there_is_local_attention(vit, hybrid, verdict):
    assert less_local(vit, hybrid) == verdict


def test_a_claim_holds_if_all_of_its_parts_do():
    assert [joint(parts) for parts in ([True, True], [True, False], [False, False])] == [
        *("holds", "holds in part", "does not hold")
    ]


@pytest.mark.parametrize(
    ("pixels", "holds"),
    [
        ([[9.5, 3], [6, 6], [9, 9], [9, 9]], [True, True, True]),
        ([[5, 3], [6, 6], [9, 9], [9, 9]], [False, True, True]),
        ([[10, 9.5], [3, 6], [9, 9], [9, 9]], [False, True, True]),  # as before training
        ([[9.5, 6], [6, 6], [9, 9], [9, 9]], [True, False, True]),
        ([[9.5, 3], [6, 6], [9, 9], [3, 3]], [True, True, False]),
    ],
)
def test_far_heads_near_heads_and_growth_are_judged_each(pixels, holds):
    reach = Reach(pixels=np.array(pixels), even=10.0)
    assert [part.holds for part in reach.parts(before=reach)] == holds


# --- Reports ---


@pytest.mark.parametrize(
    ("name", "pictures"), {"figure6": 1, "figure7": 3, "figure10": 1, "figure11": 1}.items()
)
def test_a_report_has_pictures_numbers_and_a_verdict(name, pictures, reports):
    report = reports[name]
    assert report.verdict in get_args(Verdict)
    assert len(report.pictures) == pictures
    for picture in report.pictures:
        assert picture.content[:4] == b"\x89PNG"
        assert picture.file.startswith(name)
        assert picture.file.endswith(".png")
    assert all(len(row) == len(table.head) for table in report.tables for row in table.rows)
    assert json.dumps(report.data, allow_nan=False)


def test_pictures_of_all_classes_are_shown():
    assert first_of_each(["boot", "shirt", "boot", "bag", "shirt"]) == [0, 1, 3]


def test_a_model_that_has_no_opinion_cannot_be_explained(reports):
    report = reports["figure6"]  # of a head that is zero, as all heads begin
    assert report.data["rollout less"]["random"]["value"] == 0
    assert report.verdict == "cannot be told"


def test_a_grid_that_is_put_into_the_positions_is_found(tmp_path, sets):
    model = tiny_vit(0)
    lines = torch.eye(4).repeat_interleave(2, dim=1)  # (4, 8): a row's or a column's own
    with torch.no_grad():
        model.position.table[-16:] = torch.cat(
            [lines.repeat_interleave(4, dim=0), lines.repeat(4, 1)], dim=1
        )
    report = FIGURE7.report({(VIT, 0): kept(model, tmp_path)}, sets)
    holds = {row[0]: row[-1] for row in report.tables[0].rows}
    assert holds["so have patches of the same row"] == "yes"
    assert holds["so have patches of the same column"] == "yes"
    assert holds["filters are a low-dimensional basis"] == "no"  # they were not trained
    assert report.verdict == "holds in part"


def test_patterns_are_only_compared_between_seeds(reports):
    found = reports["figure10"].data
    patterns = {name: values["pattern"] for name, values in found.items()}
    assert patterns[f"{SHORT}, seed 1"] is None
    assert all(abs(patterns[f"{name}, seed 0"]) < 0.5 for name in (VIT, SHORT))


def test_the_models_that_are_looked_at_are_told_apart_by_name_and_seed(sets):
    assert list(FIGURE6.cells(sets)) == list(FIGURE7.cells(sets)) == [(VIT, 0)]
    assert list(FIGURE11.cells(sets)) == [(VIT, 0), (HYBRID, 0)]
    cells = FIGURE10.cells(sets)
    assert {(VIT, 0), (SHORT, 0), (SHORT, 1)} <= cells.keys()
    assert all(cell.settings.seed == seed for (_, seed), cell in cells.items())
