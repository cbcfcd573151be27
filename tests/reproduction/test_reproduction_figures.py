"""Charts: well-formed, self-contained, reproducible SVG files."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from reproduction.figures import Point, dot_chart, line_chart

pytestmark = pytest.mark.slow

EVIL = "a<b>&\"'</svg><script>x</script>"


def panel(lines, **options):
    return {"title": "here", "x_label": "images", "y_label": "accuracy", **options}, lines


def curve(half=0.0):
    return [Point(x, 0.6 + 0.05 * n, half) for n, x in enumerate((1e3, 1e4, 6e4))]


CHARTS = {
    "two panels": lambda: line_chart([panel({"ViT": curve(0.1), "BiT": curve()})] * 2),
    "points": lambda: line_chart([panel({"ViT": curve()}, joined=False, log_x=False)]),
    "many lines": lambda: line_chart([panel({f"line {n}": curve() for n in range(12)})]),
    "one point": lambda: line_chart([panel({"ViT": [Point(60_000, 0.5)]})]),
    "missing value": lambda: line_chart([panel({"a": [Point(1, 0.5), Point(2, math.nan)]})]),
    "names are text": lambda: line_chart([panel({EVIL: curve()})]),
    "dots": lambda: dot_chart({"published": {"a": Point(0, 0.6)}, "b": {"a": Point(0, 0.5, 0.1)}}),
    "missing row": lambda: dot_chart({"a": {"x": Point(0, 0.6)}, "b": {"y": Point(0, 0.5)}}),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_a_self_contained_file(name):
    content = CHARTS[name]()
    root = ET.fromstring(content)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    loaded = re.findall(r'(?:href|src)="([^"]*)"', content.decode())
    assert all(place.startswith("#") for place in loaded)
    assert CHARTS[name]() == content  # to the byte
