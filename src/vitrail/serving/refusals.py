"""What a request is told when it gets no answer: a status and one line."""

import asyncio
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vitrail.serving.logs import GONE, record_of
from vitrail.serving.replies import as_json

LINGER = 2.0  # seconds for a client to see a refusal while it still sends
SMALL = 2**18  # bytes of a body that may be left unread without closing the connection


class Refusal(Exception):  # noqa: N818 - it is no fault of ours
    """An answer other than the one that was wanted. `reason` is a word for the metrics."""

    def __init__(
        self, status: int, text: str, *, reason: str = "other", headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(text)
        self.status, self.text, self.reason, self.headers = status, text, reason, headers


class ClientGoneError(Exception):
    """Nobody is there any more to hear an answer."""


class Refused(Response):
    """A refusal as a response.

    A large body that is still to come is thrown away for a while, so that the client reads the
    answer instead of finding a broken connection; then the connection is closed.
    """

    def __init__(self, refusal: Refusal) -> None:
        body = as_json({"error": " ".join(refusal.text.split())})
        super().__init__(body, refusal.status, refusal.headers, "application/json")
        self.refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        record.reason = self.refusal.reason
        if record.whole or not comes_more(dict(scope["headers"])):
            await super().__call__(scope, receive, send)
            return
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await throw_away(receive)
        await send({"type": "http.response.body", "body": b""})


class Silence(Response):
    """No response at all, to a client that has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).status = GONE


def busy(seconds: int, reason: str) -> Refusal:
    text = f"too many are waiting; try again in {seconds} s"
    return Refusal(503, text, reason=reason, headers={"Retry-After": str(seconds)})


def stopping() -> Refusal:
    text = "the server is stopping; try again in a moment"
    return Refusal(503, text, reason="stopping", headers={"Retry-After": "5"})


def comes_more(headers: Mapping[bytes, bytes]) -> bool:
    """Whether so much of a body may still come that it is not worth reading."""
    length = headers.get(b"content-length")
    if length is None:
        return b"transfer-encoding" in headers
    return not length.isdigit() or int(length) > SMALL


async def throw_away(receive: Receive) -> None:
    """Read what comes, for a while."""
    try:
        async with asyncio.timeout(LINGER):
            while (await receive()).get("more_body"):
                continue
    except TimeoutError:
        return
