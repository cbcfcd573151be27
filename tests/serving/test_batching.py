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
