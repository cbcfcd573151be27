"""Request limits: access checks, admission control, and the size of bodies.

Admission reserves queue slots and bytes before a body is read, so the memory held by requests is
bounded however many arrive; rejected requests get Retry-After immediately. All of it runs on the
event loop.

A body is one encoded image, or a form (multipart/form-data, RFC 7578) whose `pictures` fields are
files. Nothing in a request is ever used as a file name.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from typing import NamedTuple

from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from vitrail.serving.config import MAX_HEAVY, MAX_MEMORY, ServerConfig, is_ip_address

PUBLIC_PATHS = frozenset(("/", "/docs", "/openapi.json", "/health", "/ready"))  # need no token
PROBE_PATHS = frozenset(("/health", "/ready", "/metrics"))  # answered until the end
FORM_FIELD = "pictures"
FORM_TYPE = "multipart/form-data"
LARGE_FORM = 2**18  # bytes of a form that is parsed in a thread
MAX_NAME_LENGTH = 200
MAX_PART_HEADER = 4096  # bytes
MAX_OTHER_FIELDS = 16
USAGE = (
    f"send the bytes of one image as image/jpeg or another type, or a form with the field "
    f"{FORM_FIELD!r} (curl -F {FORM_FIELD}=@cat.jpg)"
)
RECORD = "vitrail.record"  # key of the record in a request's scope
DRAIN_SECONDS = 2.0  # for a client to see an error while it is still sending
MAX_UNREAD = 2**18  # bytes of a body that may stay unread without closing the connection
DEFAULT_THROUGHPUT = 50.0  # images per second, until it is measured
MAX_RETRY_AFTER = 60  # seconds


@dataclass(slots=True)
class RequestRecord:
    """A request's log entry, filled in while it is processed, and the memory it has reserved."""

    id: str
    method: str
    headers: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    route: str = "other"
    status: int = 0
    images: int = 0
    batch: int = 0  # size of the batch that its images were part of
    bytes: int = 0  # of its body
    body_complete: bool = False
    reason: str = ""  # why it was rejected
    start: float = field(default_factory=time.perf_counter)
    reserved_images: int = 0
    reserved_bytes: int = 0
    reserved_heavy: int = 0


# Errors


class ApiError(Exception):
    """An error response: a status and one line. `reason` is its label in the metrics."""

    def __init__(
        self, status: int, text: str, *, reason: str = "other", headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(text)
        self.status, self.text, self.reason, self.headers = status, text, reason, headers


def shutting_down() -> ApiError:
    text = "the server is shutting down; try again in a moment"
    return ApiError(503, text, reason="stopping", headers={"Retry-After": "5"})


class ErrorResponse(JSONResponse):
    """`{"error": "one line"}`.

    If a large body is still arriving, it is discarded for a while, so that the client reads the
    response instead of a broken connection; then the connection is closed.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__({"error": " ".join(error.text.split())}, error.status, error.headers)
        self.reason = error.reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[RECORD]
        record.reason = self.reason
        length = record.headers.get(b"content-length")
        if length is None:
            large = b"transfer-encoding" in record.headers
        else:
            large = not length.isdigit() or int(length) > MAX_UNREAD
        if record.body_complete or not large:
            await super().__call__(scope, receive, send)
            return
        raw_headers = [*self.raw_headers, (b"connection", b"close")]
        status = self.status_code
        await send({"type": "http.response.start", "status": status, "headers": raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while (await receive()).get("more_body"):
                    continue
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})


# Access


def check_request(
    scope: Scope,
    headers: Mapping[bytes, bytes],
    config: ServerConfig,
    admission: "AdmissionController",
    draining: bool,
) -> None:
    """Reject a request based on its headers alone."""
    path = scope["path"]
    # Without port. A client that sends no Host header is no browser.
    host = headers.get(b"host", b"localhost").decode("latin-1").lower()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    # With DNS rebinding, a foreign page resolves its own name to this machine and counts as
    # same-origin. It cannot know the token, so the check is for servers without one.
    known = config.token or host in config.host_names
    if not known and (config.is_loopback or not is_ip_address(host)):
        text = "Host header not accepted; use localhost, or start with --allow-host NAME"
        raise ApiError(403, text, reason="host")
    if draining and path not in PROBE_PATHS:
        raise shutting_down()
    if config.token and path not in PUBLIC_PATHS:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        expected = config.token.encode()
        if scheme.lower() != b"bearer" or not compare_digest(token.strip(), expected):
            text = "this server requires a token; send the header Authorization: Bearer TOKEN"
            raise ApiError(401, text, reason="token", headers={"WWW-Authenticate": "Bearer"})
    if scope["method"] == "POST":
        origin = headers.get(b"origin")
        if origin is None:  # browsers may omit it but send this instead
            cross_origin = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        else:
            same_host = origin.rpartition(b"/")[2] == headers.get(b"host")
            cross_origin = not same_host and origin.decode("latin-1") not in config.allow_origin
        if cross_origin and "*" not in config.allow_origin:
            text = "cross-origin request rejected; allow the site with --allow-origin"
            raise ApiError(403, text, reason="origin")
        if admission.images >= config.queue:
            raise admission.overloaded("queue")


# Admission


class AdmissionController:
    """Reserves queue slots and bytes for requests; `throughput` is in images per second."""

    def __init__(self, config: ServerConfig, throughput: Callable[[], float]) -> None:
        self.config, self.throughput = config, throughput
        self.images = self.heavy = self.bytes = 0  # of all admitted requests

    def reserve(self, record: RequestRecord, size: int, *, heavy: bool = False) -> None:
        """Admit a request of `size` bytes; it counts as one image until its body is parsed."""
        if heavy and self.heavy >= MAX_HEAVY:
            raise self.overloaded("heavy")
        if self.bytes + size > MAX_MEMORY:
            raise self.overloaded("memory")
        self.reserve_images(record, 1)
        self.bytes += size
        self.heavy += heavy
        record.reserved_bytes, record.reserved_heavy = size, int(heavy)

    def reserve_images(self, record: RequestRecord, count: int) -> None:
        """Reserve a slot for each image of a request."""
        more = count - record.reserved_images
        if self.images + more > self.config.queue:
            raise self.overloaded("queue")
        self.images += more
        record.reserved_images = count

    def release(self, record: RequestRecord) -> None:
        self.images -= record.reserved_images
        self.bytes -= record.reserved_bytes
        self.heavy -= record.reserved_heavy
        record.reserved_images = record.reserved_bytes = record.reserved_heavy = 0

    def overloaded(self, reason: str) -> ApiError:
        seconds = math.ceil(self.images / (self.throughput() or DEFAULT_THROUGHPUT))
        seconds = min(MAX_RETRY_AFTER, max(1, seconds))
        text = f"the server is overloaded; try again in {seconds} s"
        return ApiError(503, text, reason=reason, headers={"Retry-After": str(seconds)})


# Bodies


class Upload(NamedTuple):
    """One encoded image of a request."""

    name: str  # the client's file name, never used as one here
    data: bytes


async def read_uploads(
    request: Request, admission: AdmissionController, *, heavy: bool = False
) -> list[Upload]:
    """Admit a request and return its images; the middleware releases the reservation.

    Unsupported types and large bodies are rejected before they are read.
    """
    config = admission.config
    record: RequestRecord = request.scope[RECORD]
    content_type = record.headers.get(b"content-type", b"").decode("latin-1")
    kind = content_type.partition(";")[0].strip().lower()
    if record.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "compressed bodies are not supported; send it as is", reason="type")
    if kind not in ("", FORM_TYPE, "application/octet-stream") and not kind.startswith("image/"):
        raise ApiError(415, f"unsupported type {kind[:60]}; {USAGE}", reason="type")
    text = f"the body exceeds {config.max_body:,} bytes; send smaller images, or fewer at once"
    too_large = partial(ApiError, 413, text, reason="size")
    length = record.headers.get(b"content-length", b"")
    size = int(length) if length.isdigit() else config.max_body  # chunked
    if size > config.max_body:
        raise too_large()
    admission.reserve(record, size, heavy=heavy)
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(config.timeout):
            while not record.body_complete:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunks.append(message.get("body", b""))
                record.bytes += len(chunks[-1])
                record.body_complete = not message.get("more_body", False)
                if record.bytes > config.max_body:
                    raise too_large()
    except TimeoutError:
        text = f"the body did not arrive within {config.timeout:g} s"
        raise ApiError(408, text, reason="slow", headers={"Connection": "close"}) from None
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if kind != FORM_TYPE:
        uploads = [Upload("picture", body)] if body else []
    elif len(body) > LARGE_FORM:
        uploads = await asyncio.to_thread(parse_form, content_type, body, config.max_images)
    else:
        uploads = parse_form(content_type, body, config.max_images)
    if not uploads:
        raise ApiError(400, f"the request contains no image; {USAGE}", reason="empty")
    admission.reserve_images(record, len(uploads))
    record.images = len(uploads)
    return uploads


def parse_form(content_type: str, body: bytes, max_images: int) -> list[Upload]:
    """Return the files of the field `pictures`; other fields are ignored."""
    invalid = partial(ApiError, 400, reason="form")
    boundary = parse_options_header(content_type[:MAX_PART_HEADER])[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= 200:
        raise invalid("invalid multipart form: no boundary in the Content-Type header")
    uploads, others, delimiter = [], 0, b"\r\n--" + boundary
    form = b"\r\n" + body
    position = form.find(delimiter)
    while position >= 0:
        position += len(delimiter)
        if form.startswith(b"--", position):
            return uploads
        header_end = form.find(b"\r\n\r\n", position, position + MAX_PART_HEADER)
        if not form.startswith(b"\r\n", position) or header_end < 0:
            raise invalid("invalid multipart form: a part has no headers")
        end = form.find(delimiter, header_end + 4)
        if end < 0:
            break
        for line in form[position:header_end].split(b"\r\n"):
            key, _, value = line.partition(b":")
            if key.strip().lower() == b"content-disposition":
                options = parse_options_header(value.strip())[1]
                break
        else:
            raise invalid("invalid multipart form: a part has no Content-Disposition header")
        if options.get(b"name", b"").decode(errors="replace") == FORM_FIELD:
            if len(uploads) == max_images:
                text = f"more than {max_images} images; send fewer at once"
                raise ApiError(413, text, reason="size")
            name = options.get(b"filename", b"").decode(errors="replace")[:MAX_NAME_LENGTH]
            data = form[header_end + 4 : end]
            uploads.append(Upload(name or f"picture {len(uploads) + 1}", data))
        elif (others := others + 1) > MAX_OTHER_FIELDS:
            raise invalid(f"invalid multipart form: more than {MAX_OTHER_FIELDS} other fields")
        position = end
    raise invalid("invalid multipart form: it is truncated")
