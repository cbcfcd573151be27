"""A stub server and a browser for the tests of the pages."""

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
