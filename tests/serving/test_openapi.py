import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from serving_helpers import make_state
from starlette.testclient import TestClient

from vitrail.serving.app import make_app
from vitrail.serving.registry import Example

pytestmark = pytest.mark.slow

CHECKS = (not_a_server_error, checks.status_code_conformance)
CHECKS += (checks.content_type_conformance, checks.response_schema_conformance)
RUN = {"derandomize": True, "database": None, "deadline": None, "phases": [Phase.generate]}
FEW = settings(max_examples=6, suppress_health_check=list(HealthCheck), **RUN)


@pytest.fixture(scope="module")
def app():
    with make_state() as state:
        state.warm = True
        state.examples["tiny"] = [Example("red", b"x", "image/png")]
        yield make_app(state)


@pytest.fixture(scope="module")
def schema(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def operations():
    with make_state() as state:
        paths = TestClient(make_app(state)).get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, document in paths.items() for method in document]


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("method", "path"), operations())
def test_responses_conform_to_the_openapi_document(schema, method, path, mode):
    try:

        @given(schema[path][method].as_strategy(generation_mode=mode))
        @FEW
        def send(case):
            case.call_and_validate(checks=CHECKS)

        send()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # no invalid request exists


def test_openapi_document_lists_bodies_and_errors(app):
    document = TestClient(app).get("/openapi.json").json()
    predict = document["paths"]["/predict"]["post"]
    bodies = predict["requestBody"]["content"]
    assert set(bodies) == {"multipart/form-data", "image/*", "application/octet-stream"}
    statuses = {"200", "400", "401", "403", "404", "408", "413", "415", "422", "503", "504"}
    assert set(predict["responses"]) == statuses
    assert [p["name"] for p in predict["parameters"]] == ["model", "top", "threshold"]
    assert "HTTPValidationError" not in json.dumps(document)
