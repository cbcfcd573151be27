"""uvicorn with limits and a graceful shutdown.

Adds what uvicorn lacks: time and size limits on request heads and trailers, limits on pipelined
requests and connections, protocol errors as JSON, and a drain that loses no admitted request.
"""

import asyncio
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vitrail.serving.metrics import log_event

if TYPE_CHECKING:
    from vitrail.serving.app import AppState

MAX_CONNECTIONS = 1000  # below the usual limit of open files, 1024
MAX_HEAD = 64 * 2**10  # bytes of request line and headers, or of trailers
MAX_PIPELINED = 16  # requests that wait for earlier ones on the same connection
CHUNK = 16 * 2**10  # bytes parsed at once; the parser cannot be interrupted
BODY_HEADERS = {b"content-length", b"transfer-encoding"}
HEAD_SECONDS = 10.0  # for the head to arrive
SEND_SECONDS = 30.0  # for a client to read a response that exceeds the socket buffer
LAME_DUCK_SECONDS = 0.3  # in which new requests get 503 before the socket closes


class LimitedProtocol(HttpToolsProtocol):
    """One connection; closed if the request head is too slow or too long, or the response is not
    read."""

    head_timer: asyncio.TimerHandle | None = None
    abort_timer: asyncio.TimerHandle | None = None
    head_size: int = 0  # bytes since the last body byte: head, chunk sizes, trailers
    in_message: bool = False  # between the headers of a request and its end
    saturated: bool = False  # no more requests are parsed on this connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self.reject(503, "too many connections; try again in 5 s", "retry-after: 5\r\n")
        else:
            self.expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_head_timer()
        self.stop_abort_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK):
            if self.transport.is_closing() or self.saturated:
                return
            part = data[start : start + CHUNK]
            self.head_size += len(part)
            super().data_received(part)
            if self.head_size > MAX_HEAD:
                self.reject(431, f"the headers exceed {MAX_HEAD:,} bytes")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.saturated = True
            raise BufferError("too many pipelined requests")  # ends up in send_400_response
        super().on_message_begin()
        self.expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drop trailers: they must not be merged into the headers (RFC 9110, section 6.5.1)."""
        if not self.in_message:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.stop_head_timer()
        assert self.parser is not None
        upgrade = self.parser.should_upgrade()
        if upgrade and not BODY_HEADERS.isdisjoint(name for name, _ in self.headers):
            self.reject(400, "the header Upgrade is not supported")
            raise BufferError("the parser skips the body, and would take it for a request")
        super().on_headers_complete()
        self.in_message = True
        if upgrade:  # it is ignored
            self.saturated, self.cycle.keep_alive = True, False

    def on_body(self, body: bytes) -> None:
        self.head_size = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.start_abort_timer()
        elif not self.flow.write_paused:
            self.stop_abort_timer()
        if self.cycle.more_body:  # rejected before it was read: the rest must come soon
            self.expect_head()

    def on_message_complete(self) -> None:
        self.in_message = False
        super().on_message_complete()
        if self.cycle.response_complete:
            self.expect_head()

    def send_400_response(self, msg: str) -> None:
        if self.saturated:  # waiting requests are answered, then the connection is closed
            self.cycle.keep_alive = False
        elif not self.transport.is_closing():
            self.reject(400, "not a valid HTTP request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_abort_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        sending = self.cycle.response_started and not self.cycle.response_complete
        if not (sending or self.pipeline or self.transport.is_closing()):
            self.stop_abort_timer()

    def expect_head(self) -> None:
        """Limit the time and size of the next head."""
        self.stop_head_timer()
        self.head_timer = self.loop.call_later(HEAD_SECONDS, self.close)
        self.head_size = 0

    def stop_head_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def start_abort_timer(self) -> None:
        """Abort after a while: closing waits indefinitely for a client that does not read."""
        if self.abort_timer is None:
            self.abort_timer = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def stop_abort_timer(self) -> None:
        if self.abort_timer is not None:
            self.abort_timer.cancel()
            self.abort_timer = None

    def close(self) -> None:
        """Close after pending data is sent, or abort if that takes too long."""
        self.transport.close()
        self.start_abort_timer()

    timeout_keep_alive_handler = close  # called by uvicorn

    def reject(self, status: int, text: str, headers: str = "") -> None:
        """Answer a request that was not parsed, and close."""
        body = f'{{"error":"{text}"}}'
        self.stop_head_timer()
        if self.in_message:
            answerable = not (self.cycle.response_started or self.pipeline)
        else:
            answerable = self.cycle is None or self.cycle.response_complete
        if answerable:  # else the client would take it for the response to another request
            self.transport.write(
                f"HTTP/1.1 {status} Rejected\r\ncontent-type: application/json\r\n{headers}"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
            )
        self.close()


class DrainingServer(Server):
    """On a signal it rejects new requests, finishes the admitted ones, and exits with status 0."""

    def __init__(self, config: Config, state: "AppState") -> None:
        super().__init__(config)
        self.state = state

    def run(self, sockets: Any = None) -> None:
        is_main = threading.current_thread() is threading.main_thread()  # others set no handlers
        if is_main and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not with nohup
            signal.signal(signal.SIGHUP, self.handle_exit)
        super().run(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Run the watchdog ten times per second; True stops the server."""
        if self.state.check_threads():
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replace uvicorn's handler, which re-raises the signal after the shutdown."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = self.state.draining = True

    async def shutdown(self, sockets: Any = None) -> None:
        self.state.draining = True
        if (format := self.state.config.log) != "off":
            text = f"shutting down; {self.state.in_flight} requests in progress"
            log_event(text, format, level="info")
        if not self.force_exit:
            await asyncio.sleep(LAME_DUCK_SECONDS)
        await super().shutdown(sockets)
