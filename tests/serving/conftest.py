"""A server with canned answers and a browser, for the tests of pages."""

import pytest
from page_stub import Stub, started


@pytest.fixture(scope="module")
def stub():
    with Stub() as stub:
        yield stub
        stub.shutdown()


@pytest.fixture(scope="module")
def browser():
    with started() as browser:
        yield browser
