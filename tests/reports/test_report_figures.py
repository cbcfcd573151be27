"""Figures: values, tooltips, sizes, and files readable in light and dark mode."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from page_reader import read_figure, texts, tooltips
from vitrail.evaluation.results import Calibration, SelectiveAccuracy
from vitrail.reports import figures
from vitrail.reports.figures import confusion_matrix, inline_svg, line_chart, save_figure
from vitrail.reports.html import compact_number

pytestmark = pytest.mark.slow

EVIL = "a<b>&\"'</svg><script>x</script>"
CALIBRATION = Calibration(
    edges=np.linspace(0, 1, 5),
    counts=np.array([0, 9, 100, 300]),
    confidence=np.array([math.nan, 0.4, 0.6, 0.9]),
    accuracy=np.array([math.nan, 0.5, 0.6, 0.8]),
    **{"ece": 0.0756, "brier": 0.125, "temperature": 1.7, "ece_scaled": 0.01},
)


def test_cell_shows_count_and_tooltip():
    root = read_figure(confusion_matrix(np.array([[8, 2], [0, 5]]), ["cat", "dog"]))
    assert "cat predicted as dog: 2 (20 %)" in tooltips(root)
    assert "dog correct: 5 (100 %)" in tooltips(root)
    assert {"8", "2", "5", "cat", "dog", "predicted", "label"} <= set(texts(root))
    assert "0" not in texts(root)


@pytest.mark.parametrize(("classes", "named"), [(1, True), (30, True), (31, False), (100, False)])
def test_many_classes_are_drawn_without_numbers(classes, named):
    counts = np.random.default_rng(0).integers(1, 90, (classes, classes))
    figure = confusion_matrix(counts, [f"class {n}" for n in range(classes)])
    assert ("class 0" in texts(read_figure(figure))) is named
    assert len(inline_svg(figure)) < 600_000


def test_very_many_classes_show_the_most_confused():
    counts, names = np.diag(np.full(500, 10)), [f"class {n}" for n in range(500)]
    assert read_figure(confusion_matrix(counts, names))
    counts[123, 456] = 4
    shown = tooltips(read_figure(confusion_matrix(counts, names)))
    assert "class 123 predicted as class 456: 4 (29 %)" in shown


@pytest.mark.parametrize("name", [EVIL, "$x^2$", "$", "a\\b", "\udcff", "\x00\n", "猫", "#ffffff"])
def test_any_class_name_is_text(name):
    figure = confusion_matrix(np.array([[3, 1], [0, 2]]), [name, "b"])
    root = ET.fromstring(str(inline_svg(figure)))
    assert not list(root.iter("script"))
    shown = figures.printable(name)
    assert f"{shown} predicted as b: 1 (25 %)" in tooltips(root)
    assert any(text and text[:5] == shown[:5] for text in texts(root))
    if name in (EVIL, "$x^2$", "$"):
        root = chart({name: [(1, 1.0)], "b": [(1, 1.0)]}, label="loss")
        assert not list(root.iter("script"))
        assert f"step 1: {name} 1, b 1" in tooltips(root)


def test_reliability_diagram_has_a_bar_per_bin():
    root = read_figure(figures.reliability_diagram(CALIBRATION))
    bins = list(dict.fromkeys(tooltips(root)))
    assert bins[2] == "confidence 75-100 %, mean 90.0 %: accuracy 80.0 % (n=300)"
    assert len(bins) == 3  # no bar for the empty bin
    assert "7.6 %" in root.get("aria-label", "")


@pytest.mark.parametrize("accuracy", [None, [1.0, 1.0], [0.0, 0.0], [math.nan, 0.5], [0.2, 0.9]])
def test_selective_curve_marks_80_percent_coverage(accuracy):
    coverage = np.arange(1, 1001) / 1000 if accuracy is None else np.array([0.5, 1.0])
    values = 1 - coverage**3 / 10 if accuracy is None else np.array(accuracy)
    curve = SelectiveAccuracy(coverage=coverage, accuracy=values)
    figure = figures.selective_accuracy_curve(curve, 0.9488, min_coverage=0.02)
    assert {"94.9 %", "coverage", "accuracy"} <= set(texts(read_figure(figure)))
    assert len(inline_svg(figure)) < 40_000
    for empty in ([], [math.nan]):
        curve = SelectiveAccuracy(coverage=np.ones(len(empty)), accuracy=np.array(empty))
        assert figures.selective_accuracy_curve(curve, math.nan) is None


def test_svg_and_png_come_from_the_same_figure(tmp_path):
    assert len(set(figures.LIGHT.values())) == len(figures.LIGHT)  # colors are found by value
    assert figures.LIGHT.keys() == figures.DARK.keys()
    figure, again = (figures.reliability_diagram(CALIBRATION) for _ in range(2))
    assert str(inline_svg(figure)) == str(inline_svg(again))  # deterministic
    svg, png = save_figure(figure, tmp_path / "ece")
    text = svg.read_text(encoding="utf-8")
    ET.fromstring(text)
    assert "prefers-color-scheme:dark" in text
    assert figures.svg_body(figure) in text
    with Image.open(png) as image:
        image.verify()


def test_matplotlib_is_imported_lazily():
    code = "import sys, vitrail.reports.pages, vitrail.reports.inspection; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "matplotlib" not in done.stdout.split()


# Line charts


def chart(series, **options):
    return read_figure(line_chart(series, **{"label": "loss", **options}))


def lines(root):
    """The d of the lines: paths that are stroked in a color of a series."""
    style = re.compile(r"fill: none; stroke: var\(--s\d\)")
    return [e.get("d") for e in root.iter("path") if style.search(e.get("style", ""))]


def test_line_ends_with_its_name_and_last_value_and_has_tooltips():
    points = [(step, 1 / step) for step in range(10, 70, 10)]
    root = chart({"train": points, "val": [(20, 0.5), (60, 0.25)]})
    assert {"train 0.0167", "val 0.25"} <= set(texts(root))
    assert "train ends at 0.0167, val ends at 0.25" in root.get("aria-label", "")
    assert tooltips(root)[1] == "step 20: train 0.05, val 0.5"
    assert len(tooltips(root)) == 6
    assert "80.0 %" in texts(chart({"val": [(1, 0.8)]}, percentages=True))


def test_nan_is_a_gap():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, math.inf), (6, 1.0)]
    (path,) = lines(chart({"x": points}))
    assert path.count("M") == 3
    assert path.count("L") == 1
    assert line_chart({}, label="x") is None
    assert line_chart({"x": [(1, math.nan)]}, label="x") is None
    assert line_chart({"x": [(1, -1.0)]}, label="x", log=True) is None


@pytest.mark.parametrize(("step", "value"), [(0, 0.0), (1, -3.0), (1, 1e-9), (123456, 1e9)])
def test_single_point_is_a_dot(step, value):
    root = chart({"x": [(step, value)]}, log=value > 0)
    assert list(root.iter("use"))
    assert len(tooltips(root)) == 1


def test_long_line_is_thinned_and_keeps_its_last_value():
    points = [(s, float(s % 2)) for s in range(100_000)] + [(100_000, 7.0)]
    assert "7" in texts(chart({"x": points}))
    assert len(str(inline_svg(line_chart({"x": points}, label="x")))) < 40_000
    root = chart({"x": [(s, 5.0 + (-1) ** s) for s in range(1, 101)]}, noisy=["x"], log=True)
    assert len(lines(root)) == 2  # with its running mean, at which it ends
    assert 4.8 < float(texts(root)[-1]) < 5.2


def test_numbers_have_three_significant_digits():
    shown = {
        **{0: "0", 0.0123456: "0.0123", 1234.5: "1,234", 12345: "12.3k", 3e-5: "3e-5"},
        **{2.5e6: "2.5M", -0.5: "-0.5", 999.7: "1,000", 999_900: "1M"},
    }
    assert {value: compact_number(value) for value in shown} == shown
