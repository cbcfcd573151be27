"""One thread that does what waits: as many pictures at once as are there, never waiting for more.

Whenever the engine is free it takes what there is, up to its batch. So a lone request waits for
nothing, and a busy server runs full batches without a timer. Everything that needs the
machine's cores (batches, explanations, lessons) goes through this one thread, so that none slows
down another. What nobody waits for any more is not begun.

Work that is stuck cannot be interrupted: its thread is abandoned. The requests get an error and
another thread goes on; the abandoned one ends when its work returns, and the result is dropped.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition, Thread, current_thread
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
        """The result of each piece; an exception in its place if only that one failed.

        A future in its place defers the piece: it waits again once the future is done.
        """
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
        self.batch: list[tuple[Order, int]] = []  # what the thread is working on
        self.since = 0.0  # when that began, on the monotonic clock
        self.abandoned: dict[Thread, float] = {}  # stuck threads, since when they work
        self.start()

    def start(self) -> None:
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

    @property
    def seconds(self) -> float:
        """How long the current batch has been running."""
        with self.change:
            return time.monotonic() - self.since if self.batch else 0.0

    def abandon(self, error: BaseException) -> None:
        """Give up the current batch and its thread: its requests get an error."""
        with self.change:
            if not (batch := self.batch):
                return
            self.abandoned[self.thread], self.batch = self.since, []
            self.start()
        deliver(dict.fromkeys((order for order, _ in batch), error))

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
                if self.meters is not None:
                    self.meters.stages.see(begun - order.since, "wait")
            try:
                results = work([order.pieces[place] for order, place in batch])
            except Exception as error:
                results = [error] * len(batch)
            if not self.complete():
                return
            finished, count = self.settle(batch, results)
            if work.most > 1 and count:
                seen = count / max(time.perf_counter() - begun, 1e-6)
                self.pace = seen if not self.pace else self.pace + SMOOTHING * (seen - self.pace)
                if self.meters is not None:
                    self.meters.batches.see(count)
            deliver(finished)

    def complete(self) -> bool:
        """End the current batch; False if this thread was abandoned meanwhile."""
        with self.change:
            self.abandoned.pop(current_thread(), None)
            if self.thread is not current_thread():
                return False
            self.batch = []
            return True

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
            self.batch, self.since = batch, time.monotonic()
            return batch

    def settle(
        self, batch: Sequence[tuple[Order, int]], results: Sequence[Any]
    ) -> tuple[dict[Order, BaseException | None], int]:
        """Put results where they belong; the orders that are complete, or have failed, and how many
        pieces were not deferred."""
        finished: dict[Order, BaseException | None] = {}
        count = sum(not isinstance(result, Future) for result in results)
        for (order, place), result in zip(batch, results, strict=True):
            if isinstance(result, Future):
                result.add_done_callback(partial(self.requeue, order, place))
                continue
            order.batch = max(order.batch, count)
            order.results[place] = result
            order.left -= 1
            if isinstance(result, Exception):
                finished[order] = result
            elif not order.left:
                finished.setdefault(order, None)
        return finished, count

    def requeue(self, order: Order, place: int, _: "Future[Any]") -> None:
        """A deferred piece is next, unless nobody waits for it any more."""
        with self.change:
            if not order.done.done():
                self.waiting.appendleft((order, place))
                self.change.notify()


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
