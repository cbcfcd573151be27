"""A browser and its tabs, for the tests of web pages."""

import contextlib
import shutil
import time

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
PATIENCE = 30.0  # seconds; a busy machine takes long


@contextlib.contextmanager
def started():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        args = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        args.append("--no-sandbox")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


class Tab:
    """A browser tab that records its console messages and requests."""

    def __init__(self, browser, **options):
        usual = {"reduced_motion": "reduce", "viewport": {"width": 1280, "height": 900}}
        self.context = browser.new_context(**usual | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.messages, self.urls = [], []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))

    @contextlib.contextmanager
    def at(self, address, path="/"):
        """The page at an address. At the end, it must have requested nothing from other hosts, and
        logged nothing but error responses and this test's access to its canvas."""
        self.messages.clear()
        self.urls.clear()
        self.page.goto(address + path)
        yield self.page
        usual = ("Failed to load resource", "Canvas2D: Multiple readback")
        assert [line for line in self.messages if not line.startswith(usual)] == []
        own = (address, "blob:", "data:")
        assert [url for url in self.urls if not url.startswith(own)] == []


@contextlib.contextmanager
def tab(browser, address, path="/", **options):
    own = Tab(browser, **options)
    with own.at(address, path) as page:
        yield page
    own.context.close()


def until(page, script, arg=None):
    """Wait until a script returns something true; playwright's own way needs a laxer policy."""
    deadline = time.monotonic() + PATIENCE
    while not page.evaluate(script, arg):
        if time.monotonic() > deadline:
            pytest.fail(f"never: {script} {arg or ''}")
        page.wait_for_timeout(20)


def until_text(page, id, pattern):
    """Wait until the text of an element matches a regular expression."""
    script = "([id, text]) => new RegExp(text).test(document.getElementById(id).textContent)"
    until(page, script, [id, pattern])
