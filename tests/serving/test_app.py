import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from serving_helpers import (
    CLASSES,
    ClosedTerminal,
    blocked_batcher,
    encoded_image,
    is_idle,
    make_client,
    make_state,
    metric,
    post,
    tiny_model,
    wait_for,
)
from starlette.testclient import TestClient

import vitrail
from vitrail.errors import ConfigError
from vitrail.evaluation.conformal import Conformal, model_digest
from vitrail.prediction.predictor import Predictor
from vitrail.serving import app
from vitrail.serving.app import make_app
from vitrail.serving.config import ServerConfig

LARGE = encoded_image(size=(50, 50))
LIMITS = {"max_megabytes": 50_000 / 2**20, "max_images": 6, "queue": 8, "max_pixels": 2000}


@pytest.fixture(scope="module")
def state():
    models = {"tiny": tiny_model(), "other": tiny_model(seed=1)}
    with make_state(models, **LIMITS) as state:
        yield state


@pytest.fixture(scope="module")
def client(state):
    with TestClient(make_app(state)) as client:
        yield client


def files(*images):
    return [("pictures", (f"{n}.png", data)) for n, data in enumerate(images)]


def error(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (text,) = response.json().values()
    assert response.json() == {"error": text}
    assert "\n" not in text
    return text


# Results


def test_predictions_match_the_predictor(client):
    images = [encoded_image(color, seed=n) for n, color in enumerate(CLASSES)]
    response = client.post("/predict?top=2", files=files(*images)).json()
    assert (response["model"], response["engine"]) == ("tiny", "torch")
    assert response["seconds"] > 0
    expected = Predictor(tiny_model(), device="cpu")(images, top=2)
    for n, (got, want) in enumerate(zip(response["answers"], expected, strict=True)):
        assert got["name"] == f"{n}.png"
        assert (got["label"], got["labels"], got["error"]) == (want.label, [want.label], "")
        assert [g["label"] for g in got["guesses"]] == [g.label for g in want.guesses]
        close = pytest.approx([g.probability for g in want.guesses], abs=1e-5)
        assert [g["probability"] for g in got["guesses"]] == close


def test_classes_of_a_response_are_limited(client, monkeypatch):
    monkeypatch.setattr(app, "MAX_GUESSES", 3)
    images = files(encoded_image(), encoded_image())
    assert "lower top" in error(client.post("/predict?top=2", files=images), 413)
    assert client.post("/predict?top=1", files=images).status_code == 200


def test_single_and_unreadable_images(client):
    """An unreadable image does not fail the others; a request of nothing else is a 422."""
    for kind in ("image/png", "application/octet-stream", None):
        headers = {"content-type": kind} if kind else {}
        response = client.post("/predict", content=encoded_image(), headers=headers)
        assert len(response.json()["answers"]) == 1
    response = client.post("/predict", files=files(encoded_image(), b"not an image")).json()
    assert [bool(answer["label"]) for answer in response["answers"]] == [True, False]
    assert "not an image" in response["answers"][1]["error"]
    assert "not an image" in error(post(client, data=b"text"), 422)
    several = client.post("/features", files=files(b"text", b"text"))
    assert error(several, 422).startswith("none of 2 images could be read: ")


def test_features_match_the_model_and_are_null_for_unreadable_images(client, state):
    response = client.post("/features", files=files(encoded_image(), b"text")).json()
    predictor = state.registry.get("tiny").predictor
    expected = predictor.forward_features(predictor.preprocess(encoded_image())[None])[0]
    torch.testing.assert_close(torch.tensor(response["features"][0]), expected)
    assert response["features"][1] is None
    assert [bool(answer["error"]) for answer in response["answers"]] == [False, True]


def test_models_are_selected_by_name_and_disclose_nothing_about_the_machine(client):
    assert client.get("/models").json() == {"models": ["tiny", "other"]}
    assert post(client, "/predict?model=other").json()["model"] == "other"
    assert "did you mean 'other'" in error(client.get("/model?model=othr"), 404)
    response = client.get("/model").json()
    assert response["classes"] == list(CLASSES)
    assert response["image_size"] == [8, 8]
    assert (response["layers"], response["heads"], response["teach"]) == (1, 2, False)
    assert "relevance" in response["methods"]
    assert response["limits"] == {"bytes": 50_000, "pictures": 6, "pixels": 2000, "seconds": 30.0}
    assert response["conformal"] is None
    assert "provenance" not in response


def test_calibrated_model_returns_sets_and_warns_of_drift():
    model = tiny_model()
    bins = {"edges": tuple(np.linspace(0.4, 0.9, 9)), "shares": (0.1,) * 10}
    values = {"error_rate": 0.1, "samples": 1000, "thresholds": (1.0,), **bins}
    conformal = Conformal(method="lac", digest=model_digest(model), **values)
    model.metadata = replace(model.metadata, conformal=conformal.to_dict())
    with make_state({"tiny": model}) as state, TestClient(make_app(state)) as client:
        assert client.get("/model").json()["conformal"] == {"method": "lac", "error_rate": 0.1}
        thirty = files(*[encoded_image()] * 30)
        first, later = (client.post("/predict", files=thirty).json() for _ in range(2))
        assert sorted(first["answers"][0]["prediction_set"]) == sorted(CLASSES)
        assert first["warning"] == ""
        assert later["warning"].startswith("the confidences of 60 images differ from")


def test_model_without_classes():
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    with make_state({"bare": model}) as state:
        client = make_client(state)
        assert post(client, "/explain").status_code == post(client, "/features").status_code == 200
        assert "no classes" in error(post(client), 422)


# Errors


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/predict?top=0", 422, "top: "),
        ("/predict?top=many", 422, "top: "),
        ("/predict?threshold=2", 422, "threshold: "),
        ("/predict?threshold=nan", 422, "threshold: "),
        ("/predict?model=none", 404, "unknown model 'none'"),
        ("/predict?topk=3", 422, "unknown parameter 'topk'; did you mean 'top'?"),
        ("/explain?klass=blue", 422, "unknown parameter 'klass'; did you mean 'class'?"),
        ("/explain?class=bleu", 422, "did you mean 'blue'"),
        ("/explain?method=x", 422, "method"),
        ("/teach?name=thumb", 403, "--allow-teach"),  # disabled by default
        ("/etc/passwd", 404, "/docs"),
        ("/predict/", 404, "/docs"),
        ("/models", 405, "/docs"),
    ],
)
def test_invalid_request_is_a_one_line_error(client, path, status, text):
    rejected = post(client, path)
    assert text in error(rejected, status)
    if status == 405:
        assert set(rejected.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_media_types_and_limits_of_body_images_and_pixels(client):
    for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
        rejected = post(client, headers={"content-type": kind})
        assert "curl -F pictures=@" in error(rejected, 415)
    assert "compressed" in error(post(client, headers={"content-encoding": "gzip"}), 415)
    assert "50,000 bytes" in error(post(client, data=b"x" * 50_001), 413)
    assert "50,000 bytes" in error(post(client, data=(b"x" * 1000 for _ in range(60))), 413)
    assert "6 images" in error(client.post("/predict", files=files(*[encoded_image()] * 7)), 413)
    two = client.post("/attention", files=files(encoded_image(), encoded_image()))
    assert "expected one image, got 2" in error(two, 400)
    for path in ("/predict", "/explain", "/attention", "/features"):
        assert "above the limit of 2,000 pixels" in error(post(client, path, LARGE), 422)
    assert "the request contains no image" in error(post(client, data=b""), 400)
    assert "the request contains no image" in error(client.post("/predict", files={"x": b"y"}), 400)


def test_timeout_cancels_work_that_has_not_started():
    with make_state(timeout=0.2) as state:
        client = make_client(state)
        with blocked_batcher(state):
            assert "0.2 s" in error(post(client), 504)
        wait_for(lambda: not state.batcher.waiting)
        assert metric(state, "vitrail_pictures_total") == 0
        assert state.admission.images == 0


def test_internal_error_is_500_with_traceback_in_the_log(capsys, monkeypatch):
    with make_state() as state:
        predictor = state.registry.get("tiny").predictor
        monkeypatch.setattr(predictor, "logits", lambda images: 1 / 0)
        client = make_client(state)
        assert error(post(client), 500) == "internal server error"
        assert "ZeroDivisionError" in capsys.readouterr().err
        monkeypatch.undo()
        assert post(client).status_code == 200
    assert is_idle(state)


def test_internal_error_of_one_image_does_not_fail_others(monkeypatch):
    good, bad = encoded_image("red"), encoded_image("blue")
    with make_state() as state, ThreadPoolExecutor() as pool:
        predictor, client = state.registry.get("tiny").predictor, make_client(state)
        preprocess = predictor.preprocess
        monkeypatch.setattr(
            predictor, "preprocess", lambda data: 1 / 0 if data == bad else preprocess(data)
        )
        with blocked_batcher(state) as gate:
            replies = [pool.submit(post, client, data=data) for data in (good, bad)]
            wait_for(lambda: len(state.batcher.waiting) == 2)
            gate.open.set()
        assert [reply.result().status_code for reply in replies] == [200, 500]


# Access


def test_security_headers_are_always_sent(client):
    pages = [client.get(path) for path in ("/", "/docs")]
    assert all(page.headers["content-type"].startswith("text/html") for page in pages)
    others = (client.get("/health"), client.get("/nothing"), client.post("/predict"))
    for response in (*pages, *others):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        assert response.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in response.headers


def test_cross_origin_posts_are_rejected_unless_allowed(client):
    for headers in ({"origin": "https://elsewhere.example"}, {"sec-fetch-site": "cross-site"}):
        assert "--allow-origin" in error(post(client, headers=headers), 403)
    own = {"origin": "http://testserver", "sec-fetch-site": "same-origin"}
    assert post(client, headers=own).status_code == 200
    with make_state(allow_origin=("https://friend.example",)) as state:
        client, method = make_client(state), {"access-control-request-method": "POST"}
        for origin, status, preflight in (("friend", 200, 200), ("foe", 403, 400)):
            headers = {"origin": f"https://{origin}.example"}
            assert client.options("/predict", headers=headers | method).status_code == preflight
            response = post(client, headers=headers)
            assert response.status_code == status
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == ("https://friend.example" if status == 200 else None)


def test_dns_rebinding_is_rejected():
    ServerConfig(allow_host=("example.org", "::1", "192.168.0.1"))
    for name in ("http://example.org", "example.org:80", "a b", ""):
        with pytest.raises(ConfigError, match=r"such as example\.org, without http:// and port"):
            ServerConfig(allow_host=(name,))
    with make_state(allow_host=(), allow_teach=True) as state:
        client = TestClient(make_app(state), base_url="http://127.0.0.1:8000")
        host = "127.0.0.1.evil.example:8000"
        headers = {"host": host}  # which a browser fills in, and the page's origin with it
        for path in ("/", "/docs", "/openapi.json", "/health", "/models", "/examples/0"):
            assert "--allow-host" in error(client.get(path, headers=headers), 403)
        headers |= {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        for path in ("/predict", "/teach?name=x"):
            error(post(client, path, headers=headers), 403)
        assert 'rejected_total{reason="host"} 8' in client.get("/metrics").text


OWN = ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.5:80", "proxy.org")
ADDRESSES = ("192.168.0.7:8000", "10.1.2.3", "[fe80::1]:8000")
NAMES = ("Proxy.org:80", socket.gethostname(), f"{socket.getfqdn()}:8000")
EVIL = ("evil.example", "evil.example:8000", "192.168.0.7.evil.example", "[evil.example]:8000")


@pytest.mark.parametrize(
    ("options", "accepted", "rejected"),
    [
        ({"host": "127.0.0.5"}, OWN, EVIL + ADDRESSES),
        *(({"host": host}, OWN[:2] + ADDRESSES + NAMES, EVIL) for host in ("0.0.0.0", "::", "")),
        ({"host": "127.0.0.1", "token": "s3cret"}, OWN + EVIL, ()),
        ({"host": "0.0.0.0", "token": "s3cret"}, OWN + EVIL, ()),
    ],
)
def test_accepted_host_headers(options, accepted, rejected):
    with make_state(**options, allow_host=("Proxy.org",)) as state:
        client = TestClient(make_app(state), headers={"authorization": "Bearer s3cret"})
        for host in (*accepted, *rejected):
            status = client.get("/models", headers={"host": host}).status_code
            assert status == (200 if host in accepted else 403), host


def test_token_is_required_except_for_public_paths():
    with make_state(token="s3cret") as state:
        client = make_client(state)
        for path in ("/model", "/models", "/examples", "/metrics"):
            rejected = client.get(path)
            assert "Bearer" in error(rejected, 401)
            assert rejected.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
        for shown in ("Bearer wrong", "Bearer", "Basic s3cret", "s3cret", "Bearer s3crét"):
            headers = {"authorization": shown.encode()}
            assert client.get("/model", headers=headers).status_code == 401
        document = client.get("/openapi.json").json()
        assert document["security"] == [{"token": []}]
        assert document["paths"]["/health"]["get"]["security"] == []
        assert "security" not in document["paths"]["/predict"]["post"]
        assert post(client, headers={"authorization": "bearer s3cret"}).status_code == 200


# Log and metrics


def test_request_id_is_generated_or_taken_from_the_client(client):
    given = client.get("/health", headers={"x-request-id": "my-id.7"})
    assert given.headers["x-request-id"] == "my-id.7"
    for odd in ("x" * 65, 'a"b', "a b", ""):
        own = client.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{8}-\d+", own)


def test_metrics_are_in_prometheus_text_format(client, state):
    counters = [f"vitrail_{kind}_total" for kind in ("pictures", "unreadable")]
    before = [metric(state, name, model="other") for name in counters]
    client.post("/predict?model=other", files=files(encoded_image(), b"text"))
    assert [metric(state, name, model="other") for name in counters] == [n + 1 for n in before]
    client.get("/some/path/that/is/not/there")
    client.get("/predict")
    text = client.get("/metrics").text
    for line in text.splitlines():
        assert re.fullmatch(r"(# (HELP|TYPE) .+|[a-z_]+(\{[^}]*\})? [0-9.e+-]+)", line), line
    for route, status in (("/predict", 200), ("/predict", 405), ("other", 404)):
        assert f'vitrail_requests_total{{route="{route}",status="{status}"}}' in text
    assert "some/path" not in text
    for name in ("batch_pictures_bucket", "queue_pictures", "requests_in_flight", "rejected_total"):
        assert f"vitrail_{name}" in text
    for stage in ("wait", "prepare", "run"):
        assert f'vitrail_stage_seconds_count{{stage="{stage}"}}' in text
    memory = re.search(r"^process_resident_memory_bytes (\S+)", text, re.MULTILINE)
    assert float(memory[1]) > 1e7


def test_log_contains_no_request_content(capsys):
    with make_state() as state:
        object.__setattr__(state.config, "log", "json")
        client = make_client(state)
        secret = [("pictures", ("secret-name.png", encoded_image()))]
        client.post("/predict?model=tiny", files=secret, headers={"authorization": "Bearer s3"})
        post(client, data=b"secret text")
        lines = capsys.readouterr().err.splitlines()
        object.__setattr__(state.config, "log", "text")
        client.get("/health")
        assert "GET /health" in capsys.readouterr().err
    first, second = map(json.loads, lines)
    values = [first[key] for key in ("route", "status", "pictures", "batch")]
    assert values == ["/predict", 200, 1, 1]
    assert first["bytes"] > len(encoded_image())
    assert first["ms"] > 0
    assert second["status"] == 422
    assert not re.search("secret|s3", "".join(lines))


def test_rejected_requests_are_logged_with_route_level_and_reason(capsys):
    with make_state(log="json", token="secret") as state:
        client = make_client(state)
        post(client)  # rejected before it is routed
        post(client, data=b"text", headers={"authorization": "Bearer secret"})
        client.get("/health")
        client.get("/ready")
        state.draining = True
        post(client)
        client.get("/no/such/path")
        labels = {"route": "/predict", "status": "401"}
        assert state.metrics.registry.get_sample_value("vitrail_requests_total", labels) == 1
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(x["route"], x["status"], x["level"], x["reason"]) for x in lines] == [
        ("/predict", 401, "warning", "token"),
        ("/predict", 422, "warning", "unreadable"),
        ("/health", 200, "info", ""),
        ("/ready", 503, "info", "warming"),
        ("/predict", 503, "warning", "stopping"),
        ("other", 503, "warning", "stopping"),
    ]


@pytest.mark.parametrize("format", ["text", "json"])
def test_log_that_cannot_be_written_fails_no_request(monkeypatch, format):
    """SIGHUP comes with the end of the terminal."""
    with make_state(log=format) as state:
        client = make_client(state)
        predictor = state.registry.get("tiny").predictor
        monkeypatch.setattr(sys, "stderr", ClosedTerminal())
        assert post(client).status_code == 200
        monkeypatch.setattr(predictor, "logits", lambda images: 1 / 0)
        assert post(client).status_code == 500


# Warm-up and shutdown


def test_ready_after_warm_up_and_until_shutdown():
    with make_state(batch=0) as cold:
        app = make_app(cold)
        client = TestClient(app)
        assert "warming" in error(client.get("/ready"), 503)
        assert client.get("/health").json() == {"status": "alive"}
        with TestClient(app) as client:
            wait_for(lambda: client.get("/ready").status_code == 200)
            assert cold.registry.get(None).batch_size in (1, 2, 4, 8, 16, 32)
            assert client.head("/ready").status_code == client.head("/health").status_code == 200
            cold.draining = True
            assert "shutting down" in error(client.get("/ready"), 503)
            assert "rejected_total{" not in client.get("/metrics").text
            rejected = post(client)
            assert "shutting down" in error(rejected, 503)
            assert rejected.headers["connection"] == "close"
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("batch", "limit", "ready", "taken"),
    [(0, 2, True, (1, 2)), (16, 99, True, (16,)), (16, 2, True, (8,)), (0, 0, False, (8,)),
     (3, 99, True, (3,))],
)  # fmt: skip
def test_warm_up_falls_back_when_out_of_memory(monkeypatch, capsys, batch, limit, ready, taken):
    with make_state(batch=batch) as state:
        served, sizes = state.registry.get(None), []
        logits = served.predictor.logits

        def limited(images):
            sizes.append(len(images))
            if len(images) > limit:
                raise RuntimeError("out of memory")
            return logits(images)

        monkeypatch.setattr(served.predictor, "logits", limited)
        with TestClient(make_app(state)) as client:
            wait_for(lambda: state.warm or state.warm_up_failed)
            assert state.warm is ready
            assert served.batch_size in taken
            assert not batch or sizes[0] == batch  # the configured size is run
            if not ready:
                assert "cannot run" in error(client.get("/ready"), 503)
        fails = limit < (batch or 1)
        assert ("out of memory" in capsys.readouterr().err) is fails
