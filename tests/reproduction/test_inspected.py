"""Figures 6, 7, 10 and 11: measures, rules and reports."""

import json
from typing import get_args

import numpy as np
import pytest
import torch

import vitrail
from reproduction import inspected
from reproduction.inspected import HYBRID, SHORT, SIGNIFICANCE, VIT
from reproduction.jobs import Datasets, Result, grid_jobs
from reproduction.report import Verdict, json_value
from reproduction.results import Results, bootstrap_mean
from tiny_runs import write_colors
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.metrics import Estimate

SIDE = 6  # patches


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    data = write_colors(tmp_path_factory.mktemp("data") / "colors.npz")
    return Datasets(str(data), str(data))


def tiny_vit(seed, **changes):
    """A ViT with 4 x 4 patches of images of 8 x 8 pixels."""
    small = {"image_size": 8, "patch_size": 2, "num_classes": 3, "depth": 2, "width": 16}
    torch.manual_seed(seed)
    model = vitrail.create("ViT-Mu/4", **(small | changes)).eval()
    how = Preprocessing(size=(8, 8))
    model.metadata = Metadata(preprocessing=how, class_names=("red", "green", "blue"))
    return model


def saved(model, folder):
    vitrail.save(model, folder)
    about = {"accuracy": 0.5, "fewshot": 0.5, "images": 100, "test_images": 12, "seconds": 1.0}
    return Result(folder=folder, config=model.config, **about)


@pytest.fixture(scope="module")
def reports(datasets, tmp_path_factory):
    """Reports on untrained models."""
    models = {
        (VIT, 0): tiny_vit(0),
        (SHORT, 0): tiny_vit(1),
        (SHORT, 1): tiny_vit(2),
        (HYBRID, 0): tiny_vit(3, stem="resnet", patch_size=1, resnet_blocks=()),
    }
    folder, reports = tmp_path_factory.mktemp("models"), {}
    jobs = {key: saved(model, folder / str(n)) for n, (key, model) in enumerate(models.items())}
    for name in ("figure6", "figure7", "figure10", "figure11"):
        own = {key: job for key, job in jobs.items() if key in grid_jobs(name, datasets)}
        reports[name] = getattr(inspected, name)(Results(name, datasets, own))
    return reports


def structure(of_steps):
    """Return the values of nearness, rows and columns, and whether they are significant.

    `of_steps` is the similarity (h, w, h, w) as a function of steps down and across.
    """
    places = np.indices((SIDE, SIDE))
    down, across = (np.abs(index[:, :, None, None] - index) for index in places)
    values, p_values = zip(*inspected.grid_structure(of_steps(down, across)).values(), strict=True)
    return values, [p < SIGNIFICANCE for p in p_values]


def test_rows_and_columns_are_distinguished_from_distance_and_from_each_other():
    values, holds = structure(lambda down, across: 1 - np.hypot(down, across) / 10)
    assert values[0] == pytest.approx(1)
    assert holds == [True, False, False]
    assert abs(values[1]) + abs(values[2]) < 0.02
    values, holds = structure(lambda down, across: 0.5 * (down == 0) + 0.5 * (across == 0))
    assert values[1:] == pytest.approx((0.5, 0.5))
    assert holds == [True, True, True]
    values, holds = structure(lambda down, across: 0.5 * (down == 0))
    assert values[1:] == pytest.approx((0.5, 0))
    assert holds[1:] == [True, False]


def test_uniform_attention_has_the_uniform_distance():
    model = tiny_vit(0)
    for block in model.encoder.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
    _, percent, _ = inspected.distance_study(model, torch.rand(2, 3, 8, 8))
    np.testing.assert_allclose(percent, 100)


def test_bootstrap_interval_of_a_mean():
    values = np.random.default_rng(0).normal(0.5, 1, 400)
    mean = bootstrap_mean(values)
    assert mean.value == values.mean()
    assert mean.high - mean.low == pytest.approx(2 * 1.96 / 20, rel=0.2)
    assert bootstrap_mean(np.full(5, -0.5)) == Estimate(-0.5, -0.5, -0.5)


def test_verdicts_of_areas_locality_and_distances():
    for random, center, verdict in [
        ((0.2, 0.1, 0.3), (0.1, 0.05, 0.2), "holds"),
        ((0.2, 0.1, 0.3), (0.1, -0.05, 0.2), "holds in part"),
        ((0.2, -0.1, 0.3), (0.1, 0.05, 0.2), "inconclusive"),
        ((-0.2, -0.3, -0.1), (-0.1, -0.2, 0.1), "does not hold"),
    ]:
        assert inspected.verdict_of_areas(Estimate(*random), Estimate(*center)) == verdict
    for vit, hybrid, verdict in [
        (40, 70, "holds"),
        (70, 40, "does not hold"),
        (40, 44, "inconclusive"),
        (95, 105, "inconclusive"),  # neither has local attention
    ]:
        assert inspected.verdict_of_locality(vit, hybrid) == verdict
    for pixels, holds in [  # global heads, local heads, growth
        ([[9.5, 3], [6, 6], [9, 9], [9, 9]], [True, True, True]),
        ([[5, 3], [6, 6], [9, 9], [9, 9]], [False, True, True]),
        ([[10, 9.5], [3, 6], [9, 9], [9, 9]], [False, True, True]),  # as at initialization
        ([[9.5, 6], [6, 6], [9, 9], [9, 9]], [True, False, True]),
        ([[9.5, 3], [6, 6], [9, 9], [3, 3]], [True, True, False]),
    ]:
        assert list(inspected.distance_parts(10 * np.array(pixels)).values()) == holds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figures"), {"figure6": 1, "figure7": 3, "figure10": 1, "figure11": 1}.items()
)
def test_a_report_has_figures_numbers_and_a_verdict(name, figures, reports):
    report = reports[name]
    assert report.verdict in get_args(Verdict)
    assert len(report.figures) == figures
    assert all(figure.content[:4] == b"\x89PNG" for figure in report.figures)
    assert all(figure.file.startswith(name) and figure.caption for figure in report.figures)
    assert all(len(row) == len(table.head) for table in report.tables for row in table.rows)
    assert json.dumps(json_value(report.data), allow_nan=False)


@pytest.mark.slow
def test_constant_predictions_cannot_be_explained(reports):
    report = reports["figure6"]  # of a head that is zero
    assert report.data["leads"][0].value == 0
    assert report.verdict == "inconclusive"


@pytest.mark.slow
def test_a_grid_in_the_position_embeddings_is_detected(tmp_path, datasets):
    model = tiny_vit(0)
    lines = torch.eye(4).repeat_interleave(2, dim=1)  # (4, 8): one-hot of a row or column
    with torch.no_grad():
        model.position.table[-16:] = torch.cat(
            [lines.repeat_interleave(4, dim=0), lines.repeat(4, 1)], dim=1
        )
    report = inspected.figure7(Results("figure7", datasets, {(VIT, 0): saved(model, tmp_path)}))
    holds = {row[0]: row[-1] for row in report.tables[0].rows}
    assert holds["so do patches in the same row"] == "yes"
    assert holds["so do patches in the same column"] == "yes"
    assert holds["filters form a low-dimensional basis"] == "no"  # untrained
    assert report.verdict == "holds in part"
