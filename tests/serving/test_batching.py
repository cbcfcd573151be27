import asyncio
import gc
import threading

import pytest
from serving_helpers import Gate, encoded_image, wait_for

from vitrail.errors import DataError
from vitrail.serving import batching
from vitrail.serving.batching import Batcher, DecodePool, DecodeTask
from vitrail.serving.config import ServerConfig
from vitrail.serving.metrics import Metrics


@pytest.fixture
def batcher():
    batcher = Batcher(Metrics(queue=int, in_flight=int, stuck=int))
    yield batcher
    batcher.stop()


def started(gate):
    return asyncio.to_thread(gate.started.acquire, timeout=60)


@pytest.mark.parametrize(
    ("jobs", "batches", "sizes"),
    [
        ("b c d e f g", ["a", "bcde", "fg"], [4, 4, 4, 4, 2, 2]),
        ("X b Y", ["a", "XY", "b"], [2, 1, 2]),  # other work is not mixed, and keeps its turn
    ],
    ids=["batch size", "other work"],
)
def test_waiting_items_are_batched(batcher, jobs, batches, sizes):
    async def scenario():
        one, other = Gate(batch_size=4), Gate(batch_size=4)
        other.batches = one.batches
        first = batcher.submit(one, ["a"])
        await started(one)
        later = [batcher.submit(other if word.isupper() else one, [word]) for word in jobs.split()]
        one.open.set()
        other.open.set()
        await asyncio.gather(first.done, *(job.done for job in later))
        return ["".join(batch) for batch in one.batches], [job.batch for job in later]

    assert asyncio.run(scenario()) == (batches, sizes)


def test_closed_event_loop_does_not_stop_the_thread_and_a_job_keeps_its_order(batcher):
    async def leave():
        gate = Gate()
        batcher.submit(gate, ["a"])
        await started(gate)
        return gate

    async def submit():
        return await batcher.submit(gate, [*"bcdefg"]).done

    gate = asyncio.run(leave())
    assert batcher.throughput == 0
    gate.open.set()
    assert asyncio.run(submit()) == [(item, 4 if item < "f" else 2) for item in "bcdefg"]
    assert batcher.throughput > 0


# Decoding

SMALL, LARGE = encoded_image(size=(8, 8)), encoded_image(size=(50, 50))


@pytest.fixture
def pool():
    pool = DecodePool(ServerConfig(max_pixels=64 * 64))
    yield pool
    pool.close()


class Panic(BaseException):
    """Like the PanicException of extensions in Rust."""


def refuse(*_, **__):
    raise RuntimeError("can't start new thread")


def test_large_image_is_decoded_if_no_thread_can_be_started(pool, monkeypatch):
    budget = pool.free_pixels
    monkeypatch.setattr(batching, "Thread", type("Refused", (threading.Thread,), {"start": refuse}))
    for image in [LARGE, SMALL] * (pool.threads + 1):
        assert pool.submit(image, len).result(timeout=20) == len(image)
    assert pool.free_pixels == budget


@pytest.mark.parametrize("image", [SMALL, LARGE], ids=["small", "large"])
def test_no_exception_ends_a_decoding_thread(pool, image):
    def panic(data):
        raise Panic("index out of bounds")

    budget = pool.free_pixels
    for _ in range(pool.threads + 1):
        with pytest.raises(RuntimeError, match=r"Panic\('index out of bounds'\)"):
            pool.submit(image, panic).result(timeout=20)
    assert pool.submit(image, len).result(timeout=20) == len(image)
    assert pool.free_pixels == budget


def test_spare_threads_are_counted_once_they_start(pool, monkeypatch):
    count, pool.size = pool.threads, pool.threads + 1
    with monkeypatch.context() as patch:
        patch.setattr(batching, "start_pool", refuse)
        pool.add_threads()
    assert pool.threads == count
    pool.add_threads()
    assert pool.threads == count + 1


def raise_data_error(data):
    raise DataError("corrupt")


@pytest.mark.parametrize(("image", "function"), [(b"text", len), (SMALL, raise_data_error)])
def test_error_does_not_keep_the_image_in_memory(pool, image, function):
    gc.collect()
    gc.disable()
    try:
        assert isinstance(pool.submit(image, function).exception(timeout=20), DataError)
        wait_for(lambda: not any(type(one) is DecodeTask for one in gc.get_objects()))
    finally:
        gc.enable()
