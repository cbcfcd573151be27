import asyncio
import io
import subprocess
import sys
import threading
import time

import pytest
from PIL import Image
from raw_client import closed_loop, connect, form, get, raw, run
from serving_helpers import Gate, encoded_image, is_idle, served, tiny_model, wait_for

import vitrail
from vitrail.data.image_headers import read_header
from vitrail.errors import ConfigError
from vitrail.serving import batching, protocol
from vitrail.serving.config import ServerConfig

pytestmark = pytest.mark.slow

STUCK = encoded_image("blue", seed=99)  # never finishes decoding
PREDICT = raw("/predict", encoded_image(), "image/png")


@pytest.fixture
def release():
    """Releases what is stuck, at the end at the latest."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def gate(release):
    """Batch work that is stuck until it is released."""
    gate = Gate()
    gate.open = release
    return gate


def block(monkeypatch, owner, name, release):
    """Block a function of image data for STUCK; a semaphore counts how often it has started."""
    function, started = getattr(owner, name), threading.Semaphore(0)

    def slow(data, **options):
        if data == STUCK:
            started.release()
            assert release.wait(60)
        return function(data, **options)

    monkeypatch.setattr(owner, name, slow)
    return started


def block_decoding(monkeypatch, state, release):
    return block(monkeypatch, state.registry.get(None).predictor, "preprocess", release)


def status(port, path):
    reply = run(closed_loop(port, [get(path)], clients=1)).replies[0]
    return reply.status, reply.body.decode()


def counts(port, requests, clients=4):
    return run(closed_loop(port, requests, clients=clients)).counts()


def in_background(port, requests):
    """Send requests in a thread, one connection each; return the thread and the statuses."""
    statuses = []

    async def send():
        replies = [(await connect(port)).send(request) for request in requests]
        statuses.extend(reply.status for reply in await asyncio.gather(*replies))

    thread = threading.Thread(target=lambda: run(send()))
    thread.start()
    return thread, statuses


# Decoding


def test_slow_image_delays_only_its_own_request(state, port, monkeypatch, release):
    started = block_decoding(monkeypatch, state, release)
    requests = [raw("/predict", STUCK), form("/predict", [encoded_image(), STUCK])]
    thread, statuses = in_background(port, requests)
    assert started.acquire(timeout=20)
    assert started.acquire(timeout=20)
    others = run(closed_loop(port, [PREDICT] * 40, clients=8))
    assert others.counts() == {200: 40}
    assert max(reply.seconds for reply in others.replies) < 10
    assert not statuses
    assert status(port, "/ready")[0] == 200
    release.set()  # slow, but answered
    thread.join(20)
    assert statuses == [200, 200]


def test_spare_threads_replace_stuck_decoders(state, port, monkeypatch, release):
    started, count = block_decoding(monkeypatch, state, release), state.pool.size
    thread, _ = in_background(port, [raw("/predict", STUCK)] * count)
    for _ in range(count):
        assert started.acquire(timeout=20)
    assert counts(port, [PREDICT] * 10, clients=2) == {200: 10}
    release.set()
    thread.join(20)
    # The surplus threads end as they finish an image.
    wait_for(lambda: run(closed_loop(port, [PREDICT], clients=1)) and state.pool.threads == count)


@pytest.mark.parametrize("path", ["/explain", "/attention", "/teach?name=x"])
def test_stuck_image_of_a_heavy_request_does_not_block_the_batch_thread(
    state, port, monkeypatch, release, path
):
    started = block(monkeypatch, batching, "open_image", release)
    monkeypatch.setattr(state.registry.get(None), "memory", object() if "teach" in path else None)
    thread, _ = in_background(port, [form(path, [STUCK])])
    assert started.acquire(timeout=20)
    assert counts(port, [PREDICT] * 20) == {200: 20}
    release.set()
    thread.join(20)
    assert not thread.is_alive()


def test_images_are_never_decoded_in_the_batch_thread(port, monkeypatch):
    threads = []

    def record(data):
        threads.append(threading.current_thread().name)
        return read_header(data)

    monkeypatch.setattr("vitrail.data.decode.read_header", record)
    for path in ("/predict", "/features", "/explain", "/attention"):
        before = len(threads)
        assert counts(port, [raw(path, encoded_image())], clients=1) == {200: 1}
        assert len(threads) > before
    assert all(name.startswith("decoder") for name in threads)


def test_concurrent_decoding_shares_a_pixel_budget(monkeypatch):
    """Large images wait for the budget and are answered."""
    monkeypatch.setattr(batching, "available_cores", lambda: 8)
    largest, lock, now, most = 100 * 100, threading.Lock(), 0, 0
    budget = batching.BUDGET_IMAGES * largest
    with served(max_pixels=largest, batch=32) as (state, _, port):
        predictor = state.registry.get(None).predictor
        preprocess = predictor.preprocess

        def preprocess_slowly(data):
            nonlocal now, most
            with Image.open(io.BytesIO(data)) as image:
                pixels = image.width * image.height
            with lock:
                now += pixels
                most = max(most, now)
            time.sleep(0.02)
            with lock:
                now -= pixels
            return preprocess(data)

        monkeypatch.setattr(predictor, "preprocess", preprocess_slowly)
        assert state.pool.size == 8
        images = [encoded_image(size=(side, side)) for side in (100, 90, 30, 100, 60, 10)]
        requests = [raw("/predict", data, "image/png") for data in images * 8]
        assert run(closed_loop(port, requests, clients=16)).counts() == {200: 48}
        assert 100 * 100 < most <= budget
        assert state.pool.free_pixels == budget


def test_image_waiting_for_pixels_is_not_rejected(monkeypatch, release):
    with served(max_pixels=64) as (state, _, port):
        started = block_decoding(monkeypatch, state, release)
        thread, statuses = in_background(port, [raw("/predict", STUCK)] * 2)
        assert started.acquire(timeout=20)
        assert state.pool.free_pixels == 64  # the half reserved for small images
        waiting, answered = in_background(port, [PREDICT] * 20)
        wait_for(lambda: len(state.pool.parked) == 21)
        small = raw("/predict", encoded_image(size=(2, 2)), "image/png")  # is not delayed
        assert counts(port, [small] * 20) == {200: 20}
        assert not answered
        release.set()
        thread.join(20)
        waiting.join(20)
        assert statuses + answered == [200] * 22


# The batch thread


def test_stuck_batch_thread_fails_readiness_and_is_replaced(gate, release, capfd):
    with served(timeout=0.3, watchdog=3600) as (state, _, port):
        wait_for(lambda: status(port, "/ready")[0] == 200)
        model = state.registry.get(None)
        answering, model.predict = model.predict, gate
        assert counts(port, [PREDICT], clients=1) == {504: 1}
        model.predict = answering
        assert counts(port, [PREDICT], clients=1) == {504: 1}
        code, text = status(port, "/ready")
        assert code == 503
        assert "stuck" in text
        assert status(port, "/health")[0] == 200
        object.__setattr__(state.config, "watchdog", 0.4)
        wait_for(lambda: status(port, "/ready")[0] == 200)  # another thread has taken over
        assert counts(port, [PREDICT] * 20) == {200: 20}
        assert "vitrail_stuck_threads 1.0\n" in status(port, "/metrics")[1]
        assert "abandoned; another thread takes over" in capfd.readouterr().err
        (thread,) = state.batcher.abandoned
        release.set()
        thread.join(20)  # the abandoned thread ends when its work returns
        assert not thread.is_alive()
        assert "vitrail_stuck_threads 0.0\n" in status(port, "/metrics")[1]
        assert counts(port, [PREDICT] * 20) == {200: 20}
        assert is_idle(state)


def test_abandoned_batch_is_503_and_later_requests_succeed(gate):
    """Slow work within the limit is not abandoned."""
    with served(timeout=20, watchdog=20) as (state, _, port):
        wait_for(lambda: status(port, "/ready")[0] == 200)
        model = state.registry.get(None)
        answering, model.predict = model.predict, gate
        first, stuck = in_background(port, [PREDICT])
        assert gate.started.acquire(timeout=20)
        model.predict = answering
        second, behind = in_background(port, [PREDICT] * 5)
        wait_for(lambda: len(state.batcher.waiting) == 5)
        batch_thread = state.batcher.thread
        time.sleep(0.5)
        assert state.batcher.thread is batch_thread
        assert not state.batcher.abandoned
        assert status(port, "/ready")[0] == 200
        object.__setattr__(state.config, "watchdog", 0.1)
        first.join(20)
        second.join(20)
        assert stuck == [503]
        assert behind == [200] * 5


# Beyond recovery


def test_too_many_stuck_threads_fail_liveness_and_stop_the_server(monkeypatch, release, capfd):
    monkeypatch.setattr(batching, "available_cores", lambda: 4)
    monkeypatch.setattr(protocol, "LAME_DUCK_SECONDS", 2.0)
    with served(timeout=0.3, watchdog=0.4) as (state, server, port):
        wait_for(lambda: status(port, "/ready")[0] == 200)
        block_decoding(monkeypatch, state, release)

        async def scenario():
            link = await connect(port)
            requests = [(await connect(port)).send(raw("/predict", STUCK)) for _ in range(3)]
            await asyncio.gather(*requests)
            while not state.unrecoverable:
                await asyncio.sleep(0.01)
            return await link.send(get("/health"))

        health = run(scenario())
        assert health.status == 503
        assert b"must be restarted" in health.body
        wait_for(lambda: server.should_exit)
        assert "3 threads are stuck, for up to" in capfd.readouterr().err


def test_one_thread_stuck_for_very_long_stops_the_server(monkeypatch, release):
    with pytest.raises(ConfigError, match=r"watchdog=10 would abandon.*at least timeout=30"):
        ServerConfig(watchdog=10)
    with served(timeout=0.1, watchdog=0.1) as (state, server, port):
        block_decoding(monkeypatch, state, release)
        run(closed_loop(port, [raw("/predict", STUCK)], clients=1))
        wait_for(lambda: state.unrecoverable and server.should_exit)


def test_process_with_stuck_threads_exits_with_status_70(tmp_path):
    """Stuck threads keep neither the drain nor the interpreter from ending."""
    vitrail.save(tiny_model(), tmp_path / "tiny")
    code = """
import sys, threading
from vitrail.prediction.predictor import Predictor
from vitrail.serving.config import ServerConfig
from vitrail.serving.server import serve
def stuck(*args, **options):
    predictor = Predictor(*args, **options)
    predictor.preprocess = lambda data: threading.Event().wait()
    return predictor
config = ServerConfig(port=0, grace=1, watchdog=0.5, timeout=0.5, batch=1)
serve({"tiny": sys.argv[1]}, config, predictor=stuck, log=lambda line: print(line, flush=True))
"""
    words = [sys.executable, "-c", code, str(tmp_path / "tiny")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        try:
            port = next(int(line.rpartition(":")[2]) for line in it.stdout if "http" in line)
            wait_for(lambda: status(port, "/ready")[0] == 200)  # else the warm-up may delay them
            thread, _ = in_background(port, [PREDICT] * 3)
            _, errors = it.communicate(timeout=60)
        finally:
            it.kill()
        thread.join(20)
        assert it.returncode == 70
        assert "threads are stuck" in errors
