import asyncio
import itertools
import json
import random
import signal
import socket
import sys
import threading
import time

import pytest
from raw_client import closed_loop, connect, exchange, form, get, head, malformed, raw, run
from serving_helpers import (
    ClosedTerminal,
    blocked_batcher,
    encoded_image,
    is_idle,
    metric,
    served,
    wait_for,
)

from vitrail.serving import limits, protocol
from vitrail.serving.app import json_response
from vitrail.serving.schemas import FeaturesResponse, StatusResponse

pytestmark = pytest.mark.slow

PNG = encoded_image()
PREDICT = raw("/predict", PNG, "image/png")
CHUNKED = (
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CHUNKED_PREDICT = CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(PNG), PNG)


# Batches and overload


def test_requests_with_different_options_share_a_batch(state, port):
    options = {"top=1": (1, True), "top=2": (2, True), "top=3&threshold=1": (3, False)}
    requests = [raw(f"/predict?{query}", PNG) for query in (*options, *options)]
    model, before = state.registry.get(None), metric(state, "vitrail_batch_pictures_count")

    async def scenario(gate):
        tasks = [asyncio.create_task((await connect(port)).send(one)) for one in requests]
        await asyncio.to_thread(wait_for, lambda: len(state.batcher.waiting) == 6)
        gate.open.set()
        return [json.loads((await task).body)["answers"][0] for task in tasks]

    model.batch_size, usual = 6, model.batch_size
    with blocked_batcher(state) as gate:
        answers = run(scenario(gate))
    model.batch_size = usual
    assert metric(state, "vitrail_batch_pictures_count") == before + 2  # the blocker, and all
    for answer, expected in zip(answers, [*options.values()] * 2, strict=True):
        assert (len(answer["guesses"]), bool(answer["label"])) == expected


def test_full_queue_is_503_with_retry_after():
    several = form("/predict", [PNG] * 3)
    with served(queue=6, max_images=4) as (state, _, port), blocked_batcher(state) as gate:

        async def scenario():
            waiting = [asyncio.create_task((await connect(port)).send(PREDICT)) for _ in range(6)]
            await asyncio.to_thread(wait_for, lambda: state.admission.images == 6)
            # answered while the gate is closed: at once
            rejected = await closed_loop(port, [PREDICT, several], clients=2)
            state.admission.images -= 1  # one slot is free: one image fits, three do not
            rejected.replies += (await closed_loop(port, [several], clients=1)).replies
            state.admission.images += 1
            gate.open.set()
            return rejected, await asyncio.gather(*waiting)

        rejected, answered = run(scenario())
        assert rejected.counts() == {503: 3}
        for reply in rejected.replies:
            assert b"retry-after: " in reply.head
            assert b"try again in" in reply.body
        assert [reply.status for reply in answered] == [200] * 6  # admitted requests are answered
        assert run(closed_loop(port, [PREDICT] * 20, clients=4)).counts() == {200: 20}
        assert metric(state, "vitrail_rejected_total", reason="queue") == 3


def test_heavy_requests_are_limited(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HEAVY", 2)
    request = raw("/explain", encoded_image(size=(32, 32)), "image/png")
    with served() as (state, _, port), blocked_batcher(state) as gate:

        async def scenario():
            links = [await connect(port) for _ in range(3)]
            waiting = [asyncio.create_task(link.send(request)) for link in links[:2]]
            await asyncio.to_thread(wait_for, lambda: state.admission.heavy == 2)
            rejected = await links[2].send(request)
            answer = asyncio.create_task(links[2].send(PREDICT))  # others are still admitted
            await asyncio.to_thread(wait_for, lambda: len(state.batcher.waiting) == 3)
            gate.open.set()
            return rejected.status, [(await task).status for task in (*waiting, answer)]

        assert run(scenario()) == (503, [200, 200, 200])


def test_garbage_is_4xx_and_leaves_nothing_behind(state, port):
    good = [raw("/predict", encoded_image(color, (40, 40), "JPEG")) for color in ("red", "blue")]
    bad = itertools.islice(malformed(good, random.Random(3)), 120)
    mixed = [request for one in bad for request in (one, *good)]
    counts = run(closed_loop(port, mixed, clients=8)).counts()
    assert sum(counts.values()) == 360
    assert counts[200] >= 240
    assert {200, 400, 413, 415, 422} <= counts.keys() <= {200, 400, 404, 413, 415, 422}
    wait_for(lambda: is_idle(state))


def test_large_responses_are_serialized_in_a_thread():
    threads, response = [], StatusResponse(status="")

    async def scenario():
        for size in (10, 10_000):
            await json_response(lambda: threads.append(threading.get_ident()) or response, size)

    asyncio.run(scenario())
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


# Slow and absent clients


def test_rejected_body_is_discarded_and_the_response_arrives(monkeypatch):
    """The client still sends when it is rejected; it reads an answer, not a broken connection."""
    monkeypatch.setattr(limits, "DRAIN_SECONDS", 0.3)
    with served(max_megabytes=1) as (state, _, port):
        reply = exchange(port, head("/predict", 5 * 2**20, "image/png"), b"x" * 2**20)
        assert reply.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in reply
        assert b"RESET" not in reply
        endless = exchange(port, CHUNKED, *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 20)
        assert endless.startswith(b"HTTP/1.1 413 ")
        assert state.admission.bytes == 0


def test_slow_upload_is_408():
    with served(timeout=0.3) as (state, _, port):
        start = time.monotonic()
        reply = exchange(port, head("/predict", 1000, "image/png"), b"only this")
        assert time.monotonic() - start < 30  # the connection is closed
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.3 s" in reply
        assert is_idle(state)


def test_endless_head_closes_the_connection(port, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    start = time.monotonic()
    assert exchange(port) == b""  # nothing sent
    assert exchange(port, b"GET / HTTP/1.1\r\nhost: localhost\r\n") == b""
    assert time.monotonic() - start < 30
    endless = exchange(port, b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 9000 + b"\r\n"] * 20)
    assert endless.startswith(b"HTTP/1.1 431 ") or endless == b"RESET"


@pytest.mark.parametrize("rest", [b"only this", b"x" * 1000])
def test_rest_of_a_rejected_body_must_arrive_soon(port, monkeypatch, rest):
    """Too little of it arrives, or all and nothing after it."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 1.0)  # for a busy client to send the rest
    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        link.sendall(head("/predict", 1000, "text/plain"))
        reply = link.recv(9999)
        assert reply.startswith(b"HTTP/1.1 415 ")
        link.sendall(rest)
        while data := link.recv(9999):  # until it is closed
            reply += data
        assert reply.count(b"HTTP/1.1") == 1


@pytest.fixture
def long_response(monkeypatch):
    """A response larger than the socket buffers."""
    body = random.Random(0).randbytes(2**23).hex()
    monkeypatch.setattr(FeaturesResponse, "model_dump_json", lambda _: body)
    return body.encode()


def test_client_that_does_not_read_is_disconnected(long_response, monkeypatch):
    monkeypatch.setattr(protocol, "SEND_SECONDS", 0.6)
    with served() as (state, server, port), socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(("127.0.0.1", port))
        start = time.monotonic()
        link.sendall(raw("/features", PNG, "image/png"))
        wait_for(lambda: metric(state, "vitrail_pictures_total") == 1)
        wait_for(lambda: state.admission.images == 0)
        assert time.monotonic() - start > 0.6  # reserved while the response is in memory
        wait_for(lambda: not server.server_state.connections)
        assert is_idle(state)


def test_slow_reader_gets_the_whole_response(long_response):
    with (
        served() as (_, server, port),
        socket.create_connection(("127.0.0.1", port), timeout=30) as link,
    ):
        link.sendall(raw("/features", PNG, "image/png"))
        wait_for(lambda: any(one.abort_timer for one in server.server_state.connections))
        reply = b""
        while not reply.endswith(long_response[-8:]):
            reply += link.recv(2**20)
        assert reply.partition(b"\r\n\r\n")[2] == long_response
        wait_for(lambda: not any(one.abort_timer for one in server.server_state.connections))
        link.sendall(get("/health"))  # no abort timer is left
        assert link.recv(9999).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [20, -1, None])
def test_disconnected_client_leaves_nothing_behind(sent):
    """In the head, within the body, or while waiting for the response."""
    with served() as (state, _, port), blocked_batcher(state) as gate:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(PREDICT[:sent])
                wait_for(lambda: state.admission.images > 0 or sent == 20)
                time.sleep(0.02)
        wait_for(lambda: state.admission.images == state.in_flight == 0)
        gate.open.set()
        assert run(closed_loop(port, [PREDICT] * 8, clients=2)).counts() == {200: 8}
        assert metric(state, "vitrail_pictures_total") == 8  # none that was canceled
        if sent != 20:
            labels = {"route": "/predict", "status": "499"}
            assert metric(state, "vitrail_requests_total", **labels) == 5
        assert state.admission.bytes == 0


def test_drain_finishes_although_the_terminal_is_closed(monkeypatch):
    with served(log="text") as (state, server, port), blocked_batcher(state) as gate:

        async def scenario():
            answer = asyncio.create_task((await connect(port)).send(PREDICT))
            await asyncio.to_thread(wait_for, lambda: state.admission.images == 1)
            monkeypatch.setattr(sys, "stderr", ClosedTerminal())
            server.handle_exit(signal.SIGHUP, None)
            await asyncio.to_thread(wait_for, lambda: not server.servers[0].is_serving())
            gate.open.set()
            return (await answer).status

        assert run(scenario()) == 200


# HTTP


def test_connection_stays_usable(port):
    """After trailers, a body larger than a head may be, and a rejected body; invalid HTTP is 400,
    and a client without a Host header is accepted."""
    reply = exchange(port, b"hello, is this a server?\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.endswith(b'{"error":"not a valid HTTP request"}')
    trailers = CHUNKED_PREDICT + b"checksum: 7\r\n\r\n"
    large = raw("/predict", encoded_image(size=(300, 300)), "image/png")
    assert len(large) > protocol.MAX_HEAD
    rejected = raw("/predict", b"x" * 1000, "text/plain")
    for request, status in ((trailers, b"200"), (large, b"200"), (rejected, b"415")):
        first, second = exchange(port, request, get("/health"), replies=2).split(b"HTTP/1.1 ")[1:]
        assert (first[:3], second[:3]) == (status, b"200")
    assert exchange(port, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_trailers_are_limited_like_headers(state, port):
    for trailer in (b"a: " + b"b" * 60_000, b"a: b\r\n" * 10_000):
        reply = exchange(port, CHUNKED_PREDICT, *[trailer] * 400)
        assert reply.startswith(b"HTTP/1.1 431 ") or reply == b"RESET"
    wait_for(lambda: is_idle(state))


def test_pipelined_requests_are_limited_and_trailers_are_not_headers():
    """The first of thousands are answered in order, then the connection is closed."""
    most = protocol.MAX_PIPELINED
    with served(token="secret") as (_, server, port):
        reply = exchange(port, get("/models") * 14_000)
        assert most <= reply.count(b"HTTP/1.1 401 ") <= 2 * most
        assert reply.count(b"connection: close") == 1
        assert server.server_state.total_requests <= 2 * most
        few = exchange(port, get("/health") * most, replies=most)
        assert few.count(b"HTTP/1.1 200 ") == most
        trailers = b"authorization: Bearer secret\r\nx-request-id: trailer\r\n\r\n"
        reply = exchange(port, CHUNKED_PREDICT + trailers, replies=1)
        assert reply.startswith(b"HTTP/1.1 401 ")
        assert b"x-request-id: trailer" not in reply


def test_invalid_pipelined_request_does_not_get_the_pending_response(state, port):
    with blocked_batcher(state):
        assert b"HTTP" not in exchange(port, PREDICT + b"\x01 no request\r\n\r\n", wait=2)


def test_connections_are_limited(port, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 3)

    async def scenario():
        links = [await connect(port) for _ in range(3)]
        rejected = await asyncio.to_thread(exchange, port)
        return rejected, [(await link.send(get("/health"))).status for link in links]

    rejected, answered = run(scenario())
    assert rejected.startswith(b"HTTP/1.1 503 ")
    assert answered == [200, 200, 200]
