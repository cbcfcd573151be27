"""What uvicorn lacks: time and size limits on a request's head, a limit on connections, errors as
JSON, and a way to stop that loses nobody."""

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_CONNECTIONS = 1000  # under the usual limit of open files, 1024
LONGEST_HEAD = 64 * 2**10  # bytes of request line and headers
HEAD_SECONDS = 10.0  # for them to arrive
LAME_SECONDS = 0.3  # for those who just asked to be told that it is stopping


class Connection(HttpToolsProtocol):
    """One connection; a request's head must come in time and not be endless."""

    timer: asyncio.TimerHandle | None = None
    head: int | None = None  # bytes of it so far; None while there is none to come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self.refuse(503, "too many are connected; try again in 5 s", "retry-after: 5\r\n")
        else:
            self.await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.head is not None:
            self.head += len(data)
            if self.head > LONGEST_HEAD:
                self.refuse(431, f"the headers are longer than {LONGEST_HEAD:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.await_head()

    def on_headers_complete(self) -> None:
        self.stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body:  # refused before it was read: what is left must come soon
            self.wait()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle.response_complete:
            self.await_head()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "that is no HTTP request")

    def await_head(self) -> None:
        """Give the head of a request some time, and not too many bytes."""
        self.wait()
        self.head = 0

    def wait(self) -> None:
        """Hang up if nothing happens."""
        self.stop_waiting()
        self.timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def stop_waiting(self) -> None:
        self.head = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def refuse(self, status: int, text: str, more: str = "") -> None:
        """Answer without having understood the request, and hang up."""
        body = f'{{"error":"{text}"}}'
        self.stop_waiting()
        self.transport.write(
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n{more}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
        )
        self.transport.close()


class Stoppable(Server):
    """Told to stop, it says so to those who ask, finishes what it has begun, and ends well."""

    def __init__(self, config: Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self.drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's, which would let the signal end the process after all was done."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self.drain()

    async def shutdown(self, sockets: Any = None) -> None:
        self.drain()
        if not self.force_exit:
            await asyncio.sleep(LAME_SECONDS)
        await super().shutdown(sockets)
