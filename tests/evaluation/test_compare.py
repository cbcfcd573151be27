import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import vitrail
from tiny_models import awake
from tiny_runs import CLASSES, write_colors
from vitrail.cli import main
from vitrail.cli.compare import class_notes, report
from vitrail.evaluation.compare import ClassChange, compare_results, mcnemar
from vitrail.evaluation.results import Predictions
from vitrail.inspection.attention import token_offset
from vitrail.reports import pages


def result(correct, indices=None):
    """An evaluation of images of two classes, with the given ones correct."""
    labels = np.arange(len(correct)) % 2
    logits = np.eye(2, dtype=np.float32)[np.where(correct, labels, 1 - labels)]
    indices = np.arange(len(correct)) if indices is None else indices
    predictions = Predictions(classes=("a", "b"), logits=logits, labels=labels, indices=indices)
    return SimpleNamespace(predictions=predictions, calibration=SimpleNamespace(ece=0.0))


def test_mcnemar_interval_and_verdict_equal_published_values():
    assert mcnemar(0, 0) == 1
    assert mcnemar(10, 2) == pytest.approx(2 * (1 + 12 + 66) / 2**12)
    assert mcnemar(2, 10) == mcnemar(10, 2)
    # Agresti & Min 2005: prime minister's ratings, 150 and 86 of 1,600 changed
    first, second = np.ones((2, 1600), bool)
    first[:86] = second[86:236] = False
    compared = compare_results(result(first), result(second))
    value, low, high = compared.difference
    assert value == -64 / 1600
    assert (low, high) == pytest.approx((-0.0587, -0.0212), abs=2e-4)
    assert compared.verdict.startswith("B is less accurate")
    assert compare_results(result(second), result(first)).verdict.startswith("B is more accurate")
    first[:120] = False  # 86 and 116 changed
    assert compare_results(result(first), result(second)).verdict.startswith("no significant")


def test_interval_covers_the_true_difference():
    rng, covered = np.random.default_rng(0), 0
    for gained, lost, _ in rng.multinomial(500, [0.06, 0.03, 0.91], size=2000):
        first, second = np.ones((2, 500), bool)
        first[:gained] = second[gained : gained + lost] = False
        _, low, high = compare_results(result(first), result(second)).difference
        covered += low <= 0.03 <= high
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_a_planted_regression_is_found_and_noise_is_not():
    """Two points among 2,000 images with 4 % flips of noise; the level of the test is kept."""
    rng = np.random.default_rng(0)
    found = silent = 0
    for _ in range(100):
        first = rng.random(2000) < 0.9
        noise = rng.random(2000) < 0.04
        second = np.where(noise, rng.random(2000) < 0.9, first)
        worse = second & (rng.random(2000) >= 0.02 / 0.9)
        found += compare_results(result(first), result(worse)).verdict.startswith("B is less")
        silent += compare_results(result(first), result(second)).verdict.startswith("no sign")
    assert found >= 95
    assert silent >= 97


def test_only_images_that_both_can_read_are_compared():
    first, second = np.ones(10, bool), np.ones(8, bool)
    second[3] = False
    compared = compare_results(result(first), result(second, np.arange(2, 10)))
    assert compared.samples == 8
    assert compared.lost.tolist() == [5]
    assert compared.at(5) == {"label": "b", "a": "b", "b": "a"}
    assert [(c.name, c.lost) for c in compared.classes] == [("b", 1), ("a", 0)]


@pytest.mark.slow
def test_report_counts_the_classes_it_leaves_out():
    change = ClassChange("a", 9, 0, 2, 0.5)
    comparison = compare_results(result([1, 1]), result([1, 0]))
    costs = [{"milliseconds": 1.0, "bytes": 8}] * 2
    about = {"a": "A", "b": "B", "data": "images", "notes": [], "costs": costs}
    for count, last in ((10, "a"), (12, "and 2 more between them; --json or --out lists all")):
        lines = list(report(replace(comparison, classes=(change,) * count), about))
        assert lines[-1].startswith(last)
        assert sum(line.startswith("a  ") for line in lines) == 10


def test_compare_command_writes_page_and_json(tiny, tmp_path, capsys):
    data = write_colors(tmp_path / "colors.npz", test=60)
    for name, seed in (("a", 0), ("b", 1)):
        vitrail.save(awake(tiny, seed), tmp_path / name, class_names=CLASSES)
    models = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *models, str(data), "--out", str(tmp_path / "out"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["samples"] == 60
    gap = len(values["gained"]) - len(values["lost"])
    assert gap == round(60 * (values["accuracy"][1] - values["accuracy"][0]))
    assert all(cost["milliseconds"] > 0 for cost in values["costs"])
    page = (tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")
    assert "Correct by A, wrong by B" in page
    assert page.count("<img") >= 3  # the image and both attention maps
    for limit, status in (("0.1", 0), ("0.001", 1)):
        assert main(["compare", models[0], models[0], str(data), "--max-drop", limit]) == status
    assert "No significant difference (1 % level): +0.0 points" in capsys.readouterr().out


def test_classes_that_only_one_model_has_are_noted(tiny, tmp_path, capsys):
    data = write_colors(tmp_path / "colors.npz")
    larger = tiny.change(num_classes=5)
    vitrail.save(awake(tiny), tmp_path / "a", class_names=CLASSES)
    vitrail.save(awake(larger), tmp_path / "b", class_names=(*CLASSES, "gray", "pink"))
    words = [str(tmp_path / "a"), str(tmp_path / "b"), str(data)]
    assert main(["compare", *words]) == 0
    assert "note: only B has the classes 'gray', 'pink'" in capsys.readouterr().out
    assert list(class_notes(("x", "y"), ("y", "z"))) == [
        "only A has the class 'x'",
        "only B has the class 'z'",
    ]
    assert not list(class_notes(("x", "y"), ("y", "x")))
    assert not list(class_notes(("x", "y"), ()))


@pytest.mark.parametrize("stem", ["patches", "conv"])
def test_attention_map_is_moved_to_the_receptive_fields(tiny, stem, tmp_path, monkeypatch):
    offsets = []
    monkeypatch.setattr(
        pages, "overlay", lambda *args, offset=0.0: offsets.append(offset) or Image.new("L", (8, 8))
    )
    vitrail.save(awake(tiny.change(stem=stem)), tmp_path / "model", class_names=CLASSES)
    model = vitrail.load(tmp_path / "model")
    source = vitrail.open_dataset(write_colors(tmp_path / "colors.npz"), "test")
    pages.flip(1, compare_results(result([1, 1]), result([1, 0])), source, [model])
    assert offsets == [token_offset(model)]
    assert (offsets[0] > 0) == (stem == "conv")
