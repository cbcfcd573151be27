import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest

from vitrail.reports import svg as charts
from vitrail.reports.svg import Series, line_chart

EVIL = "a<b>&\"'</svg><script>x</script>"


def parsed(svg: str) -> ET.Element:
    """The chart as a tree: well-formed, with finite coordinates."""
    root = ET.fromstring(svg)
    assert "nan" not in svg.lower().replace("nan, step", "")
    assert "inf" not in svg
    return root


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter("text")]


def paths(svg: str) -> list[str]:
    return [e.get("d", "") for e in parsed(svg).iter("path") if "line" in e.get("class", "")]


def test_line_ends_with_its_name_and_last_value():
    series = [Series("train", [(10, 2.0), (20, 0.5)]), Series("val", [(20, 0.75)])]
    svg = line_chart(series, label="loss")
    assert {"train 0.5", "val 0.75"} <= set(texts(svg))
    assert "loss by step: train ends at 0.5, val ends at 0.75" in parsed(svg).get("aria-label", "")
    assert "80.0 %" in texts(line_chart([Series("val", [(1, 0.8)])], label="a", percent=True))


def test_nan_is_a_gap():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, math.inf), (6, 1.0)]
    (path,) = paths(line_chart([Series("x", points)], label="x"))
    assert path.count("M") == 3
    assert path.count("L") == 1


def test_no_finite_value_is_no_chart():
    assert line_chart([], label="x") == ""
    assert line_chart([Series("x", [(1, math.nan)])], label="x") == ""
    assert line_chart([Series("x", [(1, -1.0)])], label="x", log=True) == ""


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9, 1e9])
@pytest.mark.parametrize("step", [0, 1, 123456])
def test_single_point(step, value):
    svg = line_chart([Series("x", [(step, value)])], label="x", log=value > 0)
    assert len(list(parsed(svg).iter("circle"))) == 2  # the dot, and its tooltip


def test_all_points_are_inside_the_chart():
    rng = np.random.default_rng(0)
    for scale in (1e-6, 1.0, 1e5):
        for log in (False, True):
            points = [(s, abs(float(y)) * scale) for s, y in enumerate(rng.normal(size=99), 1)]
            for path in paths(line_chart([Series("x", points, noisy=True)], label="x", log=log)):
                for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path):
                    assert 0 <= float(x) <= charts.WIDTH
                    assert 0 <= float(y) <= charts.HEIGHT - charts.BOTTOM + 0.1


def test_long_line_is_thinned_and_keeps_its_last_value():
    points = [(s, float(s % 2)) for s in range(100_000)] + [(100_000, 7.0)]
    svg = line_chart([Series("x", points)], label="x")
    assert "7" in texts(svg)
    assert len(svg) < 30_000


def test_noisy_line_is_drawn_with_its_running_mean():
    points = [(s, 5.0 + (-1) ** s) for s in range(1, 101)]
    svg = line_chart([Series("x", points, noisy=True)], label="x")
    assert len(paths(svg)) == 2
    end = texts(svg)[-1]
    assert 4.8 < float(end) < 5.2


def test_end_labels_do_not_overlap():
    series = [Series(name, [(1, value)]) for name, value in (("a", 0.5), ("b", 0.501), ("c", 0.0))]
    svg = line_chart(series, label="x")
    places = [float(e.get("y", "")) for e in parsed(svg).iter("text") if e.get("class") == "end"]
    assert all(b - a >= 13.9 for a, b in pairwise(sorted(places)))


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (0, 1, [0, 0.5, 1]),
        (0.12, 0.94, [0, 0.5, 1]),
        (0, 100, [0, 50, 100]),
        (3, 3, [0, 2, 4, 6]),
        (0, 0, [0, 0.5, 1]),
        (-2, -2, [-3, -2, -1, 0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, want):
    assert charts.ticks(low, high, 3) == pytest.approx(want)


def test_log_ticks_enclose_the_values_and_are_few():
    rng = np.random.default_rng(0)
    for low, high in np.sort(10.0 ** rng.uniform(-9, 6, (300, 2))):
        marks = charts.log_ticks(low, high)
        assert marks[0] <= low * (1 + 1e-9)
        assert marks[-1] >= high * (1 - 1e-9)
        assert 2 <= len(marks) <= 8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (0.0123456, "0.0123"), (1234.5, "1,234"), (12345, "12.3k"), (3e-5, "3e-5")),
        *((2.5e6, "2.5M"), (-0.5, "-0.5"), (999.7, "1,000"), (999_900, "1M")),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert charts.tidy(value) == text


def test_names_are_escaped():
    svg = line_chart([Series(EVIL, [(1, 1.0)]), Series("b", [(1, 1.0)])], label=EVIL)
    assert not list(parsed(svg).iter("script"))
