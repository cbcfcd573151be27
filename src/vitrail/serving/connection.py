"""What uvicorn lacks: time and size limits on a request's head and trailers, limits on pipelined
requests and on connections, errors as JSON, and a way to stop that loses nobody."""

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_CONNECTIONS = 1000  # under the usual limit of open files, 1024
LONGEST_HEAD = 64 * 2**10  # bytes of request line and headers, or of trailers
MAX_PIPELINED = 16  # requests that wait for the one before them on the same connection
SLICE = 16 * 2**10  # bytes parsed at once; the parser cannot be interrupted within them
HEAD_SECONDS = 10.0  # for them to arrive
SEND_SECONDS = 30.0  # for a client to take an answer that the system cannot keep for it
LAME_SECONDS = 0.3  # for those who just asked to be told that it is stopping


class Connection(HttpToolsProtocol):
    """One connection; a request's head must come in time and not be endless, and who does not
    read the answer is hung up on."""

    timer: asyncio.TimerHandle | None = None
    end: asyncio.TimerHandle | None = None  # when it is broken off, whatever is left to be sent
    head: int = 0  # bytes since the last body byte: request line, headers, chunk sizes, trailers
    in_message: bool = False  # after the headers of a request, before its end
    saturated: bool = False  # too many requests are pipelined: no further one is parsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self.refuse(503, "too many are connected; try again in 5 s", "retry-after: 5\r\n")
        else:
            self.await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        self.relent()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if self.transport.is_closing() or self.saturated:
                return
            part = data[start : start + SLICE]
            self.head += len(part)
            super().data_received(part)
            if self.head > LONGEST_HEAD:
                self.refuse(431, f"the headers are longer than {LONGEST_HEAD:,} bytes")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.saturated = True
            raise BufferError("too many pipelined requests")  # ends up in send_400_response
        super().on_message_begin()
        self.await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped: they must not pass for headers (RFC 9110, section 6.5.1)."""
        if not self.in_message:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.stop_waiting()
        super().on_headers_complete()
        self.in_message = True

    def on_body(self, body: bytes) -> None:
        self.head = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.hurry()
        elif not self.flow.write_paused:
            self.relent()
        if self.cycle.more_body:  # refused before it was read: what is left must come soon
            self.wait()

    def on_message_complete(self) -> None:
        self.in_message = False
        super().on_message_complete()
        if self.cycle.response_complete:
            self.await_head()

    def send_400_response(self, msg: str) -> None:
        if self.saturated:  # those that wait are answered, then the connection is closed
            self.cycle.keep_alive = False
        else:
            self.refuse(400, "that is no HTTP request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self.hurry()

    def resume_writing(self) -> None:
        super().resume_writing()
        sending = self.cycle.response_started and not self.cycle.response_complete
        if not (sending or self.pipeline or self.transport.is_closing()):
            self.relent()

    def timeout_keep_alive_handler(self) -> None:
        self.hang_up()

    def await_head(self) -> None:
        """Give the head of a request some time, and not too many bytes."""
        self.wait()
        self.head = 0

    def wait(self) -> None:
        """Hang up if nothing happens."""
        self.stop_waiting()
        self.timer = self.loop.call_later(HEAD_SECONDS, self.hang_up)

    def stop_waiting(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def hurry(self) -> None:
        """Break off in a while: to close would wait for ever for a client that does not read."""
        if self.end is None:
            self.end = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def relent(self) -> None:
        if self.end is not None:
            self.end.cancel()
            self.end = None

    def hang_up(self) -> None:
        """Close as soon as what was written is sent, if that is soon."""
        self.transport.close()
        self.hurry()

    def refuse(self, status: int, text: str, more: str = "") -> None:
        """Answer without having understood the request, and hang up."""
        body = f'{{"error":"{text}"}}'
        self.stop_waiting()
        if self.in_message:
            answerable = not (self.cycle.response_started or self.pipeline)
        else:
            answerable = self.cycle is None or self.cycle.response_complete
        if answerable:  # else the client would take it for the answer to another request
            self.transport.write(
                f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n{more}"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
            )
        self.hang_up()


class Stoppable(Server):
    """Told to stop, it says so to those who ask, finishes what it has begun, and ends well."""

    def __init__(
        self, config: Config, drain: Callable[[], None], watch: Callable[[], bool]
    ) -> None:
        super().__init__(config)
        self.drain, self.watch = drain, watch

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; True stops the server."""
        if self.watch():
            self.should_exit = True
        return await super().on_tick(counter)

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
