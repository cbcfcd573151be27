"""A server for the tests that do not configure their own; a stub and a browser for the pages."""

import pytest
from page_stub import Stub
from serving_helpers import make_state, running_server

from browser_tab import started


@pytest.fixture(scope="module")
def state():
    with make_state(batch=8) as state:
        yield state


@pytest.fixture(scope="module")
def port(state):
    with running_server(state) as (_, port):
        yield port


@pytest.fixture(scope="module")
def stub():
    with Stub() as stub:
        yield stub
        stub.shutdown()


@pytest.fixture(scope="module")
def browser():
    with started() as browser:
        yield browser
