import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest

from page_reader import Reader
from vitrail.inspection import page as module
from vitrail.inspection.browser import MOST_BYTES, browsable
from vitrail.inspection.findings import (
    Box,
    Curves,
    Filters,
    Inspection,
    Look,
    Neighbor,
    PositionTiles,
    Scatter,
    Study,
    Trust,
)
from vitrail.inspection.page import write_inspection
from vitrail.inspection.plots import by_layer, fading, lengths, map_of_set
from vitrail.models.config import PositionKind

EVIL = "</script><script>alert(1)</script>\"'&"
RNG = np.random.default_rng(0)


def pixels(height=48, width=64):
    return RNG.integers(0, 255, (height, width, 3), dtype=np.uint8)


def attention(layers, heads, tokens):
    return RNG.integers(0, 256, (layers, heads, tokens, tokens), dtype=np.uint8)


def a_look(name="cat.jpg", **more):
    """A picture of a cat that is taken for a dog, with a grid of 2 x 3 and a class token."""
    values = RNG.random((2, 3))
    given = {
        "pixels": pixels(),
        "box": Box(0, 8, 48, 56),
        "classes": (("dog", 0.625), ("cat", 0.25), ("cow", 0.125)),
        "label": "cat",
        "maps": {"rollout": values, "last layer": values},
        "class_maps": {"relevance": {"dog": values, "cat": values}},
        "colors": RNG.random((2, 3, 3)),
        "attention": attention(2, 3, 7),
        "grid": (2, 3),
        "neighbors": (Neighbor(name="n.jpg", label="dog", similarity=0.875, pixels=pixels(9, 9)),),
    }
    given |= more
    if given["attention"] is not None:
        given["peaks"] = np.ones(given["attention"].shape[:3], np.float32)
    return Look(name=name, **given)


def curves(insertion, deletion):
    shares = np.linspace(0, 1, 5)
    return Curves(
        shares=shares,
        insertion=shares * 0.9,
        deletion=1 - shares,
        insertion_area=insertion,
        deletion_area=deletion,
    )


STUDY = Study(
    images=128,
    patch=(16.0, 16.0),
    distance={"patches": np.array([[10.0, 90], [60, 70]]), "all tokens": np.full((2, 2), 50.0)},
    entropy=np.array([[0.25, 0.5], [0.75, 1.0]]),
    redundancy=np.array([[[1, 0.25], [0.25, 1]], [[1, 0.5], [0.5, 1]]]),
    norms=np.array([[1.0, 2, 3, 4, 5], [2, 3, 4, 5, 40]]),
    prefix_norms=np.array([[6.0, 8.0], [7.0, 9.0]]),
    outliers=np.array([0.0, 0.03]),
)
TRUST = Trust(
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


@pytest.fixture
def everything():
    return Inspection(
        prefix=("class token",),
        title="ViT-Pico/8",
        facts={"parameters": "12,345"},
        filters=Filters(components=RNG.normal(size=(5, 8, 8, 3)), explained=np.full(5, 0.15)),
        positions=(PositionTiles(title="positions", similarity=RNG.random((2, 3, 2, 3))),),
        mixing=RNG.normal(size=(4, 2, 3)),
        study=STUDY,
        looks=(a_look(), a_look("plain.jpg", attention=None, colors=None, neighbors=())),
        trust=TRUST,
        scatter=SCATTER,
        notes=("patches were put together in `2 x 2`",),
    )


def written(inspection, tmp_path):
    path = tmp_path / "report.html"
    write_inspection(path, inspection)
    return path.read_text(encoding="utf-8")


def headings(text):
    return [title.replace("&amp;", "&") for title in re.findall(r"<h2>(.*?)</h2>", text)]


def words_of(text):
    """What a person reads: without scripts and their data."""
    reader = Reader(re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    return " ".join(" ".join(reader.said).split())


def test_the_page_tells_everything_and_asks_nothing_of_the_network(everything, tmp_path):
    text = written(everything, tmp_path)
    reader = Reader(text)
    assert all(value.startswith(("data:image/", "#")) for value in reader.asked)
    for outside in ("http://", "https://", "url(", "@import", "<link"):
        assert outside not in text, outside
    words = words_of(text)
    for expected in (
        *("ViT-Pico/8", "12,345", "cat.jpg", "62.5 %", "What speaks for “dog” (62.5 %)"),
        *("rollout", "relevance", "figure 6", "Figure 7, left", "Figure 7, center", "figure 10"),
        *("Figure 7, right", "figure 11", "In layer 0 heads look 10 to 90 pixels far"),
        *("In layer 1, 3.0 % of the patch tokens", "Darcet et al. 2024", "75.0 % of the variance"),
        *("0.88", "t-SNE", "30 pictures", "2 x 2"),
    ):
        assert expected in words, expected
    assert "nan" not in words


def test_sections_come_in_the_order_in_which_they_are_asked_for(everything, tmp_path):
    text = written(everything, tmp_path)
    assert headings(text) == [
        "What it says and where it looks",
        "Ask a patch where it looks",
        "How far it looks",
        "How sharply heads look, and how alike",
        "How long tokens are",
        "What the first layer looks for",
        "How it knows where a patch is",
        "How it mixes patches",
        "Patch tokens as colors",
        "What it finds alike",
        "The data set as a map",
        "Are these explanations true?",
        "Notes",
    ]
    levels = [int(tag[1]) for tag, _ in Reader(text).seen if re.fullmatch("h[1-4]", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_links_lead_to_every_section(everything, tmp_path):
    reader = Reader(written(everything, tmp_path))
    links = [values["href"] for tag, values in reader.seen if tag == "a"]
    names = [values["id"] for tag, values in reader.seen if tag == "section"]
    assert links == [f"#{name}" for name in names]
    ids = [values["id"] for _, values in reader.seen if "id" in values]
    assert len(ids) == len(set(ids))


def test_what_was_not_found_has_no_section(tmp_path):
    text = written(Inspection(title="BiT-S-R50x1", facts={}), tmp_path)
    assert headings(text) == []
    assert "<script" not in text
    assert "<nav" not in text


def test_a_model_without_attention_shows_its_answers_and_filters(everything, tmp_path):
    look = a_look(maps={}, class_maps={}, colors=None, attention=None, neighbors=())
    plain = Inspection(title="BiT", facts={}, filters=everything.filters, looks=(look,))
    text = written(plain, tmp_path)
    assert headings(text) == ["What it says and where it looks", "What the first layer looks for"]
    assert "warm colors" not in text
    assert "62.5" in text
    assert "<script" not in text


def test_only_the_script_of_the_page_may_run(everything, tmp_path):
    text = written(everything, tmp_path)
    policy = re.search(r'Content-Security-Policy"\s+content="(.*?)"', text)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert policy.group(1).split("; ") == [
        "default-src 'none'",
        "img-src data:",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
    ]
    assert not re.search(r"\son\w+=", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))


def test_names_from_files_cannot_change_the_page(everything, tmp_path):
    values = RNG.random((2, 3))
    look = a_look(
        EVIL,
        label=EVIL,
        classes=((EVIL, 0.5),),
        maps={EVIL: values},
        class_maps={EVIL: {EVIL: values}},
        neighbors=(Neighbor(name=EVIL, label=EVIL, similarity=1.0, pixels=pixels(9, 9)),),
    )
    evil = replace(
        everything,
        title=EVIL,
        facts={EVIL: EVIL},
        looks=(look,),
        positions=tuple(replace(tiles, title=EVIL) for tiles in everything.positions),
        study=replace(STUDY, distance={EVIL: np.ones((2, 2))}),
        trust=Trust(curves={EVIL: curves(0.5, 0.5)}, sanity={EVIL: 0.9}, images=1),
        scatter=replace(SCATTER, classes=(EVIL,) * 3, method=EVIL),
        notes=(EVIL,),
    )
    text = written(evil, tmp_path)
    kinds = [values.get("type", "") for tag, values in Reader(text).seen if tag == "script"]
    assert kinds == ["application/json", "text/plain", "text/plain", ""]
    assert "<script>alert" not in text


def test_each_class_that_was_asked_about_has_its_row(everything, tmp_path):
    text = written(replace(everything, looks=(a_look(),)), tmp_path)
    alts = [values.get("alt") for tag, values in Reader(text).seen if tag == "img"]
    assert "rollout: where it looks in cat.jpg" in alts
    assert "relevance: where it sees dog in cat.jpg" in alts
    assert "relevance: where it sees cat in cat.jpg" in alts
    assert all(alts)


def test_a_wrong_answer_is_seen_to_be_wrong(everything, tmp_path):
    text = written(everything, tmp_path)
    kinds = re.findall(r'<li class="(\w+)" style="--part:.*?<span>(\w+)</span>', text)
    assert kinds[:3] == [("wrong", "dog"), ("true", "cat"), ("other", "cow")]


def test_six_pictures_and_three_browsers_are_no_more_than_a_mail_carries(tmp_path):
    looks = tuple(
        a_look(str(n), pixels=pixels(300, 400), attention=attention(12, 6, 197), grid=(14, 14))
        if n < 3
        else a_look(str(n), pixels=pixels(300, 400), attention=None)
        for n in range(6)
    )
    text = written(Inspection(title="ViT-S/16", facts={}, looks=looks), tmp_path)
    assert text.count('id="attention-') == 3
    assert len(text) < 15_000_000


def test_attention_that_would_not_fit_is_left_out_and_counted(everything, tmp_path, monkeypatch):
    small, large = a_look("small"), a_look("large", attention=attention(2, 3, 20))
    monkeypatch.setattr("vitrail.inspection.browser.MOST_BYTES", small.attention.nbytes + 9)
    assert [look.name for look in browsable([small, large])] == ["small"]
    text = written(replace(everything, looks=(small, large)), tmp_path)
    assert "1 more would make this page too large" in words_of(text)
    assert MOST_BYTES * 4 / 3 < 13_000_000


def test_a_page_that_cannot_be_made_leaves_the_old_one(everything, tmp_path, monkeypatch):
    old = written(everything, tmp_path)

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "noted", stopped)
    with pytest.raises(KeyboardInterrupt):
        written(everything, tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == old


def test_explanations_are_judged_by_what_they_are_compared_with(everything, tmp_path):
    text = written(everything, tmp_path)
    rows = dict(re.findall(r'<i class="key".*?></i>(.*?)</td>(.*?)</tr>', text))
    assert rows.keys() == TRUST.curves.keys()
    assert "<td class=best>0.750</td><td class=best>0.250</td><td>0.12</td>" in rows["relevance"]
    assert "best" not in rows["rollout"]
    assert "—" in rows["random"]  # it is no method of ours
    words = words_of(text)
    for expected in (
        "By insertion relevance tells most: an area of 0.750, against 0.450 for random and 0.475",
        "last layer tells no more than random or center",
        "The maps of rollout hardly change when the weights are random (0.88)",
        "relevance and last layer change when the weights are random",
    ):
        assert expected in words, expected
    assert "rollout tells no more" not in words


def test_tokens_without_outliers_are_said_to_have_none(everything, tmp_path):
    study = replace(STUDY, outliers=np.zeros(2), prefix_norms=np.zeros((2, 0)))
    text = written(replace(everything, study=study), tmp_path)
    assert "No patch token is far longer" in text
    assert "Far above the median" not in text


def test_a_single_head_is_compared_with_no_other(everything, tmp_path):
    one = replace(
        STUDY,
        distance={"patches": np.array([[5.0], [6.0]])},
        entropy=np.array([[0.5], [0.5]]),
        redundancy=np.ones((2, 1, 1)),
    )
    text = written(replace(everything, study=one), tmp_path)
    assert "like the other heads" not in text
    assert "In layer 0 heads look 5 pixels far" in words_of(text)


def test_tokens_before_the_patches_go_by_their_names(everything, tmp_path):
    named = replace(everything, prefix=("register 0",))
    assert '"others": ["register 0"]' in written(named, tmp_path)


def drawn(svg):
    assert "nan" not in svg
    return ET.fromstring(svg)


def test_every_head_is_a_dot_above_its_layer():
    values = np.array([[1.0, 2], [3, 4], [0, 4]])
    root = drawn(by_layer(values, label="distance"))
    dots = list(root.iter("circle"))
    assert [e[0].text for e in dots][:3] == [
        "layer 0, head 0: 1",
        "layer 0, head 1: 2",
        "layer 1, head 0: 3",
    ]
    x = [float(e.get("cx", "")) for e in dots]
    y = [float(e.get("cy", "")) for e in dots]
    assert x[0] == x[1] < x[2] < x[4]
    assert x[4] - x[2] == pytest.approx(x[2] - x[0], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)  # 1, 2 and 3: evenly upward
    assert y[3] == y[5]


def test_numbers_that_are_missing_have_no_dot():
    assert by_layer(np.full((2, 2), np.nan), label="x") == ""
    assert len(list(drawn(by_layer(np.array([[1.0, np.nan]]), label="x")).iter("circle"))) == 1


def test_norms_tell_their_quantiles_on_a_scale_that_holds_outliers():
    text = lengths(STUDY.norms, {"class token": STUDY.prefix_norms[:, 0]})
    told = [e.text for e in drawn(text).iter("title")]
    assert told[1] == (
        "layer 1: half of the patches from 3 to 5, all from 2 to 40, median 4; class token 7"
    )
    marks = [e.text for e in drawn(text).iter("text")]
    assert "10" in marks  # logarithmic: 1, 2, 5, 10, 20, 50
    assert "50" in marks


def test_curves_are_drawn_for_every_method():
    found = {name: c.insertion for name, c in TRUST.curves.items()}
    colors = {name: "" if name in ("random", "center") else "var(--s0)" for name in found}
    root = drawn(fading(np.linspace(0, 1, 5), found, colors, label="insertion"))
    assert len([e for e in root.iter("path") if "line" in e.get("class", "")]) == 5
    assert "random, 50 % of the pixels: 45.0 %" in [e.text for e in root.iter("title")]


def test_a_map_has_a_point_for_every_picture_and_a_name_for_every_class():
    root = drawn(map_of_set(SCATTER))
    assert sum(e.get("d", "").count("M") for e in root.iter("path")) == 30
    assert [e.text for e in root.iter("text")] == ["cat", "dog", "cow"]
    still = replace(SCATTER, points=np.zeros((30, 2)), classes=("only", "two", "absent"))
    drawn(map_of_set(replace(still, labels=np.arange(30) % 2)))


def test_probabilities_are_said_to_be_what_they_are(everything, tmp_path):
    one = words_of(written(everything, tmp_path))
    assert "Probabilities are the softmax of the logits." in one
    several = words_of(written(replace(everything, multi_label=True), tmp_path))
    assert "the probability of each is the sigmoid of its logit." in several
    assert "softmax of the logits" not in several


@pytest.mark.parametrize("kind", sorted(set(get_args(PositionKind)) - {"none"}))
def test_only_positions_that_were_learned_are_said_to_be(kind, everything, tmp_path):
    tiles = tuple(replace(tiles, kind=kind) for tiles in everything.positions)
    words = words_of(written(replace(everything, positions=tiles), tmp_path))
    assert ("has learned that a picture is flat" in words) == (kind == "learned")
    assert ("nothing here was learned" in words) == (kind == "sincos-2d")
    assert ("key for each offset" in words) == (kind == "relative")
