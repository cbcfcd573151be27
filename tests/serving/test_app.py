import json
import re
import socket
import threading

import pytest
import torch
from serving_helpers import (
    CLASSES,
    blocked_batcher,
    encoded_image,
    make_state,
    metric,
    tiny_model,
    wait_for,
)
from starlette.testclient import TestClient

import vitrail
from vitrail.errors import ConfigError
from vitrail.prediction.predictor import Predictor
from vitrail.serving.app import make_app
from vitrail.serving.config import Limits, ServerConfig
from vitrail.serving.limits import host_of

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def state():
    models = {"tiny": tiny_model(), "other": tiny_model(seed=1)}
    with make_state(models, limits=Limits(body=50_000, images=6, queue=8, pixels=2000)) as state:
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
    body = response.json()
    assert list(body) == ["error"]
    assert "\n" not in body["error"]
    return body["error"]


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


def test_body_may_be_a_single_image(client):
    for headers in (PNG, {"content-type": "application/octet-stream"}, {}):
        response = client.post("/predict", content=encoded_image(), headers=headers)
        assert len(response.json()["answers"]) == 1


def test_unreadable_image_does_not_fail_the_others(client):
    answers = client.post("/predict", files=files(encoded_image(), b"not an image")).json()[
        "answers"
    ]
    assert [bool(answer["label"]) for answer in answers] == [True, False]
    assert "not an image" in answers[1]["error"]


def test_request_without_readable_image_is_422(client):
    assert "not an image" in error(client.post("/predict", content=b"text", headers=PNG), 422)
    several = client.post("/features", files=files(b"text", b"text"))
    assert error(several, 422).startswith("none of 2 images could be read: ")


def test_below_the_threshold_the_label_is_empty(client):
    response = client.post("/predict?threshold=1", content=encoded_image(), headers=PNG).json()
    assert (response["answers"][0]["label"], response["answers"][0]["labels"]) == ("", [])
    assert len(response["answers"][0]["guesses"]) == 3


def test_model_is_selected_by_name(client):
    assert client.get("/models").json() == {"models": ["tiny", "other"]}
    response = client.post("/predict?model=other", content=encoded_image(), headers=PNG).json()
    assert response["model"] == "other"
    assert "did you mean 'other'" in error(client.get("/model?model=othr"), 404)


def test_features_match_the_model_and_are_null_for_unreadable_images(client, state):
    response = client.post("/features", files=files(encoded_image(), b"text")).json()
    predictor = state.registry.get("tiny").predictor
    expected = predictor.forward_features(predictor.preprocess(encoded_image())[None])[0]
    torch.testing.assert_close(torch.tensor(response["features"][0]), expected)
    assert response["features"][1] is None
    assert [bool(answer["error"]) for answer in response["answers"]] == [False, True]


def test_model_info_discloses_nothing_about_the_machine(client):
    response = client.get("/model").json()
    assert response["classes"] == list(CLASSES)
    assert response["image_size"] == [8, 8]
    assert (response["layers"], response["heads"]) == (1, 2)
    assert "relevance" in response["methods"]
    assert response["limits"] == {"bytes": 50_000, "pictures": 6, "pixels": 2000, "seconds": 30.0}
    assert response["teach"] is False
    assert "provenance" not in response


def test_explain_returns_png_and_attention_json(client):
    response = client.post("/explain?class=blue", content=encoded_image(size=(20, 30)), headers=PNG)
    assert response.headers["content-type"] == "image/png"
    assert response.content.startswith(b"\x89PNG")
    assert client.post("/attention", content=encoded_image(), headers=PNG).json()["layers"] == 1
    unknown = client.post("/explain?class=bleu", content=encoded_image(), headers=PNG)
    assert "did you mean 'blue'" in error(unknown, 422)
    assert "method" in error(
        client.post("/explain?method=x", content=encoded_image(), headers=PNG), 422
    )
    assert "expected one image, got 2" in error(
        client.post("/attention", files=files(encoded_image(), encoded_image())), 400
    )


def test_teaching_is_disabled_by_default(client):
    rejected = client.post("/teach?name=thumb", files=files(encoded_image()))
    assert "--allow-teach" in error(rejected, 403)


@pytest.mark.parametrize(
    ("query", "status", "expected_text"),
    [
        ("top=0", 422, "top: "),
        ("top=many", 422, "top: "),
        ("threshold=2", 422, "threshold: "),
        ("threshold=nan", 422, "threshold: "),
        ("model=none", 404, "unknown model 'none'"),
    ],
)
def test_invalid_parameter_is_a_one_line_error(client, query, status, expected_text):
    rejected = client.post(f"/predict?{query}", content=encoded_image(), headers=PNG)
    assert error(rejected, status).startswith(expected_text)


def test_unsupported_media_type_is_415(client):
    for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
        rejected = client.post("/predict", content=encoded_image(), headers={"content-type": kind})
        assert "curl -F pictures=@" in error(rejected, 415)
    packed = client.post("/predict", content=b"x", headers=PNG | {"content-encoding": "gzip"})
    assert "compressed" in error(packed, 415)


def test_limits_of_body_images_and_pixels(client):
    assert "50,000 bytes" in error(client.post("/predict", content=b"x" * 50_001, headers=PNG), 413)
    chunks = client.post("/predict", content=(b"x" * 1000 for _ in range(60)), headers=PNG)
    assert "50,000 bytes" in error(chunks, 413)
    assert "6 images" in error(client.post("/predict", files=files(*[encoded_image()] * 7)), 413)
    large = client.post("/predict", content=encoded_image(size=(50, 50)), headers=PNG)
    assert "pixels" in error(large, 422)
    for path in ("/explain", "/attention", "/features"):
        large = client.post(path, content=encoded_image(size=(50, 50)), headers=PNG)
        assert "above the limit of 2,000 pixels" in error(large, 422)
    assert "the request contains no image" in error(client.post("/predict", headers=PNG), 400)
    assert "the request contains no image" in error(client.post("/predict", files={"x": b"y"}), 400)


def test_unknown_paths_and_methods(client):
    assert "/docs" in error(client.get("/etc/passwd"), 404)
    assert "/docs" in error(client.get("/predict/"), 404)
    rejected = client.get("/predict")
    error(rejected, 405)
    assert rejected.headers["allow"] == "POST"


def test_security_headers_are_always_sent(client):
    for response in (client.get("/health"), client.get("/nothing"), client.post("/predict")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        assert response.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in response.headers
    for path in ("/", "/docs"):
        page = client.get(path)
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy


def test_cross_origin_posts_are_rejected(client):
    headers = PNG | {"origin": "https://elsewhere.example"}
    assert "--allow-origin" in error(client.post("/predict", content=b"x", headers=headers), 403)
    headers = PNG | {"sec-fetch-site": "cross-site"}
    error(client.post("/teach?name=x", content=b"x", headers=headers), 403)
    own = PNG | {"origin": "http://testserver", "sec-fetch-site": "same-origin"}
    assert client.post("/predict", content=encoded_image(), headers=own).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "evil.example", "127.0.0.1.evil.example"])
def test_dns_rebinding_is_rejected(host):
    with make_state(allow_hosts=(), allow_teach=True) as state:
        client = TestClient(make_app(state), base_url="http://127.0.0.1:8000")
        headers = {"host": host}  # which a browser fills in, and the page's origin with it
        for path in ("/", "/docs", "/openapi.json", "/health", "/models", "/examples/0"):
            assert "--allow-host" in error(client.get(path, headers=headers), 403)
        headers |= PNG | {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        for path in ("/predict", "/teach?name=x"):
            error(client.post(path, content=encoded_image(), headers=headers), 403)
        assert 'rejected_total{reason="host"} 8' in client.get("/metrics").text


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.5:80", "proxy.org"],
)
def test_own_and_allowed_host_names_are_accepted(host):
    with make_state(host="127.0.0.5", allow_hosts=("Proxy.org",)) as state:
        client = TestClient(make_app(state))
        assert client.get("/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_any_host_name_is_accepted_with_a_token(host):
    with make_state(allow_hosts=(), host=host, token="s3cret") as state:
        headers = {"host": "evil.example", "authorization": "Bearer s3cret"}
        assert TestClient(make_app(state)).get("/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("evil.example", 403), ("evil.example:8000", 403), ("192.168.0.7.evil.example", 403)),
        *(("[evil.example]:8000", 403), ("localhost:8000", 200), ("192.168.0.7:8000", 200)),
        *(("10.1.2.3", 200), ("[fe80::1]:8000", 200), ("Proxy.org:80", 200)),
        *((socket.gethostname(), 200), (f"{socket.getfqdn()}:8000", 200)),
    ],
)
@pytest.mark.parametrize("bound", ["0.0.0.0", "::", ""])
def test_public_server_accepts_addresses_and_known_names_only(bound, host, status):
    with make_state(allow_hosts=("proxy.org",), host=bound) as state:
        client = TestClient(make_app(state))
        for path in ("/models", "/health", "/"):
            assert client.get(path, headers={"host": host}).status_code == status


def test_missing_host_header_means_localhost():
    assert host_of({}) == "localhost"


@pytest.mark.parametrize("name", ["http://example.org", "example.org:80", "a b", ""])
def test_allow_hosts_must_be_host_names(name):
    with pytest.raises(ConfigError, match=r"such as example\.org, without http:// and port"):
        ServerConfig(allow_hosts=(name,))
    ServerConfig(allow_hosts=("example.org", "::1", "192.168.0.1"))


def test_allowed_origin_may_send_requests():
    with make_state(allow_origins=("https://friend.example",)) as state:
        client = TestClient(make_app(state))
        headers = PNG | {"origin": "https://friend.example"}
        answer = client.post("/predict", content=encoded_image(), headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://friend.example"
        ask = {"origin": "https://friend.example", "access-control-request-method": "POST"}
        assert client.options("/predict", headers=ask).status_code == 200
        ask["origin"] = "https://foe.example"
        assert client.options("/predict", headers=ask).status_code == 400
        foe = client.post(
            "/predict", content=encoded_image(), headers=PNG | {"origin": ask["origin"]}
        )
        assert foe.status_code == 403


def test_token_is_required_except_for_public_paths():
    with make_state(token="s3cret") as state:
        client = TestClient(make_app(state))
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
        right = PNG | {"authorization": "bearer s3cret"}
        assert client.post("/predict", content=encoded_image(), headers=right).status_code == 200


def test_request_id_is_generated_or_taken_from_the_client(client):
    given = client.get("/health", headers={"x-request-id": "my-id.7"})
    assert given.headers["x-request-id"] == "my-id.7"
    for odd in ("x" * 65, 'a"b', "a b", ""):
        own = client.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{8}-\d+", own)


def test_metrics_are_in_prometheus_text_format(client):
    client.post("/predict", files=files(encoded_image(), b"text"))
    client.get("/some/path/that/is/not/there")
    text = client.get("/metrics").text
    for line in text.splitlines():
        assert re.fullmatch(r"(# (HELP|TYPE) .+|[a-z_]+(\{[^}]*\})? [0-9.e+-]+)", line), line
    assert 'vitrail_requests_total{route="/predict",status="200"}' in text
    assert 'vitrail_requests_total{route="other",status="404"}' in text
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
        client = TestClient(make_app(state))
        secret = [("pictures", ("secret-name.png", encoded_image()))]
        client.post("/predict?model=tiny", files=secret, headers={"authorization": "Bearer s3"})
        client.post("/predict", content=b"secret text", headers=PNG)
        lines = capsys.readouterr().err.splitlines()
        object.__setattr__(state.config, "log", "text")
        client.get("/health")
        assert "GET /health" in capsys.readouterr().err
    first, second = map(json.loads, lines)
    assert first["route"] == "/predict"
    assert (first["status"], first["pictures"], first["batch"]) == (200, 1, 1)
    assert first["bytes"] > len(encoded_image())
    assert first["ms"] > 0
    assert second["status"] == 422
    assert "secret" not in "".join(lines)
    assert "s3" not in "".join(lines)


def test_internal_error_is_500_with_traceback_in_the_log(capsys, monkeypatch):
    with make_state() as state:
        predictor = state.registry.get("tiny").predictor
        monkeypatch.setattr(predictor, "logits", lambda images: 1 / 0)
        client = TestClient(make_app(state))
        rejected = client.post("/predict", content=encoded_image(), headers=PNG)
        assert error(rejected, 500) == "internal server error"
        assert "ZeroDivisionError" in capsys.readouterr().err
        monkeypatch.undo()
        assert client.post("/predict", content=encoded_image(), headers=PNG).status_code == 200
    assert state.admission.images == state.admission.bytes == state.in_flight == 0


def test_internal_error_of_one_image_does_not_fail_others(monkeypatch):
    with make_state() as state:
        served = state.registry.get("tiny")
        prepare = served.predictor.preprocess

        def prepared(data):
            return prepare(data) if data.startswith(b"\x89PNG") else 1 / 0

        monkeypatch.setattr(served.predictor, "preprocess", prepared)
        client = TestClient(make_app(state))
        response = {}

        def ask(name, data):
            response[name] = client.post("/predict", content=data, headers=PNG).status_code

        with blocked_batcher(state) as gate:
            threads = [
                threading.Thread(target=ask, args=(name, data))
                for name, data in {"good": encoded_image(), "bad": b"x"}.items()
            ]
            for thread in threads:
                thread.start()
            wait_for(lambda: len(state.batcher.waiting) == 2)
            gate.open.set()
            for thread in threads:
                thread.join()
        assert response == {"good": 200, "bad": 500}


def test_ready_after_warm_up_and_until_shutdown(state):
    with make_state(batch_size=0) as cold:
        app = make_app(cold)
        client = TestClient(app)
        assert "warming" in error(client.get("/ready"), 503)
        assert client.get("/health").json() == {"status": "alive"}
        with TestClient(app) as client:
            wait_for(lambda: client.get("/ready").status_code == 200)
            assert cold.registry.get(None).batch_size in (1, 2, 4, 8, 16, 32)
            cold.draining = True
            assert "shutting down" in error(client.get("/ready"), 503)
            rejected = client.post("/predict", content=encoded_image(), headers=PNG)
            assert "shutting down" in error(rejected, 503)
            assert rejected.headers["connection"] == "close"
            assert client.get("/health").status_code == 200


def failing_above(predictor, limit):
    """The logits of a predictor that runs out of memory above a batch size."""
    logits = predictor.logits

    def limited(images):
        if len(images) > limit:
            raise RuntimeError("out of memory")
        return logits(images)

    return limited


@pytest.mark.parametrize(
    ("batch", "limit", "ready", "taken"),
    [(0, 2, True, (1, 2)), (16, 99, True, (16,)), (16, 2, True, (8,)), (0, 0, False, (8,))],
)
def test_warm_up_falls_back_when_out_of_memory(monkeypatch, capsys, batch, limit, ready, taken):
    with make_state(batch_size=batch) as state:
        served = state.registry.get(None)
        monkeypatch.setattr(served.predictor, "logits", failing_above(served.predictor, limit))
        with TestClient(make_app(state)) as client:
            wait_for(lambda: state.warm or state.warm_up_failed)
            assert state.warm is ready
            assert served.batch_size in taken
            if not ready:
                assert "cannot run" in error(client.get("/ready"), 503)
        fails = limit < (batch or 1)
        assert ("out of memory" in capsys.readouterr().err) is fails


def test_warm_up_runs_the_configured_batch_size(monkeypatch):
    with make_state(batch_size=3) as state:
        predictor, seen = state.registry.get(None).predictor, []
        monkeypatch.setattr(predictor, "logits", lambda images: seen.append(len(images)))
        with TestClient(make_app(state)):
            wait_for(lambda: state.warm)
        assert seen == [3]


def test_large_counts_keep_all_their_digits():
    with make_state() as state:
        state.metrics.images.inc(123_456_789_012)
        (value,) = re.findall(r"vitrail_pictures_total ([0-9].*)", state.metrics.text().decode())
    assert float(value) == 123_456_789_012


def test_model_without_classes():
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    with make_state({"bare": model}) as state:
        client = TestClient(make_app(state))
        assert client.post("/explain", content=encoded_image(), headers=PNG).status_code == 200
        assert "no classes" in error(
            client.post("/predict", content=encoded_image(), headers=PNG), 422
        )
        assert client.post("/features", content=encoded_image(), headers=PNG).status_code == 200


def test_timeout_cancels_work_that_has_not_started():
    with make_state(limits=Limits(timeout=0.2)) as state:
        client = TestClient(make_app(state))
        with blocked_batcher(state):
            late = client.post("/predict", content=encoded_image(), headers=PNG)
            assert "0.2 s" in error(late, 504)
        wait_for(lambda: not state.batcher.waiting)
        assert metric(state, "vitrail_pictures_total") == 0
        assert state.admission.images == 0
