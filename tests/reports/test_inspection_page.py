"""The page of an inspection: content, order, limits; and the figures on it."""

import base64
import hashlib
import re
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from page_reader import Reader, read_figure, read_page, texts, tooltips
from vitrail.inspection.attention import AttentionStats
from vitrail.inspection.faithfulness import Curves, Faithfulness
from vitrail.inspection.images import Box
from vitrail.inspection.inspect import ImageInspection, Inspection
from vitrail.inspection.representations import Neighbor, Scatter
from vitrail.models.config import PositionKind
from vitrail.reports import figures, images
from vitrail.reports import inspection as module
from vitrail.reports.html import compact_number
from vitrail.reports.inspection import browser_values, inspection_page

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)


def pixels(height=48, width=64):
    return RNG.integers(0, 255, (height, width, 3), dtype=np.uint8)


def attention(layers, heads, tokens):
    return RNG.integers(0, 256, (layers, heads, tokens, tokens), dtype=np.uint8)


def image_of(name="cat.jpg", **changes):
    """A cat that is classified as a dog, with a grid of 2 x 3 patches and a class token."""
    values = RNG.random((2, 3))
    fields = {
        "pixels": pixels(),
        "box": Box(0, 8, 48, 56),
        "predictions": (("dog", 0.625), ("cat", 0.25), ("cow", 0.125)),
        "label": "cat",
        "maps": {"rollout": values, "last layer": values},
        "class_maps": {"relevance": {"dog": values, "cat": values}},
        "token_colors": RNG.random((2, 3, 3)),
        "attention": attention(2, 3, 7),
        "grid": (2, 3),
        "neighbors": (Neighbor("n.jpg", "dog", 0.875, pixels(9, 9)),),
    }
    fields |= changes
    if fields["attention"] is not None:
        fields["peaks"] = np.ones(fields["attention"].shape[:3], np.float32)
    return ImageInspection(name=name, **fields)


def curves(insertion, deletion):
    shares = np.linspace(0, 1, 5)
    areas = {"insertion_area": insertion, "deletion_area": deletion}
    return Curves(shares=shares, insertion=shares * 0.9, deletion=1 - shares, **areas)


STATS = AttentionStats(
    images=128,
    patch=(16.0, 16.0),
    distance={"patches": np.array([[10.0, 90], [60, 70]]), "all tokens": np.full((2, 2), 50.0)},
    entropy=np.array([[0.25, 0.5], [0.75, 1.0]]),
    redundancy=np.array([[[1, 0.25], [0.25, 1]], [[1, 0.5], [0.5, 1]]]),
    norms=np.array([[1.0, 2, 3, 4, 5], [2, 3, 4, 5, 40]]),
    prefix_norms=np.array([[6.0, 8.0], [7.0, 9.0]]),
    outliers=np.array([0.0, 0.03]),
)
FAITHFULNESS = Faithfulness(
    curves={
        "rollout": curves(0.5, 0.375),
        "relevance": curves(0.75, 0.25),
        "last layer": curves(0.4, 0.6),
        "random": curves(0.45, 0.5),
        "center": curves(0.475, 0.475),
    },
    sanity={"rollout": 0.875, "relevance": 0.125, "last layer": 0.3, "random": 1.0},
    images=64,
)
SCATTER = Scatter(
    points=RNG.normal(size=(30, 2)),
    labels=np.arange(30) % 3,
    classes=("cat", "dog", "cow"),
    method="t-SNE",
)
EVERYTHING = Inspection(
    prefix=("class token",),
    title="ViT-Pico/8",
    facts={"parameters": "12,345"},
    filters=RNG.normal(size=(5, 8, 8, 3)),
    filters_explained=np.full(5, 0.15),
    positions={"positions": RNG.random((2, 3, 2, 3))},
    mixing=RNG.normal(size=(4, 2, 3)),
    attention=STATS,
    images=(image_of(), image_of("plain.jpg", attention=None, token_colors=None, neighbors=())),
    faithfulness=FAITHFULNESS,
    scatter=SCATTER,
    notes=("patches are merged to `2 x 2`",),
)


def headings(text):
    return [title.replace("&amp;", "&") for title in re.findall(r"<h2>(.*?)</h2>", text)]


def visible_text(text):
    """The text of a page without scripts and their data."""
    reader = Reader(re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    return " ".join(" ".join(reader.said).split())


def test_page_is_complete_and_self_contained():
    text = inspection_page(EVERYTHING)
    reader = read_page(text)
    assert headings(text) == list(module.SECTIONS.values())
    links = [values["href"] for tag, values in reader.seen if tag == "a"]
    assert links == [f"#{v['id']}" for tag, v in reader.seen if tag == "section"]
    ids = [v["id"] for tag, v in reader.seen if "id" in v and tag not in ("path", "clippath", "g")]
    assert len(ids) == len(set(ids))
    alts = [values.get("alt") for tag, values in reader.seen if tag == "img"]
    assert all(alts)
    for alt in ("rollout in cat.jpg", "relevance for dog in cat.jpg", "relevance for cat in cat.j"):
        assert any(found.startswith(alt) for found in alts), alt
    kinds = re.findall(r'<li class="(\w+)" style="--part:.*?<span>(\w+)</span>', text)
    assert kinds[:3] == [("wrong", "dog"), ("correct", "cat"), ("other", "cow")]
    words = visible_text(text)
    for expected in (
        *("ViT-Pico/8", "12,345", "cat.jpg", "62.5 %", "Evidence for “dog” (62.5 %)"),
        *("rollout", "relevance", "figure 6", "Figure 7, center", "of the heads is 10 to 90 pix"),
        *("In layer 1, 3.0 % of the patch tokens", "75.0 % of the variance"),
        *("0.88", "t-SNE", "30 images", "2 x 2", "Probabilities are the softmax of the logits."),
    ):
        assert expected in words, expected
    assert "nan" not in words


def test_missing_results_have_no_section():
    text = inspection_page(Inspection(title="BiT-S-R50x1", facts={}))
    assert headings(text) == []
    assert "<nav" not in text
    image = image_of(maps={}, class_maps={}, token_colors=None, attention=None, neighbors=())
    filters = {"filters": EVERYTHING.filters, "filters_explained": EVERYTHING.filters_explained}
    text = inspection_page(Inspection(title="BiT", facts={}, images=(image,), **filters))
    assert headings(text) == ["Predictions and attention maps", "First-layer filters"]
    assert "62.5" in text
    assert "<script" not in text


def test_policy_allows_the_script_of_the_page_only():
    text = inspection_page(EVERYTHING)
    (policy,) = re.findall(r'Content-Security-Policy"\s+content="(.*?)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    images, styles = "img-src data:", "style-src 'unsafe-inline'"
    expected = ["default-src 'none'", images, styles, f"script-src 'sha256-{digest}'"]
    assert policy.split("; ") == expected
    assert not re.search(r"\son\w+=", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))


def test_page_size_is_limited(monkeypatch):
    assert module.MAX_ATTENTION_BYTES * 4 / 3 < 13_000_000  # of the page, in base64
    small, large = image_of("small"), image_of("large", attention=attention(2, 3, 20))
    monkeypatch.setattr(module, "MAX_ATTENTION_BYTES", small.attention.nbytes + 9)
    shown = browser_values([small, large], ["register 0"])["images"]
    assert [image["data"]["name"] for image in shown] == ["small"]
    assert shown[0]["data"]["prefixNames"] == ["register 0"]
    text = inspection_page(replace(EVERYTHING, images=(small, large)))
    assert text.count('id="attention-') == 1 + 1  # with the browser itself
    assert "1 more image would make this page too large" in visible_text(text)


def test_methods_are_compared_with_baselines():
    text = inspection_page(EVERYTHING)
    cells = r'<i class="key".*?></i>(.*?)</td>\s*<td(.*?)</td>\s*<td(.*?)</td>\s*<td>(.*?)</td>'
    rows = {name: rest for name, *rest in re.findall(cells, text)}
    assert rows.keys() == FAITHFULNESS.curves.keys()
    assert rows["relevance"] == [' class="best">0.750', ' class="best">0.250', "0.12"]
    assert rows["rollout"] == [">0.500", ">0.375", "0.88"]
    assert rows["random"][2] == "—"
    words = visible_text(text)
    assert "Best by insertion: relevance, area 0.750 (random 0.450, center 0.475)." in words
    assert "last layer is no better than random or center" in words
    assert "rollout is no better" not in words
    assert "maps of rollout hardly change with random weights (rank correlation 0.88)" in words
    assert "passed (maps change with random weights): relevance, last layer." in words


def test_text_follows_the_results():
    stats = STATS._replace(
        outliers=np.zeros(2),
        prefix_norms=np.zeros((2, 0)),
        distance={"patches": np.array([[5.0], [6.0]])},
        entropy=np.array([[0.5], [0.5]]),
        redundancy=np.ones((2, 1, 1)),
    )
    text = inspection_page(replace(EVERYTHING, attention=stats, multi_label=True))
    words = visible_text(text)
    assert "No patch token has a norm far above the median" in words
    assert "Share of outliers" not in words
    assert "Similarity to the other heads" not in words  # there is one head
    assert "of the heads is 5 pixels in layer 0" in words
    assert "each probability is the sigmoid of its logit." in words
    assert "softmax of the logits" not in words


@pytest.mark.parametrize("kind", sorted(set(get_args(PositionKind)) - {"none"}))
def test_text_follows_the_kind_of_positions(kind):
    words = visible_text(inspection_page(replace(EVERYTHING, position_kind=kind)))
    assert ("has learned the two-dimensional layout" in words) == (kind == "learned")
    assert ("nothing here was learned" in words) == (kind == "sincos-2d")
    assert ("key for each offset" in words) == (kind == "relative")


def test_head_norm_and_faithfulness_plots_have_tooltips():
    values = RNG.random((4, 3)) * 100
    root = read_figure(figures.head_plot({"a": values, "b": 0 * values}, "distance", width=540))
    assert len(tooltips(root)) == 2 * 4 * 3
    assert {"a", "b", "layer"} <= set(texts(root))
    assert f"layer 0, head 0: {compact_number(values[0, 0])}" in tooltips(root)
    holed = {"x": np.where(np.arange(3) > 0, np.nan, values)}
    assert len(tooltips(read_figure(figures.head_plot(holed, "x")))) == 4
    assert figures.head_plot({"x": np.nan * values}, "x") is None
    root = read_figure(figures.norm_plot(STATS.norms, {"class token": STATS.prefix_norms[:, 0]}))
    assert "patches 2 to 40, half of them 3 to 5, median 4; class token 7" in tooltips(root)[1]
    lines = {name: one.insertion for name, one in FAITHFULNESS.curves.items()}
    colors = {name: "soft" if name in ("random", "center") else "s0" for name in lines}
    root = read_figure(figures.faithfulness_plot(np.linspace(0, 1, 5), lines, colors, "insertion"))
    assert tooltips(root)[2].startswith("50 % of pixels: rollout 45.0 %, relevance 45.0 %")


@pytest.mark.parametrize(("classes", "count"), [(1, 0), (3, 1), (10, 50), (40, 1000)])
def test_scatter_plot_shows_every_class(classes, count):
    names, labels = tuple(f"class {n}" for n in range(classes)), np.arange(count) % classes
    found = Scatter(RNG.normal(size=(count, 2)).astype(np.float32), labels, names, "t-SNE")
    root = read_figure(figures.scatter_plot(found), themed=False)
    counts = [int(title.rpartition(": ")[2].replace(",", "")) for title in tooltips(root)]
    assert sum(counts) == len(list(root.iter("use"))) == count
    assert texts(root) == ([] if classes > 24 else list(names[: min(classes, count)]))


@pytest.mark.parametrize("side", [1, 37])
def test_head_and_position_plots_of_any_size(side):
    assert read_figure(figures.head_plot({"x": RNG.random((side, side))}, "distance"))
    table = np.eye(side * side).reshape((side,) * 4)
    root = read_figure(images.position_plot({"one": table, "two": table}, columns=2))
    assert {"one", "two", "row of the patch", "column of the patch"} <= set(texts(root))
