"""The attention browser, in a browser."""

import re
import shutil

import numpy as np
import pytest

from vitrail.inspection.findings import Box, Inspection, Look
from vitrail.inspection.page import write_inspection

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
LAYERS, HEADS, ROWS, COLUMNS = 3, 2, 4, 5
TOKENS = 1 + ROWS * COLUMNS

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed"),
    pytest.mark.timeout(60),
]


def token(row, column):
    return 1 + row * COLUMNS + column


def attention(seed=0):
    """Faint everywhere; layer 1, head 1 looks one patch to the right, and others are random."""
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 40, (LAYERS, HEADS, TOKENS, TOKENS), dtype=np.uint8)
    found[..., 0] = 255  # mostly at the class token
    found[1, 1] = 0
    for row in range(ROWS):
        for column in range(COLUMNS):
            found[1, 1, token(row, column), token(row, min(column + 1, COLUMNS - 1))] = 255
            found[1, 1, token(row, column), 0] = 85  # a quarter of all
    found[1, 1, 0, token(3, 0)] = 255
    return found


def peaks(bytes_):
    """What 255 stands for, if each row is all of a query's attention."""
    return (255 / bytes_.sum(-1, dtype=np.float64)).astype(np.float32)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two wide pictures of which the model sees the middle."""
    rng = np.random.default_rng(0)
    looks = tuple(
        Look(
            name=name,
            pixels=rng.integers(0, 255, (80, 200, 3), dtype=np.uint8),
            box=Box(0, 50, 80, 150),
            classes=(),
            attention=attention(seed),
            peaks=peaks(attention(seed)),
            grid=(ROWS, COLUMNS),
        )
        for seed, name in enumerate(("first <b>", "second"))
    )
    path = tmp_path_factory.mktemp("browser") / "report.html"
    write_inspection(
        path, Inspection(title="a model", facts={}, prefix=("class token",), looks=looks)
    )
    return path


@pytest.fixture(scope="module")
def tab():
    """One tab for all tests; what it complains of, and what it asks of the network."""
    sync_api = pytest.importorskip("playwright.sync_api")
    wrong, asked = [], []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        yield page, wrong, asked
        browser.close()


@pytest.fixture
def page(tab, report):
    """The report as a person has just opened it; nothing may go wrong or be asked for."""
    page, wrong, asked = tab
    asked.clear()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(report.as_uri())
    yield page
    assert wrong == []
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]


def told(page):
    return page.locator("#told").text_content()


def click_patch(page, row, column):
    box = page.locator(".field").bounding_box()
    x = (column + 0.5) / COLUMNS * box["width"]
    y = (row + 0.5) / ROWS * box["height"]
    page.locator(".field").click(position={"x": x, "y": y})


def set_slider(page, name, value):
    page.locator(f"input.{name}").fill(str(value))


def test_it_begins_with_what_the_class_token_sees_in_the_last_layer(page):
    assert told(page).startswith("layer 2, mean of heads: the class token looks mostly at itself")
    assert page.locator(".query").is_hidden()


def test_a_click_on_a_patch_asks_that_patch(page):
    set_slider(page, "layer", 1)
    set_slider(page, "head", 1)
    click_patch(page, 2, 1)
    expected = "layer 1, head 1: patch row 2, column 1 looks mostly at row 2, column 2"
    assert told(page) == f"{expected} (75 % of its attention)"
    click_patch(page, 0, 4)
    assert "patch row 0, column 4 looks mostly at itself" in told(page)
    assert page.locator(".query").is_visible()


def test_layer_and_head_change_what_is_seen(page):
    click_patch(page, 1, 1)
    assert told(page).startswith("layer 2, mean of heads: patch row 1, column 1")
    set_slider(page, "layer", 1)
    assert told(page).startswith("layer 1, mean of heads: patch row 1, column 1")
    set_slider(page, "head", 1)
    assert told(page).startswith("layer 1, head 1: patch row 1, column 1 looks mostly at row 1, co")
    set_slider(page, "head", 0)
    assert "head 0: patch row 1, column 1 looks mostly at the class token" in told(page)
    assert page.locator("output[for=head]").text_content() == "0"


def test_the_mean_of_heads_weighs_each_head_the_same(page):
    set_slider(page, "layer", 1)
    click_patch(page, 1, 1)
    rows = attention()[1, :, token(1, 1)].astype(float)
    share = (rows / rows.sum(axis=1, keepdims=True)).mean(axis=0)[0]
    button = page.locator(".others button")
    assert button.text_content() == f"class token gets {100 * share:.0f} %"


def test_arrow_keys_move_the_query_and_stop_at_the_edges(page):
    click_patch(page, 1, 1)
    places = []
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
        places.append(re.findall(r"patch row (\d), column (\d)", told(page))[0])
    assert places == [("1", "2"), ("2", "2"), ("2", "1"), ("1", "1"), ("0", "1"), ("0", "1")]


def test_everything_can_be_reached_by_keyboard(page):
    page.locator(".choose button").first.focus()
    seen = []
    for _ in range(6):
        seen.append(page.evaluate("document.activeElement.className || document.activeElement.tag"))
        page.keyboard.press("Tab")
    assert {"field", "layer", "head"} <= set(seen)
    page.locator("input.layer").focus()
    page.keyboard.press("ArrowLeft")
    assert told(page).startswith("layer 1,")
    page.locator(".field").focus()
    page.keyboard.press("ArrowLeft")  # from the class token into the picture
    assert "patch row 2, column 2" in told(page)


def test_the_class_token_can_be_asked(page):
    set_slider(page, "layer", 1)
    set_slider(page, "head", 1)
    click_patch(page, 1, 1)
    page.locator(".others button").click()
    assert told(page).startswith("layer 1, head 1: the class token looks mostly at row 3, column 0")
    assert page.locator(".others button").get_attribute("aria-pressed") == "true"


def test_a_click_in_the_overview_chooses_layer_and_head(page):
    box = page.locator(".all").bounding_box()
    place = {"x": box["width"] * 2.5 / 3, "y": box["height"] * 1.5 / 3}  # mean, head 0, head 1
    page.locator(".all").click(position=place)
    assert told(page).startswith("layer 1, head 1:")
    assert page.locator("input.layer").input_value() == "1"
    assert page.locator("input.head").input_value() == "1"


def test_the_map_is_brightest_where_the_query_looks(page):
    set_slider(page, "layer", 1)
    set_slider(page, "head", 1)
    click_patch(page, 2, 1)
    colors = page.evaluate(
        "(() => { const c = document.querySelector('.heat');"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]; })()"
    )
    alpha = np.array(colors).reshape(ROWS, COLUMNS, 4)[:, :, 3]
    assert np.unravel_index(alpha.argmax(), alpha.shape) == (2, 2)
    assert (alpha > 0).sum() == 1


def test_another_picture_is_shown_with_its_own_attention(page):
    set_slider(page, "layer", 0)
    set_slider(page, "head", 0)
    click_patch(page, 1, 1)
    shares = []
    for number in range(2):
        page.locator(".choose button").nth(number).click()
        row = attention(number)[0, 0, token(1, 1)].astype(float)
        shares.append(f"class token gets {100 * row[0] / row.sum():.0f} %")
        assert page.locator(".others button").text_content() == shares[-1]
    assert page.locator(".stage img").get_attribute("alt") == "second"
    assert shares[0] != shares[1]


def test_the_field_lies_on_the_part_of_the_picture_that_the_model_sees(page):
    picture = page.locator(".stage img").bounding_box()
    field = page.locator(".field").bounding_box()
    assert field["x"] - picture["x"] == pytest.approx(picture["width"] / 4, abs=1)
    assert field["width"] == pytest.approx(picture["width"] / 2, abs=1)
    assert field["height"] == pytest.approx(picture["height"], abs=1)


def test_a_phone_needs_no_scrolling_sideways(page):
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    click_patch(page, 3, 4)
    assert "patch row 3, column 4" in told(page)
