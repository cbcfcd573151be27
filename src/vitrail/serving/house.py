"""Everything the routes share: the models, the batcher, the room, the numbers, and their state."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request

from vitrail.data.threads import cores, reading_threads
from vitrail.serving.batcher import Batcher, Work
from vitrail.serving.bodies import Upload, check_type, declared_size, read_body, uploads
from vitrail.serving.examples import Example, find_examples
from vitrail.serving.logs import record_of
from vitrail.serving.meters import Meters
from vitrail.serving.refusals import ClientGoneError, Refusal
from vitrail.serving.room import Place, Room
from vitrail.serving.settings import Settings
from vitrail.serving.shelf import Served, Shelf
from vitrail.serving.work import Alone, Tools, best_batch

PATIENCE = 0.25  # seconds after which it is watched whether the client is still there
LARGE = 2**18  # bytes of a form that the event loop does not take apart itself


class House:
    """What one server process has."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.batcher = Batcher()
        self.room = Room(self.limits, lambda: self.batcher.pace)
        self.in_flight = 0
        self.meters = self.batcher.meters = Meters(
            queue=lambda: self.room.pictures, in_flight=lambda: self.in_flight
        )
        self.readers = reading_threads(cores())
        self.tools = Tools(readers=self.readers, limits=self.limits, meters=self.meters)
        self.shelf = Shelf({})
        self.examples: dict[str, list[Example]] = {}
        self.places: dict[str, Path | None] = {}  # folders in which lessons are kept
        self.warm = self.draining = False

    def add(self, served: Served) -> None:
        self.shelf.replace(served)

    async def warm_up(self) -> None:
        """Run every model once; measure how many pictures at once are best, if none is set."""
        for served in list(self.shelf.models.values()):
            batch = self.settings.batch
            if not batch:
                measure = Alone(lambda served=served: best_batch(served.predictor))
                (batch,) = await self.batcher.submit(measure, [None]).done
            served.batch = batch
        self.warm = True
        for name, served in list(self.shelf.models.items()):
            if name not in self.examples:
                facts, given = served.predictor.facts, self.settings.examples
                self.examples[name] = await asyncio.to_thread(find_examples, facts, given)

    def close(self) -> None:
        """Let the threads go."""
        self.batcher.stop()
        self.readers.shutdown(wait=False, cancel_futures=True)

    def enter(self, request: Request, *, heavy: bool = False) -> Place:
        """A place for a request, before its body is read."""
        check_type(request)
        return self.room.enter(declared_size(request, self.limits), heavy=heavy)

    async def pictures(self, request: Request, place: Place) -> list[Upload]:
        """What a request brings along, with a place for each."""
        record = record_of(request.scope)
        body = await read_body(request, self.limits, record)
        if len(body) > LARGE:
            found = await asyncio.to_thread(uploads, request, body, self.limits)
        else:
            found = uploads(request, body, self.limits)
        place.widen(len(found))
        record.pictures = len(found)
        return found

    async def do(self, request: Request, work: Work, pieces: Sequence[Any]) -> list[Any]:
        """The results of pieces; given up when time is over or the client has hung up."""
        order = self.batcher.submit(work, pieces)
        seconds = self.limits.timeout
        try:
            await asyncio.wait([order.done], timeout=min(PATIENCE, seconds))
            if not order.done.done():
                await self.patiently(request, order.done, seconds - PATIENCE)
            record_of(request.scope).batch = order.batch if work.most > 1 else 0
            if order.done.done():
                return order.done.result()
            raise Refusal(504, f"no answer within {seconds:g} s", reason="timeout")
        finally:
            self.batcher.give_up(order)

    async def patiently(
        self, request: Request, done: "asyncio.Future[list[Any]]", seconds: float
    ) -> None:
        """Wait until it is done, time is over, or nobody is there any more."""
        gone = asyncio.ensure_future(hung_up(request))
        try:
            await asyncio.wait(
                [done, gone], timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED
            )
            if gone.done() and not done.done():
                raise ClientGoneError
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone


async def hung_up(request: Request) -> None:
    """Come back when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
