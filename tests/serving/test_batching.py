import asyncio

import pytest
from serving_helpers import Gate

from vitrail.serving.batching import Batcher


@pytest.fixture
def batcher():
    batcher = Batcher()
    yield batcher
    batcher.stop()


def begun(gate):
    """Wait until a batch has begun."""
    return asyncio.to_thread(gate.begun.acquire, timeout=60)


def test_a_lone_piece_waits_for_no_other(batcher):
    async def story():
        gate = Gate()
        gate.open.set()
        return await batcher.submit(gate, ["a"]).done

    assert asyncio.run(story()) == [("a", 1)]


def test_what_waits_is_done_together_up_to_the_batch(batcher):
    async def story():
        gate = Gate(batch_size=4)
        first = batcher.submit(gate, ["a"])
        await begun(gate)
        later = [batcher.submit(gate, [letter]) for letter in "bcdefg"]
        gate.open.set()
        await asyncio.gather(first.done, *(order.done for order in later))
        return gate.batches, [order.batch for order in later]

    batches, sizes = asyncio.run(story())
    assert batches == [["a"], ["b", "c", "d", "e"], ["f", "g"]]
    assert sizes == [4, 4, 4, 4, 2, 2]


def test_a_large_request_is_split_and_comes_back_in_order(batcher):
    async def story():
        gate = Gate(batch_size=3)
        gate.open.set()
        return await batcher.submit(gate, list("abcdefgh")).done

    assert [piece for piece, _ in asyncio.run(story())] == list("abcdefgh")


def test_work_of_another_kind_is_never_mixed_in_and_keeps_its_turn(batcher):
    async def story():
        one, other = Gate(), Gate()
        first = batcher.submit(one, ["a"])
        await begun(one)
        orders = [batcher.submit(work, [x]) for work, x in [(other, "x"), (one, "b"), (other, "y")]]
        one.open.set()
        other.open.set()
        await asyncio.gather(first.done, *(order.done for order in orders))
        return one.batches, other.batches

    assert asyncio.run(story()) == ([["a"], ["b"]], [["x", "y"]])


def test_what_nobody_waits_for_is_not_begun(batcher):
    async def story():
        gate = Gate()
        first = batcher.submit(gate, ["a"])
        await begun(gate)
        dropped, kept = batcher.submit(gate, ["b", "c"]), batcher.submit(gate, ["d"])
        batcher.cancel(dropped)
        assert len(batcher.waiting) == 1  # its pieces are not kept either
        gate.open.set()
        await asyncio.gather(first.done, kept.done)
        return gate.batches

    assert asyncio.run(story()) == [["a"], ["d"]]


def test_a_fault_reaches_those_it_concerns_and_the_thread_goes_on(batcher):
    class Faulty:
        batch_size = 4

        def __call__(self, pieces):
            if "all" in pieces:
                raise RuntimeError("all")
            return [RuntimeError(x) if x == "one" else x for x in pieces]

    async def story():
        gate, faulty = Gate(), Faulty()
        first = batcher.submit(gate, ["hold"])
        await begun(gate)
        orders = [batcher.submit(faulty, [x]) for x in ("one", "good")]
        gate.open.set()
        await first.done
        found = await asyncio.gather(*(order.done for order in orders), return_exceptions=True)
        last = await asyncio.gather(batcher.submit(faulty, ["all"]).done, return_exceptions=True)
        return found, last, await batcher.submit(faulty, ["fine"]).done

    (one, good), (everything,), fine = asyncio.run(story())
    assert isinstance(one, RuntimeError)
    assert good == ["good"]
    assert isinstance(everything, RuntimeError)
    assert fine == ["fine"]


def test_a_loop_that_is_gone_does_not_stop_the_thread(batcher):
    async def leave():
        gate = Gate()
        batcher.submit(gate, ["a"])
        await begun(gate)
        return gate

    asyncio.run(leave()).open.set()

    async def ask():
        gate = Gate()
        gate.open.set()
        return await batcher.submit(gate, ["b"]).done

    assert asyncio.run(ask()) == [("b", 1)]


def test_it_knows_its_pace(batcher):
    async def story():
        gate = Gate()
        gate.open.set()
        await batcher.submit(gate, list("abcd")).done

    assert batcher.throughput == 0
    asyncio.run(story())
    assert batcher.throughput > 0
