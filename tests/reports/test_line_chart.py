import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest

from vitrail.reports.figures import inline_svg, line_chart
from vitrail.reports.html import compact_number

EVIL = "a<b>&\"'</svg><script>x</script>"


def parsed(series, **options):
    """The chart as a tree: well-formed, with finite coordinates."""
    svg = str(inline_svg(line_chart(series, **{"label": "loss", **options})))
    assert "nan" not in svg.lower()
    assert not re.search(r"\binf\b", svg)
    return ET.fromstring(svg.replace("xlink:", ""))


def texts(root):
    return [element.text or "" for element in root.iter("text")]


def tooltips(root):
    return [element.text for element in root.iter("title")]


def lines(root):
    """The d of the lines: paths that are stroked in a color of a series."""
    style = re.compile(r"fill: none; stroke: var\(--s\d\)")
    return [e.get("d") for e in root.iter("path") if style.search(e.get("style", ""))]


def test_line_ends_with_its_name_and_last_value():
    root = parsed({"train": [(10, 2.0), (20, 0.5)], "val": [(20, 0.75)]})
    assert {"train 0.5", "val 0.75"} <= set(texts(root))
    assert "loss by step: train ends at 0.5, val ends at 0.75" in root.get("aria-label", "")
    assert "80.0 %" in texts(parsed({"val": [(1, 0.8)]}, percentages=True))


def test_tooltips_have_all_values_of_a_step():
    points = [(step, 1 / step) for step in range(10, 70, 10)]
    root = parsed({"train": points, "val": [(20, 0.5), (60, 0.25)]})
    assert tooltips(root)[1] == "step 20: train 0.05, val 0.5"
    assert len(tooltips(root)) == 6


def test_nan_is_a_gap():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, math.inf), (6, 1.0)]
    (path,) = lines(parsed({"x": points}))
    assert path.count("M") == 3
    assert path.count("L") == 1


def test_no_finite_value_is_no_chart():
    assert line_chart({}, label="x") is None
    assert line_chart({"x": [(1, math.nan)]}, label="x") is None
    assert line_chart({"x": [(1, -1.0)]}, label="x", log=True) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9, 1e9])
@pytest.mark.parametrize("step", [0, 1, 123456])
def test_single_point_is_a_dot(step, value):
    root = parsed({"x": [(step, value)]}, log=value > 0)
    assert list(root.iter("use"))
    assert len(tooltips(root)) == 1


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_all_points_are_inside_the_chart(scale, log):
    values = np.abs(np.random.default_rng(0).normal(size=99)) * scale
    root = parsed({"x": list(enumerate(values.tolist(), 1))}, noisy=["x"], log=log)
    assert len(lines(root)) == 2  # with its running mean
    for path in lines(root):
        for x, y in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path):
            assert 0 <= float(x) <= 360
            assert 0 <= float(y) <= 176.1


def test_long_line_is_thinned_and_keeps_its_last_value():
    points = [(s, float(s % 2)) for s in range(100_000)] + [(100_000, 7.0)]
    figure = line_chart({"x": points}, label="x")
    assert "7" in texts(parsed({"x": points}))
    assert len(str(inline_svg(figure))) < 40_000


def test_noisy_line_ends_with_its_running_mean():
    root = parsed({"x": [(s, 5.0 + (-1) ** s) for s in range(1, 101)]}, noisy=["x"])
    assert len(lines(root)) == 2
    assert 4.8 < float(texts(root)[-1]) < 5.2


def test_end_labels_do_not_overlap():
    root = parsed({"a": [(1, 0.5)], "b": [(1, 0.501)], "c": [(1, 0.0)]})
    bold = [e for e in root.iter("text") if "font-weight: 700" in e.get("style", "")]
    places = [float(e.get("y")) for e in bold]
    assert len(places) == 3
    assert all(b - a >= 13.9 for a, b in pairwise(sorted(places)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (0.0123456, "0.0123"), (1234.5, "1,234"), (12345, "12.3k"), (3e-5, "3e-5")),
        *((2.5e6, "2.5M"), (-0.5, "-0.5"), (999.7, "1,000"), (999_900, "1M")),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert compact_number(value) == text


@pytest.mark.parametrize("name", [EVIL, "$x^2$", "$"])
def test_names_are_text(name):
    root = parsed({name: [(1, 1.0)], "b": [(1, 1.0)]}, label=name)
    assert not list(root.iter("script"))
    assert any(text.startswith(name[:10]) and text.endswith(" 1") for text in texts(root))
    assert f"step 1: {name} 1, b 1" in tooltips(root)
