import json
import re
import socket
import threading

import pytest
import torch
from houses import CLASSES, a_house, held, picture, tiny_model, wait_for
from starlette.testclient import TestClient

import vitrail
from vitrail.errors import ConfigError
from vitrail.prediction.predictor import Predictor
from vitrail.serving.app import make_app
from vitrail.serving.guard import called
from vitrail.serving.meters import Counter
from vitrail.serving.settings import Limits, Settings

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def house():
    models = {"tiny": tiny_model(), "other": tiny_model(seed=1)}
    with a_house(models, limits=Limits(body=50_000, pictures=6, queue=8, pixels=2000)) as house:
        yield house


@pytest.fixture(scope="module")
def client(house):
    with TestClient(make_app(house)) as client:
        yield client


def files(*pictures):
    return [("pictures", (f"{n}.png", data)) for n, data in enumerate(pictures)]


def error(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert list(found) == ["error"]
    assert "\n" not in found["error"]
    return found["error"]


def test_pictures_get_the_answers_that_the_predictor_gives(client):
    pictures = [picture(color, seed=n) for n, color in enumerate(CLASSES)]
    found = client.post("/predict?top=2", files=files(*pictures)).json()
    assert (found["model"], found["engine"]) == ("tiny", "torch")
    assert found["seconds"] > 0
    wanted = Predictor(tiny_model(), device="cpu")(pictures, top=2)
    for n, (got, want) in enumerate(zip(found["answers"], wanted, strict=True)):
        assert got["name"] == f"{n}.png"
        assert (got["label"], got["labels"], got["error"]) == (want.label, [want.label], "")
        assert [g["label"] for g in got["guesses"]] == [g.label for g in want.guesses]
        close = pytest.approx([g.probability for g in want.guesses], abs=1e-5)
        assert [g["probability"] for g in got["guesses"]] == close


def test_a_picture_may_be_the_body(client):
    for headers in (PNG, {"content-type": "application/octet-stream"}, {}):
        response = client.post("/predict", content=picture(), headers=headers)
        assert len(response.json()["answers"]) == 1


def test_an_unreadable_picture_among_many_has_its_error_and_the_rest_an_answer(client):
    answers = client.post("/predict", files=files(picture(), b"no picture")).json()["answers"]
    assert [bool(answer["label"]) for answer in answers] == [True, False]
    assert "not an image" in answers[1]["error"]


def test_if_no_picture_can_be_read_that_is_the_error(client):
    assert "not an image" in error(client.post("/predict", content=b"text", headers=PNG), 422)
    several = client.post("/features", files=files(b"text", b"text"))
    assert error(several, 422).startswith("none of 2 pictures could be read: ")


def test_a_threshold_lets_the_model_abstain(client):
    found = client.post("/predict?threshold=1", content=picture(), headers=PNG).json()
    assert (found["answers"][0]["label"], found["answers"][0]["labels"]) == ("", [])
    assert len(found["answers"][0]["guesses"]) == 3


def test_a_model_is_chosen_by_name(client):
    assert client.get("/models").json() == {"models": ["tiny", "other"]}
    found = client.post("/predict?model=other", content=picture(), headers=PNG).json()
    assert found["model"] == "other"
    assert "did you mean 'other'" in error(client.get("/model?model=othr"), 404)


def test_features_are_the_models_and_a_row_is_missing_where_there_is_no_picture(client, house):
    found = client.post("/features", files=files(picture(), b"text")).json()
    predictor = house.shelf.get("tiny").predictor
    wanted = predictor.vectors(predictor.prepare(picture())[None])[0]
    torch.testing.assert_close(torch.tensor(found["features"][0]), wanted)
    assert found["features"][1] is None
    assert [bool(answer["error"]) for answer in found["answers"]] == [False, True]


def test_a_model_tells_what_it_is_and_nothing_of_the_machine(client):
    found = client.get("/model").json()
    assert found["classes"] == list(CLASSES)
    assert found["image_size"] == [8, 8]
    assert (found["layers"], found["heads"]) == (1, 2)
    assert "relevance" in found["methods"]
    assert found["limits"] == {"bytes": 50_000, "pictures": 6, "pixels": 2000, "seconds": 30.0}
    assert found["teach"] is False
    assert "provenance" not in found


def test_an_explanation_is_a_picture_and_attention_is_numbers(client):
    found = client.post("/explain?class=blue", content=picture(size=(20, 30)), headers=PNG)
    assert found.headers["content-type"] == "image/png"
    assert found.content.startswith(b"\x89PNG")
    assert client.post("/attention", content=picture(), headers=PNG).json()["layers"] == 1
    unknown = client.post("/explain?class=bleu", content=picture(), headers=PNG)
    assert "did you mean 'blue'" in error(unknown, 422)
    assert "method" in error(client.post("/explain?method=x", content=picture(), headers=PNG), 422)
    assert "send one" in error(client.post("/attention", files=files(picture(), picture())), 400)


def test_teaching_is_off_unless_it_is_allowed(client):
    refused = client.post("/teach?name=thumb", files=files(picture()))
    assert "--allow-teach" in error(refused, 403)


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("top=0", 422, "top: "),
        ("top=many", 422, "top: "),
        ("threshold=2", 422, "threshold: "),
        ("threshold=nan", 422, "threshold: "),
        ("model=none", 404, "unknown model 'none'"),
    ],
)
def test_an_impossible_parameter_is_one_line(client, query, status, said):
    refused = client.post(f"/predict?{query}", content=picture(), headers=PNG)
    assert error(refused, status).startswith(said)


def test_what_is_no_picture_by_its_type_is_refused_before_it_is_read(client):
    for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
        refused = client.post("/predict", content=picture(), headers={"content-type": kind})
        assert "curl -F pictures=@" in error(refused, 415)
    packed = client.post("/predict", content=b"x", headers=PNG | {"content-encoding": "gzip"})
    assert "compressed" in error(packed, 415)


def test_bodies_pictures_and_pixels_have_their_limits(client):
    assert "50,000 bytes" in error(client.post("/predict", content=b"x" * 50_001, headers=PNG), 413)
    chunks = client.post("/predict", content=(b"x" * 1000 for _ in range(60)), headers=PNG)
    assert "50,000 bytes" in error(chunks, 413)
    assert "6 pictures" in error(client.post("/predict", files=files(*[picture()] * 7)), 413)
    large = client.post("/predict", content=picture(size=(50, 50)), headers=PNG)
    assert "pixels" in error(large, 422)
    for path in ("/explain", "/attention", "/features"):
        large = client.post(path, content=picture(size=(50, 50)), headers=PNG)
        assert "above the limit of 2,000 pixels" in error(large, 422)
    assert "no picture in the request" in error(client.post("/predict", headers=PNG), 400)
    assert "no picture in the request" in error(client.post("/predict", files={"x": b"y"}), 400)


def test_nothing_else_is_there_and_that_is_said(client):
    assert "/docs" in error(client.get("/etc/passwd"), 404)
    assert "/docs" in error(client.get("/predict/"), 404)
    refused = client.get("/predict")
    error(refused, 405)
    assert refused.headers["allow"] == "POST"


def test_every_answer_carries_the_headers_that_protect(client):
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


def test_pages_of_other_sites_may_not_post(client):
    headers = PNG | {"origin": "https://elsewhere.example"}
    assert "--allow-origin" in error(client.post("/predict", content=b"x", headers=headers), 403)
    headers = PNG | {"sec-fetch-site": "cross-site"}
    error(client.post("/teach?name=x", content=b"x", headers=headers), 403)
    own = PNG | {"origin": "http://testserver", "sec-fetch-site": "same-origin"}
    assert client.post("/predict", content=picture(), headers=own).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "evil.example", "127.0.0.1.evil.example"])
def test_a_page_that_lets_its_name_mean_this_machine_gets_nothing(host):
    with a_house(hosts=(), teach=True) as house:
        client = TestClient(make_app(house), base_url="http://127.0.0.1:8000")
        headers = {"host": host}  # which a browser fills in, and the page's origin with it
        for path in ("/", "/docs", "/openapi.json", "/health", "/models", "/examples/0"):
            assert "--allow-host" in error(client.get(path, headers=headers), 403)
        headers |= PNG | {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        for path in ("/predict", "/teach?name=x"):
            error(client.post(path, content=picture(), headers=headers), 403)
        assert 'rejected_total{reason="host"} 8' in client.get("/metrics").text


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.5:80", "proxy.org"],
)
def test_a_server_answers_to_its_own_names_and_to_those_it_was_given(host):
    with a_house(host="127.0.0.5", hosts=("Proxy.org",)) as house:
        client = TestClient(make_app(house))
        assert client.get("/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_with_a_token_any_host_name_is_accepted(host):
    with a_house(hosts=(), host=host, token="s3cret") as house:
        headers = {"host": "evil.example", "authorization": "Bearer s3cret"}
        assert TestClient(make_app(house)).get("/models", headers=headers).status_code == 200


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
def test_an_open_server_accepts_addresses_and_known_names_only(bound, host, status):
    with a_house(hosts=("proxy.org",), host=bound) as house:
        client = TestClient(make_app(house))
        for path in ("/models", "/health", "/"):
            assert client.get(path, headers={"host": host}).status_code == status


def test_who_does_not_say_a_name_is_no_browser():
    assert called({}) == "localhost"


@pytest.mark.parametrize("name", ["http://example.org", "example.org:80", "a b", ""])
def test_a_name_is_that_of_a_machine(name):
    with pytest.raises(ConfigError, match=r"such as example\.org, without http:// and port"):
        Settings(hosts=(name,))
    Settings(hosts=("example.org", "::1", "192.168.0.1"))


def test_a_page_that_is_allowed_may_ask():
    with a_house(origins=("https://friend.example",)) as house:
        client = TestClient(make_app(house))
        headers = PNG | {"origin": "https://friend.example"}
        answer = client.post("/predict", content=picture(), headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://friend.example"
        ask = {"origin": "https://friend.example", "access-control-request-method": "POST"}
        assert client.options("/predict", headers=ask).status_code == 200
        ask["origin"] = "https://foe.example"
        assert client.options("/predict", headers=ask).status_code == 400
        foe = client.post("/predict", content=picture(), headers=PNG | {"origin": ask["origin"]})
        assert foe.status_code == 403


def test_a_token_is_asked_for_everywhere_but_where_it_is_told_that_it_lives():
    with a_house(token="s3cret") as house:
        client = TestClient(make_app(house))
        for path in ("/model", "/models", "/examples", "/metrics"):
            refused = client.get(path)
            assert "Bearer" in error(refused, 401)
            assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
        for shown in ("Bearer wrong", "Bearer", "Basic s3cret", "s3cret", "Bearer s3crét"):
            headers = {"authorization": shown.encode()}
            assert client.get("/model", headers=headers).status_code == 401
        told = client.get("/openapi.json").json()
        assert told["security"] == [{"token": []}]
        assert told["paths"]["/health"]["get"]["security"] == []
        assert "security" not in told["paths"]["/predict"]["post"]
        right = PNG | {"authorization": "bearer s3cret"}
        assert client.post("/predict", content=picture(), headers=right).status_code == 200


def test_a_request_has_an_id_and_may_bring_its_own_if_it_is_plain(client):
    given = client.get("/health", headers={"x-request-id": "my-id.7"})
    assert given.headers["x-request-id"] == "my-id.7"
    for odd in ("x" * 65, 'a"b', "a b", ""):
        own = client.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{8}-\d+", own)


def test_numbers_are_told_as_prometheus_reads_them(client):
    client.post("/predict", files=files(picture(), b"text"))
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
    memory = re.search(r"process_resident_memory_bytes (\d+)", text)
    assert float(memory[1]) > 1e7


def test_the_log_tells_what_happened_and_never_what_was_sent(capsys):
    with a_house() as house:
        object.__setattr__(house.settings, "log", "json")
        client = TestClient(make_app(house))
        secret = [("pictures", ("secret-name.png", picture()))]
        client.post("/predict?model=tiny", files=secret, headers={"authorization": "Bearer s3"})
        client.post("/predict", content=b"secret text", headers=PNG)
        lines = capsys.readouterr().err.splitlines()
        object.__setattr__(house.settings, "log", "text")
        client.get("/health")
        assert "GET /health" in capsys.readouterr().err
    first, second = map(json.loads, lines)
    assert first["route"] == "/predict"
    assert (first["status"], first["pictures"], first["batch"]) == (200, 1, 1)
    assert first["bytes"] > len(picture())
    assert first["ms"] > 0
    assert second["status"] == 422
    assert "secret" not in "".join(lines)
    assert "s3" not in "".join(lines)


def test_a_fault_of_ours_is_500_in_one_line_and_told_whole_in_the_log(capsys, monkeypatch):
    with a_house() as house:
        predictor = house.shelf.get("tiny").predictor
        monkeypatch.setattr(predictor, "logits", lambda images: 1 / 0)
        client = TestClient(make_app(house))
        refused = client.post("/predict", content=picture(), headers=PNG)
        assert error(refused, 500) == "something went wrong on the server"
        assert "ZeroDivisionError" in capsys.readouterr().err
        monkeypatch.undo()
        assert client.post("/predict", content=picture(), headers=PNG).status_code == 200
    assert house.room.pictures == house.room.bytes == house.in_flight == 0


def test_a_fault_with_one_picture_is_only_its_own(monkeypatch):
    with a_house() as house:
        served = house.shelf.get("tiny")
        prepare = served.predictor.prepare

        def prepared(data):
            return prepare(data) if data.startswith(b"\x89PNG") else 1 / 0

        monkeypatch.setattr(served.predictor, "prepare", prepared)
        client = TestClient(make_app(house))
        found = {}

        def ask(name, data):
            found[name] = client.post("/predict", content=data, headers=PNG).status_code

        with held(house) as gate:
            threads = [
                threading.Thread(target=ask, args=(name, data))
                for name, data in {"good": picture(), "bad": b"x"}.items()
            ]
            for thread in threads:
                thread.start()
            wait_for(lambda: len(house.batcher.waiting) == 2)
            gate.open.set()
            for thread in threads:
                thread.join()
        assert found == {"good": 200, "bad": 500}


def test_it_is_ready_when_it_is_warm_and_not_when_it_stops(house):
    with a_house(batch=0) as cold:
        app = make_app(cold)
        client = TestClient(app)
        assert "warming" in error(client.get("/ready"), 503)
        assert client.get("/health").json() == {"status": "alive"}
        with TestClient(app) as client:
            wait_for(lambda: client.get("/ready").status_code == 200)
            assert cold.shelf.get(None).batch in (1, 2, 4, 8, 16, 32)
            cold.draining = True
            assert "stopping" in error(client.get("/ready"), 503)
            refused = client.post("/predict", content=picture(), headers=PNG)
            assert "stopping" in error(refused, 503)
            assert refused.headers["connection"] == "close"
            assert client.get("/health").status_code == 200


def failing_above(predictor, most):
    """The logits of a predictor that has memory for so many pictures."""
    logits = predictor.logits

    def limited(images):
        if len(images) > most:
            raise RuntimeError("out of memory")
        return logits(images)

    return limited


@pytest.mark.parametrize(
    ("batch", "most", "ready", "taken"),
    [(0, 2, True, (1, 2)), (16, 99, True, (16,)), (16, 2, True, (8,)), (0, 0, False, (8,))],
)
def test_it_becomes_ready_with_what_it_has_memory_for(
    monkeypatch, capsys, batch, most, ready, taken
):
    with a_house(batch=batch) as house:
        served = house.shelf.get(None)
        monkeypatch.setattr(served.predictor, "logits", failing_above(served.predictor, most))
        with TestClient(make_app(house)) as client:
            wait_for(lambda: house.warm or house.unable)
            assert house.warm is ready
            assert served.batch in taken
            if not ready:
                assert "cannot answer" in error(client.get("/ready"), 503)
        fails = most < (batch or 1)
        assert ("out of memory" in capsys.readouterr().err) is fails


def test_a_model_is_run_before_it_is_ready_even_if_its_batch_is_set(monkeypatch):
    with a_house(batch=3) as house:
        predictor, seen = house.shelf.get(None).predictor, []
        monkeypatch.setattr(predictor, "logits", lambda images: seen.append(len(images)))
        with TestClient(make_app(house)):
            wait_for(lambda: house.warm)
        assert seen == [3]


def test_large_counts_keep_all_their_digits():
    counter = Counter("pictures", "Pictures.")
    counter.add(amount=123_456_789_012)
    assert list(counter.lines()) == ["pictures 123456789012"]


def test_a_model_without_classes_tells_so():
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    with a_house({"bare": model}) as house:
        client = TestClient(make_app(house))
        assert client.post("/explain", content=picture(), headers=PNG).status_code == 200
        assert "no classes" in error(client.post("/predict", content=picture(), headers=PNG), 422)
        assert client.post("/features", content=picture(), headers=PNG).status_code == 200


def test_what_takes_too_long_is_given_up_and_not_begun_later():
    with a_house(limits=Limits(timeout=0.2)) as house:
        client = TestClient(make_app(house))
        with held(house):
            late = client.post("/predict", content=picture(), headers=PNG)
            assert "0.2 s" in error(late, 504)
        wait_for(lambda: not house.batcher.waiting)
        assert "vitrail_pictures_total 0" in house.meters.text()
        assert house.room.pictures == 0
