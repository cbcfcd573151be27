"""The attention browser, in a browser."""

import re

import numpy as np
import pytest

from browser_tab import NEEDS_CHROMIUM, Tab, started
from vitrail.inspection.images import Box
from vitrail.inspection.inspect import ImageInspection, Inspection
from vitrail.reports.inspection import inspection_page

LAYERS, HEADS, ROWS, COLUMNS = 3, 2, 4, 5
TOKENS = 1 + ROWS * COLUMNS

pytestmark = [NEEDS_CHROMIUM, pytest.mark.timeout(60), pytest.mark.slow]


def token(row, column):
    return 1 + row * COLUMNS + column


def attention(seed=0):
    """Random, but layer 1, head 1 attends one patch to the right."""
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 40, (LAYERS, HEADS, TOKENS, TOKENS), dtype=np.uint8)
    found[..., 0] = 255  # most of it to the class token
    found[1, 1] = 0
    for row in range(ROWS):
        for column in range(COLUMNS):
            found[1, 1, token(row, column), token(row, min(column + 1, COLUMNS - 1))] = 255
            found[1, 1, token(row, column), 0] = 85  # a quarter of all
    found[1, 1, 0, token(3, 0)] = 255
    return found


def peaks(bytes_):
    """The attention that 255 stands for, if each row sums to 1."""
    return (255 / bytes_.sum(-1, dtype=np.float64)).astype(np.float32)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two wide images of which the model sees the middle."""
    rng = np.random.default_rng(0)
    images = tuple(
        ImageInspection(
            name=name,
            pixels=rng.integers(0, 255, (80, 200, 3), dtype=np.uint8),
            box=Box(0, 50, 80, 150),
            predictions=(),
            attention=attention(seed),
            peaks=peaks(attention(seed)),
            grid=(ROWS, COLUMNS),
        )
        for seed, name in enumerate(("first <b>", "second"))
    )
    path = tmp_path_factory.mktemp("browser") / "report.html"
    inspection = Inspection(title="a model", facts={}, prefix=("class token",), images=images)
    path.write_text(inspection_page(inspection), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tab():
    with started() as browser:
        yield Tab(browser)


@pytest.fixture
def page(tab, report):
    """The report, freshly opened; at the end, there may be no message and no request."""
    tab.page.set_viewport_size({"width": 1280, "height": 900})
    with tab.at(report.as_uri(), "") as page:
        yield page


def status(page):
    return page.locator("#status").text_content()


def click_patch(page, row, column):
    box = page.locator(".field").bounding_box()
    x = (column + 0.5) / COLUMNS * box["width"]
    y = (row + 0.5) / ROWS * box["height"]
    page.locator(".field").click(position={"x": x, "y": y})


def set_slider(page, name, value):
    page.locator(f"input.{name}").fill(str(value))


def test_query_layer_and_head(page):
    button = page.locator(".prefix button")
    start = "layer 2, mean of heads: the class token attends mostly to itself"
    assert status(page).startswith(start)
    assert page.locator(".query").is_hidden()
    click_patch(page, 1, 1)
    assert status(page).startswith("layer 2, mean of heads: patch row 1, column 1")
    set_slider(page, "layer", 1)
    rows = attention()[1, :, token(1, 1)].astype(float)
    share = (rows / rows.sum(axis=1, keepdims=True)).mean(axis=0)[0]
    assert button.text_content() == f"class token {100 * share:.0f} %"
    set_slider(page, "head", 0)
    assert "head 0: patch row 1, column 1 attends mostly to the class token" in status(page)
    assert page.locator("output[for=head]").text_content() == "0"
    set_slider(page, "head", 1)
    click_patch(page, 2, 1)
    expected = "layer 1, head 1: patch row 2, column 1 attends mostly to row 2, column 2"
    assert status(page) == f"{expected} (75 %)"
    colors = page.evaluate(
        "(() => { const c = document.querySelector('.heat');"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]; })()"
    )
    alpha = np.array(colors).reshape(ROWS, COLUMNS, 4)[:, :, 3]
    assert np.argwhere(alpha > 0).tolist() == [[2, 2]]
    click_patch(page, 0, 4)
    assert "patch row 0, column 4 attends mostly to itself" in status(page)
    assert page.locator(".query").is_visible()
    button.click()
    expected = "layer 1, head 1: the class token attends mostly to row 3, column 0"
    assert status(page).startswith(expected)
    assert button.get_attribute("aria-pressed") == "true"


def test_keyboard_moves_the_query_and_reaches_everything(page):
    click_patch(page, 1, 1)
    places = []
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
        places.append("".join(re.findall(r"patch row (\d), column (\d)", status(page))[0]))
    assert places == ["12", "22", "21", "11", "01", "01"]
    page.locator(".prefix button").click()
    page.locator(".choose button").first.focus()
    seen = []
    for _ in range(6):
        seen.append(page.evaluate("document.activeElement.className || document.activeElement.tag"))
        page.keyboard.press("Tab")
    assert {"field", "layer", "head"} <= set(seen)
    page.locator("input.layer").focus()
    page.keyboard.press("ArrowLeft")
    assert status(page).startswith("layer 1,")
    page.locator(".field").focus()
    page.keyboard.press("ArrowLeft")  # from the class token into the picture
    assert "patch row 2, column 2" in status(page)


def test_click_in_the_overview_and_on_a_phone(page):
    box = page.locator(".all").bounding_box()
    place = {"x": box["width"] * 2.5 / 3, "y": box["height"] * 1.5 / 3}  # mean, head 0, head 1
    page.locator(".all").click(position=place)
    assert status(page).startswith("layer 1, head 1:")
    values = [page.locator(f"input.{name}").input_value() for name in ("layer", "head")]
    assert values == ["1", "1"]
    page.set_viewport_size({"width": 390, "height": 800})  # no horizontal scrolling
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    click_patch(page, 3, 4)
    assert "patch row 3, column 4" in status(page)


def test_another_image_has_its_own_attention(page):
    set_slider(page, "layer", 0)
    set_slider(page, "head", 0)
    click_patch(page, 1, 1)
    shares = []
    for number in range(2):
        page.locator(".choose button").nth(number).click()
        row = attention(number)[0, 0, token(1, 1)].astype(float)
        shares.append(f"class token {100 * row[0] / row.sum():.0f} %")
        assert page.locator(".prefix button").text_content() == shares[-1]
    assert page.locator(".stage img").get_attribute("alt") == "second"
    assert shares[0] != shares[1]
