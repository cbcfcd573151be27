"""Everything the routes share: the models, the batcher, the room, the numbers, and their state."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request

from vitrail.serving.batcher import Batcher, Work
from vitrail.serving.bodies import Upload, check_type, declared_size, read_body, uploads
from vitrail.serving.examples import Example, find_examples
from vitrail.serving.logs import Record, record_of, write_bug, write_event
from vitrail.serving.meters import Meters
from vitrail.serving.readers import Readers
from vitrail.serving.refusals import ClientGoneError, Refusal
from vitrail.serving.room import Place, Room
from vitrail.serving.settings import Settings
from vitrail.serving.shelf import Served, Shelf
from vitrail.serving.work import Alone, Piece, Tools, best_batch, run_once

PATIENCE = 0.25  # seconds after which it is watched whether the client is still there
PLACES = "vitrail.places"  # where a request's scope keeps the stack that its place is on
LARGE = 2**18  # bytes of a form that the event loop does not take apart itself
MAX_STUCK = 3  # threads; with as many, the process must be restarted
VERY_LONG = 5  # times the watchdog's limit; with one thread stuck for so long, too


class House:
    """What one server process has."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.batcher = Batcher()
        self.room = Room(self.limits, lambda: self.batcher.pace)
        self.in_flight = 0
        self.meters = self.batcher.meters = Meters(
            queue=lambda: self.room.pictures,
            in_flight=lambda: self.in_flight,
            stuck=lambda: len(self.stuck),
        )
        self.readers = Readers(self.limits.pixels)
        self.tools = Tools(readers=self.readers, limits=self.limits, meters=self.meters)
        self.shelf = Shelf({})
        self.examples: dict[str, list[Example]] = {}
        self.places: dict[str, Path | None] = {}  # folders in which lessons are kept
        self.warm = self.unable = self.draining = False
        self.lost = False  # so much is stuck that only a restart helps

    def add(self, served: Served) -> None:
        self.shelf.replace(served)

    async def warm_up(self) -> None:
        """Run every model once; measure how many pictures at once are best, if none is set."""
        able = [await self.warm_one(served) for served in list(self.shelf.models.values())]
        self.warm, self.unable = all(able), not all(able)
        for name, served in list(self.shelf.models.items()):
            if name not in self.examples:
                metadata, given = served.predictor.metadata, self.settings.examples
                self.examples[name] = await asyncio.to_thread(find_examples, metadata, given)

    async def warm_one(self, served: Served) -> bool:
        """Run a model; False if it cannot answer a single picture. The log tells what fails."""
        batch, predictor = self.settings.batch, served.predictor
        full = partial(run_once, predictor, batch) if batch else partial(best_batch, predictor)
        for attempt in (full, partial(run_once, predictor, 1)):
            try:
                (found,) = await self.batcher.submit(Alone(attempt), [None]).done
            except Exception as error:
                bug = Record("warm-up", "", route=served.name)
                write_bug(bug, error, self.settings.log)
            else:
                if attempt is full:  # else the usual one is as good as any
                    served.batch = found
                return True
        return False

    @property
    def stalled(self) -> bool:
        """Whether nobody can be answered in time, because threads do not come back."""
        seconds = self.limits.timeout
        return self.batcher.seconds > seconds or self.readers.stalled(seconds)

    @property
    def stuck(self) -> list[float]:
        """For how many seconds each thread has been stuck."""
        now, limit = time.monotonic(), self.settings.watchdog
        ages = [now - since for since in list(self.batcher.abandoned.values())]
        ages += [self.batcher.seconds, *self.readers.seconds()]
        return [age for age in ages if age > limit]

    def watch(self) -> bool:
        """Replace threads that are stuck; True if the process must be restarted."""
        limit = self.settings.watchdog
        self.readers.add_spares()
        if self.batcher.seconds > limit and (self.warm or self.unable):
            text = f"the work took longer than {limit:g} s and was abandoned"
            write_event(f"{text}; another thread goes on", self.settings.log)
            self.batcher.abandon(Refusal(503, text, reason="stuck"))
        if not self.lost:
            stuck = self.stuck
            self.lost = len(stuck) >= MAX_STUCK or max(stuck, default=0) > VERY_LONG * limit
            if self.lost:
                told = f"{len(stuck)} stuck for up to {max(stuck):.0f} s"
                write_event(f"threads are stuck ({told}); the server ends", self.settings.log)
        return self.lost

    def close(self) -> None:
        """Let the threads go."""
        self.batcher.stop()
        self.readers.close()

    def enter(self, request: Request, *, heavy: bool = False) -> Place:
        """A place for a request, before its body is read; it is given back by the application."""
        check_type(request)
        place = self.room.enter(declared_size(request, self.limits), heavy=heavy)
        return request.scope[PLACES].enter_context(place)

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
            for piece in pieces:
                if isinstance(piece, Piece) and piece.image is not None:
                    piece.image.cancel()

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
