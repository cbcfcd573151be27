"""A low-overhead HTTP client: prebuilt requests over keep-alive connections."""

import asyncio
import io
import random
import socket
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field

import uvloop
from PIL import Image

BOUNDARY = "boundary-that-no-image-contains"
TIMEOUT = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Reply:
    """A response; status 0 if the connection broke."""

    status: int
    head: bytes
    body: bytes
    seconds: float
    sent: float  # when, on the clock of `time.perf_counter`
    request: bytes = b""


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self):
        self.buffer, self.waiting, self.closed, self.transport = bytearray(), None, False, None

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, exc):
        self.closed = True
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result((0, b"", b""))

    def data_received(self, data):
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.buffer[:end])
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if len(self.buffer) < end + 4 + length:
            return
        body = bytes(self.buffer[end + 4 : end + 4 + length])
        del self.buffer[: end + 4 + length]
        if b"connection: close" in head.lower():
            self.closed = True
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result((int(head[9:12]), head, body))

    async def send(self, request):
        start = time.perf_counter()
        self.waiting = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        async with asyncio.timeout(TIMEOUT):
            response = await self.waiting
        return Reply(*response, time.perf_counter() - start, start, request)


OPENED: ContextVar[list[Connection]] = ContextVar("opened")


async def connect(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    link = (await loop.create_connection(Connection, "127.0.0.1", port))[1]
    OPENED.get().append(link)
    return link


def run(scenario: Coroutine):
    """Run a coroutine, then close all connections it has opened."""

    async def run_and_close():
        OPENED.set([])
        try:
            return await scenario
        finally:
            for link in OPENED.get():
                link.transport.close()
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_and_close())


@dataclass
class Results:
    """Replies of a load, and how long it took."""

    replies: list[Reply] = field(default_factory=list)
    seconds: float = 0.0
    rejected: int = 0  # connections that could not be made

    def of(self, *statuses: int) -> list[Reply]:
        return [reply for reply in self.replies if reply.status in statuses]

    def counts(self) -> dict[int, int]:
        return dict(sorted(Counter(reply.status for reply in self.replies).items()))


def milliseconds(replies: Sequence[Reply], share: float) -> float:
    """Within how many milliseconds such a share of the replies came."""
    ordered = sorted(reply.seconds for reply in replies)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def closed_loop(
    port: int,
    requests: Iterable[bytes],
    *,
    clients: int,
    seconds: float = 3600.0,
    leave: bool = False,
) -> Results:
    """Let each client send a request, wait for the response, and repeat while requests last.

    With `leave`, a client stops at a 503.
    """
    results, source, until = Results(), iter(requests), time.perf_counter() + seconds

    async def client():
        connection = None
        for request in source:
            if time.perf_counter() > until:
                return
            try:
                if connection is None or connection.closed:
                    connection = await connect(port)
            except OSError:
                results.rejected += 1
                return
            reply = await connection.send(request)
            results.replies.append(reply)
            if leave and reply.status in (0, 503):
                return

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    results.seconds = time.perf_counter() - start
    return results


def exchange(port: int, *items: bytes, replies: int = 0, wait: float | None = None) -> bytes:
    """Everything received for raw bytes: until the server closes, or sent so many responses, or for
    so many seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait or TIMEOUT) as link:
        with suppress(ConnectionError):
            for piece in items:
                link.sendall(piece)
        reply = b""
        try:
            while data := link.recv(65536):
                reply += data
                if replies and reply.count(b"HTTP/1.1 ") == replies and reply.endswith(b"}"):
                    break
        except TimeoutError:
            if wait is None:
                raise
        except ConnectionResetError:
            reply += b"RESET"
        return reply


def raw(path: str, data: bytes, kind: str = "image/jpeg") -> bytes:
    """A request with one image as its body."""
    return head(path, len(data), kind) + data


def form(path: str, pictures: Sequence[bytes], field: str = "pictures") -> bytes:
    body = form_body(pictures, field)
    return head(path, len(body), f"multipart/form-data; boundary={BOUNDARY}") + body


def form_body(pictures: Sequence[bytes], field: str = "pictures") -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"; filename="{n}.jpg"\r\n'
        f"Content-Type: image/jpeg\r\n\r\n".encode()
        + data
        + b"\r\n"
        for n, data in enumerate(pictures)
    ]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def head(path: str, length: int, kind: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def malformed(requests: list[bytes], draw: random.Random) -> Iterator[bytes]:
    buffer = io.BytesIO()
    Image.new("1", (9000, 9000)).save(buffer, "PNG")  # 11 kB that decode to 81 megapixels
    bomb = buffer.getvalue()
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    while True:
        body = draw.choice(requests).partition(b"\r\n\r\n")[2]
        cut = body[: draw.randrange(1, len(body))]
        noise = draw.randbytes(draw.randrange(1, 4000))
        place = draw.randrange(len(body))
        dented = body[:place] + noise[:8] + body[place + 8 :]
        yield draw.choice(
            (
                raw("/predict", noise),
                raw("/predict", cut),
                raw("/predict", dented),
                raw("/predict", bomb),
                raw("/predict", b""),
                raw("/predict", body, "application/json"),
                raw("/predict", body, "text/plain; charset=" + "x" * 500),
                raw("/predict?top=-1", body),
                raw("/predict?threshold=many&model=%00", body),
                raw("/explain?method=none", body),
                raw("/" + noise.hex()[:50], body),
                form("/predict", [noise, cut, bomb, body]),
                form("/predict", [body] * 65),
                form("/predict", [body], field="nothing"),
                head("/predict", len(cut), kind) + cut,
                head("/predict", len(noise), "multipart/form-data") + noise,
                head("/features", len(dented), kind) + dented,
            )
        )
