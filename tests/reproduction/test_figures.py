import math
import re
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from vitrail.reports.svg import BOLD, LETTER
from vitrail.reproduction.figures import Line, Mark, Panel, Row, chart, dots
from vitrail.reproduction.svg import DARK, LIGHT, PAPERS, Scale, short, x_ticks

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "a<b>&\"'</svg><script>x</script>"

# Table 6 of the paper: exaFLOPs, and the mean of five accuracies.
PUBLISHED = {
    "ViT": [(55, 0.925), (196, 0.943), (224, 0.941), (783, 0.951), (1567, 0.954), (4262, 0.958)],
    "ResNet": [(50, 0.893), (96, 0.917), (141, 0.924), (199, 0.920), (563, 0.940), (3306, 0.951)],
    "hybrid": [(106, 0.943), (246, 0.949), (274, 0.947), (859, 0.952), (1668, 0.954)],
}


def line(name, values, around=None, joined=True, label=""):
    marks = [
        Mark(x, y, *((None, None) if around is None else (y - around, y + around)), label)
        for x, y in values
    ]
    return Line(name, marks, joined)


def panel(*lines, title="here", log_x=True, percent=True):
    return Panel(
        title=title,
        lines=lines,
        x_label="pictures",
        y_label="accuracy",
        log_x=log_x,
        percent=percent,
    )


def seeds(names=("ViT", "BiT", "hybrid", "Mixer")):
    """Lines at the same x with the intervals of two seeds, which are wide and overlap."""
    return panel(
        *(
            line(name, [(x, 0.6 + 0.05 * i + 0.01 * n) for i, x in enumerate([1e3, 1e4, 6e4])], 0.1)
            for n, name in enumerate(names)
        )
    )


def table6(joined=True):
    lines = [line(name, values, None, joined, "L/16") for name, values in PUBLISHED.items()]
    return panel(*lines, title="published: pre-trained on 300 million pictures of JFT, 7 epochs")


def table8():
    places = ("in the stem", "in every layer", "in every layer, shared")
    return [Row("none", 0.61), *(Row(p, 0.64, 0.63, 0.66, "1-D") for p in places)]


FIGURES = {
    "table 6 beside seeds": lambda: chart([table6(), seeds()]),
    "points": lambda: chart([table6(joined=False)]),
    "seeds": lambda: chart([seeds(), seeds(("one", "two"))]),
    "four panels": lambda: chart([seeds(), seeds(), table6(), seeds()]),
    "many long names": lambda: chart([seeds([f"a line with number {n}" for n in range(12)])]),
    "long labels": lambda: chart(
        [panel(line("a", [(1, 0.5), (2, 0.6), (3, 0.55)], joined=False, label="a long label " * 3))]
        * 2
    ),
    "three columns": lambda: dots(
        {name: [Row("a", 0.640012), Row("b", 0.640291)] for name in "abc"}, label="accuracy"
    ),
    "one point": lambda: chart([panel(line("ViT", [(60_000, 0.5)]))]),
    "equal everywhere": lambda: chart([panel(line("a", [(1, 1.0), (2, 1.0)]))]),
    "no value": lambda: chart([panel(line("a", [(1, math.nan)])), panel()]),
    "some values": lambda: chart([panel(line("a", [(1, 0.5), (2, math.nan), (4, 0.6)]))]),
    "loss": lambda: chart([panel(line("a", [(0, 2.3), (9, 1.2e-5)]), log_x=False, percent=False)]),
    "rows": lambda: dots({"published (ImageNet)": table8(), "here": table8()}, label="5-shot"),
    "one row": lambda: dots({"here": [Row("none", 0.5)]}, label="accuracy"),
    "long rows": lambda: dots({"here": [Row("a long name " * 9, 2.5e4)]}, label="x", percent=False),
    "equal rows": lambda: dots({"here": [Row("a", 0.0), Row("b", 0.0)]}, label="accuracy"),
    "no rows": lambda: dots({"published": [Row("a", math.nan)], "here": []}, label="accuracy"),
}


def parsed(svg):
    """The picture as a tree: well formed, and every place in it is a number."""
    assert not re.search(r'="[^"]*\b(nan|inf)\b', svg)
    return ET.fromstring(svg)


def by_class(svg, kind):
    return [e for e in parsed(svg).iter() if kind in e.get("class", "").split()]


def texts(svg):
    return [element.text for element in parsed(svg).iter(f"{SVG}text")]


def places(svg):
    """Where marks are."""
    found = [re.findall(r"[-\d.]+", e.get("transform", "")) for e in by_class(svg, "mark")]
    return [(float(x), float(y)) for x, y in found]


def box(element):
    """About where a text is: left, top, right, bottom."""
    kind = element.get("class", "")
    letter = {"head": BOLD, "end": BOLD, "near": 5.8}.get(kind, LETTER)
    wide = letter * len(element.text)
    x, y = float(element.get("x")), float(element.get("y"))
    left = x - {"middle": wide / 2, "end": wide}.get(element.get("text-anchor"), 0)
    return left, y - 9, left + wide, y + 2


@pytest.fixture(params=FIGURES)
def figure(request):
    return FIGURES[request.param]()


def test_a_figure_is_a_file_that_needs_nothing_else(figure):
    root = parsed(figure)
    assert root.tag == f"{SVG}svg"
    assert [child.tag for child in root][:3] == [f"{SVG}title", f"{SVG}desc", f"{SVG}style"]
    assert all(child.text for child in root if child.tag in (f"{SVG}title", f"{SVG}desc"))
    assert "prefers-color-scheme: dark" in figure
    asked = figure.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"http|url\(|@import|<script|<image|href", asked)


def test_texts_are_inside_the_figure_and_do_not_touch(figure):
    root = parsed(figure)
    wide, high = float(root.get("width", 0)), float(root.get("height", 0))
    boxes = [(element.text, *box(element)) for element in root.iter(f"{SVG}text")]
    for words, left, top, right, bottom in boxes:
        assert left >= 0, words
        assert right <= wide + 2, words
        assert top >= 0, words
        assert bottom <= high, words
    for (words, *one), (others, *other) in combinations(boxes, 2):
        across = min(one[2], other[2]) - max(one[0], other[0])
        down = min(one[3], other[3]) - max(one[1], other[1])
        assert across <= 0 or down <= 0, (words, others)


def test_marks_are_inside_the_figure(figure):
    root = parsed(figure)
    wide, high = float(root.get("width", 0)), float(root.get("height", 0))
    assert all(10 < x < wide - 10 and 10 < y < high - 40 for x, y in places(figure))


@pytest.mark.parametrize(("colors", "paper"), [(LIGHT, PAPERS[0]), (DARK, PAPERS[1])])
def test_names_in_color_are_legible(colors, paper):
    def light(color):
        parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in colors:
        low, high = sorted([light(color), light(paper)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, color


def test_a_name_has_one_color_and_one_shape_in_all_panels():
    svg = chart([seeds(("ViT", "BiT")), seeds(("BiT", "Mixer", "ViT"))])
    seen = {}
    for group in parsed(svg).iter(f"{SVG}g"):
        for mark in group.iter(f"{SVG}path"):
            if mark.get("class") == "mark":
                name = mark[0].text.split(",")[0]
                seen.setdefault(name, set()).add((group.get("class"), mark.get("d")))
    assert {name: len(looks) for name, looks in seen.items()} == {"ViT": 1, "BiT": 1, "Mixer": 1}
    assert len(set.union(*seen.values())) == 3


def test_names_stand_at_the_ends_of_lines_that_end_together_and_else_above():
    ends = by_class(chart([seeds()]), "end")
    assert [e.text for e in ends] == ["ViT", "BiT", "hybrid", "Mixer"]
    assert all(float(e.get("x")) > 300 for e in ends)
    above = by_class(chart([seeds(), table6()]), "end")
    assert [e.text for e in above] == ["ViT", "BiT", "hybrid", "Mixer", "ResNet"]
    assert {e.get("y") for e in above} == {"20.0"}


def test_names_of_lines_that_end_at_one_place_are_moved_up_as_far_as_down():
    svg = chart([panel(line("a", [(1, 0.5)]), line("b", [(1, 0.5)]), line("c", [(1, 0.5)]))])
    middle = places(svg)[0][1] + 4
    heights = [float(e.get("y")) for e in by_class(svg, "end")]
    assert heights == pytest.approx([middle - 16, middle, middle + 16])


def test_only_marks_with_an_interval_have_whiskers():
    svg = chart([panel(line("a", [(1, 0.5), (2, 0.6)], 0.1), line("b", [(1, 0.5), (2, 0.6)]))])
    assert len(by_class(svg, "whisker")) == 2
    assert "1: 50.0 % (40.0 % to 60.0 %)" in svg
    assert not by_class(chart([table6()]), "whisker")


def test_an_interval_of_a_share_ends_at_100_percent():
    svg = chart([panel(Line("a", [Mark(1, 0.97, 0.7, 1.24)]))])
    assert "100 %" in texts(svg)
    assert not any(t.startswith(("110", "120")) for t in texts(svg))
    other = dots({"here": [Row("a", 97, 70, 140)]}, label="seconds", percent=False)
    assert "150" in texts(other)


def test_intervals_at_the_same_x_do_not_hide_each_other():
    def xs(around):
        lines = [line(name, [(1, 0.5), (2, 0.6)], around) for name in "abc"]
        return {x for x, _ in places(chart([panel(*lines)]))}

    assert len(xs(None)) == 2
    assert len(xs(0.1)) == 6


def test_a_higher_value_is_drawn_higher_and_a_larger_x_further_right():
    svg = chart([panel(line("a", PUBLISHED["ViT"]))])
    drawn = places(svg)
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
    by_height = sorted(range(6), key=lambda n: -drawn[n][1])
    assert by_height == sorted(range(6), key=lambda n: PUBLISHED["ViT"][n][1])


def test_equal_ratios_are_equally_far_on_a_log_scale():
    (a, _), (b, _), (c, _) = places(chart([panel(line("a", [(1, 0.5), (10, 0.5), (100, 0.5)]))]))
    assert b - a == pytest.approx(c - b, abs=0.2)


def test_points_that_are_not_joined_have_no_line():
    assert len(by_class(chart([table6()]), "line")) == 3
    assert not by_class(chart([table6(joined=False)]), "line")


def test_a_label_without_room_is_left_out_of_the_picture_but_not_of_the_words():
    marks = [Mark(1000 + n, 0.5, label=f"number {n}") for n in range(40)]
    svg = chart([panel(Line("a", marks, joined=False))])
    assert 0 < len(by_class(svg, "near")) < 40
    assert all(f"number {n} at" in svg for n in range(40))


@pytest.mark.parametrize(
    ("value", "words"),
    {
        0: "0",
        0.5: "0.5",
        64: "64",
        1000: "1k",
        1567: "1,567",
        2500: "2.5k",
        60_000: "60k",
        3e8: "300M",
        1e15: "10¹⁵",
        2.5e12: "2.5·10¹²",
        1e-4: "10⁻⁴",
    }.items(),
)
def test_numbers_below_an_axis_are_short(value, words):
    assert short(value) == words


def test_few_values_of_x_are_named_themselves_and_many_by_round_ones():
    scale = Scale(1e3, 6e4, 0, 300, log=True)
    assert x_ticks([1e3, 3e3, 1e4, 6e4], scale, 14) == [1e3, 3e3, 1e4, 6e4]
    assert x_ticks([1e3 * 1.5**n for n in range(11)], scale, 14) == [1e3, 2e3, 5e3, 1e4, 2e4, 5e4]
    close = Scale(110, 190, 0, 300, log=True)
    assert x_ticks([110 + 10 * n for n in range(9)], close, 0) == [110, 190]


def test_names_are_text_and_never_markup():
    for svg in (
        chart([panel(line(EVIL, [(1, 0.5)], label=EVIL), title=EVIL)]),
        dots({EVIL: [Row(EVIL, 0.5, group=EVIL)]}, label=EVIL),
    ):
        assert not list(parsed(svg).iter("script")) + list(parsed(svg).iter(f"{SVG}script"))


def test_a_row_has_one_height_in_all_columns_and_may_be_missing_in_one():
    here = [Row("b", 0.9), Row("a", 0.8)]
    svg = dots({"published": [Row("a", 0.1), Row("b", 0.2), Row("c", 0.3)], "here": here}, label="")
    heights = [y for _, y in places(svg)]
    assert heights[:3] == sorted(heights[:3])
    assert heights[3:] == [heights[1], heights[0]]


def test_groups_of_rows_are_set_apart_under_their_names():
    rows = [Row("x", 0.5, group="1-D"), Row("x", 0.6, group="2-D"), Row("y", 0.7, group="1-D")]
    svg = dots({"here": rows}, label="accuracy")
    assert texts(svg)[:5] == ["1-D", "x", "y", "2-D", "x"]
    (_, x1), (_, x2), (_, y1) = places(svg)
    assert x2 - y1 > 2 * (y1 - x1)


def test_each_column_of_dots_has_a_scale_of_its_own():
    svg = dots({"a": [Row("x", 0.61), Row("y", 0.64)], "b": [Row("x", 0.2)]}, label="accuracy")
    assert {"61 %", "64 %", "61.0 %", "64.0 %", "20 %"} <= set(texts(svg))
