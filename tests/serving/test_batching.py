import asyncio

import pytest
from serving_helpers import Gate

from vitrail.serving.batching import Batcher


@pytest.fixture
def batcher():
    batcher = Batcher()
    yield batcher
    batcher.stop()


def started(gate):
    """Wait until a batch has started."""
    return asyncio.to_thread(gate.started.acquire, timeout=60)


@pytest.mark.parametrize("items", ["a", "abcdefgh"])
def test_items_do_not_wait_and_keep_their_order(batcher, items):
    """A single one, and a job of several batches."""

    async def scenario():
        gate = Gate(batch_size=3)
        gate.open.set()
        return await batcher.submit(gate, list(items)).done

    assert batcher.throughput == 0
    assert [item for item, _ in asyncio.run(scenario())] == list(items)
    assert batcher.throughput > 0


def test_waiting_items_are_batched_up_to_the_batch_size(batcher):
    async def scenario():
        gate = Gate(batch_size=4)
        first = batcher.submit(gate, ["a"])
        await started(gate)
        later = [batcher.submit(gate, [letter]) for letter in "bcdefg"]
        gate.open.set()
        await asyncio.gather(first.done, *(job.done for job in later))
        return gate.batches, [job.batch for job in later]

    batches, sizes = asyncio.run(scenario())
    assert batches == [["a"], ["b", "c", "d", "e"], ["f", "g"]]
    assert sizes == [4, 4, 4, 4, 2, 2]


def test_different_work_is_not_mixed_and_keeps_its_turn(batcher):
    async def scenario():
        one, other = Gate(), Gate()
        first = batcher.submit(one, ["a"])
        await started(one)
        jobs = [batcher.submit(work, [x]) for work, x in [(other, "x"), (one, "b"), (other, "y")]]
        one.open.set()
        other.open.set()
        await asyncio.gather(first.done, *(job.done for job in jobs))
        return one.batches, other.batches

    assert asyncio.run(scenario()) == ([["a"], ["b"]], [["x", "y"]])


def test_canceled_job_is_not_started(batcher):
    async def scenario():
        gate = Gate()
        first = batcher.submit(gate, ["a"])
        await started(gate)
        dropped, remaining = batcher.submit(gate, ["b", "c"]), batcher.submit(gate, ["d"])
        batcher.cancel(dropped)
        assert len(batcher.waiting) == 1  # its items are not remaining either
        gate.open.set()
        await asyncio.gather(first.done, remaining.done)
        return gate.batches

    assert asyncio.run(scenario()) == [["a"], ["d"]]


def test_error_fails_its_jobs_and_the_thread_continues(batcher):
    class Faulty:
        batch_size = 4

        def __call__(self, items):
            if "all" in items:
                raise RuntimeError("all")
            return [RuntimeError(x) if x == "one" else x for x in items]

    async def scenario():
        gate, faulty = Gate(), Faulty()
        first = batcher.submit(gate, ["hold"])
        await started(gate)
        jobs = [batcher.submit(faulty, [x]) for x in ("one", "good")]
        gate.open.set()
        await first.done
        results = await asyncio.gather(*(job.done for job in jobs), return_exceptions=True)
        last = await asyncio.gather(batcher.submit(faulty, ["all"]).done, return_exceptions=True)
        return results, last, await batcher.submit(faulty, ["fine"]).done

    (one, good), (everything,), fine = asyncio.run(scenario())
    assert isinstance(one, RuntimeError)
    assert good == ["good"]
    assert isinstance(everything, RuntimeError)
    assert fine == ["fine"]


def test_closed_event_loop_does_not_stop_the_thread(batcher):
    async def leave():
        gate = Gate()
        batcher.submit(gate, ["a"])
        await started(gate)
        return gate

    async def submit():
        return await batcher.submit(gate, ["b"]).done

    gate = asyncio.run(leave())
    gate.open.set()
    assert asyncio.run(submit()) == [("b", 1)]
