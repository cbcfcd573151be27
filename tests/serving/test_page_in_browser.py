import base64
import io

import numpy as np
import pytest
from page_stub import COLUMNS, MODEL, ROLLED, ROWS, encoded_image
from PIL import Image

from browser_tab import NEEDS_CHROMIUM, Tab, tab, until, until_text

pytestmark = [NEEDS_CHROMIUM, pytest.mark.timeout(60), pytest.mark.slow]
CELLS = """() => {
  const c = document.getElementById("overlay"), context = c.getContext("2d");
  return Array.from({ length: ROWS * COLUMNS }, (_, i) => {
    const x = ((i % COLUMNS) + 0.5) * c.width / COLUMNS;
    const y = (Math.floor(i / COLUMNS) + 0.5) * c.height / ROWS;
    return context.getImageData(x, y, 1, 1).data[3];
  });
}""".replace("ROWS", str(ROWS)).replace("COLUMNS", str(COLUMNS))
GIVE = """([kind, data, type]) => {
  const transfer = new DataTransfer(), bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  transfer.items.add(new File([bytes], "given.png", { type }));
  const more = { bubbles: true, cancelable: true };
  document.body.dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", { ...more, clipboardData: transfer })
    : new DragEvent(kind, { ...more, dataTransfer: transfer }));
}"""


@pytest.fixture(scope="module")
def shared(browser):
    return Tab(browser)


@pytest.fixture
def page(shared, stub):
    stub.reset()
    with shared.at(stub.address) as page:
        page.wait_for_selector("#examples .row canvas")
        yield page


def give(page, *files, to="#files"):
    kind, files = {"mimeType": "image/png"}, files or (encoded_image(),)
    named = [{"name": f"{n}.png", "buffer": data, **kind} for n, data in enumerate(files)]
    page.locator(to).set_input_files(named)


def result(page):
    """Headline and sentence of the result, once there is one."""
    until_text(page, "headline", "^(?!Classifying|\\d+ class)")
    return page.locator("#headline").text_content(), page.locator("#sentence").text_content()


def brightest(page, expected):
    """Wait until the brightest patch of the overlay is the expected one."""
    script = f"(i) => {{ const cells = ({CELLS})(), least = Math.min(...cells);"
    script += "return cells.some(Boolean) && cells.indexOf(least) === i"
    until(page, script + " && cells.filter((v) => v === least).length === 1; }", arg=expected)


def look(page, view):
    page.locator(f"#looking input[value={view}]").check(force=True)


# Predictions


def test_chosen_image_gets_bars_and_timing(page, stub):
    until_text(page, "headline", "^3 classes$")
    data = encoded_image()
    give(page, data)
    assert result(page) == ("sun", "High confidence.")
    assert page.locator("#guesses .name").all_text_contents() == ["sun", "moon", "star"]
    assert page.locator("#guesses .amount").all_text_contents() == ["97 %", "2.0 %", "1.0 %"]
    until(page, "document.querySelector('.bar i').style.width === '97%'")
    assert page.locator("#facts").text_content() == "12 ms · engine torch"
    (method, _, query, kind, body) = stub.requests("/predict")[-1]
    assert (method, kind, body) == ("POST", "image/png", data)  # as it is, and without its name
    assert query == {"top": "5", "threshold": "0.6"}


CALIBRATED, SEVERAL = {"conformal": {"method": "lac", "error_rate": 0.05}}, {"multi_label": True}


@pytest.mark.parametrize(
    ("model", "probabilities", "labels", "headline", "sentence"),
    [
        ({}, (0.8, 0.15, 0.05), ["sun"], "Probably sun", "Moderate confidence."),
        ({}, (0.46, 0.44, 0.1), [], "sun or moon?", "The two are about equally probable."),
        ({}, (0.5, 0.3, 0.2), [], "Not sure", "Most probable: “sun”, with low confidence."),
        (CALIBRATED, (0.7, 0.25, 0.05), ["sun"], "Probably sun",
         "Moderate confidence. Prediction set: sun and moon (error rate 5.0 %)."),
        (SEVERAL, (0.9, 0.7, 0.1), ["sun", "moon"], "sun and moon", "These apply."),
        (SEVERAL, (0.4, 0.3, 0.1), [], "No class",
         "None reaches the threshold; the most probable is “sun”."),
    ],
)  # fmt: skip
def test_verdict_of_each_kind_of_model(
    page, stub, model, probabilities, labels, headline, sentence
):
    stub.model |= model
    stub.probabilities = dict(zip(stub.probabilities, probabilities, strict=True))
    stub.labels, stub.prediction_set = labels, ["sun", "moon"]
    stub.warning = "the confidences differ"
    page.reload()
    give(page)
    assert result(page) == (headline, sentence)
    assert page.locator("#guesses .decided").count() == len(labels)
    until_text(page, "drift", "^Warning: the confidences differ\\.$")
    assert ("threshold" in stub.requests("/predict")[-1][2]) == (not model)  # or its own


def test_image_can_be_pasted_and_dropped(page, stub):
    data = base64.b64encode(encoded_image()).decode()
    page.evaluate(GIVE, ["paste", data, "image/png"])
    assert result(page)[0] == "sun"
    page.evaluate(GIVE, ["dragover", data, "image/png"])
    assert page.locator("body.dropping").count() == 1
    page.evaluate(GIVE, ["drop", data, "image/png"])
    page.wait_for_selector("#strip button:nth-child(2)")
    until(page, "document.querySelectorAll('#strip span')[1].textContent === 'sun'")
    assert len(stub.requests("/predict")) == 2
    assert page.locator("body.dropping").count() == 0
    page.evaluate(GIVE, ["drop", data, "text/plain"])  # a name that ends like a picture's
    assert page.locator("#headline").text_content() == "Not an image"


def test_several_images_become_a_strip(page):
    give(page, encoded_image(), b"no picture at all", encoded_image(60, 90))
    until_text(page, "strip", "^sunsunsun$")
    assert page.locator("#picture").get_attribute("alt") == "0.png"
    page.locator("#strip button").nth(2).focus()
    page.keyboard.press("Enter")
    assert page.locator("#picture").get_attribute("alt") == "2.png"
    assert page.evaluate("document.activeElement.title") == "2.png"  # focus stays
    assert page.locator("#strip [aria-pressed=true]").count() == 1
    page.locator("#clear").click()
    assert page.locator("#empty").is_visible()
    assert page.locator("#strip").is_hidden()


def test_examples_are_compared_with_their_label(page):
    examples = page.locator("#examples .row button")
    examples.nth(0).click()
    assert result(page)[1] == "High confidence. Correct."
    examples.nth(1).click()
    until_text(page, "sentence", "^High confidence. Its label is “moon”.$")
    examples.nth(0).click()  # known already
    assert page.locator("#strip button").count() == 2


def test_large_photos_are_rotated_and_resized_before_upload(page, stub):
    exif = Image.Exif()
    exif[0x0112] = 6  # a phone held upright
    give(page, encoded_image(3000, 1500, kind="JPEG", exif=exif))
    assert result(page)[0] == "sun"
    (_, _, _, kind, body) = stub.requests("/predict")[-1]
    sent = Image.open(io.BytesIO(body))
    assert (kind, sent.size) == ("image/jpeg", (1024, 2048))
    above, below = (np.asarray(sent)[row, 500].sum() for row in (200, 1800))
    assert above > 1.5 * below  # what was left is above now


# Explanations


def test_sliders_select_layer_and_head(page):
    give(page)
    result(page)
    until(page, f"!({CELLS})().some(Boolean)")  # the picture as it is
    look(page, "rollout")
    brightest(page, ROLLED)
    assert page.locator("#layer").is_hidden()
    look(page, "layer")
    brightest(page, 5)  # the last layer; of all heads the one with the largest attention
    page.locator("#layer").fill("2")
    brightest(page, 3)
    page.locator("#head").fill("1")
    brightest(page, 2)
    assert page.locator("output[for=layer]").text_content() == "2 of 3"
    assert page.locator("#head").get_attribute("aria-valuetext") == "1 of 2"
    assert page.locator("#explained").text_content() == "Attention of head 1 in layer 2 of 3."


def test_explanation_of_a_class(page, stub):
    data = encoded_image()
    give(page, data)
    result(page)
    moon = page.locator("#guesses button").nth(1)
    moon.click()
    page.wait_for_selector("#lit:not([hidden])")
    assert moon.get_attribute("aria-pressed") == "true"
    assert page.locator("#lit").get_attribute("alt") == "evidence for moon"
    assert stub.requests("/explain")[-1][2] == {"method": "relevance", "class": "moon"}
    assert stub.requests("/explain")[-1][4] == data
    page.locator("#method").select_option("gradient rollout")
    until_text(page, "explained", "Highlighted")
    assert stub.requests("/explain")[-1][2]["method"] == "gradient rollout"
    page.locator("#shade").fill("50")
    assert page.locator("#lit").evaluate("(image) => image.style.opacity") == "0.5"
    moon.click()  # once more removes it
    assert page.locator("#lit").is_hidden()
    assert moon.get_attribute("aria-pressed") == "false"


# Errors


@pytest.mark.parametrize(
    ("status", "text", "sentence"),
    [
        (413, "20 MB at most", "Too large for this server: 20 MB at most"),
        (422, "a PNG that is cut off", "The image cannot be read: a PNG that is cut off"),
        (504, "no answer within 30 s", "The model took too long: no answer within 30 s"),
        (500, "a bug", "The server returned status 500: a bug"),
    ],
)
def test_errors_are_shown_as_sentences(page, stub, status, text, sentence):
    stub.errors["/predict"] = [(status, text)]
    give(page)
    assert result(page) == ("Request failed", sentence)
    assert page.locator("#guesses").is_hidden()
    if status < 500:
        assert page.locator("#again").is_hidden()  # the same again would not help
    else:
        page.locator("#again").click()
        until_text(page, "headline", "^sun$")


def test_overloaded_server_is_retried_and_unreachable_one_reported(page, stub):
    stub.errors["/predict"] = [(503, "too many wait")] * 3
    give(page)
    assert result(page)[0] == "sun"
    assert len(stub.requests("/predict")) == 4
    stub.errors["/predict"] = [(503, "too many wait")] * 5
    give(page)
    until_text(page, "headline", "failed")
    assert result(page)[1] == "The server is overloaded: too many wait"
    page.route("**/predict*", lambda route: route.abort())
    give(page)
    until_text(page, "sentence", r"^The server does not respond. Is it still running\?$")
    page.unroute("**/predict*")
    page.locator("#again").click()
    until_text(page, "headline", "^sun$")


# Token, models, teaching


def test_token_is_requested_and_kept_for_the_tab(browser, stub):
    stub.reset()
    stub.token = "open sesame"
    with tab(browser, stub.address) as page:
        for word, refused in (("wrong", "That token was not accepted."), ("open sesame", "")):
            page.wait_for_selector("dialog[open]")
            page.locator("dialog input").fill(word)
            page.keyboard.press("Enter")
            until_text(page, "refused", refused)
        page.wait_for_selector("#examples .row canvas")
        assert page.locator("dialog[open]").count() == 0
        give(page)
        assert result(page)[0] == "sun"
        page.reload()
        page.wait_for_selector("#examples .row canvas")  # without being asked again
        assert page.evaluate("localStorage.length") == 0


def test_model_can_be_switched(page, stub):
    stub.models = ["sky", "sea"]
    stub.model = MODEL | {"methods": [], "layers": 0, "heads": 0, "teach": False}  # no attention
    page.reload()
    give(page)
    assert result(page)[0] == "sun"
    assert page.locator("#looking").is_hidden()
    assert page.locator("#guesses button").first.is_disabled()
    assert page.locator("#teach").is_hidden()
    assert stub.requests("/attention") == []
    stub.probabilities, stub.labels = {"wave": 0.99, "ship": 0.01}, ["wave"]
    page.locator("#models select").select_option("sea")
    until_text(page, "headline", "^wave$")
    assert stub.requests("/predict")[-1][2]["model"] == "sea"


def test_a_class_can_be_taught(page, stub):
    give(page)
    result(page)
    before = len(stub.requests("/predict"))
    page.locator("#teach summary").click()
    page.locator("#lesson").fill("comet")
    give(page, encoded_image(), encoded_image(), to="#lessons")
    page.locator("#teach button").click()
    until_text(page, "learned", r"^Added “comet”. \(run by torch now\)$")
    result(page)
    (_, _, query, kind, body) = stub.requests("/teach")[-1]
    assert query == {"name": "comet"}
    assert kind.startswith("multipart/form-data")
    assert body.count(b'name="pictures"') == 2
    assert b"0.png" not in body  # file names are not sent
    assert len(stub.requests("/predict")) == before + 1  # the shown image is predicted again


# Accessibility and layout


def test_keyboard_navigation(page):
    page.locator("#examples .row button").first.focus()
    page.keyboard.press("Enter")
    result(page)
    page.locator("#guesses button").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#lit:not([hidden])")
    page.locator("#looking input:checked").focus()
    page.keyboard.press("ArrowLeft")  # from the class to layers
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "layer"
    page.keyboard.press("Home")
    assert page.locator("output[for=layer]").text_content() == "1 of 3"


def test_controls_have_accessible_names(page):
    assert page.locator("#answer").get_attribute("aria-live") == "polite"
    assert page.locator("html").get_attribute("lang") == "en"
    give(page)
    result(page)
    look(page, "layer")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, img')].filter((e) =>"
        "e.checkVisibility() && !(e.textContent.trim() || e.labels?.length || e.alt ||"
        " e.ariaLabel)).map((e) => e.outerHTML)"
    )
    assert unnamed == []


def test_result_is_shown_while_the_animation_runs(browser, stub):
    stub.reset()
    stub.delay = 0.3
    with tab(browser, stub.address, reduced_motion="no-preference") as page:
        page.wait_for_selector("#examples .row canvas")
        give(page)
        until(page, f"Math.min(...({CELLS})()) === 255")  # covered
        assert result(page)[0] == "sun"
        until(page, f"!({CELLS})().some(Boolean)")


def test_page_works_on_a_phone_with_the_real_server(browser, port):
    phone = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}
    with tab(browser, f"http://127.0.0.1:{port}", **phone) as page:
        give(page, encoded_image(), encoded_image(60, 90, kind="JPEG"))
        result(page)
        assert page.locator("#guesses button").count() == 3
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        look(page, "layer")
        until_text(page, "explained", "^Attention of all 2 heads")
        page.locator("#guesses button").last.click()
        page.wait_for_selector("#lit:not([hidden])")
        give(page, b"no picture")
        until_text(page, "headline", "failed")
        assert result(page)[1].startswith("The image cannot be read: ")
