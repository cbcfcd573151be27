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
from houses import Gate, a_house, a_server, held, listening_to, picture, wait_for
from load_server import broken
from raw_client import closed_loop, connect, form, get, head, raw, run

from vitrail.serving import connection as connections
from vitrail.serving import refusals, sending
from vitrail.serving.replies import written
from vitrail.serving.settings import Limits

PREDICT = raw("/predict", picture(), "image/png")


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
    with a_house(batch=8) as house, listening_to(house) as port:
        found = run(closed_loop(port, [PREDICT] * 200, clients=16))
        assert found.counts() == {200: 200}
        assert max(house.meters.batches.counts[()][1:]) > 0  # some were larger than 1
        assert house.room.pictures == house.room.bytes == house.in_flight == 0


def test_when_the_queue_is_full_others_are_told_at_once_when_to_come_again():
    limits = Limits(queue=6, pictures=4)
    with a_house(limits=limits) as house, listening_to(house) as port, held(house) as gate:

        async def story():
            waiting = [asyncio.create_task((await connect(port)).ask(PREDICT)) for _ in range(6)]
            await asyncio.to_thread(wait_for, lambda: house.room.is_full)
            refused = await closed_loop(  # answered while the gate is closed: at once
                port, [PREDICT, form("/predict", [picture()] * 3)], clients=2
            )
            house.room.pictures -= 1  # a place is free: one picture fits, three do not
            refused.replies += (
                await closed_loop(port, [form("/predict", [picture()] * 3)], clients=1)
            ).replies
            house.room.pictures += 1
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
        assert 'vitrail_rejected_total{reason="queue"} 3' in house.meters.text()


def test_a_refused_body_is_not_held_in_memory_and_the_answer_arrives(monkeypatch):
    """The client still sends when it is refused; it reads an answer, not a broken connection."""
    monkeypatch.setattr(refusals, "LINGER", 0.3)
    with a_house(limits=Limits(body=2**20)) as house, listening_to(house) as port:
        begun = head("/predict", 5 * 2**20, "image/png")
        found = ask(port, begun, b"x" * 2**20)
        assert found.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in found
        assert b"RESET" not in found
        chunked = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        endless = ask(port, chunked, *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 20)
        assert endless.startswith(b"HTTP/1.1 413 ")
        assert house.room.bytes == 0


def test_a_small_body_that_is_refused_unread_leaves_the_connection_usable():
    with a_house() as house, listening_to(house) as port:

        async def story():
            link = await connect(port)
            first = await link.ask(raw("/predict", b"x" * 1000, "text/plain"))
            return first.status, (await link.ask(PREDICT)).status

        assert run(story()) == (415, 200)


def test_an_upload_that_is_too_slow_is_ended():
    with a_house(limits=Limits(timeout=0.3)) as house, listening_to(house) as port:
        begun = time.monotonic()
        found = ask(port, head("/predict", 1000, "image/png"), b"only this", wait=30)
        assert time.monotonic() - begun < 30  # the connection is closed
        assert found.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.3 s" in found
        assert house.room.pictures == house.room.bytes == 0


def test_a_request_whose_head_never_ends_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with a_house() as house, listening_to(house) as port:
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
    monkeypatch.setattr(sending, "vectors_json", lambda *_: body)
    return body


def test_who_does_not_read_the_answer_holds_a_place_and_is_hung_up_on(long_answer, monkeypatch):
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.6)
    with a_house() as house, a_server(house) as (server, port), socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(("127.0.0.1", port))
        begun = time.monotonic()
        link.sendall(raw("/features", picture(), "image/png"))
        wait_for(lambda: house.meters.pictures.values[()] == 1)
        wait_for(lambda: house.room.pictures == 0)
        assert time.monotonic() - begun > 0.6  # the answer was in memory until then
        wait_for(lambda: not server.server_state.connections)
        assert house.room.bytes == house.in_flight == 0


def test_who_reads_slowly_but_in_time_gets_all_of_a_long_answer(long_answer):
    with (
        a_house() as house,
        a_server(house) as (server, port),
        socket.create_connection(("127.0.0.1", port), timeout=30) as link,
    ):
        link.sendall(raw("/features", picture(), "image/png"))
        wait_for(lambda: any(one.end for one in server.server_state.connections))
        found = b""
        while not found.endswith(long_answer[-8:]):
            found += link.recv(2**20)
        assert found.partition(b"\r\n\r\n")[2] == long_answer
        wait_for(lambda: not any(one.end for one in server.server_state.connections))
        link.sendall(get("/health"))  # nothing will break it off
        assert link.recv(9999).startswith(b"HTTP/1.1 200 ")


def test_to_hang_up_does_not_wait_for_ever_for_a_client_that_does_not_read(monkeypatch):
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.01)

    async def story(end):
        link = object.__new__(connections.Connection)
        link.loop, link.transport = asyncio.get_running_loop(), Mock()
        getattr(link, end)()
        link.transport.close.assert_called_once()
        await asyncio.sleep(0.05)
        link.transport.abort.assert_called_once()

    for end in ("hang_up", "timeout_keep_alive_handler"):
        asyncio.run(story(end))


def test_the_rest_of_a_refused_body_must_come_soon(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)  # for a busy client to send the rest
    with a_house() as house, listening_to(house) as port:
        for rest in (b"only this", b"x" * 1000):  # too little, or all and nothing after it
            with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
                link.sendall(head("/predict", 1000, "text/plain"))
                assert link.recv(9999).startswith(b"HTTP/1.1 415 ")
                link.sendall(rest)
                assert link.recv(9999) == b""  # it hung up


def test_what_is_no_http_is_told_so_as_json():
    with a_house() as house, listening_to(house) as port:
        found = ask(port, b"hello, is this a server?\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 400 ")
        assert found.endswith(b'{"error":"that is no HTTP request"}')


CHUNKED = (
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
    b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(picture()), picture())
)


def test_trailers_do_not_pass_for_headers():
    with a_house(token="secret") as house, listening_to(house) as port:
        trailers = b"authorization: Bearer secret\r\nx-request-id: trailer\r\n\r\n"
        reply = ask(port, CHUNKED + trailers, wait=1)
        assert reply.startswith(b"HTTP/1.1 401 ")
        assert b"x-request-id: trailer" not in reply


def test_trailers_are_dropped_and_the_connection_stays_usable():
    with a_house() as house, listening_to(house) as port:
        reply = ask(port, CHUNKED + b"checksum: 7\r\n\r\n", get("/health"), wait=1)
        assert reply.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("trailer", [b"a: " + b"b" * 60_000, b"a: b\r\n" * 10_000])
def test_trailers_are_limited_like_headers(trailer):
    with a_house() as house, listening_to(house) as port:
        begun = time.monotonic()
        reply = ask(port, CHUNKED, *[trailer] * 400)
        assert reply.startswith(b"HTTP/1.1 431 ") or reply == b"RESET"
        assert time.monotonic() - begun < 5
        wait_for(lambda: house.room.pictures == house.room.bytes == house.in_flight == 0)


def test_a_large_body_before_a_pipelined_request_does_not_count_as_its_head():
    with a_house() as house, listening_to(house) as port:
        large = raw("/predict", picture(size=(300, 300)), "image/png")
        assert len(large) > connections.LONGEST_HEAD
        assert ask(port, large + get("/health"), wait=2).count(b"HTTP/1.1 200 ") == 2


def test_pipelined_requests_are_limited():
    """One read may hold thousands; the first are answered in order, then the server hangs up."""
    most = connections.MAX_PIPELINED
    with a_house(token="secret") as house, a_server(house) as (server, port):
        reply = ask(port, get("/models") * 14_000)
        assert most <= reply.count(b"HTTP/1.1 401 ") <= 2 * most
        assert reply.count(b"connection: close") == 1
        assert server.server_state.total_requests <= 2 * most
        few = ask(port, get("/health") * most, wait=1)
        assert few.count(b"HTTP/1.1 200 ") == most


def test_a_broken_request_behind_a_pending_one_does_not_get_its_answer():
    with a_house() as house, listening_to(house) as port, held(house):
        assert b"HTTP" not in ask(port, PREDICT + b"\x01 no request\r\n\r\n", wait=2)


def test_more_connections_than_there_are_places_for_are_refused(monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)
    with a_house() as house, listening_to(house) as port:

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
    with a_house() as house, listening_to(house) as port, held(house) as gate:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(PREDICT[: 20 if not sent else -1 if sent < 1 else None])
                wait_for(lambda: house.room.pictures > 0 or not sent)
                time.sleep(0.02)
        wait_for(lambda: house.room.pictures == house.in_flight == 0)
        gate.open.set()
        assert run(closed_loop(port, [PREDICT] * 8, clients=2)).counts() == {200: 8}
        seen = house.meters.pictures.values[()]
        assert seen == 8  # what nobody waited for was not looked at
        if sent:
            assert 'vitrail_requests_total{route="/predict",status="499"} 5' in house.meters.text()
        assert house.room.bytes == 0


def test_garbage_gets_errors_and_leaves_nothing_behind():
    good = [raw("/predict", picture(color, (40, 40), "JPEG")) for color in ("red", "blue")]
    bad = itertools.islice(broken(good, random.Random(3)), 120)
    with a_house(batch=8) as house, listening_to(house) as port:
        mixed = [request for one in bad for request in (one, *good)]
        found = run(closed_loop(port, mixed, clients=8))
        assert found.counts()[200] >= 240
        assert len(found.replies) == 360
        assert found.counts().keys() <= {200, 400, 404, 413, 415, 422}
        assert {400, 413, 415, 422} <= found.counts().keys()
        assert house.room.pictures == house.room.bytes == house.in_flight == 0


def test_an_explanation_and_a_batch_take_turns_and_too_many_explanations_are_refused():
    data = picture(size=(32, 32))
    request = raw("/explain", data, "image/png")
    limits = Limits(heavy=2)
    with a_house(limits=limits) as house, listening_to(house) as port, held(house) as gate:

        async def story():
            links = [await connect(port) for _ in range(3)]
            waiting = [asyncio.create_task(link.ask(request)) for link in links[:2]]
            await asyncio.to_thread(wait_for, lambda: house.room.heavy == 2)
            refused = await links[2].ask(request)
            answer = asyncio.create_task(links[2].ask(PREDICT))  # others are still let in
            await asyncio.to_thread(wait_for, lambda: len(house.batcher.waiting) == 3)
            gate.open.set()
            return refused.status, [(await task).status for task in (*waiting, answer)]

        assert run(story()) == (503, [200, 200, 200])


def test_much_json_is_not_written_on_the_event_loop():
    async def story():
        threads = []

        def write():
            threads.append(threading.get_ident())
            return b"{}"

        await written(write, 10)
        await written(write, 10_000)
        return [thread == threading.get_ident() for thread in threads]

    assert asyncio.run(story()) == [True, False]


def test_requests_that_want_answers_told_differently_share_a_batch():
    asked = {"top=1": (1, "x"), "top=2": (2, "x"), "top=3&threshold=1": (3, "")}
    with a_house() as house, listening_to(house) as port, held(house) as gate:

        async def story():
            tasks = [
                asyncio.create_task(
                    (await connect(port)).ask(raw(f"/predict?{query}", picture(), "image/png"))
                )
                for query in (*asked, *asked)
            ]
            await asyncio.to_thread(wait_for, lambda: len(house.batcher.waiting) == 6)
            gate.open.set()
            return [json.loads((await task).body)["answers"][0] for task in tasks]

        house.shelf.get(None).batch = 6
        answers = run(story())
        assert house.meters.batches.sums[()] == 1 + 6  # the one that held them up, and all of them
        for answer, (count, label) in zip(answers, [*asked.values()] * 2, strict=True):
            assert len(answer["guesses"]) == count
            assert bool(answer["label"]) == bool(label)


def test_a_stop_finishes_what_was_let_in_and_refuses_what_comes():
    gate = Gate()
    with a_house() as house, listening_to(house) as port:
        house.shelf.get(None).answering = gate  # type: ignore[assignment]

        async def story():
            link, other = await connect(port), await connect(port)
            waiting = asyncio.create_task(link.ask(PREDICT))
            await asyncio.to_thread(gate.begun.acquire, timeout=60)
            house.draining = True
            refused = await other.ask(PREDICT)
            gate.open.set()
            return refused, await waiting

        refused, _ = run(story())
        assert refused.status == 503
        assert b"connection: close" in refused.head


def test_who_asks_while_it_stops_is_told_so_instead_of_being_cut_off(monkeypatch):
    """A connection that was kept open gets an answer first; it is not closed under a request."""
    monkeypatch.setattr(connections, "LAME_SECONDS", 2.0)  # for a busy client to ask in
    with a_house() as house, a_server(house) as (server, port):

        async def story():
            kept = await connect(port)
            first = await kept.ask(get("/health"))
            server.handle_exit(signal.SIGTERM, None)
            await asyncio.sleep(0.2)  # uvicorn looks ten times a second whether it is to stop
            return first.status, (await kept.ask(PREDICT)).status

        assert run(story()) == (200, 503)
        wait_for(lambda: not server.server_state.connections)
