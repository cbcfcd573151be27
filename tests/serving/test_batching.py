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


@pytest.mark.parametrize(
    ("jobs", "batches", "sizes"),
    [
        ("b c d e f g", ["a", "bcde", "fg"], [4, 4, 4, 4, 2, 2]),
        ("X b Y", ["a", "XY", "b"], [2, 1, 2]),  # other work is not mixed, and keeps its turn
        ("-bc d", ["a", "d"], [1]),  # canceled
    ],
    ids=["batch size", "other work", "canceled"],
)
def test_waiting_items_are_batched(batcher, jobs, batches, sizes):
    async def scenario():
        one, other = Gate(batch_size=4), Gate(batch_size=4)
        other.batches = one.batches
        first = batcher.submit(one, ["a"])
        await started(one)
        later = [
            (word, batcher.submit(other if word.isupper() else one, list(word.strip("-"))))
            for word in jobs.split()
        ]
        for word, job in later:
            if word[0] == "-":
                batcher.cancel(job)
        kept = [job for word, job in later if word[0] != "-"]
        assert len(batcher.waiting) == len(kept)  # nothing of a canceled job remains
        one.open.set()
        other.open.set()
        await asyncio.gather(first.done, *(job.done for job in kept))
        return ["".join(batch) for batch in one.batches], [job.batch for job in kept]

    assert asyncio.run(scenario()) == (batches, sizes)


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
