"""Work that does not come back: a stuck image, a stuck batch, and when only a restart helps."""

import asyncio
import io
import subprocess
import sys
import threading
import time

import pytest
from houses import Gate, a_house, a_server, listening_to, picture, tiny_model, wait_for
from PIL import Image
from raw_client import closed_loop, connect, form, get, raw, run

import vitrail
from vitrail.data.image_headers import read_header
from vitrail.errors import ConfigError
from vitrail.serving import connection as connections
from vitrail.serving import readers
from vitrail.serving.settings import Limits, Settings

STUCK = picture("blue", seed=99)  # whose decoding does not come back
PREDICT = raw("/predict", picture(), "image/png")
SHORT = {"limits": Limits(timeout=0.3), "watchdog": 0.4}


@pytest.fixture
def release():
    """Lets go what is stuck; in any case at the end."""
    event = threading.Event()
    yield event
    event.set()


def hold(monkeypatch, house, release):
    """Let the decoding of STUCK wait; a semaphore counts how often it has begun."""
    predictor, begun = house.shelf.get(None).predictor, threading.Semaphore(0)
    prepare = predictor.prepare

    def prepared(data):
        if data == STUCK:
            begun.release()
            assert release.wait(60)
        return prepare(data)

    monkeypatch.setattr(predictor, "prepare", prepared)
    return begun


def status(port, path):
    """Status and text of a GET."""
    reply = run(closed_loop(port, [get(path)], clients=1)).replies[0]
    return reply.status, reply.body.decode()


def in_background(port, requests):
    """Send requests from another thread, each over a connection of its own; their statuses."""
    statuses = []

    async def send():
        replies = [(await connect(port)).ask(request) for request in requests]
        statuses.extend(reply.status for reply in await asyncio.gather(*replies))

    thread = threading.Thread(target=lambda: run(send()))
    thread.start()
    return thread, statuses


def test_an_image_that_takes_long_delays_only_its_own_request(monkeypatch, release):
    with a_house() as house, listening_to(house) as port:
        begun = hold(monkeypatch, house, release)
        requests = [raw("/predict", STUCK), form("/predict", [picture(), STUCK])]
        thread, statuses = in_background(port, requests)
        assert begun.acquire(timeout=20)
        assert begun.acquire(timeout=20)
        others = run(closed_loop(port, [PREDICT] * 40, clients=8))
        assert others.counts() == {200: 40}
        assert max(reply.seconds for reply in others.replies) < 10
        assert not statuses
        assert status(port, "/ready")[0] == 200
        release.set()  # slow, but not in vain
        thread.join(20)
        assert statuses == [200, 200]


def test_images_stuck_on_every_core_are_replaced_by_spare_threads(monkeypatch, release):
    with a_house() as house, listening_to(house) as port:
        begun, count = hold(monkeypatch, house, release), house.readers.count
        thread, _ = in_background(port, [raw("/predict", STUCK)] * count)
        for _ in range(count):
            assert begun.acquire(timeout=20)
        assert run(closed_loop(port, [PREDICT] * 10, clients=2)).counts() == {200: 10}
        release.set()
        thread.join(20)
        # The surplus threads end as they finish an image.
        wait_for(
            lambda: run(closed_loop(port, [PREDICT], clients=1)) and house.readers.threads == count
        )


@pytest.mark.parametrize("path", ["/explain", "/attention", "/teach?name=x"])
def test_a_stuck_image_of_a_heavy_request_does_not_hold_the_batch_thread(
    monkeypatch, release, path
):
    begun = threading.Semaphore(0)

    def slow(*_):
        begun.release()
        assert release.wait(60)
        return 0

    with a_house(teach=True) as house, listening_to(house) as port:
        monkeypatch.setattr(house.readers, "pixels", lambda data: slow() if data == STUCK else 0)
        served = house.shelf.get(None)
        served.memory = object() if "teach" in path else None
        thread, _ = in_background(port, [form(path, [STUCK])])
        assert begun.acquire(timeout=20)
        assert run(closed_loop(port, [PREDICT] * 20, clients=4)).counts() == {200: 20}
        release.set()
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("path", ["/predict", "/features", "/explain", "/attention"])
def test_images_are_never_decoded_in_the_batch_thread(monkeypatch, path):
    threads = []
    read = read_header

    def noted(data):
        threads.append(threading.current_thread().name)
        return read(data)

    with a_house() as house, listening_to(house) as port:
        monkeypatch.setattr("vitrail.data.decode.read_header", noted)
        assert run(closed_loop(port, [raw(path, picture())], clients=1)).counts() == {200: 1}
        assert threads
        assert all(name.startswith("reader") for name in threads)


def test_a_stuck_batch_thread_fails_readiness_and_is_replaced(monkeypatch, release, capfd):
    gate = Gate()
    gate.open = release
    with a_house(limits=Limits(timeout=0.3), watchdog=3600) as house, listening_to(house) as port:
        wait_for(lambda: status(port, "/ready")[0] == 200)
        answering = house.shelf.get(None).answering
        house.shelf.get(None).answering = gate  # type: ignore[assignment]
        stuck = run(closed_loop(port, [PREDICT], clients=1))
        assert stuck.counts() == {504: 1}
        house.shelf.get(None).answering = answering
        assert run(closed_loop(port, [PREDICT], clients=1)).counts() == {504: 1}
        code, text = status(port, "/ready")
        assert code == 503
        assert "stuck" in text
        assert status(port, "/health")[0] == 200
        object.__setattr__(house.settings, "watchdog", 0.4)
        wait_for(lambda: status(port, "/ready")[0] == 200)  # another thread has taken over
        assert run(closed_loop(port, [PREDICT] * 20, clients=4)).counts() == {200: 20}
        assert "vitrail_stuck_threads 1\n" in status(port, "/metrics")[1]
        assert "abandoned; another thread goes on" in capfd.readouterr().err
        (thread,) = house.batcher.abandoned
        release.set()
        thread.join(20)  # the abandoned thread ends when its work returns
        assert not thread.is_alive()
        assert "vitrail_stuck_threads 0\n" in status(port, "/metrics")[1]
        assert run(closed_loop(port, [PREDICT] * 20, clients=4)).counts() == {200: 20}
        assert house.room.pictures == house.room.bytes == house.in_flight == 0


def test_requests_of_an_abandoned_batch_get_an_error_and_those_behind_it_an_answer(release):
    gate = Gate()
    gate.open = release
    with a_house(limits=Limits(timeout=20), watchdog=20) as house, listening_to(house) as port:
        wait_for(lambda: status(port, "/ready")[0] == 200)
        answering = house.shelf.get(None).answering
        house.shelf.get(None).answering = gate  # type: ignore[assignment]
        first, stuck = in_background(port, [PREDICT])
        assert gate.begun.acquire(timeout=20)
        house.shelf.get(None).answering = answering
        second, behind = in_background(port, [PREDICT] * 5)
        wait_for(lambda: len(house.batcher.waiting) == 5)
        object.__setattr__(house.settings, "watchdog", 0.1)
        first.join(20)
        second.join(20)
        assert stuck == [503]
        assert behind == [200] * 5


def test_too_many_stuck_threads_fail_liveness_and_end_the_server(monkeypatch, release, capfd):
    monkeypatch.setattr(readers, "available_cores", lambda: 4)
    with a_house(**SHORT) as house, a_server(house) as (server, port):
        wait_for(lambda: status(port, "/ready")[0] == 200)
        hold(monkeypatch, house, release)
        monkeypatch.setattr(connections, "LAME_SECONDS", 2.0)
        health = []

        async def story():
            link = await connect(port)
            requests = [(await connect(port)).ask(raw("/predict", STUCK)) for _ in range(3)]
            await asyncio.gather(*requests)
            while not house.lost:
                await asyncio.sleep(0.01)
            health.append(await link.ask(get("/health")))

        run(story())
        assert health[0].status == 503
        assert b"must be restarted" in health[0].body
        wait_for(lambda: server.should_exit)
        assert "threads are stuck (3 stuck for up to" in capfd.readouterr().err


def test_one_thread_that_is_stuck_for_very_long_ends_the_server(monkeypatch, release):
    with a_house(limits=Limits(timeout=0.1), watchdog=0.1) as house, a_server(house) as (server, p):
        hold(monkeypatch, house, release)
        run(closed_loop(p, [raw("/predict", STUCK)], clients=1))
        wait_for(lambda: house.lost and server.should_exit)


def test_slow_work_within_the_limit_is_left_alone(release):
    gate = Gate()
    gate.open = release
    with a_house(limits=Limits(timeout=30), watchdog=30) as house, listening_to(house) as port:
        house.shelf.get(None).answering = gate  # type: ignore[assignment]
        thread, _ = in_background(port, [raw("/predict", picture())])
        assert gate.begun.acquire(timeout=20)
        first = house.batcher.thread
        time.sleep(1)
        assert house.batcher.thread is first
        assert status(port, "/ready")[0] == 200
        release.set()
        thread.join(20)
        assert house.batcher.thread is first
        assert not house.batcher.abandoned


def test_the_limit_is_at_least_the_timeout():
    with pytest.raises(ConfigError, match=r"watchdog=10 would abandon.*at least timeout=30"):
        Settings(watchdog=10)


def test_a_process_with_stuck_threads_ends_with_a_status_to_restart_on(tmp_path):
    """Threads that never return keep neither the drain nor the interpreter from ending."""
    vitrail.save(tiny_model(), tmp_path / "tiny")
    code = """
import sys, threading
from vitrail.prediction.predictor import Predictor
from vitrail.serving.run import serve
from vitrail.serving.settings import Limits, Settings
class Stuck(Predictor):
    def prepare(self, data):
        threading.Event().wait()
settings = Settings(port=0, grace=1, watchdog=0.5, limits=Limits(timeout=0.5), batch=1)
serve({"tiny": sys.argv[1]}, settings, predictor=Stuck, say=lambda line: print(line, flush=True))
"""
    words = [sys.executable, "-c", code, str(tmp_path / "tiny")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        try:
            port = next(int(line.rpartition(":")[2]) for line in it.stdout if "http" in line)
            statuses = in_background(port, [PREDICT] * 3)
            _, said = it.communicate(timeout=60)
        finally:
            it.kill()
        statuses[0].join(20)
        assert it.returncode == 70
        assert "threads are stuck" in said


def large(side):
    buffer = io.BytesIO()
    Image.new("L", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def test_images_that_are_decoded_at_once_share_a_pixel_budget(monkeypatch):
    """Many cores do not decode many large images at once; those that wait are answered."""
    monkeypatch.setattr(readers, "available_cores", lambda: 8)
    limits, lock, now, most = Limits(pixels=100 * 100), threading.Lock(), [0], [0]
    with a_house(limits=limits, batch=32) as house, listening_to(house) as port:
        predictor = house.shelf.get(None).predictor
        prepare = predictor.prepare

        def prepared(data):
            with Image.open(io.BytesIO(data)) as image:
                pixels = image.width * image.height
            with lock:
                now[0] += pixels
                most[0] = max(most[0], now[0])
            time.sleep(0.02)
            with lock:
                now[0] -= pixels
            return prepare(data)

        monkeypatch.setattr(predictor, "prepare", prepared)
        assert house.readers.count == 8
        images = [large(side) for side in (100, 90, 30, 100, 60, 10)]
        requests = [raw("/predict", data, "image/png") for data in images * 8]
        assert run(closed_loop(port, requests, clients=16)).counts() == {200: 48}
        assert 100 * 100 < most[0] <= readers.BUDGET_IMAGES * limits.pixels
        assert house.readers.free_pixels == readers.BUDGET_IMAGES * limits.pixels


def test_an_image_that_waits_for_its_pixels_is_not_refused(monkeypatch, release):
    with a_house(limits=Limits(pixels=64)) as house, listening_to(house) as port:
        begun = hold(monkeypatch, house, release)
        thread, statuses = in_background(port, [raw("/predict", STUCK)] * 2)
        assert begun.acquire(timeout=20)
        assert house.readers.free_pixels == 64  # the half of it for small images
        waiting, answered = in_background(port, [PREDICT])
        time.sleep(0.3)
        assert not answered
        release.set()
        thread.join(20)
        waiting.join(20)
        assert statuses == [200, 200]
        assert answered == [200]


def test_large_images_that_wait_for_pixels_do_not_hold_up_small_ones(monkeypatch, release):
    with a_house(limits=Limits(pixels=64)) as house, listening_to(house) as port:
        begun = hold(monkeypatch, house, release)
        thread, statuses = in_background(port, [raw("/predict", STUCK)])
        assert begun.acquire(timeout=20)
        waiting, answered = in_background(port, [PREDICT] * 20)
        wait_for(lambda: len(house.readers.parked) == 20)
        small = raw("/predict", picture(size=(2, 2)), "image/png")
        assert run(closed_loop(port, [small] * 20, clients=4)).counts() == {200: 20}
        assert not answered
        release.set()
        thread.join(20)
        waiting.join(20)
        assert statuses + answered == [200] * 21
