"""The API page, and what both pages guarantee a browser."""

import re
from pathlib import Path

import pytest
from page_stub import encoded_image

from browser_tab import NEEDS_CHROMIUM, tab
from vitrail.reports.html import csp_hash
from vitrail.serving import app
from vitrail.serving.app import ROUTES, build_page

ASSETS = Path(app.__file__).parent / "assets"
PAGES = ("page.html", "docs.html")
TRIED = ("/model", "/examples/{id}")


@pytest.mark.parametrize("name", PAGES)
def test_policy_allows_the_style_and_script_of_the_page_only(name):
    html, policy = build_page(name)
    hosts = set(re.findall(r"//([\w-]+\.[\w.-]+)", html))
    assert hosts <= {"www.w3.org"}  # the SVG namespace, which is never requested
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    assert f"style-src {csp_hash(style)};" in policy
    assert f"script-src {csp_hash(script)};" in policy
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    assert " style=" not in html  # the policy would ignore it
    assert not re.search(r"\son\w+=\"", html)


def test_every_asset_is_used():
    used = "".join(build_page(name)[0] for name in PAGES)
    for path in ASSETS.glob("*.[cj]s*"):
        assert path.read_text().strip() in used, path.name


@NEEDS_CHROMIUM
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_every_route_is_drawn_and_can_be_tried(browser, stub):
    stub.reset()
    paths = [route.path for method in ("POST", "GET") for route in ROUTES if route.method == method]
    with tab(browser, stub.address, "/docs") as page:
        page.wait_for_selector("details")
        assert page.locator("summary code").all_text_contents() == paths
        assert page.locator("#about code").all_text_contents() == [
            *("pictures", '{"error": "one line"}')
        ]
        model, example = (page.locator("details").nth(paths.index(path)) for path in TRIED)
        model.locator("summary").click()
        assert model.locator("table").first.text_content() == "modelstringWhich <b>one</b>."
        assert '"parameters": integer or null' in model.text_content()
        model.locator("input[name=model]").fill("sea & sky")
        model.locator("button").click()
        model.locator(".result pre").wait_for()
        assert '"name": "sea & sky"' in model.locator(".result pre").text_content()
        assert stub.requests("/model")[-1][2] == {"model": "sea & sky"}
        example.locator("summary").click()
        example.locator("input[name=id]").fill("1")
        example.locator("button").click()
        example.locator(".result img").wait_for()
        assert example.locator(".result code").text_content().startswith("200 OK, ")


@NEEDS_CHROMIUM
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_image_can_be_sent_with_a_token(browser, stub):
    stub.reset()
    stub.token = "open sesame"
    with tab(browser, stub.address, "/docs", viewport={"width": 390, "height": 800}) as page:
        predict = page.locator("details").first
        predict.locator("summary").click()
        shape = predict.locator("pre").all_text_contents()[-1]
        assert '"answers": [{\n    "name": string,' in shape
        assert "too many bytes" in predict.text_content()
        predict.locator("input[name=top]").fill("2")
        file = {"name": "a.png", "mimeType": "image/png", "buffer": encoded_image()}
        predict.locator("input[type=file]").set_input_files(file)
        predict.locator("button").click()
        predict.locator(".result pre").wait_for()
        assert predict.locator(".result code").text_content().startswith("401")
        page.locator("#token").fill("open sesame")
        predict.locator("button").click()
        predict.locator(".result code").filter(has_text="200 OK").wait_for()
        assert '"label": "sun"' in predict.locator(".result pre").text_content()
        (_, _, query, kind, body) = stub.requests("/predict")[-1]
        assert (query, kind, body) == ({"top": "2"}, "image/png", encoded_image())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
