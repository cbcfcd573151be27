"""Around every request: who may ask, what is written down, which headers go along.

Plain ASGI, because every request passes here, those that are refused by the hundred included.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from hmac import compare_digest

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.serving.house import House
from vitrail.serving.logs import RECORD, Record, request_id, write, write_bug
from vitrail.serving.refusals import Refusal, Refused, stopping

OPEN = frozenset(("/", "/docs", "/openapi.json", "/health", "/ready"))  # no token is asked for
ALIVE = frozenset(("/health", "/ready", "/metrics"))  # answered until the end
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
SLICE = 2**16  # bytes of an answer that are sent at once
POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")


class Guard:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        self.app, self.house = app, house
        self.token = house.settings.token.encode()
        self.names = house.settings.names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        known = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        record = scope[RECORD] = Record(known, scope["method"])
        answer = Answer(record, send, self.house)
        self.house.in_flight += 1
        try:
            if (refusal := self.refusal(scope, headers)) is not None:
                await Refused(refusal)(scope, receive, answer)
            else:
                await self.pass_on(answer, scope, receive)
        finally:
            self.house.in_flight -= 1
            self.note(record, scope)

    async def pass_on(self, answer: "Answer", scope: Scope, receive: Receive) -> None:
        """Let the application answer."""
        try:
            await self.app(scope, receive, answer)
        except asyncio.CancelledError:  # the time to finish is over
            if not answer.begun:
                await Refused(stopping())(scope, receive, answer)
        except Exception as error:  # a fault of ours, which was answered with 500 already
            write_bug(answer.record, error, self.house.settings.log)

    def refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Why a request is not even looked at."""
        path, house = scope["path"], self.house
        if self.names is not None and not house.settings.allows_host(called(headers), self.names):
            text = "asked by a name that is not this server's; say localhost, or --allow-host NAME"
            return Refusal(403, text, reason="host")
        if house.draining and path not in ALIVE:
            return stopping()
        if self.token and path not in OPEN and not self.shows_token(headers):
            told = {"WWW-Authenticate": "Bearer"}
            text = "this server wants a token: send the header Authorization: Bearer TOKEN"
            return Refusal(401, text, reason="token", headers=told)
        if scope["method"] == "POST":
            if is_foreign(headers, house.settings.origins):
                text = "pages of other sites may not ask here; --allow-origin would let them"
                return Refusal(403, text, reason="origin")
            if house.room.is_full:
                return house.room.busy("queue")
        return None

    def shows_token(self, headers: Mapping[bytes, bytes]) -> bool:
        kind, _, shown = headers.get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"bearer" and compare_digest(shown.strip(), self.token)

    def note(self, record: Record, scope: Scope) -> None:
        """Count it and write it down."""
        record.route = route_of(scope)
        seconds = time.perf_counter() - record.begun
        meters = self.house.meters
        meters.requests.add(record.route, str(record.status))
        meters.seconds.see(seconds, record.route)
        if record.reason:
            meters.rejected.add(record.reason)
        write(record, seconds, self.house.settings.log)


class Answer:
    """What is sent, with our headers; notes the status.

    In slices, so that a long answer has been sent, all but the last of it, when this comes back.
    """

    def __init__(self, record: Record, send: Send, house: House) -> None:
        self.record, self.send, self.house, self.begun = record, send, house, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            self.record.status = message["status"]
            own: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
            if not any(name == POLICY[0] for name, _ in own):
                own.append(POLICY)
            if self.house.draining:
                own.append((b"connection", b"close"))
            own += [*HEADERS, (b"x-request-id", self.record.id.encode())]
            message = {**message, "headers": own}
        elif len(body := message.get("body", b"")) > SLICE:
            *before, last = range(0, len(body), SLICE)
            view = memoryview(body)
            for place in before:
                part = bytes(view[place : place + SLICE])
                await self.send({**message, "body": part, "more_body": True})
            message = {**message, "body": bytes(view[last:])}
        await self.send(message)


def called(headers: Mapping[bytes, bytes]) -> str:
    """What a client calls the server; one that does not say is no browser, and means it."""
    host = headers.get(b"host", b"localhost").decode("latin-1").lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_foreign(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> bool:
    """Whether a browser sends this on behalf of a page that is neither from here nor allowed."""
    origin = headers.get(b"origin")
    if "*" in allowed:
        return False
    if origin is None:
        return headers.get(b"sec-fetch-site") == b"cross-site"
    own = origin.rpartition(b"/")[2] == headers.get(b"host")
    return not own and origin.decode("latin-1") not in allowed


def route_of(scope: Scope) -> str:
    """The pattern that matched, so that numbers do not grow with what is asked."""
    return getattr(scope.get("route"), "path", "other")
