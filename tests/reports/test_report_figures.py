"""Figures: values, tooltips, sizes, and files readable in light and dark mode."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from vitrail.evaluation.results import Calibration, SelectiveAccuracy
from vitrail.reports import figures
from vitrail.reports.figures import confusion_matrix, inline_svg, save_figure

pytestmark = pytest.mark.slow

EVIL = "a<b>&\"'</svg><script>x</script>"
CALIBRATION = Calibration(
    edges=np.linspace(0, 1, 5),
    counts=np.array([0, 9, 100, 300]),
    confidence=np.array([math.nan, 0.4, 0.6, 0.9]),
    accuracy=np.array([math.nan, 0.5, 0.6, 0.8]),
    ece=0.0756,
    brier=0.125,
    temperature=1.7,
    ece_scaled=0.01,
)


def parsed(figure):
    """The SVG as a tree: well-formed, finite, without colors that ignore the color scheme."""
    text = str(inline_svg(figure))
    assert "nan" not in text
    assert not re.search("#[0-9a-f]{6}", re.sub(r"url\(#\w+\)", "", text))
    return ET.fromstring(text.replace("xlink:", ""))


def texts(root):
    return [element.text for element in root.iter("text")]


def tooltips(root):
    return [element.text for element in root.iter("title")]


def test_cell_shows_count_and_tooltip():
    root = parsed(confusion_matrix(np.array([[8, 2], [0, 5]]), ["cat", "dog"]))
    assert "cat predicted as dog: 2 (20 %)" in tooltips(root)
    assert "dog correct: 5 (100 %)" in tooltips(root)
    assert {"8", "2", "5", "cat", "dog", "predicted", "label"} <= set(texts(root))
    assert "0" not in texts(root)


@pytest.mark.parametrize(("classes", "named"), [(1, True), (30, True), (31, False), (100, False)])
def test_many_classes_are_drawn_without_numbers(classes, named):
    counts = np.random.default_rng(0).integers(1, 90, (classes, classes))
    figure = confusion_matrix(counts, [f"class {n}" for n in range(classes)])
    assert ("class 0" in texts(parsed(figure))) is named
    assert len(inline_svg(figure)) < 600_000


def test_very_many_classes_show_the_most_confused():
    counts = np.diag(np.full(500, 10))
    counts[123, 456] = 4
    names = [f"class {n}" for n in range(500)]
    root = parsed(confusion_matrix(counts, names))
    assert "class 123 predicted as class 456: 4 (29 %)" in tooltips(root)
    assert parsed(confusion_matrix(np.diag(np.full(500, 10)), names))


@pytest.mark.parametrize("name", [EVIL, "$x^2$", "$", "a\\b", "\udcff", "\x00\n", "猫", "#ffffff"])
def test_any_class_name_is_text(name):
    figure = confusion_matrix(np.array([[3, 1], [0, 2]]), [name, "b"])
    root = ET.fromstring(str(inline_svg(figure)))
    assert not list(root.iter("script"))
    shown = figures.printable(name)
    assert f"{shown} predicted as b: 1 (25 %)" in tooltips(root)
    assert any(text and text[:5] == shown[:5] for text in texts(root))


def test_reliability_bars_have_the_height_of_accuracy_and_gap():
    root = parsed(figures.reliability_diagram(CALIBRATION))
    bins = list(dict.fromkeys(tooltips(root)))
    assert bins[2] == "confidence 75-100 %, mean 90.0 %: accuracy 80.0 % (n=300)"
    assert len(bins) == 3  # no bar for the empty bin
    heights = {}
    for path in root.iter("path"):
        style = path.get("style", "")
        color = re.search(r"fill: var\(--(good|bad|s2|soft)\)", style)
        y = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path.get("d", ""))]
        if color and y:
            heights.setdefault(color[1], []).append(max(y) - min(y))
    assert heights["good"][2] / heights["bad"][-1] == pytest.approx(8, rel=0.01)  # 0.8 and 0.1
    assert heights["s2"] == pytest.approx([heights["bad"][-1]], rel=0.01)  # 0.4 to 0.5
    assert heights["soft"][1] / heights["soft"][2] == pytest.approx(1 / 3, rel=0.05)
    assert "7.6 %" in root.get("aria-label", "")


def test_selective_curve_marks_80_percent_coverage():
    coverage = np.arange(1, 1001) / 1000
    curve = SelectiveAccuracy(coverage=coverage, accuracy=1 - coverage**3 / 10)
    figure = figures.selective_accuracy_curve(curve, 0.9488, min_coverage=0.02)
    assert {"94.9 %", "90.0 %", "coverage", "accuracy"} <= set(texts(parsed(figure)))
    assert len(inline_svg(figure)) < 40_000


@pytest.mark.parametrize("accuracy", [[1.0, 1.0], [0.0, 0.0], [math.nan, 0.5], [0.2, 0.9]])
def test_any_selective_curve_is_drawn(accuracy):
    curve = SelectiveAccuracy(coverage=np.array([0.5, 1.0]), accuracy=np.array(accuracy))
    assert texts(parsed(figures.selective_accuracy_curve(curve, 0.5)))


@pytest.mark.parametrize("accuracy", [[], [math.nan]])
def test_empty_selective_curve_is_none(accuracy):
    curve = SelectiveAccuracy(coverage=np.ones(len(accuracy)), accuracy=np.array(accuracy))
    assert figures.selective_accuracy_curve(curve, math.nan) is None


def test_svg_and_png_come_from_the_same_figure(tmp_path):
    figure = figures.reliability_diagram(CALIBRATION)
    svg, png = save_figure(figure, tmp_path / "ece")
    text = svg.read_text(encoding="utf-8")
    ET.fromstring(text)
    assert "prefers-color-scheme:dark" in text
    assert figures.svg_body(figure) in text
    width, height = figure.get_size_inches()
    with Image.open(png) as image:
        assert image.size == (round(144 * width), round(144 * height))
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_figures_are_deterministic():
    first, second = (str(inline_svg(figures.reliability_diagram(CALIBRATION))) for _ in range(2))
    assert first == second


def test_light_colors_are_distinct():
    assert len(set(figures.LIGHT.values())) == len(figures.LIGHT)
    assert figures.LIGHT.keys() == figures.DARK.keys()


def test_matplotlib_is_imported_lazily():
    code = "import sys, vitrail.reports.evaluation, vitrail.reports.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "matplotlib" not in done.stdout.split()
