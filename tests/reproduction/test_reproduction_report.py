"""Reports as Markdown and JSON."""

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from reproduction import report as module
from reproduction.figures import Point, dot_chart, line_chart
from reproduction.report import TEXT, Figure, Report, Table, anchor, markdown, section, write
from vitrail.errors import DataError

LONG = "Filters look like a plausible basis for the fine structure within each patch"
REPORT = Report(
    name="table8",
    title="Any position beats none, and which one hardly matters (5-shot)",
    claim="Without positions 61.4 %, with any 64.0 to 64.3 % (published).",
    method="Each was trained five times; the claim holds if intervals do not overlap.",
    result="None reaches 58.9 %, the others 68.2 to 72.0 %.",
    command="vitrail reproduce table8 --data fashion_mnist.npz",
    verdict="holds in part",
    tables=(
        Table(
            caption="5-shot accuracy",
            head=("position", "where", "published", "here"),
            rows=(
                ("none", "—", "61.4 %", "58.9 ± 0.4 %"),
                ("1-D", "stem | default", "64.2 %", "70.6 ± 1.2 %"),
                ("relative", "layers", "—", "9.5 %"),
            ),
        ),
        Table(
            caption="Part by part", head=("says", "here", "rule"), rows=((LONG, LONG, LONG),) * 2
        ),
    ),
    figures=(
        Figure("table8.svg", "Five seeds [95 %]", "<svg>ß</svg>\n".encode()),
        Figure("table8.png", "the same\nas pixels", b"\x89PNG\r\n"),
    ),
    data={"none": [0.589], "seeds": 5},
)
OTHER = replace(REPORT, name="table1", title="Sizes", verdict="checked", tables=(), figures=())


def test_the_summary_links_to_every_section_and_counts_verdicts():
    page = markdown([section(one) for one in (OTHER, REPORT, replace(OTHER, name="table2"))])
    links = re.findall(r"\| \[(\w+)\]\(#([\w-]+)\) \|", page)
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert [name for name, _ in links] == ["table1", "table8", "table2"]
    assert [place for _, place in links] == [anchor(words) for words in headings[1:]]
    assert "Verdicts: holds in part 1, checked 2." in page
    assert anchor("figure5: `ViT`, 1-D & 2-D?") == "figure5-vit-1-d--2-d"  # as GitHub's


def test_a_section_contains_its_report():
    page = markdown([section(REPORT, "figures/")])
    assert page.startswith(TEXT["introduction"].strip())
    assert tuple(TEXT["verdicts"]) == get_args(module.Verdict)
    assert all(f"- **{verdict}**: " in page for verdict in TEXT["verdicts"])
    for part in (REPORT.claim, REPORT.method, REPORT.result, "**Verdict: holds in part.**"):
        assert part in page
    assert "$ vitrail reproduce table8 --data fashion_mnist.npz\n" in page
    assert r"![Five seeds \[95 %\]](figures/table8.svg)" in page
    assert "![the same as pixels](figures/table8.png)" in page
    assert "*Part by part*" in page
    assert "*Part by part*" not in section(replace(REPORT, published=True))


def test_the_summary_in_the_docs_has_the_verdicts_of_the_report():
    root = Path(__file__).parents[2]
    summary, report = (
        re.findall(r"^\| \[(\w+)\][^|]*\| ([^|]*) \| ([^|]*) \|$", page.read_text(), re.M)
        for page in (root / "docs" / "reproduction.md", root / "reproduction" / "README.md")
    )
    assert len(report) == 16
    assert summary == report


def test_cells_cannot_break_the_table():
    rows = [line for line in section(REPORT).splitlines() if line.startswith("| ")]
    about = [line for line in rows if line.startswith(("| position", "| none", "| 1-D", "| rel"))]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in about} == {5}
    assert r"stem \| default" in section(REPORT)
    assert "| --- | --- | ---: | ---: |" in section(REPORT)  # numbers are right-aligned
    broken = Table(caption="c", head=("a", "b"), rows=(("one\ntwo", "x"),))
    assert "| one two | x |" in section(replace(REPORT, tables=(broken,)))


def test_a_page_keeps_the_sections_of_other_experiments(tmp_path):
    page = module.write_docs([OTHER, REPORT], tmp_path)
    before = page.read_text(encoding="utf-8")
    assert (tmp_path / "figures" / "table8.svg").exists()
    changed = replace(OTHER, verdict="holds", result="## No heading: a text.")
    text = module.write_docs([changed], tmp_path).read_text(encoding="utf-8")
    assert "Verdicts: holds 1, holds in part 1." in text
    assert section(REPORT, "figures/") in text
    assert text.index("## table1") < text.index("## table8")
    assert module.write_docs([OTHER], tmp_path).read_text(encoding="utf-8") == before


def test_a_report_is_written_with_its_figures_or_not_at_all(tmp_path):
    write(REPORT, tmp_path / "report")
    names = sorted(file.name for file in (tmp_path / "report").iterdir())
    assert names == ["report.json", "report.md", "table8.png", "table8.svg"]
    assert "](table8.svg)" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    (tmp_path / "other" / "table8.png").mkdir(parents=True)  # no file can have this name now
    with pytest.raises(DataError, match=r"cannot write .*table8\.png"):
        write(REPORT, tmp_path / "other")
    assert not list((tmp_path / "other").glob("report.*"))


def test_data_is_valid_json(tmp_path):
    data = {"a": np.float32(0.5), "b": np.arange(2), ("x", 1): (1, np.int64(2)), "nan": np.nan}
    write(replace(REPORT, data=data), tmp_path)
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    read_back = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read_back["data"] == {"a": 0.5, "b": [0, 1], "x, 1": [1, 2], "nan": None}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_a_self_contained_file(name):
    content = CHARTS[name]()
    root = ET.fromstring(content)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    loaded = re.findall(r'(?:href|src)="([^"]*)"', content.decode())
    assert all(place.startswith("#") for place in loaded)
    assert CHARTS[name]() == content  # to the byte
