"""Who may bring pictures in: places and bytes are taken before a body is read, and given back.

So what a server holds in memory has a bound, however many ask; those who find no room are told at
once when to come again. Everything here happens on the event loop.
"""

import math
from collections.abc import Callable

from vitrail.serving.refusals import Refusal, busy
from vitrail.serving.settings import Limits

USUAL_PACE = 50.0  # pictures per second, until it is known
LONGEST_WAIT = 60  # seconds a client is asked to stay away at most


class Room:
    """How many pictures and bytes are in the house."""

    def __init__(self, limits: Limits, pace: Callable[[], float]) -> None:
        self.limits = limits
        self.pace = pace  # pictures per second
        self.pictures = self.heavy = self.bytes = 0

    @property
    def is_full(self) -> bool:
        return self.pictures >= self.limits.queue

    def enter(self, size: int, *, heavy: bool = False) -> "Place":
        """A place for one request of so many bytes, whose pictures are not counted yet."""
        if self.is_full:
            raise self.busy("queue")
        if heavy and self.heavy >= self.limits.heavy:
            raise self.busy("heavy")
        if self.bytes + size > self.limits.memory:
            raise self.busy("memory")
        return Place(self, size, heavy)

    def busy(self, reason: str) -> Refusal:
        seconds = math.ceil(self.pictures / (self.pace() or USUAL_PACE))
        return busy(min(LONGEST_WAIT, max(1, seconds)), reason)


class Place:
    """What one request holds; it is given back on leaving."""

    def __init__(self, room: Room, size: int, heavy: bool) -> None:
        self.room, self.pictures, self.bytes, self.heavy = room, 1, size, int(heavy)
        room.pictures += self.pictures
        room.bytes += self.bytes
        room.heavy += self.heavy

    def widen(self, pictures: int) -> None:
        """Take places for all pictures of the request, now that their number is known."""
        more = pictures - self.pictures
        if self.room.pictures + more > self.room.limits.queue:
            raise self.room.busy("queue")
        self.room.pictures += more
        self.pictures = pictures

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self.room.pictures -= self.pictures
        self.room.bytes -= self.bytes
        self.room.heavy -= self.heavy
