"""Attacks by requests; docs/security.md lists these and those of other tests."""

import re

import pytest
from raw_client import exchange
from serving_helpers import encoded_image, is_idle, make_client, make_state, post, wait_for

PNG = encoded_image()
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
HIDDEN = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"  # smuggled behind another request
CLOSE = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
        HEAD + b"Content-Length: +5\r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length: 0x5\r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length: -1\r\n\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length : 5\r\n\r\n" + HIDDEN,
    ],
)
def test_requests_cannot_be_smuggled(state, port, request_bytes):
    reply = exchange(port, request_bytes, CLOSE)
    assert b"vitrail_requests_total" not in reply
    assert b" 5" not in {line[8:10] for line in reply.splitlines() if line.startswith(b"HTTP/1.1")}
    wait_for(lambda: is_idle(state))
    assert b"vitrail_requests_total" in exchange(port, HIDDEN, CLOSE)  # as a request of its own


def test_body_behind_an_upgrade_is_no_request(state, port):
    """The parser skips it."""
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    for kind in (b"Content-Length: 1\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
        reply = exchange(port, HEAD + upgrade + kind)
        assert reply.startswith(b"HTTP/1.1 400")
        assert b"Upgrade is not supported" in reply
        assert b"vitrail_requests_total" not in exchange(port, HEAD + upgrade + kind, HIDDEN)
    without_body = CLOSE.replace(b"Connection: close\r\n", upgrade)
    assert exchange(port, without_body).startswith(b"HTTP/1.1 200")
    assert b"vitrail_requests_total" not in exchange(port, without_body, HIDDEN)
    wait_for(lambda: is_idle(state))


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"b" * 100_000 + b": 1\r\n\r\n",
        b"GET /models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET http://evil.example/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    ],
)
def test_oversized_heads_and_foreign_hosts_are_rejected(state, port, request_bytes):
    status = int(exchange(port, request_bytes, CLOSE)[9:12])
    assert 400 <= status < 500
    wait_for(lambda: is_idle(state))


@pytest.mark.parametrize(
    "path",
    [
        *("/examples/../../etc/passwd", "/examples/..%2f..%2fetc%2fpasswd", "/examples/%2e%2e"),
        *("/examples//etc/passwd", "/examples/-1", "/examples/0%00", "/examples/1e9"),
        "/examples/٣",
        *("//etc/passwd", "/\\etc\\passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/page.js"),
    ],
)
def test_paths_never_reach_the_file_system(state, path):
    response = make_client(state).get(path)
    assert response.status_code == 404
    assert "root:" not in response.text


@pytest.mark.parametrize(
    "query",
    [
        "top=" + "9" * 5000,
        "top=1e400",
        "top=1&top=999999999",
        "threshold=" + "9" * 5000,
        "threshold=inf",
        "model=" + "../" * 1000,
        "model=%00%0d%0aSet-Cookie:x=1",
        "&".join(f"a{number}=1" for number in range(2000)),
    ],
)
def test_query_values_are_bounded_and_not_echoed_as_headers(state, query):
    response = post(make_client(state), f"/predict?{query}")
    assert response.status_code in (200, 404, 422)
    assert "set-cookie" not in response.headers
    assert len(response.text) < 1000


def test_names_of_a_client_are_text_in_responses_and_absent_from_the_log(capsys):
    name = 'a"><script>alert(1)</script>\x1b[2J../../etc/passwd'
    with make_state(log="text") as state:
        client = make_client(state)
        headers = {"x-request-id": "1 200 POST /admin", "user-agent": name[:5]}
        response = client.post("/predict", files=[("pictures", (name, PNG))], headers=headers)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert re.fullmatch(r"[\w.-]+", response.headers["x-request-id"])
    log = capsys.readouterr().err
    assert "script" not in log
    assert "admin" not in log
    assert log.count("\n") == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "null"},
        {"origin": "https://testserver.evil.example"},
        {"origin": "https://evil.example", "content-type": "multipart/form-data; boundary=x"},
        {"origin": "http://testserver:81"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_foreign_pages_cannot_teach(headers):
    with make_state(allow_teach=True) as state:
        client = make_client(state)
        before = state.registry.get(None)
        response = post(client, "/teach?name=evil", headers=headers)
        assert response.status_code == 403
        assert "cross-origin" in response.text
        assert client.get("/teach?name=evil").status_code == 405
        preflight = {"access-control-request-method": "POST", **headers}
        assert (
            "access-control-allow-origin" not in client.options("/teach", headers=preflight).headers
        )
        assert state.registry.get(None) is before
