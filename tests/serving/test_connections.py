"""What only a real connection can show: slow, broken and vanished clients, overload, the end."""

import asyncio
import itertools
import json
import random
import signal
import socket
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest
from load_server import broken
from raw_client import closed_loop, connect, form, get, head, raw, run
from serving_helpers import (
    Gate,
    blocked_batcher,
    encoded_image,
    make_state,
    running_server,
    server_port,
    wait_for,
)

from vitrail.serving import limits, protocol
from vitrail.serving.app import json_response
from vitrail.serving.config import Limits
from vitrail.serving.schemas import FeaturesResponse, StatusResponse

PREDICT = raw("/predict", encoded_image(), "image/png")


def ask(port, *pieces, wait=10.0):
    """All that comes back for raw bytes, until the server hangs up or `wait` is over."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as link:
        with suppress(ConnectionError):
            for piece in pieces:
                link.sendall(piece)
        found = b""
        try:
            while data := link.recv(65536):
                found += data
        except TimeoutError:
            return found
        except ConnectionResetError:
            return found + b"RESET"
        return found


def test_many_clients_are_answered_and_share_batches():
    with make_state(batch_size=8) as state, server_port(state) as port:
        found = run(closed_loop(port, [PREDICT] * 200, clients=16))
        assert found.counts() == {200: 200}
        batches = state.metrics.value("vitrail_batch_pictures_count")
        single = state.metrics.value("vitrail_batch_pictures_bucket", le="1.0")
        assert batches > single
        assert state.admission.images == state.admission.bytes == state.in_flight == 0


def test_when_the_queue_is_full_others_are_told_at_once_when_to_come_again():
    limits = Limits(queue=6, images=4)
    with (
        make_state(limits=limits) as state,
        server_port(state) as port,
        blocked_batcher(state) as gate,
    ):

        async def story():
            waiting = [asyncio.create_task((await connect(port)).ask(PREDICT)) for _ in range(6)]
            await asyncio.to_thread(wait_for, lambda: state.admission.is_full)
            refused = await closed_loop(  # answered while the gate is closed: at once
                port, [PREDICT, form("/predict", [encoded_image()] * 3)], clients=2
            )
            state.admission.images -= 1  # a place is free: one picture fits, three do not
            refused.replies += (
                await closed_loop(port, [form("/predict", [encoded_image()] * 3)], clients=1)
            ).replies
            state.admission.images += 1
            gate.open.set()
            return refused, await asyncio.gather(*waiting)

        refused, answered = run(story())
        assert refused.counts() == {503: 3}
        for reply in refused.replies:
            assert b"retry-after: " in reply.head
            assert b"try again in" in reply.body
        assert [reply.status for reply in answered] == [200] * 6  # who was let in is answered
        recovered = run(closed_loop(port, [PREDICT] * 20, clients=4))
        assert recovered.counts() == {200: 20}
        assert state.metrics.value("vitrail_rejected_total", reason="queue") == 3


def test_a_refused_body_is_not_held_in_memory_and_the_answer_arrives(monkeypatch):
    """The client still sends when it is refused; it reads an answer, not a broken connection."""
    monkeypatch.setattr(limits, "DRAIN_SECONDS", 0.3)
    with make_state(limits=Limits(body=2**20)) as state, server_port(state) as port:
        begun = head("/predict", 5 * 2**20, "image/png")
        found = ask(port, begun, b"x" * 2**20)
        assert found.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in found
        assert b"RESET" not in found
        chunked = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        endless = ask(port, chunked, *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 20)
        assert endless.startswith(b"HTTP/1.1 413 ")
        assert state.admission.bytes == 0


def test_a_small_body_that_is_refused_unread_leaves_the_connection_usable():
    with make_state() as state, server_port(state) as port:

        async def story():
            link = await connect(port)
            first = await link.ask(raw("/predict", b"x" * 1000, "text/plain"))
            return first.status, (await link.ask(PREDICT)).status

        assert run(story()) == (415, 200)


def test_an_upload_that_is_too_slow_is_ended():
    with make_state(limits=Limits(timeout=0.3)) as state, server_port(state) as port:
        begun = time.monotonic()
        found = ask(port, head("/predict", 1000, "image/png"), b"only this", wait=30)
        assert time.monotonic() - begun < 30  # the connection is closed
        assert found.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.3 s" in found
        assert state.admission.images == state.admission.bytes == 0


def test_a_request_whose_head_never_ends_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with make_state() as state, server_port(state) as port:
        begun = time.monotonic()
        assert ask(port, wait=30) == b""  # not a word
        assert ask(port, b"GET / HTTP/1.1\r\nhost: localhost\r\n", wait=30) == b""
        assert time.monotonic() - begun < 30
        endless = ask(port, b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 9000 + b"\r\n"] * 20)
        assert endless.startswith(b"HTTP/1.1 431 ") or endless == b"RESET"


@pytest.fixture
def long_answer(monkeypatch):
    """More than the system keeps for a client that does not read."""
    body = b"".join(b"%08d" % n for n in range(2**21))
    monkeypatch.setattr(FeaturesResponse, "model_dump_json", lambda _: body.decode())
    return body


def test_who_does_not_read_the_answer_holds_a_place_and_is_hung_up_on(long_answer, monkeypatch):
    monkeypatch.setattr(protocol, "SEND_SECONDS", 0.6)
    with make_state() as state, running_server(state) as (server, port), socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(("127.0.0.1", port))
        begun = time.monotonic()
        link.sendall(raw("/features", encoded_image(), "image/png"))
        wait_for(lambda: state.metrics.value("vitrail_pictures_total") == 1)
        wait_for(lambda: state.admission.images == 0)
        assert time.monotonic() - begun > 0.6  # the answer was in memory until then
        wait_for(lambda: not server.server_state.connections)
        assert state.admission.bytes == state.in_flight == 0


def test_who_reads_slowly_but_in_time_gets_all_of_a_long_answer(long_answer):
    with (
        make_state() as state,
        running_server(state) as (server, port),
        socket.create_connection(("127.0.0.1", port), timeout=30) as link,
    ):
        link.sendall(raw("/features", encoded_image(), "image/png"))
        wait_for(lambda: any(one.abort_timer for one in server.server_state.connections))
        found = b""
        while not found.endswith(long_answer[-8:]):
            found += link.recv(2**20)
        assert found.partition(b"\r\n\r\n")[2] == long_answer
        wait_for(lambda: not any(one.abort_timer for one in server.server_state.connections))
        link.sendall(get("/health"))  # nothing will break it off
        assert link.recv(9999).startswith(b"HTTP/1.1 200 ")


def test_to_hang_up_does_not_wait_for_ever_for_a_client_that_does_not_read(monkeypatch):
    monkeypatch.setattr(protocol, "SEND_SECONDS", 0.01)

    async def story(end):
        link = object.__new__(protocol.LimitedProtocol)
        link.loop, link.transport = asyncio.get_running_loop(), Mock()
        getattr(link, end)()
        link.transport.close.assert_called_once()
        await asyncio.sleep(0.05)
        link.transport.abort.assert_called_once()

    for end in ("close", "timeout_keep_alive_handler"):
        asyncio.run(story(end))


def test_the_rest_of_a_refused_body_must_come_soon(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 1.0)  # for a busy client to send the rest
    with make_state() as state, server_port(state) as port:
        for rest in (b"only this", b"x" * 1000):  # too little, or all and nothing after it
            with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
                link.sendall(head("/predict", 1000, "text/plain"))
                assert link.recv(9999).startswith(b"HTTP/1.1 415 ")
                link.sendall(rest)
                assert link.recv(9999) == b""  # it hung up


def test_what_is_no_http_is_told_so_as_json():
    with make_state() as state, server_port(state) as port:
        found = ask(port, b"hello, is this a server?\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 400 ")
        assert found.endswith(b'{"error":"not a valid HTTP request"}')


CHUNKED = (
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
    b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(encoded_image()), encoded_image())
)


def test_trailers_do_not_pass_for_headers():
    with make_state(token="secret") as state, server_port(state) as port:
        trailers = b"authorization: Bearer secret\r\nx-request-id: trailer\r\n\r\n"
        reply = ask(port, CHUNKED + trailers, wait=1)
        assert reply.startswith(b"HTTP/1.1 401 ")
        assert b"x-request-id: trailer" not in reply


def test_trailers_are_dropped_and_the_connection_stays_usable():
    with make_state() as state, server_port(state) as port:
        reply = ask(port, CHUNKED + b"checksum: 7\r\n\r\n", get("/health"), wait=1)
        assert reply.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("trailer", [b"a: " + b"b" * 60_000, b"a: b\r\n" * 10_000])
def test_trailers_are_limited_like_headers(trailer):
    with make_state() as state, server_port(state) as port:
        begun = time.monotonic()
        reply = ask(port, CHUNKED, *[trailer] * 400)
        assert reply.startswith(b"HTTP/1.1 431 ") or reply == b"RESET"
        assert time.monotonic() - begun < 5
        wait_for(lambda: state.admission.images == state.admission.bytes == state.in_flight == 0)


def test_a_large_body_before_a_pipelined_request_does_not_count_as_its_head():
    with make_state() as state, server_port(state) as port:
        large = raw("/predict", encoded_image(size=(300, 300)), "image/png")
        assert len(large) > protocol.MAX_HEAD
        assert ask(port, large + get("/health"), wait=2).count(b"HTTP/1.1 200 ") == 2


def test_pipelined_requests_are_limited():
    """One read may hold thousands; the first are answered in order, then the server hangs up."""
    most = protocol.MAX_PIPELINED
    with make_state(token="secret") as state, running_server(state) as (server, port):
        reply = ask(port, get("/models") * 14_000)
        assert most <= reply.count(b"HTTP/1.1 401 ") <= 2 * most
        assert reply.count(b"connection: close") == 1
        assert server.server_state.total_requests <= 2 * most
        few = ask(port, get("/health") * most, wait=1)
        assert few.count(b"HTTP/1.1 200 ") == most


def test_a_broken_request_behind_a_pending_one_does_not_get_its_answer():
    with make_state() as state, server_port(state) as port, blocked_batcher(state):
        assert b"HTTP" not in ask(port, PREDICT + b"\x01 no request\r\n\r\n", wait=2)


def test_more_connections_than_there_are_places_for_are_refused(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 3)
    with make_state() as state, server_port(state) as port:

        async def story():
            links = [await connect(port) for _ in range(3)]
            refused = await asyncio.to_thread(ask, port)
            return refused, [(await link.ask(get("/health"))).status for link in links]

        refused, answered = run(story())
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert answered == [200, 200, 200]


@pytest.mark.parametrize("sent", [0.0, 0.5, 1.0])
def test_a_client_that_vanishes_harms_nobody(sent):
    """In its head, in the middle of its body, or while it waits for its answer."""
    with make_state() as state, server_port(state) as port, blocked_batcher(state) as gate:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(PREDICT[: 20 if not sent else -1 if sent < 1 else None])
                wait_for(lambda: state.admission.images > 0 or not sent)
                time.sleep(0.02)
        wait_for(lambda: state.admission.images == state.in_flight == 0)
        gate.open.set()
        assert run(closed_loop(port, [PREDICT] * 8, clients=2)).counts() == {200: 8}
        assert state.metrics.value("vitrail_pictures_total") == 8  # none that was canceled
        if sent:
            labels = {"route": "/predict", "status": "499"}
            assert state.metrics.value("vitrail_requests_total", **labels) == 5
        assert state.admission.bytes == 0


def test_garbage_gets_errors_and_leaves_nothing_behind():
    good = [raw("/predict", encoded_image(color, (40, 40), "JPEG")) for color in ("red", "blue")]
    bad = itertools.islice(broken(good, random.Random(3)), 120)
    with make_state(batch_size=8) as state, server_port(state) as port:
        mixed = [request for one in bad for request in (one, *good)]
        found = run(closed_loop(port, mixed, clients=8))
        assert found.counts()[200] >= 240
        assert len(found.replies) == 360
        assert found.counts().keys() <= {200, 400, 404, 413, 415, 422}
        assert {400, 413, 415, 422} <= found.counts().keys()
        assert state.admission.images == state.admission.bytes == state.in_flight == 0


def test_an_explanation_and_a_batch_take_turns_and_too_many_explanations_are_refused():
    data = encoded_image(size=(32, 32))
    request = raw("/explain", data, "image/png")
    limits = Limits(heavy=2)
    with (
        make_state(limits=limits) as state,
        server_port(state) as port,
        blocked_batcher(state) as gate,
    ):

        async def story():
            links = [await connect(port) for _ in range(3)]
            waiting = [asyncio.create_task(link.ask(request)) for link in links[:2]]
            await asyncio.to_thread(wait_for, lambda: state.admission.heavy == 2)
            refused = await links[2].ask(request)
            answer = asyncio.create_task(links[2].ask(PREDICT))  # others are still let in
            await asyncio.to_thread(wait_for, lambda: len(state.batcher.waiting) == 3)
            gate.open.set()
            return refused.status, [(await task).status for task in (*waiting, answer)]

        assert run(story()) == (503, [200, 200, 200])


def test_much_json_is_not_written_on_the_event_loop():
    async def story():
        threads = []

        def write():
            threads.append(threading.get_ident())
            return StatusResponse(status="")

        await json_response(write, 10)
        await json_response(write, 10_000)
        return [thread == threading.get_ident() for thread in threads]

    assert asyncio.run(story()) == [True, False]


def test_requests_that_want_answers_told_differently_share_a_batch():
    asked = {"top=1": (1, "x"), "top=2": (2, "x"), "top=3&threshold=1": (3, "")}
    with make_state() as state, server_port(state) as port, blocked_batcher(state) as gate:

        async def story():
            tasks = [
                asyncio.create_task(
                    (await connect(port)).ask(
                        raw(f"/predict?{query}", encoded_image(), "image/png")
                    )
                )
                for query in (*asked, *asked)
            ]
            await asyncio.to_thread(wait_for, lambda: len(state.batcher.waiting) == 6)
            gate.open.set()
            return [json.loads((await task).body)["answers"][0] for task in tasks]

        state.registry.get(None).batch_size = 6
        answers = run(story())
        assert state.metrics.value("vitrail_batch_pictures_sum") == 1 + 6  # the blocker, and all
        for answer, (count, label) in zip(answers, [*asked.values()] * 2, strict=True):
            assert len(answer["guesses"]) == count
            assert bool(answer["label"]) == bool(label)


def test_a_stop_finishes_what_was_let_in_and_refuses_what_comes():
    gate = Gate()
    with make_state() as state, server_port(state) as port:
        state.registry.get(None).predict = gate  # type: ignore[assignment]

        async def story():
            link, other = await connect(port), await connect(port)
            waiting = asyncio.create_task(link.ask(PREDICT))
            await asyncio.to_thread(gate.begun.acquire, timeout=60)
            state.draining = True
            refused = await other.ask(PREDICT)
            gate.open.set()
            return refused, await waiting

        refused, _ = run(story())
        assert refused.status == 503
        assert b"connection: close" in refused.head


def test_who_asks_while_it_stops_is_told_so_instead_of_being_cut_off(monkeypatch):
    """A connection that was kept open gets an answer first; it is not closed under a request."""
    monkeypatch.setattr(protocol, "LAME_DUCK_SECONDS", 2.0)  # for a busy client to ask in
    with make_state() as state, running_server(state) as (server, port):

        async def story():
            kept = await connect(port)
            first = await kept.ask(get("/health"))
            server.handle_exit(signal.SIGTERM, None)
            await asyncio.sleep(0.2)  # uvicorn looks ten times a second whether it is to stop
            return first.status, (await kept.ask(PREDICT)).status

        assert run(story()) == (200, 503)
        wait_for(lambda: not server.server_state.connections)
