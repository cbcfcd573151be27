"""One thread that does what waits: as many pictures at once as are there, never waiting for more.

Whenever the engine is free it takes what there is, up to its batch. So a lone request waits for
nothing, and a busy server runs full batches without a timer. Everything that needs the
machine's cores (batches, explanations, lessons) goes through this one thread, so that none slows
down another. What nobody waits for any more is not begun.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from threading import Condition, Thread
from typing import Any, Protocol

from vitrail.serving.meters import Meters

LONGEST_GOODBYE = 10.0  # seconds
SMOOTHING = 0.2  # the last batch's part in the pace


class Work(Protocol):
    """Something that is done to pieces, several at once; equal only to itself."""

    @property
    def most(self) -> int:
        """Pieces at once."""
        ...

    def __call__(self, pieces: Sequence[Any], /) -> Sequence[Any]:
        """The result of each piece; an exception in its place if only that one failed."""
        ...


class Order:
    """The pieces of one request, their results, and the future that hears of the last of them."""

    def __init__(self, work: Work, pieces: Sequence[Any]) -> None:
        self.work, self.pieces = work, pieces
        self.results: list[Any] = [None] * len(pieces)
        self.left = len(pieces)
        self.batch = 0  # the largest that one of its pieces was part of
        self.since = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[list[Any]] = self.loop.create_future()

    def tell(self, error: BaseException | None = None) -> None:
        """On the event loop: it is over."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(self.results)
        else:
            self.done.set_exception(error)


class Batcher:
    """The queue and its thread."""

    def __init__(self) -> None:
        self.meters: Meters | None = None
        self.waiting: deque[tuple[Order, int]] = deque()
        self.change = Condition()
        self.stopped = False
        self.pace = 0.0  # pictures per second, lately
        self.thread = Thread(target=self.run, name="batcher", daemon=True)
        self.thread.start()

    def submit(self, work: Work, pieces: Sequence[Any]) -> Order:
        """Let pieces wait for their turn."""
        order = Order(work, pieces)
        with self.change:
            self.waiting.extend((order, place) for place in range(len(pieces)))
            self.change.notify()
        return order

    def give_up(self, order: Order) -> None:
        """Nobody waits for an order any more: what has not begun will not, and is let go."""
        order.done.cancel()
        if order.left:
            with self.change:
                self.waiting = deque(item for item in self.waiting if item[0] is not order)

    def stop(self) -> None:
        """End the thread when it is done with what it is doing."""
        with self.change:
            self.stopped = True
            self.change.notify()
        self.thread.join(LONGEST_GOODBYE)

    def run(self) -> None:
        while batch := self.take():
            begun = time.perf_counter()
            work = batch[0][0].work
            for order, _ in batch:
                order.batch = max(order.batch, len(batch))
                if self.meters is not None:
                    self.meters.stages.see(begun - order.since, "wait")
            try:
                results = work([order.pieces[place] for order, place in batch])
            except Exception as error:
                results = [error] * len(batch)
            finished = self.settle(batch, results)
            if work.most > 1:
                seen = len(batch) / max(time.perf_counter() - begun, 1e-6)
                self.pace = seen if not self.pace else self.pace + SMOOTHING * (seen - self.pace)
                if self.meters is not None:
                    self.meters.batches.see(len(batch))
            deliver(finished)

    def take(self) -> list[tuple[Order, int]]:
        """The piece that waits longest and others of its kind; nothing at the end."""
        with self.change:
            while not (self.waiting or self.stopped):
                self.change.wait()
            if self.stopped:
                return []
            work = self.waiting[0][0].work
            batch, others, most = [], [], work.most
            while self.waiting and len(batch) < most:
                order, place = self.waiting.popleft()
                (batch if order.work is work else others).append((order, place))
            self.waiting.extendleft(reversed(others))
            return batch

    def settle(
        self, batch: Sequence[tuple[Order, int]], results: Sequence[Any]
    ) -> dict[Order, BaseException | None]:
        """Put results where they belong; the orders that are complete, or have failed."""
        finished: dict[Order, BaseException | None] = {}
        for (order, place), result in zip(batch, results, strict=True):
            order.results[place] = result
            order.left -= 1
            if isinstance(result, Exception):
                finished[order] = result
            elif not order.left:
                finished.setdefault(order, None)
        return finished


def deliver(finished: dict[Order, BaseException | None]) -> None:
    """Tell each event loop once about all of its orders."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Order, BaseException | None]]] = {}
    for order, error in finished.items():
        by_loop.setdefault(order.loop, []).append((order, error))
    for loop, orders in by_loop.items():
        try:
            loop.call_soon_threadsafe(tell_all, orders)
        except RuntimeError:  # the loop is closed: nobody waits
            continue


def tell_all(orders: list[tuple[Order, BaseException | None]]) -> None:
    for order, error in orders:
        order.tell(error)
